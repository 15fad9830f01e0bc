/* Copies within a device: overlap is told exactly, rows interleaved without touching are fine. Against bytes, marked
   one by one. */
#include "check.h"
#include "recorder.h"

enum { ROOM = 64 };

static int touch(const xd_transfer *t)
{
    unsigned char mark[ROOM] = {0};
    for (uint64_t row = 0; row < t->height; row++)
        for (uint64_t i = 0; i < t->width; i++)
            mark[t->src + row * t->src_pitch + i] = 1;
    for (uint64_t row = 0; row < t->height; row++)
        for (uint64_t i = 0; i < t->width; i++)
            if (mark[t->dst + row * t->dst_pitch + i])
                return 1;
    return 0;
}

int main(void)
{
    xd_error err;
    recorder rec;
    xd_runtime *runtime;
    xd_stream *stream;
    xd_buffer *memory;
    recorder_open(&rec, 1);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_buffer_open(&memory, runtime, 0, ROOM, &err));
    uint64_t base = xd_buffer_address(memory);

    unsigned seed = 1, refused = 0, allowed = 0;
    for (int i = 0; i < 20000; i++) {
        uint64_t pick[6];
        for (int k = 0; k < 6; k++) {
            seed = seed * 1664525u + 1013904223u;
            pick[k] = seed >> 16;
        }
        xd_transfer t = {.width = 1 + pick[0] % 6, .height = 1 + pick[1] % 5};
        t.src_pitch = t.width + pick[2] % 5;
        t.dst_pitch = t.width + pick[3] % 5;
        uint64_t src_span = (t.height - 1) * t.src_pitch + t.width, dst_span = (t.height - 1) * t.dst_pitch + t.width;
        t.src = pick[4] % (ROOM - src_span + 1);
        t.dst = pick[5] % (ROOM - dst_span + 1);
        int wanted = touch(&t) ? XD_INVALID : XD_OK;
        *(wanted ? &refused : &allowed) += 1;
        t.src += base;
        t.dst += base;
        recorder_clear(&rec);
        if (xd_stream_copy(stream, &t, &err) != wanted) {
            fprintf(stderr, "case %d: %d x %d, src %d/%d, dst %d/%d: not %s\n", i, (int)t.height, (int)t.width,
                    (int)(t.src - base), (int)t.src_pitch, (int)(t.dst - base), (int)t.dst_pitch,
                    xd_status_name(wanted));
            return 1;
        }
        CHECK_EQ(rec.log[0] == '\0', wanted != XD_OK);
    }
    CHECK(refused > 1000 && allowed > 1000);

    /* devices that this stream may not copy between */
    static const int pairs[][2] = {{XD_HOST, XD_HOST}, {0, 1}, {1, 0}, {-2, 0}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        xd_transfer t = {.src_device = pairs[i][0], .dst_device = pairs[i][1], .src = base, .dst = base + 8, .width = 1,
                         .height = 1};
        FAILS(xd_stream_copy(stream, &t, &err), XD_INVALID);
    }
    recorder_clear(&rec);
    OK(xd_stream_copy(stream, &(xd_transfer){.src = base, .dst = base, .width = 0, .height = 1}, &err));
    OK(xd_stream_copy(stream, &(xd_transfer){.src = base, .dst = base, .width = 5, .height = 0}, &err));
    OK(xd_stream_fill(stream, 0, 7, 0, &err));
    CHECK_TEXT(rec.log, "");
    FAILS(xd_stream_fill(stream, base, 256, 1, &err), XD_INVALID);
    FAILS(xd_stream_fill(stream, base, -1, 1, &err), XD_INVALID);

    xd_buffer_close(&memory);
    xd_stream_close(&stream);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
    return 0;
}
