/*
 * The HIP driver: the table of driver.h over the HIP API.
 *
 * HIP makes a device's state at its first use, so devices that nobody uses get none. Every failed call is followed by
 * hipGetLastError: HIP remembers errors by thread, and whoever asks next would take ours for theirs.
 * cuda.c has the same functions in the same order.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hip_api.h"
#include "vendor.h"

typedef struct device {
    atomic_int used;
    atomic_int failed; /* a host function reported a fault */
} device;

typedef struct hip {
    xd_driver driver;
    hip_entry_points hip;
    pthread_mutex_t lock; /* choosing host_device */
    device *devices;
    int count;
    int host_device; /* where page-locked memory is allocated; XD_HOST before the first */
    xd_launches launches;
} hip;

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* ---- errors, and the current device ---- */

static int status_of(hip_result code)
{
    switch (code) {
    case HIP_SUCCESS:
        return XD_OK;
    case HIP_OUT_OF_MEMORY:
        return XD_NO_DEVICE_MEMORY;
    case HIP_INVALID_VALUE:
    case HIP_INVALID_PITCH:
    case HIP_INVALID_DEVICE_POINTER:
    case HIP_INVALID_DIRECTION:
    case HIP_INVALID_HANDLE:
        return XD_INVALID;
    case HIP_NOT_SUPPORTED:
        return XD_UNSUPPORTED;
    case HIP_PEER_ACCESS_UNSUPPORTED:
    case HIP_PEER_ACCESS_NOT_ENABLED:
        return XD_NO_PEER;
    case HIP_INSUFFICIENT_DRIVER:
    case HIP_NO_DEVICE:
    case HIP_INVALID_DEVICE:
        return XD_NO_DEVICE;
    case HIP_DEINITIALIZED:
    case HIP_ECC_UNCORRECTABLE:
    case HIP_ILLEGAL_ADDRESS:
    case HIP_LAUNCH_TIMEOUT:
    case HIP_CONTEXT_IS_DESTROYED:
    case HIP_ASSERT:
    case HIP_LAUNCH_FAILED:
        return XD_DEVICE_FAULT;
    default:
        return code >= HIP_STREAM_CAPTURE_UNSUPPORTED && code <= HIP_STREAM_CAPTURE_WRONG_THREAD ? XD_INVALID : XD_DRIVER;
    }
}

static const char *hint_of(hip_result code)
{
    switch (code) {
    case HIP_INSUFFICIENT_DRIVER:
        return "; the kernel driver is older than the HIP library";
    case HIP_NO_DEVICE:
        return "; the amdgpu kernel driver must be loaded, and the user must be able to open /dev/kfd and /dev/dri";
    default:
        return "";
    }
}

static void forget(hip *h)
{
    h->hip.hipGetLastError();
}

/* For calls that may fail. */
static int fine(hip *h, hip_result code)
{
    if (code != HIP_SUCCESS)
        forget(h);
    return code == HIP_SUCCESS;
}

/* device XD_HOST: of no device in particular. */
static int fail(hip *h, int status, hip_result code, const char *call, int device, const char *operation, xd_error *err)
{
    const char *name = h->hip.hipGetErrorName(code), *text = h->hip.hipGetErrorString(code);
    char where[32] = "";
    forget(h);
    if (device != XD_HOST)
        snprintf(where, sizeof where, " on device %d", device);
    return xd_fail(err, status, code, operation, "%s failed%s: %s (%s, %d)%s", call, where,
                   text ? text : "no description", name ? name : "unknown error", code, hint_of(code));
}

static int check_device(hip *h, int device, const char *operation, xd_error *err)
{
    if (device >= 0 && device < h->count)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, operation, "there is no device %d, only 0 to %d", device, h->count - 1);
}

/* One call into the driver, with a device current. */
typedef struct scope {
    hip *h;
    int device;
    int before; /* the caller's device */
    const char *operation;
} scope;

static int make_current(scope *in, xd_driver *driver, int device, const char *operation, xd_error *err)
{
    hip *h = (hip *)driver;
    int status = check_device(h, device, operation, err);
    if (status != XD_OK)
        return status;
    *in = (scope){.h = h, .device = device, .before = device, .operation = operation};
    const char *call = "hipGetDevice";
    hip_result code = h->hip.hipGetDevice(&in->before);
    if (code == HIP_SUCCESS && in->before != device) {
        call = "hipSetDevice";
        code = h->hip.hipSetDevice(device);
    }
    if (code != HIP_SUCCESS)
        return fail(h, status_of(code), code, call, device, operation, err);
    h->devices[device].used = 1;
    return XD_OK;
}

