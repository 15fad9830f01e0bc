/* Call 1, 2, 3 ... fails, until the job succeeds: the error comes out, nothing stays behind. */
#include "check.h"
#include "job.h"
#include "machine.h"
#include "recorder.h"

static void loop(int simulated, int path, int sticky, int status)
{
    xd_error err;
    for (uint64_t at = 1;; at++) {
        recorder rec;
        xd_driver *fault;
        recorder_open(&rec, 2);
        OK(xd_fault_create(&fault, simulated ? machine_jumbled(2, at) : &rec.table, &err));
        xd_fault_arm(fault, at, sticky, status);
        err = (xd_error){0};
        int got = job_run(fault, path, &err);
        if (!simulated)
            recorder_close(&rec);
        if (!got) {
            CHECK(at > 100);
            break;
        }
        CHECK(got == status || (sticky && got == XD_DEVICE_FAULT));
        CHECK_EQ(err.status, got);
        CHECK(err.text[0] && err.operation[0]);
    }
}

int main(void)
{
    static const int paths[] = {XD_DIRECT, XD_STAGED};
    for (int i = 0; i < 4; i++) {
        loop(i / 2, paths[i % 2], 0, XD_DRIVER);
        loop(i / 2, paths[i % 2], 0, XD_NO_PINNED_MEMORY);
        loop(i / 2, paths[i % 2], 1, XD_DEVICE_FAULT);
        loop(i / 2, paths[i % 2], 1, XD_DRIVER);
    }
    return 0;
}
