/* Copies of every kind of size, place and shape through links of every path and depth, many in flight at once, both
   directions at once; the bytes around the destination stay as they were. */
#include "check.h"
#include "machine.h"

enum { TILE = 256, GUARD = 5, ROOM = 9 * TILE, SEEDS = 4, MOST = 40 };

static xd_error err;
static xd_runtime *runtime;
static unsigned random_state;

static unsigned char next_byte(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (unsigned char)(random_state >> 24);
}

typedef struct shape {
    uint64_t width, height, src_pitch, dst_pitch;
} shape;

static const shape shapes[] = {
    {0, 1, 0, 0},
    {1, 1, 0, 0},
    {TILE - 1, 1, 0, 0},
    {TILE, 1, 0, 0},
    {TILE + 1, 1, 0, 0},
    {7 * TILE + 3, 1, 0, 0},
    {0, 5, 10, 10},
    {10, 0, 10, 10},
    {7, 30, 7, 7},               /* no gaps */
    {7, 30, 20, 9},              /* many rows a tile */
    {7, 100, 7, 20},             /* packed into gaps */
    {TILE, 4, TILE + 1, TILE},   /* a row a tile */
    {TILE - 1, 5, TILE, TILE + 7},
    {TILE + 1, 4, TILE + 1, 2 * TILE}, /* rows are cut */
    {3 * TILE + 1, 2, 4 * TILE, 3 * TILE + 2},
    {1, 60, 3, 5},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct job {
    shape s;
    xd_buffer *src, *dst;
    uint64_t src_at, dst_at;
    xd_event *arrived;
} job;

static unsigned char *bytes_of(xd_buffer *buffer)
{
    return (unsigned char *)(uintptr_t)xd_buffer_address(buffer);
}

static void submit(job *j, xd_link *link, int src, int dst, const shape *s, uint64_t offset)
{
    *j = (job){.s = *s, .src_at = GUARD + offset, .dst_at = GUARD + 3 * offset};
    OK(xd_buffer_open(&j->src, runtime, src, ROOM, &err));
    OK(xd_buffer_open(&j->dst, runtime, dst, ROOM, &err));
    OK(xd_event_open(&j->arrived, runtime, 0, &err));
    for (uint64_t i = 0; i < ROOM; i++) {
        bytes_of(j->src)[i] = next_byte();
        bytes_of(j->dst)[i] = 0xA5;
    }
    xd_copy copy = {.dst = xd_buffer_address(j->dst) + j->dst_at, .src = xd_buffer_address(j->src) + j->src_at,
                    .width = s->width, .height = s->height, .dst_pitch = s->dst_pitch, .src_pitch = s->src_pitch,
                    .arrived = j->arrived};
    OK(xd_link_copy(link, &copy, &err));
}

static void compare(job *j)
{
    int done = 0;
    unsigned char wanted[ROOM];
    memset(wanted, 0xA5, sizeof wanted);
    for (uint64_t row = 0; row < j->s.height; row++)
        memcpy(wanted + j->dst_at + row * j->s.dst_pitch, bytes_of(j->src) + j->src_at + row * j->s.src_pitch,
               j->s.width);
    OK(xd_event_wait(j->arrived, XD_FOREVER, &done, &err));
    CHECK_EQ(done, 1);
    CHECK_EQ(memcmp(bytes_of(j->dst), wanted, ROOM), 0);
    xd_event_close(&j->arrived);
    xd_buffer_close(&j->src);
    xd_buffer_close(&j->dst);
}

static void both_directions(const xd_link_options *options, uint64_t seed)
{
    job there[SHAPES], back[SHAPES];
    xd_link *links[2];
    OK(xd_runtime_open(&runtime, machine_jumbled(2, seed), NULL, &err));
    OK(xd_link_open(&links[0], runtime, 0, 1, options, &err));
    OK(xd_link_open(&links[1], runtime, 1, 0, options, &err));
    for (size_t i = 0; i < SHAPES; i++) {
        submit(&there[i], links[0], 0, 1, &shapes[i], i % 4);
        submit(&back[i], links[1], 1, 0, &shapes[i], 3 - i % 4);
    }
    for (size_t i = 0; i < SHAPES; i++) {
        compare(&there[i]);
        compare(&back[i]);
    }
    xd_link_close(&links[0]);
    xd_link_close(&links[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
}

/* A copy handed on from device to device, ten of them in a circle, and another the other way round. */
static void circle(uint64_t seed)
{
    enum { DEVICES = 10, BYTES = 3 * TILE + 7 };
    xd_link *links[2][DEVICES];
    xd_buffer *places[2][DEVICES + 1];
    xd_event *arrived[2][DEVICES + 1];
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    for (int way = 0; way < 2; way++)
        for (int i = 0; i <= DEVICES; i++) {
            int here = way ? (DEVICES - i) % DEVICES : i % DEVICES;
            int next = way ? (here + DEVICES - 1) % DEVICES : (here + 1) % DEVICES;
            xd_link_options options = {.path = i % 3 ? XD_STAGED : XD_DIRECT, .tile_bytes = TILE, .tiles = 2,
                                       .gate = 1};
            OK(xd_buffer_open(&places[way][i], runtime, here, BYTES, &err));
            OK(xd_event_open(&arrived[way][i], runtime, 0, &err));
            if (i < DEVICES)
                OK(xd_link_open(&links[way][i], runtime, here, next, &options, &err));
        }
    for (int i = 0; i < BYTES; i++) {
        bytes_of(places[0][0])[i] = next_byte();
        bytes_of(places[1][0])[i] = next_byte();
    }
    for (int i = 0; i < DEVICES; i++)
        for (int way = 0; way < 2; way++)
            OK(xd_link_copy(links[way][i],
                            &(xd_copy){.dst = xd_buffer_address(places[way][i + 1]),
                                       .src = xd_buffer_address(places[way][i]), .width = BYTES, .height = 1,
                                       .source_ready = arrived[way][i], .arrived = arrived[way][i + 1]},
                            &err));
    for (int way = 0; way < 2; way++) {
        int done = 0;
        OK(xd_event_wait(arrived[way][DEVICES], XD_FOREVER, &done, &err));
        CHECK_EQ(done, 1);
        CHECK_EQ(memcmp(bytes_of(places[way][DEVICES]), bytes_of(places[way][0]), BYTES), 0);
        for (int i = 0; i <= DEVICES; i++) {
            if (i < DEVICES)
                xd_link_close(&links[way][i]);
            xd_buffer_close(&places[way][i]);
            xd_event_close(&arrived[way][i]);
        }
    }
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
}

int main(void)
{
    static const xd_link_options options[] = {
        {.path = XD_DIRECT, .gate = 1},
        {.path = XD_STAGED, .gate = 1},
        {.path = XD_STAGED, .tile_bytes = TILE, .tiles = 1, .gate = 1},
        {.path = XD_STAGED, .tile_bytes = TILE, .tiles = 4, .gate = 1},
        {.path = XD_STAGED, .tile_bytes = 1, .tiles = 3, .gate = 1, .max_bytes = 5000},
        {.path = XD_BY_SIZE, .direct_from = TILE, .tile_bytes = 100, .gate = 1},
    };
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        fprintf(stderr, seed == 1 ? "seeds %" PRIu64 : " %" PRIu64, seed);
        random_state = (unsigned)seed;
        for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
            both_directions(&options[i], seed);
        circle(seed);
    }
    fprintf(stderr, "\n");
    return 0;
}
