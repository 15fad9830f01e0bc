/* Pieces of files, cut into what fits a tile. */
#ifndef XDEV_WORK_H
#define XDEV_WORK_H

#include "source.h"

typedef struct xd_work xd_work;

/* What one tile takes: pieces that are neighbours in one file and on one device. The tile is an image of the device. */
typedef struct xd_job {
    xd_source *source;
    size_t row; /* of the first piece */
    int device;
    uint64_t address;
    uint64_t payload; /* bytes that belong to pieces */
    xd_extent extent;
} xd_job;

/* room: bytes of a tile. */
int xd_work_open(xd_work **out, int devices, const xd_piece *pieces, size_t count, uint64_t room, xd_error *err);
void xd_work_close(xd_work **work);
uint64_t xd_work_total(const xd_work *work, int device); /* bytes */
/* Cuts off a worker's next job. *device is the one that it served last, -1 at first, and becomes the one that it serves
   now. Returns 0 when there is no job. Under the caller's lock, as xd_work_leave. */
int xd_work_take(xd_work *work, int *device, xd_job *job);
/* A worker ends before there is no job any more. */
void xd_work_leave(xd_work *work, int device);
xd_source *xd_work_source(const xd_work *work, int fd); /* NULL if there is none */

#endif
