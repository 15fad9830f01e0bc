/*
 * A stand-in for AMD's HIP library, for tests: libamdhip64.so over CUDA devices, or over the simulated ones of the
 * stand-in libcuda.so.1. It exercises hip-python, our resolver and the HIP driver with HIP's own names, numbers and
 * signatures. It says nothing about the timing, ordering or coherence of AMD devices.
 *
 * It keeps HIP's rules where they differ from CUDA's: devices by ordinal with a current one per thread, a last error
 * per thread that stays until it is read, attribute numbers, flags. It is as strict as the strictest ROCm: the device of a
 * stream or event must be current. A peer copy between devices without peer access is refused, because the real library
 * would stage it behind our back.
 *
 *   PYXDEV_FAKE_HIP_VERSION   what hipRuntimeGetVersion answers (71500000)
 *   PYXDEV_FAKE_HIP_FAIL      "hipMalloc=2": this entry point fails with this code and does nothing
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"
#include "hip_api.h"

#define EXPORT __attribute__((visibility("default")))

enum { MAX_DEVICES = 64, HIP_NOT_INITIALIZED = 3, HIP_UNKNOWN = 999 };

typedef struct cu_module_s *cu_module;
typedef struct cu_function_s *cu_function;

/* What is used beyond the driver's own entry points; may be missing. */
#define MORE_ENTRY_POINTS(X)                                                                                     \
    X(cuStreamSynchronize, 2000, 1, (cu_stream))                                                                 \
    X(cuEventSynchronize, 2000, 1, (cu_event))                                                                   \
    X(cuModuleLoadData, 2000, 1, (cu_module *, const void *))                                                    \
    X(cuModuleUnload, 2000, 1, (cu_module))                                                                      \
    X(cuModuleGetFunction, 2000, 1, (cu_function *, cu_module, const char *))                                    \
    X(cuLaunchKernel, 4000, 1,                                                                                   \
      (cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_stream, void **, void **))

#define MEMBER(name, version, optional, parameters) cu_result(*name) parameters;
typedef struct entry_points {
    CUDA_ENTRY_POINTS(MEMBER)
    MORE_ENTRY_POINTS(MEMBER)
} entry_points;

typedef struct owned { /* device memory, a stream or an event, and whose it is */
    struct owned *next;
    uint64_t address, bytes;
    int device;
    int gone; /* an event's stream is */
    uint64_t stream; /* that an event was last recorded on */
} owned;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry_points cu;
static hip_result loaded = HIP_NO_DEVICE; /* what loading CUDA came to */
static int device_count;
static cu_context contexts[MAX_DEVICES];
static char enabled[MAX_DEVICES][MAX_DEVICES];
static owned *all;
static _Thread_local int current;
static _Thread_local hip_result last_error;

/* ---- CUDA ---- */

