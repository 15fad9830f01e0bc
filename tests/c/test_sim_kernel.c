/* Kernels: what they may call while they run, who drops them, what their failure does, and threads around them. */
#include "check.h"
#include "machine.h"

#include <pthread.h>

#define US UINT64_C(1000)

static xd_error err;

typedef struct job {
    xd_driver *driver;
    void *stream, *event, *spare_stream;
    uint64_t buffer;
    int runs, drops, result;
} job;

static int run(void *arg)
{
    job *j = arg;
    j->runs++;
    return j->result;
}

static void drop(void *arg)
{
    job *j = arg;
    j->drops++;
}

static job open_job(const machine *m)
{
    job j = {.driver = machine_driver(m)};
    xd_driver *d = j.driver;
    OK(d->stream_create(d, 0, &j.stream, &err));
    OK(d->event_create(d, 0, 0, &j.event, &err));
    return j;
}

static void launch(job *j, int (*function)(void *), uint64_t cost)
{
    xd_kernel kernel = {.run = function, .drop = drop, .arg = j, .cost = cost, .label = "job"};
    OK(j->driver->launch(j->driver, 0, j->stream, &kernel, &err));
}

static int wait(job *j, uint64_t timeout, int *done)
{
    return j->driver->event_wait(j->driver, 0, j->event, timeout, done, &err);
}

static void test_dropped_once(void)
{
    machine *m = machine_make(1);
    job j = open_job(m);
    xd_driver *d = j.driver;
    int done;
    launch(&j, run, 10);
    OK(d->event_record(d, 0, j.event, j.stream, &err));
    OK(wait(&j, XD_FOREVER, &done));
    CHECK(done);
    CHECK_EQ(j.runs, 1);
    CHECK_EQ(j.drops, 1);
    xd_kernel refused = {.run = run, .drop = drop, .arg = &j};
    FAILS(d->launch(d, 0, (void *)1, &refused, &err), XD_INVALID);
    CHECK_EQ(j.drops, 2);
    xd_range nowhere = {.device = 0, .address = 4096, .bytes = 16};
    refused.ranges = &nowhere;
    refused.range_count = 1;
    FAILS(d->launch(d, 0, j.stream, &refused, &err), XD_INVALID);
    CHECK_EQ(j.drops, 3);
    launch(&j, run, 10);
    launch(&j, run, 10);
    d->close(d); /* never ran */
    CHECK_EQ(j.runs, 1);
    CHECK_EQ(j.drops, 5);
    free(m);
}

static int busy_kernel(void *arg)
{
    job *j = arg;
    xd_driver *d = j->driver;
    xd_error inner;
    void *stream, *event;
    uint64_t address;
    int answer;
    CHECK_EQ(d->event_wait(d, 0, j->event, XD_FOREVER, &answer, &inner), XD_INVALID);
    CHECK_HAS(inner.text, "a kernel must not wait for a device");
    CHECK_EQ(d->event_query(d, 0, j->event, &answer, &inner), XD_OK);
    CHECK_EQ(d->stream_query(d, 0, j->stream, &answer, &inner), XD_OK);
    CHECK(!answer);
    CHECK_EQ(d->device_alloc(d, 0, 64, &address, &inner), XD_OK);
    CHECK_EQ(d->device_free(d, 0, address, &inner), XD_OK);
    CHECK_EQ(d->device_free(d, 0, j->buffer, &inner), XD_OK);
    CHECK_EQ(d->stream_create(d, 0, &stream, &inner), XD_OK);
    CHECK_EQ(d->event_create(d, 0, 0, &event, &inner), XD_OK);
    CHECK_EQ(d->event_record(d, 0, event, stream, &inner), XD_OK);
    CHECK_EQ(d->stream_destroy(d, 0, stream, &inner), XD_OK);
    CHECK_EQ(d->event_destroy(d, 0, event, &inner), XD_OK);
    j->runs++;
    return 0;
}

