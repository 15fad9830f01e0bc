# Stream, Graph and Event; Python functions as kernels of simulated devices.

cdef int run_python(void *arg) noexcept with gil:
    """A Python function in stream order, and who is told what it raises. Without him it is reported as unraisable and
    fails the device; so it does if he raises too."""
    run, failed = <tuple>arg
    try:
        try:
            run()
        except BaseException as failure:
            if failed is None:
                raise
            failed(failure)
    except BaseException as failure:
        PyErr_SetObject(type(failure), failure)
        PyErr_WriteUnraisable(run)
        return 1
    return 0


cdef void drop_python(void *arg) noexcept with gil:
    Py_DECREF(<object>arg)


@cython.no_gc_clear
cdef class Stream:
    """A queue of work on one device, in order; from Runtime.stream(). close() leaves queued work alone."""

    cdef Stream open(self, Runtime runtime, int device, uintptr_t handle=0):
        cdef xd_error err
        cdef xd_runtime *parent = runtime.alive()
        cdef xd_stream *out = NULL
        cdef int status
        with nogil:
            if handle:
                status = xd_stream_adopt(&out, parent, device, <void *>handle, &err)
            else:
                status = xd_stream_open(&out, parent, device, &err)
        check(status, &err)
        self.ptr = out
        self.runtime = runtime
        self.device = device
        self.adopted = handle != 0
        return self

    cdef xd_stream *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the stream is closed")
        return self.ptr

    def close(self):
        """Queued work still runs."""
        if self.tail is not None:
            self.tail.close()
            self.tail = None
        with nogil:
            xd_stream_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            if not self.adopted:
                leaked(self)
            self.close()

    def __repr__(self):
        return f"<pyxdev.Stream device {self.device}{', closed' if self.ptr == NULL else ''}>"

    @property
    def handle(self):
        """The vendor's stream, as a number."""
        return <uintptr_t>xd_stream_handle(self.alive())

    def __cuda_stream__(self):
        if self.runtime.backend != "cuda":
            raise AttributeError(f"streams of the {self.runtime.backend} backend are not CUDA streams")
        return 0, self.handle

    def wait(self, Event event not None):
        """What is queued from now on runs after the event's last record. The host does not wait, unless force_sync."""
        self.wait_for(event)

    cdef int wait_for(self, Event event) except -1:
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef xd_event *awaited = event.alive()
        cdef int status
        with nogil:
            status = xd_stream_wait(stream, awaited, &err)
        return check(status, &err)

    def idle(self):
        """Whether everything queued has run."""
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef int idle = 0
        cdef int status
        with nogil:
            status = xd_stream_query(stream, &idle, &err)
        check(status, &err)
        return bool(idle)

    def synchronize(self, timeout=None):
        """Waits for everything queued so far; False when `timeout` seconds passed first."""
        cdef Event tail, made = self.runtime.event() if self.tail is None else None
        with cython.critical_section(self):  # of free-threaded Python; the GIL does as much
            if self.tail is None:
                self.tail = made
            tail = self.tail
        tail.record(self)
        return tail.wait(timeout)

    def begin_capture(self):
        """What this thread queues here from now on is recorded and does not run. Until end_capture() it must not wait,
        ask, allocate or free; nor may the stream wait for events of others."""
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef int status
        with nogil:
            status = xd_graph_begin(stream, &err)
        check(status, &err)

    def end_capture(self):
        """The Graph of what was captured. Where something was not allowed it raises, and ends the capture too."""
        return (<Graph>Graph.__new__(Graph)).end(self)

    def fill(self, uint64_t address, int byte, uint64_t nbytes):
        """Queues writing one byte, 0 to 255, to nbytes from an address on."""
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef int status
        with nogil:
            status = xd_stream_fill(stream, address, byte, nbytes, &err)
        check(status, &err)

    def copy(self, uint64_t dst, uint64_t src, uint64_t width, *, int dst_device, int src_device, uint64_t height=1,
             uint64_t dst_pitch=0, uint64_t src_pitch=0):
        """Queues a copy of `height` rows of `width` bytes on the device, or between it and the host or a peer.

        dst, src: addresses. dst_device, src_device: their devices, or HOST. dst_pitch, src_pitch: bytes from row to
        row; 0: width.
        """
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef xd_transfer transfer
        cdef int status
        transfer.dst_device, transfer.src_device = dst_device, src_device
        transfer.dst, transfer.src = dst, src
        transfer.width, transfer.height = width, height
        transfer.dst_pitch, transfer.src_pitch = dst_pitch, src_pitch
        with nogil:
            status = xd_stream_copy(stream, &transfer, &err)
        check(status, &err)

    cdef int copy_here(self, uint64_t dst, uint64_t src, uint64_t nbytes) except -1:
        """copy(), of a row of bytes within the device."""
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef xd_transfer transfer
        cdef int status
        transfer.dst_device = transfer.src_device = self.device
        transfer.dst, transfer.src, transfer.width = dst, src, nbytes
        transfer.height, transfer.dst_pitch, transfer.src_pitch = 1, 0, 0
        with nogil:
            status = xd_stream_copy(stream, &transfer, &err)
        return check(status, &err)

    def launch(self, run not None, *, double cost=0.0, label="", reads=(), writes=(), failed=None):
        """A Python function as a kernel in stream order, simulated devices only. cost: seconds of the compute engine.
        reads, writes: (address, bytes) on this stream's device. The function must not wait for a device. failed: takes
        an exception that leaves it, Ctrl-C at its very first instruction included; without, that is a device fault.

        Raises Unsupported on other devices.
        """
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef xd_kernel kernel
        cdef xd_range *ranges = NULL
        cdef size_t index = 0
        cdef int status
        cdef bytes text = label.encode()
        cdef tuple kept = (run, failed)
        if self.runtime.backend != "sim":
            # Driver threads must not run Python: the driver's lock and the GIL would be taken in both orders.
            raise errors.Unsupported(f"Python kernels run on simulated devices only, not on {self.runtime.backend}")
        if not cost >= 0:
            raise errors.InvalidArgument(f"cost is {cost!r}; seconds from 0 up are allowed")
        ranges = <xd_range *>PyMem_Malloc(max(1, len(reads) + len(writes)) * sizeof(xd_range))
        if ranges == NULL:
            raise MemoryError
        try:
            for written, accesses in ((0, reads), (1, writes)):
                for address, nbytes in accesses:
                    ranges[index].device = self.device
                    ranges[index].address, ranges[index].bytes = address, nbytes
                    ranges[index].write = written
                    index += 1
            kernel.run, kernel.drop, kernel.arg = run_python, drop_python, <void *>kept
            kernel.cost = <uint64_t>(cost * 1e9)
            kernel.label = text
            kernel.ranges, kernel.range_count = ranges, index
            Py_INCREF(kept)  # given back by drop_python, which is called on failure too
            with nogil:
                status = xd_stream_launch(stream, &kernel, &err)
            check(status, &err)
        finally:
            PyMem_Free(ranges)

    cdef int start(self, const xd_kernel *kernel) except -1:
        """Takes the kernel over, also where it fails."""
        cdef xd_error err
        cdef xd_stream *stream
        cdef int status
        try:
            stream = self.alive()
        except BaseException:
            kernel.drop(kernel.arg)
            raise
        with nogil:
            status = xd_stream_launch(stream, kernel, &err)
        return check(status, &err)

    cdef int call(self, xd_function function, void *const *inputs, const uint64_t *sizes, void *const *outputs,
                  void *user) except? -1:
        """What the function returned."""
        cdef xd_error err
        cdef xd_stream *stream = self.alive()
        cdef int code = 0
        cdef int status
        with nogil:
            status = xd_stream_call(stream, function, inputs, sizes, outputs, user, &code, &err)
        check(status, &err)
        return code


