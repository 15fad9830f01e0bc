# What the torch adapter does for every microbatch. Nothing of torch is compiled in: it is calls of its methods.

cdef class Storages:
    cdef readonly object count, handle

    def __init__(self, native):
        self.count, self.handle = getattr(native, "_storage_Use_Count", None), getattr(native, "_storage_address", None)
        if self.handle is None:
            self.count = None

    cpdef Py_ssize_t users(self, tensor) except -1:
        return self.count(self.handle(tensor)) if self.count is not None else 0


cdef class Views:
    cdef readonly object memory
    cdef readonly list tensors
    cdef Storages storages
    cdef object handle
    cdef Py_ssize_t uses

    def __init__(self, memory, list tensors not None, Storages storages not None):
        self.memory, self.tensors, self.storages = memory, tensors, storages
        if storages.count is not None:
            self.handle = storages.handle(memory)
            self.uses = storages.count(self.handle)

    cdef bint kept(self) except -1:
        """Whether somebody else uses the memory now. False where this torch cannot tell."""
        return self.handle is not None and self.uses != self.storages.count(self.handle)


cdef class Loans:
    cdef Storages storages
    cdef dict made  # number -> (another tensor over the memory, the caller's stream, as torch knows it, weak reference)
    cdef object dropped  # numbers of those whose tensor is gone; a view of it may not be
    cdef Py_ssize_t number
    cdef Event read

    def __init__(self, Storages storages not None):
        self.storages, self.made, self.dropped = storages, {}, deque()

    def lend(self, tensor, Stream stream not None, tuple theirs not None):
        cdef Py_ssize_t number = self.number
        self.number += 1
        gone = weakref(tensor, partial(self.note, number))
        self.made[number] = tensor.detach(), stream, theirs, gone

    def note(self, number, gone):
        self.dropped.append(number)

    cpdef settle(self, Stream stream):
        cdef Py_ssize_t n, number
        cdef Stream reader
        for n in range(min(len(self.dropped), 4)):  # each that is left is looked at again, later
            number = self.dropped.popleft()
            tensor, reader, _, _ = self.made[number]
            if self.storages.users(tensor) > 1:
                self.dropped.append(number)
                continue
            if self.read is None:
                self.read = stream.runtime.event()
            self.read.record(reader)
            stream.wait_for(self.read)
            del self.made[number]

    def close(self):
        left = [(tensor, theirs) for tensor, _, theirs, _ in self.made.values()]
        self.made.clear()
        self.dropped.clear()
        if self.read is not None:
            self.read.close()
        return left


