/* Streams: handles, what is queued on them, waits between them. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

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

int sim_find_event(sim *s, const void *handle, const char *operation, sim_event **out, xd_error *err)
{
    *out = sim_table_find(&s->event_table, handle);
    if (*out)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, operation, "%p is not an event of this driver, or it was destroyed", handle);
}

int sim_find_event_of(sim *s, int device, const void *handle, const char *operation, sim_event **out, xd_error *err)
{
    int status = sim_find_event(s, handle, operation, out, err);
    if (!status && (*out)->device != device)
        status = xd_fail(err, XD_INVALID, 0, operation, "the event belongs to device %d, the call names device %d",
                         (*out)->device, device);
    return status;
}

int sim_enter(sim *s, int device, void *handle, const char *operation, sim_stream **out, xd_error *err)
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

sim_op *sim_new_op(sim *s, int kind, sim_stream *stream, const char *operation, xd_error *err)
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

sim_stamp *sim_new_stamp(sim *s, sim_stream *stream)
{
    sim_stamp *stamp = calloc(1, sizeof *stamp);
    if (!stamp)
        return NULL;
    *stamp = (sim_stamp){.refs = 2, .device = stream->device, .stream = stream, .after = stream->last};
    sim_order_record(s, stream, stamp);
    return stamp;
}

void sim_append(sim *s, sim_op *op, uint64_t cost)
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

int sim_block_on(sim *s, sim_stream *stream, const char *operation, xd_error *err)
{
    sim_op *op = sim_new_op(s, SIM_RECORD, stream, operation, err);
    sim_stamp *stamp = op ? sim_new_stamp(s, stream) : NULL;
    if (!stamp) {
        free(op);
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for one more queued operation");
    }
    op->u.stamp = stamp;
    snprintf(op->label, sizeof op->label, "synchronise");
    sim_append(s, op, 0);
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
    sim_graph *capture = NULL;
    if (!status) {
        sim_table_remove(&s->stream_table, handle);
        capture = stream->capture;
        stream->capture = NULL;
        s->captures -= capture != NULL;
        stream->closed = true;
        if (!stream->head)
            sim_stream_forget(s, stream);
    }
    pthread_mutex_unlock(&s->lock);
    if (capture)
        sim_graph_release(capture);
    return status;
}

int sim_stream_query(xd_driver *driver, int device, void *handle, int *idle, xd_error *err)
{
    static const char operation[] = "stream_query";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = sim_refuse_capture(stream, operation, err);
    if (!status)
        status = sim_refuse_here(s, operation, err);
    if (!status) {
        s->host += s->config.costs.query;
        sim_catch_up(s);
        status = sim_enter(s, device, handle, operation, &stream, err); /* it may have failed or gone meanwhile */
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
    sim_op *op = sim_new_op(s, SIM_WAIT, stream, "stream_wait", err);
    if (!op)
        return XD_NO_HOST_MEMORY;
    op->u.stamp = stamp;
    stamp->refs++;
    snprintf(op->label, sizeof op->label, "wait");
    sim_append(s, op, s->config.costs.wait);
    return blocks ? sim_block_on(s, stream, "stream_wait", err) : XD_OK;
}

int sim_stream_wait(xd_driver *driver, int device, void *handle, void *event_handle, xd_error *err)
{
    static const char operation[] = "stream_wait";
    sim *s = sim_of(driver);
    sim_stream *stream;
    sim_event *event;
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = sim_find_event(s, event_handle, operation, &event, err);
    if (!status)
        status = sim_refuse_capture(stream, operation, err);
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
        if (stream->capture)
            sim_graph_release(stream->capture);
        free(stream->clock.at);
        free(stream);
    }
}