static void restore(const scope *in)
{
    if (in->before != in->device)
        in->h->hip.hipSetDevice(in->before);
}

/* make_current for everything but freeing, which still works on a failed device. */
static int enter(scope *in, xd_driver *driver, int device, const char *operation, xd_error *err)
{
    int status = make_current(in, driver, device, operation, err);
    if (status != XD_OK || !in->h->devices[device].failed)
        return status;
    restore(in);
    return xd_fail(err, XD_DEVICE_FAULT, 0, operation, "a host function failed on device %d", device);
}

static int leave(const scope *in, hip_result code, const char *call, xd_error *err)
{
    restore(in);
    return code == HIP_SUCCESS ? XD_OK : fail(in->h, status_of(code), code, call, in->device, in->operation, err);
}

/* ---- devices ---- */

static void hip_close(xd_driver *driver)
{
    hip *h = (hip *)driver;
    int pending = xd_launch_pending(&h->launches);
    for (int i = 0; i < h->count; i++) {
        scope in;
        /* Host functions that are still queued use this driver's memory. */
        if (pending && h->devices[i].used && make_current(&in, driver, i, "close", NULL) == XD_OK)
            leave(&in, h->hip.hipDeviceSynchronize(), "hipDeviceSynchronize", NULL);
    }
    xd_launch_drop_all(&h->launches);
    pthread_mutex_destroy(&h->launches.lock);
    pthread_mutex_destroy(&h->lock);
    free(h->devices);
    free(h);
}

static int hip_device_count(xd_driver *driver, int *count, xd_error *err)
{
    static const char operation[] = "device_count";
    hip *h = (hip *)driver;
    if (h->count) {
        *count = h->count;
        return XD_OK;
    }
    int found = 0;
    hip_result code = h->hip.hipGetDeviceCount(&found);
    if (code != HIP_SUCCESS)
        return fail(h, XD_NO_DEVICE, code, "hipGetDeviceCount", XD_HOST, operation, err);
    if (found < 1)
        return xd_fail(err, XD_NO_DEVICE, 0, operation, "HIP has no device");
    device *devices = calloc((size_t)found, sizeof *devices);
    if (!devices)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no memory for %d devices", found);
    h->devices = devices;
    *count = h->count = found;
    return XD_OK;
}

/* 0 where the device does not tell. */
static int attribute(hip *h, int device, int which)
{
    int value = 0;
    return fine(h, h->hip.hipDeviceGetAttribute(&value, which, device)) ? value : 0;
}

/* Sixteen letters of the GPU's unique id, as the vendor's tools and ROCR_VISIBLE_DEVICES spell it. */
static void describe_uuid(xd_device_info *info, const hip_uuid *uuid)
{
    snprintf(info->uuid, sizeof info->uuid, "GPU-%.16s", uuid->bytes);
    for (size_t i = 0; i < sizeof uuid->bytes; i++)
        if (!isxdigit((unsigned char)uuid->bytes[i]))
            info->uuid[0] = 0;
}

/* "gfx90a:sramecc+:xnack-". The numbers alone do not tell a gfx906 from a gfx908. */
static void describe_arch(hip *h, xd_device_info *info, int device)
{
    hip_properties properties = {0};
    if (h->hip.hipGetDevicePropertiesR0600) {
        if (fine(h, h->hip.hipGetDevicePropertiesR0600(&properties, device)))
            snprintf(info->arch, sizeof info->arch, "%.*s", (int)sizeof info->arch - 1, properties.r0600.arch);
    } else if (h->hip.hipGetDeviceProperties) {
        if (fine(h, h->hip.hipGetDeviceProperties(&properties, device)))
            snprintf(info->arch, sizeof info->arch, "%.*s", (int)sizeof info->arch - 1, properties.r0000.arch);
    }
    if (!info->arch[0])
        snprintf(info->arch, sizeof info->arch, "gfx%d.%d", attribute(h, device, HIP_ATTRIBUTE_MAJOR),
                 attribute(h, device, HIP_ATTRIBUTE_MINOR));
}

