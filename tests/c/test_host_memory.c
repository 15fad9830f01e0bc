/* Host memory runs out at the first, second, third ... allocation of the runtime: XD_NO_HOST_MEMORY, nothing leaked.
   Linked with calloc wrapped. */
#include "check.h"
#include "job.h"
#include "machine.h"
#include "recorder.h"

static int left = -1; /* allocations that succeed; below 0: all */

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    if (left == 0)
        return NULL;
    left -= left > 0;
    return __real_calloc(count, size);
}

/* The simulated devices allocate too: theirs fail as well. */
static void loop(int simulated)
{
    xd_error err = {0};
    for (int allowed = 0;; allowed++) {
        recorder rec;
        recorder_open(&rec, 2);
        xd_driver *driver = simulated ? machine_jumbled(2, 1) : &rec.table;
        left = allowed;
        int status = job_run(driver, XD_STAGED, &err);
        left = -1;
        if (!simulated)
            recorder_close(&rec);
        if (!status) {
            CHECK(allowed > 20);
            break;
        }
        CHECK_EQ(status, XD_NO_HOST_MEMORY);
        CHECK_HAS(err.text, "host memory");
    }
}

int main(void)
{
    xd_error err = {0};
    recorder rec;
    xd_driver *fault = NULL;
    recorder_open(&rec, 2);
    left = 0;
    FAILS(xd_fault_create(&fault, &rec.table, &err), XD_NO_HOST_MEMORY);
    CHECK(!fault);
    left = -1;
    loop(0);
    loop(1);
    return 0;
}
