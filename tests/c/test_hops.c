/*
 * Microbatches over one hop, on simulated devices of many seeds: what arrives is what was sent.
 *
 * Every buffer is used again and again, so each wait of link.c, ring.c, stream.c and throttle.c is the only thing that
 * keeps some pair of copies apart. tests/unit/test_mutations_native.py builds this program with one of them taken out
 * and expects it to fail. Usage: test_hops [first seed] [seeds].
 */
#include "check.h"
#include "sim/sim.h"

enum { ROUNDS = 10, SLOTS = 2, BYTES = 3000, STEADY = 8 };

static const char *scene;
static unsigned long long seed;
static xd_error err;

static xd_runtime *open_machine(int force_sync)
{
    xd_sim_device device = {.name = "sim", .arch = "sim", .memory = 1 << 30, .memory_rate = 1000000000,
                            .up_rate = 1000000000, .down_rate = 1000000000, .latency = 100};
    xd_sim_device devices[2] = {device, device};
    xd_sim_peer peer = {.capable = 1, .route = XD_SIM_LINK, .rate = 1000000000, .latency = 100};
    xd_sim_peer peers[4] = {peer, peer, peer, peer};
    xd_sim_config config = {.device_count = 2, .devices = devices, .peers = peers, .peer_limit = -1,
                            .pinned = 1 << 30, .seed = seed, .delay = 20000};
    xd_driver *driver;
    xd_runtime *runtime;
    OK(xd_sim_create(&driver, &config, &err));
    OK(xd_runtime_open(&runtime, driver, &(xd_runtime_options){.force_sync = force_sync}, &err));
    return runtime;
}

static void close_machine(xd_runtime *runtime)
{
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
}

/* ---- short ways to say things ---- */

static unsigned char value(int round, uint64_t at)
{
    uint64_t mixed = ((uint64_t)round * 1000003 + at + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return (unsigned char)(mixed >> 56);
}

static void write_round(xd_buffer *pinned, uint64_t offset, int round)
{
    unsigned char *bytes = (unsigned char *)(uintptr_t)xd_buffer_address(pinned) + offset;
    for (uint64_t i = 0; i < BYTES; i++)
        bytes[i] = value(round, i);
}

static void check_rounds(const xd_buffer *pinned, int rounds)
{
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)xd_buffer_address(pinned);
    for (uint64_t i = 0; i < (uint64_t)rounds * BYTES; i++) {
        int round = (int)(i / BYTES);
        if (bytes[i] == value(round, i % BYTES))
            continue;
        fprintf(stderr, "%s, seed %llu: byte %llu of round %d is wrong\n", scene, seed,
                (unsigned long long)(i % BYTES), round);
        exit(1);
    }
}

static xd_buffer *memory(xd_runtime *runtime, int device, uint64_t bytes)
{
    xd_buffer *buffer;
    OK(xd_buffer_open(&buffer, runtime, device, bytes, &err));
    return buffer;
}

static xd_stream *stream_on(xd_runtime *runtime, int device)
{
    xd_stream *stream;
    OK(xd_stream_open(&stream, runtime, device, &err));
    return stream;
}

static void copy(xd_stream *stream, xd_buffer *dst, uint64_t dst_at, xd_buffer *src, uint64_t src_at, uint64_t bytes)
{
    xd_transfer transfer = {
        .dst_device = xd_buffer_device(dst),
        .src_device = xd_buffer_device(src),
        .dst = xd_buffer_address(dst) + dst_at,
        .src = xd_buffer_address(src) + src_at,
        .width = bytes,
        .height = 1,
    };
    OK(xd_stream_copy(stream, &transfer, &err));
}

static void finish(xd_runtime *runtime, xd_stream *stream)
{
    xd_event *end;
    int done;
    OK(xd_event_open(&end, runtime, 0, &err));
    OK(xd_event_record(end, stream, &err));
    OK(xd_event_wait(end, XD_FOREVER, &done, &err));
    CHECK(done);
    xd_event_close(&end);
}

static int nothing(void *arg)
{
    (void)arg;
    return 0;
}

