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

typedef struct recorder {
    xd_driver table;
    int devices;
    int closed;
    int live; /* streams, events and allocations */
    /* Names of streams, events and allocations in the order of their making; NULL-terminated, may be NULL. */
    const char *const *streams, *const *events, *const *memory;
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
/* Destroys what is left. */
void recorder_forget(recorder *rec);

#endif
