/*
 * The CUDA driver: the table of driver.h over CUDA's driver API.
 *
 * A device's primary context is retained at its first use and released at close, so that devices nobody uses get none.
 * hip.c has the same functions in the same order.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"
#include "pages.h"
#include "vendor.h"

typedef struct device {
    cu_device handle;
    _Atomic(cu_context) context; /* NULL until the first use */
    atomic_int failed;           /* a host function reported a fault */
} device;

typedef struct cuda {
    xd_driver driver;
    cuda_entry_points cu;
    pthread_mutex_t lock; /* retaining contexts, choosing host_device */
    device *devices;
    int count;
    int host_device; /* whose context page-locked memory is allocated in; XD_HOST before the first */
    xd_launches launches;
    xd_pages pages; /* page-locked */
} cuda;

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* ---- errors, and the current context ---- */

static int status_of(cu_result code)
{
    switch (code) {
    case CU_SUCCESS:
        return XD_OK;
    case CU_OUT_OF_MEMORY:
        return XD_NO_DEVICE_MEMORY;
    case CU_INVALID_VALUE:
    case CU_INVALID_HANDLE:
        return XD_INVALID;
    case CU_NOT_SUPPORTED:
        return XD_UNSUPPORTED;
    case CU_PEER_ACCESS_UNSUPPORTED:
    case CU_PEER_ACCESS_NOT_ENABLED:
        return XD_NO_PEER;
    case CU_STUB_LIBRARY:
    case CU_DEVICE_UNAVAILABLE:
    case CU_NO_DEVICE:
    case CU_INVALID_DEVICE:
    case CU_SYSTEM_NOT_READY:
    case CU_SYSTEM_DRIVER_MISMATCH:
    case CU_COMPAT_NOT_SUPPORTED_ON_DEVICE:
        return XD_NO_DEVICE;
    case CU_DEINITIALIZED:
    case CU_ECC_UNCORRECTABLE:
    case CU_NVLINK_UNCORRECTABLE:
    case CU_CONTAINED:
    case CU_ILLEGAL_ADDRESS:
    case CU_LAUNCH_TIMEOUT:
    case CU_CONTEXT_IS_DESTROYED:
    case CU_ASSERT:
    case CU_HARDWARE_STACK_ERROR:
    case CU_ILLEGAL_INSTRUCTION:
    case CU_MISALIGNED_ADDRESS:
    case CU_INVALID_ADDRESS_SPACE:
    case CU_INVALID_PC:
    case CU_LAUNCH_FAILED:
    case CU_TENSOR_MEMORY_LEAK:
    case CU_MPS_CLIENT_TERMINATED:
        return XD_DEVICE_FAULT;
    default:
        return code >= CU_STREAM_CAPTURE_UNSUPPORTED && code <= CU_STREAM_CAPTURE_WRONG_THREAD ? XD_INVALID : XD_DRIVER;
    }
}

static const char *hint_of(cu_result code)
{
    switch (code) {
    case CU_SYSTEM_NOT_READY:
        return "; on machines with NVSwitch the fabric manager service must run, in the driver's own version";
    case CU_SYSTEM_DRIVER_MISMATCH:
        return "; the kernel module and the CUDA library are of different driver versions";
    case CU_STUB_LIBRARY:
        return "; a stub libcuda.so was loaded in place of the driver's";
    default:
        return "";
    }
}

/* device XD_HOST: of no device in particular. */
static int fail(cuda *c, int status, cu_result code, const char *call, int device, const char *operation, xd_error *err)
{
    const char *name = NULL, *text = NULL;
    char where[32] = "";
    c->cu.cuGetErrorName(code, &name);
    c->cu.cuGetErrorString(code, &text);
    if (device != XD_HOST)
        snprintf(where, sizeof where, " on device %d", device);
    return xd_fail(err, status, code, operation, "%s failed%s: %s (%s, %d)%s", call, where,
                   text ? text : "no description", name ? name : "unknown error", code, hint_of(code));
}

static int check_device(cuda *c, int device, const char *operation, xd_error *err)
{
    if (device >= 0 && device < c->count)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, operation, "there is no device %d, only 0 to %d", device, c->count - 1);
}

