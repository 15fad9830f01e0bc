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
    """One driver, opened: devices, and everything made on them. pyxdev.open() gives one; use it in a with statement, or
    close it.

    Devices are numbered from 0; HOST stands for page-locked host memory. Times are seconds on the runtime's clock,
    sizes are bytes. Every call may raise what the driver reports: see pyxdev.errors. After a fork the child's is of no
    use: Forked.
    """

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
        """Gives the driver back. Raises Busy, with their names, while streams, events, buffers and so on are open."""
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
        """Whether close() has been called."""
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
        """How many devices there are."""
        return xd_runtime_device_count(self.alive())

    def device_info(self, int device):
        """Name, uuid, PCI address, architecture, bytes of memory. Raises InvalidArgument for no such device."""
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
        """(free, total) bytes of a device."""
        cdef xd_error err
        cdef uint64_t free_bytes = 0
        cdef uint64_t total_bytes = 0
        check(xd_runtime_memory_info(self.alive(), device, &free_bytes, &total_bytes, &err), &err)
        return free_bytes, total_bytes

    def peer_capable(self, int device, int peer):
        """Whether the driver says that device can reach memory of peer. See topology for what has been verified."""
        cdef xd_error err
        cdef int capable = 0
        check(xd_runtime_peer_capable(self.alive(), device, peer, &capable, &err), &err)
        return bool(capable)

    def peer_enable(self, int device, int peer):
        """Lets device reach memory of peer, for good; False where the pair cannot, or the driver has no room left."""
        cdef xd_error err
        cdef int enabled = 0
        check(xd_runtime_peer_enable(self.alive(), device, peer, &enabled, &err), &err)
        return bool(enabled)

    def clock(self):
        """Seconds on the runtime's clock: monotonic host time, or simulated time."""
        return self.now()

    cdef double now(self) except -1:
        return xd_runtime_clock(self.alive()) * 1e-9

    @property
    def force_sync(self):
        """Whether the host itself waits where a stream should wait for an event of another device."""
        return bool(xd_runtime_forced_sync(self.alive()))

    @force_sync.setter
    def force_sync(self, bint on):
        xd_runtime_force_sync(self.alive(), on)

    def live(self):
        """Counts of open objects, and bytes of memory."""
        cdef xd_live counts
        xd_runtime_live(self.alive(), &counts)
        return Live(
            streams=counts.streams, events=counts.events, graphs=counts.graphs, buffers=counts.buffers,
            rings=counts.rings, links=counts.links, throttles=counts.throttles, readers=counts.readers,
            device_bytes=counts.device_bytes, pinned_bytes=counts.pinned_bytes,
        )

    def host_access(self, uintptr_t address, uint64_t nbytes, *, bint write):
        """The host is about to read or write page-locked memory. Checked on simulated devices: OrderViolation."""
        cdef xd_error err
        check(xd_host_access(self.alive(), <void *>address, nbytes, write, &err), &err)

    def stream(self, int device):
        """A new Stream of a device."""
        return (<Stream>Stream.__new__(Stream)).open(self, device)

    def adopt_stream(self, int device, uintptr_t handle):
        """A stream of somebody else by its vendor handle; close() leaves it alone. It must outlive this object."""
        return (<Stream>Stream.__new__(Stream)).open(self, device, handle)

    def event(self, *, bint timing=False):
        """A new Event. timing: elapsed_since() can be asked."""
        return (<Event>Event.__new__(Event)).open(self, timing)

    def buffer(self, int device, nbytes, *, bint managed=False):
        """nbytes of device memory, or of page-locked memory for HOST. managed: freed by collection without a warning.

        Raises OutOfMemory; InvalidArgument for fewer than 0 bytes.
        """
        return (<Buffer>Buffer.__new__(Buffer)).open(self, device, nbytes, managed)

    def link(self, int src, int dst, *, path="staged", direct_from=0, direct_to=0, max_bytes=0, tile_bytes=0, tiles=0,
             rate=0.0, gate=True):
        """A Link. path: "direct", "staged" or "by_size": direct from direct_from bytes to below direct_to (0: no end).

        Staged from a device to itself goes through the host as well, to try that path where there is one device only.
        Raises NoPeerAccess for a direct path where there is none.
        """
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

    def ring(self, tiles, tile_bytes, pageable=False):
        """A Ring of so many tiles of tile_bytes each. pageable: of memory that is not page-locked, for want of that:
        copies of it are slow, and each is waited for before the next. Raises OutOfMemory."""
        return (<Ring>Ring.__new__(Ring)).open(self, tiles, tile_bytes, pageable)

    def throttle(self, limit):
        """A Throttle of `limit` places."""
        return (<Throttle>Throttle.__new__(Throttle)).open(self, limit)
