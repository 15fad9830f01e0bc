# Reader: pieces of files into device memory.

IO_MODES = {"auto": XD_IO_AUTO, "direct": XD_IO_DIRECT}


cdef xd_piece *piece_table(const Py_buffer *rows) except NULL:
    """The rows of an int64 array as pieces, to be freed."""
    cdef const int64_t *row
    cdef xd_piece *table
    cdef Py_ssize_t index
    if rows.ndim != 2 or rows.shape[1] != 6 or rows.itemsize != 8 or rows.format[0] not in b"lq":
        raise errors.InvalidArgument("pieces must be an int64 array of 6 columns")
    table = <xd_piece *>PyMem_Malloc((rows.shape[0] + 1) * sizeof(xd_piece))
    if table == NULL:
        raise MemoryError
    for index in range(rows.shape[0]):
        row = <const int64_t *>rows.buf + 6 * index
        table[index].fd = <int>row[0]
        table[index].direct_fd = <int>row[1]
        table[index].device = <int>row[2]
        table[index].offset = <uint64_t>row[3]
        table[index].bytes = <uint64_t>row[4]
        table[index].address = <uint64_t>row[5]
    return table


@cython.no_gc_clear
cdef class Reader:
    cdef xd_reader *ptr
    cdef readonly Runtime runtime
    cdef object __weakref__

    def __init__(self, Runtime runtime not None, pieces, *, unsigned tiles=0, unsigned workers=0, unsigned streams=0,
                 uint64_t tile_bytes=0, Ring ring=None, bint async_uploads=True, io="auto", bint verify=False,
                 uintptr_t calls=0):
        cdef xd_error err
        cdef xd_runtime *parent = runtime.alive()
        cdef xd_reader *out = NULL
        cdef xd_reader_options options
        cdef xd_piece *table = NULL
        cdef Py_buffer rows
        cdef size_t count
        cdef int status
        if self.ptr != NULL:
            raise errors.InvalidArgument("this reader is already open")
        if io not in IO_MODES:
            raise errors.InvalidArgument(f"io is {io!r}; allowed: {', '.join(IO_MODES)}")
        options.tiles = tiles
        options.workers = workers
        options.streams = streams
        options.tile_bytes = tile_bytes
        options.ring = NULL if ring is None else ring.alive()
        options.sync_uploads = not async_uploads
        options.io = IO_MODES[io]
        options.verify = verify
        options.calls = <const xd_io *>calls
        PyObject_GetBuffer(pieces, &rows, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        try:
            table = piece_table(&rows)
            count = <size_t>rows.shape[0]
        finally:
            PyBuffer_Release(&rows)
        with nogil:
            status = xd_reader_open(&out, parent, table, count, &options, &err)
        PyMem_Free(table)
        check(status, &err)
        self.ptr = out
        self.runtime = runtime
        if ring is not None:
            ring.ptr = NULL  # the reader's now

    cdef xd_reader *alive(self) except NULL:
        if self.ptr == NULL:
            raise errors.Closed("the reader is closed")
        return self.ptr

    def close(self):
        with nogil:
            xd_reader_close(&self.ptr)

    @property
    def closed(self):
        return self.ptr == NULL

    def __del__(self):
        if self.ptr != NULL:
            leaked(self)
            self.close()

    def __repr__(self):
        return f"<pyxdev.Reader{', closed' if self.ptr == NULL else ''}>"

    def run(self):
        cdef xd_error err
        cdef xd_reader *reader = self.alive()
        cdef int status
        with nogil:
            status = xd_reader_run_all(reader, 0, &err)
        check(status, &err)

    def verify(self):
        cdef xd_error err
        cdef xd_reader *reader = self.alive()
        cdef int status
        with nogil:
            status = xd_reader_run_all(reader, 1, &err)
        check(status, &err)

    def cancel(self):
        xd_reader_cancel(self.alive())

    def progress(self, int device):
        cdef xd_progress found
        if not xd_reader_progress(self.alive(), device, &found):
            raise errors.InvalidArgument(f"device {device} does not exist")
        return found.done, found.direct, found.first * 1e-9, found.last * 1e-9

    @property
    def times(self):
        cdef uint64_t reading = 0
        cdef uint64_t waiting = 0
        xd_reader_times(self.alive(), &reading, &waiting)
        return reading * 1e-9, waiting * 1e-9

    def refused(self, int fd):
        return xd_reader_refused(self.alive(), fd)

    @property
    def failed(self):
        cdef int64_t index = xd_reader_failed(self.alive())
        return None if index < 0 else index
