/* Links after a driver call that failed half way: nothing in flight, every tile accounted for, the next copy right; and
   broken for good where the driver is. */
#include "check.h"
#include "recorder.h"

enum { TILE = 64, BYTES = 5 * TILE + 3 };

static xd_error err;
static recorded_link on;

static void begin(int path)
{
    xd_link_options options = {.path = path, .tile_bytes = TILE, .tiles = 2, .gate = 1};
    recorded_link_open(&on, NULL, 1, &options, BYTES, 1);
}

static void end(void)
{
    recorded_link_close(&on);
}

static void copy_and_compare(int step)
{
    unsigned char *from = (unsigned char *)(uintptr_t)xd_buffer_address(on.src);
    unsigned char *to = (unsigned char *)(uintptr_t)xd_buffer_address(on.dst);
    for (int i = 0; i < BYTES; i++) {
        from[i] = (unsigned char)(i * 7 + step);
        to[i] = 0xA5;
    }
    OK(xd_link_copy(on.link, &on.order, &err));
    CHECK_EQ(memcmp(from, to, BYTES), 0);
}

/* Each stream was waited for, after its last work. */
static void check_rested(int path)
{
    CHECK_EQ(on.rec.queries, path == XD_DIRECT ? 1 : 2);
    for (const char *line = on.rec.log; *line; line = strchr(line, '\n') + 1) {
        const char *next = strchr(line, '\n') + 1;
        if (!*next || (path == XD_STAGED && !*(strchr(next, '\n') + 1)))
            CHECK_HAS(line, " record ");
    }
}

static void fails_once_anywhere(int path)
{
    for (uint64_t at = 1;; at++) {
        begin(path);
        xd_fault_arm(on.fault, at, 0, XD_DRIVER);
        int status = xd_link_copy(on.link, &on.order, &err);
        if (status) {
            CHECK_EQ(status, XD_DRIVER);
            CHECK_EQ(err.status, XD_DRIVER);
            check_rested(path);
        } else {
            CHECK_EQ(xd_fault_calls(on.fault), at - 1);
        }
        xd_fault_arm(on.fault, 0, 0, 0);
        for (int step = 1; step < 4; step++)
            copy_and_compare(step);
        end();
        if (!status) {
            CHECK(at > (path == XD_DIRECT ? 5 : 30));
            return;
        }
    }
}

static void fails_for_good_anywhere(int path)
{
    for (uint64_t at = 1;; at++) {
        begin(path);
        xd_fault_arm(on.fault, at, 1, XD_DEVICE_FAULT);
        int status = xd_link_copy(on.link, &on.order, &err);
        if (!status) {
            end();
            break;
        }
        CHECK_EQ(status, XD_DEVICE_FAULT);
        xd_fault_arm(on.fault, UINT64_MAX, 0, XD_DRIVER);
        FAILS(xd_link_copy(on.link, &on.order, &err), XD_DEVICE_FAULT);
        CHECK_HAS(err.text, "device 0 to device 1 is broken");
        CHECK_EQ(xd_fault_calls(on.fault), 0);
        xd_fault_arm(on.fault, 1, 1, XD_DEVICE_FAULT);
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
    recorder *rec = &on.rec;
    recorder_open(rec, 2);
    rec->table.clock = racing_clock;
    rec->table.event_wait = hung_wait;
    OK(xd_runtime_open(&on.runtime, &rec->table, NULL, &err));
    OK(xd_link_open(&on.link, on.runtime, 0, 1, &(xd_link_options){.path = XD_STAGED, .max_bytes = 1}, &err));
    OK(xd_buffer_open(&on.src, on.runtime, 0, 8, &err));
    OK(xd_buffer_open(&on.dst, on.runtime, 1, 8, &err));
    on.order = (xd_copy){.dst = xd_buffer_address(on.dst), .src = xd_buffer_address(on.src), .width = 8, .height = 1};
    OK(xd_link_copy(on.link, &on.order, &err));
    xd_buffer_close(&on.src);
    xd_buffer_close(&on.dst);
    xd_link_close(&on.link);
    CHECK_NOTHING_LIVES(on.runtime);
    CHECK_EQ(rec->live, 1); /* the tiles' memory: the hung device may still write there */
    OK(xd_runtime_close(&on.runtime, &err));
    recorder_forget(rec);
    recorder_close(rec);
}

int main(void)
{
    fails_once_anywhere(XD_STAGED);
    fails_once_anywhere(XD_DIRECT);
    fails_for_good_anywhere(XD_STAGED);
    fails_for_good_anywhere(XD_DIRECT);
    hangs();
    return 0;
}