static int context_of(cuda *c, int device, cu_context *context, const char *operation, xd_error *err)
{
    int status = check_device(c, device, operation, err);
    if (status != XD_OK)
        return status;
    struct device *d = &c->devices[device];
    cu_result code = CU_SUCCESS;
    *context = d->context;
    if (*context)
        return XD_OK;
    pthread_mutex_lock(&c->lock);
    *context = d->context;
    if (!*context)
        code = c->cu.cuDevicePrimaryCtxRetain(context, d->handle);
    if (code == CU_SUCCESS)
        d->context = *context;
    pthread_mutex_unlock(&c->lock);
    if (code == CU_SUCCESS)
        return XD_OK;
    return fail(c, status_of(code), code, "cuDevicePrimaryCtxRetain", device, operation, err);
}

/* One call into the driver, with a device current. */
typedef struct scope {
    cuda *c;
    int device;
    int pushed;
    const char *operation;
} scope;

static int make_current(scope *in, xd_driver *driver, int device, const char *operation, xd_error *err)
{
    cuda *c = (cuda *)driver;
    cu_context context, current = NULL;
    int status = context_of(c, device, &context, operation, err);
    if (status != XD_OK)
        return status;
    *in = (scope){.c = c, .device = device, .operation = operation};
    const char *call = "cuCtxGetCurrent";
    cu_result code = c->cu.cuCtxGetCurrent(&current);
    if (code == CU_SUCCESS && current != context) {
        call = "cuCtxPushCurrent";
        code = c->cu.cuCtxPushCurrent(context);
        in->pushed = code == CU_SUCCESS;
    }
    return code == CU_SUCCESS ? XD_OK : fail(c, status_of(code), code, call, device, operation, err);
}

static void restore(const scope *in)
{
    cu_context popped;
    if (in->pushed)
        in->c->cu.cuCtxPopCurrent(&popped);
}

/* A thread that has the context current already is spared the push and the pop around every call. */
static int cuda_settle(xd_driver *driver, int device, int on, xd_error *err)
{
    cuda *c = (cuda *)driver;
    cu_context context;
    int status = context_of(c, device, &context, "settle", err);
    if (status != XD_OK)
        return status;
    cu_result code = on ? c->cu.cuCtxPushCurrent(context) : c->cu.cuCtxPopCurrent(&context);
    if (code == CU_SUCCESS)
        return XD_OK;
    return fail(c, status_of(code), code, on ? "cuCtxPushCurrent" : "cuCtxPopCurrent", device, "settle", err);
}

/* make_current for everything but freeing, which still works on a failed device. */
static int enter(scope *in, xd_driver *driver, int device, const char *operation, xd_error *err)
{
    int status = make_current(in, driver, device, operation, err);
    if (status != XD_OK || !in->c->devices[device].failed)
        return status;
    restore(in);
    return xd_fail(err, XD_DEVICE_FAULT, 0, operation, "a host function failed on device %d", device);
}

/* For copies, records, waits and queries, which take the context from the stream or the event: any may be current, and
   on drivers of CUDA 13 none has to be. Only handles that stand for default streams mean those of the current one. */
static int begin(scope *in, xd_driver *driver, int device, const void *handle, const char *operation, xd_error *err)
{
    if ((uintptr_t)handle <= CU_PER_THREAD)
        return enter(in, driver, device, operation, err);
    cuda *c = (cuda *)driver;
    cu_context context;
    *in = (scope){.c = c, .device = device, .operation = operation};
    int status = context_of(c, device, &context, operation, err);
    if (status != XD_OK || !c->devices[device].failed)
        return status;
    return xd_fail(err, XD_DEVICE_FAULT, 0, operation, "a host function failed on device %d", device);
}

/* Whether to make such a call again, now with the device current: the driver has asked for some context. */
static int lacks_context(scope *in, cu_result code)
{
    if (code != CU_INVALID_CONTEXT || in->pushed)
        return 0;
    in->pushed = in->c->cu.cuCtxPushCurrent(in->c->devices[in->device].context) == CU_SUCCESS;
    return in->pushed;
}

