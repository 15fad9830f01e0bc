# Simulated devices. The machine comes as plain numbers from backends/sim.py, which has checked it.

cdef extern from "sim/sim.h" nogil:
    ctypedef struct xd_sim_device:
        const char *name
        const char *arch
        uint64_t memory, memory_rate, up_rate, down_rate, latency

    ctypedef struct xd_sim_peer:
        int capable
        int route
        uint64_t rate, latency

    ctypedef struct xd_sim_costs:
        uint64_t copy, fill, launch, record, wait, query, sync, alloc

    ctypedef struct xd_sim_config:
        int device_count
        const xd_sim_device *devices
        const xd_sim_peer *peers
        int peer_limit
        int unpeered
        uint64_t pinned, bus_rate, hop
        xd_sim_costs costs
        uint64_t seed, jitter, delay

    int xd_sim_create(xd_driver **out, const xd_sim_config *config, xd_error *err)
    void xd_sim_pass(xd_driver *sim, uint64_t ns)


cdef class SimDriver(Driver):
    def pass_time(self, seconds):
        """The submitting thread does something else for so many seconds of simulated time."""
        cdef uint64_t ns = nanoseconds(seconds)
        cdef xd_driver *driver = self.alive()
        with nogil:
            xd_sim_pass(driver, ns)


def sim_driver(machine):
    cdef xd_error err
    cdef xd_driver *out = NULL
    cdef list devices = list(machine["devices"])
    cdef list peers = list(machine["peers"])
    cdef size_t count = len(devices)
    if len(peers) != count * count:
        raise errors.InvalidArgument(f"peers has {len(peers)} entries; {count} devices take {count * count}")
    cdef xd_sim_device *device_table = <xd_sim_device *>PyMem_Malloc((count or 1) * sizeof(xd_sim_device))
    cdef xd_sim_peer *peer_table = <xd_sim_peer *>PyMem_Malloc((count * count or 1) * sizeof(xd_sim_peer))
    cdef list texts = []
    try:
        if device_table == NULL or peer_table == NULL:
            raise MemoryError
        for index, device in enumerate(devices):
            texts.append((device["name"].encode(), device["arch"].encode()))
            device_table[index] = xd_sim_device(
                name=<bytes>texts[index][0], arch=<bytes>texts[index][1], memory=device["memory"],
                memory_rate=device["memory_rate"], up_rate=device["up_rate"], down_rate=device["down_rate"],
                latency=device["latency"],
            )
        for index, peer in enumerate(peers):
            peer_table[index] = xd_sim_peer(
                capable=peer["capable"], route=peer["route"], rate=peer["rate"], latency=peer["latency"]
            )
        costs = machine["costs"]
        check(_create_sim(&out, xd_sim_config(
            device_count=<int>count, devices=device_table, peers=peer_table, peer_limit=machine["peer_limit"],
            unpeered=machine["unpeered"], pinned=machine["pinned"], bus_rate=machine["bus_rate"], hop=machine["hop"],
            costs=xd_sim_costs(
                copy=costs["copy"], fill=costs["fill"], launch=costs["launch"], record=costs["record"],
                wait=costs["wait"], query=costs["query"], sync=costs["sync"], alloc=costs["alloc"],
            ),
            seed=machine["seed"], jitter=machine["jitter"], delay=machine["delay"],
        ), &err), &err)
    finally:
        PyMem_Free(device_table)
        PyMem_Free(peer_table)
    cdef SimDriver driver = SimDriver.__new__(SimDriver)
    driver.adopt(out)
    return driver


cdef int _create_sim(xd_driver **out, xd_sim_config config, xd_error *err) noexcept nogil:
    return xd_sim_create(out, &config, err)
