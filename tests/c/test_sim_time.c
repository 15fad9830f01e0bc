/* Simulated time: what each operation takes, what waits for what, and what the host pays. All numbers are exact. */
#include "check.h"
#include "machine.h"

#define US UINT64_C(1000)
#define MB UINT64_C(1000000)

static xd_error err;
static machine *m;
static xd_driver *d;
static uint64_t dev[2];
static void *pinned;
static void *stream[2], *other[2];

static void open_all(void)
{
    d = machine_driver(m);
    for (int i = 0; i < 2; i++) {
        OK(d->device_alloc(d, i, 32 * MB, &dev[i], &err));
        OK(d->stream_create(d, i, &stream[i], &err));
        OK(d->stream_create(d, i, &other[i], &err));
        int enabled;
        OK(d->peer_enable(d, i, 1 - i, &enabled, &err));
        CHECK(enabled);
    }
    OK(d->host_alloc(d, 32 * MB, &pinned, &err));
}

static uint64_t host(void)
{
    return (uint64_t)(uintptr_t)pinned;
}

static void copy(void *on, int device, int dst_device, uint64_t dst, int src_device, uint64_t src, uint64_t bytes)
{
    xd_transfer t = {.dst_device = dst_device, .src_device = src_device, .dst = dst, .src = src, .width = bytes, .height = 1};
    OK(d->copy(d, device, on, &t, &err));
}

/* When the work queued so far on the stream ends; the wait itself costs 1 us for the record and 1 us to come back. */
static uint64_t end_of(void *on, int device)
{
    void *event;
    int done = 0;
    OK(d->event_create(d, device, 0, &event, &err));
    OK(d->event_record(d, device, event, on, &err));
    OK(d->event_wait(d, device, event, XD_FOREVER, &done, &err));
    CHECK(done);
    OK(d->event_destroy(d, device, event, &err));
    return d->clock(d) - US;
}

static void test_copies_take_bytes_over_rate(void)
{
    uint64_t t = d->clock(d);
    copy(stream[0], 0, 0, dev[0], XD_HOST, host(), 10 * MB);
    CHECK_EQ(d->clock(d) - t, US);
    CHECK_EQ(end_of(stream[0], 0) - t, US + 1000 * US); /* submission, then 10 MB at 10 GB/s */

    t = d->clock(d);
    copy(stream[0], 0, XD_HOST, host(), 0, dev[0], 10 * MB);
    CHECK_EQ(end_of(stream[0], 0) - t, US + 1000 * US);

    t = d->clock(d);
    copy(stream[0], 0, 1, dev[1], 0, dev[0], 10 * MB);
    CHECK_EQ(end_of(stream[0], 0) - t, US + 500 * US);

    t = d->clock(d);
    copy(stream[0], 0, 0, dev[0] + 10 * MB, 0, dev[0], 10 * MB);
    CHECK_EQ(end_of(stream[0], 0) - t, US + 100 * US);

    t = d->clock(d);
    OK(d->fill(d, 0, stream[0], dev[0], 7, 10 * MB, &err));
    CHECK_EQ(end_of(stream[0], 0) - t, US + 100 * US);
}

static void test_one_direction_is_one_engine(void)
{
    uint64_t t = d->clock(d);
    copy(stream[0], 0, 0, dev[0], XD_HOST, host(), 10 * MB);
    copy(other[0], 0, 0, dev[0] + 10 * MB, XD_HOST, host(), 10 * MB);
    CHECK_EQ(end_of(other[0], 0) - t, US + 2000 * US);

    t = d->clock(d);
    copy(stream[0], 0, 0, dev[0], XD_HOST, host(), 10 * MB);
    copy(other[0], 0, XD_HOST, host() + 10 * MB, 0, dev[0] + 10 * MB, 10 * MB);
    CHECK_EQ(end_of(other[0], 0) - t, 2 * US + 1000 * US); /* the other way at the same time */
    end_of(stream[0], 0);
}

static void test_the_bus_is_shared(void)
{
    /* Two copies that could each use 10 GB/s of a bus of 15: 7.5 each while both run. The one of 15 MB is done after
       2 ms, the one of 20 MB has 5 MB left then and does them alone. */
    uint64_t t = d->clock(d);
    copy(stream[0], 0, 0, dev[0], XD_HOST, host(), 15 * MB);
    copy(stream[1], 1, 1, dev[1], XD_HOST, host(), 20 * MB);
    uint64_t first = end_of(stream[0], 0) - t, second = end_of(stream[1], 1) - t;
    /* 1 us alone moves 10 kB: of 15 MB 14.99 are left, which take 1998.667 us */
    CHECK_EQ(first, 2 * US + 1998667);
    CHECK_EQ(second, first + 501 * US); /* 5009997.5 bytes at 10 GB/s, rounded up */
}

static int nothing(void *arg)
{
    (void)arg;
    return 0;
}

