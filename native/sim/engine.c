/*
 * What operations do and for how long. An operation whose turn in its stream has come joins the queues of its engines and
 * starts when it is first in all of them.
 */
#include "internal.h"

#include <string.h>

/* ---- lengths ---- */

enum { DRAW_LATE, DRAW_JITTER, DRAW_DELAY };

static uint64_t time_of(uint64_t bytes, uint64_t rate)
{
    unsigned __int128 scaled = (unsigned __int128)bytes * SIM_SECOND;
    return (uint64_t)((scaled + rate - 1) / rate);
}

static uint64_t up_to(const sim *s, const sim_op *op, uint64_t purpose, uint64_t most)
{
    return most ? sim_draw(s, op->seq, purpose) % (most + 1) : 0;
}

/* What the configured jitter and delay add to an operation that would take so long. */
static uint64_t disturbance(const sim *s, const sim_op *op, uint64_t duration)
{
    uint64_t most = (uint64_t)((unsigned __int128)duration * s->config.jitter / 1000);
    return up_to(s, op, DRAW_JITTER, most) + up_to(s, op, DRAW_DELAY, s->config.delay);
}

static void use(sim_op *op, sim_engine *engine)
{
    op->engines[op->engine_count++] = engine;
}

static void route_copy(sim *s, sim_op *op, uint64_t *length)
{
    const xd_transfer *t = &op->u.transfer;
    sim_device *src = t->src_device == XD_HOST ? NULL : &s->devices[t->src_device];
    sim_device *dst = t->dst_device == XD_HOST ? NULL : &s->devices[t->dst_device];
    uint64_t latency;
    if (src && src == dst) {
        use(op, &src->compute);
        latency = src->is.latency + time_of(op->bytes, src->is.memory_rate);
    } else if (src && dst) {
        size_t pair = (size_t)t->src_device * (size_t)s->device_count + (size_t)t->dst_device;
        const xd_sim_peer *peer = &s->peers[pair];
        latency = peer->latency;
        if (peer->route == XD_SIM_LINK) {
            use(op, &s->links[pair]);
            latency += time_of(op->bytes, peer->rate);
        } else {
            use(op, &src->out);
            use(op, &dst->in);
            op->cap = peer->rate;
        }
    } else if (src) {
        use(op, &src->out);
        op->cap = src->is.down_rate;
        latency = src->is.latency;
    } else {
        use(op, &dst->in);
        op->cap = dst->is.up_rate;
        latency = dst->is.latency;
    }
    op->on_bus = op->cap != 0;
    op->duration = latency;
    *length = latency + (op->on_bus ? time_of(op->bytes, op->cap) : 0);
}

void sim_route(sim *s, sim_op *op)
{
    sim_device *device = &s->devices[op->stream->device];
    uint64_t length = op->duration;
    if (op->kind == SIM_COPY) {
        route_copy(s, op, &length);
    } else {
        use(op, &device->compute);
        if (op->kind == SIM_FILL)
            op->duration = length = device->is.latency + time_of(op->bytes, device->is.memory_rate);
    }
    op->duration += disturbance(s, op, length);
    sim_fault_assign(s, op);
    op->late = sim_draw(s, op->seq, DRAW_LATE) & 1;
}

/* ---- the bytes ---- */

static void fail_device(sim *s, const sim_op *op, const xd_error *cause)
{
    xd_error *fault = &s->devices[op->stream->device].fault;
    if (fault->status == XD_OK)
        xd_fail(fault, XD_DEVICE_FAULT, cause->code, op->label, "device %d has failed: %.400s", op->stream->device,
                cause->text);
}

static uint64_t span(uint64_t width, uint64_t height, uint64_t pitch)
{
    return (height - 1) * pitch + width;
}

static void move(sim *s, sim_op *op)
{
    const xd_transfer *t = &op->u.transfer;
    uint64_t dst_pitch = t->height > 1 ? t->dst_pitch : t->width, src_pitch = t->height > 1 ? t->src_pitch : t->width;
    xd_error cause;
    if (sim_memory_check(s, t->src_device, t->src, span(t->width, t->height, src_pitch), op->seq, "copy", &cause) ||
        sim_memory_check(s, t->dst_device, t->dst, span(t->width, t->height, dst_pitch), op->seq, "copy", &cause)) {
        fail_device(s, op, &cause);
        return;
    }
    sim_deliver(s, op);
}

static void set(sim *s, sim_op *op)
{
    xd_error cause;
    if (sim_memory_check(s, op->stream->device, op->u.fill.address, op->bytes, op->seq, "fill", &cause))
        fail_device(s, op, &cause);
    else
        memset((void *)(uintptr_t)op->u.fill.address, op->u.fill.byte, op->bytes);
}

/* Calls out without the lock: what is called may take other locks, or call us. */
static int call(sim *s, sim_op *op, bool run)
{
    int result = 0;
    s->calling = true;
    pthread_mutex_unlock(&s->lock);
    if (run)
        result = op->u.kernel.run(op->u.kernel.arg);
    if (op->u.kernel.drop)
        op->u.kernel.drop(op->u.kernel.arg);
    pthread_mutex_lock(&s->lock);
    s->calling = false;
    op->u.kernel.drop = NULL;
    return result;
}

