/* The exact driver calls of staged copies: no wait too many, none too few, none twice. */
#include "check.h"
#include "recorder.h"

static const char *const streams[] = {"front", "back", "out", "in", NULL};
static const char *const memory[] = {"ring", "src", "dst", NULL};
static const char *const events[] = {"ready", "free", "filled", "tile0", "tile1", "released", "arrived", NULL};

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static xd_stream *front, *back;
static xd_link *link_;
static xd_buffer *src, *dst;
static xd_event *ready, *space, *released, *arrived;
static xd_copy order;

static void fill(xd_buffer *buffer, int step)
{
    unsigned char *bytes = (unsigned char *)(uintptr_t)xd_buffer_address(buffer);
    for (uint64_t i = 0; i < xd_buffer_bytes(buffer); i++)
        bytes[i] = (unsigned char)(step ? i * 7 + 3 : 0xA5);
}

static const unsigned char *at(xd_buffer *buffer, uint64_t offset)
{
    return (const unsigned char *)(uintptr_t)xd_buffer_address(buffer) + offset;
}

/* A link 0 to 1, two tiles of 64 bytes; `ready` recorded on device 0, `free` on device 1. */
static void begin(int gate)
{
    recorder_open(&rec, 2);
    rec.streams = streams;
    rec.memory = memory;
    rec.events = events;
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_stream_open(&front, runtime, 0, &err));
    OK(xd_stream_open(&back, runtime, 1, &err));
    xd_link_options options = {.path = XD_STAGED, .tile_bytes = 64, .tiles = 2, .gate = gate};
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    OK(xd_buffer_open(&src, runtime, 0, 1000, &err));
    OK(xd_buffer_open(&dst, runtime, 1, 1000, &err));
    OK(xd_event_open(&ready, runtime, 0, &err));
    OK(xd_event_open(&space, runtime, 0, &err));
    OK(xd_event_open(&released, runtime, 0, &err));
    OK(xd_event_open(&arrived, runtime, 0, &err));
    OK(xd_event_record(ready, front, &err));
    OK(xd_event_record(space, back, &err));
    fill(src, 1);
    fill(dst, 0);
    recorder_clear(&rec);
    order = (xd_copy){
        .dst = xd_buffer_address(dst),
        .src = xd_buffer_address(src),
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
    xd_stream_close(&front);
    xd_stream_close(&back);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void three_tiles(void)
{
    begin(1);
    order.width = 150;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "in wait free\n"
                        "out copy src+0 > ring+0, 64\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+0 > dst+0, 64\n"
                        "in record tile0\n"
                        "out copy src+64 > ring+64, 64\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+64 > dst+64, 64\n"
                        "in record tile1\n"
                        "out wait tile0\n"
                        "out copy src+128 > ring+0, 22\n"
                        "out record released\n"
                        "in wait released\n"
                        "in copy ring+0 > dst+128, 22\n"
                        "in record arrived\n"
                        "in record tile0\n");
    CHECK_EQ(memcmp(at(dst, 0), at(src, 0), 150), 0);
    CHECK_EQ(*at(dst, 150), 0xA5);

    recorder_clear(&rec); /* the ring goes on where it was */
    order.width = 10;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "in wait free\n"
                        "out wait tile1\n"
                        "out copy src+0 > ring+64, 10\n"
                        "out record released\n"
                        "in wait released\n"
                        "in copy ring+64 > dst+0, 10\n"
                        "in record arrived\n"
                        "in record tile1\n");
    end();
}

static void without_events(void)
{
    begin(1);
    order.width = 64;
    order.source_ready = order.dest_free = order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out copy src+0 > ring+0, 64\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+0 > dst+0, 64\n"
                        "in record tile0\n");
    recorder_clear(&rec);
    order.width = 0;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "");
    end();
}

static void never_recorded(void)
{
    begin(1);
    xd_event *fresh;
    OK(xd_event_open(&fresh, runtime, 0, &err));
    order.width = 0;
    order.source_ready = order.dest_free = fresh;
    order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "");
    xd_event_close(&fresh);
    end();
}

