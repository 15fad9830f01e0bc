/* Streams, events, waits, copies within a device, kernels. */
#include "internal.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

/* ---- streams ---- */

static int open_around(xd_stream **out, xd_runtime *runtime, int device, void *adopted, xd_error *err)
{
    int status = xd_runtime_check_device(runtime, device, "stream_open", err);
    if (status)
        return status;
    xd_stream *stream = xd_new(sizeof *stream, "stream_open", err);
    if (!stream)
        return XD_NO_HOST_MEMORY;
    *stream = (xd_stream){.runtime = runtime, .device = device, .handle = adopted, .adopted = adopted != NULL};
    if (!adopted)
        status = runtime->driver->stream_create(runtime->driver, device, &stream->handle, err);
    if (status) {
        free(stream);
        return status;
    }
    xd_runtime_count(runtime, XD_LIVE_STREAMS, 1);
    *out = stream;
    return XD_OK;
}

int xd_stream_open(xd_stream **out, xd_runtime *runtime, int device, xd_error *err)
{
    return open_around(out, runtime, device, NULL, err);
}

int xd_stream_adopt(xd_stream **out, xd_runtime *runtime, int device, void *handle, xd_error *err)
{
    if (!handle)
        return xd_fail(err, XD_INVALID, 0, "stream_open", "the handle of the stream to adopt is NULL");
    return open_around(out, runtime, device, handle, err);
}

void xd_stream_close(xd_stream **at)
{
    xd_stream *stream = at ? *at : NULL;
    if (!stream)
        return;
    xd_driver *driver = stream->runtime->driver;
    if (!stream->adopted && xd_runtime_owned(stream->runtime))
        driver->stream_destroy(driver, stream->device, stream->handle, NULL);
    xd_runtime_count(stream->runtime, XD_LIVE_STREAMS, -1);
    free(stream);
    *at = NULL;
}

int xd_stream_device(const xd_stream *stream)
{
    return stream->device;
}

void *xd_stream_handle(const xd_stream *stream)
{
    return stream->handle;
}

int xd_stream_query(xd_stream *stream, int *idle, xd_error *err)
{
    int status = xd_runtime_enter(stream->runtime, "stream_query", err);
    if (status)
        return status;
    xd_driver *driver = stream->runtime->driver;
    return driver->stream_query(driver, stream->device, stream->handle, idle, err);
}

/* ---- events ---- */

int xd_event_open(xd_event **out, xd_runtime *runtime, int timing, xd_error *err)
{
    int status = xd_runtime_enter(runtime, "event_open", err);
    if (status)
        return status;
    xd_event *event = xd_new(sizeof *event + (size_t)runtime->devices * sizeof event->handles[0], "event_open", err);
    if (!event)
        return XD_NO_HOST_MEMORY;
    event->runtime = runtime;
    event->timing = timing != 0;
    event->device = XD_HOST;
    xd_runtime_count(runtime, XD_LIVE_EVENTS, 1);
    *out = event;
    return XD_OK;
}

void xd_event_close(xd_event **at)
{
    xd_event *event = at ? *at : NULL;
    if (!event)
        return;
    xd_runtime *runtime = event->runtime;
    if (xd_runtime_owned(runtime))
        for (int device = 0; device < runtime->devices; device++)
            if (event->handles[device])
                runtime->driver->event_destroy(runtime->driver, device, event->handles[device], NULL);
    xd_runtime_count(runtime, XD_LIVE_EVENTS, -1);
    free(event);
    *at = NULL;
}

int xd_event_device(const xd_event *event)
{
    return atomic_load_explicit(&event->device, memory_order_acquire);
}

/* The vendor's event for this device, made if need be. Two threads may both make one: the second gives its own back. */
static int handle_on(xd_event *event, int device, void **out, xd_error *err)
{
    xd_driver *driver = event->runtime->driver;
    void *there = event->handles[device];
    if (!there) {
        void *made;
        int status = driver->event_create(driver, device, event->timing, &made, err);
        if (status)
            return status;
        if (atomic_compare_exchange_strong(&event->handles[device], &there, made))
            there = made;
        else
            driver->event_destroy(driver, device, made, NULL);
    }
    *out = there;
    return XD_OK;
}

