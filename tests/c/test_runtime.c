/* Opening, counting, closing in the wrong order, and what is asked of devices that do not exist. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorder rec;

static int run_kernel(void *arg)
{
    *(int *)arg += 1;
    return 0;
}

static void drop_kernel(void *arg)
{
    *(int *)arg += 10;
}

static void no_device(void)
{
    xd_runtime *runtime = NULL;
    recorder_open(&rec, 0);
    FAILS(xd_runtime_open(&runtime, &rec.table, NULL, &err), XD_NO_DEVICE);
    CHECK(!runtime);
    CHECK_EQ(rec.closed, 0); /* still the caller's */
    rec.table.close(&rec.table);
    recorder_close(&rec);
}

static void children(void)
{
    xd_runtime *runtime, *none = NULL;
    xd_stream *streams[2];
    xd_buffer *device, *pinned, *empty;
    xd_event *event;
    xd_ring *ring;
    xd_throttle *throttle;
    xd_live live;
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, &(xd_runtime_options){.force_sync = 1}, &err));
    CHECK_EQ(xd_runtime_forced_sync(runtime), 1);
    CHECK_TEXT(xd_runtime_backend(runtime), "recorder");
    CHECK_EQ(xd_runtime_device_count(runtime), 2);
    OK(xd_stream_open(&streams[0], runtime, 0, &err));
    OK(xd_stream_open(&streams[1], runtime, 1, &err));
    CHECK_EQ(xd_stream_device(streams[1]), 1);
    CHECK(xd_stream_handle(streams[1]));
    OK(xd_buffer_open(&device, runtime, 1, 100, &err));
    OK(xd_buffer_open(&pinned, runtime, XD_HOST, 30, &err));
    OK(xd_buffer_open(&empty, runtime, 0, 0, &err));
    CHECK_EQ(xd_buffer_address(empty), 0);
    CHECK_EQ(xd_buffer_bytes(device), 100);
    CHECK_EQ(xd_buffer_device(pinned), XD_HOST);
    OK(xd_event_open(&event, runtime, 0, &err));
    OK(xd_ring_open(&ring, runtime, 2, 10, &err));
    OK(xd_throttle_open(&throttle, runtime, 3, &err));
    xd_runtime_live(runtime, &live);
    CHECK_EQ(live.streams, 2);
    CHECK_EQ(live.events, 1 + 2 + 3);
    CHECK_EQ(live.buffers, 3 + 1);
    CHECK_EQ(live.rings, 1);
    CHECK_EQ(live.throttles, 1);
    CHECK_EQ(live.device_bytes, 100);
    CHECK_EQ(live.pinned_bytes, 30 + 20);

    FAILS(xd_runtime_close(&runtime, &err), XD_BUSY);
    CHECK_TEXT(err.text, "the runtime has live children: 2 streams, 6 events, 4 buffers, 1 ring, 1 throttle");
    CHECK(runtime);
    CHECK_EQ(rec.closed, 0);
    xd_throttle_close(&throttle);
    xd_ring_close(&ring);
    xd_event_close(&event);
    xd_buffer_close(&empty);
    xd_buffer_close(&pinned);
    xd_buffer_close(&device);
    xd_stream_close(&streams[0]);
    FAILS(xd_runtime_close(&runtime, &err), XD_BUSY);
    CHECK_TEXT(err.text, "the runtime has live children: 1 stream");
    xd_stream_close(&streams[1]);
    xd_stream_close(&streams[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    OK(xd_runtime_close(&runtime, &err));
    OK(xd_runtime_close(&none, &err));
    OK(xd_runtime_close(NULL, &err));
    recorder_close(&rec);
}

static void questions(void)
{
    xd_runtime *runtime;
    xd_stream *stream = NULL;
    xd_buffer *buffer = NULL;
    xd_device_info info;
    uint64_t free_bytes, total;
    int answer;
    recorder_open(&rec, 1);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_runtime_device_info(runtime, 0, &info, &err));
    CHECK_TEXT(info.name, "recorder");
    OK(xd_runtime_memory_info(runtime, 0, &free_bytes, &total, &err));
    CHECK_EQ(total, UINT64_C(1) << 40);
    static const int wrong[] = {1, -1, -2, 1000};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        FAILS(xd_runtime_device_info(runtime, wrong[i], &info, &err), XD_INVALID);
        CHECK_HAS(err.text, "there is device 0 only");
        FAILS(xd_runtime_memory_info(runtime, wrong[i], &free_bytes, &total, &err), XD_INVALID);
        FAILS(xd_stream_open(&stream, runtime, wrong[i], &err), XD_INVALID);
        FAILS(xd_runtime_peer_capable(runtime, 0, wrong[i], &answer, &err), XD_INVALID);
        FAILS(xd_runtime_peer_enable(runtime, wrong[i], 0, &answer, &err), XD_INVALID);
        if (wrong[i] != XD_HOST)
            FAILS(xd_buffer_open(&buffer, runtime, wrong[i], 1, &err), XD_INVALID);
    }
    FAILS(xd_runtime_peer_capable(runtime, 0, 0, &answer, &err), XD_INVALID);
    CHECK_HAS(err.text, "not a peer of itself");
    CHECK(!stream && !buffer);
    uint64_t now = xd_runtime_clock(runtime);
    CHECK(xd_runtime_clock(runtime) >= now && now > 0);
    OK(xd_host_access(runtime, &now, sizeof now, 1, &err));
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

