/* Streams and events, and the calls that append operations to streams. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NAP 1000000 /* ns of real time: what a wait that cannot end takes, so that asking again and again costs little */

/* ---- handles ---- */

static int find_stream(sim *s, int device, const void *handle, const char *operation, sim_stream **out, xd_error *err)
{
    sim_stream *stream = sim_table_find(&s->stream_table, handle);
    if (!stream)
        return xd_fail(err, XD_INVALID, 0, operation, "%p is not a stream of this driver, or it was destroyed", handle);
    if (stream->device != device)
        return xd_fail(err, XD_INVALID, 0, operation, "the stream belongs to device %d, the call names device %d",
                       stream->device, device);
    *out = stream;
    return XD_OK;
}

static int find_event(sim *s, const void *handle, const char *operation, sim_event **out, xd_error *err)
{
    *out = sim_table_find(&s->event_table, handle);
    if (*out)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, operation, "%p is not an event of this driver, or it was destroyed", handle);
}

static int find_event_of(sim *s, int device, const void *handle, const char *operation, sim_event **out, xd_error *err)
{
    int status = find_event(s, handle, operation, out, err);
    if (!status && (*out)->device != device)
        status = xd_fail(err, XD_INVALID, 0, operation, "the event belongs to device %d, the call names device %d",
                         (*out)->device, device);
    return status;
}

/* The device works and the stream is one of its own. */
static int enter(sim *s, int device, void *handle, const char *operation, sim_stream **out, xd_error *err)
{
    sim_device *at;
    int status = sim_device_find(s, device, operation, &at, err);
    return status ? status : find_stream(s, device, handle, operation, out, err);
}

/* ---- operations ---- */

void sim_stamp_release(sim_stamp *stamp)
{
    if (!stamp || --stamp->refs)
        return;
    free(stamp->clock.at);
    free(stamp);
}

void sim_op_free(sim_op *op)
{
    if (op->kind == SIM_RECORD || op->kind == SIM_WAIT)
        sim_stamp_release(op->u.stamp);
    free(op);
}

static sim_op *new_op(sim *s, int kind, sim_stream *stream, const char *operation, xd_error *err)
{
    sim_op *op = sim_heap_reserve(s, s->live_ops + 1) ? NULL : calloc(1, sizeof *op);
    if (!op) {
        xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for one more queued operation");
        return NULL;
    }
    op->kind = kind;
    op->stream = stream;
    op->heap = SIM_NO_PLACE;
    return op;
}

static void name_copy(sim_op *op)
{
    static const char *const host = "host";
    char src[16], dst[16];
    snprintf(src, sizeof src, "%d", op->u.transfer.src_device);
    snprintf(dst, sizeof dst, "%d", op->u.transfer.dst_device);
    snprintf(op->label, sizeof op->label, "copy %s>%s", op->u.transfer.src_device == XD_HOST ? host : src,
             op->u.transfer.dst_device == XD_HOST ? host : dst);
}

static sim_stamp *new_stamp(sim *s, sim_stream *stream)
{
    sim_stamp *stamp = calloc(1, sizeof *stamp);
    if (!stamp)
        return NULL;
    *stamp = (sim_stamp){.refs = 2, .device = stream->device, .stream = stream, .after = stream->last};
    sim_order_record(s, stream, stamp);
    return stamp;
}

static void append(sim *s, sim_op *op, uint64_t cost)
{
    sim_stream *stream = op->stream;
    s->host += cost;
    s->live_ops++;
    op->seq = ++s->seq;
    op->submitted = s->host;
    if (op->kind != SIM_RECORD && op->kind != SIM_WAIT) {
        sim_route(s, op);
        stream->last = op->seq;
    }
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    if (stream->head == op)
        sim_schedule(s, op, op->submitted);
}