cdef class TorchStage:
    cdef readonly Loans loans
    cdef object tensor  # the class
    cdef object empty_like
    cdef object strided
    cdef Storages storages
    cdef object get_device, set_device, get_stream, set_stream, get_handle
    cdef Layouts layouts
    cdef object streams  # its of(runtime, device, handle) is a Stream
    cdef dict specs
    cdef readonly tuple stream

    def __init__(self, torch, Layouts layouts not None, streams not None):
        native = torch._C
        self.tensor, self.strided, self.empty_like = torch.Tensor, torch.strided, torch.empty_like
        self.layouts, self.streams, self.specs = layouts, streams, {}
        self.storages = Storages(native)
        self.loans = Loans(self.storages)
        # What torch.cuda.current_stream() and set_stream() call: the objects that they make beside it take longer.
        self.get_device = getattr(native, "_cuda_getDevice", None)
        self.set_device = getattr(native, "_cuda_setDevice", None)
        self.get_stream = getattr(native, "_cuda_getCurrentStream", None)
        self.set_stream = getattr(native, "_cuda_setStream", None)
        self.get_handle = getattr(native, "_cuda_getCurrentRawStream", None)

    cpdef enter(self, stage):
        if self.stream is None:
            self.stream = self.open_stream(stage)
        before = self.get_device(), self.get_stream(self.stream[1])
        self.set_stream(*self.stream)  # and its device
        return before

    cpdef leave(self, before):
        device, stream = <tuple>before
        self.set_stream(*<tuple>stream)
        if device != self.stream[1]:
            self.set_device(device)

    cpdef int device_of(self, tensor) except -2:
        if tensor.is_cuda:
            return tensor.get_device()
        if tensor.device.type != "cpu":
            raise errors.InvalidArgument(f"a tensor on {tensor.device} cannot be sent; cpu and cuda are allowed")
        return XD_HOST

    cpdef Stream their_stream(self, Runtime runtime, int device):
        return self.streams.of(runtime, device, self.get_handle(device))

    def is_array(self, leaf):
        return isinstance(leaf, self.tensor) or self.is_other_array(leaf)

    def spec(self, leaf):
        return self.spec_of(leaf) if isinstance(leaf, self.tensor) else self.other_spec(leaf)

    def source(self, Runtime runtime, leaf):
        cdef int device
        if not isinstance(leaf, self.tensor):
            return self.other_source(runtime, leaf)
        device = self.device_of(leaf)
        if device == XD_HOST:
            return None
        if leaf.dtype.is_complex or not leaf.is_contiguous():
            leaf = self.dense(leaf)
        return Source(device, leaf.data_ptr(), None, leaf.untyped_storage(), self.their_stream(runtime, device))

    cdef object spec_of(self, tensor):
        key = tensor.shape, tensor.dtype
        spec = self.specs.get(key)
        if tensor.layout is not self.strided or (spec is None and tensor.is_quantized):
            raise errors.InvalidArgument(f"a tensor of layout {tensor.layout} cannot be sent; strided ones can")
        if spec is None:
            spec = self.specs[key] = self.describe(tensor)
        return spec

    def views(self, memory, list tensors not None):
        return Views(memory, tensors, self.storages)

    cpdef bint lend(self, list tensors, Stream stream) except -1:
        theirs = self.get_stream(stream.device)
        if self.storages.count is None or theirs[0] and not theirs[0] & 1:
            return False  # a stream that is not torch's own may be destroyed before the tensors
        for tensor in tensors:
            self.loans.lend(tensor, stream, theirs)
        return True

    def run(self, StageCore stage not None, Microbatch batch not None, Slot slot not None, Value incoming not None):
        cdef Views views = slot.views.get(incoming.layout)
        if views is None:
            views = self.make_views(stage, slot, incoming)
        self.loans.settle(stage.stream)
        try:
            return self.call(stage, views, incoming)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error

    cpdef call(self, StageCore stage, Views views, Value incoming):
        cdef list arrays = [], plain = [], specs = []
        cdef Py_ssize_t n
        cdef Value value
        before = self.enter(stage)
        try:
            # Nothing in this function may refer to the outputs when own() counts who does.
            structure = take_apart(self.result_of(stage, views, incoming), self.tensor, arrays, plain)
            for n in range(len(arrays)):
                specs.append(self.own(stage, arrays, n))
        finally:
            self.leave(before)
        if views.kept() and gc.isenabled():  # it is not during a capture
            gc.collect()  # a compiler may have left what it first saw in cycles
        if views.kept():
            raise errors.InvalidArgument(
                "kept a tensor of its input, whose memory serves the next ones; keep a clone()"
            )
        value = Value.__new__(Value)
        value.layout, value.plain, value.guess = self.layouts.of(structure, tuple(specs)), plain, plain
        return self.outgoing(stage.device, value, arrays)

    cpdef Activation outgoing(self, int device, Value value, list tensors):
        cdef Layout layout = value.layout
        cdef list spans = []
        cdef Py_ssize_t n
        for n in range(len(tensors)):
            nbytes = layout.specs[n].nbytes
            if nbytes:
                spans.append((layout.offsets[n], tensors[n].data_ptr(), nbytes))
        return activation(device, value, spans, tensors)

    cdef object result_of(self, StageCore stage, Views views, Value incoming):
        # Aliases: what the stage does to shape or flags of a tensor must not stick to the slot's.
        if incoming.layout.structure is ARRAY:
            x = views.tensors[0].detach()
        else:
            inputs = [view.detach() for view in views.tensors]
            x = build(incoming.layout.structure, iter(inputs), iter(incoming.values()))
            del inputs
        if stage.sync_check is None:
            return stage.fn(x)
        return self.watched(stage, x)

    cpdef own(self, StageCore stage, list arrays, Py_ssize_t n):
        tensor = arrays[n].detach()
        if tensor.dtype.is_complex:
            tensor = tensor.resolve_conj().resolve_neg()
        arrays[n] = None
        spec = self.spec_of(tensor)
        if self.device_of(tensor) != stage.device:
            raise errors.InvalidArgument(
                f"returned a tensor on {tensor.device}; its own device, number {stage.device}, is allowed"
            )
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        elif self.storages.users(tensor) != 1:
            tensor = tensor.clone()
        arrays[n] = tensor
        return spec

    cpdef copy_of(self, tensor, uint64_t nbytes, Stream stream):
        made = self.empty_like(tensor)
        if nbytes:
            stream.copy(made.data_ptr(), tensor.data_ptr(), nbytes, dst_device=stream.device, src_device=stream.device)
        return made
