/* The ordering checker: what it must find, in words, and what it must not say a word about. */
#include "check.h"
#include "machine.h"

enum { BYTES = 4096, TILE = 1024, PIECES = BYTES / TILE };

static xd_error err;

/* Two devices, each with a stream for work and one for copies; a block on each; two page-locked tiles. */
static xd_driver *d;
static void *work[2], *copies[2];
static uint64_t mem[2], tile;

static void open_all(void)
{
    machine *m = machine_make(2);
    m->config.check = 1;
    d = machine_driver(m);
    void *pinned;
    int enabled;
    for (int i = 0; i < 2; i++) {
        OK(d->stream_create(d, i, &work[i], &err));
        OK(d->stream_create(d, i, &copies[i], &err));
        OK(d->device_alloc(d, i, BYTES, &mem[i], &err));
        OK(d->peer_enable(d, i, 1 - i, &enabled, &err));
    }
    OK(d->host_alloc(d, BYTES, &pinned, &err));
    tile = (uint64_t)(uintptr_t)pinned;
    free(m);
}

static void *recorded(int device, void *stream)
{
    void *event;
    OK(d->event_create(d, device, 0, &event, &err));
    OK(d->event_record(d, device, event, stream, &err));
    return event;
}

static void order(int first, void *before, int second, void *after)
{
    void *event = recorded(first, before);
    OK(d->stream_wait(d, second, after, event, &err));
    OK(d->event_destroy(d, first, event, &err));
}

static void copy(int on, void *stream, int to, uint64_t dst, int from, uint64_t src, uint64_t bytes)
{
    xd_transfer t = {.dst_device = to, .src_device = from, .dst = dst, .src = src, .width = bytes, .height = 1};
    OK(d->copy(d, on, stream, &t, &err));
}

static int nothing(void *arg) { (void)arg; return 0; }

static void kernel(int on, uint64_t address, uint64_t bytes, int write, const char *label)
{
    xd_range range = {.device = on, .address = address, .bytes = bytes, .write = write};
    xd_kernel k = {.run = nothing, .label = label, .ranges = &range, .range_count = 1, .cost = 1000};
    OK(d->launch(d, on, work[on], &k, &err));
}

/* The next wait raises the one violation; the one after raises nothing. */
static void close_with(size_t found, const char *const *parts)
{
    int done = 0;
    xd_error all[64];
    void *event = recorded(0, work[0]);
    CHECK_EQ(xd_sim_violations(d, all, 64), found);
    if (found) {
        FAILS(d->event_wait(d, 0, event, XD_FOREVER, &done, &err), XD_ORDER);
        CHECK_TEXT(err.text, all[0].text);
        for (; *parts; parts++)
            CHECK_HAS(err.text, *parts);
    }
    if (found < 2)
        OK(d->event_wait(d, 0, event, XD_FOREVER, &done, &err));
    d->close(d);
}

#define FOUND(...) close_with(1, (const char *const[]){__VA_ARGS__, NULL})
#define SILENT() close_with(0, NULL)

/* A copy larger than a tile, through one tile: the second piece must not come down before the first went up. */
static void staged(int with_tile_wait, int rounds)
{
    for (int round = 0; round < rounds; round++)
        for (uint64_t at = 0; at < BYTES; at += TILE) {
            if (with_tile_wait)
                order(1, copies[1], 0, copies[0]);
            copy(0, copies[0], XD_HOST, tile, 0, mem[0] + at, TILE);
            order(0, copies[0], 1, copies[1]);
            copy(1, copies[1], 1, mem[1] + at, XD_HOST, tile, TILE);
        }
}

static void test_single_staging_buffer(void)
{
    open_all();
    staged(0, 1);
    close_with(PIECES - 1, (const char *const[]){
        "copy 0>host (operation 5, stream 1 of device 0) writes bytes 0 to 1024 of allocation 2 on page-locked memory",
        "copy host>1 (operation 4, stream 3 of device 1) reads",
        "stream 1 must wait for an event recorded on stream 3 after operation 4", NULL});
    open_all();
    staged(1, 3);
    SILENT();
}

static void test_destination_overwritten(void)
{
    for (int wait = 0; wait < 2; wait++) {
        open_all();
        copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
        order(0, copies[0], 1, work[1]);
        kernel(1, mem[1] + 100, 8, 0, "reader");
        if (wait)
            order(1, work[1], 0, copies[0]); /* destination free */
        copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
        if (wait)
            SILENT();
        else
            FOUND("copy 0>1 (operation 5, stream 1 of device 0) writes bytes 100 to 108 of allocation 1 on device 1",
                  "reader (operation 4, stream 2 of device 1) reads");
    }
}

static void test_source_released_early(void)
{
    for (int wait = 0; wait < 2; wait++) {
        open_all();
        kernel(0, mem[0], BYTES, 1, "producer");
        order(0, work[0], 0, copies[0]);
        copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
        if (wait)
            order(0, copies[0], 0, work[0]);
        kernel(0, mem[0] + BYTES - 1, 1, 1, "next");
        if (wait)
            SILENT();
        else
            FOUND("next (operation 5", "writes bytes 4095 to 4096", "copy 0>1", "reads");
    }
}

