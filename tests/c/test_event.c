/* Events: never recorded, moved between devices, waited for with and without a driver's own wait, errors, timing. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static xd_stream *streams[2];
static xd_event *event;

static void begin(void)
{
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    for (int device = 0; device < 2; device++)
        OK(xd_stream_open(&streams[device], runtime, device, &err));
    OK(xd_event_open(&event, runtime, 1, &err));
}

static void end(void)
{
    xd_event_close(&event);
    xd_event_close(&event);
    xd_event_close(NULL);
    xd_stream_close(&streams[0]);
    xd_stream_close(&streams[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void never_recorded(void)
{
    int done = 0;
    double seconds;
    CHECK_EQ(rec.live, 2);
    CHECK_EQ(xd_event_device(event), XD_HOST);
    OK(xd_event_query(event, &done, &err));
    CHECK_EQ(done, 1);
    done = 0;
    OK(xd_event_wait(event, XD_FOREVER, &done, &err));
    CHECK_EQ(done, 1);
    OK(xd_stream_wait(streams[0], event, &err));
    CHECK_TEXT(rec.log, "");
    CHECK_EQ(rec.queries, 0);
    FAILS(xd_event_elapsed(event, event, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "never recorded");
}

static void moves(void)
{
    recorder_clear(&rec);
    OK(xd_event_record(event, streams[0], &err));
    CHECK_EQ(xd_event_device(event), 0);
    OK(xd_event_record(event, streams[1], &err));
    CHECK_EQ(xd_event_device(event), 1);
    OK(xd_stream_wait(streams[0], event, &err));
    OK(xd_event_record(event, streams[0], &err));
    OK(xd_stream_wait(streams[1], event, &err));
    CHECK_TEXT(rec.log, "s0 record e0\n"
                        "s1 record e1\n"
                        "s0 wait e1\n"
                        "s0 record e0\n"
                        "s1 wait e0\n");
}

/* The recorder has no event_wait: the default asks. */
static void polls(void)
{
    int done = 0;
    rec.queries = 0;
    rec.pending = 300;
    OK(xd_event_wait(event, XD_FOREVER, &done, &err));
    CHECK_EQ(done, 1);
    CHECK_EQ(rec.queries, 301);

    rec.queries = 0;
    rec.pending = 1 << 30;
    OK(xd_event_wait(event, 0, &done, &err));
    CHECK_EQ(done, 0);
    CHECK_EQ(rec.queries, 1);
    done = 1;
    OK(xd_event_wait(event, 5000000, &done, &err)); /* into the naps */
    CHECK_EQ(done, 0);
    CHECK(rec.queries > 2);

    rec.pending = 0;
    rec.query_status = XD_DEVICE_FAULT;
    rec.queries = 0;
    done = 7;
    FAILS(xd_event_wait(event, XD_FOREVER, &done, &err), XD_DEVICE_FAULT);
    CHECK_EQ(rec.queries, 1);
    CHECK_EQ(done, 7);
    FAILS(xd_event_query(event, &done, &err), XD_DEVICE_FAULT);
    rec.query_status = 0;
}

static int own_wait(xd_driver *driver, int device, void *handle, uint64_t timeout, int *done, xd_error *error)
{
    (void)handle, (void)error;
    CHECK(driver == &rec.table);
    CHECK_EQ(device, 0);
    CHECK_EQ(timeout, 5);
    *done = 0;
    return XD_OK;
}

static void driver_waits(void)
{
    int done = 1;
    rec.queries = 0;
    rec.table.event_wait = own_wait;
    OK(xd_event_wait(event, 5, &done, &err));
    CHECK_EQ(done, 0);
    CHECK_EQ(rec.queries, 0);
    rec.table.event_wait = NULL;
}

static void elapsed(void)
{
    xd_event *other, *plain;
    double seconds = 0;
    OK(xd_event_open(&other, runtime, 1, &err));
    OK(xd_event_open(&plain, runtime, 0, &err));
    OK(xd_event_record(other, streams[1], &err));
    OK(xd_event_record(plain, streams[0], &err));
    FAILS(xd_event_elapsed(event, other, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "devices 0 and 1");
    FAILS(xd_event_elapsed(event, plain, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "without timing");
    OK(xd_event_record(other, streams[0], &err));
    rec.pending = 1;
    FAILS(xd_event_elapsed(event, other, &seconds, &err), XD_INVALID);
    CHECK_HAS(err.text, "not done");
    OK(xd_event_elapsed(event, other, &seconds, &err));
    CHECK(seconds > 0.2);
    xd_event_close(&other);
    xd_event_close(&plain);
}

/* Under force_sync the host waits for another device, and for no other reason. */
static void forced(void)
{
    OK(xd_event_record(event, streams[0], &err));
    xd_runtime_force_sync(runtime, 1);
    CHECK_EQ(xd_runtime_forced_sync(runtime), 1);
    recorder_clear(&rec);
    rec.queries = 0;
    rec.pending = 3;
    OK(xd_stream_wait(streams[1], event, &err));
    CHECK_TEXT(rec.log, "");
    CHECK_EQ(rec.queries, 4);
    OK(xd_stream_wait(streams[0], event, &err));
    CHECK_TEXT(rec.log, "s0 wait e0\n");
    CHECK_EQ(rec.queries, 4);
    rec.query_status = XD_DEVICE_FAULT;
    FAILS(xd_stream_wait(streams[1], event, &err), XD_DEVICE_FAULT);
    rec.query_status = 0;
    xd_runtime_force_sync(runtime, 0);
    OK(xd_stream_wait(streams[1], event, &err));
    CHECK_TEXT(rec.log, "s0 wait e0\ns1 wait e0\n");
}

int main(void)
{
    begin();
    never_recorded();
    moves();
    polls();
    driver_waits();
    elapsed();
    forced();
    end();
    return 0;
}
