# C functions as stages, called without the GIL.

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
