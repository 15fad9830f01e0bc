# From submit() into the first stage's slot, for what lies on a device; executor/inputs.py has the rest.

cdef class Source:
    cdef readonly int device
    cdef readonly uint64_t address
    cdef readonly Event ready
    cdef readonly object keep
    cdef readonly Stream stream

    def __init__(self, int device, uint64_t address, Event ready, keep, Stream stream):
        self.device, self.address, self.ready, self.keep, self.stream = device, address, ready, keep, stream


cdef class Piece:
    cdef readonly Activation activation
    cdef readonly Py_ssize_t position

    def __init__(self, Activation activation not None, Py_ssize_t position):
        self.activation, self.position = activation, position


cdef class InputCopies:
    cdef readonly StageCore stage, last
    cdef readonly object adapter  # of the first stage
    cdef readonly Layouts layouts
    cdef object links  # its between(src, dst) is a Link
    cdef int in_flight
    cdef Event ready, released
    cdef object held  # of (turn, the caller's array), until that microbatch has left

    def __init__(self, StageCore stage not None, StageCore last not None, links, adapter, Layouts layouts not None,
                 int in_flight):
        self.adapter, self.layouts = adapter, layouts
        self.stage, self.last, self.links, self.in_flight, self.held = stage, last, links, in_flight, deque()
        self.ready, self.released = stage.runtime.event(), stage.runtime.event()

    def read(self, x, executor):
        cdef Value value
        if not self.adapter.is_array(x):
            return self.read_parts(x, executor)
        value = Value.__new__(Value)
        value.layout, value.plain, value.guess = self.layouts.of(ARRAY, (self.adapter.spec(x),)), [], []
        return activation(self.stage.device, value, [], [x])

    def send(self, Microbatch batch not None, Activation source not None):
        cdef Slot slot
        cdef Source alone = None
        cdef Py_ssize_t left
        left = batch.turn - self.in_flight  # that microbatch has, or this one would not have been admitted
        while self.held and self.held[0][0] <= left:
            self.held.popleft()
        slot = self.stage.slots.place(batch.turn, source.value.layout.nbytes)
        if source.ready is not None:  # the output of a microbatch
            deliver(self.links.between(source.device, self.stage.device), source, slot, self.last.outputs, batch.turn)
            return slot
        if len(source.keep) == 1 and not source.value.plain:
            alone = self.source(source.keep[0])
        if alone is None:
            self.gather(batch.turn, source, slot)
        else:
            self.copy(batch.turn, source.keep[0], alone, slot, 0, source.value.layout.specs[0].nbytes, slot.arrived)
        return slot

    cdef int queue(self, Source source, Slot slot, uint64_t offset, uint64_t nbytes, Event ready, Event released,
                   Event arrived) except -1:
        cdef Link link = self.links.between(source.device, self.stage.device)
        return link.move(slot.address + offset, source.address, nbytes, ready, slot.free, released, arrived)

    cpdef Source source(self, leaf):
        cdef Activation output
        if type(leaf) is not Piece:
            return self.adapter.source(self.stage.runtime, leaf)
        output = (<Piece>leaf).activation
        address = output.address(output.value.layout.offsets[(<Piece>leaf).position])
        return Source(output.device, address, output.ready, output.keep, None)

    cpdef copy(self, Py_ssize_t turn, leaf, Source source, Slot slot, uint64_t offset, uint64_t nbytes, Event arrived):
        cdef Event released
        if type(leaf) is Piece:
            released = self.last.outputs.reader()
            self.queue(source, slot, offset, nbytes, source.ready, released, arrived)
            self.last.outputs.hold(released, source.keep, turn)
            return
        try:
            self.copy_from(source, slot, offset, nbytes, arrived)
        except errors.InvalidArgument as error:
            if source.stream is None:
                raise
            raise self.foreign(leaf, error) from error
        self.held.append((turn, source.keep))

    cdef int copy_from(self, Source source, Slot slot, uint64_t offset, uint64_t nbytes, Event arrived) except -1:
        if source.stream is None:
            self.queue(source, slot, offset, nbytes, source.ready, None, arrived)
        elif source.device == self.stage.device:
            source.stream.wait_for(slot.free)
            if nbytes:
                source.stream.copy_here(slot.address + offset, source.address, nbytes)
            arrived.record_in(source.stream)
        else:
            self.ready.record_in(source.stream)
            self.queue(source, slot, offset, nbytes, self.ready, self.released, arrived)
            source.stream.wait_for(self.released)
        return 0

    def close(self):
        self.ready.close()
        self.released.close()
        self.held.clear()
