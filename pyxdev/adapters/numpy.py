"""NumPy functions as stages of simulated devices.

The function runs as a kernel when the simulated stream gets there, later than it is submitted. So the shapes of its
outputs must be known by then: declared by the stage's `out`, or learned from the first call with such an input, which
is waited for. The function gets copies of what is in the slot, and its outputs are copied: it may keep, change or
return anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyxdev._native import Array
from pyxdev._pipeline import Stopped
from pyxdev.adapters.activation import UNKNOWN, Activation, Layout, Layouts, Spec, Value, build, flatten
from pyxdev.adapters.arrays import ArrayAdapter, dtype_name
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class Expected(NamedTuple):
    """What a stage will return: the layout, and for each plain value the position of the input's that it passes on."""

    layout: Layout
    passed: tuple[int | None, ...]
    declared: tuple[Any, ...]  # plain values that `out` gave, UNKNOWN for none

    def guess(self, incoming: Value) -> list[Any]:
        return [
            declared if position is None else incoming.guess[position]
            for position, declared in zip(self.passed, self.declared, strict=True)
        ]


class NumpyAdapter(ArrayAdapter):
    """See the module's docstring. Simulated devices only."""

    name = "numpy"
    uncapturable = "NumPy functions run on the host, so there is nothing to capture"
    LIMIT = 4096  # learned outputs kept

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._known: dict[tuple[Layout, tuple[Any, ...]], Expected] = {}

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, np.ndarray | Array)

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        example = incoming.layout.example(incoming.guess) if callable(stage.cost) or callable(stage.out) else None
        cost = self._ask(stage, batch, stage.cost, example)
        expected = self._expect(stage, batch, incoming, example)
        if expected is None:
            return self._learn(stage, batch, slot, incoming, cost)
        outgoing = self._outgoing(stage, batch, expected, incoming)
        address = slot.address  # a slot that grows lies elsewhere when the kernel runs
        value, target = outgoing.value, outgoing.keep.item.address

        def kernel() -> None:
            if not batch.stopped:
                self._store(value, target, *self._call(stage, address, incoming))

        self._launch(stage, batch, kernel, cost, (address, incoming.layout.nbytes), outgoing.spans)
        return outgoing

    def _expect(self, stage: BoundStage, batch: Microbatch, incoming: Value, example: Any) -> Expected | None:
        if callable(stage.out):
            return self._declared(stage, batch, self._ask(stage, batch, stage.out, example), True)
        key = (incoming.layout, _modes(incoming.guess))
        expected = self._known.get(key)
        if expected is None and stage.out is not None:
            expected = self._known[key] = self._declared(stage, batch, stage.out, False)
        return expected

    def _ask(self, stage: BoundStage, batch: Microbatch, given: Any, example: Any) -> Any:
        """The value given for a stage, or what the function given makes of the example."""
        if not callable(given):
            return given
        try:
            return given(example)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error

    def _declared(self, stage: BoundStage, batch: Microbatch, out: Any, knows_plain: bool) -> Expected:
        try:
            layout, plain = declared(self._layouts, out)
        except (InvalidArgument, TypeError) as error:
            stage.report(batch, error)
            raise Stopped from error
        values = tuple(plain) if knows_plain else (UNKNOWN,) * len(plain)
        return Expected(layout, (None,) * len(plain), values)

    def _learn(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value, cost: float) -> Activation:
        """Runs the stage now, and stores its outputs by a second kernel."""
        returned: list[tuple[Layout, list[Any], list[Any]]] = []
        address = slot.address

        def kernel() -> None:
            if not batch.stopped:
                returned.append(self._call(stage, address, incoming))

        self._launch(stage, batch, kernel, cost, (address, incoming.layout.nbytes), [])
        stage.stream.synchronize()
        if not returned:
            raise Stopped
        layout, arrays, plain = returned[0]
        passed = _passed(incoming, layout, plain)
        expected = Expected(layout, passed, (UNKNOWN,) * len(plain))
        if len(self._known) >= self.LIMIT:
            self._known.clear()
        self._known[incoming.layout, _modes(incoming.guess)] = expected
        outgoing = self._outgoing(stage, batch, expected, incoming)
        value, target = outgoing.value, outgoing.keep.item.address
        store = partial(self._store, value, target, layout, arrays, plain)
        self._launch(stage, batch, store, 0.0, (0, 0), outgoing.spans)
        return outgoing

    def _outgoing(self, stage: BoundStage, batch: Microbatch, expected: Expected, incoming: Value) -> Activation:
        layout = expected.layout
        block = stage.blocks.take(batch.turn, layout.nbytes)
        spans = [(0, block.item.address, layout.nbytes)] if layout.nbytes else []
        return Activation(stage.device, Value(layout, [], expected.guess(incoming)), spans, block)

    def _launch(
        self,
        stage: BoundStage,
        batch: Microbatch,
        kernel: Callable[[], None],
        cost: float,
        reads: tuple[int, int],
        writes: list[tuple[int, int, int]],
    ) -> None:
        stage.stream.launch(
            kernel,
            cost=cost,
            label=stage.name[:31],
            reads=[reads] if reads[1] else (),
            writes=[(address, nbytes) for _, address, nbytes in writes],
            failed=partial(stage.report, batch),
        )

    # ---- inside kernels ----

    def _call(self, stage: BoundStage, address: int, incoming: Value) -> tuple[Layout, list[Any], list[Any]]:
        layout = incoming.layout
        memory = _memory(address, layout.nbytes)
        inputs = (_view(memory, offset, spec).copy() for offset, spec in zip(layout.offsets, layout.specs, strict=True))
        y = stage.fn(build(layout.structure, inputs, iter(incoming.values())))
        arrays: list[Any] = []
        plain: list[Any] = []
        structure = flatten(y, self.is_array, arrays, plain)
        for leaf in arrays:
            if isinstance(leaf, Array):
                raise InvalidArgument(f"returned {leaf!r}; a stage of the numpy adapter returns NumPy arrays")
        return self._layouts.of(structure, tuple([self.spec(leaf) for leaf in arrays])), arrays, plain

    def _store(self, value: Value, address: int, layout: Layout, arrays: list[Any], plain: list[Any]) -> None:
        if layout is not value.layout and not layout.same(value.layout):
            raise InvalidArgument(
                f"returned {layout!r} where {value.layout!r} was expected; a stage whose outputs do not follow from "
                "the structure and shapes of its inputs needs out="
            )
        memory = _memory(address, layout.nbytes)
        for leaf, offset, spec in zip(arrays, layout.offsets, layout.specs, strict=True):
            np.copyto(_view(memory, offset, spec), leaf)
        value.plain.extend(plain)

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        layout = output.layout
        arrays = fetch.read(output, partial(_copies, layout))
        return build(layout.structure, iter(arrays), iter(output.value.values()))


