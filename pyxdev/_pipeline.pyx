"""What the executor does for every stage of every microbatch, in Cython because it is done so often: the slots' events,
copies from stage to stage, outputs that are held until they have been read, memory for outputs, calls of C functions.

executor/stages.py has the order of it all; types stand in _pipeline.pyi.
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

import gc
from collections import deque, namedtuple
from functools import partial
from threading import Lock
from weakref import ref as weakref

from pyxdev._native cimport Array, Buffer, Event, Lease, Link, Runtime, Stream
from pyxdev.xdev cimport XD_HOST, xd_function, xd_kernel, xd_range

from pyxdev import errors

include "_activation.pxi"


class Stopped(Exception):
    """A stage did not queue its work: the microbatch has failed, or one before it has."""


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
    cdef Lease lent  # of `free`, where that is recorded for others anyway

    def __init__(self, Event never not None):
        self.arrived, self.free, self.views, self.graphs = never, never, {}, {}


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
        return self.place(turn, nbytes)

    cdef Slot place(self, Py_ssize_t turn, uint64_t nbytes):
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

    cpdef hold(self, Event released, keep, Py_ssize_t turn, bint lent=True):
        self.held.append((released, keep, turn, lent))

    cpdef settle(self, Py_ssize_t turn):
        cdef Event released
        cdef Py_ssize_t reader
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

cdef int deliver(Link link, Activation source, Slot slot, Outputs outputs, Py_ssize_t turn) except -1:
    cdef bint staged = not link.is_direct(source.spans[len(source.spans) - 1][2] if source.spans else 0)
    # What a direct copy releases is what has arrived: one event for both.
    cdef Event released = outputs.reader() if staged else slot.arrived
    send(link, source, slot.address, slot.free, released, slot.arrived)
    outputs.hold(released, source.keep, turn, staged)
    return 0


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


# ---- microbatches, stages, hops, inputs ------------------------------------------------------------------------------

include "_stage.pxi"
include "_inputs.pxi"


# ---- stages of each kind ---------------------------------------------------------------------------------------------

include "_raw.pxi"
include "_function.pxi"
include "_torch.pxi"
