"""From submit() into the first stage's slot: host arrays through page-locked memory, the rest by links."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pyxdev._native import HOST, Buffer, Event, Runtime, Stream
from pyxdev._pipeline import InputCopies, Piece
from pyxdev.adapters import Value
from pyxdev.adapters.activation import Activation, Layouts, build, flatten
from pyxdev.adapters.interface import kind_of
from pyxdev.errors import Cancelled, InvalidArgument
from pyxdev.executor.links import Links
from pyxdev.executor.slots import Slot
from pyxdev.executor.stages import BoundStage
from pyxdev.executor.tickets import Ticket


class Later:
    """A plain value of an earlier microbatch, which may not be there before `ready`."""

    __slots__ = ("position", "ready", "value")

    def __init__(self, value: Value, position: int, ready: Event) -> None:
        self.value = value
        self.position = position
        self.ready = ready


class Gathered(Value):
    """An input made of several sources."""

    __slots__ = ()

    @property
    def complete(self) -> bool:
        return not self.plain or all(leaf.value.complete for leaf in self.plain if type(leaf) is Later)

    def values(self) -> list[Any]:
        return [leaf.value.values()[leaf.position] if type(leaf) is Later else leaf for leaf in self.plain]


class Pinned:
    """Page-locked memory for one microbatch's input."""

    __slots__ = ("address", "buffer", "memory", "nbytes")

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.memory: Any = None  # uint8, of shape (nbytes,)
        self.address = 0
        self.nbytes = 0

    def close(self) -> None:
        self.memory = None
        if self.buffer is not None:
            self.buffer.close()


class Inputs(InputCopies):
    """Brings inputs to the first stage."""

    def __init__(
        self, runtime: Runtime, stage: BoundStage, last: BoundStage, layouts: Layouts, in_flight: int,
        links: Links,
    ) -> None:  # fmt: skip
        super().__init__(stage, last, links, stage.adapter, layouts, in_flight)
        self._runtime = runtime
        self._checked = runtime.backend == "sim"  # host access to page-locked memory is looked at
        self._pinned = [Pinned() for _ in range(in_flight)]
        self.stream: Stream = runtime.stream(stage.device)
        self._joined: Event = runtime.event()

    # ---- before admission: what x is, and whether it can be sent; nothing is changed ----

    def read_parts(self, x: Any, executor: Any) -> Activation:
        """read(), for what is no array."""
        arrays: list[Any] = []
        plain: list[Any] = []
        structure = flatten(x, self._is_array, arrays, plain)
        if any(type(leaf) is Ticket for leaf in arrays):
            expanded = [self._expand(leaf, executor) if type(leaf) is Ticket else leaf for leaf in arrays]
            x = build(structure, iter(expanded), iter(plain))
            arrays, plain = [], []
            structure = flatten(x, self._is_array, arrays, plain)
        specs = tuple([self._spec(leaf) for leaf in arrays])
        guess = [leaf.value.guess[leaf.position] if type(leaf) is Later else leaf for leaf in plain]
        return Activation(self.stage.device, Gathered(self.layouts.of(structure, specs), plain, guess), [], arrays)

    def _is_array(self, leaf: Any) -> bool:
        return type(leaf) in (Ticket, Piece) or self.adapter.is_array(leaf)

    def _spec(self, leaf: Any) -> Any:
        return leaf.activation.layout.specs[leaf.position] if type(leaf) is Piece else self.adapter.spec(leaf)

    def output(self, ticket: Ticket, executor: Any) -> Activation:
        """What the ticket's microbatch has put out. Raises InvalidArgument for another executor's, Cancelled for one
        without a result."""
        batch = ticket._batch
        if ticket._executor is not executor:
            raise InvalidArgument(f"{ticket!r} belongs to another executor; take its result()")
        error = Cancelled(f"microbatch {batch.index}: cancelled") if batch.cancelled else batch.outcome()
        if error is not None or batch.output is None:
            raise Cancelled(f"{ticket!r} has no result to go on with: {error}") from error
        return batch.output

    def _expand(self, ticket: Ticket, executor: Any) -> Any:
        output = self.output(ticket, executor)
        pieces = [Piece(output, n) for n in range(len(output.layout.specs))]
        plain = [Later(output.value, n, output.ready) for n in range(len(output.layout.paths))]
        return build(output.layout.structure, iter(pieces), iter(plain))

    # ---- after admission ----

    def gather(self, turn: int, source: Activation, slot: Slot) -> None:
        """Arrays and plain values from anywhere. The upload stream waits for all of them and records `arrived`."""
        host = []
        for leaf, spec, offset in zip(source.keep, source.layout.specs, source.layout.offsets, strict=True):
            away = self.source(leaf)
            if away is None:
                host.append((leaf, offset, spec.nbytes))
            else:
                self.copy(turn, leaf, away, slot, offset, spec.nbytes, self._joined)
                self.stream.wait(self._joined)
        for leaf in source.value.plain:
            if type(leaf) is Later:
                self.stream.wait(leaf.ready)
        if host:
            whole = len(host) == len(source.keep)
            ranges = [(0, source.layout.nbytes)] if whole else [(offset, nbytes) for _, offset, nbytes in host]
            self._upload(turn, slot, host, ranges)
        slot.arrived.record(self.stream)

    def foreign(self, leaf: Any, error: InvalidArgument) -> InvalidArgument:
        """What is to be raised for an array whose stream the runtime does not take."""
        return InvalidArgument(
            f"a {kind_of(leaf)} is no array of {self._runtime.backend} devices, its stream is none of theirs: {error}"
        )

    def _upload(self, turn: int, slot: Slot, leaves: list[tuple[Any, int, int]], ranges: list[tuple[int, int]]) -> None:
        pinned = self._pinned_memory(turn, max(offset + nbytes for offset, nbytes in ranges))
        for leaf, offset, nbytes in leaves:
            self.adapter.write(leaf, pinned.memory[offset : offset + nbytes])
        self.stream.wait(slot.free)
        for offset, nbytes in ranges:
            self.stream.copy(
                slot.address + offset, pinned.address + offset, nbytes, dst_device=self.stage.device, src_device=HOST
            )

    def _pinned_memory(self, turn: int, nbytes: int) -> Pinned:
        """That of this turn. The microbatch that used it last has left, or this one would not have been admitted."""
        pinned = self._pinned[turn % len(self._pinned)]
        if pinned.memory is None or pinned.nbytes < nbytes:
            room = max(nbytes, pinned.nbytes + pinned.nbytes // 2)
            pinned.close()
            pinned.nbytes = 0
            pinned.buffer = self._runtime.buffer(HOST, room, managed=True)
            pinned.address, pinned.nbytes = pinned.buffer.address, room
            # Not the buffer's own memoryview: who lets go of an array last may end it late in free-threaded Python,
            # and until then the buffer could not be closed.
            block: Any = (ctypes.c_uint8 * room).from_address(pinned.address)
            pinned.memory = np.frombuffer(block, np.uint8)
        if self._checked:
            self._runtime.host_access(pinned.address, nbytes, write=True)
        return pinned

    @property
    def pinned_bytes(self) -> int:
        return sum(pinned.nbytes for pinned in self._pinned)

    def close(self) -> None:
        for pinned in self._pinned:
            pinned.close()
        self.stream.close()
        self._joined.close()
        super().close()
