/* Graphs of simulated devices: kernels run again and are dropped once, the checker sees every launch, what a capture
   forbids, and what is left when it is never ended. */
#include "check.h"
#include "machine.h"

static xd_error err;

typedef struct job {
    int runs, drops;
} job;

static int run(void *arg)
{
    ((job *)arg)->runs++;
    return 0;
}

static void drop(void *arg)
{
    ((job *)arg)->drops++;
}

static void launch(xd_driver *d, void *stream, job *j)
{
    xd_kernel kernel = {.run = run, .drop = drop, .arg = j, .cost = 1000};
    OK(d->launch(d, 0, stream, &kernel, &err));
}

static void drain(xd_driver *d, void *event, void *stream)
{
    int done;
    OK(d->event_record(d, 0, event, stream, &err));
    OK(d->event_wait(d, 0, event, XD_FOREVER, &done, &err));
    CHECK(done);
}

static void test_kernels_run_again_and_are_dropped_once(void)
{
    machine *m = machine_make(1);
    xd_driver *d = machine_driver(m);
    void *stream, *event, *graph;
    job j = {0};
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->capture_begin(d, 0, stream, &err));
    launch(d, stream, &j);
    launch(d, stream, &j);
    OK(d->capture_end(d, 0, stream, &graph, &err));
    drain(d, event, stream);
    CHECK_EQ(j.runs, 0);
    for (int i = 1; i <= 3; i++) {
        OK(d->graph_launch(d, 0, graph, stream, &err));
        drain(d, event, stream);
        CHECK_EQ(j.runs, 2 * i);
    }
    OK(d->graph_launch(d, 0, graph, stream, &err));
    CHECK_EQ(j.drops, 0);
    OK(d->graph_destroy(d, 0, graph, &err)); /* with a launch still queued */
    CHECK_EQ(j.drops, 0);
    drain(d, event, stream);
    CHECK_EQ(j.runs, 8);
    CHECK_EQ(j.drops, 2);
    FAILS(d->graph_launch(d, 0, graph, stream, &err), XD_INVALID);
    FAILS(d->graph_destroy(d, 0, graph, &err), XD_INVALID);
    d->close(d);
    free(m);
}

/* Begun or queued, and the driver closes. */
static void test_nothing_is_left_behind(void)
{
    for (int way = 0; way < 4; way++) {
        machine *m = machine_make(1);
        xd_driver *d = machine_driver(m);
        void *stream, *graph;
        job j = {0};
        OK(d->stream_create(d, 0, &stream, &err));
        OK(d->capture_begin(d, 0, stream, &err));
        launch(d, stream, &j);
        if (way == 1) {
            OK(d->stream_destroy(d, 0, stream, &err));
            CHECK_EQ(j.drops, 1);
        } else if (way > 1) {
            OK(d->capture_end(d, 0, stream, &graph, &err));
        }
        if (way == 3)
            OK(d->graph_launch(d, 0, graph, stream, &err));
        d->close(d);
        CHECK_EQ(j.drops, 1);
        CHECK_EQ(j.runs, 0);
        free(m);
    }
}

static void test_one_launch_costs_the_host_one_call(void)
{
    machine *m = machine_make(1);
    xd_driver *d = machine_driver(m);
    void *stream, *graph;
    uint64_t block;
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->device_alloc(d, 0, 4096, &block, &err));
    OK(d->capture_begin(d, 0, stream, &err));
    for (int i = 0; i < 50; i++)
        OK(d->fill(d, 0, stream, block, i, 4096, &err));
    OK(d->capture_end(d, 0, stream, &graph, &err));
    uint64_t before = d->clock(d);
    OK(d->graph_launch(d, 0, graph, stream, &err));
    CHECK_EQ(d->clock(d) - before, 1000);
    d->close(d);
    free(m);
}

