/*
 * A stand-in for NVIDIA's driver library, for tests: libcuda.so.1 over simulated devices.
 *
 * It exports cuGetProcAddress_v2 alone and serves everything else through it, so the vendor's own Python package runs
 * over it. It is stricter than the real one: some context must be current, and that of the handle unless the
 * programming guide says that any will do (copies, records, waits, queries); a handle must be alive; an entry point is
 * served only for the versions that have the signature written here; page-locked memory must be page-locked. Device
 * memory is host memory, so that tests can look.
 *
 * Variables, read when they are first needed:
 *   PYXDEV_FAKE_CUDA_DEVICES     number of devices (2); 0: cuInit answers CUDA_ERROR_NO_DEVICE
 *   PYXDEV_FAKE_CUDA_PEERS       ordered pairs with peer access, "0>1,1>0"; "all" (the default) or "none"
 *   PYXDEV_FAKE_CUDA_PEER_LIMIT  peers one device can enable (-1: no limit)
 *   PYXDEV_FAKE_CUDA_MEMORY      bytes of each device (8 GiB)
 *   PYXDEV_FAKE_CUDA_PINNED      bytes of page-locked memory (4 GiB)
 *   PYXDEV_FAKE_CUDA_SEED        seed of the simulation (1)
 *   PYXDEV_FAKE_CUDA_VERSION     version of the driver (13000)
 *   PYXDEV_FAKE_CUDA_MISSING     an entry point that this driver does not have
 * and at every call:
 *   PYXDEV_FAKE_CUDA_FAIL        "cuMemAlloc=700": this entry point fails with this code and does nothing
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cuda_api.h"
#include "sim/sim.h"

enum { NEWEST = 13000, MAX_DEVICES = 64, MAX_DEPTH = 64, CU_LEGACY = 1 };
enum { NOT_INITIALIZED = 3, NOT_FOUND = 500 };

struct cu_context_s {
    int device;
    int references;
    void *legacy; /* its default stream, made when first asked for; like any other here, it waits for no other stream */
    char peers[MAX_DEVICES]; /* access enabled to the memory of */
};

/* A stream or an event. A destroyed stream stays until its work is done. */
typedef struct handle {
    struct handle *next;
    int is_event, timing, destroyed;
    unsigned capturing;
    cu_context context;
    void *sim;
} handle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static xd_driver *sim;
static int device_count;
static struct cu_context_s contexts[MAX_DEVICES];
static handle *handles;
static _Thread_local cu_context stack[MAX_DEPTH];
static _Thread_local int depth;

/* ---- errors ---- */