static void work(xd_stream *stream, uint64_t cost)
{
    xd_kernel kernel = {.run = nothing, .cost = cost};
    OK(xd_stream_launch(stream, &kernel, &err));
}

static void open_events(xd_runtime *runtime, xd_event **events)
{
    for (int i = 0; i < SLOTS; i++)
        OK(xd_event_open(&events[i], runtime, 0, &err));
}

static void close_events(xd_event **events)
{
    for (int i = 0; i < SLOTS; i++)
        xd_event_close(&events[i]);
}

/* ---- scenes ---- */

typedef struct hop {
    const char *name;
    int path;
    unsigned tiles;
    uint64_t producing, consuming; /* ns a round */
    int force_sync;
} hop;

static const hop HOPS[] = {
    {"direct, slow producer", XD_DIRECT, 0, 60000, 0, 0},
    {"direct, slow consumer", XD_DIRECT, 0, 0, 60000, 0},
    {"staged, slow producer", XD_STAGED, 4, 60000, 0, 0},
    {"staged, slow consumer", XD_STAGED, 4, 0, 60000, 0},
    {"staged through one tile, slow consumer", XD_STAGED, 1, 0, 60000, 0},
    {"waits by the host, direct", XD_DIRECT, 0, 60000, 0, 1},
    {"waits by the host, staged", XD_STAGED, 4, 60000, 60000, 1},
};

/* A producer fills source slots in turn, the link carries them to destination slots, a consumer empties those. */
static void run_hop(const hop *hop)
{
    xd_runtime *runtime = open_machine(hop->force_sync);
    xd_stream *producer = stream_on(runtime, 0), *consumer = stream_on(runtime, 1);
    xd_buffer *host = memory(runtime, XD_HOST, ROUNDS * BYTES);
    xd_buffer *input = memory(runtime, 0, ROUNDS * BYTES), *output = memory(runtime, 1, ROUNDS * BYTES);
    xd_buffer *source = memory(runtime, 0, SLOTS * BYTES), *dest = memory(runtime, 1, SLOTS * BYTES);
    xd_event *ready[SLOTS], *released[SLOTS], *arrived[SLOTS], *freed[SLOTS];
    xd_link_options options = {.path = hop->path, .tile_bytes = 700, .tiles = hop->tiles, .gate = 1};
    xd_link *link;
    OK(xd_link_open(&link, runtime, 0, 1, &options, &err));
    open_events(runtime, ready);
    open_events(runtime, released);
    open_events(runtime, arrived);
    open_events(runtime, freed);

    for (int round = 0; round < ROUNDS; round++)
        write_round(host, (uint64_t)round * BYTES, round);
    copy(producer, input, 0, host, 0, ROUNDS * BYTES);
    for (int round = 0; round < ROUNDS; round++) {
        int slot = round % SLOTS;
        uint64_t at = (uint64_t)round * BYTES, slot_at = (uint64_t)slot * BYTES;
        OK(xd_stream_wait(producer, released[slot], &err));
        work(producer, hop->producing);
        copy(producer, source, slot_at, input, at, BYTES);
        OK(xd_event_record(ready[slot], producer, &err));
        xd_copy order = {
            .dst = xd_buffer_address(dest) + slot_at,
            .src = xd_buffer_address(source) + slot_at,
            .width = BYTES,
            .height = 1,
            .source_ready = ready[slot],
            .dest_free = freed[slot],
            .released = released[slot],
            .arrived = arrived[slot],
        };
        OK(xd_link_copy(link, &order, &err));
        OK(xd_stream_wait(consumer, arrived[slot], &err));
        work(consumer, hop->consuming);
        copy(consumer, output, at, dest, slot_at, BYTES);
        OK(xd_event_record(freed[slot], consumer, &err));
    }
    copy(consumer, host, 0, output, 0, ROUNDS * BYTES);
    finish(runtime, consumer);
    check_rounds(host, ROUNDS);

    close_events(freed);
    close_events(arrived);
    close_events(released);
    close_events(ready);
    xd_link_close(&link);
    xd_buffer_close(&dest);
    xd_buffer_close(&source);
    xd_buffer_close(&output);
    xd_buffer_close(&input);
    xd_buffer_close(&host);
    xd_stream_close(&consumer);
    xd_stream_close(&producer);
    close_machine(runtime);
}

