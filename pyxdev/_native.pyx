"""The wrapper around native/xdev.h: one class per C object, one place that raises. Types stand in _native.pyi.

Every object holds its parent, closes once, and is closed by collection as a safety net, which warns. Calls that may
block or reach a driver run without the GIL.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE, PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from pyxdev.xdev cimport *

from pyxdev import errors

cdef extern from "Python.h":
    int PyErr_ResourceWarning(object source, Py_ssize_t stack_level, const char *format, ...) except -1

HOST = XD_HOST

# Blocking calls come back this often to look for Ctrl-C, in ns of the runtime's clock.
cdef uint64_t SIGNAL_PERIOD = 50_000_000


cdef int check(int status, xd_error *err) except -1:
    """The only raiser of native errors."""
    if status == XD_OK:
        return 0
    name = xd_status_name(err.status).decode()
    operation = err.operation.decode("utf-8", "replace")
    text = err.text.decode("utf-8", "replace")
    raise errors.BY_STATUS[name](
        f"{operation}: {text}" if operation else text, status=name, code=err.code, operation=operation
    )


cdef uint64_t nanoseconds(object seconds) except? 0:
    """A time-out in seconds as ns; None is no limit."""
    if seconds is None:
        return XD_FOREVER
    if not seconds >= 0:
        raise errors.InvalidArgument(f"timeout is {seconds!r}; seconds from 0 up, or None for no limit, are allowed")
    return <uint64_t>min(seconds * 1e9, 1e18)


cdef uint64_t after(xd_runtime *runtime, uint64_t timeout) noexcept nogil:
    """The deadline `timeout` ns from now."""
    return XD_FOREVER if timeout == XD_FOREVER else xd_runtime_clock(runtime) + timeout


cdef uint64_t until(xd_runtime *runtime, uint64_t deadline) noexcept nogil:
    """How long to block before looking for signals again: 0 at the deadline."""
    cdef uint64_t now
    if deadline == XD_FOREVER:
        return SIGNAL_PERIOD
    now = xd_runtime_clock(runtime)
    if now >= deadline:
        return 0
    return min(deadline - now, SIGNAL_PERIOD)


cdef void leaked(object thing) noexcept:
    """Warns. Where warnings are errors it is reported as unraisable: closing goes on, and works late at exit too."""
    PyErr_ResourceWarning(thing, 1, "unclosed %R", <PyObject *>thing)


# ---- drivers ---------------------------------------------------------------------------------------------------------

cdef class Driver:
    @property
    def name(self):
        return self.alive().name.decode()

    cdef xd_driver *alive(self) except NULL:
        if self.handle == NULL:
            raise errors.Closed("the driver is closed: the runtime that took it over has been closed")
        return self.handle

    cdef int adopt(self, xd_driver *driver) except -1:
        self.owned = self.handle = driver
        return 0

    cdef xd_driver *give(self) except NULL:
        """The pointer, for an owner that is about to take it over."""
        if self.owned == NULL:
            raise errors.InvalidArgument("the driver already belongs to a runtime; make a new one for each runtime")
        return self.owned

    cdef void retire(self) noexcept:
        self.handle = NULL

    def __dealloc__(self):
        if self.owned != NULL:
            self.owned.close(self.owned)


cdef class FaultDriver(Driver):
    cdef Driver inner

    def __init__(self, Driver inner not None):
        cdef xd_error err
        cdef xd_driver *out = NULL
        check(xd_fault_create(&out, inner.give(), &err), &err)
        inner.owned = NULL
        self.inner = inner
        self.adopt(out)

    def arm(self, at, *, sticky=False, status="DRIVER"):
        cdef int number
        for number in range(-64, 0):
            if xd_status_name(number) == <bytes>status.encode():
                xd_fault_arm(self.alive(), at, sticky, number)
                return
        names = ", ".join(errors.BY_STATUS)
        raise errors.InvalidArgument(f"status is {status!r}; a name of xd_status is allowed: {names}")

    @property
    def calls(self):
        return xd_fault_calls(self.alive())

    cdef void retire(self) noexcept:
        self.handle = NULL
        self.inner.retire()


cdef list symbol_list(const xd_symbol_request *request):
    found = []
    while request.name != NULL:
        found.append((request.name.decode(), request.version, bool(request.optional)))
        request += 1
    return found


ctypedef int (*create_driver)(xd_driver **, const xd_symbol *, size_t, xd_error *) noexcept nogil


cdef Driver driver_of_symbols(create_driver create, dict symbols):
    cdef xd_error err
    cdef Driver driver = Driver.__new__(Driver)
    cdef xd_driver *out = NULL
    cdef list names = [name.encode() for name in symbols]
    cdef xd_symbol *table = <xd_symbol *>PyMem_Malloc(max(1, len(names)) * sizeof(xd_symbol))
    if table == NULL:
        raise MemoryError
    try:
        for index, (name, address) in enumerate(zip(names, symbols.values(), strict=True)):
            table[index].name = <bytes>name
            table[index].address = <void *><uintptr_t>address
        check(create(&out, table, len(names), &err), &err)
    finally:
        PyMem_Free(table)
    driver.adopt(out)
    return driver


def cuda_symbols():
    return symbol_list(xd_cuda_symbols())


def cuda_driver(symbols):
    return driver_of_symbols(xd_cuda_create, dict(symbols))


def hip_symbols():
    return symbol_list(xd_hip_symbols())


def hip_driver(symbols):
    return driver_of_symbols(xd_hip_create, dict(symbols))


include "_runtime.pxi"
include "_stream.pxi"
include "_memory.pxi"
include "_array.pxi"
include "_sim.pxi"
include "_reader.pxi"
include "_scan.pxi"