static int hip_device_info(xd_driver *driver, int device, xd_device_info *out, xd_error *err)
{
    static const char operation[] = "device_info";
    hip *h = (hip *)driver;
    int status = check_device(h, device, operation, err);
    if (status != XD_OK)
        return status;
    xd_device_info info = {0};
    hip_uuid uuid;
    size_t memory = 0;
    hip_result code = h->hip.hipDeviceGetName(info.name, sizeof info.name, device);
    if (code != HIP_SUCCESS)
        return fail(h, status_of(code), code, "hipDeviceGetName", device, operation, err);
    code = h->hip.hipDeviceTotalMem(&memory, device);
    if (code != HIP_SUCCESS)
        return fail(h, status_of(code), code, "hipDeviceTotalMem", device, operation, err);
    info.memory = memory;
    if (fine(h, h->hip.hipDeviceGetUuid(&uuid, device)))
        describe_uuid(&info, &uuid);
    if (!fine(h, h->hip.hipDeviceGetPCIBusId(info.pci, sizeof info.pci, device)))
        info.pci[0] = 0;
    for (char *at = info.pci; *at; at++)
        *at = (char)tolower((unsigned char)*at);
    describe_arch(h, &info, device);
    info.integrated = attribute(h, device, HIP_ATTRIBUTE_INTEGRATED);
    info.copy_engines = attribute(h, device, HIP_ATTRIBUTE_COPY_ENGINES);
    *out = info;
    return XD_OK;
}

static int hip_memory_info(xd_driver *driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err)
{
    scope in;
    size_t available = 0, total = 0;
    int status = enter(&in, driver, device, "memory_info", err);
    if (status == XD_OK)
        status = leave(&in, in.h->hip.hipMemGetInfo(&available, &total), "hipMemGetInfo", err);
    if (status != XD_OK)
        return status;
    *free_bytes = available;
    *total_bytes = total;
    return XD_OK;
}

static int hip_peer_capable(xd_driver *driver, int device, int peer, int *capable, xd_error *err)
{
    static const char operation[] = "peer_capable";
    hip *h = (hip *)driver;
    int answer = 1; /* a device reaches its own memory */
    int status = check_device(h, device, operation, err);
    if (status == XD_OK)
        status = check_device(h, peer, operation, err);
    if (status != XD_OK)
        return status;
    if (device != peer) {
        hip_result code = h->hip.hipDeviceCanAccessPeer(&answer, device, peer);
        if (code != HIP_SUCCESS)
            return fail(h, status_of(code), code, "hipDeviceCanAccessPeer", device, operation, err);
    }
    *capable = answer != 0;
    return XD_OK;
}

static int hip_peer_enable(xd_driver *driver, int device, int peer, int *enabled, xd_error *err)
{
    static const char operation[] = "peer_enable";
    scope in;
    int capable;
    int status = hip_peer_capable(driver, device, peer, &capable, err);
    if (status != XD_OK)
        return status;
    if (device == peer || !capable) {
        *enabled = capable;
        return XD_OK;
    }
    status = enter(&in, driver, device, operation, err);
    if (status != XD_OK)
        return status;
    hip_result code = in.h->hip.hipDeviceEnablePeerAccess(peer, 0);
    int refused = code == HIP_PEER_ACCESS_UNSUPPORTED;
    if (refused || code == HIP_PEER_ACCESS_ALREADY_ENABLED) {
        forget(in.h);
        code = HIP_SUCCESS;
    }
    status = leave(&in, code, "hipDeviceEnablePeerAccess", err);
    if (status == XD_OK)
        *enabled = !refused;
    return status;
}

/* ---- memory ---- */

static int hip_device_alloc(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err)
{
    static const char operation[] = "device_alloc";
    scope in;
    void *block = NULL;
    int status = enter(&in, driver, device, operation, err);
    if (status == XD_OK)
        status = leave(&in, in.h->hip.hipMalloc(&block, bytes), "hipMalloc", err);
    if (status == XD_NO_DEVICE_MEMORY)
        return xd_fail(err, status, HIP_OUT_OF_MEMORY, operation, "device %d has no %llu bytes left", device,
                       (unsigned long long)bytes);
    if (status != XD_OK)
        return status;
    *address = (uintptr_t)block;
    return XD_OK;
}

static int hip_device_free(xd_driver *driver, int device, uint64_t address, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "device_free", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipFree(pointer(address)), "hipFree", err) : status;
}

/* Page-locked memory belongs to no device but is allocated on one: one in use already, so that no other device is made
   ready for use; device 0 if there is none. Then always the same one. */
