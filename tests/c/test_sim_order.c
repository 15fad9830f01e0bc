/* Laziness: a missing wait is seen in the data for some seed, the right program is right for every seed. And nothing
   runs before somebody waits or asks. */
#include "check.h"
#include "machine.h"

enum { SEEDS = 16, ROUNDS = 6, BYTES = 4096 };

static xd_error err;

/* Tells device 1 round after round, through one page-locked tile, what device 0 holds: the data path of a staged copy
   with a ring of one. `without` leaves one of its waits out. */
enum { NOTHING, FILLED, TILE_FREE, SOURCE_READY, DESTINATION_FREE };

typedef struct reader { const unsigned char *at; int round; int *wrong; } reader;

static int look(void *arg)
{
    reader *r = arg;
    for (int i = 0; i < BYTES; i++)
        if (r->at[i] != (unsigned char)r->round) {
            ++*r->wrong;
            break;
        }
    return 0;
}

static void move(xd_stream *on, int to, uint64_t dst, int from, uint64_t src)
{
    xd_transfer t = {.dst_device = to, .src_device = from, .dst = dst, .src = src, .width = BYTES, .height = 1};
    OK(xd_stream_copy(on, &t, &err));
}

static int wrong_rounds(uint64_t seed, int without)
{
    machine *m = machine_make(2);
    m->config.seed = seed;
    m->config.delay = 20000;
    xd_runtime *runtime = machine_runtime(m);
    xd_stream *produce, *out, *in, *consume;
    xd_event *made, *filled, *uploaded, *used, *taken;
    xd_buffer *source, *tile, *destination;
    OK(xd_stream_open(&produce, runtime, 0, &err));
    OK(xd_stream_open(&out, runtime, 0, &err));
    OK(xd_stream_open(&in, runtime, 1, &err));
    OK(xd_stream_open(&consume, runtime, 1, &err));
    xd_event **const events[] = {&made, &filled, &uploaded, &used, &taken};
    for (int i = 0; i < 5; i++)
        OK(xd_event_open(events[i], runtime, 0, &err));
    OK(xd_buffer_open(&source, runtime, 0, BYTES, &err));
    OK(xd_buffer_open(&tile, runtime, XD_HOST, BYTES, &err));
    OK(xd_buffer_open(&destination, runtime, 1, BYTES, &err));
    uint64_t from = xd_buffer_address(source), via = xd_buffer_address(tile), to = xd_buffer_address(destination);

    int wrong = 0;
    reader readers[ROUNDS];
    for (int round = 1; round <= ROUNDS; round++) {
        OK(xd_stream_wait(produce, filled, &err));
        OK(xd_stream_fill(produce, from, round, BYTES, &err));
        OK(xd_event_record(made, produce, &err));
        if (without != SOURCE_READY)
            OK(xd_stream_wait(out, made, &err));
        if (without != TILE_FREE)
            OK(xd_stream_wait(out, uploaded, &err));
        move(out, XD_HOST, via, 0, from);
        OK(xd_event_record(filled, out, &err));
        if (without != FILLED)
            OK(xd_stream_wait(in, filled, &err));
        if (without != DESTINATION_FREE)
            OK(xd_stream_wait(in, used, &err));
        move(in, 1, to, XD_HOST, via);
        OK(xd_event_record(uploaded, in, &err));
        OK(xd_stream_wait(consume, uploaded, &err));
        reader *r = &readers[round - 1];
        *r = (reader){.at = (const unsigned char *)(uintptr_t)to, .round = round, .wrong = &wrong};
        xd_kernel kernel = {.run = look, .arg = r, .cost = 10000};
        OK(xd_stream_launch(consume, &kernel, &err));
        OK(xd_event_record(used, consume, &err));
    }
    CHECK_EQ(wrong, 0); /* nothing has run: nobody has waited */
    CHECK_EQ(*(const unsigned char *)(uintptr_t)from, 0);
    int done;
    OK(xd_event_wait(used, XD_FOREVER, &done, &err));
    CHECK(done);

    xd_buffer_close(&destination);
    xd_buffer_close(&tile);
    xd_buffer_close(&source);
    for (int i = 0; i < 5; i++)
        xd_event_close(events[i]);
    xd_stream_close(&consume);
    xd_stream_close(&in);
    xd_stream_close(&out);
    xd_stream_close(&produce);
    OK(xd_runtime_close(&runtime, &err));
    free(m);
    return wrong;
}

static int bad_seeds(int without)
{
    int bad = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        bad += wrong_rounds(seed, without) > 0;
    return bad;
}

int main(void)
{
    CHECK_EQ(bad_seeds(NOTHING), 0);
    CHECK(bad_seeds(FILLED) > 0);
    CHECK(bad_seeds(TILE_FREE) > 0);
    CHECK(bad_seeds(SOURCE_READY) > 0);
    CHECK(bad_seeds(DESTINATION_FREE) > 0);
    return 0;
}
