/* xd_graph over drivers with graphs and without: what is refused, who is counted, what a fork does. */
#include "check.h"
#include "machine.h"
#include "recorder.h"

#include <sys/wait.h>
#include <unistd.h>

static xd_error err;

static void test_a_driver_without_graphs(void)
{
    recorder rec;
    xd_driver *fault;
    xd_runtime *runtime;
    xd_stream *stream;
    xd_graph *graph = NULL;
    recorder_open(&rec, 1);
    OK(xd_fault_create(&fault, &rec.table, &err)); /* it has none either then */
    CHECK(!fault->capture_begin && !fault->capture_end && !fault->graph_launch && !fault->graph_destroy);
    OK(xd_runtime_open(&runtime, fault, NULL, &err));
    OK(xd_stream_open(&stream, runtime, 0, &err));
    FAILS(xd_graph_begin(stream, &err), XD_UNSUPPORTED);
    CHECK_HAS(err.text, "has no graphs");
    FAILS(xd_graph_end(&graph, stream, &err), XD_UNSUPPORTED);
    CHECK(!graph);
    xd_stream_close(&stream);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void test_counted_and_closed_once(void)
{
    machine *m = machine_make(2);
    xd_runtime *runtime = machine_runtime(m), *other = machine_runtime(m);
    xd_stream *stream, *elsewhere, *foreign;
    xd_graph *graph = NULL;
    xd_live live;
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_stream_open(&elsewhere, runtime, 1, &err));
    OK(xd_stream_open(&foreign, other, 0, &err));
    FAILS(xd_graph_end(&graph, stream, &err), XD_INVALID);
    CHECK(!graph);
    OK(xd_graph_begin(stream, &err));
    OK(xd_graph_end(&graph, stream, &err));
    CHECK_EQ(xd_graph_device(graph), 0);
    xd_runtime_live(runtime, &live);
    CHECK_EQ(live.graphs, 1);
    FAILS(xd_graph_launch(graph, elsewhere, &err), XD_INVALID);
    CHECK_HAS(err.text, "device 0, the stream of device 1");
    FAILS(xd_graph_launch(graph, foreign, &err), XD_INVALID);
    OK(xd_graph_launch(graph, stream, &err));
    FAILS(xd_runtime_close(&runtime, &err), XD_BUSY);
    CHECK_HAS(err.text, "1 graph");
    xd_graph_close(&graph);
    xd_graph_close(&graph);
    xd_graph_close(NULL);
    xd_stream_close(&stream);
    xd_stream_close(&elsewhere);
    xd_stream_close(&foreign);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    OK(xd_runtime_close(&other, &err));
    free(m);
}

static void test_a_forked_child_only_frees_its_own(void)
{
    machine *m = machine_make(1);
    xd_runtime *runtime = machine_runtime(m);
    xd_stream *stream;
    xd_graph *graph;
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_graph_begin(stream, &err));
    OK(xd_graph_end(&graph, stream, &err));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        FAILS(xd_graph_begin(stream, &err), XD_FORKED);
        FAILS(xd_graph_launch(graph, stream, &err), XD_FORKED);
        xd_graph_close(&graph);
        _exit(graph != NULL);
    }
    int code;
    CHECK_EQ(waitpid(child, &code, 0), child);
    CHECK_EQ(code, 0);
    OK(xd_graph_launch(graph, stream, &err));
    xd_graph_close(&graph);
    xd_stream_close(&stream);
    OK(xd_runtime_close(&runtime, &err));
    free(m);
}

int main(void)
{
    test_a_driver_without_graphs();
    test_counted_and_closed_once();
    test_a_forked_child_only_frees_its_own();
    return 0;
}
