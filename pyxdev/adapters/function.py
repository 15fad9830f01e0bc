"""C functions as stages: called by address, without the GIL. native/xdev.h has the signature, xd_function.

On CUDA and HIP the function is called when the stage is submitted, and queues its work on the stream that it is given.
On simulated devices it is called when the stream gets there, as a kernel of the stage's cost, and does the work itself.
"""

from __future__ import annotations

import ctypes
import sys
from _ctypes import CFuncPtr
from functools import partial
from typing import TYPE_CHECKING, Any

from pyxdev._pipeline import Call, Stopped
from pyxdev.adapters.activation import Activation, Layout, Layouts, Value
from pyxdev.adapters.numpy import declared
from pyxdev.adapters.raw import RawAdapter
from pyxdev.errors import FunctionFailed, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch

LARGEST_ADDRESS = (1 << 64) - 1


class CFunction:
    """A C function for a Stage.

    int function(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs, void *user)

    inputs, outputs: the arrays of x and of the stage's `out`, in order; sizes: bytes of the inputs. It returns 0, or a
    code of its own, with which the stage fails. It must not need the GIL, nor a certain thread.

    function: its address, a function pointer of ctypes or cffi, or a numba.cfunc; kept as long as this.
    user: an address that it is given. name: for messages.

    Raises InvalidArgument for anything else.
    """

    TYPE = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    )
    """The signature, for ctypes."""

    def __init__(self, function: Any, *, user: int = 0, name: str | None = None) -> None:
        plain = isinstance(function, int) and not isinstance(function, bool)
        address = function if plain else pointer(function)
        if address is None or not 0 < address <= LARGEST_ADDRESS:
            raise InvalidArgument(
                f"function is {function!r}; allowed: the address of a C function, a function pointer of ctypes or cffi "
                "that is not NULL, a numba.cfunc"
            )
        if isinstance(user, bool) or not isinstance(user, int) or not 0 <= user <= LARGEST_ADDRESS:
            raise InvalidArgument(f"user is {user!r}; an address is allowed, as a whole number")
        self.address: int = address
        self.user = user
        self.name = name or str(getattr(function, "__name__", f"0x{address:x}"))
        self._kept = function

    def __repr__(self) -> str:
        return f"<pyxdev.CFunction {self.name}>"


def pointer(thing: Any) -> int | None:
    """The address in a function pointer of ctypes or cffi, or of a numba.cfunc; None for everything else."""
    kind = type(thing)
    if isinstance(thing, CFuncPtr):
        return ctypes.cast(thing, ctypes.c_void_p).value or 0
    if kind.__module__ == "_cffi_backend" and isinstance(thing, sys.modules["_cffi_backend"].FFI.CData):
        ffi = sys.modules["_cffi_backend"].FFI()
        return int(ffi.cast("uintptr_t", thing)) if ffi.typeof(thing).kind == "function" else None
    if kind.__module__.partition(".")[0] == "numba" and isinstance(getattr(thing, "address", None), int):
        return int(thing.address)
    return None


class FunctionAdapter(RawAdapter):
    """See the module's docstring. Inputs and results are those of raw stages. What `out` has besides arrays goes on to
    the next stage; the function sees arrays alone."""

    name = "c"
    LIMIT = 4096  # calls kept
    later = ("sim",)  # backends where it is called when the stream gets there

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._known: dict[Layout, Call] = {}

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        try:
            if stage.runtime.backend not in self.later:
                return self.queue(stage, batch.turn, slot, incoming)
            call = self._known.get(incoming.layout) or self._expect(stage, incoming)
            cost = self._ask(stage, stage.cost, incoming)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error
        return call.later(slot, batch.turn, batch, partial(_fail, stage, batch), cost, stage.name[:31])

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        if stage.runtime.backend in self.later:
            raise Unsupported("on simulated devices a C function runs on the host, so there is nothing to capture")
        call = self._known.get(incoming.layout) or self._expect(stage, incoming)
        return call.now(slot, turn)

    def _expect(self, stage: BoundStage, incoming: Value) -> Call:
        layout, plain = declared(self._layouts, self._ask(stage, stage.out, incoming))
        if len(self._known) >= self.LIMIT:
            self._known.clear()
        given, function = incoming.layout, stage.fn
        value = Value(layout, plain, plain)
        call = Call(stage.stream, stage.blocks, function.address, function.user, given, value)
        if not (given.paths and callable(stage.out)):  # no plain value of x can change anything
            self._known[given] = call
        return call

    def _ask(self, stage: BoundStage, given: Any, incoming: Value) -> Any:
        """The value given for a stage, or what the function given makes of x, with a Spec for each array."""
        if not callable(given):
            return given
        if not incoming.complete:
            stage.stream.synchronize()  # plain values of a stage that runs later than it is submitted
        return given(incoming.layout.example(incoming.values()))


def _fail(stage: BoundStage, batch: Microbatch, what: int | BaseException) -> None:
    """The function returned a code, or was not called because of an exception."""
    stage.report(batch, FunctionFailed(f"returned {what}", code=what) if isinstance(what, int) else what)
