/* What the simulated devices refuse: budgets, ranges, handles, devices that do not belong together. */
#include "check.h"
#include "machine.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static xd_error err;

static int copy(xd_driver *d, int device, void *on, int to, uint64_t dst, int from, uint64_t src, uint64_t bytes)
{
    xd_transfer t = {.dst_device = to, .src_device = from, .dst = dst, .src = src, .width = bytes, .height = 1};
    return d->copy(d, device, on, &t, &err);
}

static void test_budgets(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    uint64_t a, b, free_bytes, total;
    void *pinned, *more;
    OK(d->device_alloc(d, 0, 40 * MIB, &a, &err));
    FAILS(d->device_alloc(d, 0, 25 * MIB, &b, &err), XD_NO_DEVICE_MEMORY);
    CHECK_HAS(err.text, "25165824 of 67108864 bytes are free");
    OK(d->device_alloc(d, 0, 24 * MIB, &b, &err));
    OK(d->memory_info(d, 0, &free_bytes, &total, &err));
    CHECK_EQ(free_bytes, 0);
    CHECK_EQ(total, 64 * MIB);
    OK(d->device_free(d, 0, b, &err));
    FAILS(d->device_free(d, 0, b, &err), XD_INVALID);
    FAILS(d->device_free(d, 1, a, &err), XD_INVALID);
    FAILS(d->device_free(d, 0, a + 1, &err), XD_INVALID);
    OK(d->device_free(d, 0, a, &err));
    OK(d->host_alloc(d, 256 * MIB, &pinned, &err));
    FAILS(d->host_alloc(d, 1, &more, &err), XD_NO_PINNED_MEMORY);
    OK(d->host_free(d, pinned, &err));
    d->close(d);
    free(m);
}

static void test_memory_beyond_the_hosts(void)
{
    machine *m = machine_make(1);
    m->devices[0].memory = 4096 * GIB;
    xd_driver *d = machine_driver(m);
    uint64_t a;
    void *stream;
    int idle;
    OK(d->device_alloc(d, 0, 300 * GIB, &a, &err));
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->fill(d, 0, stream, a + 299 * GIB, 5, 10, &err)); /* offsets far above 2^32 */
    xd_sim_pass(d, GIB);
    OK(d->stream_query(d, 0, stream, &idle, &err));
    CHECK(idle);
    CHECK_EQ(*(unsigned char *)(uintptr_t)(a + 299 * GIB + 9), 5);
    CHECK_EQ(*(unsigned char *)(uintptr_t)(a + 299 * GIB + 10), 0);
    d->close(d);
    free(m);
}

static void test_ranges_at_submission(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    uint64_t a, b;
    void *stream, *pinned;
    char pageable[16];
    OK(d->device_alloc(d, 0, 4096, &a, &err));
    OK(d->device_alloc(d, 1, 4096, &b, &err));
    OK(d->host_alloc(d, 4096, &pinned, &err));
    OK(d->stream_create(d, 0, &stream, &err));
    uint64_t host = (uint64_t)(uintptr_t)pinned, plain = (uint64_t)(uintptr_t)pageable;
    OK(copy(d, 0, stream, 0, a, XD_HOST, host, 4096));
    FAILS(copy(d, 0, stream, 0, a, XD_HOST, host, 4097), XD_INVALID);
    CHECK_HAS(err.text, "ends 4096 bytes after this address");
    FAILS(copy(d, 0, stream, 0, a, XD_HOST, plain, 16), XD_INVALID);
    CHECK_HAS(err.text, "page-locked memory: nothing is allocated there");
    FAILS(copy(d, 0, stream, 0, b, XD_HOST, host, 16), XD_INVALID);
    CHECK_HAS(err.text, "not all in the memory of device 0: the memory of device 1");
    FAILS(copy(d, 0, stream, XD_HOST, host, XD_HOST, host + 64, 16), XD_INVALID);
    FAILS(copy(d, 0, stream, 5, a, XD_HOST, host, 16), XD_INVALID);
    FAILS(copy(d, 0, stream, 1, b, 1, b + 64, 16), XD_INVALID);
    FAILS(copy(d, 0, stream, 0, a, XD_HOST, host, 0), XD_INVALID);
    FAILS(copy(d, 0, stream, 0, UINT64_MAX - 3, XD_HOST, host, 16), XD_INVALID);
    FAILS(d->fill(d, 0, stream, a + 1, 0, 4096, &err), XD_INVALID);
    xd_transfer rows = {.dst_device = 0, .src_device = XD_HOST, .dst = a, .src = host, .width = 8, .height = 3,
                        .dst_pitch = 2044, .src_pitch = 8};
    OK(d->copy(d, 0, stream, &rows, &err));
    rows.dst_pitch = 2045;
    FAILS(d->copy(d, 0, stream, &rows, &err), XD_INVALID);
    rows.dst_pitch = UINT64_MAX / 2;
    FAILS(d->copy(d, 0, stream, &rows, &err), XD_INVALID);
    rows.dst_pitch = 4;
    FAILS(d->copy(d, 0, stream, &rows, &err), XD_INVALID);
    FAILS(d->host_access(d, pageable, 1, 0, &err), XD_INVALID);
    OK(d->host_access(d, pinned, 4096, 1, &err));
    d->close(d);
    free(m);
}

static int nothing(void *arg)
{
    (void)arg;
    return 0;
}