static void test_calls_from_a_kernel(void)
{
    machine *m = machine_make(1);
    job j = open_job(m);
    xd_driver *d = j.driver;
    uint64_t free_bytes, total;
    int done;
    OK(d->device_alloc(d, 0, 4096, &j.buffer, &err));
    launch(&j, busy_kernel, 10 * US);
    OK(d->fill(d, 0, j.stream, j.buffer, 3, 4096, &err)); /* queued before the kernel frees it: still valid */
    OK(d->event_record(d, 0, j.event, j.stream, &err));
    OK(wait(&j, XD_FOREVER, &done));
    CHECK(done);
    CHECK_EQ(j.runs, 1);
    OK(d->memory_info(d, 0, &free_bytes, &total, &err));
    CHECK_EQ(free_bytes, total);
    FAILS(d->fill(d, 0, j.stream, j.buffer, 3, 4096, &err), XD_INVALID);
    d->close(d);
    free(m);
}

static void test_a_failed_kernel_is_for_good(void)
{
    machine *m = machine_make(2);
    job j = open_job(m);
    xd_driver *d = j.driver;
    void *elsewhere, *there;
    int done;
    OK(d->stream_create(d, 1, &elsewhere, &err));
    OK(d->event_create(d, 1, 0, &there, &err));
    j.result = 7;
    launch(&j, run, 10 * US);
    launch(&j, run, 10 * US);
    OK(d->event_record(d, 0, j.event, j.stream, &err));
    OK(d->stream_wait(d, 1, elsewhere, j.event, &err));
    OK(d->event_record(d, 1, there, elsewhere, &err));
    FAILS(wait(&j, XD_FOREVER, &done), XD_DEVICE_FAULT);
    CHECK_EQ(err.code, 7);
    CHECK_HAS(err.text, "job returned 7");
    CHECK_EQ(j.runs, 1); /* what was queued behind it does not run */
    CHECK_EQ(j.drops, 2);
    FAILS(d->event_record(d, 0, j.event, j.stream, &err), XD_DEVICE_FAULT);
    FAILS(d->event_query(d, 0, j.event, &done, &err), XD_DEVICE_FAULT);
    FAILS(d->stream_query(d, 0, j.stream, &done, &err), XD_DEVICE_FAULT);
    /* Device 1 waits for what never comes; whoever asks is told why, at once. */
    FAILS(d->event_wait(d, 1, there, XD_FOREVER, &done, &err), XD_DEVICE_FAULT);
    FAILS(d->event_query(d, 1, there, &done, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "device 0 has failed");
    OK(d->stream_query(d, 1, elsewhere, &done, &err));
    CHECK(!done);
    d->close(d);
    free(m);
}

/* Threads that submit, wait, allocate and free at the same time, with kernels that make calls. */
typedef struct worker { machine *m; xd_driver *driver; int device, runs; } worker;

static int count(void *arg)
{
    __atomic_fetch_add((int *)arg, 1, __ATOMIC_RELAXED);
    return 0;
}

static void *work(void *arg)
{
    worker *w = arg;
    xd_driver *d = w->driver;
    xd_error err;
    void *stream, *event;
    OK(d->stream_create(d, w->device, &stream, &err));
    OK(d->event_create(d, w->device, 0, &event, &err));
    for (int i = 0; i < 200; i++) {
        uint64_t address;
        int done;
        OK(d->device_alloc(d, w->device, 256, &address, &err));
        xd_kernel kernel = {.run = count, .arg = &w->runs, .cost = US};
        OK(d->fill(d, w->device, stream, address, i & 255, 256, &err));
        OK(d->launch(d, w->device, stream, &kernel, &err));
        OK(d->event_record(d, w->device, event, stream, &err));
        OK(d->event_query(d, w->device, event, &done, &err));
        OK(d->event_wait(d, w->device, event, XD_FOREVER, &done, &err));
        CHECK(done);
        CHECK_EQ(*(unsigned char *)(uintptr_t)address, i & 255);
        OK(d->device_free(d, w->device, address, &err));
    }
    OK(d->event_destroy(d, w->device, event, &err));
    OK(d->stream_destroy(d, w->device, stream, &err));
    return NULL;
}

static void test_threads(void)
{
    machine *m = machine_make(2);
    xd_driver *d = machine_driver(m);
    pthread_t threads[4];
    worker workers[4];
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){.driver = d, .device = i % 2};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(workers[i].runs, 200);
    }
    d->close(d);
    free(m);
}

int main(void)
{
    test_dropped_once();
    test_calls_from_a_kernel();
    test_a_failed_kernel_is_for_good();
    test_threads();
    return 0;
}
