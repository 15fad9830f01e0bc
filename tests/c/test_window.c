/* On simulated devices: when a place is given, all but limit - 1 of the microbatches before it have left. */
#include "check.h"
#include "machine.h"

enum { LIMIT = 3, MICROBATCHES = 20 };

static int leave(void *arg)
{
    ++*(int *)arg;
    return 0;
}

int main(void)
{
    for (uint64_t seed = 1; seed < 5; seed++) {
        xd_error err;
        xd_runtime *runtime;
        xd_stream *stream;
        xd_throttle *throttle;
        int left = 0, admitted = 0;
        OK(xd_runtime_open(&runtime, machine_jumbled(1, seed), NULL, &err));
        OK(xd_stream_open(&stream, runtime, 0, &err));
        OK(xd_throttle_open(&throttle, runtime, LIMIT, &err));
        for (int i = 0; i < MICROBATCHES; i++) {
            OK(xd_throttle_admit(throttle, XD_FOREVER, &admitted, &err));
            CHECK_EQ(admitted, 1);
            CHECK(left >= i - LIMIT + 1);
            OK(xd_stream_launch(stream, &(xd_kernel){.run = leave, .arg = &left, .cost = 50000}, &err));
            OK(xd_throttle_retire(throttle, stream, &err));
        }
        CHECK(xd_throttle_blocked(throttle) > (MICROBATCHES - LIMIT - 1) * UINT64_C(50000));
        OK(xd_throttle_admit(throttle, 1000, &admitted, &err)); /* times out in simulated time */
        CHECK_EQ(admitted, 0);
        unsigned in_flight;
        OK(xd_throttle_in_flight(throttle, &in_flight, &err));
        CHECK_EQ(in_flight, LIMIT);
        for (int i = 0; i < LIMIT; i++)
            OK(xd_throttle_admit(throttle, XD_FOREVER, &admitted, &err));
        CHECK_EQ(left, MICROBATCHES);
        xd_throttle_close(&throttle);
        xd_stream_close(&stream);
        OK(xd_runtime_close(&runtime, &err));
    }
    return 0;
}