static int choose_host_device(hip *h)
{
    pthread_mutex_lock(&h->lock);
    int chosen = h->host_device;
    for (int i = 0; i < h->count && chosen == XD_HOST; i++)
        if (h->devices[i].used)
            chosen = i;
    for (int i = 0; i < h->count && chosen == XD_HOST; i++) {
        unsigned flags;
        int active = 0;
        if (fine(h, h->hip.hipDevicePrimaryCtxGetState(i, &flags, &active)) && active)
            chosen = i;
    }
    if (chosen == XD_HOST)
        chosen = 0;
    h->host_device = chosen;
    pthread_mutex_unlock(&h->lock);
    return chosen;
}

static int hip_host_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err)
{
    static const char operation[] = "host_alloc";
    hip *h = (hip *)driver;
    scope in;
    void *block = NULL;
    int status = enter(&in, driver, choose_host_device(h), operation, err);
    if (status != XD_OK)
        return status;
    hip_result code = h->hip.hipHostMalloc(&block, bytes, HIP_PORTABLE | HIP_COHERENT);
    if (code == HIP_OUT_OF_MEMORY || code == HIP_OPERATING_SYSTEM) {
        restore(&in);
        forget(h);
        return xd_fail(err, XD_NO_PINNED_MEMORY, code, operation, "no %llu bytes of page-locked host memory",
                       (unsigned long long)bytes);
    }
    status = leave(&in, code, "hipHostMalloc", err);
    if (status == XD_OK)
        *address = block;
    return status;
}

static int hip_host_free(xd_driver *driver, void *address, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, choose_host_device((hip *)driver), "host_free", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipHostFree(address), "hipHostFree", err) : status;
}

/* ---- streams ---- */

static int hip_stream_create(xd_driver *driver, int device, void **stream, xd_error *err)
{
    scope in;
    hip_stream made = NULL;
    int status = enter(&in, driver, device, "stream_create", err);
    if (status == XD_OK)
        status = leave(&in, in.h->hip.hipStreamCreateWithPriority(&made, HIP_NON_BLOCKING, 0),
                       "hipStreamCreateWithPriority", err);
    if (status == XD_OK)
        *stream = made;
    return status;
}

/* Waits until the stream is idle: AMD's runtime takes the events of a stream that is gone for done, whatever was queued
   on it. A device that hangs is given up after some 30 s. */
static void drain(hip *h, hip_stream stream)
{
    enum { NAPS = 300000 };
    const struct timespec nap = {.tv_nsec = 100000};
    hip_result code = h->hip.hipStreamQuery(stream);
    for (int naps = 0; code == HIP_NOT_READY && naps < NAPS; naps++) {
        nanosleep(&nap, NULL);
        code = h->hip.hipStreamQuery(stream);
    }
    fine(h, code);
}

static int hip_stream_destroy(xd_driver *driver, int device, void *stream, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "stream_destroy", err);
    if (status != XD_OK)
        return status;
    drain(in.h, stream);
    return leave(&in, in.h->hip.hipStreamDestroy(stream), "hipStreamDestroy", err);
}

static int hip_stream_query(xd_driver *driver, int device, void *stream, int *idle, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "stream_query", err);
    if (status != XD_OK)
        return status;
    hip_result code = in.h->hip.hipStreamQuery(stream);
    status = leave(&in, code == HIP_NOT_READY ? HIP_SUCCESS : code, "hipStreamQuery", err);
    if (status == XD_OK)
        *idle = code == HIP_SUCCESS;
    return status;
}

static int hip_stream_wait(xd_driver *driver, int device, void *stream, void *event, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "stream_wait", err);
    if (status != XD_OK)
        return status;
    return leave(&in, in.h->hip.hipStreamWaitEvent(stream, event, 0), "hipStreamWaitEvent", err);
}

/* ---- events ---- */

static int hip_event_create(xd_driver *driver, int device, int timing, void **event, xd_error *err)
{
    scope in;
    hip_event made = NULL;
    int status = enter(&in, driver, device, "event_create", err);
    if (status == XD_OK)
        status = leave(&in, in.h->hip.hipEventCreateWithFlags(&made, timing ? 0 : HIP_WITHOUT_TIMING),
                       "hipEventCreateWithFlags", err);
    if (status == XD_OK)
        *event = made;
    return status;
}

static int hip_event_destroy(xd_driver *driver, int device, void *event, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "event_destroy", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipEventDestroy(event), "hipEventDestroy", err) : status;
}