static void nothing(void)
{
    begin(1);
    rec.events = NULL;
    order.width = 0;
    order.dst = order.src = 0;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "in wait free\n"
                        "in wait ready\n"
                        "out record e2\n"
                        "in record e3\n");
    end();
}

/* Only the wait for the destination is left out. */
static void gate_omits_one_line(void)
{
    char with[sizeof rec.log];
    begin(1);
    order.width = 150;
    OK(xd_link_copy(link_, &order, &err));
    strcpy(with, rec.log);
    end();
    begin(0);
    order.width = 150;
    OK(xd_link_copy(link_, &order, &err));
    char *line = strstr(with, "in wait free\n");
    CHECK(line);
    memmove(line, line + strlen("in wait free\n"), strlen(line + strlen("in wait free\n")) + 1);
    CHECK_TEXT(rec.log, with);
    end();
}

/* One event for both ends is recorded once, at the very end. */
static void released_is_arrived(void)
{
    static const char *const names[] = {"ready", "free", "filled", "tile0", "both", NULL};
    begin(1);
    rec.events = names;
    order.width = 10;
    order.released = arrived;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out wait ready\n"
                        "in wait free\n"
                        "out copy src+0 > ring+0, 10\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+0 > dst+0, 10\n"
                        "in record tile0\n"
                        "in record both\n");
    end();
}

/* Three rows of 20 bytes, 100 apart, fit one tile of 64; the fourth goes into the next. */
static void rows(void)
{
    begin(1);
    order.width = 20;
    order.height = 4;
    order.src_pitch = 100;
    order.dst_pitch = 30;
    order.source_ready = order.dest_free = order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_TEXT(rec.log, "out copy src+0/100 > ring+0/20, 3 x 20\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+0/20 > dst+0/30, 3 x 20\n"
                        "in record tile0\n"
                        "out copy src+300 > ring+64, 20\n"
                        "out record filled\n"
                        "in wait filled\n"
                        "in copy ring+64 > dst+90, 20\n"
                        "in record tile1\n");
    for (uint64_t row = 0; row < 4; row++) {
        CHECK_EQ(memcmp(at(dst, row * 30), at(src, row * 100), 20), 0);
        CHECK_EQ(*at(dst, row * 30 + 20), 0xA5);
    }
    end();
}

static void rows_longer_than_a_tile(void)
{
    begin(1);
    order.width = 70;
    order.height = 2;
    order.src_pitch = 100;
    order.dst_pitch = 90;
    order.source_ready = order.dest_free = order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    for (uint64_t row = 0; row < 2; row++) {
        CHECK_EQ(memcmp(at(dst, row * 90), at(src, row * 100), 70), 0);
        CHECK_EQ(*at(dst, row * 90 + 70), 0xA5);
    }
    CHECK_HAS(rec.log, "out copy src+0 > ring+0, 64\n");
    CHECK_HAS(rec.log, "out copy src+64 > ring+64, 6\n");
    CHECK_HAS(rec.log, "out copy src+100 > ring+0, 64\n");
    CHECK_HAS(rec.log, "in copy ring+64 > dst+154, 6\n");
    end();
}

/* Rows without gaps are one long row. */
static void rows_without_gaps(void)
{
    begin(1);
    order.width = order.src_pitch = order.dst_pitch = 16;
    order.height = 5;
    order.source_ready = order.dest_free = order.released = order.arrived = NULL;
    OK(xd_link_copy(link_, &order, &err));
    CHECK_HAS(rec.log, "out copy src+0 > ring+0, 64\n");
    CHECK_HAS(rec.log, "out copy src+64 > ring+64, 16\n");
    end();
}

int main(void)
{
    three_tiles();
    without_events();
    never_recorded();
    nothing();
    gate_omits_one_line();
    released_is_arrived();
    rows();
    rows_longer_than_a_tile();
    rows_without_gaps();
    return 0;
}
