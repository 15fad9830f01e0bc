/* The driver table of simulated devices; creation, devices, peers, the clock. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_DEVICES 1024

/* ---- what all files use ---- */

int sim_pass_on(xd_error *err, const xd_error *from)
{
    if (err)
        *err = *from;
    return from->status;
}

int sim_device_find(sim *s, int device, const char *operation, sim_device **out, xd_error *err)
{
    if (device < 0 || device >= s->device_count)
        return xd_fail(err, XD_INVALID, 0, operation, "device is %d; allowed: 0 to %d", device, s->device_count - 1);
    *out = &s->devices[device];
    return (*out)->fault.status == XD_OK ? XD_OK : sim_pass_on(err, &(*out)->fault);
}

/* splitmix64 of the seed, the operation and the purpose */
uint64_t sim_draw(const sim *s, uint64_t seq, uint64_t purpose)
{
    uint64_t x = s->config.seed * UINT64_C(0xd1342543de82ef95) + seq * UINT64_C(0x9e3779b97f4a7c15) + purpose;
    for (int i = 0; i < 2; i++) {
        x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
        x ^= x >> 31;
    }
    return x;
}

/* ---- devices ---- */

static int device_count(xd_driver *driver, int *count, xd_error *err)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    bool ready = !sim_fault_hits(s, XD_SIM_NOT_READY, XD_SIM_ANY, XD_SIM_ANY);
    pthread_mutex_unlock(&s->lock);
    if (!ready)
        return xd_fail(err, XD_NO_DEVICE, 0, "device_count", "the simulated machine is not ready");
    *count = s->device_count;
    return XD_OK;
}

static int device_info(xd_driver *driver, int device, xd_device_info *out, xd_error *err)
{
    sim *s = sim_of(driver);
    if (device < 0 || device >= s->device_count)
        return xd_fail(err, XD_INVALID, 0, "device_info", "device is %d; allowed: 0 to %d", device, s->device_count - 1);
    const xd_sim_device *is = &s->devices[device].is;
    *out = (xd_device_info){.memory = is->memory, .copy_engines = 2, .integrated = is->integrated};
    snprintf(out->name, sizeof out->name, "%s", is->name);
    snprintf(out->uuid, sizeof out->uuid, "SIM-%d", device);
    snprintf(out->arch, sizeof out->arch, "%s", is->arch);
    return XD_OK;
}