static int leave(const scope *in, cu_result code, const char *call, xd_error *err)
{
    restore(in);
    return code == CU_SUCCESS ? XD_OK : fail(in->c, status_of(code), code, call, in->device, in->operation, err);
}

/* ---- devices ---- */

static void cuda_close(xd_driver *driver)
{
    cuda *c = (cuda *)driver;
    int pending = xd_launch_pending(&c->launches);
    for (int i = 0; i < c->count; i++) {
        scope in;
        if (!c->devices[i].context)
            continue;
        /* Host functions that are still queued use this driver's memory. */
        if (pending && make_current(&in, driver, i, "close", NULL) == XD_OK)
            leave(&in, c->cu.cuCtxSynchronize(), "cuCtxSynchronize", NULL);
        c->cu.cuDevicePrimaryCtxRelease(c->devices[i].handle);
    }
    xd_launch_drop_all(&c->launches);
    xd_pages_drop_all(&c->pages);
    pthread_mutex_destroy(&c->launches.lock);
    pthread_mutex_destroy(&c->lock);
    free(c->devices);
    free(c);
}

static int cuda_device_count(xd_driver *driver, int *count, xd_error *err)
{
    static const char operation[] = "device_count";
    cuda *c = (cuda *)driver;
    if (c->count) {
        *count = c->count;
        return XD_OK;
    }
    int found = 0;
    const char *call = "cuInit";
    cu_result code = c->cu.cuInit(0);
    if (code == CU_SUCCESS) {
        call = "cuDeviceGetCount";
        code = c->cu.cuDeviceGetCount(&found);
    }
    if (code != CU_SUCCESS)
        return fail(c, XD_NO_DEVICE, code, call, XD_HOST, operation, err);
    if (found < 1)
        return xd_fail(err, XD_NO_DEVICE, 0, operation, "CUDA has no device");
    device *devices = calloc((size_t)found, sizeof *devices);
    if (!devices)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no memory for %d devices", found);
    for (int i = 0; i < found; i++) {
        code = c->cu.cuDeviceGet(&devices[i].handle, i);
        if (code != CU_SUCCESS) {
            free(devices);
            return fail(c, status_of(code), code, "cuDeviceGet", i, operation, err);
        }
    }
    c->devices = devices;
    *count = c->count = found;
    return XD_OK;
}

/* 0 where the device does not tell. */
static int attribute(cuda *c, int device, int which)
{
    int value = 0;
    return c->cu.cuDeviceGetAttribute(&value, which, c->devices[device].handle) == CU_SUCCESS ? value : 0;
}

