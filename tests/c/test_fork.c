/* In a forked child every object is inert: calls raise FORKED, closing frees host memory and never calls the driver. */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "internal.h"
#include "recorder.h"

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static xd_stream *stream;
static xd_event *event;
static xd_buffer *buffer, *pinned;
static xd_ring *ring;
static xd_link *link_, *direct;
static xd_throttle *throttle;
static xd_tile tile;

static int never_run(void *arg)
{
    (void)arg;
    return 0;
}

static void mark_dropped(void *arg)
{
    *(int *)arg = 1;
}

static void child(void)
{
    xd_device_info info;
    uint64_t bytes;
    int answer, dropped = 0;
    unsigned count;
    double seconds;
    void *none = NULL;
    rec.table = (xd_driver){.name = "gone"}; /* every call through the table crashes from here on */

    FAILS(xd_runtime_device_info(runtime, 0, &info, &err), XD_FORKED);
    CHECK_HAS(err.text, "opened by process");
    FAILS(xd_runtime_memory_info(runtime, 0, &bytes, &bytes, &err), XD_FORKED);
    FAILS(xd_runtime_peer_capable(runtime, 0, 1, &answer, &err), XD_FORKED);
    FAILS(xd_runtime_peer_enable(runtime, 0, 1, &answer, &err), XD_FORKED);
    CHECK(xd_runtime_clock(runtime) > 0);
    FAILS(xd_stream_open((xd_stream **)&none, runtime, 0, &err), XD_FORKED);
    FAILS(xd_stream_wait(stream, event, &err), XD_FORKED);
    FAILS(xd_stream_query(stream, &answer, &err), XD_FORKED);
    FAILS(xd_stream_fill(stream, xd_buffer_address(buffer), 0, 8, &err), XD_FORKED);
    FAILS(xd_stream_copy(stream, &(xd_transfer){.width = 1, .height = 1}, &err), XD_FORKED);
    xd_kernel kernel = {.run = never_run, .drop = mark_dropped, .arg = &dropped};
    FAILS(xd_stream_launch(stream, &kernel, &err), XD_FORKED);
    CHECK_EQ(dropped, 1);
    FAILS(xd_event_open((xd_event **)&none, runtime, 0, &err), XD_FORKED);
    FAILS(xd_event_record(event, stream, &err), XD_FORKED);
    FAILS(xd_event_query(event, &answer, &err), XD_FORKED);
    FAILS(xd_event_wait(event, XD_FOREVER, &answer, &err), XD_FORKED);
    FAILS(xd_event_elapsed(event, event, &seconds, &err), XD_FORKED);
    FAILS(xd_buffer_open((xd_buffer **)&none, runtime, 0, 8, &err), XD_FORKED);
    FAILS(xd_buffer_open((xd_buffer **)&none, runtime, XD_HOST, 8, &err), XD_FORKED);
    FAILS(xd_host_access(runtime, &answer, sizeof answer, 0, &err), XD_FORKED);
    FAILS(xd_ring_open((xd_ring **)&none, runtime, 1, 8, &err), XD_FORKED);
    FAILS(xd_ring_acquire(ring, XD_FOREVER, &tile, &answer, &err), XD_FORKED);
    FAILS(xd_ring_submit(ring, &tile, stream, &err), XD_FORKED);
    FAILS(xd_ring_drain(ring, &err), XD_FORKED);
    xd_ring_release(ring, &tile);
    FAILS(xd_link_open((xd_link **)&none, runtime, 0, 1, &(xd_link_options){0}, &err), XD_FORKED);
    FAILS(xd_link_copy(link_, &(xd_copy){.width = 1, .height = 1}, &err), XD_FORKED);
    FAILS(xd_throttle_open((xd_throttle **)&none, runtime, 1, &err), XD_FORKED);
    FAILS(xd_throttle_admit(throttle, 0, &answer, &err), XD_FORKED);
    FAILS(xd_throttle_retire(throttle, stream, &err), XD_FORKED);
    FAILS(xd_throttle_in_flight(throttle, &count, &err), XD_FORKED);
    xd_throttle_withdraw(throttle);
    CHECK(!none);

    FAILS(xd_runtime_close(&runtime, &err), XD_BUSY);
    xd_throttle_close(&throttle);
    xd_link_close(&link_);
    xd_link_close(&direct);
    xd_ring_close(&ring);
    xd_buffer_close(&buffer);
    xd_buffer_close(&pinned);
    xd_event_close(&event);
    xd_stream_close(&stream);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
}

static void scenario(int with_mark)
{
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    const volatile char *mark = runtime->mark;
    if (!with_mark) /* as on a kernel without MADV_WIPEONFORK */
        runtime->mark = NULL;
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_event_open(&event, runtime, 0, &err));
    OK(xd_event_record(event, stream, &err));
    OK(xd_buffer_open(&buffer, runtime, 0, 64, &err));
    OK(xd_buffer_open(&pinned, runtime, XD_HOST, 64, &err));
    OK(xd_ring_open(&ring, runtime, 2, 8, &err));
    int got;
    OK(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err));
    OK(xd_throttle_open(&throttle, runtime, 2, &err));
    OK(xd_link_open(&link_, runtime, 0, 1, &(xd_link_options){.path = XD_STAGED}, &err));
    OK(xd_link_open(&direct, runtime, 0, 1, &(xd_link_options){.path = XD_DIRECT}, &err));

    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        child();
        _exit(42);
    }
    int how;
    CHECK_EQ(waitpid(pid, &how, 0), pid);
    CHECK(WIFEXITED(how));
    CHECK_EQ(WEXITSTATUS(how), 42);

    OK(xd_event_record(event, stream, &err)); /* the parent goes on */
    OK(xd_ring_submit(ring, &tile, stream, &err));
    xd_throttle_close(&throttle);
    xd_link_close(&link_);
    xd_link_close(&direct);
    xd_ring_close(&ring);
    xd_buffer_close(&buffer);
    xd_buffer_close(&pinned);
    xd_event_close(&event);
    xd_stream_close(&stream);
    runtime->mark = mark;
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

int main(void)
{
    scenario(1);
    scenario(0);
    return 0;
}
