/*
 * Host functions as kernels on the drivers of real devices: run once or dropped once, whatever the vendor does; a missing
 * entry point is named. The vendor here is a table of functions that do nothing and succeed, but for a few.
 */
#include "check.h"
#include "cuda_api.h"
#include "driver.h"
#include "hip_api.h"

static xd_error err;

/* What the vendor was last given, and what it answers. */
static void (*queued)(void *arg);
static void *queued_arg;
static int answer;
static int synchronized;

static int vendor_count(int *count)
{
    *count = 2;
    return 0;
}

static int vendor_launch(void *stream, void (*function)(void *), void *arg)
{
    (void)stream;
    queued = answer ? NULL : function;
    queued_arg = arg;
    return answer;
}

static int vendor_synchronize(void)
{
    synchronized++;
    if (queued)
        queued(queued_arg);
    queued = NULL;
    return 0;
}

static int vendor_retain(cu_context *context, cu_device device)
{
    static char contexts[2];
    *context = (cu_context)(void *)&contexts[device];
    return 0;
}

static const char *vendor_text(hip_result code)
{
    return code ? "text" : "none";
}

#define CUDA_STUB(name, version, optional, parameters) \
    static cu_result stub_##name parameters            \
    {                                                  \
        return CU_SUCCESS;                             \
    }
CUDA_ENTRY_POINTS(CUDA_STUB)
#define HIP_STUB(result, name, optional, parameters) \
    static result stub_##name parameters             \
    {                                                \
        return 0;                                    \
    }
HIP_ENTRY_POINTS(HIP_STUB)

static void *address_of(void (*function)(void))
{
    void *address;
    memcpy(&address, &function, sizeof address);
    return address;
}

#define ANY(function) address_of((void (*)(void))(function))

enum { ROOM = 64 };

static size_t fill(xd_symbol *symbols, int is_hip)
{
    static const struct {
        const char *name;
        void (*function)(void);
    } special[] = {
        {"cuDeviceGetCount", (void (*)(void))vendor_count},     {"hipGetDeviceCount", (void (*)(void))vendor_count},
        {"cuDevicePrimaryCtxRetain", (void (*)(void))vendor_retain},
        {"cuLaunchHostFunc", (void (*)(void))vendor_launch},    {"hipLaunchHostFunc", (void (*)(void))vendor_launch},
        {"cuCtxSynchronize", (void (*)(void))vendor_synchronize}, {"hipDeviceSynchronize", (void (*)(void))vendor_synchronize},
        {"hipGetErrorName", (void (*)(void))vendor_text},       {"hipGetErrorString", (void (*)(void))vendor_text},
    };
    size_t count = 0;
#define CUDA_SYMBOL(name, version, optional, parameters) symbols[count++] = (xd_symbol){#name, ANY(stub_##name)};
#define HIP_SYMBOL(result, name, optional, parameters) symbols[count++] = (xd_symbol){#name, ANY(stub_##name)};
    if (is_hip) {
        HIP_ENTRY_POINTS(HIP_SYMBOL)
    } else {
        CUDA_ENTRY_POINTS(CUDA_SYMBOL)
    }
    CHECK(count <= ROOM);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < sizeof special / sizeof special[0]; k++)
            if (!strcmp(symbols[i].name, special[k].name))
                symbols[i].address = address_of(special[k].function);
    return count;
}

static int create(xd_driver **out, int is_hip, const xd_symbol *symbols, size_t count)
{
    return is_hip ? xd_hip_create(out, symbols, count, &err) : xd_cuda_create(out, symbols, count, &err);
}

static xd_driver *begin(int is_hip)
{
    xd_symbol symbols[ROOM];
    xd_driver *driver = NULL;
    int devices = 0;
    OK(create(&driver, is_hip, symbols, fill(symbols, is_hip)));
    OK(driver->device_count(driver, &devices, &err));
    CHECK_EQ(devices, 2);
    queued = NULL;
    answer = synchronized = 0;
    return driver;
}

typedef struct counts {
    int run, dropped, result;
} counts;

static int run(void *arg)
{
    counts *seen = arg;
    seen->run++;
    return seen->result;
}

static void drop(void *arg)
{
    counts *seen = arg;
    seen->dropped++;
}

static xd_kernel kernel_of(counts *seen)
{
    return (xd_kernel){.run = run, .drop = drop, .arg = seen};
}