static void test_source_not_ready(void)
{
    open_all();
    kernel(0, mem[0], BYTES, 1, "producer");
    copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
    FOUND("copy 0>1", "reads bytes 0 to 4096", "producer", "writes");
}

static void test_host_refills(void)
{
    for (int wait = 0; wait < 2; wait++) {
        open_all();
        void *pinned = (void *)(uintptr_t)tile;
        OK(d->host_access(d, pinned, TILE, 1, &err));
        xd_kernel slow = {.run = nothing, .cost = 1000000};
        OK(d->launch(d, 0, copies[0], &slow, &err));
        copy(0, copies[0], 0, mem[0], XD_HOST, tile, TILE);
        void *event = recorded(0, copies[0]);
        int done = 0;
        if (wait)
            OK(d->event_wait(d, 0, event, XD_FOREVER, &done, &err));
        else
            OK(d->event_query(d, 0, event, &done, &err)); /* asking is not enough unless the answer is yes */
        CHECK_EQ(done, wait);
        OK(d->host_access(d, pinned, 16, 1, &err));
        if (wait)
            SILENT();
        else
            FOUND("the host (write) writes bytes 0 to 16", "copy host>0", "reads",
                  "the host must see an event done that is recorded on stream 1 after operation 2");
    }
}

static void test_host_reads_too_early(void)
{
    open_all();
    copy(0, copies[0], XD_HOST, tile, 0, mem[0], TILE);
    OK(d->host_access(d, (void *)(uintptr_t)tile, 1, 0, &err));
    FOUND("the host (read) reads bytes 0 to 1", "copy 0>host", "writes");
}

static void test_freed_too_early(void)
{
    open_all();
    copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
    xd_sim_pass(d, 1000000); /* done, but nobody has seen that */
    OK(d->device_free(d, 1, mem[1], &err));
    FOUND("the host (device_free) writes bytes 0 to 4096 of allocation 1 on device 1", "copy 0>1", "writes");
}

/* Orders that come about in a round-about way are orders. */
static void test_chains_are_seen(void)
{
    open_all();
    kernel(0, mem[0], BYTES, 1, "a");
    order(0, work[0], 1, work[1]);
    order(1, work[1], 1, copies[1]);
    order(1, copies[1], 0, copies[0]);
    copy(0, copies[0], 1, mem[1], 0, mem[0], BYTES);
    int idle;
    xd_sim_pass(d, 10000000);
    OK(d->stream_query(d, 0, copies[0], &idle, &err)); /* the host has seen it idle */
    CHECK(idle);
    kernel(1, mem[1], BYTES, 1, "b"); /* and submits after that */
    SILENT();
}

static void test_reads_may_overlap(void)
{
    open_all();
    kernel(0, mem[0], BYTES, 0, "a");
    copy(0, copies[0], XD_HOST, tile, 0, mem[0], TILE);
    copy(0, copies[0], 1, mem[1], 0, mem[0] + TILE, TILE);
    kernel(1, mem[1] + TILE, TILE, 1, "next to it");
    SILENT();
}

/* Columns of one matrix, written by two streams: rows in turn, never the same byte. */
static void test_rows_with_gaps(void)
{
    for (int overlap = 0; overlap < 2; overlap++) {
        open_all();
        xd_transfer t = {.dst_device = 0, .src_device = XD_HOST, .src = tile, .width = 32, .height = 16,
                         .dst_pitch = 64, .src_pitch = 32};
        t.dst = mem[0];
        OK(d->copy(d, 0, work[0], &t, &err));
        t.dst = mem[0] + 32 - (uint64_t)overlap;
        OK(d->copy(d, 0, copies[0], &t, &err));
        if (overlap)
            FOUND("writes bytes 31 to 32");
        else
            SILENT();
    }
}

static void test_off_by_default(void)
{
    machine *m = machine_make(1);
    d = machine_driver(m);
    OK(d->stream_create(d, 0, &work[0], &err));
    OK(d->stream_create(d, 0, &copies[0], &err));
    OK(d->device_alloc(d, 0, BYTES, &mem[0], &err));
    OK(d->fill(d, 0, work[0], mem[0], 1, BYTES, &err));
    OK(d->fill(d, 0, copies[0], mem[0], 2, BYTES, &err));
    SILENT();
    free(m);
}

/* Somebody who passes no err cannot be told; then the next one is. */
static void test_nobody_misses_it(void)
{
    open_all();
    OK(d->fill(d, 0, work[0], mem[0], 1, BYTES, &err));
    OK(d->fill(d, 0, copies[0], mem[0], 2, BYTES, &err));
    void *event = recorded(0, work[0]);
    int done = 0;
    CHECK_EQ(d->event_wait(d, 0, event, XD_FOREVER, &done, NULL), XD_OK);
    CHECK(done);
    FAILS(d->event_query(d, 0, event, &done, &err), XD_ORDER);
    OK(d->event_query(d, 0, event, &done, &err));
    d->close(d);
}

int main(void)
{
    test_single_staging_buffer();
    test_destination_overwritten();
    test_source_released_early();
    test_source_not_ready();
    test_host_refills();
    test_host_reads_too_early();
    test_freed_too_early();
    test_chains_are_seen();
    test_reads_may_overlap();
    test_rows_with_gaps();
    test_off_by_default();
    test_nobody_misses_it();
    return 0;
}