static void test_kernels_share_the_compute_engine(void)
{
    xd_kernel kernel = {.run = nothing, .cost = 300 * US, .label = "k"};
    uint64_t t = d->clock(d);
    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->launch(d, 0, other[0], &kernel, &err));
    OK(d->launch(d, 1, stream[1], &kernel, &err));
    CHECK_EQ(end_of(other[0], 0) - t, US + 600 * US);
    CHECK(end_of(stream[1], 1) - t >= US + 600 * US); /* done long before; the host is where it is */
    end_of(stream[0], 0);
}

static void test_waits_take_a_hop(void)
{
    xd_kernel kernel = {.run = nothing, .cost = 100 * US};
    void *event;
    OK(d->event_create(d, 0, 0, &event, &err));
    uint64_t t = d->clock(d);
    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->event_record(d, 0, event, stream[0], &err));
    OK(d->stream_wait(d, 0, other[0], event, &err));
    OK(d->stream_wait(d, 1, stream[1], event, &err));
    OK(d->launch(d, 0, other[0], &kernel, &err));
    OK(d->launch(d, 1, stream[1], &kernel, &err));
    CHECK_EQ(end_of(other[0], 0) - t, US + 200 * US);
    CHECK_EQ(end_of(stream[1], 1) - t, US + 200 * US + 4 * US);
    OK(d->event_destroy(d, 0, event, &err));
}

static void test_events_have_times(void)
{
    xd_kernel kernel = {.run = nothing, .cost = 250 * US};
    void *begin, *end, *elsewhere;
    double seconds;
    OK(d->event_create(d, 0, 1, &begin, &err));
    OK(d->event_create(d, 0, 1, &end, &err));
    OK(d->event_create(d, 1, 1, &elsewhere, &err));
    OK(d->event_record(d, 0, begin, stream[0], &err));
    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->event_record(d, 0, end, stream[0], &err));
    OK(d->event_record(d, 1, elsewhere, stream[1], &err));
    FAILS(d->event_elapsed(d, 0, begin, end, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "second event is not done");
    end_of(stream[0], 0);
    OK(d->event_elapsed(d, 0, begin, end, &seconds, &err));
    CHECK_EQ((seconds * 1e9) + 0.5, 251 * US); /* the launch was submitted 1 us after the first record */
    FAILS(d->event_elapsed(d, 0, begin, elsewhere, &seconds, &err), XD_INVALID);
    OK(d->event_destroy(d, 0, begin, &err));
    OK(d->event_destroy(d, 0, end, &err));
    OK(d->event_destroy(d, 1, elsewhere, &err));
}

static void test_time_passes_while_asking(void)
{
    xd_kernel kernel = {.run = nothing, .cost = 100 * US};
    void *event;
    int done = 0, polls = 0;
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->event_record(d, 0, event, stream[0], &err));
    for (; !done; polls++)
        OK(d->event_query(d, 0, event, &done, &err));
    CHECK_EQ(polls, 99); /* 1 us has passed by the record, each question takes another */

    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->event_record(d, 0, event, stream[0], &err));
    uint64_t t = d->clock(d);
    OK(d->event_wait(d, 0, event, 40 * US, &done, &err));
    CHECK(!done);
    CHECK_EQ(d->clock(d) - t, 40 * US);
    OK(d->event_wait(d, 0, event, 400 * US, &done, &err));
    CHECK(done);
    CHECK_EQ(d->clock(d) - t, 99 * US + US);

    t = d->clock(d);
    xd_sim_pass(d, 5 * US);
    CHECK_EQ(d->clock(d) - t, 5 * US);
    OK(d->event_destroy(d, 0, event, &err));
}

static void test_freeing_waits_for_the_device(void)
{
    xd_kernel kernel = {.run = nothing, .cost = 100 * US};
    uint64_t address;
    OK(d->device_alloc(d, 0, 4096, &address, &err));
    uint64_t t = d->clock(d);
    OK(d->launch(d, 0, stream[0], &kernel, &err));
    OK(d->device_free(d, 0, address, &err));
    CHECK_EQ(d->clock(d) - t, US + 100 * US);
}

static void close_all(void)
{
    for (int i = 0; i < 2; i++) {
        OK(d->stream_destroy(d, i, stream[i], &err));
        OK(d->stream_destroy(d, i, other[i], &err));
        OK(d->device_free(d, i, dev[i], &err));
    }
    OK(d->host_free(d, pinned, &err));
    d->close(d);
}

int main(void)
{
    m = machine_make(2);
    m->config.hop = 4 * US;
    open_all();
    test_copies_take_bytes_over_rate();
    test_one_direction_is_one_engine();
    test_kernels_share_the_compute_engine();
    test_waits_take_a_hop();
    test_events_have_times();
    test_time_passes_while_asking();
    test_freeing_waits_for_the_device();
    close_all();
    m->config.bus_rate = 15 * UINT64_C(1000000000);
    open_all();
    test_the_bus_is_shared();
    close_all();
    free(m);
    return 0;
}
