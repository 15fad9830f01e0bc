/* The whole API in one job, on simulated devices of several seeds. */
#include "check.h"
#include "job.h"
#include "machine.h"

int main(void)
{
    xd_error err;
    static const int paths[] = {XD_STAGED, XD_DIRECT};
    for (int i = 0; i < 2; i++)
        for (uint64_t seed = 1; seed < 9; seed++)
            OK(job_run(machine_jumbled(2, seed), paths[i], &err));
    return 0;
}
