# Runtime, and what it tells about devices and live objects.


class DeviceInfo:
    __slots__ = ("arch", "copy_engines", "integrated", "memory", "name", "pci", "uuid")

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)

    def __repr__(self):
        return f"<pyxdev.DeviceInfo {self.name!r} {self.arch} {self.memory >> 20} MiB>"


class Live:
    __slots__ = (
        "buffers", "device_bytes", "events", "graphs", "links", "pinned_bytes", "readers", "rings", "streams",
        "throttles",
    )

    def __init__(self, **counts):
        for name, count in counts.items():
            setattr(self, name, count)

    def any(self):
        return any(getattr(self, name) for name in self.__slots__)

    def __repr__(self):
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__ if getattr(self, name))
        return f"<pyxdev.Live {counts or 'nothing'}>"


@cython.no_gc_clear
cdef class Runtime:
    def __init__(self, Driver driver not None, *, bint force_sync=False):
        cdef xd_error err
        cdef xd_runtime_options options
        cdef xd_runtime *out = NULL
        cdef xd_driver *taken = driver.give()
        cdef int status
        if self.ptr != NULL:
            raise errors.InvalidArgument("this runtime is already open")
        options.force_sync = force_sync
        with nogil:
            status = xd_runtime_open(&out, taken, &options, &err)
        check(status, &err)
        driver.owned = NULL
        self.driver = driver
        self.ptr = out
        self.backend = xd_runtime_backend(out).decode()

    cdef xd_runtime *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the runtime is closed")
        return self.ptr

    def close(self):
        cdef xd_error err
        cdef int status
        if self.ptr == NULL:
            return
        with nogil:
            status = xd_runtime_close(&self.ptr, &err)
        check(status, &err)
        self.driver.retire()

    @property
    def closed(self):
        return self.ptr == NULL

    def __enter__(self):
        self.alive()
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if self.ptr != NULL and not self.managed:
            leaked(self)

    def __dealloc__(self):
        # Children hold their runtime, so they are gone by now, also when the interpreter exits.
        with nogil:
            xd_runtime_close(&self.ptr, NULL)

    def __repr__(self):
        if self.ptr == NULL:
            return f"<pyxdev.Runtime {self.backend or 'never opened'}, closed>"
        return f"<pyxdev.Runtime {self.backend}, {self.device_count} devices>"

    @property
    def device_count(self):
        return xd_runtime_device_count(self.alive())

    def device_info(self, int device):
        cdef xd_error err
        cdef xd_device_info info
        check(xd_runtime_device_info(self.alive(), device, &info, &err), &err)
        return DeviceInfo(
            name=info.name.decode("utf-8", "replace"),
            uuid=info.uuid.decode("utf-8", "replace"),
            pci=info.pci.decode("utf-8", "replace"),
            arch=info.arch.decode("utf-8", "replace"),
            memory=info.memory,
            integrated=bool(info.integrated),
            copy_engines=info.copy_engines,
        )

    def memory_info(self, int device):
        cdef xd_error err
        cdef uint64_t free_bytes = 0
        cdef uint64_t total_bytes = 0
        check(xd_runtime_memory_info(self.alive(), device, &free_bytes, &total_bytes, &err), &err)
        return free_bytes, total_bytes

    def peer_capable(self, int device, int peer):
        cdef xd_error err
        cdef int capable = 0
        check(xd_runtime_peer_capable(self.alive(), device, peer, &capable, &err), &err)
        return bool(capable)

    def peer_enable(self, int device, int peer):
        cdef xd_error err
        cdef int enabled = 0
        check(xd_runtime_peer_enable(self.alive(), device, peer, &enabled, &err), &err)
        return bool(enabled)

    def clock(self):
        return self.now()

    cdef double now(self) except -1:
        return xd_runtime_clock(self.alive()) * 1e-9

    @property
    def force_sync(self):
        return bool(xd_runtime_forced_sync(self.alive()))

    @force_sync.setter
    def force_sync(self, bint on):
        xd_runtime_force_sync(self.alive(), on)

    def live(self):
        cdef xd_live counts
        xd_runtime_live(self.alive(), &counts)
        return Live(
            streams=counts.streams, events=counts.events, graphs=counts.graphs, buffers=counts.buffers,
            rings=counts.rings, links=counts.links, throttles=counts.throttles, readers=counts.readers,
            device_bytes=counts.device_bytes, pinned_bytes=counts.pinned_bytes,
        )

    def host_access(self, uintptr_t address, uint64_t nbytes, *, bint write):
        cdef xd_error err
        check(xd_host_access(self.alive(), <void *>address, nbytes, write, &err), &err)

    def stream(self, int device):
        return (<Stream>Stream.__new__(Stream)).open(self, device)

    def adopt_stream(self, int device, uintptr_t handle):
        return (<Stream>Stream.__new__(Stream)).open(self, device, handle)

    def event(self, *, bint timing=False):
        return (<Event>Event.__new__(Event)).open(self, timing)

    def buffer(self, int device, nbytes, *, bint managed=False):
        return (<Buffer>Buffer.__new__(Buffer)).open(self, device, nbytes, managed)

    def link(self, int src, int dst, *, path="staged", direct_from=0, direct_to=0, max_bytes=0, tile_bytes=0, tiles=0,
             rate=0.0, gate=True):
        cdef xd_link_options options
        if path not in PATHS:
            raise errors.InvalidArgument(f"path is {path!r}; allowed: {', '.join(PATHS)}")
        options.path = PATHS[path]
        options.direct_from = direct_from
        options.direct_to = direct_to
        options.max_bytes = max_bytes
        options.tile_bytes = tile_bytes
        options.tiles = tiles
        options.rate = rate
        options.gate = gate
        return (<Link>Link.__new__(Link)).open(self, src, dst, &options)

    def ring(self, tiles, tile_bytes):
        return (<Ring>Ring.__new__(Ring)).open(self, tiles, tile_bytes)

    def throttle(self, limit):
        return (<Throttle>Throttle.__new__(Throttle)).open(self, limit)