static void describe_uuid(xd_device_info *info, const cu_uuid *uuid)
{
    unsigned char b[16];
    memcpy(b, uuid->bytes, sizeof b);
    snprintf(info->uuid, sizeof info->uuid,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4],
             b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static int cuda_device_info(xd_driver *driver, int device, xd_device_info *out, xd_error *err)
{
    static const char operation[] = "device_info";
    cuda *c = (cuda *)driver;
    int status = check_device(c, device, operation, err);
    if (status != XD_OK)
        return status;
    xd_device_info info = {0};
    cu_device handle = c->devices[device].handle;
    cu_uuid uuid;
    size_t memory = 0;
    cu_result code = c->cu.cuDeviceGetName(info.name, sizeof info.name, handle);
    if (code != CU_SUCCESS)
        return fail(c, status_of(code), code, "cuDeviceGetName", device, operation, err);
    code = c->cu.cuDeviceTotalMem(&memory, handle);
    if (code != CU_SUCCESS)
        return fail(c, status_of(code), code, "cuDeviceTotalMem", device, operation, err);
    info.memory = memory;
    if (c->cu.cuDeviceGetUuid(&uuid, handle) == CU_SUCCESS)
        describe_uuid(&info, &uuid);
    if (c->cu.cuDeviceGetPCIBusId(info.pci, sizeof info.pci, handle) != CU_SUCCESS)
        info.pci[0] = 0;
    for (char *at = info.pci; *at; at++)
        *at = (char)tolower((unsigned char)*at);
    snprintf(info.arch, sizeof info.arch, "sm_%d%d", attribute(c, device, CU_ATTRIBUTE_MAJOR),
             attribute(c, device, CU_ATTRIBUTE_MINOR));
    info.integrated = attribute(c, device, CU_ATTRIBUTE_INTEGRATED);
    info.copy_engines = attribute(c, device, CU_ATTRIBUTE_COPY_ENGINES);
    *out = info;
    return XD_OK;
}

static int cuda_memory_info(xd_driver *driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err)
{
    scope in;
    size_t available = 0, total = 0;
    int status = enter(&in, driver, device, "memory_info", err);
    if (status == XD_OK)
        status = leave(&in, in.c->cu.cuMemGetInfo(&available, &total), "cuMemGetInfo", err);
    if (status != XD_OK)
        return status;
    *free_bytes = available;
    *total_bytes = total;
    return XD_OK;
}

static int cuda_peer_capable(xd_driver *driver, int device, int peer, int *capable, xd_error *err)
{
    static const char operation[] = "peer_capable";
    cuda *c = (cuda *)driver;
    int answer = 1; /* a device reaches its own memory */
    int status = check_device(c, device, operation, err);
    if (status == XD_OK)
        status = check_device(c, peer, operation, err);
    if (status != XD_OK)
        return status;
    if (device != peer) {
        cu_result code = c->cu.cuDeviceCanAccessPeer(&answer, c->devices[device].handle, c->devices[peer].handle);
        if (code != CU_SUCCESS)
            return fail(c, status_of(code), code, "cuDeviceCanAccessPeer", device, operation, err);
    }
    *capable = answer != 0;
    return XD_OK;
}

static int cuda_peer_enable(xd_driver *driver, int device, int peer, int *enabled, xd_error *err)
{
    static const char operation[] = "peer_enable";
    scope in;
    cu_context context;
    int capable;
    int status = cuda_peer_capable(driver, device, peer, &capable, err);
    if (status != XD_OK)
        return status;
    if (device == peer || !capable) {
        *enabled = capable;
        return XD_OK;
    }
    status = context_of((cuda *)driver, peer, &context, operation, err);
    if (status == XD_OK)
        status = enter(&in, driver, device, operation, err);
    if (status != XD_OK)
        return status;
    cu_result code = in.c->cu.cuCtxEnablePeerAccess(context, 0);
    int refused = code == CU_TOO_MANY_PEERS || code == CU_PEER_ACCESS_UNSUPPORTED;
    if (refused || code == CU_PEER_ACCESS_ALREADY_ENABLED)
        code = CU_SUCCESS;
    status = leave(&in, code, "cuCtxEnablePeerAccess", err);
    if (status == XD_OK)
        *enabled = !refused;
    return status;
}

/* ---- memory ---- */

static int cuda_device_alloc(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err)
{
    static const char operation[] = "device_alloc";
    scope in;
    cu_address block = 0;
    int status = enter(&in, driver, device, operation, err);
    if (status == XD_OK)
        status = leave(&in, in.c->cu.cuMemAlloc(&block, bytes), "cuMemAlloc", err);
    if (status == XD_NO_DEVICE_MEMORY)
        return xd_fail(err, status, CU_OUT_OF_MEMORY, operation, "device %d has no %llu bytes left", device,
                       (unsigned long long)bytes);
    if (status != XD_OK)
        return status;
    *address = block;
    return XD_OK;
}

static int cuda_device_free(xd_driver *driver, int device, uint64_t address, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "device_free", err);
    return status == XD_OK ? leave(&in, in.c->cu.cuMemFree(address), "cuMemFree", err) : status;
}

/* Page-locked memory belongs to no device but is allocated in a context: one in use already, so that no other device
   gets one; device 0's if there is none. Then always the same one. */
