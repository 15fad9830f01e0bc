"""What the executor does for every stage of every microbatch, in Cython because it is done so often: the slots' events,
copies from stage to stage, outputs that are held until they have been read, memory for outputs, calls of C functions.

executor/stages.py has the order of it all; types stand in _pipeline.pyi.
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from collections import deque, namedtuple
from functools import partial
from weakref import ref as weakref

from pyxdev._native cimport Array, Buffer, Event, Lease, Link, Runtime, Stream
from pyxdev.xdev cimport XD_HOST, xd_function, xd_kernel, xd_range

from pyxdev import errors

include "_activation.pxi"


# ---- slots and events ------------------------------------------------------------------------------------------------

cdef class Events:
    cdef Runtime runtime
    cdef list made
    cdef list unused

    def __init__(self, Runtime runtime not None):
        self.runtime, self.made, self.unused = runtime, [], []

    cpdef Event take(self):
        try:  # two threads may be here
            return self.unused.pop()
        except IndexError:
            event = self.runtime.event()
            self.made.append(event)
            return event

    cpdef Lease lend(self):
        return lend(self.take(), self.unused)

    cpdef give_back(self, Event event):
        self.unused.append(event)

    def close(self):
        for event in self.made:
            event.close()


cdef Lease lend(item, list home):
    cdef Lease lease = Lease.__new__(Lease)
    lease.item, lease.home = item, home
    return lease


cdef class Slot:
    cdef public Buffer buffer
    cdef public uint64_t address
    cdef public uint64_t nbytes
    cdef public Event arrived
    cdef public Event free
    cdef readonly dict views
    cdef readonly dict graphs
    cdef Py_ssize_t turn  # who used it last
    cdef Lease lent

    def __init__(self, Event never not None):
        self.arrived, self.free, self.views, self.graphs = never, never, {}, {}

    def borrow(self, Lease free not None):
        self.lent, self.free = free, free.item


cdef class SlotRing:
    cdef readonly list ring
    cdef readonly list arrivals
    cdef readonly Event never

    def __init__(self, Runtime runtime not None, int depth, int in_flight):
        self.never = runtime.event()
        self.arrivals = [runtime.event() for _ in range(in_flight)]
        self.ring = [Slot(self.never) for _ in range(depth)]

    def of(self, Py_ssize_t turn):
        return self.ring[turn % len(self.ring)]

    def take(self, Py_ssize_t turn, uint64_t nbytes):
        cdef Slot slot = self.ring[turn % len(self.ring)]
        if slot.nbytes < nbytes:
            slot = self.enlarge(turn, nbytes)
        if slot.turn + len(self.arrivals) <= turn:  # that microbatch has left, or this one would not have been admitted
            slot.free = self.never
        slot.turn = turn
        slot.arrived = self.arrivals[turn % len(self.arrivals)]
        return slot


cdef class Blocks:
    cdef Runtime runtime
    cdef int device
    cdef object leaving
    cdef list made
    cdef list unused  # a lease that ends puts its buffer back here
    cdef public object instead

    def __init__(self, Runtime runtime not None, int device, leaving):
        self.runtime, self.device, self.leaving, self.made, self.unused = runtime, device, leaving, [], []

    cpdef Lease take(self, turn, uint64_t nbytes):
        return self.find(turn, nbytes) if self.instead is None else self.instead(turn, nbytes)

    cpdef Lease find(self, turn, uint64_t nbytes):
        cdef Buffer buffer
        cdef Py_ssize_t index
        for index in range(len(self.unused) - 1, -1, -1):
            buffer = self.unused[index]
            if buffer.room >= nbytes and buffer.ptr != NULL:
                buffer.given = False
                return lend(self.unused.pop(index), self.unused)
        while self.unused:  # too small for what comes now, or closed by the collector with a result in a cycle
            buffer = self.unused.pop()
            self.made.remove(buffer)
            self.leaving.add(buffer, turn)
        buffer = self.runtime.buffer(self.device, nbytes, managed=True)
        self.made.append(buffer)
        return lend(buffer, self.unused)

    def give(self, Activation output not None, Event complete not None):
        cdef list leases = output.keep if type(output.keep) is list else [output.keep]
        cdef Lease lease
        for lease in leases:
            if lease.home is not self.unused or (len(leases) > 1 and leases.count(lease) > 1):
                return None
        for lease in leases:
            (<Buffer>lease.item).given = True
        return [
            Array(
                self.runtime, self.device, output.address(offset), spec.shape, spec.dtype, nbytes=spec.nbytes,
                owner=leases[min(n, len(leases) - 1)], ready=complete,
            )
            for n, (offset, spec) in enumerate(zip(output.value.layout.offsets, output.value.layout.specs))
        ]

    @property
    def nbytes(self):
        return sum([(<Buffer>buffer).room for buffer in self.made if (<Buffer>buffer).ptr != NULL])

    def close(self):
        for buffer in self.unused:
            (<Buffer>buffer).given = False
        for buffer in self.made:
            if not (<Buffer>buffer).given:
                buffer.close()
        self.made.clear()
        self.unused.clear()
        self.unused = []  # the leases alone keep the old list now, and the last of them frees what was given away


# ---- outputs that are being read -------------------------------------------------------------------------------------

cdef class Outputs:
    cdef Stream stream
    cdef Events readers
    cdef int in_flight
    cdef int most
    cdef object held  # of (released, keep, the reader's turn, whether released is from readers)

    def __init__(self, Stream stream not None, int in_flight, int most):
        self.stream, self.in_flight, self.most = stream, in_flight, most
        self.readers, self.held = Events(stream.runtime), deque()

    cpdef Event reader(self):
        return self.readers.take()

    cpdef hold(self, Event released, keep, turn, bint lent=True):
        self.held.append((released, keep, turn, lent))

    cpdef settle(self, turn):
        cdef Event released
        while len(self.held) >= self.most:
            released, keep, reader, lent = self.held.popleft()
            if reader + self.in_flight > turn:  # otherwise the reader has left the executor, and so has its copy
                self.stream.wait_for(released)
            keep = None  # only now may the stage's stream write there again
            if lent:
                self.readers.give_back(released)

    def close(self):
        self.held.clear()
        self.readers.close()


# ---- copies ----------------------------------------------------------------------------------------------------------

def deliver(Link link not None, Activation source not None, Slot slot not None, Outputs outputs not None, turn):
    cdef bint staged = not link.is_direct(source.spans[len(source.spans) - 1][2] if source.spans else 0)
    # What a direct copy releases is what has arrived: one event for both.
    cdef Event released = outputs.reader() if staged else slot.arrived
    send(link, source, slot.address, slot.free, released, slot.arrived)
    outputs.hold(released, source.keep, turn, staged)


cpdef send(Link link, Activation source, uint64_t address, Event free, Event released, Event arrived):
    cdef list spans = source.spans or [(0, 0, 0)]  # nothing to copy keeps the order too
    cdef Py_ssize_t n, last = len(spans) - 1
    cdef Event ready, gate, read, written
    cdef uint64_t offset, at, nbytes
    cdef bint ends, turns
    ready, gate = source.ready, free
    for n in range(last + 1):
        offset, at, nbytes = <tuple>spans[n]
        ends = n == last
        turns = not ends and link.is_direct(nbytes) != link.is_direct(spans[n + 1][2])
        read, written = released if ends else None, arrived if ends or turns else None
        link.move(address + offset, at, nbytes, ready, gate, read, written)
        ready, gate = arrived if turns else None, None


# ---- results ---------------------------------------------------------------------------------------------------------

cdef class Copies:
    cdef Stream stream
    cdef list memory  # Buffers, and Events, of results that are gone; what is left of the others keeps the lists
    cdef list events

    def __init__(self, Stream stream not None):
        self.stream, self.memory, self.events = stream, [], []

    def of(self, Activation output not None):
        cdef Layout layout = output.value.layout
        cdef list arrays = []
        cdef Lease room, ready
        cdef Event event
        cdef Array array
        cdef int device = self.stream.device
        cdef Runtime runtime = self.stream.runtime
        if not layout.specs:
            return arrays, None
        try:  # two threads may be here
            event = self.events.pop()
        except IndexError:
            event = runtime.event()
        ready = lend(event, self.events)
        for spec in layout.specs:
            room = self.room(spec.nbytes)
            arrays.append(
                Array(
                    runtime, device, (<Buffer>room.item).at, spec.shape, spec.dtype, nbytes=spec.nbytes,
                    owner=(room, ready), ready=event,
                )
            )
        for offset, array in zip(layout.offsets, arrays):
            self.stream.copy_here(array.address, output.address(offset), array.nbytes)
        event.record(self.stream)
        return arrays, event

    def close(self):
        self.memory.clear()
        self.memory = []  # the leases alone keep the old list now, and the last of them frees all
        self.events = []

    cdef Lease room(self, uint64_t nbytes):
        cdef list others = []
        cdef Buffer buffer
        try:
            while True:  # two threads may be here
                buffer = self.memory.pop()
                if buffer.ptr == NULL:  # closed by the collector, together with a result that was part of a cycle
                    continue
                if nbytes <= buffer.room <= 2 * nbytes:
                    return lend(buffer, self.memory)
                others.append(buffer)
        except IndexError:
            return lend(self.stream.runtime.buffer(self.stream.device, nbytes, managed=True), self.memory)
        finally:
            self.memory.extend(others)


# ---- what submitting costs -------------------------------------------------------------------------------------------

cdef class Costs:
    cdef Runtime runtime
    cdef Py_ssize_t stages, kept, count, width
    cdef double *rows  # of the last microbatches: each stage's seconds, what is besides, begin, end
    cdef double *row
    cdef double last

    def __init__(self, Runtime runtime not None, Py_ssize_t stages, Py_ssize_t kept):
        self.runtime, self.stages, self.kept, self.width = runtime, stages, kept, stages + 3
        self.rows = <double *>PyMem_Calloc(kept * self.width, sizeof(double))
        if self.rows == NULL:
            raise MemoryError
        self.row = self.rows

    def __dealloc__(self):
        PyMem_Free(self.rows)

    def begin(self):
        cdef Py_ssize_t n
        self.row = self.rows + self.count % self.kept * self.width
        for n in range(self.width):
            self.row[n] = 0
        self.row[self.stages + 1] = self.last = self.runtime.now()

    def lap(self, Py_ssize_t stage):
        cdef double now = self.runtime.now()
        self.row[stage] += now - self.last
        self.last = now

    def pause(self):
        self.lap(self.stages)

    def resume(self):
        self.last = self.runtime.now()

    def end(self):
        self.lap(self.stages)
        self.row[self.stages + 2] = self.last
        self.count += 1

    def means(self):
        cdef Py_ssize_t kept = min(self.count, self.kept)
        cdef Py_ssize_t n, k
        return [
            sum([self.rows[k * self.width + n] for k in range(kept)]) / max(1, kept) for n in range(self.stages + 1)
        ]

    def span(self):
        cdef Py_ssize_t kept = min(self.count, self.kept)
        cdef Py_ssize_t first = (self.count - kept) % self.kept, last = (self.count - 1) % self.kept
        if not kept:
            return 0, 0.0
        return kept, self.rows[last * self.width + self.stages + 2] - self.rows[first * self.width + self.stages + 1]


# ---- raw stages ------------------------------------------------------------------------------------------------------

cdef class RawStage:
    cdef readonly Runtime runtime
    cdef readonly Stream stream
    cdef readonly int device
    cdef readonly int index
    cdef Blocks blocks
    cdef dict models  # by shape and dtype, an Array of no memory
    cdef public object turn
    cdef readonly list dropped

    def __init__(self, Stream stream not None, Blocks blocks not None, int index):
        self.runtime, self.stream, self.device, self.index = stream.runtime, stream, stream.device, index
        self.blocks, self.models, self.turn, self.dropped = blocks, {}, 0, []

    def empty(self, shape, dtype):
        cdef Array model = self.models.get((shape, dtype))
        cdef Lease block
        if model is None:
            model = self.models[shape, dtype] = Array(self.runtime, self.device, 0, shape, dtype, stream=self.stream)
        self.dropped.clear()
        block = self.blocks.take(self.turn, model.nbytes)
        return model.elsewhere((<Buffer>block.item).at, lend(block, self.dropped))

    def call(self, fn, Slot slot not None, Value incoming not None, list arrays not None, list plain not None):
        cdef Array leaf
        structure = take_apart(fn(self, self.input(slot, incoming)), None, arrays, plain)
        for leaf in arrays:
            if leaf.device != self.device or leaf.runtime is not self.runtime or not leaf.contiguous:
                raise errors.InvalidArgument(
                    f"returned {leaf!r}; contiguous arrays on the stage's own device {self.device} are allowed"
                )
        return structure

    cdef object input(self, Slot slot, Value incoming):
        cdef Layout layout = incoming.layout
        views = slot.views.get(layout)
        if views is None:
            views = slot.views[layout] = [
                Array(
                    self.runtime, self.device, slot.address + offset, spec.shape, spec.dtype, nbytes=spec.nbytes,
                    owner=slot.buffer, stream=self.stream,
                )
                for offset, spec in zip(layout.offsets, layout.specs, strict=True)
            ]
        if layout.structure is ARRAY:
            return views[0]
        if not incoming.complete:
            self.stream.synchronize()  # plain values of a stage that runs later than it is submitted
        return build(layout.structure, iter(views), iter(incoming.values()))

    def output(self, Layout layout not None, list arrays not None, list plain not None):
        cdef Value value = Value.__new__(Value)
        value.layout, value.plain, value.guess = layout, plain, plain
        spans, blocks = self.take_over(layout, arrays)
        return activation(self.device, value, spans, blocks)

    cdef tuple take_over(self, Layout layout, list arrays):
        cdef list blocks = [], places = [], spans = []
        cdef Lease block
        cdef Array leaf
        cdef Py_ssize_t n
        cdef uint64_t address, nbytes
        for leaf in arrays:
            block, address = self.block_of(leaf), leaf.address
            if block is None:
                if leaf.ready is not None:
                    self.stream.wait_for(leaf.ready)
                block = self.copy(address, leaf.nbytes)
                address = (<Buffer>block.item).at
                self.dropped.append(block)
            blocks.append(block)
            places.append((address, leaf.nbytes))
        leaf = None
        arrays.clear()  # nothing of ours refers to them any more, so what is not dropped now is the stage's
        for n in range(len(blocks)):
            address, nbytes = <tuple>places[n]
            block = blocks[n]
            if not holds(self.dropped, block):  # it may be written while it is still being read
                block = blocks[n] = self.copy(address, nbytes)
                address = (<Buffer>block.item).at
            if nbytes:
                spans.append((layout.offsets[n], address, nbytes))
        self.dropped.clear()
        return spans, blocks

    cdef Lease block_of(self, array):
        """The block that an array from empty(), or one made from it, lies in."""
        while isinstance(array, Array):
            array = (<Array>array).owner
        if type(array) is Lease and (<Lease>array).home is self.dropped:
            return (<Lease>array).item
        return None

    cpdef Lease copy(self, uint64_t address, uint64_t nbytes):
        cdef Lease block = self.blocks.take(self.turn, nbytes)
        self.stream.copy_here((<Buffer>block.item).at, address, nbytes)
        return block


cdef bint holds(list things, thing) noexcept:
    for one in things:
        if one is thing:
            return True
    return False


# ---- C functions -----------------------------------------------------------------------------------------------------

@cython.no_gc_clear
cdef class Call:
    cdef Stream stream
    cdef xd_function function
    cdef void *user
    cdef size_t count
    cdef uint64_t *offsets  # of the inputs, then of the outputs
    cdef uint64_t *sizes
    cdef void **arrays
    cdef size_t inputs
    cdef uint64_t read  # bytes of the block of inputs
    cdef Value value
    cdef Blocks blocks

    def __init__(self, Stream stream not None, Blocks blocks not None, uintptr_t function, uintptr_t user,
                 Layout given not None, Value value not None):
        cdef Layout returned = value.layout
        cdef size_t n
        self.value, self.blocks = value, blocks
        self.stream, self.function, self.user = stream, <xd_function>function, <void *>user
        self.inputs, self.count = len(given.offsets), len(given.offsets) + len(returned.offsets)
        self.read = given.nbytes
        self.offsets = <uint64_t *>PyMem_Calloc(self.count + 1, sizeof(uint64_t))
        self.sizes = <uint64_t *>PyMem_Calloc(self.count + 1, sizeof(uint64_t))
        self.arrays = <void **>PyMem_Calloc(self.count + 1, sizeof(void *))
        if self.offsets == NULL or self.sizes == NULL or self.arrays == NULL:
            raise MemoryError
        for n, offset in enumerate([*given.offsets, *returned.offsets]):
            self.offsets[n] = offset
        for n, spec in enumerate(given.specs):
            self.sizes[n] = spec.nbytes

    def __dealloc__(self):
        PyMem_Free(self.offsets)
        PyMem_Free(self.sizes)
        PyMem_Free(self.arrays)

    cdef void place(self, void **arrays, uint64_t x, uint64_t y) noexcept:
        cdef size_t n
        for n in range(self.count):
            arrays[n] = <void *><uintptr_t>(self.offsets[n] + (x if n < self.inputs else y))

    cdef Activation output(self, turn):
        cdef uint64_t nbytes = self.value.layout.nbytes
        cdef Lease block = self.blocks.take(turn, nbytes)
        cdef list spans = [(0, (<Buffer>block.item).at, nbytes)] if nbytes else []
        return activation(self.stream.device, self.value, spans, block)

    cdef uint64_t written(self, Activation output):
        return (<Buffer>(<Lease>output.keep).item).at

    def now(self, Slot slot not None, turn):
        cdef Activation output = self.output(turn)
        cdef int code
        self.place(self.arrays, slot.address, self.written(output))
        code = self.stream.call(self.function, self.arrays, self.sizes, self.arrays + self.inputs, self.user)
        if code:
            raise errors.FunctionFailed(f"returned {code}", code=code)
        return output

    def later(self, Slot slot not None, turn, batch, failed, double cost, label):
        cdef Activation output = self.output(turn)
        cdef Later later = Later.__new__(Later)
        cdef xd_kernel kernel
        cdef xd_range[2] ranges
        cdef bytes text = label.encode()
        cdef size_t count = 0
        cdef uint64_t x = slot.address, y = self.written(output)
        later.arrays = <void **>PyMem_Calloc(self.count + 1, sizeof(void *))
        if later.arrays == NULL:
            raise MemoryError
        later.what, later.batch, later.failed = self, batch, failed
        self.place(later.arrays, x, y)
        for address, nbytes, write in ((x, self.read, 0), (y, self.value.layout.nbytes, 1)):
            if nbytes:
                ranges[count].device = self.stream.device
                ranges[count].address, ranges[count].bytes, ranges[count].write = address, nbytes, write
                count += 1
        kernel.run, kernel.drop, kernel.arg = run_later, drop_later, <void *>later
        kernel.cost, kernel.label = <uint64_t>(cost * 1e9), text
        kernel.ranges, kernel.range_count = ranges, count
        Py_INCREF(later)  # given back by drop_later, which is called on failure too
        self.stream.start(&kernel)
        return output


cdef class Later:
    """A call of a simulated stream."""
    cdef Call what
    cdef void **arrays
    cdef object batch
    cdef object failed

    def __dealloc__(self):
        PyMem_Free(self.arrays)


cdef int run_later(void *arg) noexcept with gil:
    cdef Later later = <Later>arg
    cdef Call what = later.what
    cdef int code
    try:
        if later.batch.stopped:
            return 0
    except BaseException as error:  # Ctrl-C
        return tell(later, error)
    with nogil:
        code = what.function(NULL, later.arrays, what.sizes, later.arrays + what.inputs, what.user)
    return tell(later, code) if code else 0


cdef int tell(Later later, what) noexcept:
    """1 fails the device: nobody else would know."""
    try:
        later.failed(what)
        return 0
    except BaseException:
        return 1


cdef void drop_later(void *arg) noexcept with gil:
    Py_DECREF(<object>arg)


# ---- torch -----------------------------------------------------------------------------------------------------------

include "_torch.pxi"