/* A copy of nothing still carries the order from its source's event, or its destination's, to its arrival. */
static void run_empty(int path, int through_dest)
{
    xd_runtime *runtime = open_machine(0);
    xd_stream *producer = stream_on(runtime, 0), *consumer = stream_on(runtime, 1);
    xd_buffer *host = memory(runtime, XD_HOST, BYTES), *input = memory(runtime, 0, BYTES);
    xd_buffer *output = memory(runtime, 1, BYTES);
    xd_event *ready[SLOTS], *arrived[SLOTS];
    xd_link_options options = {.path = path, .gate = 1};
    xd_link *link;
    OK(xd_link_open(&link, runtime, 0, 1, &options, &err));
    open_events(runtime, ready);
    open_events(runtime, arrived);

    write_round(host, 0, 0);
    copy(producer, input, 0, host, 0, BYTES);
    finish(runtime, producer);
    memset((void *)(uintptr_t)xd_buffer_address(host), 0, BYTES);
    work(producer, 60000);
    copy(producer, host, 0, input, 0, BYTES);
    OK(xd_event_record(ready[0], producer, &err));
    xd_copy order = {.height = 1, .arrived = arrived[0]};
    *(through_dest ? &order.dest_free : &order.source_ready) = ready[0];
    OK(xd_link_copy(link, &order, &err));
    OK(xd_stream_wait(consumer, arrived[0], &err));
    copy(consumer, output, 0, host, 0, BYTES);
    finish(runtime, consumer);
    memset((void *)(uintptr_t)xd_buffer_address(host), 0, BYTES);
    copy(consumer, host, 0, output, 0, BYTES);
    finish(runtime, consumer);
    check_rounds(host, 1);

    close_events(arrived);
    close_events(ready);
    xd_link_close(&link);
    xd_buffer_close(&output);
    xd_buffer_close(&input);
    xd_buffer_close(&host);
    xd_stream_close(&consumer);
    xd_stream_close(&producer);
    close_machine(runtime);
}

/* One stream fills the tiles of a ring, another one empties them. */
static void run_relay(void)
{
    xd_runtime *runtime = open_machine(0);
    xd_stream *down = stream_on(runtime, 0), *up = stream_on(runtime, 1);
    xd_buffer *host = memory(runtime, XD_HOST, ROUNDS * BYTES);
    xd_buffer *input = memory(runtime, 0, ROUNDS * BYTES), *output = memory(runtime, 1, ROUNDS * BYTES);
    xd_event *filled;
    xd_ring *ring;
    OK(xd_event_open(&filled, runtime, 0, &err));
    OK(xd_ring_open(&ring, runtime, 2, BYTES, &err));
    for (int round = 0; round < ROUNDS; round++)
        write_round(host, (uint64_t)round * BYTES, round);
    copy(down, input, 0, host, 0, ROUNDS * BYTES);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t at = (uint64_t)round * BYTES;
        xd_tile tile;
        int got;
        OK(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err));
        uint64_t between = (uint64_t)(uintptr_t)tile.address;
        xd_transfer there = {.dst_device = XD_HOST, .dst = between, .width = BYTES, .height = 1};
        xd_transfer back = {.dst_device = 1, .src_device = XD_HOST, .src = between, .width = BYTES, .height = 1};
        there.src = xd_buffer_address(input) + at;
        back.dst = xd_buffer_address(output) + at;
        OK(xd_stream_copy(down, &there, &err));
        OK(xd_event_record(filled, down, &err));
        OK(xd_stream_wait(up, filled, &err));
        work(up, 20000);
        OK(xd_stream_copy(up, &back, &err));
        OK(xd_ring_submit(ring, &tile, up, &err));
    }
    copy(up, host, 0, output, 0, ROUNDS * BYTES);
    finish(runtime, up);
    check_rounds(host, ROUNDS);
    xd_ring_close(&ring);
    xd_event_close(&filled);
    xd_buffer_close(&output);
    xd_buffer_close(&input);
    xd_buffer_close(&host);
    xd_stream_close(&up);
    xd_stream_close(&down);
    close_machine(runtime);
}