static int memory_info(xd_driver *driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err)
{
    sim *s = sim_of(driver);
    sim_device *at;
    pthread_mutex_lock(&s->lock);
    int status = sim_device_find(s, device, "memory_info", &at, err);
    if (!status) {
        *free_bytes = at->is.memory - at->used;
        *total_bytes = at->is.memory;
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int find_pair(sim *s, int device, int peer, const char *operation, size_t *pair, xd_error *err)
{
    if (device < 0 || device >= s->device_count || peer < 0 || peer >= s->device_count)
        return xd_fail(err, XD_INVALID, 0, operation, "devices are %d and %d; allowed: 0 to %d", device, peer,
                       s->device_count - 1);
    *pair = (size_t)device * (size_t)s->device_count + (size_t)peer;
    return XD_OK;
}

static int peer_capable(xd_driver *driver, int device, int peer, int *capable, xd_error *err)
{
    sim *s = sim_of(driver);
    size_t pair = 0;
    int status = find_pair(s, device, peer, "peer_capable", &pair, err);
    if (!status)
        *capable = device != peer && s->peers[pair].capable;
    return status;
}

static int peer_enable(xd_driver *driver, int device, int peer, int *enabled, xd_error *err)
{
    static const char operation[] = "peer_enable";
    sim *s = sim_of(driver);
    sim_device *at;
    size_t pair = 0;
    pthread_mutex_lock(&s->lock);
    int status = find_pair(s, device, peer, operation, &pair, err);
    if (!status)
        status = sim_device_find(s, device, operation, &at, err);
    if (!status && sim_fault_hits(s, XD_SIM_ENABLE_FAILS, device, peer))
        status = xd_fail(err, XD_DRIVER, 0, operation, "peer access of device %d to device %d was refused", device, peer);
    if (!status) {
        bool room = s->config.peer_limit < 0 || at->enabled < s->config.peer_limit;
        if (device != peer && s->peers[pair].capable && !s->peer_on[pair] && room) {
            s->peer_on[pair] = true;
            at->enabled++;
        }
        *enabled = s->peer_on[pair];
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* ---- the host ---- */

static uint64_t read_clock(xd_driver *driver)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    uint64_t host = s->host;
    pthread_mutex_unlock(&s->lock);
    return host;
}

void xd_sim_pass(xd_driver *driver, uint64_t ns)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    uint64_t begin = s->host;
    s->host += ns;
    sim_trace_host(s, "work", begin, s->host);
    pthread_mutex_unlock(&s->lock);
}

static int host_access(xd_driver *driver, const void *address, uint64_t bytes, int write, xd_error *err)
{
    sim *s = sim_of(driver);
    if (!bytes)
        return XD_OK;
    pthread_mutex_lock(&s->lock);
    int status =
        sim_memory_check(s, XD_HOST, (uint64_t)(uintptr_t)address, bytes, UINT64_MAX, "host_access", err);
    if (!status)
        sim_order_host(s, (uint64_t)(uintptr_t)address, bytes, write != 0, write ? "write" : "read");
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* ---- create and close ---- */

static void close_sim(xd_driver *driver)
{
    sim *s = sim_of(driver);
    sim_streams_clear(s);
    for (uint32_t i = 0; i < s->event_table.count; i++) {
        sim_event *event = s->event_table.slots[i].object;
        if (event) {
            sim_stamp_release(event->stamp);
            free(event);
        }
    }
    for (uint32_t i = 0; i < s->graph_table.count; i++)
        if (s->graph_table.slots[i].object)
            sim_graph_release(s->graph_table.slots[i].object);
    sim_table_clear(&s->graph_table);
    sim_table_clear(&s->event_table);
    sim_table_clear(&s->stream_table);
    sim_memory_clear(s);
    sim_faults_clear(s);
    free(s->order.host.at);
    free(s->trace.spans);
    free(s->heap.ops);
    for (int i = 0; i < s->device_count && s->devices; i++) {
        free((char *)(uintptr_t)s->devices[i].is.name);
        free((char *)(uintptr_t)s->devices[i].is.arch);
    }
    free(s->devices);
    free(s->peers);
    free(s->peer_on);
    free(s->links);
    pthread_cond_destroy(&s->idle);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static const xd_driver table = {
    .name = "sim",
    .close = close_sim,
    .device_count = device_count,
    .device_info = device_info,
    .memory_info = memory_info,
    .peer_capable = peer_capable,
    .peer_enable = peer_enable,
    .device_alloc = sim_device_alloc,
    .device_free = sim_device_free,
    .host_alloc = sim_host_alloc,
    .host_free = sim_host_free,
    .stream_create = sim_stream_create,
    .stream_destroy = sim_stream_destroy,
    .stream_query = sim_stream_query,
    .stream_wait = sim_stream_wait,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .event_record = sim_event_record,
    .event_query = sim_event_query,
    .event_elapsed = sim_event_elapsed,
    .copy = sim_copy,
    .fill = sim_fill,
    .launch = sim_launch,
    .event_wait = sim_event_wait,
    .pageable_alloc = sim_pageable_alloc,
    .clock = read_clock,
    .host_access = host_access,
    .capture_begin = sim_capture_begin,
    .capture_end = sim_capture_end,
    .graph_launch = sim_graph_launch,
    .graph_destroy = sim_graph_destroy,
};

static int check_config(const xd_sim_config *config, xd_error *err)
{
    static const char operation[] = "sim_create";
    if (config->device_count < 1 || config->device_count > MOST_DEVICES)
        return xd_fail(err, XD_INVALID, 0, operation, "device_count is %d; allowed: 1 to %d", config->device_count,
                       MOST_DEVICES);
    for (int i = 0; i < config->device_count; i++) {
        const xd_sim_device *is = &config->devices[i];
        if (!is->name || !is->arch || !is->memory || !is->memory_rate || !is->up_rate || !is->down_rate)
            return xd_fail(err, XD_INVALID, 0, operation,
                           "device %d: name, arch, memory, memory_rate, up_rate and down_rate must be given", i);
    }
    int pairs = config->device_count * config->device_count;
    bool all = config->unpeered != XD_SIM_UNPEERED_REFUSED;
    for (int i = 0; i < pairs; i++)
        if ((config->peers[i].capable || all) && !config->peers[i].rate)
            return xd_fail(err, XD_INVALID, 0, operation, "peers %d to %d: the rate is 0", i / config->device_count,
                           i % config->device_count);
    return XD_OK;
}

static void name_engines(sim *s)
{
    for (int i = 0; i < s->device_count; i++) {
        s->devices[i].compute = (sim_engine){.kind = XD_SIM_ON_COMPUTE, .device = i, .peer = XD_HOST};
        s->devices[i].in = (sim_engine){.kind = XD_SIM_ON_IN, .device = i, .peer = XD_HOST};
        s->devices[i].out = (sim_engine){.kind = XD_SIM_ON_OUT, .device = i, .peer = XD_HOST};
        for (int j = 0; j < s->device_count; j++)
            s->links[i * s->device_count + j] = (sim_engine){.kind = XD_SIM_ON_LINK, .device = i, .peer = j};
    }
}

static int copy_devices(sim *s, const xd_sim_config *config)
{
    for (int i = 0; i < s->device_count; i++) {
        sim_device *at = &s->devices[i];
        at->is = config->devices[i];
        at->is.name = strdup(config->devices[i].name);
        at->is.arch = strdup(config->devices[i].arch);
        if (!at->is.name || !at->is.arch)
            return XD_NO_HOST_MEMORY;
    }
    return XD_OK;
}

int xd_sim_create(xd_driver **out, const xd_sim_config *config, xd_error *err)
{
    int status = check_config(config, err);
    if (status)
        return status;
    sim *s = calloc(1, sizeof *s);
    if (!s)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "sim_create", "no host memory for the machine");
    size_t count = (size_t)config->device_count, pairs = count * count;
    s->driver = table;
    s->config = *config;
    s->device_count = config->device_count;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->idle, NULL);
    sim_table_init(&s->stream_table, 1);
    sim_table_init(&s->event_table, 2);
    sim_table_init(&s->graph_table, 3);
    s->devices = calloc(count, sizeof *s->devices);
    s->peers = calloc(pairs, sizeof *s->peers);
    s->peer_on = calloc(pairs, sizeof *s->peer_on);
    s->links = calloc(pairs, sizeof *s->links);
    if (!s->devices || !s->peers || !s->peer_on || !s->links || copy_devices(s, config)) {
        close_sim(&s->driver);
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "sim_create", "no host memory for %zu devices", count);
    }
    memcpy(s->peers, config->peers, pairs * sizeof *s->peers);
    name_engines(s);
    status = sim_faults_open(s, config, err);
    if (status) {
        close_sim(&s->driver);
        return status;
    }
    *out = &s->driver;
    return XD_OK;
}
