# Array: a typed, shaped view of device memory, and its exports.

# name -> (bits, DLPack type code, NumPy type string or None). Codes: dlpack.h 1.1.
DTYPES = {
    "bool": (8, 6, "|b1"),
    "int8": (8, 0, "|i1"), "int16": (16, 0, "<i2"), "int32": (32, 0, "<i4"), "int64": (64, 0, "<i8"),
    "uint8": (8, 1, "|u1"), "uint16": (16, 1, "<u2"), "uint32": (32, 1, "<u4"), "uint64": (64, 1, "<u8"),
    "float16": (16, 2, "<f2"), "float32": (32, 2, "<f4"), "float64": (64, 2, "<f8"),
    "complex64": (64, 5, "<c8"), "complex128": (128, 5, "<c16"),
    "bfloat16": (16, 4, None),
    "float8_e4m3fn": (8, 10, None), "float8_e4m3fnuz": (8, 11, None), "float8_e5m2": (8, 12, None),
    "float8_e5m2fnuz": (8, 13, None), "float8_e8m0fnu": (8, 14, None),
}
DLPACK_DEVICE = {"sim": 1, "cuda": 2, "hip": 10}
WINDOW = 8 << 20  # bytes, of an array's way to the host


@cython.no_gc_clear
cdef class Array:
    """A typed, shaped view of device memory at `address`. Keeps `owner` alive. Exports DLPack and
    __cuda_array_interface__; on simulated devices it exports as CPU memory (and __array_interface__).

    strides: in elements; None: C order. ready: the event after which the data is there; None: that of the Array which
    owns it, if one does. stream: what exports order themselves behind. exported: whether another library has seen the
    memory. nbytes: of raw block types; others have it from their shape.
    dtype: a name ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", ...) or a raw block type ("Q4_1"), whose
    shape counts values and whose nbytes counts blocks; raw types export only through .raw.

    Raises InvalidArgument for a shape, strides or dtype that cannot be.
    """

    def __init__(self, Runtime runtime not None, int device, uint64_t address, shape, dtype, *, strides=None,
                 nbytes=None, owner=None, Event ready=None, Stream stream=None):
        self.runtime = runtime
        self.device = device
        self.address = address
        self.shape = tuple(shape)
        self.dtype = dtype
        self.owner = owner
        self.ready = (<Array>owner).ready if ready is None and isinstance(owner, Array) else ready
        self.stream = stream
        size = 1
        for extent in self.shape:
            if extent < 0:
                raise errors.InvalidArgument(f"shape is {self.shape}; extents from 0 up are allowed")
            size *= extent
        self.size = size
        if strides is not None:
            self.given = tuple(strides)
            if len(self.given) != len(self.shape):
                raise errors.InvalidArgument(f"strides {self.given} do not fit the shape {self.shape}")
        if nbytes is not None:
            self.nbytes = nbytes
        elif dtype in DTYPES:
            self.nbytes = size * DTYPES[dtype][0] // 8
        else:
            raise errors.InvalidArgument(
                f"dtype is {dtype!r}; without nbytes one of these is allowed: {', '.join(DTYPES)}"
            )

    cdef Array elsewhere(self, uint64_t address, object owner):
        """One like this, of other memory."""
        cdef Array array = Array.__new__(Array)
        array.runtime, array.device, array.address = self.runtime, self.device, address
        array.shape, array.given, array.dtype = self.shape, self.given, self.dtype
        array.nbytes, array.size, array.owner, array.stream = self.nbytes, self.size, owner, self.stream
        return array

    def __repr__(self):
        return f"<pyxdev.Array {self.dtype} {self.shape}, device {self.device}>"

    def __len__(self):
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    @property
    def ndim(self):
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def strides(self):
        """Elements from one to the next, for each dimension."""
        return c_strides(self.shape) if self.given is None else self.given

    @property
    def contiguous(self):
        """C order without gaps; extents of 1 and empty arrays do not count."""
        if self.given is None or self.size == 0:
            return True
        return all(
            extent == 1 or have == want
            for extent, have, want in zip(self.shape, self.given, c_strides(self.shape), strict=True)
        )

    @property
    def raw(self):
        """The same bytes as a one-dimensional uint8 array. Raises InvalidArgument unless contiguous."""
        if not self.contiguous:
            raise errors.InvalidArgument(f"{self!r} has strides {self.strides}; only a contiguous array has raw bytes")
        return Array(self.runtime, self.device, self.address, (self.nbytes,), "uint8", nbytes=self.nbytes, owner=self,
                     stream=self.stream)

    cdef tuple layout(self):
        """(bits, code, type string) for an export."""
        known = DTYPES.get(self.dtype)
        if known is None:
            raise BufferError(f"{self.dtype} is a raw block type, no array library knows it; export .raw instead")
        return known

    cdef int check_open(self) except -1:
        """The memory that this array looks at must not have been freed."""
        owner = self.owner
        while isinstance(owner, Array):
            owner = (<Array>owner).owner
        if isinstance(owner, Buffer) and (<Buffer>owner).ptr == NULL:
            raise errors.Closed(f"the memory of {self!r} has been freed")
        return 0

    # ---- to the host ----

    def numpy(self):
        """A copy in host memory; waits for `ready`.

        Raises Unsupported for bfloat16 and 8-bit floats without ml_dtypes, InvalidArgument unless contiguous,
        BufferError for raw block types.
        """
        import numpy

        _, _, text = self.layout()
        if text is None:
            try:
                import ml_dtypes
            except ImportError as missing:
                raise errors.Unsupported(
                    f"NumPy has no {self.dtype}; install ml_dtypes, or take .raw.numpy() for the bytes"
                ) from missing
            kind = numpy.dtype(getattr(ml_dtypes, self.dtype))
        else:
            kind = numpy.dtype(text)
        flat = numpy.empty(self.nbytes, numpy.uint8)
        if self.nbytes:
            if not self.contiguous:
                raise errors.InvalidArgument(f"{self!r} has strides {self.strides}; make it contiguous first")
            self.read_into(flat)
        return flat.view(kind).reshape(self.shape)

    cdef int read_into(self, flat) except -1:
        """Device bytes into a NumPy array by a window of page-locked memory, or other where there is none: locking the
        whole array takes longer than copying."""
        cdef uint64_t at, size, window = min(self.nbytes, <uint64_t>WINDOW)
        cdef uintptr_t target = flat.ctypes.data
        cdef Tile tile
        self.check_open()
        stream = self.runtime.stream(self.device)
        try:
            try:
                ring = self.runtime.ring(1, window)
            except errors.OutOfMemory as error:
                if error.status != "NO_PINNED_MEMORY":
                    raise
                ring = self.runtime.ring(1, window, pageable=True)
            try:
                if self.ready is not None:
                    stream.wait(self.ready)
                tile = ring.acquire()
                try:
                    for at in range(0, self.nbytes, window):
                        size = min(window, self.nbytes - at)
                        stream.copy(tile.address, self.address + at, size, dst_device=HOST, src_device=self.device)
                        stream.synchronize()
                        self.runtime.host_access(tile.address, size, write=False)
                        with nogil:
                            memcpy(<void *>(target + at), tile.tile.address, size)
                finally:
                    ring.submit(tile, stream)  # so that close() waits for a copy that nobody has waited for
            finally:
                ring.close()
        finally:
            stream.close()
        return 0

    def torch(self):
        """A torch tensor of the same memory, through DLPack."""
        import torch

        return torch.from_dlpack(self)

    # ---- exports ----

    @property
    def __array_interface__(self):
        if self.runtime.backend != "sim":
            raise AttributeError(f"memory of a {self.runtime.backend} device is not host memory")
        self.wait_ready()
        return self.interface()

    @property
    def __cuda_array_interface__(self):
        if self.runtime.backend == "sim":
            raise AttributeError("memory of simulated devices is host memory")
        interface = self.interface()
        # A consumer orders itself behind this stream; without one the data must be there already.
        if self.stream is not None:
            if self.ready is not None:
                self.stream.wait(self.ready)
            interface["stream"] = self.stream.handle
        else:
            self.wait_ready()
            interface["stream"] = None
        return interface

    cdef int note_export(self) except -1:
        """From here on somebody else may look at the memory for as long as this array lives."""
        self.check_open()
        array = self
        while isinstance(array, Array):
            (<Array>array).exported = True
            array = (<Array>array).owner
        return 0

    cdef dict interface(self):
        bits, _, text = self.layout()
        if text is None:
            raise AttributeError(f"{self.dtype} has no type string; use DLPack")
        self.note_export()
        strides = None if self.contiguous else tuple(stride * bits // 8 for stride in self.strides)
        return {
            "shape": self.shape, "typestr": text, "data": (self.address, False), "strides": strides, "version": 3,
        }

    cdef int wait_ready(self) except -1:
        if self.ready is not None:
            self.ready.wait()
        return 0

    def __dlpack_device__(self):
        return DLPACK_DEVICE[self.runtime.backend], (0 if self.runtime.backend == "sim" else self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        bits, code, _ = self.layout()
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on DLPack device {self.__dlpack_device__()}, not on {tuple(dl_device)}")
        if copy:
            raise BufferError("copy=True is not offered; copy the array after importing it")
        self.note_export()
        self.order_before(stream)
        if max_version is not None and max_version[0] >= 1:
            return self.versioned(bits, code)
        return self.legacy(bits, code)

    cdef int order_before(self, stream) except -1:
        """Makes the consumer's stream wait until the data is there, as the DLPack protocol asks of the producer."""
        if self.ready is None or stream == -1:
            return 0
        if self.runtime.backend == "sim":
            self.wait_ready()
            return 0
        if stream == 0 and self.runtime.backend == "cuda":
            raise BufferError("stream 0 is ambiguous for CUDA: 1 is the legacy default stream, 2 the per-thread one")
        consumer = self.runtime.adopt_stream(self.device, stream or 1)
        try:
            consumer.wait(self.ready)
        finally:
            consumer.close()
        return 0

    cdef object versioned(self, int bits, int code):
        cdef xd_dl_versioned *out = <xd_dl_versioned *>PyMem_Malloc(
            sizeof(xd_dl_versioned) + 2 * max(1, len(self.shape)) * sizeof(int64_t)
        )
        if out == NULL:
            raise MemoryError
        memset(out, 0, sizeof(xd_dl_versioned))
        out.major, out.minor = 1, 0
        out.deleter = delete_versioned
        self.describe(&out.tensor, <int64_t *>(out + 1), bits, code)
        Py_INCREF(self)
        out.manager = <void *>self
        return PyCapsule_New(out, "dltensor_versioned", drop_versioned)

    cdef object legacy(self, int bits, int code):
        cdef xd_dl_managed *out = <xd_dl_managed *>PyMem_Malloc(
            sizeof(xd_dl_managed) + 2 * max(1, len(self.shape)) * sizeof(int64_t)
        )
        if out == NULL:
            raise MemoryError
        memset(out, 0, sizeof(xd_dl_managed))
        out.deleter = delete_legacy
        self.describe(&out.tensor, <int64_t *>(out + 1), bits, code)
        Py_INCREF(self)
        out.manager = <void *>self
        return PyCapsule_New(out, "dltensor", drop_legacy)

    cdef int describe(self, xd_dl_tensor *tensor, int64_t *extents, int bits, int code) except -1:
        cdef int ndim = <int>len(self.shape)
        cdef int axis
        tensor.data = <void *><uintptr_t>self.address if self.size else NULL
        tensor.device.device_type, tensor.device.device_id = self.__dlpack_device__()
        tensor.ndim = ndim
        tensor.dtype.bits, tensor.dtype.code, tensor.dtype.lanes = bits, code, 1
        tensor.shape = extents
        tensor.strides = extents + ndim
        for axis in range(ndim):
            extents[axis] = self.shape[axis]
            extents[ndim + axis] = self.strides[axis]
        return 0


cdef tuple c_strides(tuple shape):
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


# A consumer may call a deleter on any thread. The array goes with it: what it owns is freed in stream order or by a
# close that waits for the device.

cdef void delete_versioned(xd_dl_versioned *tensor) noexcept with gil:
    Py_DECREF(<object>tensor.manager)
    PyMem_Free(tensor)


cdef void delete_legacy(xd_dl_managed *tensor) noexcept with gil:
    Py_DECREF(<object>tensor.manager)
    PyMem_Free(tensor)


# A capsule that nobody consumed still has its first name and frees the tensor itself.

cdef void drop_versioned(object capsule) noexcept:
    cdef xd_dl_versioned *tensor
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        tensor = <xd_dl_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        tensor.deleter(tensor)


cdef void drop_legacy(object capsule) noexcept:
    cdef xd_dl_managed *tensor
    if PyCapsule_IsValid(capsule, "dltensor"):
        tensor = <xd_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
        tensor.deleter(tensor)
