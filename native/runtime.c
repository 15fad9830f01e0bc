/* The runtime: owns the driver, counts what is alive, knows its process. */
#include "internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MARK_BYTES = 4096 };

/* The fork check stands before every driver call, and getpid() is a system call of 0.1 to 0.3 us. The kernel can wipe
   a page in the child instead: then the check is one load. */
static const volatile char *mark_open(void)
{
    char *mark = mmap(NULL, MARK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mark == MAP_FAILED)
        return NULL;
    if (madvise(mark, MARK_BYTES, MADV_WIPEONFORK) != 0) {
        munmap(mark, MARK_BYTES);
        return NULL;
    }
    *mark = 1;
    return mark;
}

static void mark_close(const volatile char *mark)
{
    if (mark)
        munmap((void *)(uintptr_t)mark, MARK_BYTES);
}

int xd_runtime_open(xd_runtime **out, xd_driver *driver, const xd_runtime_options *options, xd_error *err)
{
    xd_runtime *runtime = xd_new(sizeof *runtime, "runtime_open", err);
    if (!runtime)
        return XD_NO_HOST_MEMORY;
    int status = driver->device_count(driver, &runtime->devices, err);
    if (status)
        goto free_runtime;
    if (runtime->devices < 1) {
        status = xd_fail(err, XD_NO_DEVICE, 0, "runtime_open", "%s has no device", driver->name);
        goto free_runtime;
    }
    runtime->driver = driver;
    runtime->pid = getpid();
    runtime->mark = mark_open();
    runtime->force_sync = options && options->force_sync;
    pthread_mutex_init(&runtime->spare_lock, NULL);
    *out = runtime;
    return XD_OK;

free_runtime:
    free(runtime);
    return status;
}

/* "2 streams, 1 link", or an empty text. */
static void name_children(const xd_runtime *runtime, char *text, size_t room)
{
    static const char *const names[XD_LIVE_KINDS] = {
        [XD_LIVE_STREAMS] = "stream", [XD_LIVE_EVENTS] = "event",       [XD_LIVE_BUFFERS] = "buffer",
        [XD_LIVE_RINGS] = "ring",     [XD_LIVE_LINKS] = "link",         [XD_LIVE_THROTTLES] = "throttle",
        [XD_LIVE_READERS] = "reader", [XD_LIVE_GRAPHS] = "graph",
    };
    text[0] = '\0';
    for (int kind = 0; kind < XD_LIVE_KINDS; kind++) {
        long long count = atomic_load(&runtime->live[kind]);
        size_t used = strlen(text);
        if (count)
            snprintf(text + used, room - used, "%s%lld %s%s", used ? ", " : "", count, names[kind],
                     count == 1 ? "" : "s");
    }
}

int xd_runtime_close(xd_runtime **at, xd_error *err)
{
    xd_runtime *runtime = at ? *at : NULL;
    if (!runtime)
        return XD_OK;
    char children[160];
    name_children(runtime, children, sizeof children);
    if (children[0])
        return xd_fail(err, XD_BUSY, 0, "runtime_close", "the runtime has live children: %s", children);
    if (xd_runtime_owned(runtime)) {
        xd_buffer_drop_spare(runtime);
        runtime->driver->close(runtime->driver);
    }
    pthread_mutex_destroy(&runtime->spare_lock);
    mark_close(runtime->mark);
    free(runtime);
    *at = NULL;
    return XD_OK;
}

void xd_runtime_live(xd_runtime *runtime, xd_live *out)
{
    *out = (xd_live){
        .streams = atomic_load(&runtime->live[XD_LIVE_STREAMS]),
        .events = atomic_load(&runtime->live[XD_LIVE_EVENTS]),
        .graphs = atomic_load(&runtime->live[XD_LIVE_GRAPHS]),
        .buffers = atomic_load(&runtime->live[XD_LIVE_BUFFERS]),
        .rings = atomic_load(&runtime->live[XD_LIVE_RINGS]),
        .links = atomic_load(&runtime->live[XD_LIVE_LINKS]),
        .throttles = atomic_load(&runtime->live[XD_LIVE_THROTTLES]),
        .readers = atomic_load(&runtime->live[XD_LIVE_READERS]),
        .device_bytes = atomic_load(&runtime->device_bytes),
        .pinned_bytes = atomic_load(&runtime->pinned_bytes),
    };
}

void xd_runtime_count(xd_runtime *runtime, int kind, int change)
{
    atomic_fetch_add_explicit(&runtime->live[kind], change, memory_order_relaxed);
}

