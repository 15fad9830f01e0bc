/*
 * Graphs: what a stream would have queued is kept instead, and queued anew at every launch. As strict as the strictest
 * vendor: a stream that captures takes copies, fills and kernels alone, and the thread that captures must not wait, ask,
 * allocate or free. Whatever else is tried spoils the capture.
 */
#include "internal.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct node {
    struct node *next;
    sim_graph *graph;
    sim_op op; /* as it would have been queued */
    size_t range_count;
    xd_range ranges[];
} node;

struct sim_graph {
    atomic_int refs; /* the capture or the handle, and every kernel that is queued */
    int device;
    pthread_t thread;
    node *first, **end;
    char spoiler[32]; /* what spoiled the capture; empty: nothing has */
};

void sim_graph_release(sim_graph *graph)
{
    if (atomic_fetch_sub(&graph->refs, 1) != 1)
        return;
    for (node *at = graph->first, *next; at; at = next) {
        next = at->next;
        if (at->op.kind == SIM_KERNEL && at->op.u.kernel.drop)
            at->op.u.kernel.drop(at->op.u.kernel.arg);
        free(at);
    }
    free(graph);
}

/* ---- what a capture forbids ---- */

static int spoil(sim_graph *graph, const char *operation, uint32_t stream, xd_error *err)
{
    if (!graph->spoiler[0])
        snprintf(graph->spoiler, sizeof graph->spoiler, "%s", operation);
    return xd_fail(err, XD_INVALID, 0, operation, "not while stream %" PRIu32 " of device %d is being captured", stream,
                   graph->device);
}

int sim_refuse_capture(const sim_stream *stream, const char *operation, xd_error *err)
{
    return stream->capture ? spoil(stream->capture, operation, stream->id, err) : XD_OK;
}

int sim_refuse_here(const sim *s, const char *operation, xd_error *err)
{
    if (!s->captures)
        return XD_OK;
    for (const sim_stream *stream = s->streams; stream; stream = stream->next)
        if (stream->capture && pthread_equal(stream->capture->thread, pthread_self()))
            return spoil(stream->capture, operation, stream->id, err);
    return XD_OK;
}

/* ---- recording ---- */

static int keep(sim_graph *graph, sim_op *op, const xd_range *ranges, size_t count, const char *operation, xd_error *err)
{
    node *made = malloc(sizeof *made + count * sizeof *ranges);
    if (!made)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for one more operation of a graph");
    made->next = NULL;
    made->graph = graph;
    made->op = *op;
    made->range_count = count;
    if (count)
        memcpy(made->ranges, ranges, count * sizeof *ranges);
    *graph->end = made;
    graph->end = &made->next;
    free(op);
    return XD_OK;
}

int sim_submit(sim *s, sim_op *op, uint64_t cost, const xd_range *ranges, size_t range_count, xd_error *err)
{
    sim_graph *graph = op->stream->capture;
    if (graph) {
        s->host += cost;
        int status = keep(graph, op, ranges, range_count, op->label, err);
        if (status)
            free(op);
        return status;
    }
    sim_append(s, op, cost);
    sim_order_submit(s, op, ranges, range_count);
    return XD_OK;
}

int sim_capture_begin(xd_driver *driver, int device, void *handle, xd_error *err)
{
    static const char operation[] = "capture_begin";
    sim *s = sim_of(driver);
    sim_stream *stream;
    sim_graph *graph = calloc(1, sizeof *graph);
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = sim_refuse_capture(stream, operation, err);
    if (!status && !graph)
        status = xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for a graph");
    if (!status) {
        s->host += s->config.costs.launch;
        graph->refs = 1;
        graph->device = device;
        graph->thread = pthread_self();
        graph->end = &graph->first;
        stream->capture = graph;
        s->captures++;
    }
    pthread_mutex_unlock(&s->lock);
    if (status)
        free(graph);
    return status;
}

static int take_capture(sim *s, sim_stream *stream, sim_graph **out, const char *operation, xd_error *err)
{
    sim_graph *graph = stream->capture;
    if (!graph)
        return xd_fail(err, XD_INVALID, 0, operation, "stream %" PRIu32 " is not being captured", stream->id);
    if (!pthread_equal(graph->thread, pthread_self()))
        return xd_fail(err, XD_INVALID, 0, operation, "another thread has begun to capture stream %" PRIu32, stream->id);
    stream->capture = NULL;
    s->captures--;
    *out = graph;
    return XD_OK;
}

