/* The HIP driver: not written yet. */
#include "driver.h"

const xd_symbol_request *xd_hip_symbols(void)
{
    static const xd_symbol_request none[] = {{NULL, 0, 0}};
    return none;
}

int xd_hip_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err)
{
    (void)out, (void)symbols, (void)count;
    return xd_fail(err, XD_UNSUPPORTED, 0, "driver_create", "the HIP driver is not written yet");
}
