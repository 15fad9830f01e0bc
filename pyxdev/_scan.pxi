# Clean headers of model files, read fast. What these functions do not recognise, the readers in Python judge.


cdef class Scan:
    cdef readonly bytearray entries  # xd_scan_entry, one a tensor
    cdef readonly bytearray extents  # uint64_t
    cdef readonly bytes metadata
    cdef readonly int64_t end
    cdef object header  # bytes or a bytearray that stays as it is
    cdef object types

    def __init__(self):
        raise errors.InvalidArgument("a Scan is what scan_safetensors and scan_gguf return")

    def tensors(self, uint64_t base, undecodable, kind):
        cdef const xd_scan_entry *entry = <const xd_scan_entry *>PyByteArray_AS_STRING(self.entries)
        cdef const uint64_t *extents = <const uint64_t *>PyByteArray_AS_STRING(self.extents)
        cdef const char *header = text_of(self.header)
        cdef bytes handler = undecodable.encode()
        cdef unsigned axis
        cdef size_t left = entry_count(self)
        cdef list names = [row[0] if row else "" for row in self.types]
        cdef list tensors = []
        make = tuple.__new__
        while left:
            name = PyUnicode_DecodeUTF8(header + entry.name, entry.name_bytes, handler)
            shape = tuple([extents[entry.extents + axis] for axis in range(entry.rank)])
            tensors.append(make(kind, (name, names[entry.type], shape, base + entry.offset, entry.bytes)))
            entry += 1
            left -= 1
        return tensors

    def numbers(self, words):
        cdef size_t index, count = entry_count(self)
        cdef list texts = [word.encode() for word in words]
        cdef bytearray numbers = PyByteArray_FromStringAndSize(NULL, count * sizeof(int64_t))
        cdef const char **table = <const char **>PyMem_Malloc((len(texts) + 1) * sizeof(char *))
        if table == NULL:
            raise MemoryError
        for index in range(<size_t>len(texts)):
            table[index] = <bytes>texts[index]
        xd_scan_numbers(text_of(self.header), <const xd_scan_entry *>PyByteArray_AS_STRING(self.entries), count, table,
                        len(texts), <int64_t *>PyByteArray_AS_STRING(numbers))
        PyMem_Free(table)
        return numbers


cdef size_t entry_count(Scan scan) noexcept:
    return <size_t>PyByteArray_GET_SIZE(scan.entries) // sizeof(xd_scan_entry)


cdef const char *text_of(header) except NULL:
    return PyByteArray_AS_STRING(header) if isinstance(header, bytearray) else PyBytes_AS_STRING(header)


cdef class Types:
    """The types that entries may have: (name, values and bits of a block) by number, None for a number that is none."""
    cdef xd_scan_type *rows
    cdef size_t count
    cdef list texts  # what the names point into

    def __cinit__(self, types):
        self.texts = [row[0].encode() if row else b"" for row in types]
        self.count = len(self.texts)
        self.rows = <xd_scan_type *>PyMem_Malloc((self.count + 1) * sizeof(xd_scan_type))
        if self.rows == NULL:
            raise MemoryError
        for index, row in enumerate(types):
            self.rows[index].name = <bytes>self.texts[index]
            self.rows[index].values = row[1] if row else 0
            self.rows[index].bits = row[2] if row else 0

    def __dealloc__(self):
        PyMem_Free(self.rows)


cdef Scan with_room(xd_scan *scan, header, types, size_t entries, size_t extents):
    """Room that costs memory only where it is used."""
    cdef Scan room = Scan.__new__(Scan)
    room.header, room.types = header, types
    room.entries = PyByteArray_FromStringAndSize(NULL, (entries + 1) * sizeof(xd_scan_entry))
    room.extents = PyByteArray_FromStringAndSize(NULL, (extents + 1) * sizeof(uint64_t))
    scan.count, scan.extent_room = entries, extents
    scan.entries = <xd_scan_entry *>PyByteArray_AS_STRING(room.entries)
    scan.extents = <uint64_t *>PyByteArray_AS_STRING(room.extents)
    return room


cdef Scan cut(Scan room, const xd_scan *scan):
    """Without the room that was not used."""
    PyByteArray_Resize(room.entries, scan.count * sizeof(xd_scan_entry))
    PyByteArray_Resize(room.extents, scan.extent_count * sizeof(uint64_t))
    return room


def scan_safetensors(bytes header not None, uint64_t present, types):
    cdef xd_scan scan
    cdef Types known = Types(types)
    cdef size_t size = len(header)
    cdef size_t extents = size // 16 + 1  # more than most headers have, then as many as there can be
    cdef Scan found = with_room(&scan, header, types, size // 45 + 1, extents)
    cdef bint clean = xd_scan_safetensors(&scan, header, size, present, known.rows, known.count)
    if not clean and scan.extent_count == extents:
        found = with_room(&scan, header, types, size // 45 + 1, header.count(b",") + 1)
        clean = xd_scan_safetensors(&scan, header, size, present, known.rows, known.count)
    if not clean or not is_text(header):
        return None
    found.metadata = header[scan.metadata:scan.metadata + scan.metadata_bytes]
    return cut(found, &scan)


cdef bint is_text(bytes header):
    try:
        header.decode()
    except UnicodeDecodeError:
        return False
    return True


def scan_gguf(bytearray held not None, size_t at, size_t count, uint64_t alignment, uint64_t file_bytes, types):
    cdef xd_scan scan
    cdef Types known = Types(types)
    cdef Scan found = with_room(&scan, held, types, count, 4 * count)
    found.end = xd_scan_gguf(&scan, PyByteArray_AS_STRING(held), len(held), at, alignment, file_bytes, known.rows,
                             known.count)
    return None if found.end < 0 else cut(found, &scan)


def scan_gguf_strings(bytearray held not None, size_t at, uint64_t count):
    cdef const char *text = held
    cdef int64_t end = xd_scan_gguf_strings(text, len(held), at, count)
    return None if end < 0 else end
