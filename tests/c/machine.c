#include "machine.h"

#include "check.h"

#include <stdlib.h>

#define US 1000u
#define GB UINT64_C(1000000000)
#define MIB (UINT64_C(1) << 20)

machine *machine_make(int devices)
{
    machine *m = calloc(1, sizeof *m);
    CHECK(m && devices <= MACHINE_DEVICES);
    for (int i = 0; i < devices; i++)
        m->devices[i] = (xd_sim_device){
            .name = "test",
            .arch = "sim",
            .memory = 64 * MIB,
            .memory_rate = 100 * GB,
            .up_rate = 10 * GB,
            .down_rate = 10 * GB,
        };
    for (int i = 0; i < devices * devices; i++)
        m->peers[i] = (xd_sim_peer){.capable = 1, .rate = 20 * GB};
    m->config = (xd_sim_config){
        .device_count = devices,
        .devices = m->devices,
        .peers = m->peers,
        .peer_limit = -1,
        .pinned = 256 * MIB,
        .costs = {.copy = US, .fill = US, .launch = US, .record = US, .wait = US, .query = US, .sync = US, .alloc = US},
    };
    return m;
}

xd_sim_peer *machine_peer(machine *m, int device, int peer)
{
    return &m->peers[device * m->config.device_count + peer];
}

xd_driver *machine_driver(const machine *m)
{
    xd_driver *driver;
    xd_error err;
    OK(xd_sim_create(&driver, &m->config, &err));
    return driver;
}

xd_driver *machine_jumbled(int devices, uint64_t seed)
{
    machine *m = machine_make(devices);
    m->config.costs = (xd_sim_costs){
        .copy = 100, .fill = 100, .launch = 100, .record = 50, .wait = 50, .query = 50, .sync = 500, .alloc = 100};
    m->config.hop = 500;
    m->config.seed = seed;
    m->config.jitter = 300;
    m->config.delay = 20 * US;
    for (int i = 0; i < devices; i++)
        m->devices[i].latency = US;
    xd_driver *driver = machine_driver(m);
    free(m);
    return driver;
}

xd_runtime *machine_runtime(const machine *m)
{
    xd_runtime *runtime;
    xd_error err;
    OK(xd_runtime_open(&runtime, machine_driver(m), NULL, &err));
    return runtime;
}
