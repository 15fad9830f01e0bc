/* Device and page-locked memory: host memory that costs nothing until it is touched, counted against budgets. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- blocks, in order of their addresses ---- */

/* The first block that ends above the address. */
static size_t place_of(const sim_memory *memory, uint64_t address)
{
    size_t low = 0, high = memory->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memory->blocks[middle].address + memory->blocks[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

sim_block *sim_block_at(const sim_memory *memory, uint64_t address)
{
    size_t place = place_of(memory, address);
    if (place == memory->count || memory->blocks[place].address > address)
        return NULL;
    return &memory->blocks[place];
}

static int reserve(sim_memory *memory)
{
    if (memory->count < memory->capacity)
        return XD_OK;
    size_t capacity = memory->capacity ? 2 * memory->capacity : 64;
    sim_block *blocks = realloc(memory->blocks, capacity * sizeof *blocks);
    if (!blocks)
        return XD_NO_HOST_MEMORY;
    memory->blocks = blocks;
    memory->capacity = capacity;
    return XD_OK;
}

static void insert(sim_memory *memory, sim_block block)
{
    size_t place = place_of(memory, block.address);
    memmove(&memory->blocks[place + 1], &memory->blocks[place], (memory->count - place) * sizeof block);
    memory->blocks[place] = block;
    memory->count++;
}

static void give_back(sim_block *block)
{
    if (!block->foreign)
        munmap((void *)(uintptr_t)block->address, block->bytes);
    sim_pieces_clear(&block->pieces);
}

static void unmap(sim_memory *memory, sim_block *block)
{
    give_back(block);
    size_t place = (size_t)(block - memory->blocks);
    memory->count--;
    memmove(block, block + 1, (memory->count - place) * sizeof *block);
}

void sim_memory_clear(sim *s)
{
    for (size_t i = 0; i < s->memory.count; i++)
        give_back(&s->memory.blocks[i]);
    free(s->memory.blocks);
    s->memory = (sim_memory){0};
}

static void name_place(int device, char *out, size_t size)
{
    if (device == XD_HOST)
        snprintf(out, size, "page-locked memory");
    else
        snprintf(out, size, "the memory of device %d", device);
}

int sim_memory_check(const sim *s, int device, uint64_t address, uint64_t bytes, uint64_t seq, const char *operation,
                     xd_error *err)
{
    const sim_block *block = sim_block_at(&s->memory, address);
    if (block && block->device == device && bytes <= block->address + block->bytes - address &&
        (!block->freed || seq <= block->last_op))
        return XD_OK;
    char wanted[48], found[160];
    name_place(device, wanted, sizeof wanted);
    if (!block)
        snprintf(found, sizeof found, "nothing is allocated there");
    else if (block->freed)
        snprintf(found, sizeof found, "that was freed");
    else if (block->device != device)
        name_place(block->device, found, sizeof found);
    else
        snprintf(found, sizeof found, "an allocation of %" PRIu64 " bytes that ends %" PRIu64 " bytes after this address",
                 block->bytes, block->address + block->bytes - address);
    return xd_fail(err, XD_INVALID, 0, operation, "%" PRIu64 " bytes at 0x%" PRIx64 " are not all in %s: %s", bytes,
                   address, wanted, found);
}

/* ---- allocate and free ---- */

/* What was freed while work that uses it was queued goes when that work is done. */
static void reap(sim *s)
{
    for (size_t i = s->memory.count; i-- > 0 && s->memory.freed;) {
        sim_block *block = &s->memory.blocks[i];
        sim_goal used = {.drain = true, .device = block->device, .last_op = block->last_op};
        if (block->freed && sim_reached(s, &used)) {
            unmap(&s->memory, block);
            s->memory.freed--;
        }
    }
}

/* *address: 0, or somebody else's memory. */
static int map(sim *s, int device, uint64_t bytes, const char *operation, uint64_t *address, xd_error *err)
{
    sim_block block = {.address = *address, .bytes = bytes, .id = s->memory.next_id++, .device = device,
                       .foreign = *address != 0};
    if (reserve(&s->memory))
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "no host memory for the list of allocations");
    if (!block.foreign) {
        void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            return xd_fail(err, XD_NO_HOST_MEMORY, 0, operation, "the host has no address space for %" PRIu64 " bytes",
                           bytes);
        block.address = (uint64_t)(uintptr_t)memory;
    }
    insert(&s->memory, block);
    *address = block.address;
    return XD_OK;
}

static int release(sim *s, int device, uint64_t address, const char *operation, xd_error *err)
{
    int status = sim_refuse_here(s, operation, err);
    if (status)
        return status;
    sim_catch_up(s);
    sim_block *block = sim_block_at(&s->memory, address);
    if (!block || block->address != address || block->device != device || block->freed)
        return xd_fail(err, XD_INVALID, 0, operation, "0x%" PRIx64 " is not the address of an allocation %s", address,
                       device == XD_HOST ? "of page-locked memory" : "of this device");
    block->freed = 1;
    block->last_op = s->seq;
    s->memory.freed++;
    uint64_t *used = device == XD_HOST ? &s->pinned_used : &s->devices[device].used;
    if (!block->pageable)
        *used -= block->bytes;
    /* As the vendors do: wait for the work queued before. In a kernel nobody can wait; reap() comes back to it. */
    sim_goal goal = {.drain = true, .device = device, .last_op = s->seq};
    uint64_t bytes = block->bytes;
    if (!sim_in_callback(s)) {
        sim_run(s, &goal, XD_FOREVER, operation, NULL);
        if (sim_reached(s, &goal)) {
            sim_order_drained(s, device);
            sim_order_host(s, address, bytes, true, operation);
        }
    }
    reap(s);
    return XD_OK;
}

static int over_budget(uint64_t used, uint64_t bytes, uint64_t budget)
{
    return bytes > budget || used > budget - bytes;
}

int sim_device_alloc(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err)
{
    static const char operation[] = "device_alloc";
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    sim_device *at;
    int status = sim_device_find(s, device, operation, &at, err);
    if (!status)
        status = sim_refuse_here(s, operation, err);
    if (!status) {
        s->host += s->config.costs.alloc;
        reap(s);
        if (over_budget(at->used, bytes, at->is.memory))
            status = xd_fail(err, XD_NO_DEVICE_MEMORY, 0, operation,
                             "%" PRIu64 " bytes do not fit device %d: %" PRIu64 " of %" PRIu64 " bytes are free", bytes,
                             device, at->is.memory - at->used, at->is.memory);
    }
    uint64_t where = 0;
    if (!status)
        status = map(s, device, bytes, operation, &where, err);
    if (!status) {
        at->used += bytes;
        *address = where;
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_device_free(xd_driver *driver, int device, uint64_t address, xd_error *err)
{
    sim *s = sim_of(driver);
    if (device < 0 || device >= s->device_count)
        return xd_fail(err, XD_INVALID, 0, "device_free", "device is %d; allowed: 0 to %d", device, s->device_count - 1);
    pthread_mutex_lock(&s->lock);
    int status = release(s, device, address, "device_free", err);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int lock_pages(sim *s, void *given, uint64_t bytes, void **address, xd_error *err)
{
    static const char operation[] = "host_alloc";
    uint64_t where = (uint64_t)(uintptr_t)given;
    pthread_mutex_lock(&s->lock);
    int status = sim_refuse_here(s, operation, err);
    s->host += s->config.costs.alloc;
    reap(s);
    if (!status && over_budget(s->pinned_used, bytes, s->config.pinned))
        status = xd_fail(err, XD_NO_PINNED_MEMORY, 0, operation,
                         "%" PRIu64 " bytes of page-locked memory: %" PRIu64 " of %" PRIu64 " bytes are free", bytes,
                         s->config.pinned - s->pinned_used, s->config.pinned);
    if (!status)
        status = map(s, XD_HOST, bytes, operation, &where, err);
    if (!status) {
        s->pinned_used += bytes;
        *address = (void *)(uintptr_t)where;
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_host_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err)
{
    return lock_pages(sim_of(driver), NULL, bytes, address, err);
}

int xd_sim_adopt(xd_driver *driver, void *address, uint64_t bytes, xd_error *err)
{
    return lock_pages(sim_of(driver), address, bytes, &address, err);
}

int sim_pageable_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err)
{
    static const char operation[] = "pageable_alloc";
    sim *s = sim_of(driver);
    uint64_t where = 0;
    pthread_mutex_lock(&s->lock);
    int status = sim_refuse_here(s, operation, err);
    if (!status)
        status = map(s, XD_HOST, bytes, operation, &where, err);
    if (!status) {
        sim_block_at(&s->memory, where)->pageable = 1;
        *address = (void *)(uintptr_t)where;
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_host_free(xd_driver *driver, void *address, xd_error *err)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    int status = release(s, XD_HOST, (uint64_t)(uintptr_t)address, "host_free", err);
    pthread_mutex_unlock(&s->lock);
    return status;
}