int xd_event_record(xd_event *event, xd_stream *stream, xd_error *err)
{
    xd_driver *driver = event->runtime->driver;
    int status = xd_runtime_enter(event->runtime, "event_record", err);
    if (!status)
        status = xd_runtime_check_same(event->runtime, stream->runtime, "event_record", err);
    void *handle;
    if (!status)
        status = handle_on(event, stream->device, &handle, err);
    if (!status)
        status = driver->event_record(driver, stream->device, handle, stream->handle, err);
    if (!status)
        atomic_store_explicit(&event->device, stream->device, memory_order_release);
    return status;
}

int xd_event_query(xd_event *event, int *done, xd_error *err)
{
    int status = xd_runtime_enter(event->runtime, "event_query", err);
    if (status)
        return status;
    int device = xd_event_device(event);
    if (device == XD_HOST) {
        *done = 1;
        return XD_OK;
    }
    xd_driver *driver = event->runtime->driver;
    return driver->event_query(driver, device, event->handles[device], done, err);
}

/* For drivers without event_wait. It asks again and again for `spin` ns, after a short while letting others run in
   between. Then it sleeps, a small share of the time that it has waited: a thread that waits for long costs next to
   nothing. */
static int poll_event(xd_driver *driver, int device, void *handle, uint64_t spin, uint64_t timeout, int *done,
                      xd_error *err)
{
    enum { ALONE = 20000, SHORTEST_NAP = 5000, LONGEST_NAP = 1000000, SHARE = 256 }; /* ns; SHARE: of the time waited */
    uint64_t begin = xd_monotonic();
    for (;;) {
        int status = driver->event_query(driver, device, handle, done, err);
        if (status || *done)
            return status;
        uint64_t waited = xd_monotonic() - begin;
        if (waited >= timeout)
            return XD_OK;
        if (waited < spin) {
            if (waited > ALONE)
                sched_yield();
            continue;
        }
        uint64_t nap = waited / SHARE;
        nap = nap < SHORTEST_NAP ? SHORTEST_NAP : nap < LONGEST_NAP ? nap : LONGEST_NAP;
        if (nap > timeout - waited)
            nap = timeout - waited;
        nanosleep(&(struct timespec){.tv_nsec = (long)nap}, NULL);
    }
}

static int wait_event(xd_event *event, uint64_t spin, uint64_t timeout, int *done, xd_error *err)
{
    int status = xd_runtime_enter(event->runtime, "event_wait", err);
    if (status)
        return status;
    int came = 1;
    int device = xd_event_device(event);
    if (device != XD_HOST) {
        xd_driver *driver = event->runtime->driver;
        void *handle = event->handles[device];
        status = driver->event_wait ? driver->event_wait(driver, device, handle, timeout, &came, err)
                                    : poll_event(driver, device, handle, spin, timeout, &came, err);
    }
    if (!status)
        *done = came;
    return status;
}

/* A nap of any length ends 50 to 100 us late: less than the twentieth part of a wait that has spun for so long. */
int xd_event_wait(xd_event *event, uint64_t timeout, int *done, xd_error *err)
{
    enum { SPIN = 3000000 }; /* ns */
    return wait_event(event, SPIN, timeout, done, err);
}

int xd_event_wait_napping(xd_event *event, uint64_t timeout, int *done, xd_error *err)
{
    return wait_event(event, 0, timeout, done, err);
}

