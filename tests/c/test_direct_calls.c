/* The exact driver calls of direct copies, between two devices and within one, and what is refused. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static xd_stream *streams[2];
static xd_link *link_;
static xd_buffer *src, *dst;
static xd_event *ready, *space, *released, *arrived;
static xd_copy order;

static void begin(int to, int gate)
{
    static const char *const stream_names[] = {"front", "back", "out", NULL};
    static const char *const event_names[] = {"ready", "free", "released", "arrived", NULL};
    static const char *const memory[] = {"src", "dst", NULL};
    recorder_open(&rec, 2);
    rec.streams = stream_names;
    rec.events = event_names;
    rec.memory = memory;
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    for (int device = 0; device < 2; device++)
        OK(xd_stream_open(&streams[device], runtime, device, &err));
    xd_link_options options = {.path = XD_DIRECT, .gate = gate};
    OK(xd_link_open(&link_, runtime, 0, to, &options, &err));
    CHECK_EQ(xd_link_pinned_bytes(link_), 0);
    CHECK_EQ(xd_link_path(link_, 1), XD_DIRECT);
    OK(xd_buffer_open(&src, runtime, 0, 1000, &err));
    OK(xd_buffer_open(&dst, runtime, to, 1000, &err));
    OK(xd_event_open(&ready, runtime, 0, &err));
    OK(xd_event_open(&space, runtime, 0, &err));
    OK(xd_event_open(&released, runtime, 0, &err));
    OK(xd_event_open(&arrived, runtime, 0, &err));
    OK(xd_event_record(ready, streams[0], &err));
    OK(xd_event_record(space, streams[to], &err));
    order = (xd_copy){
        .dst = xd_buffer_address(dst),
        .src = xd_buffer_address(src),
        .width = 100,
        .height = 1,
        .source_ready = ready,
        .dest_free = space,
        .released = released,
        .arrived = arrived,
    };
}

static void end(void)
{
    xd_event_close(&ready);
    xd_event_close(&space);
    xd_event_close(&released);
    xd_event_close(&arrived);
    xd_link_close(&link_);
    xd_buffer_close(&src);
    xd_buffer_close(&dst);
    xd_stream_close(&streams[0]);
    xd_stream_close(&streams[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void copies(int to)
{
    begin(to, 1);
    if (to == 1)
        CHECK_HAS(rec.log, "peer_enable 0 1\n");
    else
        CHECK(!strstr(rec.log, "peer_enable"));
    recorder_clear(&rec);
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "out wait free\n"
                        "out copy src+0 > dst+0, 100\n"
                        "out record released\n"
                        "out record arrived\n");
    CHECK_EQ(xd_event_device(arrived), 0);

    recorder_clear(&rec); /* an event named twice is used once */
    order.dest_free = ready;
    order.released = arrived;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "out copy src+0 > dst+0, 100\n"
                        "out record arrived\n");

    recorder_clear(&rec); /* rows in one call; a width of nothing keeps the order */
    order = (xd_copy){.dst = order.dst, .src = order.src, .width = 10, .height = 3, .dst_pitch = 20, .src_pitch = 30};
    OK(xd_link_copy(link_, &order, &err));
    order.width = 0;
    order.source_ready = ready;
    order.dest_free = space;
    order.released = released;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out copy src+0/30 > dst+0/20, 3 x 10\n"
                        "out wait ready\n"
                        "out wait free\n"
                        "out record released\n");
    end();
}

static void gate_off(void)
{
    begin(1, 0);
    recorder_clear(&rec);
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "out copy src+0 > dst+0, 100\n"
                        "out record released\n"
                        "out record arrived\n");
    end();
}

