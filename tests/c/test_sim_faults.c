/* Faults on demand: each shows itself as on the machines where it was seen, and only where it was asked for. */
#include "check.h"
#include "machine.h"

#include <stdbool.h>

#define US UINT64_C(1000)

enum { BYTES = 1024, TILE = 256, POISON = 0xA5 };

static xd_error err;
static xd_driver *d;
static uint64_t mem[2];
static void *stream[2], *event[2], *pinned;

static void open_with(machine *m, const xd_sim_fault *faults, size_t count)
{
    m->config.faults = faults;
    m->config.fault_count = count;
    d = machine_driver(m);
    int enabled;
    for (int i = 0; i < 2; i++) {
        OK(d->device_alloc(d, i, 4 * BYTES, &mem[i], &err));
        OK(d->stream_create(d, i, &stream[i], &err));
        OK(d->event_create(d, i, 0, &event[i], &err));
        OK(d->peer_enable(d, i, 1 - i, &enabled, &err));
    }
    OK(d->host_alloc(d, 4 * BYTES, &pinned, &err));
    for (int i = 0; i < BYTES; i++)
        ((unsigned char *)(uintptr_t)mem[0])[i] = (unsigned char)(i % 251);
    memset((void *)(uintptr_t)mem[1], POISON, 4 * BYTES);
}

static void finish(int device)
{
    int done = 0;
    OK(d->event_record(d, device, event[device], stream[device], &err));
    OK(d->event_wait(d, device, event[device], XD_FOREVER, &done, &err));
    CHECK(done);
}

static void copy(int on, int to, uint64_t dst, int from, uint64_t src, uint64_t bytes)
{
    xd_transfer t = {.dst_device = to, .src_device = from, .dst = dst, .src = src, .width = bytes, .height = 1};
    OK(d->copy(d, on, stream[on], &t, &err));
}

static const unsigned char *bytes_of(int device)
{
    return (const unsigned char *)(uintptr_t)mem[device];
}

static unsigned char pattern(int i)
{
    return (unsigned char)(i % 251);
}

/* Copies from device 0 to 1 under one fault and compares with what should be wrong about it. */
static void spoiled(int kind, uint64_t value, unsigned char (*expected)(int))
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = kind, .from = 0, .to = 1, .first = 1, .value = value};
    open_with(m, &fault, 1);
    copy(0, 1, mem[1], 0, mem[0], BYTES);
    finish(0);
    for (int i = 0; i < BYTES; i++)
        if (bytes_of(1)[i] != expected(i)) {
            fprintf(stderr, "%s: byte %d is %d, wanted %d\n", xd_sim_fault_name(kind), i, bytes_of(1)[i], expected(i));
            exit(1);
        }
    CHECK_EQ(bytes_of(1)[BYTES], POISON);

    /* the other way, and through the host: right */
    copy(1, 0, mem[0] + BYTES, 1, mem[1] + BYTES, BYTES);
    finish(1);
    CHECK(!memcmp(bytes_of(0) + BYTES, bytes_of(1) + BYTES, BYTES));
    copy(0, XD_HOST, (uint64_t)(uintptr_t)pinned, 0, mem[0], BYTES);
    finish(0);
    copy(1, 1, mem[1] + 2 * BYTES, XD_HOST, (uint64_t)(uintptr_t)pinned, BYTES);
    finish(1);
    CHECK(!memcmp(bytes_of(1) + 2 * BYTES, bytes_of(0), BYTES));

    /* rows with gaps take the same fault */
    memset((void *)(uintptr_t)mem[1], POISON, 4 * BYTES);
    xd_transfer rows = {.dst_device = 1, .src_device = 0, .dst = mem[1], .src = mem[0], .width = 64, .height = BYTES / 64,
                        .dst_pitch = 96, .src_pitch = 64};
    OK(d->copy(d, 0, stream[0], &rows, &err));
    finish(0);
    bool remembers = kind == XD_SIM_STALE;
    for (int i = 0; i < BYTES && !remembers; i++)
        CHECK_EQ(bytes_of(1)[i / 64 * 96 + i % 64], expected(i));
    CHECK_EQ(bytes_of(1)[64], POISON);
    d->close(d);
    free(m);
}

