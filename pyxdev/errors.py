"""Every exception of pyxdev. The first group mirrors the statuses of native/xdev.h, the second is Python's own."""

from __future__ import annotations


class Error(Exception):
    """Base of all. `.status` is the name in native/xdev.h, `.code` the driver's own code or errno (0: none),
    `.operation` what was being done."""

    def __init__(self, message: str, *, status: str = "", code: int = 0, operation: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.operation = operation


class InvalidArgument(Error, ValueError):
    """An argument outside of what is allowed; the message names it, its value and the range."""


class OutOfMemory(Error, MemoryError):
    """Device memory, page-locked host memory or plain host memory ran out; the message says which and how much."""


class Unsupported(Error, NotImplementedError):
    """The backend cannot do this."""


class NoDevice(Error):
    """There is no usable device."""


class NoPeerAccess(Error):
    """A direct copy was asked for between devices without peer access."""


class Busy(Error):
    """Closed too early: children are still alive; the message names them."""


class DeviceFault(Error):
    """The device has failed. Sticky: nothing on it succeeds afterwards."""


class DriverError(Error):
    """The vendor's driver reported an error that none of the others covers."""


class Cancelled(Error):
    """Cancelled before it was complete."""


class ReadError(Error, OSError):
    """Reading a file failed."""


class FileRefused(Error, ValueError):
    """A model file that cannot be loaded; the message gives path, tensor, what was wanted and what was found."""


class OrderViolation(Error):
    """The ordering checker found two operations without an order between them."""


class Forked(Error):
    """The runtime was opened by a parent process; devices do not survive a fork. Start processes with "spawn"."""


class SettingError(Error, ValueError):
    """A setting outside the table; the message names it, its value and what is allowed."""


class BackendUnavailable(Error, ImportError):
    """The backend asked for cannot be used here; the message says what is missing."""


class Closed(Error):
    """Used after close."""


class FunctionFailed(Error):
    """A C function used as a stage returned something else than 0; `.code` is what."""


class StageError(Error):
    """A stage failed. `.stage` and `.microbatch` say where; `__cause__` is the exception of the stage, whose `.code` it
    has, if there is one."""

    def __init__(self, message: str, *, stage: int, microbatch: int, code: int = 0) -> None:
        super().__init__(message, code=code)
        self.stage = stage
        self.microbatch = microbatch


class StageInterrupted(StageError, KeyboardInterrupt):
    """Ctrl-C while a stage ran: a StageError that whoever waits for a KeyboardInterrupt sees as well."""


BY_STATUS: dict[str, type[Error]] = {
    "INVALID": InvalidArgument,
    "NO_DEVICE_MEMORY": OutOfMemory,
    "NO_PINNED_MEMORY": OutOfMemory,
    "NO_HOST_MEMORY": OutOfMemory,
    "UNSUPPORTED": Unsupported,
    "NO_DEVICE": NoDevice,
    "NO_PEER": NoPeerAccess,
    "BUSY": Busy,
    "DEVICE_FAULT": DeviceFault,
    "DRIVER": DriverError,
    "CANCELLED": Cancelled,
    "READ": ReadError,
    "TRUNCATED": FileRefused,
    "ORDER": OrderViolation,
    "FORKED": Forked,
}