const char *xd_runtime_backend(const xd_runtime *runtime)
{
    return runtime->driver->name;
}

int xd_runtime_device_count(const xd_runtime *runtime)
{
    return runtime->devices;
}

int xd_runtime_device_info(xd_runtime *runtime, int device, xd_device_info *out, xd_error *err)
{
    int status = xd_runtime_check_device(runtime, device, "device_info", err);
    return status ? status : runtime->driver->device_info(runtime->driver, device, out, err);
}

int xd_runtime_memory_info(xd_runtime *runtime, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err)
{
    int status = xd_runtime_check_device(runtime, device, "memory_info", err);
    return status ? status : runtime->driver->memory_info(runtime->driver, device, free_bytes, total_bytes, err);
}

static int check_pair(const xd_runtime *runtime, int device, int peer, const char *operation, xd_error *err)
{
    int status = xd_runtime_check_device(runtime, device, operation, err);
    if (!status)
        status = xd_runtime_check_device(runtime, peer, operation, err);
    if (!status && device == peer)
        status = xd_fail(err, XD_INVALID, 0, operation, "device %d is not a peer of itself", device);
    return status;
}

int xd_runtime_peer_capable(xd_runtime *runtime, int device, int peer, int *capable, xd_error *err)
{
    int status = check_pair(runtime, device, peer, "peer_capable", err);
    return status ? status : runtime->driver->peer_capable(runtime->driver, device, peer, capable, err);
}

int xd_runtime_peer_enable(xd_runtime *runtime, int device, int peer, int *enabled, xd_error *err)
{
    int capable;
    int status = xd_runtime_peer_capable(runtime, device, peer, &capable, err);
    if (status)
        return status;
    if (capable)
        return runtime->driver->peer_enable(runtime->driver, device, peer, enabled, err);
    *enabled = 0;
    return XD_OK;
}

uint64_t xd_runtime_clock(xd_runtime *runtime)
{
    if (runtime->driver->clock && xd_runtime_owned(runtime))
        return runtime->driver->clock(runtime->driver);
    return xd_monotonic();
}

void xd_runtime_force_sync(xd_runtime *runtime, int on)
{
    runtime->force_sync = on != 0;
}

int xd_runtime_forced_sync(const xd_runtime *runtime)
{
    return runtime->force_sync;
}

/* ---- checks ---- */

int xd_runtime_owned(const xd_runtime *runtime)
{
    return runtime->mark ? *runtime->mark : getpid() == runtime->pid;
}

int xd_runtime_enter(const xd_runtime *runtime, const char *operation, xd_error *err)
{
    if (xd_runtime_owned(runtime))
        return XD_OK;
    return xd_fail(err, XD_FORKED, 0, operation,
                   "the runtime was opened by process %d and does not survive the fork into process %d: "
                   "start processes with spawn",
                   (int)runtime->pid, (int)getpid());
}

int xd_runtime_check_device(const xd_runtime *runtime, int device, const char *operation, xd_error *err)
{
    int status = xd_runtime_enter(runtime, operation, err);
    if (status)
        return status;
    if (device >= 0 && device < runtime->devices)
        return XD_OK;
    if (runtime->devices == 1)
        return xd_fail(err, XD_INVALID, 0, operation, "device %d does not exist; there is device 0 only", device);
    return xd_fail(err, XD_INVALID, 0, operation, "device %d does not exist; there are devices 0 to %d", device,
                   runtime->devices - 1);
}

int xd_runtime_check_same(const xd_runtime *a, const xd_runtime *b, const char *operation, xd_error *err)
{
    if (a == b)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, operation, "the arguments belong to two different runtimes");
}

/* ---- the host: memory, time, conditions ---- */

void *xd_new(size_t bytes, const char *operation, xd_error *err)
{
    void *memory = calloc(1, bytes);
    if (!memory)
        xd_fail(err, XD_NO_HOST_MEMORY, ENOMEM, operation, "no host memory for %zu bytes", bytes);
    return memory;
}

uint64_t xd_monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t xd_later(uint64_t now, uint64_t ns)
{
    return ns < XD_FOREVER - now ? now + ns : XD_FOREVER;
}

uint64_t xd_remaining(uint64_t now, uint64_t when)
{
    if (when == XD_FOREVER)
        return XD_FOREVER;
    return when > now ? when - now : 0;
}

void xd_condition_open(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

int xd_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t when)
{
    if (when == XD_FOREVER)
        return pthread_cond_wait(condition, lock) == 0;
    struct timespec until = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    return pthread_cond_timedwait(condition, lock, &until) != ETIMEDOUT;
}