/* Waits until what is queued on the stream is done, or nothing more can be. */
static int block(sim *s, sim_stream *stream, const char *operation, xd_error *err)
{
    sim_op *op = new_op(s, SIM_RECORD, stream, operation, err);
    sim_stamp *stamp = op ? new_stamp(s, stream) : NULL;
    if (!stamp) {
        free(op);
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for one more queued operation");
    }
    op->u.stamp = stamp;
    snprintf(op->label, sizeof op->label, "synchronise");
    append(s, op, 0);
    sim_goal goal = {.stamp = stamp};
    uint64_t begin = s->host;
    int status = sim_run(s, &goal, XD_FOREVER, operation, err);
    if (stamp->done)
        sim_order_seen(s, &stamp->clock);
    sim_trace_host(s, operation, begin, s->host);
    sim_stamp_release(stamp);
    return status;
}

/* ---- streams ---- */

int sim_stream_create(xd_driver *driver, int device, void **out, xd_error *err)
{
    static const char operation[] = "stream_create";
    sim *s = sim_of(driver);
    sim_stream *stream = calloc(1, sizeof *stream);
    sim_device *at;
    pthread_mutex_lock(&s->lock);
    int status = sim_device_find(s, device, operation, &at, err);
    if (!status && (!stream || sim_table_add(&s->stream_table, stream, out)))
        status = xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for a stream");
    if (!status) {
        stream->device = device;
        stream->id = s->next_stream++;
        sim_order_stream(s, stream);
        stream->next = s->streams;
        s->streams = stream;
    }
    pthread_mutex_unlock(&s->lock);
    if (status)
        free(stream);
    return status;
}

void sim_stream_forget(sim *s, sim_stream *stream)
{
    sim_stream **at = &s->streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    free(stream->clock.at);
    free(stream);
}

