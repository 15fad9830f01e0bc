/*
 * What the drivers of real devices share: filling a table of entry points, and host functions as kernels.
 */
#ifndef XDEV_VENDOR_H
#define XDEV_VENDOR_H

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"

/* Fills `table`, a struct of function pointers in the order of `requests`. A missing one is XD_UNSUPPORTED, named. */
int xd_vendor_bind(void *table, const xd_symbol_request *requests, const xd_symbol *symbols, size_t count,
                   const char *vendor, xd_error *err);

/* Host functions given to the vendor and not yet run. A vendor may never call one (its device has failed), so those left
   are dropped when the driver closes. */
typedef struct xd_launch xd_launch;
typedef struct xd_launches {
    pthread_mutex_t lock;
    xd_launch *first;
} xd_launches;

/* Takes the kernel over: drop is called once, whatever happens; on failure before this returns. `failed` is set when
   run reports a fault. */
int xd_launch_begin(xd_launch **out, xd_launches *launches, const xd_kernel *kernel, atomic_int *failed, xd_error *err);
void xd_launch_run(void *launch);        /* the vendor calls this in stream order */
void xd_launch_cancel(xd_launch *launch); /* the vendor refused it */
int xd_launch_pending(xd_launches *launches);
void xd_launch_drop_all(xd_launches *launches);

#endif
