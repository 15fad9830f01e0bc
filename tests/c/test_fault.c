/* The fault driver: counts, fails the call it was told to, once or from then on; frees what it is asked to free. */
#include "check.h"
#include "recorder.h"

static xd_error err;
static recorder rec;
static xd_driver *fault;
static xd_runtime *runtime;

static void mark_dropped(void *arg)
{
    *(int *)arg += 1;
}

static int never_run(void *arg)
{
    (void)arg;
    return 1;
}

static void counts(void)
{
    xd_device_info info;
    int capable;
    CHECK_EQ(xd_fault_calls(fault), 0); /* not armed: not counted */
    OK(xd_runtime_device_info(runtime, 0, &info, &err));
    CHECK_EQ(xd_fault_calls(fault), 0);

    xd_fault_arm(fault, 2, 0, XD_DRIVER);
    OK(xd_runtime_device_info(runtime, 0, &info, &err));
    FAILS(xd_runtime_peer_capable(runtime, 0, 1, &capable, &err), XD_DRIVER);
    CHECK_TEXT(err.operation, "peer_capable");
    CHECK_HAS(err.text, "call 2");
    OK(xd_runtime_peer_capable(runtime, 0, 1, &capable, &err));
    CHECK_EQ(xd_fault_calls(fault), 3);

    xd_fault_arm(fault, 2, 1, XD_DEVICE_FAULT);
    CHECK_EQ(xd_fault_calls(fault), 0);
    OK(xd_runtime_device_info(runtime, 0, &info, &err));
    for (int i = 0; i < 3; i++)
        FAILS(xd_runtime_device_info(runtime, 0, &info, &err), XD_DEVICE_FAULT);
    xd_fault_arm(fault, 0, 0, 0);
    OK(xd_runtime_device_info(runtime, 0, &info, &err));
    CHECK_EQ(xd_fault_calls(fault), 0);
}

/* Whatever a destroying call reports, the thing is gone. */
static void releases(void)
{
    xd_stream *stream;
    xd_event *event;
    xd_buffer *buffer, *pinned;
    int before = rec.live;
    OK(xd_stream_open(&stream, runtime, 0, &err));
    OK(xd_event_open(&event, runtime, 0, &err));
    OK(xd_event_record(event, stream, &err));
    OK(xd_buffer_open(&buffer, runtime, 0, 8, &err));
    OK(xd_buffer_open(&pinned, runtime, XD_HOST, 8, &err));
    CHECK_EQ(rec.live, before + 4);
    xd_fault_arm(fault, 1, 1, XD_DEVICE_FAULT);
    xd_buffer_close(&pinned);
    xd_buffer_close(&buffer);
    xd_event_close(&event);
    xd_stream_close(&stream);
    CHECK_EQ(xd_fault_calls(fault), 4);
    CHECK_EQ(rec.live, before);
    xd_fault_arm(fault, 0, 0, 0);
    CHECK_NOTHING_LIVES(runtime);
}

static void drops(void)
{
    xd_stream *stream;
    int dropped = 0;
    OK(xd_stream_open(&stream, runtime, 0, &err));
    xd_fault_arm(fault, 1, 0, XD_DRIVER);
    xd_kernel kernel = {.run = never_run, .drop = mark_dropped, .arg = &dropped};
    FAILS(xd_stream_launch(stream, &kernel, &err), XD_DRIVER);
    CHECK_EQ(dropped, 1);
    xd_fault_arm(fault, 0, 0, 0);
    xd_stream_close(&stream);
}

/* How much of the memory is ours is known above the driver. */
static void memory_runs_out(void)
{
    xd_buffer *held, *none = NULL;
    OK(xd_buffer_open(&held, runtime, XD_HOST, 100, &err));
    xd_fault_arm(fault, 1, 1, XD_NO_PINNED_MEMORY);
    FAILS(xd_buffer_open(&none, runtime, XD_HOST, 4096, &err), XD_NO_PINNED_MEMORY);
    CHECK_TEXT(err.text, "no page-locked host memory for 4096 bytes; this runtime holds 100 bytes of it");
    xd_fault_arm(fault, 1, 1, XD_NO_DEVICE_MEMORY);
    FAILS(xd_buffer_open(&none, runtime, 1, 77, &err), XD_NO_DEVICE_MEMORY);
    CHECK_HAS(err.text, "no memory on device 1 for 77 bytes");
    xd_fault_arm(fault, 0, 0, 0);
    xd_buffer_close(&held);
    CHECK(!none);
}

/* What the inner driver leaves to the defaults stays with them. */
static void optional(void)
{
    CHECK(!fault->event_wait && !fault->clock && !fault->host_access);
    CHECK_TEXT(fault->name, "recorder");
}

int main(void)
{
    recorder_open(&rec, 2);
    OK(xd_fault_create(&fault, &rec.table, &err));
    OK(xd_runtime_open(&runtime, fault, NULL, &err));
    counts();
    releases();
    drops();
    memory_runs_out();
    optional();
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
    return 0;
}
