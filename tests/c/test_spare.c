/* A runtime keeps the last page-locked block of a ring's size, and gives it up when memory is short or it closes. */
#include "check.h"
#include "machine.h"
#include "recorder.h"

#define MIB (UINT64_C(1) << 20)

static xd_error err;
static recorder rec;
static xd_runtime *runtime;

static uint64_t open_and_close(uint64_t bytes)
{
    xd_buffer *buffer;
    OK(xd_buffer_open(&buffer, runtime, XD_HOST, bytes, &err));
    uint64_t address = xd_buffer_address(buffer);
    xd_buffer_close(&buffer);
    CHECK_NOTHING_LIVES(runtime);
    return address;
}

static void given_up_when_short(void)
{
    machine *m = machine_make(1);
    runtime = machine_runtime(m);
    open_and_close(64 * MIB);
    open_and_close(224 * MIB);
    xd_buffer *buffer = NULL;
    FAILS(xd_buffer_open(&buffer, runtime, XD_HOST, 257 * MIB, &err), XD_NO_PINNED_MEMORY);
    OK(xd_runtime_close(&runtime, &err));
    free(m);
}

int main(void)
{
    recorder_open(&rec, 1);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    open_and_close(8 * MIB - 1);
    CHECK_EQ(rec.live, 0);
    open_and_close(64 * MIB + 1);
    CHECK_EQ(rec.live, 0);
    uint64_t first = open_and_close(16 * MIB);
    CHECK_EQ(rec.live, 1);
    CHECK_EQ(open_and_close(16 * MIB), first);
    CHECK_EQ(rec.live, 1);
    open_and_close(32 * MIB); /* one block is kept, no more */
    CHECK_EQ(rec.live, 1);

    xd_buffer *two[2];
    for (int i = 0; i < 2; i++)
        OK(xd_buffer_open(&two[i], runtime, XD_HOST, 32 * MIB, &err));
    CHECK(xd_buffer_address(two[0]) != xd_buffer_address(two[1]));
    for (int i = 0; i < 2; i++)
        xd_buffer_close(&two[i]);
    CHECK_EQ(rec.live, 1);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
    given_up_when_short();
    return 0;
}
