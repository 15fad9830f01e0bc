/* The exact driver calls of staged copies: no wait too many, none too few, none twice. */
#include "check.h"
#include "recorder.h"

static const char *const streams[] = {"front", "back", "out", "in", NULL};
static const char *const memory[] = {"ring", "src", "dst", NULL};

static xd_error err;
static recorded_link on;

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

/* A link 0 to 1 with so many tiles of 64 bytes. */
static void begin(const char *const *events, unsigned tiles, int gate)
{
    xd_link_options options = {.path = XD_STAGED, .tile_bytes = 64, .tiles = tiles, .gate = gate};
    recorded_link_open(&on, &(recorder_names){streams, events, memory}, 1, &options, 1000, 0);
    fill(on.src, 1);
    fill(on.dst, 0);
    recorder_clear(&on.rec);
}

static void end(void)
{
    recorded_link_close(&on);
}

static void copy(uint64_t width)
{
    recorder_clear(&on.rec);
    on.order.width = width;
    OK(xd_link_copy(on.link, &on.order, &err));
}

static void want_no_events(void)
{
    on.order.source_ready = on.order.dest_free = on.order.released = on.order.arrived = NULL;
}

/* Two halves of one tile. The first download comes before everything that `in` has to do; the first tile of the next
   copy is waited for at the end of this one. */
static void three_tiles(void)
{
    static const char *const events[] = {"ready", "free", "filled", "half0", "half1", "released", "arrived", NULL};
    begin(events, 2, 1);
    copy(150);
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out copy src+0 > ring+0, 64\n"
                           "out record filled\n"
                           "in wait free\n"
                           "in wait filled\n"
                           "in copy ring+0 > dst+0, 64\n"
                           "in record half0\n"
                           "out copy src+64 > ring+64, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+64 > dst+64, 64\n"
                           "in record half1\n"
                           "out wait half0\n"
                           "out copy src+128 > ring+0, 22\n"
                           "out record released\n"
                           "in wait released\n"
                           "in copy ring+0 > dst+128, 22\n"
                           "in record arrived\n"
                           "in record half0\n"
                           "out wait half1\n");
    CHECK_EQ(memcmp(at(on.dst, 0), at(on.src, 0), 150), 0);
    CHECK_EQ(*at(on.dst, 150), 0xA5);

    copy(10); /* the ring goes on where it was */
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out copy src+0 > ring+64, 10\n"
                           "out record released\n"
                           "in wait free\n"
                           "in wait released\n"
                           "in copy ring+64 > dst+0, 10\n"
                           "in record arrived\n"
                           "in record half1\n"
                           "out wait half0\n");
    end();
}

/* A half is waited for before its first tile and handed back after its last, whatever copies these belong to. */
static void halves(void)
{
    static const char *const events[] = {"ready", "free", "filled", "half0", "half1", NULL};
    begin(events, 5, 1);
    want_no_events();
    copy(4 * 64);
    CHECK_TEXT(on.rec.log, "out copy src+0 > ring+0, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+0 > dst+0, 64\n"
                           "out copy src+64 > ring+64, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+64 > dst+64, 64\n"
                           "out copy src+128 > ring+128, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+128 > dst+128, 64\n"
                           "in record half0\n"
                           "out copy src+192 > ring+192, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+192 > dst+192, 64\n");
    copy(1);
    CHECK_TEXT(on.rec.log, "out copy src+0 > ring+256, 1\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+256 > dst+0, 1\n"
                           "in record half1\n"
                           "out wait half0\n");
    copy(3 * 64);
    CHECK_EQ(recorder_count(&on.rec, "out wait half0\n"), 0);
    CHECK_EQ(recorder_count(&on.rec, "in record half0\n"), 1);
    CHECK_EQ(recorder_count(&on.rec, "out wait half1\n"), 1);
    copy(1);
    CHECK_EQ(recorder_count(&on.rec, "out wait"), 0);
    end();
}

/* A ring of one tile: each download waits for the upload before it. */
static void one_tile(void)
{
    static const char *const events[] = {"ready", "free", "filled", "half0", NULL};
    begin(events, 1, 1);
    want_no_events();
    copy(65);
    CHECK_TEXT(on.rec.log, "out copy src+0 > ring+0, 64\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+0 > dst+0, 64\n"
                           "in record half0\n"
                           "out wait half0\n"
                           "out copy src+64 > ring+0, 1\n"
                           "out record filled\n"
                           "in wait filled\n"
                           "in copy ring+0 > dst+64, 1\n"
                           "in record half0\n"
                           "out wait half0\n");
    end();
}