int xd_event_elapsed(xd_event *begin, xd_event *end, double *seconds, xd_error *err)
{
    static const char operation[] = "event_elapsed";
    int status = xd_runtime_enter(begin->runtime, operation, err);
    if (!status)
        status = xd_runtime_check_same(begin->runtime, end->runtime, operation, err);
    if (status)
        return status;
    if (!begin->timing || !end->timing)
        return xd_fail(err, XD_INVALID, 0, operation, "the %s event was opened without timing",
                       begin->timing ? "second" : "first");
    int first = xd_event_device(begin), second = xd_event_device(end);
    if (first == XD_HOST || second == XD_HOST)
        return xd_fail(err, XD_INVALID, 0, operation, "the %s event was never recorded",
                       first == XD_HOST ? "first" : "second");
    if (first != second)
        return xd_fail(err, XD_INVALID, 0, operation, "the events were recorded on devices %d and %d; it takes one",
                       first, second);
    xd_event *const events[] = {begin, end};
    for (int i = 0; i < 2; i++) {
        int done;
        status = xd_event_query(events[i], &done, err);
        if (status)
            return status;
        if (!done)
            return xd_fail(err, XD_INVALID, 0, operation, "the %s event is not done yet", i ? "second" : "first");
    }
    xd_driver *driver = begin->runtime->driver;
    return driver->event_elapsed(driver, first, begin->handles[first], end->handles[first], seconds, err);
}

/* ---- waits between streams ---- */

int xd_stream_wait(xd_stream *stream, xd_event *event, xd_error *err)
{
    int status = xd_runtime_enter(stream->runtime, "stream_wait", err);
    if (!status)
        status = xd_runtime_check_same(stream->runtime, event->runtime, "stream_wait", err);
    if (status)
        return status;
    int device = xd_event_device(event);
    if (device == XD_HOST)
        return XD_OK;
    if (device != stream->device && stream->runtime->force_sync) {
        int done;
        return xd_event_wait(event, XD_FOREVER, &done, err);
    }
    xd_driver *driver = stream->runtime->driver;
    return driver->stream_wait(driver, stream->device, stream->handle, event->handles[device], err);
}

/* ---- work ---- */

int xd_stream_fill(xd_stream *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err)
{
    int status = xd_runtime_enter(stream->runtime, "stream_fill", err);
    if (status)
        return status;
    if (byte < 0 || byte > 255)
        return xd_fail(err, XD_INVALID, 0, "stream_fill", "byte is %d; allowed: 0 to 255", byte);
    if (!bytes)
        return XD_OK;
    xd_driver *driver = stream->runtime->driver;
    return driver->fill(driver, stream->device, stream->handle, address, byte, bytes, err);
}

/* Row i of one side stands at address + i * pitch. Of all rows of dst that begin before a row of src ends, the last one
   reaches furthest: if that one does not touch the row of src, none does. */
static int overlaps(const xd_transfer *t)
{
    uint64_t height = t->height;
    if (t->src + (height - 1) * t->src_pitch + t->width <= t->dst ||
        t->dst + (height - 1) * t->dst_pitch + t->width <= t->src)
        return 0;
    for (uint64_t i = 0; i < height; i++) {
        uint64_t row = t->src + i * t->src_pitch;
        if (row + t->width <= t->dst)
            continue;
        uint64_t last = (row + t->width - 1 - t->dst) / t->dst_pitch;
        if (last >= height)
            last = height - 1;
        if (t->dst + last * t->dst_pitch + t->width > row)
            return 1;
    }
    return 0;
}

/* Pitches in order, and nothing wraps around the end of the address space. */
static int check_side(const char *side, uint64_t address, uint64_t width, uint64_t height, uint64_t pitch,
                      xd_error *err)
{
    if (pitch < width)
        return xd_fail(err, XD_INVALID, 0, "copy", "%s_pitch is %" PRIu64 "; allowed: the width, %" PRIu64 ", or more",
                       side, pitch, width);
    uint64_t last;
    if (__builtin_mul_overflow(height - 1, pitch, &last) || __builtin_add_overflow(last, width, &last) ||
        __builtin_add_overflow(last, address, &last))
        return xd_fail(err, XD_INVALID, 0, "copy",
                       "%s: %" PRIu64 " rows of %" PRIu64 " bytes, %" PRIu64
                       " apart, from 0x%" PRIx64 " on do not fit an address space",
                       side, height, width, pitch, address);
    return XD_OK;
}