#define RESULTS(X)                                                                                     \
    X(CU_SUCCESS, "CUDA_SUCCESS", "no error")                                                          \
    X(CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument")                                \
    X(CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")                                   \
    X(NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error")                           \
    X(CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")                      \
    X(CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")                        \
    X(CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")                         \
    X(CU_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported") \
    X(CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle")                       \
    X(NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found")                                     \
    X(CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready")                                        \
    X(CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")    \
    X(CU_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "already enabled")     \
    X(CU_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is not enabled")  \
    X(CU_TOO_MANY_PEERS, "CUDA_ERROR_TOO_MANY_PEERS", "peer mapping resources exhausted")              \
    X(CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure")                      \
    X(CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported")                         \
    X(CU_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized")                \
    X(CU_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted during a capture") \
    X(CU_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture has been invalidated")

static cu_result error_name(cu_result code, const char **out)
{
#define NAME(value, name, text) \
    if (code == (value))        \
        return *out = name, CU_SUCCESS;
    RESULTS(NAME)
#undef NAME
    *out = NULL;
    return CU_INVALID_VALUE;
}

static cu_result error_string(cu_result code, const char **out)
{
#define TEXT(value, name, text) \
    if (code == (value))        \
        return *out = text, CU_SUCCESS;
    RESULTS(TEXT)
#undef TEXT
    *out = NULL;
    return CU_INVALID_VALUE;
}

static cu_result result_of(int status)
{
    switch (status) {
    case XD_OK:
        return CU_SUCCESS;
    case XD_NO_DEVICE_MEMORY:
    case XD_NO_PINNED_MEMORY:
    case XD_NO_HOST_MEMORY:
        return CU_OUT_OF_MEMORY;
    case XD_NO_PEER:
        return CU_PEER_ACCESS_NOT_ENABLED;
    case XD_DEVICE_FAULT:
        return CU_LAUNCH_FAILED;
    case XD_UNSUPPORTED:
        return CU_NOT_SUPPORTED;
    default:
        return CU_INVALID_VALUE;
    }
}

/* What PYXDEV_FAKE_CUDA_FAIL says about this entry point. */
static cu_result injected(const char *name)
{
    const char *wish = getenv("PYXDEV_FAKE_CUDA_FAIL");
    size_t length = strlen(name);
    if (!wish || strncmp(wish, name, length) || wish[length] != '=')
        return CU_SUCCESS;
    return atoi(wish + length + 1);
}

/* ---- handles and contexts ---- */

static cu_context current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

/* The first lines of every entry point that needs a context. */
#define NEED_INIT(name)                          \
    do {                                         \
        cu_result wish_ = injected(name);        \
        if (wish_)                               \
            return wish_;                        \
        if (!sim)                                \
            return NOT_INITIALIZED;              \
    } while (0)
#define NEED_CONTEXT(name)                       \
    NEED_INIT(name);                             \
    if (!current() || !current()->references)    \
    return CU_INVALID_CONTEXT

static cu_result handle_open(void **out, void *simulated, int is_event, int timing)
{
    handle *h = calloc(1, sizeof *h);
    if (!h)
        return CU_OUT_OF_MEMORY;
    *h = (handle){.is_event = is_event, .timing = timing, .context = current(), .sim = simulated};
    pthread_mutex_lock(&lock);
    h->next = handles;
    handles = h;
    pthread_mutex_unlock(&lock);
    *out = h;
    return CU_SUCCESS;
}

/* The stream that CU_LEGACY stands for: that of whatever context is current. */
static const void *legacy_stream(void)
{
    cu_context context = current();
    void *made = NULL;
    if (context && !context->legacy && sim->stream_create(sim, context->device, &made, NULL) == XD_OK)
        handle_open(&context->legacy, made, 0, 0);
    return context ? context->legacy : NULL;
}

static handle *handle_find(const void *wanted, int is_event)
{
    handle *found = NULL;
    if (!is_event && (uintptr_t)wanted == CU_LEGACY)
        wanted = legacy_stream();
    pthread_mutex_lock(&lock);
    for (handle *at = handles; at && !found; at = at->next)
        if (at == wanted && at->is_event == is_event && !at->destroyed)
            found = at;
    pthread_mutex_unlock(&lock);
    return found;
}

/* With the lock held. */
static void handle_free(handle *gone)
{
    for (handle **at = &handles; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            break;
        }
    free(gone);
}

/* A stream or event of any context. */
static cu_result handle_any(const void *wanted, int is_event, handle **out)
{
    *out = handle_find(wanted, is_event);
    return *out ? CU_SUCCESS : CU_INVALID_HANDLE;
}

/* A stream or event of the current context. */
static cu_result handle_use(const void *wanted, int is_event, handle **out)
{
    *out = handle_find(wanted, is_event);
    if (!*out)
        return CU_INVALID_HANDLE;
    return (*out)->context == current() ? CU_SUCCESS : CU_INVALID_CONTEXT;
}

static cu_result stream_settle(handle *stream)
{
    int idle = 0;
    while (!idle) {
        int status = sim->stream_query(sim, stream->context->device, stream->sim, &idle, NULL);
        if (status)
            return result_of(status);
        if (!idle)
            xd_sim_pass(sim, 1000000);
    }
    return CU_SUCCESS;
}

/* Waits for all streams of a context, or for all there are: freeing memory does that on real devices. */
static cu_result settle(cu_context only)
{
    cu_result first = CU_SUCCESS;
    pthread_mutex_lock(&lock);
    for (handle *h = handles, *next; h; h = next) {
        next = h->next;
        if (h->is_event || h->capturing || (only && h->context != only))
            continue;
        cu_result code = stream_settle(h);
        if (!first)
            first = code;
        if (h->destroyed) {
            sim->stream_destroy(sim, h->context->device, h->sim, NULL);
            handle_free(h);
        }
    }
    pthread_mutex_unlock(&lock);
    return first;
}

/* Simulated time goes on while the host polls. */
static void let_time_pass(void)
{
    enum { SPEED = 10 };
    static _Thread_local uint64_t before;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    uint64_t passed = before && now - before < 1000000 ? now - before : 1000000;
    before = now;
    xd_sim_pass(sim, passed * SPEED);
}

/* ---- devices ---- */

static long long number(const char *name, long long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

static int peer_allowed(const char *pairs, int device, int peer)
{
    char pair[16];
    if (device == peer || !strcmp(pairs, "none"))
        return 0;
    if (!strcmp(pairs, "all"))
        return 1;
    int length = snprintf(pair, sizeof pair, "%d>%d", device, peer);
    for (const char *at = strstr(pairs, pair); at; at = strstr(at + 1, pair))
        if ((at == pairs || at[-1] == ',') && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

static cu_result make_devices(void)
{
    static xd_sim_device devices[MAX_DEVICES];
    static xd_sim_peer peers[MAX_DEVICES * MAX_DEVICES];
    const char *pairs = getenv("PYXDEV_FAKE_CUDA_PEERS");
    int count = (int)number("PYXDEV_FAKE_CUDA_DEVICES", 2);
    if (count < 1 || count > MAX_DEVICES)
        return CU_NO_DEVICE;
    for (int i = 0; i < count; i++) {
        devices[i] = (xd_sim_device){
            .name = "Stand-in GPU", .arch = "sim", .memory = (uint64_t)number("PYXDEV_FAKE_CUDA_MEMORY", 8LL << 30),
            .memory_rate = 2000000000000, .up_rate = 50000000000, .down_rate = 50000000000, .latency = 5000,
        };
        for (int k = 0; k < count; k++)
            peers[i * count + k] = (xd_sim_peer){
                .capable = peer_allowed(pairs && *pairs ? pairs : "all", i, k), .route = XD_SIM_LINK,
                .rate = 300000000000, .latency = 5000,
            };
    }
    xd_sim_config config = {
        .device_count = count, .devices = devices, .peers = peers,
        .peer_limit = (int)number("PYXDEV_FAKE_CUDA_PEER_LIMIT", -1), .unpeered = XD_SIM_UNPEERED_REFUSED,
        .pinned = (uint64_t)number("PYXDEV_FAKE_CUDA_PINNED", 4LL << 30), .hop = 2000,
        .costs = {.copy = 3000, .fill = 3000, .launch = 3000, .record = 1000, .wait = 1000, .query = 500, .sync = 5000},
        .seed = (uint64_t)number("PYXDEV_FAKE_CUDA_SEED", 1),
    };
    if (xd_sim_create(&sim, &config, NULL))
        return CU_OUT_OF_MEMORY;
    for (int i = 0; i < count; i++)
        contexts[i].device = i;
    device_count = count;
    return CU_SUCCESS;
}

static cu_result init(unsigned flags)
{
    cu_result code = injected("cuInit");
    if (code || flags)
        return code ? code : CU_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!sim)
        code = make_devices();
    pthread_mutex_unlock(&lock);
    return code;
}

static int driver_version(void)
{
    return (int)number("PYXDEV_FAKE_CUDA_VERSION", NEWEST);
}

static cu_result driver_get_version(int *version)
{
    *version = driver_version();
    return CU_SUCCESS;
}

static cu_result device_get_count(int *count)
{
    NEED_INIT("cuDeviceGetCount");
    *count = device_count;
    return CU_SUCCESS;
}

static int known(cu_device device)
{
    return device >= 0 && device < device_count;
}

static cu_result device_get(cu_device *device, int ordinal)
{
    NEED_INIT("cuDeviceGet");
    if (!known(ordinal))
        return CU_INVALID_DEVICE;
    *device = ordinal;
    return CU_SUCCESS;
}

static cu_result device_get_name(char *name, int room, cu_device device)
{
    NEED_INIT("cuDeviceGetName");
    if (!known(device) || room < 1)
        return CU_INVALID_DEVICE;
    snprintf(name, (size_t)room, "Stand-in GPU");
    return CU_SUCCESS;
}

static cu_result device_get_uuid(cu_uuid *uuid, cu_device device)
{
    NEED_INIT("cuDeviceGetUuid");
    if (!known(device))
        return CU_INVALID_DEVICE;
    memset(uuid->bytes, 0xfa, sizeof uuid->bytes);
    uuid->bytes[15] = (char)device;
    return CU_SUCCESS;
}

static cu_result device_get_pci(char *pci, int room, cu_device device)
{
    NEED_INIT("cuDeviceGetPCIBusId");
    if (!known(device))
        return CU_INVALID_DEVICE;
    if (room < 13)
        return CU_INVALID_VALUE;
    snprintf(pci, (size_t)room, "0000:%02X:00.0", 0xa0 + device);
    return CU_SUCCESS;
}

static cu_result device_total_mem(size_t *bytes, cu_device device)
{
    xd_device_info info;
    NEED_INIT("cuDeviceTotalMem");
    if (!known(device))
        return CU_INVALID_DEVICE;
    int status = sim->device_info(sim, device, &info, NULL);
    *bytes = info.memory;
    return result_of(status);
}

static cu_result device_get_attribute(int *value, int attribute, cu_device device)
{
    NEED_INIT("cuDeviceGetAttribute");
    if (!known(device))
        return CU_INVALID_DEVICE;
    switch (attribute) {
    case CU_ATTRIBUTE_MAJOR:
        *value = 9;
        return CU_SUCCESS;
    case CU_ATTRIBUTE_COPY_ENGINES:
        *value = 2;
        return CU_SUCCESS;
    default:
        *value = 0;
        return CU_SUCCESS;
    }
}

static cu_result device_can_access_peer(int *can, cu_device device, cu_device peer)
{
    NEED_INIT("cuDeviceCanAccessPeer");
    if (!known(device) || !known(peer))
        return CU_INVALID_DEVICE;
    *can = 0;
    return device == peer ? CU_SUCCESS : result_of(sim->peer_capable(sim, device, peer, can, NULL));
}

/* ---- contexts ---- */

static cu_result context_state(cu_device device, unsigned *flags, int *active)
{
    NEED_INIT("cuDevicePrimaryCtxGetState");
    if (!known(device))
        return CU_INVALID_DEVICE;
    *flags = 0;
    *active = contexts[device].references > 0;
    return CU_SUCCESS;
}

static cu_result context_retain(cu_context *context, cu_device device)
{
    NEED_INIT("cuDevicePrimaryCtxRetain");
    if (!known(device))
        return CU_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    contexts[device].references++;
    pthread_mutex_unlock(&lock);
    *context = &contexts[device];
    return CU_SUCCESS;
}

static cu_result context_release(cu_device device)
{
    NEED_INIT("cuDevicePrimaryCtxRelease");
    if (!known(device))
        return CU_INVALID_DEVICE;
    settle(&contexts[device]);
    pthread_mutex_lock(&lock);
    int held = contexts[device].references > 0;
    contexts[device].references -= held;
    pthread_mutex_unlock(&lock);
    return held ? CU_SUCCESS : CU_INVALID_CONTEXT;
}

static cu_result context_get_current(cu_context *context)
{
    NEED_INIT("cuCtxGetCurrent");
    *context = current();
    return CU_SUCCESS;
}

static cu_result context_set_current(cu_context context)
{
    NEED_INIT("cuCtxSetCurrent");
    if (depth)
        depth--;
    if (context)
        stack[depth++] = context;
    return CU_SUCCESS;
}

static cu_result context_push(cu_context context)
{
    NEED_INIT("cuCtxPushCurrent");
    if (!context || !context->references || depth == MAX_DEPTH)
        return CU_INVALID_CONTEXT;
    stack[depth++] = context;
    return CU_SUCCESS;
}

static cu_result context_pop(cu_context *context)
{
    NEED_INIT("cuCtxPopCurrent");
    if (!depth)
        return CU_INVALID_CONTEXT;
    *context = stack[--depth];
    return CU_SUCCESS;
}

static cu_result context_get_device(cu_device *device)
{
    NEED_CONTEXT("cuCtxGetDevice");
    *device = current()->device;
    return CU_SUCCESS;
}

static cu_result context_synchronize(void)
{
    NEED_CONTEXT("cuCtxSynchronize");
    return settle(current());
}

static cu_result context_enable_peer(cu_context peer, unsigned flags)
{
    NEED_CONTEXT("cuCtxEnablePeerAccess");
    int device = current()->device, can = 0, enabled = 0;
    if (flags || !peer || !peer->references)
        return CU_INVALID_VALUE;
    if (peer == current())
        return CU_INVALID_DEVICE;
    if (sim->peer_capable(sim, device, peer->device, &can, NULL) || !can)
        return CU_PEER_ACCESS_UNSUPPORTED;
    if (current()->peers[peer->device])
        return CU_PEER_ACCESS_ALREADY_ENABLED;
    if (sim->peer_enable(sim, device, peer->device, &enabled, NULL) || !enabled)
        return CU_TOO_MANY_PEERS;
    current()->peers[peer->device] = 1;
    return CU_SUCCESS;
}

/* ---- memory ---- */

static cu_result mem_get_info(size_t *available, size_t *total)
{
    NEED_CONTEXT("cuMemGetInfo");
    uint64_t free_bytes = 0, total_bytes = 0;
    int status = sim->memory_info(sim, current()->device, &free_bytes, &total_bytes, NULL);
    *available = free_bytes;
    *total = total_bytes;
    return result_of(status);
}

static cu_result mem_alloc(cu_address *address, size_t bytes)
{
    NEED_CONTEXT("cuMemAlloc");
    uint64_t made = 0;
    if (!bytes)
        return CU_INVALID_VALUE;
    int status = sim->device_alloc(sim, current()->device, bytes, &made, NULL);
    *address = made;
    return result_of(status);
}

static cu_result mem_free(cu_address address)
{
    NEED_CONTEXT("cuMemFree");
    settle(NULL);
    return result_of(sim->device_free(sim, current()->device, address, NULL));
}

static cu_result mem_host_alloc(void **address, size_t bytes, unsigned flags)
{
    NEED_CONTEXT("cuMemHostAlloc");
    /* Without CU_MEMHOSTALLOC_PORTABLE the memory would be page-locked for one device only. */
    if (!bytes || flags != CU_PORTABLE)
        return CU_INVALID_VALUE;
    return result_of(sim->host_alloc(sim, bytes, address, NULL));
}

static cu_result mem_free_host(void *address)
{
    NEED_CONTEXT("cuMemFreeHost");
    settle(NULL);
    return result_of(sim->host_free(sim, address, NULL));
}

static cu_result mem_host_register(void *address, size_t bytes, unsigned flags)
{
    NEED_CONTEXT("cuMemHostRegister");
    if (!bytes || flags != CU_REGISTER_PORTABLE)
        return CU_INVALID_VALUE;
    return result_of(xd_sim_adopt(sim, address, bytes, NULL));
}

static cu_result mem_host_unregister(void *address)
{
    NEED_CONTEXT("cuMemHostUnregister");
    settle(NULL);
    return result_of(sim->host_free(sim, address, NULL));
}

/* ---- streams and events ---- */

static cu_result stream_create(cu_stream *stream, unsigned flags, int priority)
{
    NEED_CONTEXT("cuStreamCreateWithPriority");
    void *made = NULL, *out = NULL;
    (void)priority;
    /* A blocking stream would wait for the NULL stream, which these devices do not have. */
    if (flags != CU_NON_BLOCKING)
        return CU_INVALID_VALUE;
    int status = sim->stream_create(sim, current()->device, &made, NULL);
    if (status)
        return result_of(status);
    cu_result code = handle_open(&out, made, 0, 0);
    if (code)
        sim->stream_destroy(sim, current()->device, made, NULL);
    *stream = out;
    return code;
}

static cu_result stream_destroy(cu_stream stream)
{
    NEED_CONTEXT("cuStreamDestroy");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    if (code)
        return code;
    h->destroyed = 1;
    return CU_SUCCESS;
}

static cu_result stream_query(cu_stream stream)
{
    NEED_CONTEXT("cuStreamQuery");
    handle *h;
    int idle = 0;
    cu_result code = handle_any(stream, 0, &h);
    if (code)
        return code;
    let_time_pass();
    code = result_of(sim->stream_query(sim, h->context->device, h->sim, &idle, NULL));
    return code || idle ? code : CU_NOT_READY;
}

static cu_result stream_synchronize(cu_stream stream)
{
    NEED_CONTEXT("cuStreamSynchronize");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    return code ? code : stream_settle(h);
}

static cu_result stream_wait_event(cu_stream stream, cu_event event, unsigned flags)
{
    NEED_CONTEXT("cuStreamWaitEvent");
    handle *s, *e = handle_find(event, 1);
    cu_result code = handle_any(stream, 0, &s);
    if (code || !e || flags)
        return code ? code : e ? CU_INVALID_VALUE : CU_INVALID_HANDLE;
    return result_of(sim->stream_wait(sim, s->context->device, s->sim, e->sim, NULL));
}

static cu_result event_create(cu_event *event, unsigned flags)
{
    NEED_CONTEXT("cuEventCreate");
    void *made = NULL, *out = NULL;
    int timing = !(flags & CU_WITHOUT_TIMING);
    int status = sim->event_create(sim, current()->device, timing, &made, NULL);
    if (status)
        return result_of(status);
    cu_result code = handle_open(&out, made, 1, timing);
    if (code)
        sim->event_destroy(sim, current()->device, made, NULL);
    *event = out;
    return code;
}

static cu_result event_destroy(cu_event event)
{
    NEED_CONTEXT("cuEventDestroy");
    handle *h;
    cu_result code = handle_use(event, 1, &h);
    if (code)
        return code;
    pthread_mutex_lock(&lock);
    int status = sim->event_destroy(sim, h->context->device, h->sim, NULL);
    handle_free(h);
    pthread_mutex_unlock(&lock);
    return result_of(status);
}

static cu_result event_record(cu_event event, cu_stream stream)
{
    NEED_CONTEXT("cuEventRecord");
    handle *e = handle_find(event, 1), *s = handle_find(stream, 0);
    if (!e || !s || e->context != s->context)
        return CU_INVALID_HANDLE;
    return result_of(sim->event_record(sim, e->context->device, e->sim, s->sim, NULL));
}

static cu_result event_query(cu_event event)
{
    NEED_CONTEXT("cuEventQuery");
    handle *h;
    int done = 0;
    cu_result code = handle_any(event, 1, &h);
    if (code)
        return code;
    let_time_pass();
    code = result_of(sim->event_query(sim, h->context->device, h->sim, &done, NULL));
    return code || done ? code : CU_NOT_READY;
}

static cu_result event_synchronize(cu_event event)
{
    NEED_CONTEXT("cuEventSynchronize");
    cu_result code;
    do
        code = event_query(event);
    while (code == CU_NOT_READY);
    return code;
}

static cu_result event_elapsed(float *milliseconds, cu_event begin, cu_event end)
{
    NEED_CONTEXT("cuEventElapsedTime");
    handle *b, *e;
    double seconds = 0;
    cu_result code = handle_any(begin, 1, &b);
    if (!code)
        code = handle_any(end, 1, &e);
    if (code)
        return code;
    if (!b->timing || !e->timing)
        return CU_INVALID_HANDLE;
    code = result_of(sim->event_elapsed(sim, b->context->device, b->sim, e->sim, &seconds, NULL));
    *milliseconds = (float)(seconds * 1e3);
    return code;
}

/* ---- work ---- */

enum { STREAMS_OWN = -2 }; /* for a device: that of the stream */

static cu_result copy(cu_stream stream, xd_transfer transfer)
{
    handle *h;
    cu_result code = handle_any(stream, 0, &h);
    if (code || !transfer.width || !transfer.height)
        return code;
    if (transfer.dst_device == STREAMS_OWN)
        transfer.dst_device = h->context->device;
    if (transfer.src_device == STREAMS_OWN)
        transfer.src_device = h->context->device;
    return result_of(sim->copy(sim, h->context->device, h->sim, &transfer, NULL));
}

static cu_result line(cu_stream stream, int to, uint64_t dst, int from, uint64_t src, size_t bytes)
{
    return copy(stream, (xd_transfer){.dst_device = to, .src_device = from, .dst = dst, .src = src, .width = bytes,
                                      .height = 1, .dst_pitch = bytes, .src_pitch = bytes});
}

/* Somebody's memory that is not page-locked: the driver copies it through memory of its own. */
static int is_pageable(const void *memory, size_t bytes)
{
    enum { PAGE = 4096 };
    uintptr_t begin = (uintptr_t)memory / PAGE * PAGE, end = (uintptr_t)memory + bytes;
    unsigned char *found = malloc((end - begin) / PAGE + 1);
    int mapped = found && mincore((void *)begin, end - begin, found) == 0;
    free(found);
    return mapped;
}

/* It returns when the host's memory has been read, as the driver does, and may be further. */
static cu_result copy_from_pageable(cu_address dst, const void *src, size_t bytes, cu_stream stream)
{
    void *between;
    cu_result code = result_of(sim->pageable_alloc(sim, bytes, &between, NULL));
    if (code)
        return code;
    memcpy(between, src, bytes);
    code = line(stream, STREAMS_OWN, dst, XD_HOST, (uintptr_t)between, bytes);
    sim->host_free(sim, between, NULL); /* after the copy */
    return code;
}

/* It returns when the host's memory has been written, as the driver does. */
static cu_result copy_to_pageable(void *dst, cu_address src, size_t bytes, cu_stream stream)
{
    void *between;
    cu_result code = result_of(sim->pageable_alloc(sim, bytes, &between, NULL));
    if (code)
        return code;
    code = line(stream, XD_HOST, (uintptr_t)between, STREAMS_OWN, src, bytes);
    if (!code)
        code = stream_synchronize(stream);
    if (!code)
        memcpy(dst, between, bytes);
    sim->host_free(sim, between, NULL);
    return code;
}

static cu_result copy_htod(cu_address dst, const void *src, size_t bytes, cu_stream stream)
{
    NEED_CONTEXT("cuMemcpyHtoDAsync");
    cu_result code = line(stream, STREAMS_OWN, dst, XD_HOST, (uintptr_t)src, bytes);
    return code == CU_INVALID_VALUE && is_pageable(src, bytes) ? copy_from_pageable(dst, src, bytes, stream) : code;
}

static cu_result copy_dtoh(void *dst, cu_address src, size_t bytes, cu_stream stream)
{
    NEED_CONTEXT("cuMemcpyDtoHAsync");
    cu_result code = line(stream, XD_HOST, (uintptr_t)dst, STREAMS_OWN, src, bytes);
    return code == CU_INVALID_VALUE && is_pageable(dst, bytes) ? copy_to_pageable(dst, src, bytes, stream) : code;
}

static cu_result copy_dtod(cu_address dst, cu_address src, size_t bytes, cu_stream stream)
{
    NEED_CONTEXT("cuMemcpyDtoDAsync");
    return line(stream, STREAMS_OWN, dst, STREAMS_OWN, src, bytes);
}

static cu_result copy_peer(cu_address dst, cu_context to, cu_address src, cu_context from, size_t bytes,
                           cu_stream stream)
{
    NEED_CONTEXT("cuMemcpyPeerAsync");
    if (!to || !from || !to->references || !from->references)
        return CU_INVALID_CONTEXT;
    return line(stream, to->device, dst, from->device, src, bytes);
}

static cu_result copy_2d(const cu_copy_2d *c, cu_stream stream)
{
    NEED_CONTEXT("cuMemcpy2DAsync");
    if (c->src_pitch > CUDA_MAX_PITCH || c->dst_pitch > CUDA_MAX_PITCH || c->src_pitch < c->width ||
        c->dst_pitch < c->width || c->src_x || c->src_y || c->dst_x || c->dst_y)
        return CU_INVALID_VALUE;
    xd_transfer t = {.width = c->width, .height = c->height, .src_pitch = c->src_pitch, .dst_pitch = c->dst_pitch};
    t.src_device = c->src_type == CU_MEMORY_HOST ? XD_HOST : STREAMS_OWN;
    t.dst_device = c->dst_type == CU_MEMORY_HOST ? XD_HOST : STREAMS_OWN;
    t.src = t.src_device == XD_HOST ? (uintptr_t)c->src_host : c->src_device;
    t.dst = t.dst_device == XD_HOST ? (uintptr_t)c->dst_host : c->dst_device;
    return copy(stream, t);
}

static cu_result copy_3d_peer(const cu_copy_3d_peer *c, cu_stream stream)
{
    NEED_CONTEXT("cuMemcpy3DPeerAsync");
    if (c->src_type != CU_MEMORY_DEVICE || c->dst_type != CU_MEMORY_DEVICE || !c->src_context || !c->dst_context)
        return CU_INVALID_VALUE;
    if (c->src_pitch > CUDA_MAX_PITCH || c->dst_pitch > CUDA_MAX_PITCH || c->src_pitch < c->width ||
        c->dst_pitch < c->width || c->depth != 1 || c->src_x || c->src_y || c->src_z || c->src_lod || c->dst_x ||
        c->dst_y || c->dst_z || c->dst_lod)
        return CU_INVALID_VALUE;
    return copy(stream, (xd_transfer){.dst_device = c->dst_context->device, .src_device = c->src_context->device,
                                      .dst = c->dst_device, .src = c->src_device, .width = c->width,
                                      .height = c->height, .dst_pitch = c->dst_pitch, .src_pitch = c->src_pitch});
}

static cu_result memset_d8(cu_address address, unsigned char byte, size_t bytes, cu_stream stream)
{
    NEED_CONTEXT("cuMemsetD8Async");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    return code ? code : result_of(sim->fill(sim, h->context->device, h->sim, address, byte, bytes, NULL));
}

typedef struct host_call {
    cu_host_function function;
    void *arg;
} host_call;

static int host_call_run(void *arg)
{
    host_call *call = arg;
    call->function(call->arg);
    return 0;
}

static cu_result launch_host(cu_stream stream, cu_host_function function, void *arg)
{
    NEED_CONTEXT("cuLaunchHostFunc");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    if (code)
        return code;
    host_call *call = malloc(sizeof *call);
    if (!call)
        return CU_OUT_OF_MEMORY;
    *call = (host_call){function, arg};
    xd_kernel kernel = {.run = host_call_run, .drop = free, .arg = call, .cost = 1000};
    return result_of(sim->launch(sim, h->context->device, h->sim, &kernel, NULL));
}

/* ---- graphs: the one of the simulation goes from the graph to what is instantiated from it, once ---- */

struct cu_graph_s {
    cu_context context;
    void *sim;
};

struct cu_graph_exec_s {
    cu_context context;
    void *sim;
};

enum { THREAD_LOCAL = 1 };

static cu_result stream_is_capturing(cu_stream stream, unsigned *status)
{
    NEED_CONTEXT("cuStreamIsCapturing");
    handle *h;
    cu_result code = handle_any(stream, 0, &h);
    if (!code)
        *status = h->capturing;
    return code;
}

static cu_result stream_begin_capture(cu_stream stream, int mode)
{
    NEED_CONTEXT("cuStreamBeginCapture");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    if (code || mode != THREAD_LOCAL)
        return code ? code : CU_NOT_SUPPORTED;
    if (sim->capture_begin(sim, h->context->device, h->sim, NULL))
        return CU_STREAM_CAPTURE_UNSUPPORTED;
    h->capturing = 1;
    return CU_SUCCESS;
}

static cu_result stream_end_capture(cu_stream stream, cu_graph *out)
{
    NEED_CONTEXT("cuStreamEndCapture");
    handle *h;
    void *made;
    *out = NULL;
    cu_result code = handle_use(stream, 0, &h);
    if (code)
        return code;
    h->capturing = 0;
    if (sim->capture_end(sim, h->context->device, h->sim, &made, NULL))
        return CU_STREAM_CAPTURE_INVALIDATED;
    cu_graph graph = malloc(sizeof *graph);
    if (!graph)
        return CU_OUT_OF_MEMORY;
    *graph = (struct cu_graph_s){.context = h->context, .sim = made};
    *out = graph;
    return CU_SUCCESS;
}

static cu_result graph_instantiate(cu_graph_exec *out, cu_graph graph, unsigned long long flags)
{
    NEED_CONTEXT("cuGraphInstantiateWithFlags");
    if (!graph || !graph->sim || flags)
        return CU_INVALID_VALUE;
    cu_graph_exec made = malloc(sizeof *made);
    if (!made)
        return CU_OUT_OF_MEMORY;
    *made = (struct cu_graph_exec_s){.context = graph->context, .sim = graph->sim};
    graph->sim = NULL;
    *out = made;
    return CU_SUCCESS;
}

static cu_result graph_destroy(cu_graph graph)
{
    NEED_INIT("cuGraphDestroy");
    if (!graph)
        return CU_INVALID_VALUE;
    if (graph->sim)
        sim->graph_destroy(sim, graph->context->device, graph->sim, NULL);
    free(graph);
    return CU_SUCCESS;
}

static cu_result graph_launch(cu_graph_exec graph, cu_stream stream)
{
    NEED_CONTEXT("cuGraphLaunch");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    if (code || h->context != graph->context)
        return code ? code : CU_INVALID_CONTEXT;
    return result_of(sim->graph_launch(sim, h->context->device, graph->sim, h->sim, NULL));
}

static cu_result graph_exec_destroy(cu_graph_exec graph)
{
    NEED_INIT("cuGraphExecDestroy");
    if (!graph)
        return CU_INVALID_VALUE;
    sim->graph_destroy(sim, graph->context->device, graph->sim, NULL);
    free(graph);
    return CU_SUCCESS;
}

/* ---- modules: an image is not looked into, whatever it is, it has the kernels of pyxdev/checks/kernels.py ---- */

typedef struct fake_function {
    cu_context context;
    const char *name;
    int (*run)(void *arg);
} fake_function;

typedef struct fake_launch {
    uint64_t at, bytes, key, first, report;
} fake_launch;

static unsigned char pattern_byte(const fake_launch *l, uint64_t i)
{
    uint64_t place = l->first + i, v = l->key + place / 8;
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9u;
    v = (v ^ v >> 27) * 0x94d049bb133111ebu;
    return (unsigned char)((v ^ v >> 31) >> place % 8 * 8);
}

static int run_fill(void *arg)
{
    const fake_launch *l = arg;
    for (uint64_t i = 0; i < l->bytes; i++)
        ((unsigned char *)(uintptr_t)l->at)[i] = pattern_byte(l, i);
    return 0;
}

static int run_check(void *arg)
{
    const fake_launch *l = arg;
    uint64_t *report = (uint64_t *)(uintptr_t)l->report;
    for (uint64_t i = 0; i < l->bytes; i++)
        if (((const unsigned char *)(uintptr_t)l->at)[i] != pattern_byte(l, i)) {
            report[0]++;
            report[1] = ~i > report[1] ? ~i : report[1];
            report[2] = i + 1 > report[2] ? i + 1 : report[2];
        }
    return 0;
}

static int run_nothing(void *arg)
{
    (void)arg;
    return 0;
}

static int run_end_of_spin(void *arg)
{
    const fake_launch *l = arg;
    ((uint32_t *)(uintptr_t)l->at)[1] = 1;
    return 0;
}

static fake_function functions[MAX_DEVICES][3];

static cu_result module_load(cu_context *module, const void *image)
{
    enum { INVALID_IMAGE = 200 };
    NEED_CONTEXT("cuModuleLoadData");
    if (memcmp(image, "\177ELF", 4) != 0)
        return INVALID_IMAGE;
    *module = current();
    return CU_SUCCESS;
}

static cu_result module_unload(cu_context module)
{
    NEED_CONTEXT("cuModuleUnload");
    return module == current() ? CU_SUCCESS : CU_INVALID_CONTEXT;
}

static cu_result module_get_function(fake_function **out, cu_context module, const char *name)
{
    static const fake_function known[] = {
        {NULL, "fill", run_fill}, {NULL, "check", run_check}, {NULL, "spin", run_nothing}};
    NEED_CONTEXT("cuModuleGetFunction");
    for (size_t i = 0; module == current() && i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(known[i].name, name)) {
            *out = &functions[module->device][i];
            **out = known[i];
            (*out)->context = module;
            return CU_SUCCESS;
        }
    return NOT_FOUND;
}

static cu_result launch_one(handle *stream, int (*run)(void *), const fake_launch *with, uint64_t cost)
{
    fake_launch *kept = malloc(sizeof *kept);
    if (!kept)
        return CU_OUT_OF_MEMORY;
    *kept = *with;
    xd_kernel kernel = {.run = run, .drop = free, .arg = kept, .cost = cost};
    return result_of(sim->launch(sim, stream->context->device, stream->sim, &kernel, NULL));
}

/* Parameters: at, bytes, key, first, report; those of spin: latch, ns. A spin takes all of its time. They come one by
   one, or packed with their place in `extra`. */
#define PARAMETERS_END ((void *)0)
#define PARAMETERS_AT ((void *)1)

static cu_result launch_kernel(fake_function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, cu_stream stream, void **parameters, void **extra)
{
    NEED_CONTEXT("cuLaunchKernel");
    handle *h;
    cu_result code = handle_use(stream, 0, &h);
    if (code)
        return code;
    if (!gx || !gy || !gz || !bx || !by || !bz || shared || !parameters == !extra || function->context != current())
        return CU_INVALID_VALUE;
    fake_launch l = {0};
    uint64_t *const fields[] = {&l.at, &l.bytes, &l.key, &l.first, &l.report};
    size_t count = function->run == run_check ? 5 : function->run == run_fill ? 4 : 2;
    const unsigned char *packed = NULL;
    for (void **next = extra; next && *next != PARAMETERS_END; next += 2)
        if (*next == PARAMETERS_AT)
            packed = next[1];
    if (extra && !packed)
        return CU_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        memcpy(fields[i], packed ? (const void *)(packed + i * sizeof *fields[i]) : parameters[i], sizeof *fields[i]);
    if (function->run != run_nothing)
        return launch_one(h, function->run, &l, l.bytes / 400 + 1000);
    code = launch_one(h, run_nothing, &l, l.bytes);
    return code ? code : launch_one(h, run_end_of_spin, &l, 0);
}

/* ---- the one export ---- */

typedef struct entry {
    const char *name;
    int from, below; /* the versions that have the signature above */
    void (*function)(void);
} entry;

#define ENTRY(name, from, below, function) {name, from, below, (void (*)(void))(function)}

static const entry entries[] = {
    ENTRY("cuGetErrorName", 6000, 99999, error_name),
    ENTRY("cuGetErrorString", 6000, 99999, error_string),
    ENTRY("cuInit", 2000, 99999, init),
    ENTRY("cuDriverGetVersion", 2020, 99999, driver_get_version),
    ENTRY("cuDeviceGetCount", 2000, 99999, device_get_count),
    ENTRY("cuDeviceGet", 2000, 99999, device_get),
    ENTRY("cuDeviceGetName", 2000, 99999, device_get_name),
    ENTRY("cuDeviceGetUuid", 9020, 99999, device_get_uuid),
    ENTRY("cuDeviceGetPCIBusId", 4010, 99999, device_get_pci),
    ENTRY("cuDeviceTotalMem", 3020, 99999, device_total_mem),
    ENTRY("cuDeviceGetAttribute", 2000, 99999, device_get_attribute),
    ENTRY("cuDeviceCanAccessPeer", 4000, 99999, device_can_access_peer),
    ENTRY("cuDevicePrimaryCtxGetState", 7000, 99999, context_state),
    ENTRY("cuDevicePrimaryCtxRetain", 7000, 99999, context_retain),
    ENTRY("cuDevicePrimaryCtxRelease", 7000, 99999, context_release),
    ENTRY("cuCtxGetCurrent", 4000, 99999, context_get_current),
    ENTRY("cuCtxSetCurrent", 4000, 99999, context_set_current),
    ENTRY("cuCtxPushCurrent", 4000, 99999, context_push),
    ENTRY("cuCtxPopCurrent", 4000, 99999, context_pop),
    ENTRY("cuCtxGetDevice", 2000, 13000, context_get_device),
    ENTRY("cuCtxSynchronize", 2000, 13000, context_synchronize),
    ENTRY("cuCtxEnablePeerAccess", 4000, 99999, context_enable_peer),
    ENTRY("cuMemGetInfo", 3020, 99999, mem_get_info),
    ENTRY("cuMemAlloc", 3020, 99999, mem_alloc),
    ENTRY("cuMemFree", 3020, 99999, mem_free),
    ENTRY("cuMemHostAlloc", 2020, 99999, mem_host_alloc),
    ENTRY("cuMemFreeHost", 2000, 99999, mem_free_host),
    ENTRY("cuMemHostRegister", 6050, 99999, mem_host_register),
    ENTRY("cuMemHostUnregister", 4000, 99999, mem_host_unregister),
    ENTRY("cuStreamCreateWithPriority", 5050, 99999, stream_create),
    ENTRY("cuStreamDestroy", 4000, 99999, stream_destroy),
    ENTRY("cuStreamQuery", 2000, 99999, stream_query),
    ENTRY("cuStreamSynchronize", 2000, 99999, stream_synchronize),
    ENTRY("cuStreamWaitEvent", 3020, 99999, stream_wait_event),
    ENTRY("cuEventCreate", 2000, 99999, event_create),
    ENTRY("cuEventDestroy", 4000, 99999, event_destroy),
    ENTRY("cuEventRecord", 2000, 99999, event_record),
    ENTRY("cuEventQuery", 2000, 99999, event_query),
    ENTRY("cuEventSynchronize", 2000, 99999, event_synchronize),
    ENTRY("cuEventElapsedTime", 2000, 99999, event_elapsed),
    ENTRY("cuMemcpyHtoDAsync", 3020, 99999, copy_htod),
    ENTRY("cuMemcpyDtoHAsync", 3020, 99999, copy_dtoh),
    ENTRY("cuMemcpyDtoDAsync", 3020, 99999, copy_dtod),
    ENTRY("cuMemcpyPeerAsync", 4000, 99999, copy_peer),
    ENTRY("cuMemcpy2DAsync", 3020, 99999, copy_2d),
    ENTRY("cuMemcpy3DPeerAsync", 4000, 99999, copy_3d_peer),
    ENTRY("cuMemsetD8Async", 3020, 99999, memset_d8),
    ENTRY("cuLaunchHostFunc", 10000, 13010, launch_host),
    ENTRY("cuStreamIsCapturing", 10000, 99999, stream_is_capturing),
    ENTRY("cuStreamBeginCapture", 10010, 99999, stream_begin_capture),
    ENTRY("cuStreamEndCapture", 10000, 99999, stream_end_capture),
    ENTRY("cuGraphInstantiateWithFlags", 11040, 99999, graph_instantiate),
    ENTRY("cuGraphDestroy", 10000, 99999, graph_destroy),
    ENTRY("cuGraphLaunch", 10000, 99999, graph_launch),
    ENTRY("cuGraphExecDestroy", 10000, 99999, graph_exec_destroy),
    ENTRY("cuModuleLoadData", 2000, 99999, module_load),
    ENTRY("cuModuleUnload", 2000, 99999, module_unload),
    ENTRY("cuModuleGetFunction", 2000, 99999, module_get_function),
    ENTRY("cuLaunchKernel", 4000, 99999, launch_kernel),
};

__attribute__((visibility("default"))) cu_result cuGetProcAddress_v2(const char *name, void **function, int version,
                                                                     uint64_t flags, int *status);

cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    enum { FOUND = 0, UNKNOWN = 1, VERSION_TOO_LOW = 2 };
    int ignored;
    if (!status)
        status = &ignored;
    if (!name || !function || version > driver_version() || flags > 2)
        return CU_INVALID_VALUE;
    void (*found)(void) = NULL;
    const char *missing = getenv("PYXDEV_FAKE_CUDA_MISSING");
    *status = UNKNOWN;
    if (!strcmp(name, "cuGetProcAddress") && version >= 12000)
        found = (void (*)(void))cuGetProcAddress_v2;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0] && !found; i++)
        if (!strcmp(name, entries[i].name) && (!missing || strcmp(name, missing))) {
            *status = VERSION_TOO_LOW;
            if (version >= entries[i].from && version < entries[i].below)
                found = entries[i].function;
        }
    if (found)
        *status = FOUND;
    memcpy(function, &found, sizeof found);
    return CU_SUCCESS;
}
