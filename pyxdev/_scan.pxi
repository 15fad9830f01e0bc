# Clean headers of model files, read fast. What these functions do not recognise, the readers in Python judge.


cdef class Scan:
    """Room for one header's entries, and the types they may have: (name, values and bits of a block) by number, None
    for a number that is no type."""
    cdef xd_scan scan
    cdef xd_scan_type *types
    cdef size_t type_count
    cdef list type_names
    cdef list texts  # what the names of the types point into

    def __cinit__(self, size_t entries, size_t extents, types):
        self.type_names = [row[0] if row else "" for row in types]
        self.texts = [name.encode() for name in self.type_names]
        self.type_count = len(self.texts)
        self.scan.count = entries
        self.scan.extent_room = extents
        self.scan.entries = <xd_scan_entry *>PyMem_RawMalloc((entries + 1) * sizeof(xd_scan_entry))
        self.scan.extents = <uint64_t *>PyMem_RawMalloc((extents + 1) * sizeof(uint64_t))
        self.types = <xd_scan_type *>PyMem_RawMalloc((self.type_count + 1) * sizeof(xd_scan_type))
        if self.scan.entries == NULL or self.scan.extents == NULL or self.types == NULL:
            raise MemoryError
        for index, row in enumerate(types):
            self.types[index].name = <bytes>self.texts[index]
            self.types[index].values = row[1] if row else 0
            self.types[index].bits = row[2] if row else 0

    def __dealloc__(self):
        PyMem_RawFree(self.scan.entries)
        PyMem_RawFree(self.scan.extents)
        PyMem_RawFree(self.types)

    cdef list rows(self, const char *header, uint64_t base, const char *decoding, kind):
        """kind(name, type, shape, offset in the file, bytes) for each entry; None: a name is no text or comes twice."""
        cdef xd_scan_entry *entry
        cdef size_t index
        cdef unsigned axis
        cdef list rows = []
        cdef set names = set()
        make = tuple.__new__
        for index in range(self.scan.count):
            entry = &self.scan.entries[index]
            try:
                name = PyUnicode_DecodeUTF8(header + entry.name, entry.name_bytes, decoding)
            except UnicodeDecodeError:
                return None
            names.add(name)
            shape = tuple([self.scan.extents[entry.extents + axis] for axis in range(entry.rank)])
            rows.append(make(kind, (name, self.type_names[entry.type], shape, base + entry.offset, entry.bytes)))
        return rows if len(names) == self.scan.count else None


def scan_safetensors(bytes header not None, uint64_t base, uint64_t present, types, kind):
    cdef Scan scan = Scan(len(header) // 45 + 1, header.count(b",") + 1, types)
    cdef const char *text = header
    if not xd_scan_safetensors(&scan.scan, text, len(header), present, scan.types, scan.type_count):
        return None
    rows = scan.rows(text, base, "strict", kind)
    if rows is None:
        return None
    metadata = header[scan.scan.metadata:scan.scan.metadata + scan.scan.metadata_bytes]
    try:
        metadata.decode()
    except UnicodeDecodeError:
        return None
    return rows, metadata


def scan_gguf(bytearray held not None, size_t at, size_t count, uint64_t alignment, uint64_t file_bytes, types, kind):
    cdef Scan scan = Scan(count, 4 * count, types)
    cdef const char *text = held
    cdef int64_t end = xd_scan_gguf(&scan.scan, text, len(held), at, alignment, file_bytes, scan.types, scan.type_count)
    if end < 0:
        return None
    rows = scan.rows(text, (end + alignment - 1) // alignment * alignment, "surrogateescape", kind)
    return None if rows is None else (rows, end)


def scan_gguf_strings(bytearray held not None, size_t at, uint64_t count):
    cdef const char *text = held
    cdef int64_t end = xd_scan_gguf_strings(text, len(held), at, count)
    return None if end < 0 else end
