/* Device memory and host memory. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

/* Page-locking takes half a second a GiB, so a runtime keeps the last block of a ring's size that was freed. */
enum { SPARE_LEAST = 8 << 20, SPARE_MOST = 64 << 20 };

struct xd_buffer {
    xd_runtime *runtime;
    int device;
    int pageable; /* host memory that is not page-locked */
    uint64_t address, bytes;
};

static int is_host(int device)
{
    return device == XD_HOST;
}

static atomic_llong *held(xd_runtime *runtime, int device)
{
    return is_host(device) ? &runtime->pinned_bytes : &runtime->device_bytes;
}

/* ---- the page-locked block that is kept ---- */

static void *take_spare(xd_runtime *runtime, uint64_t bytes)
{
    void *found = NULL;
    pthread_mutex_lock(&runtime->spare_lock);
    if (runtime->spare_bytes == bytes) {
        found = runtime->spare;
        runtime->spare = NULL;
        runtime->spare_bytes = 0;
    }
    pthread_mutex_unlock(&runtime->spare_lock);
    return found;
}

/* Keeps this block instead of the one before. Returns whether there was one. */
static int keep_spare(xd_runtime *runtime, void *memory, uint64_t bytes)
{
    pthread_mutex_lock(&runtime->spare_lock);
    void *before = runtime->spare;
    runtime->spare = memory;
    runtime->spare_bytes = bytes;
    pthread_mutex_unlock(&runtime->spare_lock);
    if (before)
        runtime->driver->host_free(runtime->driver, before, NULL);
    return before != NULL;
}

int xd_buffer_drop_spare(xd_runtime *runtime)
{
    return keep_spare(runtime, NULL, 0);
}

static int allocate_pinned(xd_runtime *runtime, uint64_t bytes, void **memory, xd_error *err)
{
    *memory = take_spare(runtime, bytes);
    if (*memory)
        return XD_OK;
    xd_driver *driver = runtime->driver;
    int status = driver->host_alloc(driver, bytes, memory, err);
    if (status == XD_NO_PINNED_MEMORY && xd_buffer_drop_spare(runtime))
        status = driver->host_alloc(driver, bytes, memory, err);
    return status;
}

static void free_pinned(xd_runtime *runtime, void *memory, uint64_t bytes)
{
    if (bytes >= SPARE_LEAST && bytes <= SPARE_MOST)
        keep_spare(runtime, memory, bytes);
    else
        runtime->driver->host_free(runtime->driver, memory, NULL);
}

/* ---- memory that is not page-locked ---- */

static int allocate_pageable(xd_runtime *runtime, uint64_t bytes, void **memory, xd_error *err)
{
    enum { PAGE = 4096 };
    xd_driver *driver = runtime->driver;
    if (driver->pageable_alloc)
        return driver->pageable_alloc(driver, bytes, memory, err);
    uint64_t pages = (bytes + PAGE - 1) / PAGE;
    *memory = aligned_alloc(PAGE, pages * PAGE);
    if (*memory)
        return XD_OK;
    return xd_fail(err, XD_NO_HOST_MEMORY, 0, "buffer_open", "no host memory for %" PRIu64 " bytes", bytes);
}

static void free_pageable(xd_runtime *runtime, void *memory)
{
    if (runtime->driver->pageable_alloc)
        runtime->driver->host_free(runtime->driver, memory, NULL);
    else
        free(memory);
}

/* ---- buffers ---- */

static int allocate(xd_buffer *buffer, xd_error *err)
{
    xd_runtime *runtime = buffer->runtime;
    xd_driver *driver = runtime->driver;
    if (!is_host(buffer->device))
        return driver->device_alloc(driver, buffer->device, buffer->bytes, &buffer->address, err);
    void *memory;
    int status = buffer->pageable ? allocate_pageable(runtime, buffer->bytes, &memory, err)
                                  : allocate_pinned(runtime, buffer->bytes, &memory, err);
    if (!status)
        buffer->address = (uint64_t)(uintptr_t)memory;
    return status;
}