static unsigned char poison(int i) { (void)i; return POISON; }
static unsigned char zeros(int i) { (void)i; return 0; }
static unsigned char swapped(int i) { return pattern(i < TILE ? i + TILE : i < 2 * TILE ? i - TILE : i); }
static unsigned char flipped(int i) { return (unsigned char)(i == 700 ? ~pattern(i) : pattern(i)); }
static unsigned char truncated(int i) { return i < BYTES % 600 ? pattern(i) : POISON; }
static unsigned char aliased(int i) { return pattern(i % TILE); }

static void test_nothing_is_spoiled_by_default(void)
{
    machine *m = machine_make(2);
    open_with(m, NULL, 0);
    copy(0, 1, mem[1], 0, mem[0], BYTES);
    finish(0);
    CHECK(!memcmp(bytes_of(0), bytes_of(1), BYTES));
    d->close(d);
    free(m);
}

static void test_stale(void)
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = XD_SIM_STALE, .from = 0, .to = 1, .first = 1};
    open_with(m, &fault, 1);
    for (int round = 1; round <= 3; round++) {
        OK(d->fill(d, 0, stream[0], mem[0], round, BYTES, &err));
        copy(0, 1, mem[1], 0, mem[0], BYTES);
        finish(0);
        CHECK_EQ(bytes_of(1)[5], round == 1 ? POISON : round - 1);
    }
    d->close(d);
    free(m);
}

/* Device 0 reads its own write back, device 1 never sees it: a round trip proves nothing. */
static void test_mirror(void)
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = XD_SIM_MIRROR, .from = 0, .to = 1, .first = 1};
    open_with(m, &fault, 1);
    copy(0, 1, mem[1], 0, mem[0], BYTES);
    copy(0, 0, mem[0] + BYTES, 1, mem[1], BYTES); /* read by device 0 */
    finish(0);
    CHECK(!memcmp(bytes_of(0), bytes_of(0) + BYTES, BYTES));
    copy(1, 0, mem[0] + 2 * BYTES, 1, mem[1], BYTES); /* written by device 1 */
    finish(1);
    CHECK_EQ(bytes_of(0)[2 * BYTES], POISON);
    CHECK_EQ(bytes_of(1)[0], POISON);
    d->close(d);
    free(m);
}

static void test_which_operations(void)
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = XD_SIM_DROP, .from = XD_SIM_ANY, .to = 1, .first = 2, .count = 1};
    open_with(m, &fault, 1);
    for (int i = 0; i < 3; i++)
        copy(0, 1, mem[1] + (uint64_t)i * BYTES, 0, mem[0], BYTES);
    finish(0);
    CHECK_EQ(bytes_of(1)[1], 1);
    CHECK_EQ(bytes_of(1)[BYTES + 1], POISON);
    CHECK_EQ(bytes_of(1)[2 * BYTES + 1], 1);
    d->close(d);
    free(m);
}

/* ---- order ---- */

static int nothing(void *arg) { (void)arg; return 0; }

static void kernel(int on, uint64_t cost)
{
    xd_kernel k = {.run = nothing, .cost = cost, .label = "k"};
    OK(d->launch(d, on, stream[on], &k, &err));
}

/* Device 0 fills late; device 1 waits for it and copies what it finds. */
static unsigned char seen_by_the_waiter(int kind, uint64_t *host_time)
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = kind, .from = 0, .to = kind == XD_SIM_EARLY_EVENT ? XD_SIM_ANY : 1, .first = 1};
    open_with(m, kind < 0 ? NULL : &fault, kind < 0 ? 0 : 1);
    kernel(0, 5000 * US);
    OK(d->fill(d, 0, stream[0], mem[0], 77, BYTES, &err));
    OK(d->event_record(d, 0, event[0], stream[0], &err));
    uint64_t t = d->clock(d);
    OK(d->stream_wait(d, 1, stream[1], event[0], &err));
    *host_time = d->clock(d) - t;
    copy(1, 1, mem[1], 0, mem[0], BYTES);
    finish(1);
    unsigned char seen = bytes_of(1)[1];
    d->close(d);
    free(m);
    return seen;
}