int sim_stream_destroy(xd_driver *driver, int device, void *handle, xd_error *err)
{
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = find_stream(s, device, handle, "stream_destroy", &stream, err);
    if (!status) {
        sim_table_remove(&s->stream_table, handle);
        stream->closed = true;
        if (!stream->head)
            sim_stream_forget(s, stream);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_stream_query(xd_driver *driver, int device, void *handle, int *idle, xd_error *err)
{
    static const char operation[] = "stream_query";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, handle, operation, &stream, err);
    if (!status) {
        s->host += s->config.costs.query;
        sim_catch_up(s);
        status = enter(s, device, handle, operation, &stream, err); /* it may have failed or gone meanwhile */
    }
    if (!status && !stream->head)
        sim_order_seen(s, &stream->clock);
    if (!status)
        status = sim_order_raise(s, err);
    if (!status)
        *idle = stream->head == NULL;
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int queue_wait(sim *s, sim_stream *stream, sim_stamp *stamp, xd_error *err)
{
    sim_order_wait(s, stream, stamp);
    bool across = stamp->device != stream->device;
    bool ignored = across && sim_fault_hits(s, XD_SIM_IGNORE_WAIT, stamp->device, stream->device);
    bool blocks = across && sim_fault_hits(s, XD_SIM_BLOCK_WAIT, stamp->device, stream->device);
    if (ignored) {
        s->host += s->config.costs.wait;
        return XD_OK;
    }
    sim_op *op = new_op(s, SIM_WAIT, stream, "stream_wait", err);
    if (!op)
        return XD_NO_HOST_MEMORY;
    op->u.stamp = stamp;
    stamp->refs++;
    snprintf(op->label, sizeof op->label, "wait");
    append(s, op, s->config.costs.wait);
    return blocks ? block(s, stream, "stream_wait", err) : XD_OK;
}

int sim_stream_wait(xd_driver *driver, int device, void *handle, void *event_handle, xd_error *err)
{
    static const char operation[] = "stream_wait";
    sim *s = sim_of(driver);
    sim_stream *stream;
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = find_event(s, event_handle, operation, &event, err);
    if (!status && event->stamp)
        status = queue_wait(s, stream, event->stamp, err);
    pthread_mutex_unlock(&s->lock);
    return status;
}

void sim_streams_clear(sim *s)
{
    while (s->streams) {
        sim_stream *stream = s->streams;
        s->streams = stream->next;
        while (stream->head) {
            sim_op *op = stream->head;
            stream->head = op->next;
            if (op->kind == SIM_KERNEL && op->u.kernel.drop)
                op->u.kernel.drop(op->u.kernel.arg);
            sim_op_free(op);
        }
        free(stream->clock.at);
        free(stream);
    }
}

/* ---- events ---- */

int sim_event_create(xd_driver *driver, int device, int timing, void **out, xd_error *err)
{
    static const char operation[] = "event_create";
    sim *s = sim_of(driver);
    sim_event *event = calloc(1, sizeof *event);
    sim_device *at;
    pthread_mutex_lock(&s->lock);
    int status = sim_device_find(s, device, operation, &at, err);
    if (!status && (!event || sim_table_add(&s->event_table, event, out)))
        status = xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for an event");
    if (!status) {
        event->device = device;
        event->timing = timing;
    }
    pthread_mutex_unlock(&s->lock);
    if (status)
        free(event);
    return status;
}

int sim_event_destroy(xd_driver *driver, int device, void *handle, xd_error *err)
{
    sim *s = sim_of(driver);
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = find_event_of(s, device, handle, "event_destroy", &event, err);
    if (!status) {
        sim_table_remove(&s->event_table, handle);
        sim_stamp_release(event->stamp);
        free(event);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_event_record(xd_driver *driver, int device, void *handle, void *stream_handle, xd_error *err)
{
    static const char operation[] = "event_record";
    sim *s = sim_of(driver);
    sim_stream *stream;
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, stream_handle, operation, &stream, err);
    if (!status)
        status = find_event_of(s, device, handle, operation, &event, err);
    if (!status) {
        sim_op *op = new_op(s, SIM_RECORD, stream, operation, err);
        sim_stamp *stamp = op ? new_stamp(s, stream) : NULL;
        if (stamp) {
            sim_stamp_release(event->stamp);
            event->stamp = op->u.stamp = stamp;
            snprintf(op->label, sizeof op->label, "record");
            append(s, op, s->config.costs.record);
            if (sim_fault_hits(s, XD_SIM_EARLY_EVENT, device, XD_SIM_ANY)) {
                stamp->done = true;
                stamp->time = s->host;
            }
        } else {
            free(op);
            status = xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for one more queued operation");
        }
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* ---- asking and waiting ---- */

int sim_event_query(xd_driver *driver, int device, void *handle, int *done, xd_error *err)
{
    static const char operation[] = "event_query";
    sim *s = sim_of(driver);
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = find_event_of(s, device, handle, operation, &event, err);
    if (!status) {
        sim_stamp *stamp = event->stamp;
        if (stamp)
            stamp->refs++;
        s->host += s->config.costs.query;
        sim_catch_up(s);
        const xd_error *fault = s->heap.count ? NULL : sim_blocking_fault(s, stamp);
        bool came = !stamp || stamp->done;
        if (stamp && came)
            sim_order_seen(s, &stamp->clock);
        status = fault ? sim_pass_on(err, fault) : sim_order_raise(s, err);
        if (!status)
            *done = came;
        sim_stamp_release(stamp);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

static uint64_t later(uint64_t time, uint64_t by)
{
    return by > UINT64_MAX - time ? UINT64_MAX : time + by;
}

/* Nothing that is queued can bring the stamp before the deadline, and what it waits for is queued already. */
static int give_up(sim *s, const sim_stamp *stamp, uint64_t deadline, xd_error *err)
{
    const xd_error *fault = sim_blocking_fault(s, stamp);
    if (fault)
        return sim_pass_on(err, fault);
    if (deadline == UINT64_MAX)
        return xd_fail(err, XD_DRIVER, 0, "event_wait", "this wait would never end: the event is behind an operation that "
                       "hangs on device %d", stamp->device);
    if (s->host < deadline)
        s->host = deadline;
    if (!s->heap.count) {
        pthread_mutex_unlock(&s->lock);
        nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
        pthread_mutex_lock(&s->lock);
    }
    return XD_OK;
}

static int wait_for(sim *s, const sim_stamp *stamp, uint64_t timeout, xd_error *err)
{
    uint64_t deadline = later(s->host, timeout);
    sim_goal goal = {.stamp = stamp};
    int status = sim_run(s, &goal, deadline, "event_wait", err);
    if (status)
        return status;
    if (!stamp->done)
        return give_up(s, stamp, deadline, err);
    if (s->host < stamp->time)
        s->host = stamp->time;
    s->host += s->config.costs.sync;
    sim_order_seen(s, &stamp->clock);
    return XD_OK;
}

int sim_event_wait(xd_driver *driver, int device, void *handle, uint64_t timeout, int *done, xd_error *err)
{
    sim *s = sim_of(driver);
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = find_event_of(s, device, handle, "event_wait", &event, err);
    if (!status) {
        sim_stamp *stamp = event->stamp;
        if (stamp) {
            uint64_t begin = s->host;
            stamp->refs++;
            status = wait_for(s, stamp, timeout, err);
            sim_trace_host(s, "event_wait", begin, s->host);
        }
        if (!status)
            status = sim_order_raise(s, err);
        if (!status)
            *done = !stamp || stamp->done;
        sim_stamp_release(stamp);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int check_elapsed(sim *s, int device, const void *handle, const char *which, sim_event **out, xd_error *err)
{
    static const char operation[] = "event_elapsed";
    int status = find_event_of(s, device, handle, operation, out, err);
    if (status)
        return status;
    if (!(*out)->timing)
        return xd_fail(err, XD_INVALID, 0, operation, "the %s event was made without timing", which);
    if (!(*out)->stamp)
        return xd_fail(err, XD_INVALID, 0, operation, "the %s event was never recorded", which);
    if (!(*out)->stamp->done)
        return xd_fail(err, XD_INVALID, 0, operation, "the %s event is not done yet", which);
    return XD_OK;
}

int sim_event_elapsed(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err)
{
    sim *s = sim_of(driver);
    sim_event *first, *second;
    pthread_mutex_lock(&s->lock);
    sim_catch_up(s);
    int status = check_elapsed(s, device, begin, "first", &first, err);
    if (!status)
        status = check_elapsed(s, device, end, "second", &second, err);
    if (!status)
        *seconds = ((double)second->stamp->time - (double)first->stamp->time) * 1e-9;
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* ---- work ---- */

static int check_device(const sim *s, int device, const char *side, xd_error *err)
{
    if (device >= XD_HOST && device < s->device_count)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, "copy", "%s_device is %d; allowed: %d (the host) to %d", side, device, XD_HOST,
                   s->device_count - 1);
}

static int check_side(const sim *s, int device, uint64_t address, uint64_t pitch, const xd_transfer *t, xd_error *err)
{
    uint64_t bytes;
    if (t->height > 1 && pitch < t->width)
        return xd_fail(err, XD_INVALID, 0, "copy", "a pitch of %" PRIu64 " is less than the width, %" PRIu64, pitch,
                       t->width);
    if (__builtin_mul_overflow(t->height - 1, pitch, &bytes) || __builtin_add_overflow(bytes, t->width, &bytes))
        return xd_fail(err, XD_INVALID, 0, "copy", "%" PRIu64 " rows, %" PRIu64 " bytes apart, fit no address space",
                       t->height, pitch);
    return sim_memory_check(s, device, address, bytes, UINT64_MAX, "copy", err);
}

/* The stream's device needs access to the other one, whichever way the bytes go. */
static bool is_unpeered(const sim *s, int device, const xd_transfer *t)
{
    int src = t->src_device, dst = t->dst_device;
    if (src == dst || src == XD_HOST || dst == XD_HOST)
        return false;
    return !s->peer_on[device * s->device_count + (src == device ? dst : src)];
}

static int check_copy(const sim *s, int device, const xd_transfer *t, xd_error *err)
{
    if (!t->width || !t->height)
        return xd_fail(err, XD_INVALID, 0, "copy", "%" PRIu64 " rows of %" PRIu64 " bytes; both must be above 0",
                       t->height, t->width);
    int status = check_device(s, t->src_device, "src", err);
    if (!status)
        status = check_device(s, t->dst_device, "dst", err);
    if (!status && t->src_device != device && t->dst_device != device)
        status = xd_fail(err, XD_INVALID, 0, "copy", "from device %d to device %d on a stream of device %d",
                         t->src_device, t->dst_device, device);
    if (!status)
        status = check_side(s, t->src_device, t->src, t->src_pitch, t, err);
    if (!status)
        status = check_side(s, t->dst_device, t->dst, t->dst_pitch, t, err);
    if (!status && is_unpeered(s, device, t) && s->config.unpeered == XD_SIM_UNPEERED_REFUSED)
        status = xd_fail(err, XD_NO_PEER, 0, "copy", "device %d has no access to the memory of device %d", device,
                         t->src_device == device ? t->dst_device : t->src_device);
    return status;
}

int sim_copy(xd_driver *driver, int device, void *handle, const xd_transfer *transfer, xd_error *err)
{
    static const char operation[] = "copy";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = check_copy(s, device, transfer, err);
    if (!status) {
        sim_op *op = new_op(s, SIM_COPY, stream, operation, err);
        if (op) {
            op->u.transfer = *transfer;
            op->bytes = transfer->width * transfer->height;
            name_copy(op);
            append(s, op, s->config.costs.copy);
            sim_order_submit(s, op, NULL, 0);
            bool blocks = sim_fault_hits(s, XD_SIM_BLOCK_COPY, transfer->src_device, transfer->dst_device);
            if (blocks || is_unpeered(s, device, transfer))
                status = block(s, stream, operation, err);
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_fill(xd_driver *driver, int device, void *handle, uint64_t address, int byte, uint64_t bytes, xd_error *err)
{
    static const char operation[] = "fill";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = sim_memory_check(s, device, address, bytes, UINT64_MAX, operation, err);
    if (!status) {
        sim_op *op = new_op(s, SIM_FILL, stream, operation, err);
        if (op) {
            op->u.fill.address = address;
            op->u.fill.byte = byte;
            op->bytes = bytes;
            snprintf(op->label, sizeof op->label, "fill");
            append(s, op, s->config.costs.fill);
            sim_order_submit(s, op, NULL, 0);
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int check_ranges(const sim *s, const xd_kernel *kernel, xd_error *err)
{
    int status = XD_OK;
    for (size_t i = 0; i < kernel->range_count && !status; i++)
        if (kernel->ranges[i].bytes)
            status = sim_memory_check(s, kernel->ranges[i].device, kernel->ranges[i].address, kernel->ranges[i].bytes,
                                      UINT64_MAX, "launch", err);
    return status;
}

int sim_launch(xd_driver *driver, int device, void *handle, const xd_kernel *kernel, xd_error *err)
{
    static const char operation[] = "launch";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = check_ranges(s, kernel, err);
    if (!status) {
        sim_op *op = new_op(s, SIM_KERNEL, stream, operation, err);
        if (op) {
            op->u.kernel.run = kernel->run;
            op->u.kernel.drop = kernel->drop;
            op->u.kernel.arg = kernel->arg;
            op->duration = kernel->cost;
            snprintf(op->label, sizeof op->label, "%s", kernel->label && *kernel->label ? kernel->label : "kernel");
            append(s, op, s->config.costs.launch);
            sim_order_submit(s, op, kernel->ranges, kernel->range_count);
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    if (status && kernel->drop)
        kernel->drop(kernel->arg);
    return status;
}
