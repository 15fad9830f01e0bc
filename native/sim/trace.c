/* What the engines and the host did, kept for pictures and tests. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

/* NULL: not wanted, or no memory; the trace is then shorter than what happened, and nothing else is wrong. */
static xd_sim_span *next_span(sim *s)
{
    sim_trace *trace = &s->trace;
    if (!s->config.trace)
        return NULL;
    if (trace->count == trace->capacity) {
        size_t capacity = trace->capacity ? 2 * trace->capacity : 256;
        xd_sim_span *spans = realloc(trace->spans, capacity * sizeof *spans);
        if (!spans)
            return NULL;
        trace->spans = spans;
        trace->capacity = capacity;
    }
    return &trace->spans[trace->count++];
}

void sim_trace_op(sim *s, const sim_op *op)
{
    for (int i = 0; i < op->engine_count; i++) {
        const sim_engine *engine = op->engines[i];
        xd_sim_span *span = next_span(s);
        if (!span)
            return;
        *span = (xd_sim_span){
            .engine = engine->kind,
            .device = engine->device,
            .peer = engine->peer,
            .operation = op->seq,
            .after = op->after,
            .stream = op->stream->id,
            .submitted = op->submitted,
            .start = op->start,
            .end = s->now,
            .bytes = op->bytes,
        };
        snprintf(span->label, sizeof span->label, "%s", op->label);
    }
}

void sim_trace_host(sim *s, const char *label, uint64_t start, uint64_t end)
{
    xd_sim_span *span = start < end ? next_span(s) : NULL;
    if (!span)
        return;
    *span = (xd_sim_span){.engine = XD_SIM_ON_HOST, .device = XD_HOST, .peer = XD_HOST, .submitted = start,
                          .start = start, .end = end};
    snprintf(span->label, sizeof span->label, "%s", label);
}

size_t xd_sim_trace(xd_driver *driver, xd_sim_span *out, size_t first, size_t room)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    size_t count = s->trace.count;
    for (size_t i = first; i < count && i - first < room; i++)
        out[i - first] = s->trace.spans[i];
    pthread_mutex_unlock(&s->lock);
    return count;
}