static void test_waits(void)
{
    uint64_t host_time;
    CHECK_EQ(seen_by_the_waiter(-1, &host_time), 77);
    CHECK_EQ(host_time, US);
    CHECK_EQ(seen_by_the_waiter(XD_SIM_IGNORE_WAIT, &host_time), 1);
    CHECK_EQ(seen_by_the_waiter(XD_SIM_EARLY_EVENT, &host_time), 1);
    CHECK_EQ(seen_by_the_waiter(XD_SIM_BLOCK_WAIT, &host_time), 77);
    CHECK(host_time > 4990 * US);
}

/* ---- time and devices ---- */

static void test_slow_and_hung(void)
{
    machine *m = machine_make(2);
    xd_sim_fault faults[] = {
        {.kind = XD_SIM_SLOW_KERNEL, .from = 0, .to = XD_SIM_ANY, .first = 1, .count = 1, .value = 7},
        {.kind = XD_SIM_HANG_KERNEL, .from = 1, .to = XD_SIM_ANY, .first = 2},
        {.kind = XD_SIM_HANG_COPY, .from = 0, .to = XD_HOST, .first = 1},
    };
    open_with(m, faults, 3);
    uint64_t t = d->clock(d);
    kernel(0, 100 * US);
    finish(0);
    CHECK_EQ(d->clock(d) - t, US + 700 * US + US);
    kernel(1, US);
    finish(1);
    kernel(1, US);
    int done;
    OK(d->event_record(d, 1, event[1], stream[1], &err));
    t = d->clock(d);
    OK(d->event_wait(d, 1, event[1], 1000 * US, &done, &err));
    CHECK(!done);
    CHECK_EQ(d->clock(d) - t, 1000 * US);
    FAILS(d->event_wait(d, 1, event[1], XD_FOREVER, &done, &err), XD_DRIVER);
    CHECK_HAS(err.text, "hangs on device 1");
    copy(0, XD_HOST, (uint64_t)(uintptr_t)pinned, 0, mem[0], 16);
    OK(d->event_record(d, 0, event[0], stream[0], &err));
    OK(d->event_wait(d, 0, event[0], 1000 * US, &done, &err));
    CHECK(!done);
    OK(d->device_free(d, 0, mem[0], &err)); /* does not wait for ever */
    OK(d->host_free(d, pinned, &err));
    d->close(d);
    free(m);
}

