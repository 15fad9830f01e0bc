/* The exact driver calls of direct copies, between two devices and within one, and what is refused. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorded_link on;

static void begin(int to, int gate)
{
    static const char *const streams[] = {"front", "back", "out", NULL};
    static const char *const events[] = {"ready", "free", "released", "arrived", NULL};
    static const char *const memory[] = {"src", "dst", NULL};
    xd_link_options options = {.path = XD_DIRECT, .gate = gate};
    recorded_link_open(&on, &(recorder_names){streams, events, memory}, to, &options, 1000, 0);
    CHECK_EQ(xd_link_pinned_bytes(on.link), 0);
    CHECK_EQ(xd_link_path(on.link, 1), XD_DIRECT);
    on.order.width = 100;
}

static void end(void)
{
    recorded_link_close(&on);
}

static void copies(int to)
{
    begin(to, 1);
    if (to == 1)
        CHECK_HAS(on.rec.log, "peer_enable 0 1\n");
    else
        CHECK(!strstr(on.rec.log, "peer_enable"));
    recorder_clear(&on.rec);
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out wait free\n"
                           "out copy src+0 > dst+0, 100\n"
                           "out record released\n"
                           "out record arrived\n");
    CHECK_EQ(xd_event_device(on.arrived), 0);

    recorder_clear(&on.rec); /* an event named twice is used once */
    on.order.dest_free = on.ready;
    on.order.released = on.arrived;
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out copy src+0 > dst+0, 100\n"
                           "out record arrived\n");

    recorder_clear(&on.rec); /* rows in one call; a width of nothing keeps the order */
    xd_copy rows = {.dst = on.order.dst, .src = on.order.src, .width = 10, .height = 3};
    rows.dst_pitch = 20;
    rows.src_pitch = 30;
    on.order = rows;
    OK(xd_link_copy(on.link, &on.order, &err));
    on.order.width = 0;
    on.order.source_ready = on.ready;
    on.order.dest_free = on.space;
    on.order.released = on.released;
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_TEXT(on.rec.log, "out copy src+0/30 > dst+0/20, 3 x 10\n"
                           "out wait ready\n"
                           "out wait free\n"
                           "out record released\n");
    end();
}

static void gate_off(void)
{
    begin(1, 0);
    recorder_clear(&on.rec);
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out copy src+0 > dst+0, 100\n"
                           "out record released\n"
                           "out record arrived\n");
    end();
}

/* Direct from 100 bytes up, staged below. */
static void by_size(void)
{
    begin(1, 1);
    xd_link_close(&on.link);
    xd_link_options options = {.path = XD_BY_SIZE, .direct_from = 100, .tile_bytes = 64, .gate = 1};
    OK(xd_link_open(&on.link, on.runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(on.link, 99), XD_STAGED);
    CHECK_EQ(xd_link_path(on.link, 100), XD_DIRECT);
    recorder_clear(&on.rec);
    on.order.source_ready = on.order.dest_free = on.order.released = on.order.arrived = NULL;
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_HAS(on.rec.log, "copy src+0 > dst+0, 100\n");
    recorder_clear(&on.rec);
    on.order.width = 99;
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK(!strstr(on.rec.log, "copy src+0 > dst+0"));
    xd_link_close(&on.link);

    options.direct_from = 0; /* everything is direct: no ring */
    OK(xd_link_open(&on.link, on.runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_pinned_bytes(on.link), 0);
    xd_link_close(&on.link);

    options.direct_to = 100; /* large copies are staged */
    OK(xd_link_open(&on.link, on.runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(on.link, 0), XD_DIRECT);
    CHECK_EQ(xd_link_path(on.link, 99), XD_DIRECT);
    CHECK_EQ(xd_link_path(on.link, 100), XD_STAGED);
    CHECK_EQ(xd_link_pinned_bytes(on.link), 4 * 64);
    recorder_clear(&on.rec);
    on.order.width = 100;
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK(!strstr(on.rec.log, "copy src+0 > dst+0"));
    xd_link_close(&on.link);

    options.direct_from = 50; /* and small ones */
    OK(xd_link_open(&on.link, on.runtime, 0, 1, &options, &err));
    CHECK_EQ(xd_link_path(on.link, 49), XD_STAGED);
    CHECK_EQ(xd_link_path(on.link, 50), XD_DIRECT);
    CHECK_EQ(xd_link_path(on.link, 100), XD_STAGED);
    xd_link_close(&on.link);

    options.direct_to = 50;
    FAILS(xd_link_open(&on.link, on.runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "direct_to is 50");
    end();
}

static void refused(void)
{
    begin(1, 1);
    xd_link *none = NULL;
    xd_link_options options = {.path = XD_DIRECT};
    on.rec.peer_capable = 0;
    FAILS(xd_link_open(&none, on.runtime, 0, 1, &options, &err), XD_NO_PEER);
    CHECK_HAS(err.text, "device 0 to device 1");
    on.rec.peer_capable = 1;
    on.rec.peer_enabled = 0;
    FAILS(xd_link_open(&none, on.runtime, 1, 0, &options, &err), XD_NO_PEER);
    options.path = XD_BY_SIZE;
    FAILS(xd_link_open(&none, on.runtime, 1, 0, &options, &err), XD_NO_PEER);
    options.path = 3;
    FAILS(xd_link_open(&none, on.runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "path is 3");
    options.path = XD_STAGED;
    options.rate = -1;
    FAILS(xd_link_open(&none, on.runtime, 0, 1, &options, &err), XD_INVALID);
    options.rate = 0;
    FAILS(xd_link_open(&none, on.runtime, 0, 2, &options, &err), XD_INVALID);
    CHECK_HAS(err.text, "device 2 does not exist; there are devices 0 to 1");
    options.tile_bytes = UINT64_MAX / 2;
    FAILS(xd_link_open(&none, on.runtime, 0, 1, &options, &err), XD_INVALID);
    CHECK(!none);

    recorder_clear(&on.rec);
    on.order.height = 3;
    on.order.dst_pitch = 99;
    on.order.src_pitch = 100;
    FAILS(xd_link_copy(on.link, &on.order, &err), XD_INVALID);
    CHECK_HAS(err.text, "dst_pitch is 99");
    on.order.dst_pitch = UINT64_MAX / 2;
    FAILS(xd_link_copy(on.link, &on.order, &err), XD_INVALID);

    recorder other;
    recorder_open(&other, 1);
    xd_runtime *stranger;
    xd_event *strange;
    OK(xd_runtime_open(&stranger, &other.table, NULL, &err));
    OK(xd_event_open(&strange, stranger, 0, &err));
    on.order.height = 1;
    on.order.arrived = strange;
    FAILS(xd_link_copy(on.link, &on.order, &err), XD_INVALID);
    CHECK_HAS(err.text, "two different runtimes");
    FAILS(xd_event_record(strange, on.streams[0], &err), XD_INVALID);
    FAILS(xd_stream_wait(on.streams[0], strange, &err), XD_INVALID);
    xd_event_close(&strange);
    OK(xd_runtime_close(&stranger, &err));
    recorder_close(&other);
    CHECK_TEXT(on.rec.log, ""); /* nothing refused has reached the driver */
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
