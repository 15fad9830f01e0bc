# What other Cython modules see of pyxdev._native. The methods here are those that they call for every microbatch.

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from pyxdev.xdev cimport (
    xd_buffer, xd_dl_tensor, xd_driver, xd_event, xd_function, xd_kernel, xd_link, xd_link_options, xd_runtime,
    xd_stream
)


cdef class Driver:
    # `owned` is freed here unless a Runtime or a FaultDriver took it over; `handle` works until that owner closes it.
    cdef xd_driver *owned
    cdef xd_driver *handle
    cdef xd_driver *alive(self) except NULL
    cdef int adopt(self, xd_driver *driver) except -1
    cdef xd_driver *give(self) except NULL
    cdef void retire(self) noexcept


cdef class Runtime:
    cdef xd_runtime *ptr
    cdef readonly Driver driver
    cdef readonly object backend
    cdef public bint managed  # closed by collection, without a warning
    cdef dict __dict__  # what others keep per runtime: the topology, the machine it simulates
    cdef object __weakref__
    cdef xd_runtime *alive(self) except NULL
    cdef double now(self) except -1


cdef class Stream:
    cdef xd_stream *ptr
    cdef readonly Runtime runtime
    cdef readonly int device
    cdef bint adopted
    cdef Event tail  # reused by synchronize
    cdef object __weakref__
    cdef Stream open(self, Runtime runtime, int device, uintptr_t handle=*)
    cdef xd_stream *alive(self) except NULL
    cdef int wait_for(self, Event event) except -1
    cdef int copy_here(self, uint64_t dst, uint64_t src, uint64_t nbytes) except -1
    cdef int start(self, const xd_kernel *kernel) except -1
    cdef int call(self, xd_function function, void *const *inputs, const uint64_t *sizes, void *const *outputs,
                  void *user) except? -1


cdef class Event:
    cdef xd_event *ptr
    cdef readonly Runtime runtime
    cdef object __weakref__
    cdef Event open(self, Runtime runtime, bint timing)
    cdef xd_event *alive(self) except NULL
    cdef int record_in(self, Stream stream) except -1


cdef class Buffer:
    cdef xd_buffer *ptr
    cdef readonly Runtime runtime
    cdef uint64_t at, room  # address and bytes
    cdef bint managed
    cdef bint given  # to a caller, who may have it for longer than what made it is there
    cdef int exports
    cdef Py_ssize_t length  # shape of an exported buffer
    cdef object __weakref__
    cdef Buffer open(self, Runtime runtime, int device, nbytes, bint managed)
    cdef xd_buffer *alive(self) except NULL


cdef class Link:
    cdef xd_link *ptr
    cdef readonly Runtime runtime
    cdef readonly int src, dst
    cdef object __weakref__
    cdef Link open(self, Runtime runtime, int src, int dst, const xd_link_options *options)
    cdef xd_link *alive(self) except NULL
    cdef bint is_direct(self, uint64_t nbytes) except -1
    cdef int move(self, uint64_t dst, uint64_t src, uint64_t nbytes, Event ready, Event free, Event released,
                  Event arrived) except -1


cdef class Lease:
    cdef readonly object item
    cdef readonly list home


cdef class Array:
    cdef readonly Runtime runtime
    cdef readonly int device
    cdef readonly uint64_t address
    cdef readonly tuple shape
    cdef tuple given  # strides, or None for C order
    cdef readonly object dtype
    cdef readonly uint64_t nbytes
    cdef readonly object size
    cdef readonly object owner
    cdef readonly Event ready
    cdef readonly Stream stream
    cdef readonly bint exported
    cdef object __weakref__
    cdef Array elsewhere(self, uint64_t address, object owner)
    cdef tuple layout(self)
    cdef int check_open(self) except -1
    cdef int read_into(self, flat) except -1
    cdef int note_export(self) except -1
    cdef dict interface(self)
    cdef int wait_ready(self) except -1
    cdef int order_before(self, stream) except -1
    cdef object versioned(self, int bits, int code)
    cdef object legacy(self, int bits, int code)
    cdef int describe(self, xd_dl_tensor *tensor, int64_t *extents, int bits, int code) except -1