static int choose_host_device(cuda *c)
{
    pthread_mutex_lock(&c->lock);
    int chosen = c->host_device;
    for (int i = 0; i < c->count && chosen == XD_HOST; i++)
        if (c->devices[i].context)
            chosen = i;
    for (int i = 0; i < c->count && chosen == XD_HOST; i++) {
        unsigned flags;
        int active = 0;
        if (c->cu.cuDevicePrimaryCtxGetState(c->devices[i].handle, &flags, &active) == CU_SUCCESS && active)
            chosen = i;
    }
    if (chosen == XD_HOST)
        chosen = 0;
    c->host_device = chosen;
    pthread_mutex_unlock(&c->lock);
    return chosen;
}

/* cuMemHostAlloc takes 0.4 s a GiB, most of it for clearing pages, one after the other. Rings are page-locked faster;
   larger blocks are left to the vendor, which fails in a better way where memory is short. */
static void *register_pages(cuda *c, uint64_t bytes)
{
    enum { LEAST = 8 << 20, MOST = 64 << 20 };
    void *block = bytes < LEAST || bytes > MOST ? NULL : xd_pages_open(&c->pages, bytes);
    if (!block || c->cu.cuMemHostRegister(block, bytes, CU_REGISTER_PORTABLE) == CU_SUCCESS)
        return block;
    xd_pages_close(&c->pages, block);
    return NULL;
}

static int cuda_host_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err)
{
    static const char operation[] = "host_alloc";
    cuda *c = (cuda *)driver;
    scope in;
    int status = enter(&in, driver, choose_host_device(c), operation, err);
    if (status != XD_OK)
        return status;
    void *block = register_pages(c, bytes);
    if (block) {
        *address = block;
        return leave(&in, CU_SUCCESS, "cuMemHostRegister", err);
    }
    cu_result code = c->cu.cuMemHostAlloc(&block, bytes, CU_PORTABLE);
    if (code == CU_OUT_OF_MEMORY || code == CU_OPERATING_SYSTEM) {
        restore(&in);
        return xd_fail(err, XD_NO_PINNED_MEMORY, code, operation, "no %llu bytes of page-locked host memory",
                       (unsigned long long)bytes);
    }
    status = leave(&in, code, "cuMemHostAlloc", err);
    if (status == XD_OK)
        *address = block;
    return status;
}

/* As cuMemFreeHost does, it waits for what still uses the memory. */
static int unregister_pages(const scope *in, void *address, xd_error *err)
{
    cuda *c = in->c;
    int status = leave(in, c->cu.cuMemHostUnregister(address), "cuMemHostUnregister", err);
    if (status == XD_OK)
        xd_pages_close(&c->pages, address);
    return status;
}

static int cuda_host_free(xd_driver *driver, void *address, xd_error *err)
{
    cuda *c = (cuda *)driver;
    scope in;
    if (xd_pages_size(&c->pages, address))
        for (int i = 0; i < c->count; i++)
            if (c->devices[i].context && make_current(&in, driver, i, "host_free", NULL) == XD_OK)
                leave(&in, c->cu.cuCtxSynchronize(), "cuCtxSynchronize", NULL);
    int status = make_current(&in, driver, choose_host_device(c), "host_free", err);
    if (status != XD_OK)
        return status;
    if (xd_pages_size(&c->pages, address))
        return unregister_pages(&in, address, err);
    return leave(&in, c->cu.cuMemFreeHost(address), "cuMemFreeHost", err);
}

/* ---- streams ---- */

static int cuda_stream_create(xd_driver *driver, int device, void **stream, xd_error *err)
{
    scope in;
    cu_stream made = NULL;
    int status = enter(&in, driver, device, "stream_create", err);
    if (status == XD_OK)
        status = leave(&in, in.c->cu.cuStreamCreateWithPriority(&made, CU_NON_BLOCKING, 0),
                       "cuStreamCreateWithPriority", err);
    if (status == XD_OK)
        *stream = made;
    return status;
}

static int cuda_stream_destroy(xd_driver *driver, int device, void *stream, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "stream_destroy", err);
    return status == XD_OK ? leave(&in, in.c->cu.cuStreamDestroy(stream), "cuStreamDestroy", err) : status;
}