/* Another device's memory is freed while a copy that uses it is queued: freeing waits for its own device only. */
static void test_ranges_when_the_bytes_move(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    uint64_t a, b;
    void *stream, *event;
    int done, enabled;
    OK(d->device_alloc(d, 0, 4096, &a, &err));
    OK(d->device_alloc(d, 1, 4096, &b, &err));
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->peer_enable(d, 0, 1, &enabled, &err));
    xd_kernel slow = {.run = nothing, .cost = 1000000};
    OK(d->launch(d, 0, stream, &slow, &err));
    OK(copy(d, 0, stream, 1, b, 0, a, 4096));
    OK(d->event_record(d, 0, event, stream, &err));
    OK(d->device_free(d, 1, b, &err));
    FAILS(d->event_wait(d, 0, event, XD_FOREVER, &done, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "device 0 has failed");
    CHECK_HAS(err.text, "the memory of device 1");
    uint64_t c;
    FAILS(d->device_alloc(d, 0, 16, &c, &err), XD_DEVICE_FAULT); /* sticky */
    OK(d->device_alloc(d, 1, 16, &c, &err));
    OK(d->device_free(d, 0, a, &err)); /* what it held can be given back */
    d->close(d);
    free(m);
}

static void test_handles(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    void *stream, *event, *other, *timed;
    int answer;
    OK(d->stream_create(d, 0, &stream, &err));
    OK(d->stream_create(d, 1, &other, &err));
    OK(d->event_create(d, 0, 0, &event, &err));
    OK(d->event_create(d, 0, 1, &timed, &err));
    FAILS(d->event_record(d, 0, event, other, &err), XD_INVALID);
    FAILS(d->event_record(d, 1, event, other, &err), XD_INVALID);
    CHECK_HAS(err.text, "the event belongs to device 0");
    FAILS(d->stream_query(d, 1, stream, &answer, &err), XD_INVALID);
    CHECK_HAS(err.text, "the stream belongs to device 0, the call names device 1");
    FAILS(d->event_record(d, 0, stream, stream, &err), XD_INVALID);
    FAILS(d->stream_wait(d, 0, stream, (void *)12345, &err), XD_INVALID);
    FAILS(d->event_query(d, 0, NULL, &answer, &err), XD_INVALID);
    OK(d->event_query(d, 0, event, &answer, &err));
    CHECK(answer); /* never recorded */
    OK(d->stream_wait(d, 1, other, event, &err));
    OK(d->stream_query(d, 1, other, &answer, &err));
    CHECK(answer); /* which has no effect */
    double seconds;
    FAILS(d->event_elapsed(d, 0, timed, timed, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "never recorded");
    FAILS(d->event_elapsed(d, 0, event, timed, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "without timing");
    OK(d->event_destroy(d, 0, event, &err));
    FAILS(d->event_query(d, 0, event, &answer, &err), XD_INVALID);
    void *again;
    OK(d->event_create(d, 0, 0, &again, &err));
    CHECK(again != event); /* a stale handle never becomes another's */
    OK(d->stream_destroy(d, 0, stream, &err));
    FAILS(d->stream_destroy(d, 0, stream, &err), XD_INVALID);
    FAILS(d->stream_create(d, 2, &stream, &err), XD_INVALID);
    d->close(d);
    free(m);
}

static void test_peers(void)
{
    machine *m = machine_make(4);
    m->config.peer_limit = 2;
    machine_peer(m, 1, 0)->capable = 0; /* one way only */
    xd_driver *d = machine_driver(m);
    int answer;
    OK(d->peer_capable(d, 0, 1, &answer, &err));
    CHECK(answer);
    OK(d->peer_capable(d, 1, 0, &answer, &err));
    CHECK(!answer);
    OK(d->peer_capable(d, 2, 2, &answer, &err));
    CHECK(!answer);
    OK(d->peer_enable(d, 1, 0, &answer, &err));
    CHECK(!answer);
    for (int twice = 0; twice < 2; twice++)
        for (int peer = 1; peer < 4; peer++) {
            OK(d->peer_enable(d, 0, peer, &answer, &err));
            CHECK_EQ(answer, peer < 3); /* the third is one too many; the second time it is enabled already */
        }
    FAILS(d->peer_enable(d, 0, 4, &answer, &err), XD_INVALID);

    uint64_t at[4];
    void *stream[4];
    for (int i = 0; i < 4; i++) {
        OK(d->device_alloc(d, i, 64, &at[i], &err));
        OK(d->stream_create(d, i, &stream[i], &err));
    }
    OK(copy(d, 0, stream[0], 1, at[1], 0, at[0], 64));
    FAILS(copy(d, 1, stream[1], 1, at[1], 0, at[0], 64), XD_NO_PEER); /* the stream's device reads: it has no access */
    FAILS(copy(d, 0, stream[0], 3, at[3], 0, at[0], 64), XD_NO_PEER); /* capable, but not enabled */
    d->close(d);
    free(m);
}

static void test_configurations(void)
{
    machine *m = machine_make(2);
    xd_driver *d = NULL;
    m->config.device_count = 0;
    FAILS(xd_sim_create(&d, &m->config, &err), XD_INVALID);
    m->config.device_count = 2;
    m->devices[1].up_rate = 0;
    FAILS(xd_sim_create(&d, &m->config, &err), XD_INVALID);
    CHECK_HAS(err.text, "device 1");
    m->devices[1].up_rate = 1;
    machine_peer(m, 1, 0)->rate = 0;
    FAILS(xd_sim_create(&d, &m->config, &err), XD_INVALID);
    CHECK_HAS(err.text, "1 to 0");
    CHECK(!d);
    free(m);
}

int main(void)
{
    test_budgets();
    test_memory_beyond_the_hosts();
    test_ranges_at_submission();
    test_ranges_when_the_bytes_move();
    test_handles();
    test_peers();
    test_configurations();
    return 0;
}
