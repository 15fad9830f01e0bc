/* A driver that wraps another one and makes a chosen call fail. */
#include "driver.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

typedef struct fault {
    xd_driver table; /* first: an xd_driver * of ours is a fault * */
    xd_driver *inner;
    pthread_mutex_t lock;
    uint64_t at, calls;
    int sticky, status;
} fault;

/* Counts the call; a negative status if it is the one to fail. */
static int strike(xd_driver *driver, const char *operation, xd_error *err)
{
    fault *f = (fault *)driver;
    pthread_mutex_lock(&f->lock);
    if (f->at)
        f->calls++;
    uint64_t call = f->calls;
    int status = f->at && (call == f->at || (f->sticky && call > f->at)) ? f->status : XD_OK;
    pthread_mutex_unlock(&f->lock);
    return status ? xd_fail(err, status, 0, operation, "injected: call %" PRIu64 " fails", call) : XD_OK;
}

#define INNER(driver) (((fault *)(driver))->inner)

/* An operation that does nothing when it fails. */
#define FALLIBLE(operation, parameters, ...)                          \
    static int fault_##operation parameters                           \
    {                                                                 \
        int status = strike(driver, #operation, err);                 \
        driver = INNER(driver);                                       \
        return status ? status : driver->operation(driver, __VA_ARGS__); \
    }

/* An operation that gives something back, which it does even when it reports a failure: so does a real driver, and what
   is still alive afterwards was leaked by the caller. */
#define RELEASING(operation, parameters, ...)                                   \
    static int fault_##operation parameters                                     \
    {                                                                           \
        xd_error injected;                                                      \
        int status = strike(driver, #operation, &injected);                     \
        driver = INNER(driver);                                                 \
        int inner = driver->operation(driver, __VA_ARGS__);                     \
        return status ? xd_fail(err, status, 0, #operation, "%s", injected.text) : inner; \
    }

FALLIBLE(device_count, (xd_driver * driver, int *count, xd_error *err), count, err)
FALLIBLE(device_info, (xd_driver * driver, int device, xd_device_info *out, xd_error *err), device, out, err)
FALLIBLE(memory_info, (xd_driver * driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err),
         device, free_bytes, total_bytes, err)
FALLIBLE(peer_capable, (xd_driver * driver, int device, int peer, int *capable, xd_error *err), device, peer, capable,
         err)
FALLIBLE(peer_enable, (xd_driver * driver, int device, int peer, int *enabled, xd_error *err), device, peer, enabled,
         err)
FALLIBLE(device_alloc, (xd_driver * driver, int device, uint64_t bytes, uint64_t *address, xd_error *err), device,
         bytes, address, err)
RELEASING(device_free, (xd_driver * driver, int device, uint64_t address, xd_error *err), device, address, err)
FALLIBLE(host_alloc, (xd_driver * driver, uint64_t bytes, void **address, xd_error *err), bytes, address, err)
RELEASING(host_free, (xd_driver * driver, void *address, xd_error *err), address, err)
FALLIBLE(stream_create, (xd_driver * driver, int device, void **stream, xd_error *err), device, stream, err)
RELEASING(stream_destroy, (xd_driver * driver, int device, void *stream, xd_error *err), device, stream, err)
FALLIBLE(stream_query, (xd_driver * driver, int device, void *stream, int *idle, xd_error *err), device, stream, idle,
         err)
FALLIBLE(stream_wait, (xd_driver * driver, int device, void *stream, void *event, xd_error *err), device, stream, event,
         err)
FALLIBLE(event_create, (xd_driver * driver, int device, int timing, void **event, xd_error *err), device, timing, event,
         err)
RELEASING(event_destroy, (xd_driver * driver, int device, void *event, xd_error *err), device, event, err)
FALLIBLE(event_record, (xd_driver * driver, int device, void *event, void *stream, xd_error *err), device, event,
         stream, err)
FALLIBLE(event_query, (xd_driver * driver, int device, void *event, int *done, xd_error *err), device, event, done, err)
FALLIBLE(event_elapsed, (xd_driver * driver, int device, void *begin, void *end, double *seconds, xd_error *err),
         device, begin, end, seconds, err)
FALLIBLE(copy, (xd_driver * driver, int device, void *stream, const xd_transfer *transfer, xd_error *err), device,
         stream, transfer, err)
FALLIBLE(fill,
         (xd_driver * driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err),
         device, stream, address, byte, bytes, err)
FALLIBLE(pageable_alloc, (xd_driver * driver, uint64_t bytes, void **address, xd_error *err), bytes, address, err)
FALLIBLE(event_wait, (xd_driver * driver, int device, void *event, uint64_t timeout, int *done, xd_error *err), device,
         event, timeout, done, err)
FALLIBLE(host_access, (xd_driver * driver, const void *address, uint64_t bytes, int write, xd_error *err), address,
         bytes, write, err)
FALLIBLE(settle, (xd_driver * driver, int device, int on, xd_error *err), device, on, err)
FALLIBLE(call, (xd_driver * driver, int device, void (*run)(void *arg), void *arg, xd_error *err), device, run, arg,
         err)

FALLIBLE(capture_begin, (xd_driver * driver, int device, void *stream, xd_error *err), device, stream, err)
FALLIBLE(graph_launch, (xd_driver * driver, int device, void *graph, void *stream, xd_error *err), device, graph,
         stream, err)
RELEASING(graph_destroy, (xd_driver * driver, int device, void *graph, xd_error *err), device, graph, err)

/* Ends the capture all the same. */
static int fault_capture_end(xd_driver *driver, int device, void *stream, void **graph, xd_error *err)
{
    void *made;
    xd_error injected;
    int status = strike(driver, "capture_end", &injected);
    driver = INNER(driver);
    int inner = driver->capture_end(driver, device, stream, &made, err);
    if (!inner && status)
        driver->graph_destroy(driver, device, made, NULL);
    if (status)
        return xd_fail(err, status, 0, "capture_end", "%s", injected.text);
    if (!inner)
        *graph = made;
    return inner;
}

static int fault_launch(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err)
{
    int status = strike(driver, "launch", err);
    if (!status)
        return INNER(driver)->launch(INNER(driver), device, stream, kernel, err);
    if (kernel->drop)
        kernel->drop(kernel->arg);
    return status;
}

static uint64_t fault_clock(xd_driver *driver)
{
    return INNER(driver)->clock(INNER(driver));
}

static void fault_close(xd_driver *driver)
{
    fault *f = (fault *)driver;
    f->inner->close(f->inner);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

int xd_fault_create(xd_driver **out, xd_driver *inner, xd_error *err)
{
    fault *f = calloc(1, sizeof *f);
    if (!f)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "fault_create", "no host memory for %zu bytes", sizeof *f);
    f->table = (xd_driver){
        .name = inner->name,
        .close = fault_close,
        .device_count = fault_device_count,
        .device_info = fault_device_info,
        .memory_info = fault_memory_info,
        .peer_capable = fault_peer_capable,
        .peer_enable = fault_peer_enable,
        .device_alloc = fault_device_alloc,
        .device_free = fault_device_free,
        .host_alloc = fault_host_alloc,
        .host_free = fault_host_free,
        .stream_create = fault_stream_create,
        .stream_destroy = fault_stream_destroy,
        .stream_query = fault_stream_query,
        .stream_wait = fault_stream_wait,
        .event_create = fault_event_create,
        .event_destroy = fault_event_destroy,
        .event_record = fault_event_record,
        .event_query = fault_event_query,
        .event_elapsed = fault_event_elapsed,
        .copy = fault_copy,
        .fill = fault_fill,
        .launch = fault_launch,
        .event_wait = inner->event_wait ? fault_event_wait : NULL,
        .pageable_alloc = inner->pageable_alloc ? fault_pageable_alloc : NULL,
        .clock = inner->clock ? fault_clock : NULL,
        .host_access = inner->host_access ? fault_host_access : NULL,
        .settle = inner->settle ? fault_settle : NULL,
        .call = inner->call ? fault_call : NULL,
        .capture_begin = inner->capture_begin ? fault_capture_begin : NULL,
        .capture_end = inner->capture_end ? fault_capture_end : NULL,
        .graph_launch = inner->graph_launch ? fault_graph_launch : NULL,
        .graph_destroy = inner->graph_destroy ? fault_graph_destroy : NULL,
    };
    f->inner = inner;
    pthread_mutex_init(&f->lock, NULL);
    *out = &f->table;
    return XD_OK;
}

void xd_fault_arm(xd_driver *driver, uint64_t at, int sticky, int status)
{
    fault *f = (fault *)driver;
    pthread_mutex_lock(&f->lock);
    f->at = at;
    f->calls = 0;
    f->sticky = sticky;
    f->status = status;
    pthread_mutex_unlock(&f->lock);
}

uint64_t xd_fault_calls(const xd_driver *driver)
{
    fault *f = (fault *)(uintptr_t)driver;
    pthread_mutex_lock(&f->lock);
    uint64_t calls = f->calls;
    pthread_mutex_unlock(&f->lock);
    return calls;
}