/* Direct from 100 bytes up, staged below. */
static void by_size(void)
{
    begin(1, 1);
    xd_link_close(&link_);
    xd_link_options options = {.path = XD_BY_SIZE, .direct_from = 100, .tile_bytes = 64, .gate = 1};
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(link_, 99), XD_STAGED);
    CHECK_EQ(xd_link_path(link_, 100), XD_DIRECT);
    recorder_clear(&rec);
    order.source_ready = order.dest_free = order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_HAS(rec.log, "copy src+0 > dst+0, 100\n");
    recorder_clear(&rec);
    order.width = 99;
    OK(xd_link_copy(link_, &order, &err));
    CHECK(!strstr(rec.log, "copy src+0 > dst+0"));
    xd_link_close(&link_);

    options.direct_from = 0; /* everything is direct: no ring */
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_pinned_bytes(link_), 0);
    xd_link_close(&link_);

    options.direct_to = 100; /* large copies are staged */
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(link_, 0), XD_DIRECT);
    CHECK_EQ(xd_link_path(link_, 99), XD_DIRECT);
    CHECK_EQ(xd_link_path(link_, 100), XD_STAGED);
    CHECK_EQ(xd_link_pinned_bytes(link_), 4 * 64);
    recorder_clear(&rec);
    order.width = 100;
    OK(xd_link_copy(link_, &order, &err));
    CHECK(!strstr(rec.log, "copy src+0 > dst+0"));
    xd_link_close(&link_);

    options.direct_from = 50; /* and small ones */
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(link_, 49), XD_STAGED);
    CHECK_EQ(xd_link_path(link_, 50), XD_DIRECT);
    CHECK_EQ(xd_link_path(link_, 100), XD_STAGED);
    xd_link_close(&link_);

    options.direct_to = 50;
    FAILS(xd_link_open(&link_, runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "direct_to is 50");
    end();
}

static void refused(void)
{
    begin(1, 1);
    xd_link *none = NULL;
    xd_link_options options = {.path = XD_DIRECT};
    rec.peer_capable = 0;
    FAILS(xd_link_open(&none, runtime, 0, 1, &options, &err), XD_NO_PEER);
    CHECK_HAS(err.text, "device 0 to device 1");
    rec.peer_capable = 1;
    rec.peer_enabled = 0;
    FAILS(xd_link_open(&none, runtime, 1, 0, &options, &err), XD_NO_PEER);
    options.path = XD_BY_SIZE;
    FAILS(xd_link_open(&none, runtime, 1, 0, &options, &err), XD_NO_PEER);
    options.path = 3;
    FAILS(xd_link_open(&none, runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "path is 3");
    options.path = XD_STAGED;
    options.rate = -1;
    FAILS(xd_link_open(&none, runtime, 0, 1, &options, &err), XD_INVALID);
    options.rate = 0;
    FAILS(xd_link_open(&none, runtime, 0, 2, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "device 2 does not exist; there are devices 0 to 1");
    options.tile_bytes = UINT64_MAX / 2;
    FAILS(xd_link_open(&none, runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK(!none);

    recorder_clear(&rec);
    order.height = 3;
    order.dst_pitch = 99;
    order.src_pitch = 100;
    FAILS(xd_link_copy(link_, &order, &err), XD_INVALID);
    CHECK_HAS(err.text, "dst_pitch is 99");
    order.dst_pitch = UINT64_MAX / 2;
    FAILS(xd_link_copy(link_, &order, &err), XD_INVALID);

    recorder other;
    recorder_open(&other, 1);
    xd_runtime *stranger;
    xd_event *strange;
    OK(xd_runtime_open(&stranger, &other.table, NULL, &err));
    OK(xd_event_open(&strange, stranger, 0, &err));
    order.height = 1;
    order.arrived = strange;
    FAILS(xd_link_copy(link_, &order, &err), XD_INVALID);
    CHECK_HAS(err.text, "two different runtimes");
    FAILS(xd_event_record(strange, streams[0], &err), XD_INVALID);
    FAILS(xd_stream_wait(streams[0], strange, &err), XD_INVALID);
    xd_event_close(&strange);
    OK(xd_runtime_close(&stranger, &err));
    recorder_close(&other);
    CHECK_TEXT(rec.log, ""); /* nothing refused has reached the driver */
    end();
}

int main(void)
{
    copies(1);
    copies(0);
    gate_off();
    by_size();
    refused();
    return 0;
}