static void check_counts(const counts *seen, int runs, int drops)
{
    CHECK_EQ(seen->run, runs);
    CHECK_EQ(seen->dropped, drops);
}

static void runs_once(int is_hip)
{
    xd_driver *driver = begin(is_hip);
    counts seen = {0};
    xd_kernel kernel = kernel_of(&seen);
    OK(driver->launch(driver, 0, NULL, &kernel, &err));
    check_counts(&seen, 0, 0);
    queued(queued_arg);
    queued = NULL;
    check_counts(&seen, 1, 1);
    driver->close(driver);
    CHECK_EQ(synchronized, 0);
    check_counts(&seen, 1, 1);
}

static void refused(int is_hip)
{
    xd_driver *driver = begin(is_hip);
    counts seen = {0};
    xd_kernel kernel = kernel_of(&seen);
    answer = CU_ILLEGAL_ADDRESS;
    FAILS(driver->launch(driver, 1, NULL, &kernel, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "device 1");
    check_counts(&seen, 0, 1);
    FAILS(driver->launch(driver, 2, NULL, &kernel, &err), XD_INVALID);
    check_counts(&seen, 0, 2);
    driver->close(driver);
}

/* Close lets the device finish what is queued. */
static void still_queued_at_close(int is_hip)
{
    xd_driver *driver = begin(is_hip);
    counts seen = {0};
    xd_kernel kernel = kernel_of(&seen);
    OK(driver->launch(driver, 1, NULL, &kernel, &err));
    driver->close(driver);
    CHECK(synchronized > 0);
    check_counts(&seen, 1, 1);
}

/* A device that has failed never calls them. */
static void never_called(int is_hip)
{
    xd_driver *driver = begin(is_hip);
    counts seen[3] = {{0}};
    for (int i = 0; i < 3; i++) {
        xd_kernel kernel = kernel_of(&seen[i]);
        OK(driver->launch(driver, 0, NULL, &kernel, &err));
        queued = NULL;
    }
    driver->close(driver);
    for (int i = 0; i < 3; i++)
        check_counts(&seen[i], 0, 1);
}

static void fails(int is_hip)
{
    xd_driver *driver = begin(is_hip);
    counts bad = {.result = 1}, after = {0}, other = {0};
    xd_kernel first = kernel_of(&bad), second = kernel_of(&after), third = kernel_of(&other);
    OK(driver->launch(driver, 0, NULL, &first, &err));
    void (*first_call)(void *) = queued;
    void *first_arg = queued_arg;
    OK(driver->launch(driver, 0, NULL, &second, &err));
    first_call(first_arg);
    queued(queued_arg);
    queued = NULL;
    check_counts(&bad, 1, 1);
    check_counts(&after, 0, 1);
    FAILS(driver->fill(driver, 0, NULL, 64, 0, 8, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "device 0");
    OK(driver->device_free(driver, 0, 64, &err));
    OK(driver->fill(driver, 1, NULL, 64, 0, 8, &err));
    OK(driver->launch(driver, 1, NULL, &third, &err));
    driver->close(driver);
    check_counts(&other, 1, 1);
}

static void missing_entry_point(int is_hip)
{
    xd_symbol symbols[ROOM];
    xd_driver *driver = NULL;
    const xd_symbol_request *requests = is_hip ? xd_hip_symbols() : xd_cuda_symbols();
    size_t count = fill(symbols, is_hip);
    for (size_t i = 0; i < count; i++) {
        CHECK_TEXT(requests[i].name, symbols[i].name);
        void *there = symbols[i].address;
        symbols[i].address = NULL;
        if (requests[i].optional) {
            OK(create(&driver, is_hip, symbols, count));
            driver->close(driver);
        } else {
            FAILS(create(&driver, is_hip, symbols, count), XD_UNSUPPORTED);
            CHECK_HAS(err.text, symbols[i].name);
        }
        symbols[i].address = there;
    }
    CHECK(requests[count].name == NULL);
}

int main(void)
{
    for (int is_hip = 0; is_hip <= 1; is_hip++) {
        runs_once(is_hip);
        refused(is_hip);
        still_queued_at_close(is_hip);
        never_called(is_hip);
        fails(is_hip);
        missing_entry_point(is_hip);
    }
    return 0;
}