static int hip_event_record(xd_driver *driver, int device, void *event, void *stream, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "event_record", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipEventRecord(event, stream), "hipEventRecord", err) : status;
}

static int hip_event_query(xd_driver *driver, int device, void *event, int *done, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "event_query", err);
    if (status != XD_OK)
        return status;
    hip_result code = in.h->hip.hipEventQuery(event);
    status = leave(&in, code == HIP_NOT_READY ? HIP_SUCCESS : code, "hipEventQuery", err);
    if (status == XD_OK)
        *done = code == HIP_SUCCESS;
    return status;
}

static int hip_event_elapsed(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err)
{
    scope in;
    float milliseconds = 0;
    int status = enter(&in, driver, device, "event_elapsed", err);
    if (status == XD_OK)
        status = leave(&in, in.h->hip.hipEventElapsedTime(&milliseconds, begin, end), "hipEventElapsedTime", err);
    if (status == XD_OK)
        *seconds = (double)milliseconds * 1e-3;
    return status;
}

/* ---- work ---- */

static hip_result copy_line(hip *h, hip_stream stream, const xd_transfer *t)
{
    void *dst = pointer(t->dst), *src = pointer(t->src);
    if (t->dst_device == XD_HOST)
        return h->hip.hipMemcpyDtoHAsync(dst, src, t->width, stream);
    if (t->src_device == XD_HOST)
        return h->hip.hipMemcpyHtoDAsync(dst, src, t->width, stream);
    if (t->dst_device == t->src_device)
        return h->hip.hipMemcpyDtoDAsync(dst, src, t->width, stream);
    return h->hip.hipMemcpyPeerAsync(dst, t->dst_device, src, t->src_device, t->width, stream);
}

/* Between two devices too: one address space holds the memory of all. */
static hip_result copy_rows(hip *h, hip_stream stream, const xd_transfer *t)
{
    int kind = t->dst_device == XD_HOST   ? HIP_DEVICE_TO_HOST
               : t->src_device == XD_HOST ? HIP_HOST_TO_DEVICE
                                          : HIP_DEVICE_TO_DEVICE;
    return h->hip.hipMemcpy2DAsync(pointer(t->dst), t->dst_pitch, pointer(t->src), t->src_pitch, t->width, t->height,
                                   kind, stream);
}

static int hip_copy(xd_driver *driver, int device, void *stream, const xd_transfer *transfer, xd_error *err)
{
    static const char operation[] = "copy";
    hip *h = (hip *)driver;
    xd_transfer t = *transfer;
    scope in;
    int status = XD_OK;
    if (t.dst_device == XD_HOST && t.src_device == XD_HOST)
        return xd_fail(err, XD_INVALID, 0, operation, "one side of a copy must be on a device");
    if (t.dst_device != XD_HOST)
        status = check_device(h, t.dst_device, operation, err);
    if (status == XD_OK && t.src_device != XD_HOST)
        status = check_device(h, t.src_device, operation, err);
    if (status == XD_OK)
        status = enter(&in, driver, device, operation, err);
    if (status != XD_OK)
        return status;
    if (t.height == 1)
        return leave(&in, copy_line(h, stream, &t), "a copy", err);
    if (t.src_pitch <= HIP_MAX_PITCH && t.dst_pitch <= HIP_MAX_PITCH)
        return leave(&in, copy_rows(h, stream, &t), "a copy of rows", err);
    hip_result code = HIP_SUCCESS;
    for (uint64_t row = 0; row < t.height && code == HIP_SUCCESS; row++) {
        code = copy_line(h, stream, &t);
        t.dst += t.dst_pitch;
        t.src += t.src_pitch;
    }
    return leave(&in, code, "a copy of rows", err);
}

static int hip_fill(xd_driver *driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes,
                     xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "fill", err);
    if (status != XD_OK)
        return status;
    hip_result code = in.h->hip.hipMemsetD8Async(pointer(address), (unsigned char)byte, bytes, stream);
    return leave(&in, code, "hipMemsetD8Async", err);
}

/* A host function is given to the vendor once and frees itself, so a graph could not run it again. */
static int refuse_capture(const scope *in, void *stream, xd_error *err)
{
    unsigned capturing = HIP_CAPTURE_NONE;
    hip_result code = in->h->hip.hipStreamIsCapturing(stream, &capturing);
    if (code == HIP_SUCCESS && capturing == HIP_CAPTURE_NONE)
        return XD_OK;
    if (code != HIP_SUCCESS)
        return leave(in, code, "hipStreamIsCapturing", err);
    restore(in);
    return xd_fail(err, XD_INVALID, 0, in->operation, "host functions cannot be captured");
}