static void test_the_checker_sees_every_launch(void)
{
    machine *m = machine_make(1);
    m->config.check = 1;
    xd_driver *d = machine_driver(m);
    void *stream, *other, *event, *graph;
    uint64_t block;
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->stream_create(d, 0, &other, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->device_alloc(d, 0, 4096, &block, &err));
    xd_range range = {.device = 0, .address = block, .bytes = 4096, .write = 1};
    xd_kernel kernel = {.run = run, .drop = drop, .arg = &(job){0}, .ranges = &range, .range_count = 1};
    OK(d->capture_begin(d, 0, stream, &err));
    OK(d->launch(d, 0, stream, &kernel, &err));
    OK(d->capture_end(d, 0, stream, &graph, &err));
    OK(d->fill(d, 0, other, block, 1, 4096, &err));
    CHECK_EQ(xd_sim_violations(d, NULL, 0), 0); /* the capture itself has written nothing */
    OK(d->event_record(d, 0, event, other, &err));
    OK(d->stream_wait(d, 0, stream, event, &err));
    OK(d->graph_launch(d, 0, graph, stream, &err));
    CHECK_EQ(xd_sim_violations(d, NULL, 0), 0);
    OK(d->fill(d, 0, other, block, 2, 4096, &err));
    CHECK_EQ(xd_sim_violations(d, NULL, 0), 1);
    OK(d->graph_launch(d, 0, graph, stream, &err));
    CHECK_EQ(xd_sim_violations(d, NULL, 0), 2);
    d->close(d);
    free(m);
}

static void test_what_a_capture_forbids(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    void *stream, *event, *inside, *graph;
    uint64_t block;
    void *pinned;
    int answer;
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->event_create(d, 0, 0, &inside, &err));
    OK(d->event_record(d, 0, event, stream, &err));
    OK(d->device_alloc(d, 1, 4096, &block, &err));
    for (int what = 0; what < 10; what++) {
        OK(d->capture_begin(d, 0, stream, &err));
        switch (what) {
        case 0: FAILS(d->stream_query(d, 0, stream, &answer, &err), XD_INVALID); break;
        case 1: FAILS(d->event_query(d, 0, event, &answer, &err), XD_INVALID); break;
        case 2: FAILS(d->event_wait(d, 0, event, 1, &answer, &err), XD_INVALID); break;
        case 3: FAILS(d->stream_wait(d, 0, stream, event, &err), XD_INVALID); break;
        case 4: FAILS(d->event_record(d, 0, inside, stream, &err), XD_INVALID); break;
        case 5: FAILS(d->device_alloc(d, 1, 64, &block, &err), XD_INVALID); break;
        case 6: FAILS(d->device_free(d, 1, block, &err), XD_INVALID); break;
        case 7: FAILS(d->host_alloc(d, 64, &pinned, &err), XD_INVALID); break;
        case 8: FAILS(d->capture_begin(d, 0, stream, &err), XD_INVALID); break;
        default: break;
        }
        if (what < 9) {
            CHECK_HAS(err.text, "being captured");
            FAILS(d->capture_end(d, 0, stream, &graph, &err), XD_INVALID);
            CHECK_HAS(err.text, "spoiled by");
        } else {
            OK(d->capture_end(d, 0, stream, &graph, &err));
            OK(d->graph_destroy(d, 0, graph, &err));
        }
        OK(d->stream_query(d, 0, stream, &answer, &err));
    }
    FAILS(d->capture_end(d, 0, stream, &graph, &err), XD_INVALID);
    d->close(d);
    free(m);
}

static void test_memory_must_still_be_there(void)
{
    machine *m = machine_make(1);
    xd_driver *d = machine_driver(m);
    void *stream, *event, *graph;
    uint64_t block;
    int done;
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->device_alloc(d, 0, 4096, &block, &err));
    OK(d->capture_begin(d, 0, stream, &err));
    OK(d->fill(d, 0, stream, block, 1, 4096, &err));
    OK(d->capture_end(d, 0, stream, &graph, &err));
    OK(d->device_free(d, 0, block, &err));
    OK(d->graph_launch(d, 0, graph, stream, &err));
    OK(d->event_record(d, 0, event, stream, &err));
    FAILS(d->event_wait(d, 0, event, XD_FOREVER, &done, &err), XD_DEVICE_FAULT);
    d->close(d);
    free(m);
}

int main(void)
{
    test_kernels_run_again_and_are_dropped_once();
    test_nothing_is_left_behind();
    test_one_launch_costs_the_host_one_call();
    test_the_checker_sees_every_launch();
    test_what_a_capture_forbids();
    test_memory_must_still_be_there();
    return 0;
}
