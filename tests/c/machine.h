/* A simulated machine for C tests: round numbers, all devices equal, peer access between all of them. */
#ifndef MACHINE_H
#define MACHINE_H

#include "sim/sim.h"

enum { MACHINE_DEVICES = 10 };

typedef struct machine {
    xd_sim_config config;
    xd_sim_device devices[MACHINE_DEVICES];
    xd_sim_peer peers[MACHINE_DEVICES * MACHINE_DEVICES];
} machine;

/* 64 MiB a device, 256 MiB page-locked; 10 GB/s to and from the host, 20 GB/s between devices, 100 GB/s within; no
   latency, no limit of the bus; every call costs 1 us of the submitting thread. */
machine *machine_make(int devices); /* change what it says, then take a driver or a runtime; free() it */
xd_sim_peer *machine_peer(machine *m, int device, int peer);
xd_driver *machine_driver(const machine *m);
xd_runtime *machine_runtime(const machine *m);

/* A machine of which the seed decides when bytes move and how much later than declared an operation ends: what no wait
   orders comes in any order. Submitting costs little, so that much is in flight. */
xd_driver *machine_jumbled(int devices, uint64_t seed);

#endif
