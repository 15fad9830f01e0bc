# Buffer, Ring, Link and Throttle.

PATHS = {"direct": XD_DIRECT, "staged": XD_STAGED, "by_size": XD_BY_SIZE}


@cython.no_gc_clear
cdef class Buffer:
    """Memory of a device, or page-locked memory of the host; from Runtime.buffer(). `address` and `nbytes` tell where.

    memoryview() and NumPy see its bytes, writable, where the host can: page-locked memory and simulated devices;
    BufferError elsewhere.
    """

    cdef Buffer open(self, Runtime runtime, int device, nbytes, bint managed):
        cdef xd_error err
        cdef xd_runtime *parent = runtime.alive()
        cdef xd_buffer *out = NULL
        cdef uint64_t size
        cdef int status
        if nbytes < 0:
            raise errors.InvalidArgument(f"nbytes is {nbytes}; 0 or more is allowed")
        size = nbytes
        with nogil:
            status = xd_buffer_open(&out, parent, device, size, &err)
        check(status, &err)
        self.ptr = out
        self.at, self.room = xd_buffer_address(out), xd_buffer_bytes(out)
        self.runtime = runtime
        self.managed = managed
        return self

    cdef xd_buffer *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the buffer is closed")
        return self.ptr

    def close(self):
        """Frees it: no queued work may use it any more. Raises Busy while a memoryview or NumPy array sees it."""
        if self.ptr == NULL:
            return
        if self.exports:
            raise errors.Busy(f"the buffer is still exported to {self.exports} memoryviews or NumPy arrays")
        with nogil:
            xd_buffer_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            if not self.managed:
                leaked(self)
            self.close()

    def __repr__(self):
        if self.ptr == NULL:
            return "<pyxdev.Buffer, closed>"
        place = "page-locked host memory" if self.device == HOST else f"device {self.device}"
        return f"<pyxdev.Buffer {self.nbytes} bytes, {place}>"

    @property
    def device(self):
        """The device's number, or HOST."""
        return xd_buffer_device(self.alive())

    @property
    def address(self):
        """Where it begins, on its device."""
        return xd_buffer_address(self.alive())

    @property
    def nbytes(self):
        """Its size."""
        return xd_buffer_bytes(self.alive())

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef xd_buffer *buffer = self.alive()
        if xd_buffer_device(buffer) != HOST and self.runtime.backend != "sim":
            raise BufferError(f"memory of a {self.runtime.backend} device cannot be read by the host; copy it first")
        self.length = xd_buffer_bytes(buffer)
        view.buf = <void *><uintptr_t>xd_buffer_address(buffer)
        view.obj = self
        view.len = self.length
        view.itemsize = 1
        view.readonly = 0
        view.ndim = 1
        view.format = "B"
        view.shape = &self.length
        view.strides = &view.itemsize
        view.suboffsets = NULL
        view.internal = NULL
        with cython.critical_section(self):
            self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        with cython.critical_section(self):
            self.exports -= 1