static int hip_launch(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err)
{
    hip *h = (hip *)driver;
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
    status = xd_launch_begin(&launch, &h->launches, kernel, &h->devices[device].failed, err);
    if (status != XD_OK) {
        restore(&in);
        return status;
    }
    hip_result code = h->hip.hipLaunchHostFunc(stream, xd_launch_run, launch);
    if (code != HIP_SUCCESS)
        xd_launch_cancel(launch);
    return leave(&in, code, "hipLaunchHostFunc", err);
}

static int hip_call(xd_driver *driver, int device, void (*run)(void *arg), void *arg, xd_error *err)
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

static int hip_capture_begin(xd_driver *driver, int device, void *stream, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "capture_begin", err);
    if (status != XD_OK)
        return status;
    return leave(&in, in.h->hip.hipStreamBeginCapture(stream, HIP_CAPTURE_THREAD_LOCAL), "hipStreamBeginCapture", err);
}

static int hip_capture_end(xd_driver *driver, int device, void *stream, void **out, xd_error *err)
{
    scope in;
    hip_graph graph = NULL;
    hip_graph_exec made = NULL;
    int status = make_current(&in, driver, device, "capture_end", err);
    if (status != XD_OK)
        return status;
    const char *call = "hipStreamEndCapture";
    hip_result code = in.h->hip.hipStreamEndCapture(stream, &graph);
    if (code == HIP_SUCCESS) {
        call = "hipGraphInstantiateWithFlags";
        code = in.h->hip.hipGraphInstantiateWithFlags(&made, graph, 0);
    }
    if (graph)
        in.h->hip.hipGraphDestroy(graph);
    status = leave(&in, code, call, err);
    if (status == XD_OK)
        *out = made;
    return status;
}

static int hip_graph_launch(xd_driver *driver, int device, void *graph, void *stream, xd_error *err)
{
    scope in;
    int status = enter(&in, driver, device, "graph_launch", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipGraphLaunch(graph, stream), "hipGraphLaunch", err) : status;
}

static int hip_graph_destroy(xd_driver *driver, int device, void *graph, xd_error *err)
{
    scope in;
    int status = make_current(&in, driver, device, "graph_destroy", err);
    return status == XD_OK ? leave(&in, in.h->hip.hipGraphExecDestroy(graph), "hipGraphExecDestroy", err) : status;
}

/* ---- the driver ---- */

static const xd_symbol_request requests[] = {
#define HIP_REQUEST(result, name, optional, parameters) {#name, 0, optional},
    HIP_ENTRY_POINTS(HIP_REQUEST)
#undef HIP_REQUEST
    {NULL, 0, 0},
};

const xd_symbol_request *xd_hip_symbols(void)
{
    return requests;
}

int xd_hip_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err)
{
    hip *h = calloc(1, sizeof *h);
    if (!h)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "driver_create", "no memory for the HIP driver");
    int status = xd_vendor_bind(&h->hip, requests, symbols, count, "HIP", err);
    if (status != XD_OK) {
        free(h);
        return status;
    }
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->launches.lock, NULL);
    h->host_device = XD_HOST;
    h->driver = (xd_driver){
        .name = "hip",
        .close = hip_close,
        .device_count = hip_device_count,
        .device_info = hip_device_info,
        .memory_info = hip_memory_info,
        .peer_capable = hip_peer_capable,
        .peer_enable = hip_peer_enable,
        .device_alloc = hip_device_alloc,
        .device_free = hip_device_free,
        .host_alloc = hip_host_alloc,
        .host_free = hip_host_free,
        .stream_create = hip_stream_create,
        .stream_destroy = hip_stream_destroy,
        .stream_query = hip_stream_query,
        .stream_wait = hip_stream_wait,
        .event_create = hip_event_create,
        .event_destroy = hip_event_destroy,
        .event_record = hip_event_record,
        .event_query = hip_event_query,
        .event_elapsed = hip_event_elapsed,
        .copy = hip_copy,
        .fill = hip_fill,
        .launch = hip_launch,
        .call = hip_call,
        .capture_begin = hip_capture_begin,
        .capture_end = hip_capture_end,
        .graph_launch = hip_graph_launch,
        .graph_destroy = hip_graph_destroy,
    };
    *out = &h->driver;
    return XD_OK;
}