static void load(void)
{
    typedef cu_result (*get_address)(const char *, void **, int, uint64_t, int *);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    get_address get;
    int found;
    memcpy(&get, &symbol, sizeof get);
    if (!get)
        return;
#define LOAD(name, version, optional, parameters)                                                            \
    if ((get(#name, (void **)(void *)&cu.name, version, 1, &found) != CU_SUCCESS || !cu.name) && !(optional)) \
        return;
    CUDA_ENTRY_POINTS(LOAD)
    MORE_ENTRY_POINTS(LOAD)
#undef LOAD
    if (cu.cuInit(0) == CU_SUCCESS && cu.cuDeviceGetCount(&device_count) == CU_SUCCESS && device_count > 0 &&
        device_count <= MAX_DEVICES)
        loaded = HIP_SUCCESS;
}

static hip_result result_of(cu_result code)
{
    switch (code) {
    case 711: /* too many peers */
        return HIP_UNKNOWN;
    case 912:
        return 1054;
    case 917:
        return 916;
    default:
        return code;
    }
}

/* ---- the rules of every call ---- */

static hip_result done(hip_result code)
{
    if (code != HIP_SUCCESS && code != HIP_NOT_READY && last_error == HIP_SUCCESS)
        last_error = code;
    return code;
}

static hip_result injected(const char *name)
{
    const char *wish = getenv("PYXDEV_FAKE_HIP_FAIL");
    size_t length = strlen(name);
    if (!wish || strncmp(wish, name, length) || wish[length] != '=')
        return HIP_SUCCESS;
    return atoi(wish + length + 1);
}

static hip_result ready(const char *name)
{
    hip_result code = injected(name);
    if (code != HIP_SUCCESS)
        return code;
    pthread_once(&once, load);
    return loaded;
}

static int known(int device)
{
    return device >= 0 && device < device_count;
}

static hip_result context_of(int device, cu_context *context)
{
    hip_result code = HIP_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!contexts[device])
        code = result_of(cu.cuDevicePrimaryCtxRetain(&contexts[device], device));
    *context = contexts[device];
    pthread_mutex_unlock(&lock);
    return code;
}

/* Begins a call that needs a device: its context becomes current. */
static hip_result enter(const char *name)
{
    cu_context context;
    hip_result code = ready(name);
    if (code == HIP_SUCCESS)
        code = context_of(current, &context);
    if (code == HIP_SUCCESS)
        code = result_of(cu.cuCtxPushCurrent(context));
    return code;
}

static hip_result leave(cu_result code)
{
    cu_context popped;
    cu.cuCtxPopCurrent(&popped);
    return done(result_of(code));
}

/* A whole entry point: what it is called, and the one call of CUDA that it comes to. */
#define FORWARD(name, parameters, call)                         \
    EXPORT hip_result name parameters;                          \
    hip_result name parameters                                  \
    {                                                           \
        hip_result code_ = enter(#name);                        \
        return code_ == HIP_SUCCESS ? leave(call) : done(code_); \
    }

/* The same without a context. */
#define PLAIN(name, parameters, call)                                     \
    EXPORT hip_result name parameters;                                    \
    hip_result name parameters                                            \
    {                                                                     \
        hip_result code_ = ready(#name);                                  \
        return done(code_ == HIP_SUCCESS ? result_of(call) : code_);      \
    }

#define OPTIONAL(function, ...) (cu.function ? cu.function(__VA_ARGS__) : CU_NOT_SUPPORTED)

/* ---- errors and versions ---- */

EXPORT const char *hipGetErrorName(hip_result code);
const char *hipGetErrorName(hip_result code)
{
    switch (code) {
    case HIP_SUCCESS:
        return "hipSuccess";
    case HIP_INVALID_VALUE:
        return "hipErrorInvalidValue";
    case HIP_OUT_OF_MEMORY:
        return "hipErrorOutOfMemory";
    case HIP_NO_DEVICE:
        return "hipErrorNoDevice";
    case HIP_INVALID_DEVICE:
        return "hipErrorInvalidDevice";
    case HIP_PEER_ACCESS_UNSUPPORTED:
        return "hipErrorPeerAccessUnsupported";
    case HIP_INVALID_HANDLE:
        return "hipErrorInvalidHandle";
    case HIP_NOT_READY:
        return "hipErrorNotReady";
    case HIP_ILLEGAL_ADDRESS:
        return "hipErrorIllegalAddress";
    case HIP_PEER_ACCESS_ALREADY_ENABLED:
        return "hipErrorPeerAccessAlreadyEnabled";
    case HIP_PEER_ACCESS_NOT_ENABLED:
        return "hipErrorPeerAccessNotEnabled";
    case HIP_LAUNCH_FAILED:
        return "hipErrorLaunchFailure";
    case HIP_NOT_SUPPORTED:
        return "hipErrorNotSupported";
    default:
        return "hipErrorUnknown";
    }
}

EXPORT const char *hipGetErrorString(hip_result code);
const char *hipGetErrorString(hip_result code)
{
    const char *text = NULL;
    pthread_once(&once, load);
    if (cu.cuGetErrorString)
        cu.cuGetErrorString(code, &text);
    return text ? text : "unknown error";
}

EXPORT hip_result hipGetLastError(void);
hip_result hipGetLastError(void)
{
    hip_result code = last_error;
    last_error = HIP_SUCCESS;
    return code;
}

EXPORT hip_result hipPeekAtLastError(void);
hip_result hipPeekAtLastError(void)
{
    return last_error;
}

static hip_result version(int *out)
{
    const char *text = getenv("PYXDEV_FAKE_HIP_VERSION");
    *out = text && *text ? atoi(text) : 71500000;
    return HIP_SUCCESS;
}

EXPORT hip_result hipRuntimeGetVersion(int *out);
hip_result hipRuntimeGetVersion(int *out)
{
    return version(out);
}

EXPORT hip_result hipDriverGetVersion(int *out);
hip_result hipDriverGetVersion(int *out)
{
    return version(out);
}

EXPORT hip_result hipInit(unsigned flags);
hip_result hipInit(unsigned flags)
{
    hip_result code = ready("hipInit");
    return done(code == HIP_SUCCESS && flags ? HIP_INVALID_VALUE : code);
}

/* ---- devices ---- */

EXPORT hip_result hipGetDeviceCount(int *count);
hip_result hipGetDeviceCount(int *count)
{
    hip_result code = ready("hipGetDeviceCount");
    *count = code == HIP_SUCCESS ? device_count : 0;
    return done(code);
}

static cu_result get_device(int *device)
{
    *device = current;
    return CU_SUCCESS;
}

static cu_result set_device(int device)
{
    if (!known(device))
        return CU_INVALID_DEVICE;
    current = device;
    return CU_SUCCESS;
}

static cu_result get_uuid(hip_uuid *uuid, int device)
{
    cu_uuid real;
    char text[17];
    cu_result code = cu.cuDeviceGetUuid(&real, device);
    if (code != CU_SUCCESS)
        return code;
    /* The last eight bytes: those of the stand-in libcuda.so.1 differ there. */
    for (int i = 0; i < 8; i++)
        snprintf(text + 2 * i, 3, "%02x", (unsigned char)real.bytes[8 + i]);
    memcpy(uuid->bytes, text, sizeof uuid->bytes);
    return CU_SUCCESS;
}

/* HIP's numbers of attributes and CUDA's. */
static const int attributes[][2] = {
    {63, 16}, {87, 10}, {23, 75}, {61, 76}, {2, 40},  {3, 19},  {16, 18}, {67, 33}, {68, 34}, {69, 50}, {85, 41},
    {8, 31},  {78, 78}, {90, 99}, {88, 115}, {5, 13}, {60, 36}, {59, 37}, {19, 38}, {56, 1},  {10013, 122},
};

static cu_result get_attribute(int *value, int attribute, int device)
{
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (attributes[i][0] == attribute)
            return cu.cuDeviceGetAttribute(value, attributes[i][1], device);
    return CU_INVALID_VALUE;
}

/* hipDeviceProp_t of HIP 6 and later: what comes at which byte. */
static cu_result get_properties(hip_properties *out, int device)
{
    enum { UUID_AT = 256, MEMORY_AT = 288, BYTES = 1472 };
    hip_uuid uuid;
    size_t memory = 0;
    int major = 0, minor = 0;
    if (!known(device))
        return CU_INVALID_DEVICE;
    memset(out, 0, BYTES);
    cu.cuDeviceGetName(out->r0600.before, 256, device);
    get_uuid(&uuid, device);
    memcpy(out->r0600.before + UUID_AT, uuid.bytes, sizeof uuid.bytes);
    cu.cuDeviceTotalMem(&memory, device);
    memcpy(out->r0600.before + MEMORY_AT, &memory, sizeof memory);
    cu.cuDeviceGetAttribute(&major, 75, device);
    cu.cuDeviceGetAttribute(&minor, 76, device);
    snprintf(out->r0600.arch, sizeof out->r0600.arch, "sm_%d%d", major, minor);
    return CU_SUCCESS;
}

PLAIN(hipGetDevice, (int *device), get_device(device))
PLAIN(hipSetDevice, (int device), set_device(device))
PLAIN(hipDeviceGet, (int *device, int ordinal), cu.cuDeviceGet(device, ordinal))
PLAIN(hipDeviceGetName, (char *name, int room, int device), cu.cuDeviceGetName(name, room, device))
PLAIN(hipDeviceGetUuid, (hip_uuid *uuid, int device), get_uuid(uuid, device))
PLAIN(hipDeviceGetPCIBusId, (char *pci, int room, int device), cu.cuDeviceGetPCIBusId(pci, room, device))
PLAIN(hipDeviceTotalMem, (size_t *bytes, int device), cu.cuDeviceTotalMem(bytes, device))
PLAIN(hipDeviceGetAttribute, (int *value, int which, int device), get_attribute(value, which, device))
PLAIN(hipGetDevicePropertiesR0600, (hip_properties *out, int device), get_properties(out, device))
PLAIN(hipDeviceCanAccessPeer, (int *can, int device, int peer), cu.cuDeviceCanAccessPeer(can, device, peer))
PLAIN(hipDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active),
      cu.cuDevicePrimaryCtxGetState(device, flags, active))
FORWARD(hipDeviceSynchronize, (void), cu.cuCtxSynchronize())

static cu_result enable_peer(int peer, unsigned flags)
{
    cu_context context;
    if (!known(peer) || peer == current)
        return CU_INVALID_DEVICE;
    if (context_of(peer, &context) != HIP_SUCCESS)
        return CU_OUT_OF_MEMORY;
    cu_result code = cu.cuCtxEnablePeerAccess(context, flags);
    if (code == CU_SUCCESS || code == CU_PEER_ACCESS_ALREADY_ENABLED)
        enabled[current][peer] = 1;
    return code;
}

FORWARD(hipDeviceEnablePeerAccess, (int peer, unsigned flags), enable_peer(peer, flags))

/* ---- memory ---- */

static void own(uint64_t address, uint64_t bytes)
{
    owned *made = malloc(sizeof *made);
    if (!made)
        abort();
    pthread_mutex_lock(&lock);
    *made = (owned){.next = all, .address = address, .bytes = bytes, .device = current};
    all = made;
    pthread_mutex_unlock(&lock);
}

static void disown(uint64_t address)
{
    owned *found = NULL;
    pthread_mutex_lock(&lock);
    for (owned **at = &all; *at; at = &(*at)->next)
        if ((*at)->address == address) {
            found = *at;
            *at = found->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free(found);
}

/* The current device for what was not made here. */
static int owner_of(const void *pointer)
{
    uint64_t address = (uintptr_t)pointer;
    int owner = current;
    pthread_mutex_lock(&lock);
    for (owned *at = all; at; at = at->next)
        if (address >= at->address && address - at->address < at->bytes)
            owner = at->device;
    pthread_mutex_unlock(&lock);
    return owner;
}

static cu_result allocate(void **out, size_t bytes)
{
    cu_address address = 0;
    cu_result code = cu.cuMemAlloc(&address, bytes);
    if (code == CU_SUCCESS)
        own(address, bytes);
    *out = (void *)(uintptr_t)address;
    return code;
}

static cu_result release(void *address)
{
    disown((uintptr_t)address);
    return cu.cuMemFree((uintptr_t)address);
}

FORWARD(hipMemGetInfo, (size_t *available, size_t *total), cu.cuMemGetInfo(available, total))
FORWARD(hipMalloc, (void **out, size_t bytes), allocate(out, bytes))
FORWARD(hipFree, (void *address), release(address))
FORWARD(hipHostMalloc, (void **out, size_t bytes, unsigned flags), cu.cuMemHostAlloc(out, bytes, flags & 7))
FORWARD(hipHostFree, (void *address), cu.cuMemFreeHost(address))

/* ---- streams and events ---- */

static cu_result create_stream(hip_stream *stream, unsigned flags, int priority)
{
    cu_result code = cu.cuStreamCreateWithPriority((cu_stream *)stream, flags, priority);
    if (code == CU_SUCCESS)
        own((uintptr_t)*stream, 1);
    return code;
}

static cu_result destroy_stream(hip_stream stream)
{
    disown((uintptr_t)stream);
    pthread_mutex_lock(&lock);
    for (owned *at = all; at; at = at->next)
        at->gone |= at->stream == (uintptr_t)stream;
    pthread_mutex_unlock(&lock);
    return cu.cuStreamDestroy((cu_stream)stream);
}

static cu_result create_event(hip_event *event, unsigned flags)
{
    cu_result code = cu.cuEventCreate((cu_event *)event, flags);
    if (code == CU_SUCCESS)
        own((uintptr_t)*event, 1);
    return code;
}

static cu_result destroy_event(hip_event event)
{
    disown((uintptr_t)event);
    return cu.cuEventDestroy((cu_event)event);
}

static cu_result record(hip_event event, hip_stream stream)
{
    cu_result code = cu.cuEventRecord((cu_event)event, (cu_stream)stream);
    pthread_mutex_lock(&lock);
    for (owned *at = all; at && code == CU_SUCCESS; at = at->next)
        if (at->address == (uintptr_t)event) {
            at->stream = (uintptr_t)stream;
            at->gone = 0;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

/* An event whose stream has been destroyed is taken for done, as AMD's runtime does. */
static cu_result wait_for(hip_stream stream, hip_event event, unsigned flags)
{
    int gone = 0;
    pthread_mutex_lock(&lock);
    for (owned *at = all; at; at = at->next)
        gone |= at->address == (uintptr_t)event && at->gone;
    pthread_mutex_unlock(&lock);
    return gone ? CU_SUCCESS : cu.cuStreamWaitEvent((cu_stream)stream, (cu_event)event, flags);
}

/* What is asked of a stream or event of another device than the current one is not done. */
#define HERE(handle, call) (owner_of(handle) == current ? (call) : CU_INVALID_HANDLE)

FORWARD(hipStreamCreateWithPriority, (hip_stream *stream, unsigned flags, int priority),
        create_stream(stream, flags, priority))
FORWARD(hipStreamDestroy, (hip_stream stream), HERE(stream, destroy_stream(stream)))
FORWARD(hipStreamQuery, (hip_stream stream), HERE(stream, cu.cuStreamQuery((cu_stream)stream)))
FORWARD(hipStreamSynchronize, (hip_stream stream), HERE(stream, OPTIONAL(cuStreamSynchronize, (cu_stream)stream)))
FORWARD(hipStreamWaitEvent, (hip_stream stream, hip_event event, unsigned flags),
        HERE(stream, wait_for(stream, event, flags)))
FORWARD(hipEventCreateWithFlags, (hip_event *event, unsigned flags), create_event(event, flags & 7))
FORWARD(hipEventDestroy, (hip_event event), HERE(event, destroy_event(event)))
FORWARD(hipEventRecord, (hip_event event, hip_stream stream),
        HERE(event, HERE(stream, record(event, stream))))
FORWARD(hipEventQuery, (hip_event event), HERE(event, cu.cuEventQuery((cu_event)event)))
FORWARD(hipEventSynchronize, (hip_event event), HERE(event, OPTIONAL(cuEventSynchronize, (cu_event)event)))
FORWARD(hipEventElapsedTime, (float *milliseconds, hip_event begin, hip_event end),
        HERE(begin, HERE(end, cu.cuEventElapsedTime(milliseconds, (cu_event)begin, (cu_event)end))))

/* ---- work ---- */

static cu_result peer_contexts(int dst, int src, cu_context *to, cu_context *from)
{
    if (!known(dst) || !known(src))
        return CU_INVALID_DEVICE;
    if (dst != src && !enabled[dst][src] && !enabled[src][dst])
        return CU_PEER_ACCESS_NOT_ENABLED;
    if (context_of(dst, to) != HIP_SUCCESS || context_of(src, from) != HIP_SUCCESS)
        return CU_OUT_OF_MEMORY;
    return CU_SUCCESS;
}

static cu_result copy_peer(void *dst, int to, const void *src, int from, size_t bytes, cu_stream stream)
{
    cu_context to_context, from_context;
    cu_result code = peer_contexts(to, from, &to_context, &from_context);
    if (code != CU_SUCCESS)
        return code;
    return cu.cuMemcpyPeerAsync((uintptr_t)dst, to_context, (uintptr_t)src, from_context, bytes, stream);
}

static cu_result copy_rows(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                           int kind, cu_stream stream)
{
    if (kind < HIP_HOST_TO_DEVICE || kind > HIP_DEVICE_TO_DEVICE)
        return CU_INVALID_VALUE;
    int to = owner_of(dst), from = owner_of(src);
    if (kind == HIP_DEVICE_TO_DEVICE && to != from) {
        cu_copy_3d_peer peer = {
            .src_type = CU_MEMORY_DEVICE, .src_device = (uintptr_t)src, .src_pitch = src_pitch,
            .dst_type = CU_MEMORY_DEVICE, .dst_device = (uintptr_t)dst, .dst_pitch = dst_pitch,
            .width = width, .height = height, .depth = 1,
        };
        cu_result code = peer_contexts(to, from, &peer.dst_context, &peer.src_context);
        return code == CU_SUCCESS ? cu.cuMemcpy3DPeerAsync(&peer, stream) : code;
    }
    cu_copy_2d copy = {
        .src_type = kind == HIP_HOST_TO_DEVICE ? CU_MEMORY_HOST : CU_MEMORY_DEVICE,
        .dst_type = kind == HIP_DEVICE_TO_HOST ? CU_MEMORY_HOST : CU_MEMORY_DEVICE,
        .src_host = src, .src_device = (uintptr_t)src, .src_pitch = src_pitch,
        .dst_host = dst, .dst_device = (uintptr_t)dst, .dst_pitch = dst_pitch,
        .width = width, .height = height,
    };
    return cu.cuMemcpy2DAsync(&copy, stream);
}

FORWARD(hipMemcpyHtoDAsync, (void *dst, const void *src, size_t bytes, hip_stream stream),
        HERE(stream, cu.cuMemcpyHtoDAsync((uintptr_t)dst, src, bytes, (cu_stream)stream)))
FORWARD(hipMemcpyDtoHAsync, (void *dst, void *src, size_t bytes, hip_stream stream),
        HERE(stream, cu.cuMemcpyDtoHAsync(dst, (uintptr_t)src, bytes, (cu_stream)stream)))
FORWARD(hipMemcpyDtoDAsync, (void *dst, void *src, size_t bytes, hip_stream stream),
        HERE(stream, cu.cuMemcpyDtoDAsync((uintptr_t)dst, (uintptr_t)src, bytes, (cu_stream)stream)))
FORWARD(hipMemcpyPeerAsync, (void *dst, int to, const void *src, int from, size_t bytes, hip_stream stream),
        HERE(stream, copy_peer(dst, to, src, from, bytes, (cu_stream)stream)))
FORWARD(hipMemcpy2DAsync,
        (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind,
         hip_stream stream),
        HERE(stream, copy_rows(dst, dst_pitch, src, src_pitch, width, height, kind, (cu_stream)stream)))
FORWARD(hipMemsetD8Async, (void *address, unsigned char byte, size_t bytes, hip_stream stream),
        HERE(stream, cu.cuMemsetD8Async((uintptr_t)address, byte, bytes, (cu_stream)stream)))
FORWARD(hipLaunchHostFunc, (hip_stream stream, hip_host_function function, void *arg),
        HERE(stream, cu.cuLaunchHostFunc((cu_stream)stream, function, arg)))

/* ---- graphs ---- */

FORWARD(hipStreamIsCapturing, (hip_stream stream, unsigned *status),
        HERE(stream, cu.cuStreamIsCapturing((cu_stream)stream, status)))
FORWARD(hipStreamBeginCapture, (hip_stream stream, int mode),
        HERE(stream, cu.cuStreamBeginCapture((cu_stream)stream, mode)))
FORWARD(hipStreamEndCapture, (hip_stream stream, hip_graph *graph),
        HERE(stream, cu.cuStreamEndCapture((cu_stream)stream, (cu_graph *)graph)))
FORWARD(hipGraphInstantiateWithFlags, (hip_graph_exec *out, hip_graph graph, unsigned long long flags),
        cu.cuGraphInstantiateWithFlags((cu_graph_exec *)out, (cu_graph)graph, flags))
FORWARD(hipGraphDestroy, (hip_graph graph), cu.cuGraphDestroy((cu_graph)graph))
FORWARD(hipGraphLaunch, (hip_graph_exec graph, hip_stream stream),
        HERE(stream, cu.cuGraphLaunch((cu_graph_exec)graph, (cu_stream)stream)))
FORWARD(hipGraphExecDestroy, (hip_graph_exec graph), cu.cuGraphExecDestroy((cu_graph_exec)graph))

/* ---- kernels ---- */

/* The list of extra arguments ends with 3 for HIP and with 0 for CUDA. */
static void **end_extra(void **extra, void *room[5])
{
    if (!extra)
        return NULL;
    for (int i = 0; i < 5; i++) {
        room[i] = extra[i];
        if (i % 2 == 0 && (uintptr_t)room[i] == 3) {
            room[i] = NULL;
            break;
        }
    }
    return room;
}

static cu_result launch(void *function, const unsigned *grid, unsigned shared, hip_stream stream, void **arguments,
                        void **extra)
{
    void *room[5];
    return OPTIONAL(cuLaunchKernel, function, grid[0], grid[1], grid[2], grid[3], grid[4], grid[5], shared,
                    (cu_stream)stream, arguments, end_extra(extra, room));
}

FORWARD(hipModuleLoadData, (void **module, const void *image), OPTIONAL(cuModuleLoadData, (cu_module *)module, image))
FORWARD(hipModuleUnload, (void *module), OPTIONAL(cuModuleUnload, module))
FORWARD(hipModuleGetFunction, (void **function, void *module, const char *name),
        OPTIONAL(cuModuleGetFunction, (cu_function *)function, module, name))
FORWARD(hipModuleLaunchKernel,
        (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
         hip_stream stream, void **arguments, void **extra),
        launch(function, (unsigned[]){gx, gy, gz, bx, by, bz}, shared, stream, arguments, extra))
