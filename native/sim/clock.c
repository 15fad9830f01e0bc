/*
 * Virtual time. Every live operation has at most one point of time at which something happens to it next; the points
 * are taken in order, those of the same time in order of submission. Time is simulated up to the host's clock, or
 * further while a thread waits: then the host's clock comes along.
 */
#include "internal.h"

#include <stdlib.h>

/* ---- the heap of points ---- */

static bool before(const sim_op *a, const sim_op *b)
{
    return a->at != b->at ? a->at < b->at : a->seq < b->seq;
}

static void put(sim_heap *heap, size_t place, sim_op *op)
{
    heap->ops[place] = op;
    op->heap = place;
}

static void rise(sim_heap *heap, size_t place, sim_op *op)
{
    while (place > 0 && before(op, heap->ops[(place - 1) / 2])) {
        put(heap, place, heap->ops[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(heap, place, op);
}

static void sink(sim_heap *heap, size_t place, sim_op *op)
{
    for (size_t child; (child = 2 * place + 1) < heap->count; place = child) {
        if (child + 1 < heap->count && before(heap->ops[child + 1], heap->ops[child]))
            child++;
        if (!before(heap->ops[child], op))
            break;
        put(heap, place, heap->ops[child]);
    }
    put(heap, place, op);
}

int sim_heap_reserve(sim *s, size_t ops)
{
    if (ops <= s->heap.capacity)
        return XD_OK;
    size_t capacity = s->heap.capacity ? 2 * s->heap.capacity : 256;
    sim_op **grown = realloc(s->heap.ops, capacity * sizeof *grown);
    if (!grown)
        return XD_NO_HOST_MEMORY;
    s->heap.ops = grown;
    s->heap.capacity = capacity;
    return XD_OK;
}

void sim_schedule(sim *s, sim_op *op, uint64_t at)
{
    op->at = at;
    size_t place = op->heap == SIM_NO_PLACE ? s->heap.count++ : op->heap;
    rise(&s->heap, place, op);
    if (op->heap == place)
        sink(&s->heap, place, op);
}

static sim_op *take_first(sim_heap *heap)
{
    sim_op *first = heap->ops[0];
    sim_op *last = heap->ops[--heap->count];
    if (last != first)
        sink(heap, 0, last);
    first->heap = SIM_NO_PLACE;
    return first;
}

/* ---- running ---- */

bool sim_in_callback(const sim *s)
{
    return s->calling && pthread_equal(s->runner, pthread_self());
}

bool sim_reached(const sim *s, const sim_goal *goal)
{
    if (goal->stamp)
        return goal->stamp->done || goal->stamp->lost;
    if (!goal->drain)
        return false;
    for (const sim_stream *stream = s->streams; stream; stream = stream->next)
        if ((goal->device == XD_HOST || goal->device == stream->device) && stream->head &&
            stream->head->seq <= goal->last_op)
            return false;
    return true;
}

static void run(sim *s, const sim_goal *goal, uint64_t limit)
{
    s->running = true;
    s->runner = pthread_self();
    while (s->heap.count && s->heap.ops[0]->at <= limit && !sim_reached(s, goal)) {
        sim_op *op = take_first(&s->heap);
        s->now = op->at;
        if (s->host < s->now)
            s->host = s->now;
        sim_step(s, op);
    }
    s->running = false;
    pthread_cond_broadcast(&s->idle);
}

int sim_run(sim *s, const sim_goal *goal, uint64_t limit, const char *operation, xd_error *err)
{
    if (sim_in_callback(s))
        return xd_fail(err, XD_INVALID, 0, operation, "a kernel must not wait for a device");
    while (s->running && !sim_reached(s, goal))
        pthread_cond_wait(&s->idle, &s->lock);
    if (!s->running)
        run(s, goal, limit);
    return XD_OK;
}

void sim_catch_up(sim *s)
{
    static const sim_goal none;
    if (!s->running)
        run(s, &none, s->host);
}

/* ---- waits that cannot end ---- */

const xd_error *sim_blocking_fault(const sim *s, const sim_stamp *stamp)
{
    /* Each step goes to an operation submitted earlier, so this ends. */
    while (stamp && !stamp->done) {
        if (stamp->lost)
            return &s->devices[stamp->device].fault;
        const sim_op *head = stamp->stream->head;
        stamp = head && head->kind == SIM_WAIT ? head->u.stamp : NULL;
    }
    return NULL;
}