static int cuda_stream_query(xd_driver *driver, int device, void *stream, int *idle, xd_error *err)
{
    scope in;
    cu_result code;
    int status = begin(&in, driver, device, stream, "stream_query", err);
    if (status != XD_OK)
        return status;
    do
        code = in.c->cu.cuStreamQuery(stream);
    while (lacks_context(&in, code));
    status = leave(&in, code == CU_NOT_READY ? CU_SUCCESS : code, "cuStreamQuery", err);
    if (status == XD_OK)
        *idle = code == CU_SUCCESS;
    return status;
}

static int cuda_stream_wait(xd_driver *driver, int device, void *stream, void *event, xd_error *err)
{
    scope in;
    cu_result code;
    int status = begin(&in, driver, device, stream, "stream_wait", err);
    if (status != XD_OK)
        return status;
    do
        code = in.c->cu.cuStreamWaitEvent(stream, event, 0);
    while (lacks_context(&in, code));
    return leave(&in, code, "cuStreamWaitEvent", err);
}

/* ---- events ---- */

static int cuda_event_create(xd_driver *driver, int device, int timing, void **event, xd_error *err)
{
    scope in;
    cu_event made = NULL;
    int status = enter(&in, driver, device, "event_create", err);
    if (status == XD_OK)
        status = leave(&in, in.c->cu.cuEventCreate(&made, timing ? 0 : CU_WITHOUT_TIMING), "cuEventCreate", err);
    if (status == XD_OK)
        *event = made;
    return status;
}

static int cuda_event_destroy(xd_driver *driver, int device, void *event, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "event_destroy", err);
    return status == XD_OK ? leave(&in, in.c->cu.cuEventDestroy(event), "cuEventDestroy", err) : status;
}

static int cuda_event_record(xd_driver *driver, int device, void *event, void *stream, xd_error *err)
{
    scope in;
    cu_result code;
    int status = begin(&in, driver, device, stream, "event_record", err);
    if (status != XD_OK)
        return status;
    do
        code = in.c->cu.cuEventRecord(event, stream);
    while (lacks_context(&in, code));
    return leave(&in, code, "cuEventRecord", err);
}

static int cuda_event_query(xd_driver *driver, int device, void *event, int *done, xd_error *err)
{
    scope in;
    cu_result code;
    int status = begin(&in, driver, device, event, "event_query", err);
    if (status != XD_OK)
        return status;
    do
        code = in.c->cu.cuEventQuery(event);
    while (lacks_context(&in, code));
    status = leave(&in, code == CU_NOT_READY ? CU_SUCCESS : code, "cuEventQuery", err);
    if (status == XD_OK)
        *done = code == CU_SUCCESS;
    return status;
}

static int cuda_event_elapsed(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err)
{
    scope in;
    float milliseconds = 0;
    int status = enter(&in, driver, device, "event_elapsed", err);
    if (status == XD_OK)
        status = leave(&in, in.c->cu.cuEventElapsedTime(&milliseconds, begin, end), "cuEventElapsedTime", err);
    if (status == XD_OK)
        *seconds = (double)milliseconds * 1e-3;
    return status;
}

/* ---- work ---- */

static cu_result copy_line(cuda *c, cu_stream stream, const xd_transfer *t)
{
    if (t->dst_device == XD_HOST)
        return c->cu.cuMemcpyDtoHAsync(pointer(t->dst), t->src, t->width, stream);
    if (t->src_device == XD_HOST)
        return c->cu.cuMemcpyHtoDAsync(t->dst, pointer(t->src), t->width, stream);
    if (t->dst_device == t->src_device)
        return c->cu.cuMemcpyDtoDAsync(t->dst, t->src, t->width, stream);
    return c->cu.cuMemcpyPeerAsync(t->dst, c->devices[t->dst_device].context, t->src,
                                   c->devices[t->src_device].context, t->width, stream);
}