static void count(const xd_buffer *buffer, int change)
{
    if (!buffer->pageable)
        atomic_fetch_add(held(buffer->runtime, buffer->device), change * (long long)buffer->bytes);
    xd_runtime_count(buffer->runtime, XD_LIVE_BUFFERS, change);
}

/* The driver says that memory ran out; how much of it is ours is known here. */
static int explain(xd_runtime *runtime, int device, uint64_t bytes, int status, xd_error *err)
{
    int code = err ? err->code : 0;
    long long ours = atomic_load(held(runtime, device));
    if (status == XD_NO_PINNED_MEMORY)
        return xd_fail(err, status, code, "buffer_open",
                       "no page-locked host memory for %" PRIu64 " bytes; this runtime holds %lld bytes of it", bytes,
                       ours);
    if (status == XD_NO_DEVICE_MEMORY)
        return xd_fail(err, status, code, "buffer_open",
                       "no memory on device %d for %" PRIu64 " bytes; this runtime holds %lld bytes on all devices",
                       device, bytes, ours);
    return status;
}

static int open_buffer(xd_buffer **out, xd_runtime *runtime, int device, int pageable, uint64_t bytes, xd_error *err)
{
    int status = is_host(device) ? xd_runtime_enter(runtime, "buffer_open", err)
                                 : xd_runtime_check_device(runtime, device, "buffer_open", err);
    if (status)
        return status;
    xd_buffer *buffer = xd_new(sizeof *buffer, "buffer_open", err);
    if (!buffer)
        return XD_NO_HOST_MEMORY;
    *buffer = (xd_buffer){.runtime = runtime, .device = device, .pageable = pageable, .bytes = bytes};
    if (bytes)
        status = allocate(buffer, err);
    if (status) {
        free(buffer);
        return explain(runtime, device, bytes, status, err);
    }
    count(buffer, 1);
    *out = buffer;
    return XD_OK;
}

int xd_buffer_open(xd_buffer **out, xd_runtime *runtime, int device, uint64_t bytes, xd_error *err)
{
    return open_buffer(out, runtime, device, 0, bytes, err);
}

int xd_buffer_open_pageable(xd_buffer **out, xd_runtime *runtime, uint64_t bytes, xd_error *err)
{
    return open_buffer(out, runtime, XD_HOST, 1, bytes, err);
}

void xd_buffer_close(xd_buffer **at)
{
    xd_buffer *buffer = at ? *at : NULL;
    if (!buffer)
        return;
    xd_driver *driver = buffer->runtime->driver;
    void *memory = (void *)(uintptr_t)buffer->address;
    if (buffer->bytes && xd_runtime_owned(buffer->runtime)) {
        if (!is_host(buffer->device))
            driver->device_free(driver, buffer->device, buffer->address, NULL);
        else if (buffer->pageable)
            free_pageable(buffer->runtime, memory);
        else
            free_pinned(buffer->runtime, memory, buffer->bytes);
    }
    xd_buffer_abandon(at);
}

void xd_buffer_abandon(xd_buffer **at)
{
    xd_buffer *buffer = *at;
    count(buffer, -1);
    free(buffer);
    *at = NULL;
}

uint64_t xd_buffer_address(const xd_buffer *buffer)
{
    return buffer->address;
}

uint64_t xd_buffer_bytes(const xd_buffer *buffer)
{
    return buffer->bytes;
}

int xd_buffer_device(const xd_buffer *buffer)
{
    return buffer->device;
}

int xd_host_access(xd_runtime *runtime, const void *address, uint64_t bytes, int write, xd_error *err)
{
    int status = xd_runtime_enter(runtime, "host_access", err);
    if (status || !runtime->driver->host_access)
        return status;
    return runtime->driver->host_access(runtime->driver, address, bytes, write, err);
}