@cython.no_gc_clear
cdef class Link:
    """Copies from device `src` to device `dst`, directly or through page-locked memory; from Runtime.link()."""

    cdef Link open(self, Runtime runtime, int src, int dst, const xd_link_options *options):
        cdef xd_error err
        cdef xd_runtime *parent = runtime.alive()
        cdef xd_link *out = NULL
        cdef int status
        with nogil:
            status = xd_link_open(&out, parent, src, dst, options, &err)
        check(status, &err)
        self.ptr = out
        self.runtime = runtime
        self.src = src
        self.dst = dst
        return self

    cdef xd_link *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the link is closed")
        return self.ptr

    def close(self):
        """Waits until no copy is in flight."""
        with nogil:
            xd_link_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            leaked(self)
            self.close()

    def __repr__(self):
        return f"<pyxdev.Link {self.src} to {self.dst}{', closed' if self.ptr == NULL else ''}>"

    def copy(self, uint64_t dst, uint64_t src, uint64_t width, *, uint64_t height=1, uint64_t dst_pitch=0,
             uint64_t src_pitch=0, Event source_ready=None, Event dest_free=None, Event released=None,
             Event arrived=None):
        """Queues a copy of `height` rows of `width` bytes from address src to address dst; the host does not wait.

        source_ready, dest_free: events that it waits for. released: recorded when the source has been read; arrived:
        when the destination is written. dst_pitch, src_pitch: bytes from row to row; 0: width. After an error nothing
        of the copy is in flight.
        """
        cdef xd_error err
        cdef xd_link *link = self.alive()
        cdef xd_copy copy
        cdef int status
        copy.dst, copy.src = dst, src
        copy.width, copy.height = width, height
        copy.dst_pitch, copy.src_pitch = dst_pitch, src_pitch
        copy.source_ready = NULL if source_ready is None else source_ready.alive()
        copy.dest_free = NULL if dest_free is None else dest_free.alive()
        copy.released = NULL if released is None else released.alive()
        copy.arrived = NULL if arrived is None else arrived.alive()
        with nogil:
            status = xd_link_copy(link, &copy, &err)
        check(status, &err)

    cdef int move(self, uint64_t dst, uint64_t src, uint64_t nbytes, Event ready, Event free, Event released,
                  Event arrived) except -1:
        """copy(), for a row of bytes."""
        cdef xd_error err
        cdef xd_link *link = self.alive()
        cdef xd_copy copy
        cdef int status
        copy.dst, copy.src = dst, src
        copy.width, copy.height, copy.dst_pitch, copy.src_pitch = nbytes, 1, 0, 0
        copy.source_ready = NULL if ready is None else ready.alive()
        copy.dest_free = NULL if free is None else free.alive()
        copy.released = NULL if released is None else released.alive()
        copy.arrived = NULL if arrived is None else arrived.alive()
        with nogil:
            status = xd_link_copy(link, &copy, &err)
        return check(status, &err)

    cdef bint is_direct(self, uint64_t nbytes) except -1:
        return xd_link_path(self.alive(), nbytes) == XD_DIRECT

    def drain(self):
        """Waits until no copy is in flight. Raises DeviceFault if that does not come about."""
        cdef xd_error err
        cdef xd_link *link = self.alive()
        cdef int status
        with nogil:
            status = xd_link_drain(link, &err)
        check(status, &err)

    def path(self, uint64_t nbytes):
        """"direct" or "staged": the way that a copy of nbytes takes."""
        return "direct" if self.is_direct(nbytes) else "staged"

    def tile(self, uint64_t nbytes):
        """Bytes of a tile in a staged copy of nbytes."""
        return xd_link_tile(self.alive(), nbytes)

    @property
    def pinned_bytes(self):
        """Bytes of page-locked memory that it holds."""
        return xd_link_pinned_bytes(self.alive())


cdef class Tile:
    cdef xd_tile tile

    @property
    def address(self):
        return <uintptr_t>self.tile.address

    @property
    def nbytes(self):
        return self.tile.bytes

    @property
    def index(self):
        return self.tile.index

    def __repr__(self):
        return f"<pyxdev.Tile {self.index}, {self.nbytes} bytes>"


@cython.no_gc_clear
cdef class Ring:
    """Tiles of host memory, handed out in turn, each once its last use has ended; from Runtime.ring()."""

    cdef xd_ring *ptr
    cdef readonly Runtime runtime
    cdef object __weakref__

    cdef Ring open(self, Runtime runtime, unsigned tiles, uint64_t tile_bytes, bint pageable):
        cdef xd_error err
        cdef xd_runtime *parent = runtime.alive()
        cdef xd_ring *out = NULL
        cdef int status
        with nogil:
            if pageable:
                status = xd_ring_open_pageable(&out, parent, tiles, tile_bytes, &err)
            else:
                status = xd_ring_open(&out, parent, tiles, tile_bytes, &err)
        check(status, &err)
        self.ptr = out
        self.runtime = runtime
        return self

    cdef xd_ring *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the ring is closed")
        return self.ptr

    def close(self):
        """Waits for tiles in flight."""
        with nogil:
            xd_ring_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            leaked(self)
            self.close()

    def __repr__(self):
        if self.ptr == NULL:
            return "<pyxdev.Ring, closed>"
        return f"<pyxdev.Ring {self.tiles} tiles of {self.tile_bytes} bytes>"

    @property
    def tiles(self):
        """How many there are."""
        return xd_ring_tiles(self.alive())

    @property
    def tile_bytes(self):
        """The size of each."""
        return xd_ring_tile_bytes(self.alive())

    @property
    def pageable(self):
        """Whether they are not page-locked."""
        return bool(xd_ring_is_pageable(self.alive()))

    def acquire(self, timeout=None):
        """The next Tile, once the host may write it; None when `timeout` seconds passed first. Ctrl-C is seen."""
        cdef xd_error err
        cdef xd_ring *ring = self.alive()
        cdef Tile tile = Tile.__new__(Tile)
        cdef uint64_t deadline = after(self.runtime.alive(), nanoseconds(timeout))
        cdef uint64_t period
        cdef int got = 0
        cdef int status
        while True:
            period = until(self.runtime.alive(), deadline)
            with nogil:
                status = xd_ring_acquire(ring, period, &tile.tile, &got, &err)
            check(status, &err)
            if got:
                return tile
            PyErr_CheckSignals()
            if period == 0:
                return None

    def submit(self, Tile tile not None, Stream reader not None):
        """The tile is free when the stream `reader` gets here."""
        cdef xd_error err
        cdef xd_ring *ring = self.alive()
        cdef xd_stream *stream = reader.alive()
        cdef int status
        with nogil:
            status = xd_ring_submit(ring, &tile.tile, stream, &err)
        check(status, &err)

    def release(self, Tile tile not None):
        """Hands a tile back that was not used."""
        xd_ring_release(self.alive(), &tile.tile)

    def drain(self):
        """Waits until all tiles are free."""
        cdef xd_error err
        cdef xd_ring *ring = self.alive()
        cdef int status
        with nogil:
            status = xd_ring_drain(ring, &err)
        check(status, &err)


