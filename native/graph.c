/* Graphs: what is queued on one stream between begin and end, to be queued again by one call. */
#include "internal.h"

#include <stdlib.h>

struct xd_graph {
    xd_runtime *runtime;
    int device;
    void *handle;
};

int xd_graph_begin(xd_stream *stream, xd_error *err)
{
    xd_driver *driver = stream->runtime->driver;
    int status = xd_runtime_enter(stream->runtime, "graph_begin", err);
    if (status)
        return status;
    if (!driver->capture_begin)
        return xd_fail(err, XD_UNSUPPORTED, 0, "graph_begin", "the %s driver has no graphs", driver->name);
    return driver->capture_begin(driver, stream->device, stream->handle, err);
}

int xd_graph_end(xd_graph **out, xd_stream *stream, xd_error *err)
{
    xd_runtime *runtime = stream->runtime;
    xd_driver *driver = runtime->driver;
    int status = xd_runtime_enter(runtime, "graph_end", err);
    if (status)
        return status;
    if (!driver->capture_end)
        return xd_fail(err, XD_UNSUPPORTED, 0, "graph_end", "the %s driver has no graphs", driver->name);
    void *handle;
    status = driver->capture_end(driver, stream->device, stream->handle, &handle, err);
    if (status)
        return status;
    xd_graph *graph = xd_new(sizeof *graph, "graph_end", err);
    if (!graph) {
        driver->graph_destroy(driver, stream->device, handle, NULL);
        return XD_NO_HOST_MEMORY;
    }
    *graph = (xd_graph){.runtime = runtime, .device = stream->device, .handle = handle};
    xd_runtime_count(runtime, XD_LIVE_GRAPHS, 1);
    *out = graph;
    return XD_OK;
}

int xd_graph_launch(xd_graph *graph, xd_stream *stream, xd_error *err)
{
    static const char operation[] = "graph_launch";
    xd_driver *driver = graph->runtime->driver;
    int status = xd_runtime_enter(graph->runtime, operation, err);
    if (!status)
        status = xd_runtime_check_same(graph->runtime, stream->runtime, operation, err);
    if (status)
        return status;
    if (graph->device != stream->device)
        return xd_fail(err, XD_INVALID, 0, operation, "the graph is of device %d, the stream of device %d",
                       graph->device, stream->device);
    return driver->graph_launch(driver, graph->device, graph->handle, stream->handle, err);
}

void xd_graph_close(xd_graph **at)
{
    xd_graph *graph = at ? *at : NULL;
    if (!graph)
        return;
    xd_driver *driver = graph->runtime->driver;
    if (xd_runtime_owned(graph->runtime))
        driver->graph_destroy(driver, graph->device, graph->handle, NULL);
    xd_runtime_count(graph->runtime, XD_LIVE_GRAPHS, -1);
    free(graph);
    *at = NULL;
}

int xd_graph_device(const xd_graph *graph)
{
    return graph->device;
}
