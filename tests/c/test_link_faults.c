/* Links after a driver call that failed half way: nothing in flight, every tile accounted for, the next copy right; and
   broken for good where the driver is. */
#include "check.h"
#include "recorder.h"

enum { TILE = 64, BYTES = 5 * TILE + 3 };

static xd_error err;
static recorder rec;
static xd_driver *fault;
static xd_runtime *runtime;
static xd_stream *streams[2];
static xd_link *link_;
static xd_buffer *src, *dst;
static xd_event *ready, *space, *released, *arrived;
static xd_copy order;

static void begin(int path)
{
    recorder_open(&rec, 2);
    OK(xd_fault_create(&fault, &rec.table, &err));
    OK(xd_runtime_open(&runtime, fault, NULL, &err));
    for (int device = 0; device < 2; device++)
        OK(xd_stream_open(&streams[device], runtime, device, &err));
    xd_link_options options = {.path = path, .tile_bytes = TILE, .tiles = 2, .gate = 1};
    OK(xd_link_open(&link_, runtime, 0, 1, &options, &err));
    OK(xd_buffer_open(&src, runtime, 0, BYTES, &err));
    OK(xd_buffer_open(&dst, runtime, 1, BYTES, &err));
    xd_event **const events[] = {&ready, &space, &released, &arrived};
    for (int i = 0; i < 4; i++)
        OK(xd_event_open(events[i], runtime, 0, &err));
    OK(xd_event_record(ready, streams[0], &err));
    OK(xd_event_record(space, streams[1], &err));
    order = (xd_copy){
        .dst = xd_buffer_address(dst),
        .src = xd_buffer_address(src),
        .width = BYTES,
        .height = 1,
        .source_ready = ready,
        .dest_free = space,
        .released = released,
        .arrived = arrived,
    };
}

static void end(void)
{
    xd_link_close(&link_);
    xd_event **const events[] = {&ready, &space, &released, &arrived};
    for (int i = 0; i < 4; i++)
        xd_event_close(events[i]);
    xd_buffer_close(&src);
    xd_buffer_close(&dst);
    xd_stream_close(&streams[0]);
    xd_stream_close(&streams[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static void copy_and_compare(int step)
{
    unsigned char *from = (unsigned char *)(uintptr_t)xd_buffer_address(src);
    unsigned char *to = (unsigned char *)(uintptr_t)xd_buffer_address(dst);
    for (int i = 0; i < BYTES; i++) {
        from[i] = (unsigned char)(i * 7 + step);
        to[i] = 0xA5;
    }
    OK(xd_link_copy(link_, &order, &err));
    CHECK_EQ(memcmp(from, to, BYTES), 0);
}

/* Lines of the log that begin like this. */
static int count(const char *start)
{
    int found = 0;
    for (const char *line = rec.log; *line; line = strchr(line, '\n') + 1)
        found += strncmp(line, start, strlen(start)) == 0;
    return found;
}

static void fails_once_anywhere(int path)
{
    uint64_t calls = 0;
    for (uint64_t at = 1; !calls; at++) {
        begin(path);
        xd_fault_arm(fault, at, 0, XD_DRIVER);
        int status = xd_link_copy(link_, &order, &err);
        if (!status) {
            CHECK_EQ(xd_fault_calls(fault), at - 1);
            calls = at;
        } else {
            CHECK_EQ(status, XD_DRIVER);
            CHECK_EQ(err.status, XD_DRIVER);
            CHECK_EQ(rec.queries, path == XD_DIRECT ? 1 : 2); /* each stream was waited for, after its last work: */
            for (const char *line = rec.log; *line; line = strchr(line, '\n') + 1) {
                const char *next = strchr(line, '\n') + 1;
                if (!*next || (path == XD_STAGED && !*(strchr(next, '\n') + 1)))
                    CHECK_HAS(line, " record ");
            }
        }
        xd_fault_arm(fault, 0, 0, 0);
        for (int step = 1; step < 4; step++)
            copy_and_compare(step);
        end();
    }
    CHECK(calls > (path == XD_DIRECT ? 5 : 30));
}

/* A tile that the failed copy has touched is waited for by the next user. */
static void tiles_stay_accounted_for(void)
{
    for (uint64_t at = 1;; at++) {
        begin(XD_STAGED);
        xd_fault_arm(fault, at, 0, XD_DRIVER);
        int status = xd_link_copy(link_, &order, &err);
        xd_fault_arm(fault, 0, 0, 0);
        int used = count("s2 copy");
        recorder_clear(&rec);
        order.width = 2 * TILE;
        OK(xd_link_copy(link_, &order, &err));
        CHECK(count("s2 wait") >= 1 + (used < 2 ? used : 2));
        end();
        if (!status)
            break;
    }
}

static void fails_for_good_anywhere(int path)
{
    for (uint64_t at = 1;; at++) {
        begin(path);
        xd_fault_arm(fault, at, 1, XD_DEVICE_FAULT);
        int status = xd_link_copy(link_, &order, &err);
        if (!status) {
            end();
            break;
        }
        CHECK_EQ(status, XD_DEVICE_FAULT);
        xd_fault_arm(fault, UINT64_MAX, 0, XD_DRIVER);
        FAILS(xd_link_copy(link_, &order, &err), XD_DEVICE_FAULT);
        CHECK_HAS(err.text, "device 0 to device 1 is broken");
        CHECK_EQ(xd_fault_calls(fault), 0);
        xd_fault_arm(fault, 1, 1, XD_DEVICE_FAULT);
        end();
    }
}

/* A device that never gets there: the copy's error comes back in bounded time and closing ends. */
static uint64_t racing_clock(xd_driver *driver)
{
    recorder *r = (recorder *)driver;
    return (uint64_t)r->queries * UINT64_C(10000000000);
}

static int hung_wait(xd_driver *driver, int device, void *event, uint64_t timeout, int *done, xd_error *error)
{
    (void)device, (void)event, (void)error;
    ((recorder *)driver)->queries++;
    CHECK(timeout != XD_FOREVER);
    *done = 0;
    return XD_OK;
}

static void hangs(void)
{
    recorder_open(&rec, 2);
    rec.table.clock = racing_clock;
    rec.table.event_wait = hung_wait;
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    OK(xd_link_open(&link_, runtime, 0, 1, &(xd_link_options){.path = XD_STAGED, .max_bytes = 1}, &err));
    OK(xd_buffer_open(&src, runtime, 0, 8, &err));
    OK(xd_buffer_open(&dst, runtime, 1, 8, &err));
    order = (xd_copy){.dst = xd_buffer_address(dst), .src = xd_buffer_address(src), .width = 8, .height = 1};
    OK(xd_link_copy(link_, &order, &err));
    xd_buffer_close(&src);
    xd_buffer_close(&dst);
    xd_link_close(&link_);
    CHECK_NOTHING_LIVES(runtime);
    CHECK_EQ(rec.live, 1); /* the tiles' memory: the hung device may still write there */
    OK(xd_runtime_close(&runtime, &err));
    recorder_forget(&rec);
    recorder_close(&rec);
}

int main(void)
{
    fails_once_anywhere(XD_STAGED);
    fails_once_anywhere(XD_DIRECT);
    tiles_stay_accounted_for();
    fails_for_good_anywhere(XD_STAGED);
    fails_for_good_anywhere(XD_DIRECT);
    hangs();
    return 0;
}