/* Between two devices in three dimensions: the only pitched copy that takes two contexts. */
static cu_result copy_rows(cuda *c, cu_stream stream, const xd_transfer *t)
{
    int from = t->src_device == XD_HOST ? CU_MEMORY_HOST : CU_MEMORY_DEVICE;
    int to = t->dst_device == XD_HOST ? CU_MEMORY_HOST : CU_MEMORY_DEVICE;
    if (from == to && t->src_device != t->dst_device) {
        cu_copy_3d_peer copy = {
            .src_type = from, .src_device = t->src, .src_context = c->devices[t->src_device].context,
            .dst_type = to,   .dst_device = t->dst, .dst_context = c->devices[t->dst_device].context,
            .src_pitch = t->src_pitch, .dst_pitch = t->dst_pitch,
            .width = t->width, .height = t->height, .depth = 1,
        };
        return c->cu.cuMemcpy3DPeerAsync(&copy, stream);
    }
    cu_copy_2d copy = {
        .src_type = from, .src_host = pointer(t->src), .src_device = t->src, .src_pitch = t->src_pitch,
        .dst_type = to,   .dst_host = pointer(t->dst), .dst_device = t->dst, .dst_pitch = t->dst_pitch,
        .width = t->width, .height = t->height,
    };
    return c->cu.cuMemcpy2DAsync(&copy, stream);
}

static int cuda_copy(xd_driver *driver, int device, void *stream, const xd_transfer *transfer, xd_error *err)
{
    static const char operation[] = "copy";
    cuda *c = (cuda *)driver;
    xd_transfer t = *transfer;
    cu_context context;
    scope in;
    int status = XD_OK;
    if (t.dst_device == XD_HOST && t.src_device == XD_HOST)
        return xd_fail(err, XD_INVALID, 0, operation, "one side of a copy must be on a device");
    if (t.dst_device != XD_HOST)
        status = context_of(c, t.dst_device, &context, operation, err);
    if (status == XD_OK && t.src_device != XD_HOST)
        status = context_of(c, t.src_device, &context, operation, err);
    if (status == XD_OK)
        status = t.height == 1 ? begin(&in, driver, device, stream, operation, err)
                               : enter(&in, driver, device, operation, err);
    if (status != XD_OK)
        return status;
    cu_result code = CU_SUCCESS;
    if (t.height == 1) {
        do
            code = copy_line(c, stream, &t);
        while (lacks_context(&in, code));
        return leave(&in, code, "a copy", err);
    }
    if (t.src_pitch <= CUDA_MAX_PITCH && t.dst_pitch <= CUDA_MAX_PITCH)
        return leave(&in, copy_rows(c, stream, &t), "a copy of rows", err);
    for (uint64_t row = 0; row < t.height && code == CU_SUCCESS; row++) {
        code = copy_line(c, stream, &t);
        t.dst += t.dst_pitch;
        t.src += t.src_pitch;
    }
    return leave(&in, code, "a copy of rows", err);
}

static int cuda_fill(xd_driver *driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes,
                     xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "fill", err);
    if (status != XD_OK)
        return status;
    cu_result code = in.c->cu.cuMemsetD8Async(address, (unsigned char)byte, bytes, stream);
    return leave(&in, code, "cuMemsetD8Async", err);
}

/* A host function is given to the vendor once and frees itself, so a graph could not run it again. */
static int refuse_capture(const scope *in, void *stream, xd_error *err)
{
    unsigned capturing = CU_CAPTURE_NONE;
    cu_result code = in->c->cu.cuStreamIsCapturing(stream, &capturing);
    if (code == CU_SUCCESS && capturing == CU_CAPTURE_NONE)
        return XD_OK;
    if (code != CU_SUCCESS)
        return leave(in, code, "cuStreamIsCapturing", err);
    restore(in);
    return xd_fail(err, XD_INVALID, 0, in->operation, "host functions cannot be captured");
}

static int cuda_launch(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err)
{
    cuda *c = (cuda *)driver;
    xd_launch *launch;
    scope in;
    int status = enter(&in, driver, device, "launch", err);
    if (status == XD_OK)
        status = refuse_capture(&in, stream, err);
    if (status != XD_OK) {
        if (kernel->drop)
            kernel->drop(kernel->arg);
        return status;
    }
    status = xd_launch_begin(&launch, &c->launches, kernel, &c->devices[device].failed, err);
    if (status != XD_OK) {
        restore(&in);
        return status;
    }
    cu_result code = c->cu.cuLaunchHostFunc(stream, xd_launch_run, launch);
    if (code != CU_SUCCESS)
        xd_launch_cancel(launch);
    return leave(&in, code, "cuLaunchHostFunc", err);
}

