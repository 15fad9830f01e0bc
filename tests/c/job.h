/* The whole of the C API in one job, for tests that make it fail at every point. */
#ifndef JOB_H
#define JOB_H

#include "driver.h"

/* Opens everything over the driver, which it takes over, copies there and back through `path`, and closes everything
   whatever happened. Wrong bytes, and objects that outlive it, end the test. */
int job_run(xd_driver *driver, int path, xd_error *err);

#endif
