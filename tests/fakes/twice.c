/*
 * NVIDIA's driver library with every GPU in it twice, for tests of several devices on a machine with one GPU.
 *
 * Device i + n stands for the GPU of device i, of n: a context of its own, so its streams, events and modules are as
 * foreign to those of device i as another GPU's, and a missing wait is as wrong. What runs there is the real driver and
 * the real GPU. It says nothing about the bus between two GPUs, nor about time: contexts of one GPU take turns.
 *
 *   PYXDEV_TWICE        path of the real library (required)
 *   PYXDEV_TWICE_PEERS  0: the two devices of one GPU have no peer access to each other (1)
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"

#define EXPORT __attribute__((visibility("default")))

enum { MAX_GPUS = 16, NOT_FOUND = 500, LEGACY_STREAM = 1, FIRST = 0, SECOND = 1 };

typedef cu_result (*get_proc_address)(const char *name, void **function, int version, uint64_t flags, int *status);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *library;
static get_proc_address real_get;
static cu_context seconds[MAX_GPUS]; /* made at the first retain, kept */

static void load(void)
{
    const char *path = getenv("PYXDEV_TWICE");

    library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    void *symbol = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    memcpy(&real_get, &symbol, sizeof symbol);
}

/* The real function, as `real`. */
#define REAL(parameters, name, version) \
    cu_result(*real) parameters = NULL; \
    void *symbol = NULL; \
    if (real_get(name, &symbol, version, LEGACY_STREAM, NULL) != CU_SUCCESS || !symbol) \
        return NOT_FOUND; \
    memcpy(&real, &symbol, sizeof real)

static cu_result count_gpus(int *count)
{
    REAL((int *), "cuDeviceGetCount", 2000);
    return real(count);
}

static int gpus(void)
{
    int count = 0;
    return count_gpus(&count) == CU_SUCCESS ? count : 0;
}

static int peers(void)
{
    const char *text = getenv("PYXDEV_TWICE_PEERS");
    return !text || strcmp(text, "0") != 0;
}

static cu_device gpu_of(cu_device device)
{
    int count = gpus();
    return count && device >= count ? device - count : device;
}

static int which(cu_device device)
{
    return device >= gpus() ? SECOND : FIRST;
}

/* ---- devices ---- */

static cu_result device_get_count(int *count)
{
    cu_result result = count_gpus(count);
    if (result == CU_SUCCESS)
        *count *= 2;
    return result;
}

static cu_result device_get(cu_device *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= 2 * gpus())
        return CU_INVALID_DEVICE;
    *device = ordinal;
    return CU_SUCCESS;
}

static cu_result device_get_uuid(cu_uuid *uuid, cu_device device)
{
    REAL((cu_uuid *, cu_device), "cuDeviceGetUuid", 11040);
    cu_result result = real(uuid, gpu_of(device));
    if (result == CU_SUCCESS && which(device) == SECOND)
        uuid->bytes[15] = (char)(uuid->bytes[15] ^ 1);
    return result;
}

static cu_result device_can_access_peer(int *can, cu_device device, cu_device peer)
{
    REAL((int *, cu_device, cu_device), "cuDeviceCanAccessPeer", 4000);
    if (gpu_of(device) != gpu_of(peer) || device == peer)
        return real(can, gpu_of(device), gpu_of(peer));
    *can = peers();
    return CU_SUCCESS;
}

/* int f(out, device) and int f(text, size, device): the same with the GPU's own handle */
#define FORWARD(name, exported, version, parameters, ...) \
    static cu_result name parameters \
    { \
        REAL(parameters, exported, version); \
        return real(__VA_ARGS__); \
    }

FORWARD(device_get_name, "cuDeviceGetName", 2000, (char *text, int size, cu_device device), text, size, gpu_of(device))
FORWARD(device_get_bus_id, "cuDeviceGetPCIBusId", 4010, (char *text, int size, cu_device device), text, size,
        gpu_of(device))
FORWARD(device_total_mem, "cuDeviceTotalMem", 3020, (size_t *bytes, cu_device device), bytes, gpu_of(device))
FORWARD(device_get_attribute, "cuDeviceGetAttribute", 2000, (int *value, int attribute, cu_device device), value,
        attribute, gpu_of(device))
FORWARD(device_default_pool, "cuDeviceGetDefaultMemPool", 11020, (void **pool, cu_device device), pool, gpu_of(device))
FORWARD(device_get_pool, "cuDeviceGetMemPool", 11020, (void **pool, cu_device device), pool, gpu_of(device))

/* ---- contexts ---- */

static cu_result context_get_current(cu_context *context)
{
    REAL((cu_context *), "cuCtxGetCurrent", 4000);
    return real(context);
}

static cu_result pop(cu_context *context)
{
    REAL((cu_context *), "cuCtxPopCurrent", 4000);
    return real(context);
}

