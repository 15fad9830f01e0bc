/*
 * What a driver is: a table of operations that enqueue, record, wait, copy and allocate. No policy.
 *
 * Every operation takes the device whose memory, stream or event it touches; the driver makes that device current for
 * the call where the call needs it, and leaves the caller's current device as it was. Each fallible operation returns
 * XD_OK or a negative status with *err filled (status, the native code, operation, sentence). Handles come from the same
 * driver. Operations may be called from any thread.
 */
#ifndef XDEV_DRIVER_H
#define XDEV_DRIVER_H

#include "xdev.h"

struct xd_driver {
    const char *name; /* "sim", "cuda", "hip" */

    /* Frees the driver; every handle has been destroyed. */
    void (*close)(xd_driver *driver);

    /* -- devices -- */
    int (*device_count)(xd_driver *driver, int *count, xd_error *err); /* 0 devices: XD_NO_DEVICE, with the reason */
    int (*device_info)(xd_driver *driver, int device, xd_device_info *out, xd_error *err);
    int (*memory_info)(xd_driver *driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err);
    /* Can `device` reach the memory of `peer`? As the vendor reports it. */
    int (*peer_capable)(xd_driver *driver, int device, int peer, int *capable, xd_error *err);
    /* "already enabled" is success and leaves no error behind; too many peers: success with *enabled = 0. */
    int (*peer_enable)(xd_driver *driver, int device, int peer, int *enabled, xd_error *err);

    /* -- memory -- */
    int (*device_alloc)(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err); /* bytes > 0 */
    int (*device_free)(xd_driver *driver, int device, uint64_t address, xd_error *err);
    int (*host_alloc)(xd_driver *driver, uint64_t bytes, void **address, xd_error *err); /* portable, page-locked */
    int (*host_free)(xd_driver *driver, void *address, xd_error *err);

    /* -- streams -- */
    int (*stream_create)(xd_driver *driver, int device, void **stream, xd_error *err); /* non-blocking */
    int (*stream_destroy)(xd_driver *driver, int device, void *stream, xd_error *err); /* queued work still runs */
    int (*stream_query)(xd_driver *driver, int device, void *stream, int *idle, xd_error *err);
    /* The event may be of any device; never recorded: no effect. Must not block the host. */
    int (*stream_wait)(xd_driver *driver, int device, void *stream, void *event, xd_error *err);

    /* -- events -- */
    int (*event_create)(xd_driver *driver, int device, int timing, void **event, xd_error *err);
    int (*event_destroy)(xd_driver *driver, int device, void *event, xd_error *err); /* pending waits stay valid */
    int (*event_record)(xd_driver *driver, int device, void *event, void *stream, xd_error *err); /* both of `device` */
    int (*event_query)(xd_driver *driver, int device, void *event, int *done, xd_error *err); /* pending is no error */
    int (*event_elapsed)(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err);

    /* -- work -- */
    /* `device` is the stream's. Host memory is page-locked, or from pageable_alloc. Between two devices: the vendor's
       peer copy, which is asked for only on pairs with peer access. height 1 is one-dimensional; width and height are
       above 0. */
    int (*copy)(xd_driver *driver, int device, void *stream, const xd_transfer *transfer, xd_error *err);
    int (*fill)(xd_driver *driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err);
    /* A host function in stream order. The driver calls kernel->drop exactly once, also when this call fails. */
    int (*launch)(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err);

    /* -- optional: NULL means the default named here -- */
    /* Waits for the event at most timeout ns. Default: event_query, spinning first, then sleeping. */
    int (*event_wait)(xd_driver *driver, int device, void *event, uint64_t timeout, int *done, xd_error *err);
    /* Host memory that is not page-locked, for copies that the host waits for; host_free frees it. Default: the C
       library's. */
    int (*pageable_alloc)(xd_driver *driver, uint64_t bytes, void **address, xd_error *err);
    /* ns. Default: CLOCK_MONOTONIC. */
    uint64_t (*clock)(xd_driver *driver);
    /* The host reads or writes these bytes now. Default: nothing. */
    int (*host_access)(xd_driver *driver, const void *address, uint64_t bytes, int write, xd_error *err);
    /* on: the calling thread is about to make many calls for this device, and keeps it current until the same call with
       on = 0 puts back what was before. Default: nothing. */
    int (*settle)(xd_driver *driver, int device, int on, xd_error *err);
    /* Calls run(arg), which is the caller's, with the device current. Default: calls it. */
    int (*call)(xd_driver *driver, int device, void (*run)(void *arg), void *arg, xd_error *err);

    /* -- graphs, optional: all or none; NULL means XD_UNSUPPORTED -- */
    /* What the calling thread queues on the stream is recorded from now on. Calls of other threads are not affected. */
    int (*capture_begin)(xd_driver *driver, int device, void *stream, xd_error *err);
    /* Ends the capture, also when it fails. */
    int (*capture_end)(xd_driver *driver, int device, void *stream, void **graph, xd_error *err);
    int (*graph_launch)(xd_driver *driver, int device, void *graph, void *stream, xd_error *err);
    int (*graph_destroy)(xd_driver *driver, int device, void *graph, xd_error *err); /* no launch is still to run */
};

/* ---- the drivers ---- */

typedef struct xd_symbol { /* an entry point of the vendor's library, resolved in Python */
    const char *name;      /* "cuMemAlloc": the base name, without a version suffix */
    void *address;
} xd_symbol;

/* Every symbol that the driver lists must be there, unless it is marked optional; a missing one is XD_UNSUPPORTED and
   is named. */
int xd_cuda_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err);
int xd_hip_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err);
/* The names to resolve, NULL-terminated; for CUDA with the version to ask of cuGetProcAddress. */
typedef struct xd_symbol_request { const char *name; int version; int optional; } xd_symbol_request;
const xd_symbol_request *xd_cuda_symbols(void);
const xd_symbol_request *xd_hip_symbols(void);

/* Wraps any driver and takes it over. Calls are counted from 1 once armed; call `at` fails with `status`, once or from
   then on (a sticky device). */
int xd_fault_create(xd_driver **out, xd_driver *inner, xd_error *err);
void xd_fault_arm(xd_driver *fault, uint64_t at, int sticky, int status); /* at 0: disarm; resets the count */
uint64_t xd_fault_calls(const xd_driver *fault);                        /* since armed */

#endif