static void without_events(void)
{
    begin(NULL, 2, 1);
    want_no_events();
    copy(0);
    CHECK_TEXT(on.rec.log, "");
    end();
}

static void never_recorded(void)
{
    begin(NULL, 2, 1);
    xd_event *fresh;
    OK(xd_event_open(&fresh, on.runtime, 0, &err));
    on.order.source_ready = on.order.dest_free = fresh;
    on.order.released = on.order.arrived = NULL;
    copy(0);
    CHECK_TEXT(on.rec.log, "");
    xd_event_close(&fresh);
    end();
}

static void nothing(void)
{
    static const char *const events[] = {"ready", "free", "released", "arrived", NULL};
    begin(events, 2, 1);
    on.order.dst = on.order.src = 0;
    copy(0);
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "in wait free\n"
                           "in wait ready\n"
                           "out record released\n"
                           "in record arrived\n");
    end();
}

/* Only the wait for the destination is left out. */
static void gate_omits_one_line(void)
{
    static const char *const events[] = {"ready", "free", "filled", "half0", "half1", "released", "arrived", NULL};
    char with[sizeof on.rec.log];
    begin(events, 2, 1);
    copy(150);
    strcpy(with, on.rec.log);
    end();
    begin(events, 2, 0);
    copy(150);
    char *line = strstr(with, "in wait free\n");
    CHECK(line);
    memmove(line, line + strlen("in wait free\n"), strlen(line + strlen("in wait free\n")) + 1);
    CHECK_TEXT(on.rec.log, with);
    end();
}

/* One event for both ends is recorded once, at the very end. */
static void released_is_arrived(void)
{
    static const char *const events[] = {"ready", "free", "filled", "both", "half0", NULL};
    begin(events, 2, 1);
    on.order.released = on.arrived;
    copy(10);
    CHECK_TEXT(on.rec.log, "out wait ready\n"
                           "out copy src+0 > ring+0, 10\n"
                           "out record filled\n"
                           "in wait free\n"
                           "in wait filled\n"
                           "in copy ring+0 > dst+0, 10\n"
                           "in record both\n"
                           "in record half0\n");
    end();
}

/* Three rows of 20 bytes, 100 apart, fit one tile of 64; the fourth goes into the next. */
static void rows(void)
{
    begin(NULL, 2, 1);
    on.order.width = 20;
    on.order.height = 4;
    on.order.src_pitch = 100;
    on.order.dst_pitch = 30;
    want_no_events();
    copy(on.order.width);
    CHECK_TEXT(on.rec.log, "out copy src+0/100 > ring+0/20, 3 x 20\n"
                           "out record e2\n"
                           "in wait e2\n"
                           "in copy ring+0/20 > dst+0/30, 3 x 20\n"
                           "in record e3\n"
                           "out copy src+300 > ring+64, 20\n"
                           "out record e2\n"
                           "in wait e2\n"
                           "in copy ring+64 > dst+90, 20\n"
                           "in record e4\n"
                           "out wait e3\n");
    for (uint64_t row = 0; row < 4; row++) {
        CHECK_EQ(memcmp(at(on.dst, row * 30), at(on.src, row * 100), 20), 0);
        CHECK_EQ(*at(on.dst, row * 30 + 20), 0xA5);
    }
    end();
}

static void rows_longer_than_a_tile(void)
{
    begin(NULL, 2, 1);
    on.order.width = 70;
    on.order.height = 2;
    on.order.src_pitch = 100;
    on.order.dst_pitch = 90;
    want_no_events();
    copy(on.order.width);
    for (uint64_t row = 0; row < 2; row++) {
        CHECK_EQ(memcmp(at(on.dst, row * 90), at(on.src, row * 100), 70), 0);
        CHECK_EQ(*at(on.dst, row * 90 + 70), 0xA5);
    }
    CHECK_HAS(on.rec.log, "out copy src+0 > ring+0, 64\n");
    CHECK_HAS(on.rec.log, "out copy src+64 > ring+64, 6\n");
    CHECK_HAS(on.rec.log, "out copy src+100 > ring+0, 64\n");
    CHECK_HAS(on.rec.log, "in copy ring+64 > dst+154, 6\n");
    end();
}

/* Rows without gaps are one long row. */
static void rows_without_gaps(void)
{
    begin(NULL, 2, 1);
    on.order.width = on.order.src_pitch = on.order.dst_pitch = 16;
    on.order.height = 5;
    want_no_events();
    copy(on.order.width);
    CHECK_HAS(on.rec.log, "out copy src+0 > ring+0, 64\n");
    CHECK_HAS(on.rec.log, "out copy src+64 > ring+64, 16\n");
    end();
}

int main(void)
{
    three_tiles();
    halves();
    one_tile();
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