static cu_result make(cu_context *context, cu_device gpu)
{
    cu_context same = NULL;
    REAL((cu_context *, unsigned, cu_device), "cuCtxCreate", 3020);
    cu_result result = real(context, 0, gpu);
    return result == CU_SUCCESS ? pop(&same) : result;
}

static cu_result retain(cu_context *context, cu_device device)
{
    REAL((cu_context *, cu_device), "cuDevicePrimaryCtxRetain", 7000);
    if (which(device) == FIRST)
        return real(context, device);

    if (gpu_of(device) >= MAX_GPUS)
        return CU_INVALID_DEVICE;
    cu_result result = CU_SUCCESS;
    cu_context *second = &seconds[gpu_of(device)];
    pthread_mutex_lock(&lock);
    if (!*second)
        result = make(second, gpu_of(device));
    *context = *second;
    pthread_mutex_unlock(&lock);
    return result;
}

static cu_result release(cu_device device)
{
    REAL((cu_device), "cuDevicePrimaryCtxRelease", 11000);
    return which(device) == FIRST ? real(device) : CU_SUCCESS;
}

static cu_result get_state(cu_device device, unsigned *flags, int *active)
{
    REAL((cu_device, unsigned *, int *), "cuDevicePrimaryCtxGetState", 7000);
    cu_result result = real(gpu_of(device), flags, active);
    if (result == CU_SUCCESS && which(device) == SECOND) {
        pthread_mutex_lock(&lock);
        *active = seconds[gpu_of(device)] != NULL;
        pthread_mutex_unlock(&lock);
    }
    return result;
}

static cu_result context_get_device(cu_device *device)
{
    REAL((cu_device *), "cuCtxGetDevice", 2000);
    cu_context current = NULL;
    cu_result result = real(device);
    if (result == CU_SUCCESS)
        result = context_get_current(&current);
    pthread_mutex_lock(&lock);
    if (result == CU_SUCCESS && current && current == seconds[*device])
        *device += gpus();
    pthread_mutex_unlock(&lock);
    return result;
}

/* Contexts of one GPU see each other's memory as it is. */
static cu_result enable_peer(cu_context peer, unsigned flags)
{
    static char enabled[MAX_GPUS][2];
    REAL((cu_context, unsigned), "cuCtxEnablePeerAccess", 4000);
    cu_context current = NULL;
    cu_device device = 0;
    cu_result result = context_get_device(&device);
    if (result == CU_SUCCESS)
        result = context_get_current(&current);
    if (result != CU_SUCCESS)
        return result;

    cu_device gpu = gpu_of(device);
    cu_context first = NULL;
    result = retain(&first, gpu);
    if (result != CU_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    int twins = peer != current && (peer == first || peer == seconds[gpu]);
    char *known = &enabled[gpu][which(device)];
    if (twins && !peers())
        result = CU_PEER_ACCESS_UNSUPPORTED;
    else if (twins && *known)
        result = CU_PEER_ACCESS_ALREADY_ENABLED;
    else if (twins)
        *known = 1;
    pthread_mutex_unlock(&lock);
    release(gpu);
    return twins ? result : real(peer, flags);
}

/* ---- which of them are ours ---- */

static const struct {
    const char *name;
    void (*function)(void);
} ours[] = {
    {"cuDeviceGetCount", (void (*)(void))device_get_count},
    {"cuDeviceGet", (void (*)(void))device_get},
    {"cuDeviceGetUuid", (void (*)(void))device_get_uuid},
    {"cuDeviceGetName", (void (*)(void))device_get_name},
    {"cuDeviceGetPCIBusId", (void (*)(void))device_get_bus_id},
    {"cuDeviceTotalMem", (void (*)(void))device_total_mem},
    {"cuDeviceGetAttribute", (void (*)(void))device_get_attribute},
    {"cuDeviceGetDefaultMemPool", (void (*)(void))device_default_pool},
    {"cuDeviceGetMemPool", (void (*)(void))device_get_pool},
    {"cuDeviceCanAccessPeer", (void (*)(void))device_can_access_peer},
    {"cuDevicePrimaryCtxGetState", (void (*)(void))get_state},
    {"cuDevicePrimaryCtxRetain", (void (*)(void))retain},
    {"cuDevicePrimaryCtxRelease", (void (*)(void))release},
    {"cuCtxGetDevice", (void (*)(void))context_get_device},
    {"cuCtxEnablePeerAccess", (void (*)(void))enable_peer},
};

EXPORT cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

EXPORT cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    pthread_once(&once, load);
    if (!real_get)
        return CU_STUB_LIBRARY;
    cu_result result = real_get(name, function, version, flags, status);
    if (result != CU_SUCCESS || !*function)
        return result;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (!strcmp(name, ours[i].name))
            memcpy(function, &ours[i].function, sizeof *function);
    if (!strcmp(name, "cuGetProcAddress") && version >= 12000) {
        void (*self)(void) = (void (*)(void))cuGetProcAddress_v2;
        memcpy(function, &self, sizeof *function);
    }
    return result;
}