int xd_stream_check_transfer(xd_transfer *t, xd_error *err)
{
    if (!t->width || !t->height) {
        t->width = t->height = 0;
        return XD_OK;
    }
    if (t->height == 1)
        t->dst_pitch = t->src_pitch = t->width;
    int status = check_side("dst", t->dst, t->width, t->height, t->dst_pitch, err);
    if (!status)
        status = check_side("src", t->src, t->width, t->height, t->src_pitch, err);
    if (status)
        return status;
    if (t->dst_pitch == t->width && t->src_pitch == t->width) {
        t->width *= t->height;
        t->height = 1;
        t->dst_pitch = t->src_pitch = t->width;
    }
    if (t->dst_device == t->src_device && overlaps(t))
        return xd_fail(err, XD_INVALID, 0, "copy",
                       "source and destination overlap on device %d: %" PRIu64 " bytes from 0x%" PRIx64
                       " to 0x%" PRIx64,
                       t->src_device, t->width * t->height, t->src, t->dst);
    return XD_OK;
}

int xd_stream_transfer(xd_stream *stream, const xd_transfer *transfer, xd_error *err)
{
    if (!transfer->width)
        return XD_OK;
    xd_driver *driver = stream->runtime->driver;
    return driver->copy(driver, stream->device, stream->handle, transfer, err);
}

int xd_stream_copy(xd_stream *stream, const xd_transfer *transfer, xd_error *err)
{
    int status = xd_runtime_enter(stream->runtime, "copy", err);
    if (status)
        return status;
    int here = stream->device, dst = transfer->dst_device, src = transfer->src_device;
    int known = (dst == here || dst == XD_HOST) && (src == here || src == XD_HOST);
    if (!known || (dst == XD_HOST && src == XD_HOST))
        return xd_fail(err, XD_INVALID, 0, "copy",
                       "from device %d to device %d on a stream of device %d; allowed: between device %d and the "
                       "host (%d), or within device %d",
                       src, dst, here, here, XD_HOST, here);
    xd_transfer checked = *transfer;
    status = xd_stream_check_transfer(&checked, err);
    return status ? status : xd_stream_transfer(stream, &checked, err);
}

int xd_stream_launch(xd_stream *stream, const xd_kernel *kernel, xd_error *err)
{
    xd_driver *driver = stream->runtime->driver;
    int status = xd_runtime_enter(stream->runtime, "launch", err);
    if (!status && !kernel->run)
        status = xd_fail(err, XD_INVALID, 0, "launch", "the kernel has no function to run");
    if (!status)
        return driver->launch(driver, stream->device, stream->handle, kernel, err);
    if (kernel->drop)
        kernel->drop(kernel->arg);
    return status;
}

typedef struct call {
    xd_function function;
    void *stream;
    void *const *inputs;
    const uint64_t *sizes;
    void *const *outputs;
    void *user;
    int code;
} call;

static void run_call(void *arg)
{
    call *c = arg;
    c->code = c->function(c->stream, c->inputs, c->sizes, c->outputs, c->user);
}

int xd_stream_call(xd_stream *stream, xd_function function, void *const *inputs, const uint64_t *sizes,
                   void *const *outputs, void *user, int *code, xd_error *err)
{
    int status = xd_runtime_enter(stream->runtime, "stream_call", err);
    if (status)
        return status;
    xd_driver *driver = stream->runtime->driver;
    call c = {function, stream->handle, inputs, sizes, outputs, user, 0};
    if (driver->call)
        status = driver->call(driver, stream->device, run_call, &c, err);
    else
        run_call(&c);
    if (!status)
        *code = c.code;
    return status;
}
