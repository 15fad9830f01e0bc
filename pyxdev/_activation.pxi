# What goes from stage to stage; adapters/activation.py and _pipeline.pyi tell about it.

ARRAY = "array"
PLAIN = "plain"
ALIGNMENT = 256  # bytes; of every array in a slot

Node = namedtuple("Node", "kind keys children", module="pyxdev._pipeline")


def flatten(x, is_array, list arrays not None, list plain not None):
    return take_apart(x, is_array, arrays, plain)


cdef object take_apart(x, is_array, list arrays, list plain):
    """is_array: a class, or a function; None stands for Array."""
    kind = type(x)
    cdef bint array
    if is_array is None:
        array = isinstance(x, Array)
    else:
        array = isinstance(x, is_array) if isinstance(is_array, type) else is_array(x)
    if array:
        arrays.append(x)
        return ARRAY
    if kind is tuple or kind is list:
        return Node(kind, None, tuple([take_apart(child, is_array, arrays, plain) for child in x]))
    if kind is dict:
        return Node(dict, tuple(x), tuple([take_apart(child, is_array, arrays, plain) for child in x.values()]))
    if isinstance(x, tuple) and hasattr(kind, "_fields"):
        return Node(kind, None, tuple([take_apart(child, is_array, arrays, plain) for child in x]))
    if isinstance(x, (tuple, list, dict)):
        raise errors.InvalidArgument(
            f"a {kind.__qualname__} cannot go from stage to stage; tuples, named tuples, lists, dicts, arrays and "
            "plain values can"
        )
    plain.append(x)
    return PLAIN


def build(structure, arrays, plain):
    if structure is ARRAY:
        return next(arrays)
    if structure is PLAIN:
        return next(plain)
    children = [build(child, arrays, plain) for child in structure.children]
    if structure.kind is list:
        return children
    if structure.kind is dict:
        return dict(zip(structure.keys, children, strict=True))
    return tuple(children) if structure.kind is tuple else structure.kind(*children)


def plain_paths(structure, path=()):
    if structure is ARRAY:
        return []
    if structure is PLAIN:
        return [path]
    keys = structure.keys or range(len(structure.children))
    return [
        found for key, child in zip(keys, structure.children, strict=True) for found in plain_paths(child, (*path, key))
    ]


cdef class Layout:
    cdef readonly object structure
    cdef readonly tuple specs
    cdef readonly tuple offsets
    cdef readonly uint64_t nbytes
    cdef readonly list paths

    def __init__(self, structure, tuple specs not None):
        self.structure = structure
        self.specs = specs
        offsets = []
        end = 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self.offsets = tuple(offsets)
        self.nbytes = end
        self.paths = plain_paths(structure)

    def __repr__(self):
        arrays = iter([f"{spec.dtype}{list(spec.shape)}" for spec in self.specs])
        return str(build(self.structure, arrays, iter(["plain"] * len(self.paths)))).replace("'", "")

    def fits(self, structure, list arrays not None):
        cdef Py_ssize_t n
        if structure is not self.structure and structure != self.structure:
            return False
        for n in range(len(arrays)):
            leaf, spec = arrays[n], <tuple>self.specs[n]
            if leaf.shape != spec[0] or leaf.dtype != spec[1]:
                return False
        return True

    def same(self, Layout other not None):
        return self.structure == other.structure and self.specs == other.specs

    def example(self, plain):
        return build(self.structure, iter(self.specs), iter(plain))


cdef class Layouts:
    LIMIT = 4096  # kept; values whose shapes change without end must not fill the memory

    cdef dict known  # by (structure, specs)
    cdef dict sums  # by parts
    cdef Layout latest

    def __init__(self):
        self.known, self.sums = {}, {}

    cpdef Layout of(self, structure, tuple specs):
        cdef Layout layout
        with cython.critical_section(self):  # of free-threaded Python, where kernels are other threads
            layout = self.latest
        if layout is not None and structure is layout.structure and specs == layout.specs:
            return layout
        layout = self.known.get((structure, specs))
        if layout is None:
            if len(self.known) >= self.LIMIT:
                self.known.clear()
            layout = self.known[structure, specs] = Layout(structure, specs)
        with cython.critical_section(self):
            self.latest = layout
        return layout

    def joined(self, tuple parts not None):
        layout = self.sums.get(parts)
        if layout is None:
            if len(self.sums) >= self.LIMIT:
                self.sums.clear()
            structure = Node(tuple, None, tuple([part.structure for part in parts]))
            layout = self.sums[parts] = self.of(structure, tuple([spec for part in parts for spec in part.specs]))
        return layout


cdef class Value:
    cdef readonly Layout layout
    cdef readonly list plain
    cdef readonly object guess

    def __init__(self, Layout layout not None, list plain not None, guess):
        self.layout, self.plain, self.guess = layout, plain, guess

    @property
    def complete(self):
        return len(self.plain) == len(self.layout.paths)

    def values(self):
        return self.plain


cdef class Activation:
    cdef readonly int device
    cdef readonly Value value
    cdef readonly list spans
    cdef readonly object keep
    cdef public Event ready

    def __init__(self, int device, Value value not None, list spans not None, keep):
        self.device, self.value, self.spans, self.keep = device, value, spans, keep

    @property
    def layout(self):
        return self.value.layout

    def address(self, uint64_t offset):
        cdef uint64_t begin, at, nbytes
        for span in self.spans:
            begin, at, nbytes = <tuple>span
            if begin <= offset < begin + nbytes:
                return at + offset - begin
        return 0


cdef Activation activation(int device, Value value, list spans, keep):
    cdef Activation made = Activation.__new__(Activation)
    made.device, made.value, made.spans, made.keep = device, value, spans, keep
    return made
