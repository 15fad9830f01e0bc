/* A copy of nothing keeps the order: what waits for its arrival comes after its source was ready. */
#include "check.h"
#include "machine.h"

static int set(void *arg)
{
    *(int *)arg = 1;
    return 0;
}

static int now, seen;

static int look(void *arg)
{
    (void)arg;
    seen = now;
    return 0;
}

static int order_kept(int path, uint64_t seed)
{
    xd_error err;
    xd_runtime *runtime;
    xd_stream *front, *back;
    xd_link *link;
    xd_event *ready, *released, *arrived, *end;
    int done = 0;
    now = seen = 0;
    OK(xd_runtime_open(&runtime, machine_jumbled(2, seed), NULL, &err));
    OK(xd_stream_open(&front, runtime, 0, &err));
    OK(xd_stream_open(&back, runtime, 1, &err));
    OK(xd_link_open(&link, runtime, 0, 1, &(xd_link_options){.path = path, .gate = 1}, &err));
    xd_event **const events[] = {&ready, &released, &arrived, &end};
    for (int i = 0; i < 4; i++)
        OK(xd_event_open(events[i], runtime, 0, &err));
    OK(xd_stream_launch(front, &(xd_kernel){.run = set, .arg = &now, .cost = 500000}, &err));
    OK(xd_event_record(ready, front, &err));
    OK(xd_link_copy(link, &(xd_copy){.source_ready = ready, .released = released, .arrived = arrived}, &err));
    OK(xd_event_query(released, &done, &err));
    CHECK_EQ(done, 0);
    OK(xd_stream_wait(back, arrived, &err));
    OK(xd_stream_launch(back, &(xd_kernel){.run = look, .cost = 10}, &err));
    OK(xd_event_record(end, back, &err));
    OK(xd_event_wait(end, XD_FOREVER, &done, &err));
    for (int i = 0; i < 4; i++)
        xd_event_close(events[i]);
    xd_link_close(&link);
    xd_stream_close(&front);
    xd_stream_close(&back);
    OK(xd_runtime_close(&runtime, &err));
    return seen;
}

int main(void)
{
    static const int paths[] = {XD_STAGED, XD_DIRECT};
    for (int i = 0; i < 2; i++)
        for (uint64_t seed = 1; seed < 5; seed++)
            CHECK(order_kept(paths[i], seed));
    return 0;
}
