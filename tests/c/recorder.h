/*
 * A driver that does everything at once and writes down the calls that order or move something: one line each, with the
 * names that the test gave. It refuses what a strict vendor refuses: unknown handles, an event and a stream of
 * different devices. Handles are heap blocks, so an address sanitizer sees what was not destroyed.
 */
#ifndef RECORDER_H
#define RECORDER_H

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"

/* Of streams, events and allocations in the order of their making; NULL-terminated, may be NULL. */
typedef struct recorder_names {
    const char *const *streams, *const *events, *const *memory;
} recorder_names;

typedef struct recorder {
    xd_driver table;
    int devices;
    int closed;
    int live; /* streams, events and allocations */
    recorder_names names;
    int peer_capable, peer_enabled; /* the answers */
    int pending;      /* this many event queries answer "not yet" */
    int query_status; /* event queries fail with it */
    int queries;
    char log[65536];
    struct recorder_block *blocks;
    int made[3];
    pthread_mutex_t lock;
} recorder;

/* The recorder stays the test's: closing the driver only notes it. */
void recorder_open(recorder *rec, int devices);
/* Nothing is left and the driver was closed. */
void recorder_close(recorder *rec);
void recorder_clear(recorder *rec);
/* Lines of the log that begin like this. */
int recorder_count(const recorder *rec, const char *start);
/* Destroys what is left. */
void recorder_forget(recorder *rec);

/* A link from device 0 over a recorder, and what a copy needs: memory at both ends, a stream of each device, and the
   four events, of which `ready` is recorded on device 0 and `space` on the destination. `order` has all of them. */
typedef struct recorded_link {
    recorder rec;
    xd_driver *fault; /* between the runtime and the recorder, never armed; NULL unless asked for */
    xd_runtime *runtime;
    xd_stream *streams[2];
    xd_link *link;
    xd_buffer *src, *dst;
    xd_event *ready, *space, *released, *arrived;
    xd_copy order;
} recorded_link;

void recorded_link_open(recorded_link *on, const recorder_names *names, int dst_device, const xd_link_options *options,
                        uint64_t bytes, int with_faults);
/* Nothing is left. */
void recorded_link_close(recorded_link *on);

#endif