/* The host fills the tiles of a ring, a stream carries them to the device. */
static void run_uploads(void)
{
    xd_runtime *runtime = open_machine(0);
    xd_stream *stream = stream_on(runtime, 0);
    xd_buffer *output = memory(runtime, 0, ROUNDS * BYTES), *host = memory(runtime, XD_HOST, ROUNDS * BYTES);
    xd_ring *ring;
    OK(xd_ring_open(&ring, runtime, SLOTS, BYTES, &err));
    for (int round = 0; round < ROUNDS; round++) {
        xd_tile tile;
        int got;
        OK(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err));
        CHECK(got);
        for (uint64_t i = 0; i < BYTES; i++)
            ((unsigned char *)tile.address)[i] = value(round, i);
        xd_transfer upload = {
            .dst_device = 0,
            .src_device = XD_HOST,
            .dst = xd_buffer_address(output) + (uint64_t)round * BYTES,
            .src = (uint64_t)(uintptr_t)tile.address,
            .width = BYTES,
            .height = 1,
        };
        OK(xd_stream_copy(stream, &upload, &err));
        OK(xd_ring_submit(ring, &tile, stream, &err));
    }
    OK(xd_ring_drain(ring, &err));
    copy(stream, host, 0, output, 0, ROUNDS * BYTES);
    finish(runtime, stream);
    check_rounds(host, ROUNDS);
    xd_ring_close(&ring);
    xd_buffer_close(&host);
    xd_buffer_close(&output);
    xd_stream_close(&stream);
    close_machine(runtime);
}

/* Host slots that the throttle alone protects. */
static void run_throttle(void)
{
    xd_runtime *runtime = open_machine(0);
    xd_stream *stream = stream_on(runtime, 0);
    xd_buffer *slots = memory(runtime, XD_HOST, SLOTS * BYTES), *output = memory(runtime, 0, ROUNDS * BYTES);
    xd_buffer *host = memory(runtime, XD_HOST, ROUNDS * BYTES);
    xd_throttle *throttle;
    OK(xd_throttle_open(&throttle, runtime, SLOTS, &err));
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t slot_at = (uint64_t)(round % SLOTS) * BYTES;
        int admitted;
        OK(xd_throttle_admit(throttle, XD_FOREVER, &admitted, &err));
        CHECK(admitted);
        write_round(slots, slot_at, round);
        copy(stream, output, (uint64_t)round * BYTES, slots, slot_at, BYTES);
        OK(xd_throttle_retire(throttle, stream, &err));
    }
    copy(stream, host, 0, output, 0, ROUNDS * BYTES);
    finish(runtime, stream);
    check_rounds(host, ROUNDS);
    xd_throttle_close(&throttle);
    xd_buffer_close(&host);
    xd_buffer_close(&output);
    xd_buffer_close(&slots);
    xd_stream_close(&stream);
    close_machine(runtime);
}

int main(int argc, char **argv)
{
    unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned long long count = argc > 2 ? strtoull(argv[2], NULL, 10) : STEADY;
    for (seed = first; seed < first + count; seed++) {
        for (size_t i = 0; i < sizeof HOPS / sizeof HOPS[0]; i++) {
            scene = HOPS[i].name;
            run_hop(&HOPS[i]);
        }
        scene = "a copy of nothing, direct";
        run_empty(XD_DIRECT, 0);
        run_empty(XD_DIRECT, 1);
        scene = "a copy of nothing, staged";
        run_empty(XD_STAGED, 0);
        run_empty(XD_STAGED, 1);
        scene = "from stream to stream through a ring";
        run_relay();
        scene = "uploads through a ring";
        run_uploads();
        scene = "host slots behind a throttle";
        run_throttle();
    }
    return 0;
}
