/* The throttle: a bounded queue of places, left in order, through exit events on the last stage's stream. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static xd_stream *stream;
static xd_throttle *throttle;
static uint64_t clock_now;

/* Asking takes 10 ns of this clock. */
static uint64_t fake_clock(xd_driver *driver)
{
    return clock_now + 10 * (uint64_t)((recorder *)driver)->queries;
}

static void begin(unsigned limit)
{
    recorder_open(&rec, 1);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_throttle_open(&throttle, runtime, limit, &err));
}

static void end(void)
{
    xd_throttle_close(&throttle);
    xd_throttle_close(&throttle);
    xd_throttle_close(NULL);
    xd_stream_close(&stream);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static int admit(uint64_t timeout)
{
    int admitted = 7;
    OK(xd_throttle_admit(throttle, timeout, &admitted, &err));
    return admitted;
}

static unsigned in_flight(void)
{
    unsigned count = 99;
    OK(xd_throttle_in_flight(throttle, &count, &err));
    return count;
}

static void first_in_first_out(void)
{
    begin(2);
    rec.table.clock = fake_clock;
    CHECK_EQ(admit(0), 1);
    CHECK_EQ(admit(0), 1);
    CHECK_EQ(rec.queries, 0);
    OK(xd_throttle_retire(throttle, stream, &err));
    OK(xd_throttle_retire(throttle, stream, &err));
    CHECK_TEXT(rec.log, "s0 record e0\ns0 record e1\n");
    CHECK_EQ(xd_throttle_blocked(throttle), 0);
    rec.pending = 4;
    CHECK_EQ(admit(XD_FOREVER), 1); /* the oldest leaves, and no other is asked */
    CHECK_EQ(rec.queries, 5);
    CHECK_EQ(xd_throttle_blocked(throttle), 50);
    OK(xd_throttle_retire(throttle, stream, &err));
    CHECK_TEXT(rec.log, "s0 record e0\ns0 record e1\ns0 record e0\n");
    rec.pending = 1;
    CHECK_EQ(in_flight(), 2);
    CHECK_EQ(in_flight(), 0);
    CHECK_EQ(xd_throttle_blocked(throttle), 50);
    end();
}

static void time_outs(void)
{
    begin(1);
    CHECK_EQ(admit(0), 1);
    CHECK_EQ(admit(0), 0); /* not retired: no event to wait for */
    CHECK_EQ(admit(100000), 0);
    CHECK_EQ(rec.queries, 0);
    OK(xd_throttle_retire(throttle, stream, &err));
    rec.pending = 1 << 30;
    CHECK_EQ(admit(0), 0);
    CHECK_EQ(admit(100000), 0);
    CHECK_EQ(in_flight(), 1);
    rec.pending = 0;
    CHECK_EQ(admit(0), 1);
    end();
}

static void withdrawn(void)
{
    begin(2);
    xd_throttle_withdraw(throttle); /* nobody there */
    CHECK_EQ(admit(0), 1);
    CHECK_EQ(admit(0), 1);
    xd_throttle_withdraw(throttle);
    CHECK_EQ(in_flight(), 1);
    CHECK_EQ(admit(0), 1);
    OK(xd_throttle_retire(throttle, stream, &err));
    OK(xd_throttle_retire(throttle, stream, &err));
    xd_throttle_withdraw(throttle); /* both have run */
    rec.pending = 1;
    CHECK_EQ(in_flight(), 2);
    FAILS(xd_throttle_retire(throttle, stream, &err), XD_INVALID);
    CHECK_HAS(err.text, "all of the 2 places");
    end();
}

static void errors(void)
{
    begin(1);
    xd_throttle *none = NULL;
    int admitted = 7;
    unsigned count = 7;
    FAILS(xd_throttle_open(&none, runtime, 0, &err), XD_INVALID);
    FAILS(xd_throttle_open(&none, runtime, UINT32_MAX, &err), XD_INVALID);
    CHECK_HAS(err.text, "limit is 4294967295; allowed: 1 to");
    CHECK(!none);
    CHECK_EQ(admit(0), 1);
    OK(xd_throttle_retire(throttle, stream, &err));
    rec.query_status = XD_DEVICE_FAULT;
    FAILS(xd_throttle_admit(throttle, XD_FOREVER, &admitted, &err), XD_DEVICE_FAULT);
    FAILS(xd_throttle_in_flight(throttle, &count, &err), XD_DEVICE_FAULT);
    CHECK_EQ(admitted, 7);
    CHECK_EQ(count, 7);
    rec.query_status = 0;
    CHECK_EQ(in_flight(), 0);
    end();
}

/* An event that others need too: nothing is recorded, and it is that event which is waited for. */
static void leaves_at_an_event(void)
{
    begin(1);
    xd_event *event = NULL;
    OK(xd_event_open(&event, runtime, 0, &err));
    FAILS(xd_throttle_retire_at(throttle, event, &err), XD_INVALID);
    CHECK_EQ(admit(0), 1);
    OK(xd_event_record(event, stream, &err));
    OK(xd_throttle_retire_at(throttle, event, &err));
    CHECK_TEXT(rec.log, "s0 record e0\n");
    rec.pending = 2;
    CHECK_EQ(admit(0), 0);
    rec.pending = 0;
    CHECK_EQ(admit(0), 1);
    OK(xd_throttle_retire(throttle, stream, &err));
    CHECK_TEXT(rec.log, "s0 record e0\ns0 record e1\n");
    CHECK_EQ(in_flight(), 0);
    xd_event_close(&event);
    end();
}

enum { LIMIT = 3, WORKERS = 4, ROUNDS = 500 };
static atomic_int inside, most;

static void *work(void *arg)
{
    xd_error err;
    (void)arg;
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_EQ(admit(XD_FOREVER), 1);
        int now = ++inside, seen = most;
        while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now))
            ;
        inside--;
        if (i % 9)
            OK(xd_throttle_retire(throttle, stream, &err));
        else
            xd_throttle_withdraw(throttle);
    }
    return NULL;
}

static void threads(void)
{
    pthread_t workers[WORKERS];
    begin(LIMIT);
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_create(&workers[i], NULL, work, NULL), 0);
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_join(workers[i], NULL), 0);
    CHECK(most >= 1 && most <= LIMIT);
    CHECK_EQ(in_flight(), 0);
    end();
}

int main(void)
{
    first_in_first_out();
    time_outs();
    withdrawn();
    errors();
    leaves_at_an_event();
    threads();
    return 0;
}
