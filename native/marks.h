/* Checksums of what was brought to the devices, for reading it back. */
#ifndef XDEV_MARKS_H
#define XDEV_MARKS_H

#include <pthread.h>

#include "xdev.h"

typedef struct xd_mark {
    int device;
    uint64_t address, bytes, hash;
} xd_mark;

typedef struct xd_marks { /* all zero: none yet */
    xd_mark *marks;
    size_t count, room, taken;
} xd_marks;

/* Notes what a copy from host memory is about to bring, while the processor's cache still has it. The hash is made
   outside of the lock. */
int xd_marks_add(xd_marks *marks, pthread_mutex_t *lock, const xd_transfer *transfer, xd_error *err);
/* Each mark once. Returns 0 when there is none left. Under the caller's lock. */
int xd_marks_take(xd_marks *marks, xd_mark *out);
void xd_marks_close(xd_marks *marks);

#endif
