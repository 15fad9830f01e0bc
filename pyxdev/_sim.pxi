# Simulated devices. The machine comes as plain numbers from backends/sim.py, which has checked it.

cdef extern from "sim/sim.h" nogil:
    ctypedef struct xd_sim_device:
        const char *name
        const char *arch
        uint64_t memory, memory_rate, up_rate, down_rate, latency
        int integrated

    ctypedef struct xd_sim_peer:
        int capable
        int route
        uint64_t rate, latency

    ctypedef struct xd_sim_costs:
        uint64_t copy, fill, launch, record, wait, query, sync, alloc

    ctypedef struct xd_sim_fault:
        int kind
        int from_ "from"
        int to
        uint64_t first, count, value

    const char *xd_sim_fault_name(int kind)

    ctypedef struct xd_sim_config:
        int device_count
        const xd_sim_device *devices
        const xd_sim_peer *peers
        int peer_limit
        int unpeered
        uint64_t pinned, bus_rate, hop
        xd_sim_costs costs
        uint64_t seed, jitter, delay
        const xd_sim_fault *faults
        size_t fault_count
        int check
        int trace

    ctypedef struct xd_sim_span:
        int engine, device, peer
        uint64_t operation, after
        unsigned stream
        uint64_t submitted, start, end, bytes
        char label[48]

    int xd_sim_create(xd_driver **out, const xd_sim_config *config, xd_error *err)
    void xd_sim_pass(xd_driver *sim, uint64_t ns)
    void xd_sim_watch(xd_driver *sim, int on)
    size_t xd_sim_violations(xd_driver *sim, xd_error *out, size_t room)
    size_t xd_sim_trace(xd_driver *sim, xd_sim_span *out, size_t first, size_t room)

ENGINES = ("host", "compute", "in", "out", "link")


cdef class SimDriver(Driver):
    def pass_time(self, seconds):
        """The submitting thread does something else for so many seconds of simulated time."""
        cdef uint64_t ns = nanoseconds(seconds)
        cdef xd_driver *driver = self.alive()
        with nogil:
            xd_sim_pass(driver, ns)

    def watch(self, bint on):
        xd_sim_watch(self.alive(), on)

    def violations(self):
        cdef xd_error *found = <xd_error *>PyMem_Malloc(64 * sizeof(xd_error))
        if found == NULL:
            raise MemoryError
        try:
            count = xd_sim_violations(self.alive(), found, 64)
            return [found[index].text.decode("utf-8", "replace") for index in range(min(count, 64))]
        finally:
            PyMem_Free(found)

    def trace(self):
        cdef xd_sim_span[64] spans
        cdef size_t count = 0, first, index
        out = []
        while True:
            first = len(out)
            count = xd_sim_trace(self.alive(), spans, first, 64)
            if count == first:
                return out
            for index in range(min(count - first, 64)):
                span = &spans[index]
                out.append((
                    ENGINES[span.engine], span.device, span.peer, span.operation, span.after, span.stream,
                    span.submitted, span.start, span.end, span.bytes, span.label.decode("utf-8", "replace"),
                ))


def sim_faults():
    """The names of the faults a machine can have; see XD_SIM_FAULTS in native/sim/sim.h."""
    names = []
    while xd_sim_fault_name(<int>len(names)) != NULL:
        names.append(xd_sim_fault_name(<int>len(names)).decode())
    return names


cdef class _Tables:
    """The arrays of a configuration, and the texts they point to."""
    cdef xd_sim_device *devices
    cdef xd_sim_peer *peers
    cdef xd_sim_fault *faults
    cdef list texts

    def __cinit__(self, list devices, list peers, list faults):
        cdef Py_ssize_t count = len(devices)
        if len(peers) != count * count:
            raise errors.InvalidArgument(f"peers has {len(peers)} entries; {count} devices take {count * count}")
        self.devices = <xd_sim_device *>PyMem_Malloc(max(1, count) * sizeof(xd_sim_device))
        self.peers = <xd_sim_peer *>PyMem_Malloc(max(1, count * count) * sizeof(xd_sim_peer))
        self.faults = <xd_sim_fault *>PyMem_Malloc(max(1, len(faults)) * sizeof(xd_sim_fault))
        if self.devices == NULL or self.peers == NULL or self.faults == NULL:
            raise MemoryError
        self.texts = []
        for index, device in enumerate(devices):
            name, arch = device["name"].encode(), device["arch"].encode()
            self.texts += [name, arch]
            self.devices[index] = xd_sim_device(
                name=<bytes>name, arch=<bytes>arch, memory=device["memory"], memory_rate=device["memory_rate"],
                up_rate=device["up_rate"], down_rate=device["down_rate"], latency=device["latency"],
                integrated=device["integrated"],
            )
        for index, peer in enumerate(peers):
            self.peers[index] = xd_sim_peer(
                capable=peer["capable"], route=peer["route"], rate=peer["rate"], latency=peer["latency"]
            )
        for index, fault in enumerate(faults):
            self.faults[index].kind = fault["kind"]
            self.faults[index].from_ = fault["from"]
            self.faults[index].to = fault["to"]
            self.faults[index].first = fault["first"]
            self.faults[index].count = fault["count"]
            self.faults[index].value = fault["value"]

    def __dealloc__(self):
        PyMem_Free(self.devices)
        PyMem_Free(self.peers)
        PyMem_Free(self.faults)


def sim_driver(machine):
    cdef xd_error err
    cdef xd_driver *out = NULL
    cdef list faults = list(machine["faults"])
    cdef list devices = list(machine["devices"])
    cdef _Tables tables = _Tables(devices, list(machine["peers"]), faults)
    cdef xd_sim_config config
    costs = machine["costs"]
    memset(&config, 0, sizeof(config))
    config.device_count = <int>len(devices)
    config.devices = tables.devices
    config.peers = tables.peers
    config.peer_limit = machine["peer_limit"]
    config.unpeered = machine["unpeered"]
    config.pinned = machine["pinned"]
    config.bus_rate = machine["bus_rate"]
    config.hop = machine["hop"]
    config.costs = xd_sim_costs(
        copy=costs["copy"], fill=costs["fill"], launch=costs["launch"], record=costs["record"], wait=costs["wait"],
        query=costs["query"], sync=costs["sync"], alloc=costs["alloc"],
    )
    config.seed = machine["seed"]
    config.jitter = machine["jitter"]
    config.delay = machine["delay"]
    config.faults = tables.faults
    config.fault_count = <size_t>len(faults)
    config.check = machine["check"]
    config.trace = machine["trace"]
    check(xd_sim_create(&out, &config, &err), &err)
    cdef SimDriver driver = SimDriver.__new__(SimDriver)
    driver.adopt(out)
    return driver