@cython.no_gc_clear
cdef class Graph:
    cdef xd_graph *ptr
    cdef readonly Runtime runtime
    cdef object __weakref__

    cdef Graph end(self, Stream stream):
        cdef xd_error err
        cdef xd_stream *captured = stream.alive()
        cdef xd_graph *out = NULL
        cdef int status
        with nogil:
            status = xd_graph_end(&out, captured, &err)
        check(status, &err)
        self.ptr = out
        self.runtime = stream.runtime
        return self

    cdef xd_graph *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the graph is closed")
        return self.ptr

    def close(self):
        with nogil:
            xd_graph_close(&self.ptr)

    @property
    def closed(self):
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            leaked(self)
            self.close()

    def __repr__(self):
        return f"<pyxdev.Graph{', closed' if self.ptr == NULL else f' device {self.device}'}>"

    @property
    def device(self):
        return xd_graph_device(self.alive())

    def launch(self, Stream stream not None):
        cdef xd_error err
        cdef xd_graph *graph = self.alive()
        cdef xd_stream *target = stream.alive()
        cdef int status
        with nogil:
            status = xd_graph_launch(graph, target, &err)
        check(status, &err)


@cython.no_gc_clear
cdef class Event:
    """A point in a stream, once recorded there; from Runtime.event(). It may be recorded again, on any device; waits
    that were queued keep the record that they found. Never recorded, it counts as done."""

    cdef Event open(self, Runtime runtime, bint timing):
        cdef xd_error err
        cdef xd_event *out = NULL
        check(xd_event_open(&out, runtime.alive(), timing, &err), &err)
        self.ptr = out
        self.runtime = runtime
        return self

    cdef xd_event *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the event is closed")
        return self.ptr

    def close(self):
        """Waits that were queued keep what they wait for."""
        with nogil:
            xd_event_close(&self.ptr)

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.ptr == NULL

    def __dealloc__(self):
        with nogil:
            xd_event_close(&self.ptr)

    def __repr__(self):
        return f"<pyxdev.Event{', closed' if self.ptr == NULL else f' device {self.device}'}>"

    @property
    def device(self):
        """Where it was recorded last."""
        return xd_event_device(self.alive())

    def record(self, Stream stream not None):
        """Stands for what the stream has queued so far, from now on."""
        self.record_in(stream)

    cdef int record_in(self, Stream stream) except -1:
        cdef xd_error err
        cdef xd_event *event = self.alive()
        cdef xd_stream *recorder = stream.alive()
        cdef int status
        with nogil:
            status = xd_event_record(event, recorder, &err)
        return check(status, &err)

    def done(self):
        """Whether that has run. Does not block."""
        cdef xd_error err
        cdef xd_event *event = self.alive()
        cdef int done = 0
        cdef int status
        with nogil:
            status = xd_event_query(event, &done, &err)
        check(status, &err)
        return bool(done)

    def wait(self, timeout=None):
        """Blocks without the GIL; Ctrl-C is seen. False when `timeout` seconds of the runtime's clock passed."""
        cdef xd_error err
        cdef xd_event *event = self.alive()
        cdef uint64_t deadline = after(self.runtime.alive(), nanoseconds(timeout))
        cdef uint64_t period
        cdef int done = 0
        cdef int status
        while True:
            period = until(self.runtime.alive(), deadline)
            with nogil:
                status = xd_event_wait(event, period, &done, &err)
            check(status, &err)
            if done:
                return True
            PyErr_CheckSignals()
            if period == 0:
                return False

    def elapsed_since(self, Event begin not None):
        """Seconds from `begin` to this. Raises InvalidArgument unless both have timing, one device, and are done."""
        cdef xd_error err
        cdef double seconds = 0
        check(xd_event_elapsed(begin.alive(), self.alive(), &seconds, &err), &err)
        return seconds