/* "Not enabled" is an answer; a pair that is not capable is not even tried. */
static void peers(void)
{
    xd_runtime *runtime;
    int enabled = 7;
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_runtime_peer_enable(runtime, 0, 1, &enabled, &err));
    CHECK_EQ(enabled, 1);
    CHECK_TEXT(rec.log, "peer_enable 0 1\n");
    rec.peer_capable = 0;
    OK(xd_runtime_peer_enable(runtime, 1, 0, &enabled, &err));
    CHECK_EQ(enabled, 0);
    CHECK_TEXT(rec.log, "peer_enable 0 1\n");
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void kernels(void)
{
    xd_runtime *runtime;
    xd_stream *stream;
    int ran = 0, idle = 0;
    recorder_open(&rec, 1);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_stream_launch(stream, &(xd_kernel){.run = run_kernel, .drop = drop_kernel, .arg = &ran}, &err));
    CHECK_EQ(ran, 11);
    FAILS(xd_stream_launch(stream, &(xd_kernel){.drop = drop_kernel, .arg = &ran}, &err), XD_INVALID);
    CHECK_EQ(ran, 21);
    OK(xd_stream_query(stream, &idle, &err));
    CHECK_EQ(idle, 1);
    xd_stream_close(&stream);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

/* A stream of somebody else is used and left alone. */
static void adopted(void)
{
    xd_runtime *runtime;
    xd_stream *theirs, *ours = NULL;
    xd_event *event;
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_stream_open(&theirs, runtime, 1, &err));
    FAILS(xd_stream_adopt(&ours, runtime, 1, NULL, &err), XD_INVALID);
    FAILS(xd_stream_adopt(&ours, runtime, 2, xd_stream_handle(theirs), &err), XD_INVALID);
    OK(xd_stream_adopt(&ours, runtime, 1, xd_stream_handle(theirs), &err));
    OK(xd_event_open(&event, runtime, 0, &err));
    OK(xd_event_record(event, ours, &err));
    CHECK_TEXT(rec.log, "s0 record e0\n");
    xd_event_close(&event);
    xd_stream_close(&ours);
    CHECK_EQ(rec.live, 1);
    xd_stream_close(&theirs);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

int main(void)
{
    no_device();
    children();
    questions();
    peers();
    kernels();
    adopted();
    return 0;
}
