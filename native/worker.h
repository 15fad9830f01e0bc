/* What reader.c and worker.c share: the reader, and what its workers do. */
#ifndef XDEV_WORKER_H
#define XDEV_WORKER_H

#include "internal.h"

#include "marks.h"
#include "work.h"

enum {
    XD_READER_LOOK = 20000000, /* ns between two looks at the stop flag */
    XD_READER_STREAMS = 16     /* of a device, at most */
};

/* One device's side of a reader. */
typedef struct xd_lane {
    xd_stream *streams[XD_READER_STREAMS]; /* NULL if there is no work */
    _Atomic uint64_t done, direct; /* bytes handed over, of them read directly */
    _Atomic uint64_t first, last;  /* when the first and the last of them were */
} xd_lane;

struct xd_reader {
    xd_runtime *runtime;
    const xd_io *calls;
    xd_ring *ring; /* NULL if there is nothing to read */
    unsigned tiles_each, streams; /* that a worker keeps for itself; that a device has */
    unsigned together;            /* workers that are run at once */
    atomic_uint joined;           /* workers so far */
    int sync_uploads, io, verify;
    _Atomic uint64_t reading, waiting; /* ns of all workers in reads, and for tiles and uploads */

    pthread_mutex_t lock;
    pthread_cond_t left; /* a worker has left */
    unsigned workers;
    atomic_int stop; /* the status that the workers end with */
    xd_error first;  /* the error behind it */
    _Atomic int64_t failed;

    xd_work *work;
    xd_marks marks; /* under verify, of every copy so far */
    xd_lane lanes[]; /* one a device */
};

/* A worker reads all that it gets of the queue, or (back) reads back what it gets of the marks. *row: what was being read
   when it failed, -1: nothing. */
int xd_worker_run(xd_reader *reader, int back, int64_t *row, xd_error *err);

#endif