def declared(layouts: Layouts, out: Any) -> tuple[Layout, list[Any]]:
    """Layout and plain values of what a stage's `out` shows. Raises InvalidArgument or TypeError for what cannot be."""
    arrays: list[Any] = []
    plain: list[Any] = []
    structure = flatten(out, lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"), arrays, plain)
    return layouts.of(structure, tuple([_spec_like(leaf) for leaf in arrays])), plain


def _spec_like(leaf: Any) -> Spec:
    if isinstance(leaf, Spec):
        return leaf
    if isinstance(leaf, Array):
        return Spec(leaf.shape, leaf.dtype, leaf.nbytes)
    dtype = np.dtype(leaf.dtype)
    if dtype.hasobject or dtype.names:
        raise InvalidArgument(
            f"out has an array of dtype {dtype}; plain numbers, bools and fixed-size bytes can be sent"
        )
    shape = tuple([int(extent) for extent in leaf.shape])
    return Spec(shape, dtype_name(dtype), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)


def _memory(address: int, nbytes: int) -> Any:
    """Memory of a simulated device as uint8 of shape (nbytes,)."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def _view(memory: Any, offset: int, spec: Spec) -> Any:
    return memory[offset : offset + spec.nbytes].view(np.dtype(spec.dtype)).reshape(spec.shape)


def _copies(layout: Layout, memory: Any) -> list[Any]:
    return [_view(memory, offset, spec).copy() for offset, spec in zip(layout.offsets, layout.specs, strict=True)]


def _modes(guess: Any) -> tuple[Any, ...]:
    """The plain values that shapes may depend on."""
    return tuple([value if value is None or isinstance(value, bool | str) else UNKNOWN for value in guess])


def _passed(incoming: Value, layout: Layout, plain: list[Any]) -> tuple[int | None, ...]:
    """For each plain output the position of the same value at the same place of the input, if there is one."""
    before = {path: position for position, path in enumerate(incoming.layout.paths)}
    values = incoming.values()
    found: list[int | None] = []
    for path, value in zip(layout.paths, plain, strict=True):
        position = before.get(path)
        found.append(position if position is not None and values[position] is value else None)
    return tuple(found)