@cython.no_gc_clear
cdef class Throttle:
    """Bounds how many microbatches are in flight: `limit`; from Runtime.throttle()."""

    cdef xd_throttle *ptr
    cdef readonly Runtime runtime
    cdef readonly unsigned limit
    cdef list exits  # what retire_at was given, for as long as it may be waited for
    cdef unsigned turn
    cdef object __weakref__

    cdef Throttle open(self, Runtime runtime, unsigned limit):
        cdef xd_error err
        cdef xd_throttle *out = NULL
        check(xd_throttle_open(&out, runtime.alive(), limit, &err), &err)
        self.ptr = out
        self.runtime = runtime
        self.limit = limit
        self.exits = [None] * limit
        return self

    cdef xd_throttle *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the throttle is closed")
        return self.ptr

    def close(self):
        """Gives it back."""
        with nogil:
            xd_throttle_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            leaked(self)
            self.close()

    def __repr__(self):
        return f"<pyxdev.Throttle limit {self.limit}{', closed' if self.ptr == NULL else ''}>"

    def admit(self, timeout=None):
        """Takes a place, once there is one; False when `timeout` seconds passed first. Ctrl-C is seen."""
        cdef xd_error err
        cdef xd_throttle *throttle = self.alive()
        cdef uint64_t deadline = after(self.runtime.alive(), nanoseconds(timeout))
        cdef uint64_t period
        cdef int admitted = 0
        cdef int status
        while True:
            period = until(self.runtime.alive(), deadline)
            with nogil:
                status = xd_throttle_admit(throttle, period, &admitted, &err)
            check(status, &err)
            if admitted:
                return True
            PyErr_CheckSignals()
            if period == 0:
                return False

    def retire(self, Stream stream not None):
        """The oldest place that has no end yet is left when the stream gets here."""
        cdef xd_error err
        cdef xd_throttle *throttle = self.alive()
        cdef xd_stream *exit = stream.alive()
        cdef int status
        with nogil:
            status = xd_throttle_retire(throttle, exit, &err)
        check(status, &err)
        self.retired(None)

    def retire_at(self, Lease lease not None):
        """The same for an event that has been recorded already, lent for as long as it is waited for."""
        cdef xd_error err
        cdef xd_throttle *throttle = self.alive()
        cdef xd_event *exit = (<Event?>lease.item).alive()
        cdef int status
        with nogil:
            status = xd_throttle_retire_at(throttle, exit, &err)
        check(status, &err)
        self.retired(lease)

    cdef int retired(self, exit) except -1:
        """So many retirements ago is long enough for a place to have been left."""
        self.exits[self.turn] = exit
        self.turn = (self.turn + 1) % self.limit
        return 0

    def withdraw(self):
        """Gives the newest place back: the microbatch never ran."""
        xd_throttle_withdraw(self.alive())

    @property
    def in_flight(self):
        """How many places are taken."""
        cdef xd_error err
        cdef xd_throttle *throttle = self.alive()
        cdef unsigned count = 0
        cdef int status
        with nogil:
            status = xd_throttle_in_flight(throttle, &count, &err)
        check(status, &err)
        return count

    @property
    def blocked(self):
        """Seconds spent waiting in admit() so far."""
        return xd_throttle_blocked(self.alive()) * 1e-9


@cython.no_gc_clear
cdef class Lease:
    def __init__(self, item, list home not None):
        self.item = item
        self.home = home

    def __dealloc__(self):
        # Here and not in Python's __del__, where Ctrl-C could lose the item.
        if self.home is not None:
            self.home.append(self.item)

    def __repr__(self):
        return f"<pyxdev.Lease of {self.item!r}>"
