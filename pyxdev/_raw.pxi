# Raw stages: their inputs as Arrays over the slot, memory for their outputs.

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