int sim_capture_end(xd_driver *driver, int device, void *handle, void **out, xd_error *err)
{
    static const char operation[] = "capture_end";
    sim *s = sim_of(driver);
    sim_graph *graph = NULL;
    pthread_mutex_lock(&s->lock);
    sim_stream *stream = sim_table_find(&s->stream_table, handle);
    int status = XD_OK;
    if (!stream || stream->device != device)
        status = xd_fail(err, XD_INVALID, 0, operation, "%p is not a stream of device %d", handle, device);
    if (!status)
        status = take_capture(s, stream, &graph, operation, err);
    if (!status && graph->spoiler[0])
        status = xd_fail(err, XD_INVALID, 0, operation, "the capture was spoiled by %s", graph->spoiler);
    if (!status)
        s->host += s->config.costs.launch;
    if (!status && sim_table_add(&s->graph_table, graph, out))
        status = xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for a graph");
    pthread_mutex_unlock(&s->lock);
    if (status && graph)
        sim_graph_release(graph);
    return status;
}

/* ---- launching ---- */

static int run_node(void *arg)
{
    node *at = arg;
    return at->op.u.kernel.run(at->op.u.kernel.arg);
}

static void drop_node(void *arg)
{
    sim_graph_release(((node *)arg)->graph);
}

static int check_ranges(const sim *s, const node *at, xd_error *err)
{
    int status = XD_OK;
    for (size_t i = 0; i < at->range_count && !status; i++)
        if (at->ranges[i].bytes)
            status = sim_memory_check(s, at->ranges[i].device, at->ranges[i].address, at->ranges[i].bytes, UINT64_MAX,
                                      "graph_launch", err);
    return status;
}

/* All operations, not yet queued, one behind the other. */
static int copy_nodes(sim *s, const sim_graph *graph, sim_stream *stream, sim_op **out, xd_error *err)
{
    sim_op *first = NULL, **end = &first;
    int status = XD_OK;
    size_t count = 0;
    for (node *at = graph->first; at && !status; at = at->next) {
        status = check_ranges(s, at, err);
        sim_op *op = status || sim_heap_reserve(s, s->live_ops + ++count) ? NULL : malloc(sizeof *op);
        if (op) {
            *op = at->op;
            op->stream = stream;
            *end = op;
            end = &op->next;
        } else if (!status) {
            status = xd_fail(err, XD_NO_HOST_MEMORY, 0, "graph_launch", "no host memory for the operations of a graph");
        }
    }
    for (sim_op *next; status && first; first = next) {
        next = first->next;
        free(first);
    }
    *out = first;
    return status;
}

static void launch(sim *s, sim_graph *graph, sim_op *op)
{
    uint64_t cost = s->config.costs.launch; /* of all of it */
    s->host += graph->first ? 0 : cost;
    for (node *at = graph->first; at; at = at->next) {
        sim_op *next = op->next;
        op->next = NULL;
        if (op->kind == SIM_KERNEL) {
            op->u.kernel.run = run_node;
            op->u.kernel.drop = drop_node;
            op->u.kernel.arg = at;
            atomic_fetch_add(&graph->refs, 1);
        }
        sim_append(s, op, cost);
        sim_order_submit(s, op, at->ranges, at->range_count);
        cost = 0;
        op = next;
    }
}

int sim_graph_launch(xd_driver *driver, int device, void *handle, void *stream_handle, xd_error *err)
{
    static const char operation[] = "graph_launch";
    sim *s = sim_of(driver);
    sim_stream *stream;
    sim_op *ops = NULL;
    pthread_mutex_lock(&s->lock);
    sim_graph *graph = sim_table_find(&s->graph_table, handle);
    int status = sim_enter(s, device, stream_handle, operation, &stream, err);
    if (!status)
        status = sim_refuse_capture(stream, operation, err);
    if (!status && !graph)
        status = xd_fail(err, XD_INVALID, 0, operation, "%p is not a graph of this driver, or it was destroyed", handle);
    if (!status && graph->device != device)
        status = xd_fail(err, XD_INVALID, 0, operation, "the graph belongs to device %d, the call names device %d",
                         graph->device, device);
    if (!status)
        status = copy_nodes(s, graph, stream, &ops, err);
    if (!status)
        launch(s, graph, ops);
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_graph_destroy(xd_driver *driver, int device, void *handle, xd_error *err)
{
    static const char operation[] = "graph_destroy";
    sim *s = sim_of(driver);
    int status = XD_OK;
    pthread_mutex_lock(&s->lock);
    sim_graph *graph = sim_table_find(&s->graph_table, handle);
    if (!graph || graph->device != device)
        status = xd_fail(err, XD_INVALID, 0, operation, "%p is not a graph of device %d, or it was destroyed", handle,
                         device);
    else
        sim_table_remove(&s->graph_table, handle);
    pthread_mutex_unlock(&s->lock);
    if (!status)
        sim_graph_release(graph);
    return status;
}
