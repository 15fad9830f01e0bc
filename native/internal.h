/*
 * What the files of this folder share: the layout of runtime, stream and event, and a handful of functions.
 * Graphs, rings, links, throttles and readers are private to their files.
 */
#ifndef XDEV_INTERNAL_H
#define XDEV_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "driver.h"

/* Closing waits this long, on the runtime's clock, for work that may never end. */
#define XD_PATIENCE UINT64_C(30000000000)

enum {
    XD_LIVE_STREAMS,
    XD_LIVE_EVENTS,
    XD_LIVE_GRAPHS,
    XD_LIVE_BUFFERS,
    XD_LIVE_RINGS,
    XD_LIVE_LINKS,
    XD_LIVE_THROTTLES,
    XD_LIVE_READERS,
    XD_LIVE_KINDS
};

struct xd_runtime {
    xd_driver *driver;
    int devices;
    pid_t pid;
    const volatile char *mark; /* a page that reads 1 here and 0 in a forked child; NULL where the kernel has none */
    atomic_int force_sync;
    atomic_llong live[XD_LIVE_KINDS];
    atomic_llong device_bytes, pinned_bytes;
    pthread_mutex_t spare_lock;
    void *spare; /* a page-locked block that buffer.c keeps for the next buffer of this size */
    uint64_t spare_bytes;
};

struct xd_stream {
    xd_runtime *runtime;
    int device;
    int adopted; /* the handle is somebody else's */
    void *handle;
};

/* The vendor's event of a device is made at the first record there and kept until close, because another thread may
   still wait for it when the event moves to the next device. */
struct xd_event {
    xd_runtime *runtime;
    int timing;
    atomic_int device; /* of the last record; XD_HOST: none yet */
    _Atomic(void *) handles[]; /* one a device */
};

/* ---- runtime.c ---- */

/* Is this the process that opened the runtime? */
int xd_runtime_owned(const xd_runtime *runtime);
/* The first line of every function that would call the driver: XD_OK, or XD_FORKED. */
int xd_runtime_enter(const xd_runtime *runtime, const char *operation, xd_error *err);
int xd_runtime_check_device(const xd_runtime *runtime, int device, const char *operation, xd_error *err);
/* All arguments of one call come from one runtime. */
int xd_runtime_check_same(const xd_runtime *a, const xd_runtime *b, const char *operation, xd_error *err);
void xd_runtime_count(xd_runtime *runtime, int kind, int change);

/* Zeroed memory, or NULL with XD_NO_HOST_MEMORY in *err. */
void *xd_new(size_t bytes, const char *operation, xd_error *err);

uint64_t xd_monotonic(void);                        /* ns of the host's clock */
uint64_t xd_later(uint64_t now, uint64_t ns);       /* now + ns, or XD_FOREVER */
uint64_t xd_remaining(uint64_t now, uint64_t when); /* ns from now until when; XD_FOREVER stays, the past is 0 */

/* Conditions on the host's clock; when is a time of xd_monotonic. Returns 0 when that time has passed. */
void xd_condition_open(pthread_cond_t *condition);
int xd_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t when);

/* ---- stream.c ---- */

/* xd_event_wait for many threads at once with time to spare: none keeps the driver busy with questions. */
int xd_event_wait_napping(xd_event *event, uint64_t timeout, int *done, xd_error *err);

/* Refuses what no copy may be, and gives the rest one form: nothing has width and height 0, rows without gaps are one
   row, a single row has its width as pitch. */
int xd_stream_check_transfer(xd_transfer *transfer, xd_error *err);
/* Enqueues a checked transfer, or a part of one. */
int xd_stream_transfer(xd_stream *stream, const xd_transfer *transfer, xd_error *err);

/* ---- ring.c ---- */

const xd_runtime *xd_ring_runtime(const xd_ring *ring);

/* ---- buffer.c ---- */

/* Gives back the page-locked block that is kept; returns whether there was one. */
int xd_buffer_drop_spare(xd_runtime *runtime);
/* Frees the object and leaves the memory to the process: something that never ended may still write there. */
void xd_buffer_abandon(xd_buffer **buffer);
/* Host memory at a page's begin that is not page-locked. */
int xd_buffer_open_pageable(xd_buffer **out, xd_runtime *runtime, uint64_t bytes, xd_error *err);

#endif