static int cuda_call(xd_driver *driver, int device, void (*run)(void *arg), void *arg, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "stream_call", err);
    if (status != XD_OK)
        return status;
    run(arg);
    restore(&in);
    return XD_OK;
}

/* ---- graphs ---- */

static int cuda_capture_begin(xd_driver *driver, int device, void *stream, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "capture_begin", err);
    if (status != XD_OK)
        return status;
    return leave(&in, in.c->cu.cuStreamBeginCapture(stream, CU_CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture", err);
}

static int cuda_capture_end(xd_driver *driver, int device, void *stream, void **out, xd_error *err)
{
    scope in;
    cu_graph graph = NULL;
    cu_graph_exec made = NULL;
    int status = make_current(&in, driver, device, "capture_end", err);
    if (status != XD_OK)
        return status;
    const char *call = "cuStreamEndCapture";
    cu_result code = in.c->cu.cuStreamEndCapture(stream, &graph);
    if (code == CU_SUCCESS) {
        call = "cuGraphInstantiateWithFlags";
        code = in.c->cu.cuGraphInstantiateWithFlags(&made, graph, 0);
    }
    if (graph)
        in.c->cu.cuGraphDestroy(graph);
    status = leave(&in, code, call, err);
    if (status == XD_OK)
        *out = made;
    return status;
}

static int cuda_graph_launch(xd_driver *driver, int device, void *graph, void *stream, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "graph_launch", err);
    return status == XD_OK ? leave(&in, in.c->cu.cuGraphLaunch(graph, stream), "cuGraphLaunch", err) : status;
}

static int cuda_graph_destroy(xd_driver *driver, int device, void *graph, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "graph_destroy", err);
    return status == XD_OK ? leave(&in, in.c->cu.cuGraphExecDestroy(graph), "cuGraphExecDestroy", err) : status;
}

/* ---- the driver ---- */

static const xd_symbol_request requests[] = {
#define CUDA_REQUEST(name, version, optional, parameters) {#name, version, optional},
    CUDA_ENTRY_POINTS(CUDA_REQUEST)
#undef CUDA_REQUEST
    {NULL, 0, 0},
};

const xd_symbol_request *xd_cuda_symbols(void)
{
    return requests;
}

int xd_cuda_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err)
{
    cuda *c = calloc(1, sizeof *c);
    if (!c)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "driver_create", "no memory for the CUDA driver");
    int status = xd_vendor_bind(&c->cu, requests, symbols, count, "CUDA", err);
    if (status != XD_OK) {
        free(c);
        return status;
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->launches.lock, NULL);
    xd_pages_init(&c->pages);
    c->host_device = XD_HOST;
    c->driver = (xd_driver){
        .name = "cuda",
        .close = cuda_close,
        .device_count = cuda_device_count,
        .device_info = cuda_device_info,
        .memory_info = cuda_memory_info,
        .peer_capable = cuda_peer_capable,
        .peer_enable = cuda_peer_enable,
        .device_alloc = cuda_device_alloc,
        .device_free = cuda_device_free,
        .host_alloc = cuda_host_alloc,
        .host_free = cuda_host_free,
        .stream_create = cuda_stream_create,
        .stream_destroy = cuda_stream_destroy,
        .stream_query = cuda_stream_query,
        .stream_wait = cuda_stream_wait,
        .event_create = cuda_event_create,
        .event_destroy = cuda_event_destroy,
        .event_record = cuda_event_record,
        .event_query = cuda_event_query,
        .event_elapsed = cuda_event_elapsed,
        .copy = cuda_copy,
        .fill = cuda_fill,
        .launch = cuda_launch,
        .call = cuda_call,
        .settle = cuda_settle,
        .capture_begin = cuda_capture_begin,
        .capture_end = cuda_capture_end,
        .graph_launch = cuda_graph_launch,
        .graph_destroy = cuda_graph_destroy,
    };
    *out = &c->driver;
    return XD_OK;
}