static void test_lost_device(void)
{
    machine *m = machine_make(2);
    xd_sim_fault fault = {.kind = XD_SIM_LOSE_DEVICE, .from = 1, .to = XD_SIM_ANY, .first = 7};
    open_with(m, &fault, 1);
    for (int i = 0; i < 6; i++)
        OK(d->fill(d, 1, stream[1], mem[1], i, 16, &err));
    finish(1);
    OK(d->fill(d, 1, stream[1], mem[1], 99, 16, &err));
    OK(d->event_record(d, 1, event[1], stream[1], &err));
    int done;
    FAILS(d->event_wait(d, 1, event[1], XD_FOREVER, &done, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "device 1 has failed: it was lost while it ran fill");
    CHECK_EQ(bytes_of(1)[0], 5);
    FAILS(d->fill(d, 1, stream[1], mem[1], 1, 16, &err), XD_DEVICE_FAULT);
    kernel(0, US); /* the other one works */
    finish(0);
    OK(d->device_free(d, 1, mem[1], &err));
    d->close(d);
    free(m);
}

static void test_peer_access(void)
{
    machine *m = machine_make(2);
    xd_sim_fault faults[] = {
        {.kind = XD_SIM_ENABLE_FAILS, .from = 0, .to = 1, .first = 2, .count = 1},
        {.kind = XD_SIM_ALREADY_ENABLED, .from = 1, .to = 0, .first = 1},
    };
    m->config.peer_limit = 0;
    open_with(m, faults, 2);
    int enabled;
    FAILS(d->peer_enable(d, 0, 1, &enabled, &err), XD_DRIVER);
    OK(d->peer_enable(d, 0, 1, &enabled, &err));
    CHECK(!enabled);
    OK(d->peer_enable(d, 1, 0, &enabled, &err));
    CHECK(enabled); /* by somebody else: beyond the limit, and fine */
    d->close(d);
    free(m);
}

static void test_not_ready(void)
{
    machine *m = machine_make(1);
    xd_sim_fault fault = {.kind = XD_SIM_NOT_READY, .from = XD_SIM_ANY, .to = XD_SIM_ANY, .first = 1, .count = 2};
    m->config.faults = &fault;
    m->config.fault_count = 1;
    xd_driver *driver = machine_driver(m);
    xd_runtime *runtime;
    FAILS(xd_runtime_open(&runtime, driver, NULL, &err), XD_NO_DEVICE);
    FAILS(xd_runtime_open(&runtime, driver, NULL, &err), XD_NO_DEVICE);
    OK(xd_runtime_open(&runtime, driver, NULL, &err));
    OK(xd_runtime_close(&runtime, &err));
    free(m);
}

/* What a driver may do between devices without peer access: bounce the bytes itself and hold the caller meanwhile. */
static void test_blocking_copies(void)
{
    machine *m = machine_make(2);
    machine_peer(m, 0, 1)->capable = machine_peer(m, 1, 0)->capable = 0;
    machine_peer(m, 0, 1)->route = XD_SIM_OVER_HOST_BUS;
    m->config.unpeered = XD_SIM_UNPEERED_BLOCKS;
    open_with(m, NULL, 0);
    kernel(0, 3000 * US);
    uint64_t t = d->clock(d);
    copy(0, 1, mem[1], 0, mem[0], BYTES);
    CHECK(d->clock(d) - t >= 2999 * US); /* the call waits for the kernel queued before, and for its bytes */
    CHECK(!memcmp(bytes_of(0), bytes_of(1), BYTES));
    d->close(d);
    free(m);
}

static void test_bad_faults(void)
{
    machine *m = machine_make(2);
    xd_driver *driver = NULL;
    xd_sim_fault fault = {.kind = XD_SIM_FAULT_KINDS, .from = 0, .to = 1, .first = 1};
    m->config.faults = &fault;
    m->config.fault_count = 1;
    FAILS(xd_sim_create(&driver, &m->config, &err), XD_INVALID);
    fault = (xd_sim_fault){.kind = XD_SIM_DROP, .from = 0, .to = 2};
    FAILS(xd_sim_create(&driver, &m->config, &err), XD_INVALID);
    CHECK_HAS(err.text, "`to` is 2");
    CHECK(!driver);
    free(m);
}

int main(void)
{
    test_nothing_is_spoiled_by_default();
    spoiled(XD_SIM_DROP, 0, poison);
    spoiled(XD_SIM_ZERO, 0, zeros);
    spoiled(XD_SIM_MIRROR, 0, poison);
    spoiled(XD_SIM_STALE, 0, poison);
    spoiled(XD_SIM_SWAP, TILE, swapped);
    spoiled(XD_SIM_FLIP, 700, flipped);
    spoiled(XD_SIM_TRUNCATE, 600, truncated);
    spoiled(XD_SIM_ALIAS, TILE, aliased);
    test_stale();
    test_mirror();
    test_which_operations();
    test_waits();
    test_slow_and_hung();
    test_lost_device();
    test_peer_access();
    test_not_ready();
    test_blocking_copies();
    test_bad_faults();
    return 0;
}
