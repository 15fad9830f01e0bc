/* Events: recording, asking and waiting. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NAP 1000000 /* ns of real time: what a wait that cannot end takes, so that asking again and again costs little */

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
    int status = sim_find_event_of(s, device, handle, "event_destroy", &event, err);
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
    int status = sim_enter(s, device, stream_handle, operation, &stream, err);
    if (!status)
        status = sim_find_event_of(s, device, handle, operation, &event, err);
    if (!status)
        status = sim_refuse_capture(stream, operation, err);
    if (!status) {
        sim_op *op = sim_new_op(s, SIM_RECORD, stream, operation, err);
        sim_stamp *stamp = op ? sim_new_stamp(s, stream) : NULL;
        if (stamp) {
            sim_stamp_release(event->stamp);
            event->stamp = op->u.stamp = stamp;
            snprintf(op->label, sizeof op->label, "record");
            sim_append(s, op, s->config.costs.record);
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
    int status = sim_find_event_of(s, device, handle, operation, &event, err);
    if (!status)
        status = sim_refuse_here(s, operation, err);
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
    int status = sim_find_event_of(s, device, handle, "event_wait", &event, err);
    if (!status)
        status = sim_refuse_here(s, "event_wait", err);
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
    int status = sim_find_event_of(s, device, handle, operation, out, err);
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