static void act(sim *s, sim_op *op)
{
    bool works = s->devices[op->stream->device].fault.status == XD_OK;
    if (works && op->loses) {
        xd_error cause;
        xd_fail(&cause, XD_DEVICE_FAULT, 0, op->label, "it was lost while it ran %s", op->label);
        fail_device(s, op, &cause);
        works = false;
    }
    if (op->kind == SIM_KERNEL) {
        int result = call(s, op, works);
        if (result) {
            xd_error cause;
            xd_fail(&cause, XD_DEVICE_FAULT, result, op->label, "%s returned %d", op->label, result);
            fail_device(s, op, &cause);
        }
    } else if (works && op->kind == SIM_COPY) {
        move(s, op);
    } else if (works && op->kind == SIM_FILL) {
        set(s, op);
    }
}

/* ---- the life of an operation ---- */

static void finish(sim *s, sim_op *op)
{
    sim_stream *stream = op->stream;
    stream->head = op->next;
    if (stream->head)
        sim_schedule(s, stream->head, stream->head->submitted > s->now ? stream->head->submitted : s->now);
    else
        stream->tail = NULL;
    s->live_ops--;
    sim_op_free(op);
    if (!stream->head && stream->closed)
        sim_stream_forget(s, stream);
}

static bool is_first(const sim_op *op)
{
    for (int i = 0; i < op->engine_count; i++)
        if (op->engines[i]->head != op)
            return false;
    return true;
}

static sim_op **next_in(sim_op *op, const sim_engine *engine)
{
    return &op->engine_next[op->engines[0] == engine ? 0 : 1];
}

static void join_engines(sim *s, sim_op *op)
{
    for (int i = 0; i < op->engine_count; i++) {
        sim_engine *engine = op->engines[i];
        if (engine->tail)
            *next_in(engine->tail, engine) = op;
        else
            engine->head = op;
        engine->tail = op;
    }
    op->state = SIM_READY;
    if (is_first(op))
        sim_schedule(s, op, s->now);
}

static void leave_engines(sim *s, sim_op *op)
{
    for (int i = 0; i < op->engine_count; i++) {
        sim_engine *engine = op->engines[i];
        engine->head = op->engine_next[i];
        if (!engine->head)
            engine->tail = NULL;
    }
    for (int i = 0; i < op->engine_count; i++) {
        sim_op *head = op->engines[i]->head;
        if (head && is_first(head))
            sim_schedule(s, head, s->now);
    }
}

static uint64_t hop(const sim *s, const sim_op *waiter)
{
    return waiter->u.stamp->device == waiter->stream->device ? 0 : s->config.hop;
}

static void complete(sim *s, sim_stamp *stamp)
{
    stamp->done = true;
    stamp->time = s->now;
    for (sim_op *waiter = stamp->waiters; waiter; waiter = waiter->next_waiter) {
        waiter->state = SIM_RUNNING;
        sim_schedule(s, waiter, s->now + hop(s, waiter));
    }
    stamp->waiters = NULL;
}

/* The device has failed: the record never comes. Only the waits on the same device, which is dead too, go on. */
static void lose(sim *s, sim_stamp *stamp)
{
    stamp->lost = true;
    for (sim_op *waiter = stamp->waiters; waiter; waiter = waiter->next_waiter)
        if (waiter->stream->device == stamp->device) {
            waiter->state = SIM_RUNNING;
            sim_schedule(s, waiter, s->now);
        }
    stamp->waiters = NULL;
}

static void wait_for(sim *s, sim_op *op)
{
    sim_stamp *stamp = op->u.stamp;
    if (stamp->done) {
        uint64_t seen = stamp->time + hop(s, op);
        op->state = SIM_RUNNING;
        sim_schedule(s, op, seen > s->now ? seen : s->now);
        return;
    }
    op->state = SIM_STUCK;
    if (stamp->lost)
        return;
    op->next_waiter = stamp->waiters;
    stamp->waiters = op;
}

static void take_turn(sim *s, sim_op *op)
{
    bool works = s->devices[op->stream->device].fault.status == XD_OK;
    if (op->kind == SIM_RECORD) {
        if (!works)
            lose(s, op->u.stamp);
        else if (!op->u.stamp->done)
            complete(s, op->u.stamp);
        finish(s, op);
    } else if (!works) {
        act(s, op);
        finish(s, op);
    } else if (op->kind == SIM_WAIT) {
        wait_for(s, op);
    } else {
        join_engines(s, op);
    }
}

static void start(sim *s, sim_op *op)
{
    op->start = s->now;
    op->after = op->stream->after;
    op->stream->after = op->stream->after_time = 0;
    if (op->hangs) {
        op->state = SIM_STUCK;
        return;
    }
    if (op->on_bus) {
        op->state = SIM_DATA;
        sim_bus_join(s, op);
    } else {
        op->state = SIM_RUNNING;
        sim_schedule(s, op, s->now + op->duration);
    }
    if (!op->late)
        act(s, op);
}

static void note_wait(const sim_op *op)
{
    sim_stream *stream = op->stream;
    const sim_stamp *stamp = op->u.stamp;
    if (stamp->done && stamp->after && stamp->time >= stream->after_time) {
        stream->after = stamp->after;
        stream->after_time = stamp->time;
    }
}

static void end(sim *s, sim_op *op)
{
    if (op->kind == SIM_WAIT) {
        note_wait(op);
        finish(s, op);
        return;
    }
    if (op->late)
        act(s, op);
    sim_trace_op(s, op);
    leave_engines(s, op);
    finish(s, op);
}

void sim_step(sim *s, sim_op *op)
{
    switch (op->state) {
    case SIM_QUEUED:
        take_turn(s, op);
        break;
    case SIM_READY:
        start(s, op);
        break;
    case SIM_DATA:
        sim_bus_leave(s, op);
        op->state = SIM_RUNNING;
        sim_schedule(s, op, s->now + op->duration);
        break;
    default:
        end(s, op);
        break;
    }
}
