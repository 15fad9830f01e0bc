"""A stage as a graph: what it queues is captured once for each slot and layout of its input, then queued by one call.

Around the graph nothing changes: waits, records and copies stay outside. Its inputs are the slot; its outputs lie where
they lay when it was captured. So a graph is launched only when nobody needs the outputs of its last launch any more;
until then the stage runs eagerly. The outputs of the last stage belong to tickets, which may be kept for as long as one
likes: they are copied to memory of their own, on another stream, beside the stage's next work. Its slot is free after
that.

The first WARM microbatches of a layout run eagerly. They show whether plain values and the outputs' layout stay the
same; if not, the layout stays eager, and the log says why. With "auto" the next one runs eagerly too, is captured, and
the graph is tried on the same input: only a graph that gives the same bits is used. For that the host waits, once for
each stage and layout. With "on" a graph is used as it is.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from pyxdev._native import Graph, Lease, Stream
from pyxdev.adapters import Activation, Adapter, Layout, Stopped, Value
from pyxdev.errors import DeviceFault, Error, InvalidArgument, Unsupported
from pyxdev.executor.results import Fetch

if TYPE_CHECKING:
    from pyxdev.executor.slots import Leaving, Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch

log = logging.getLogger("pyxdev")

WARM = 2  # libraries load and tune themselves in the first calls
LAYOUTS = 16  # of one stage, that are captured; memory must not grow with shapes that change without end

CONSTANTS = (type(None), bool, int, float, complex, str, bytes)


class Captured:
    """A graph of a stage, for one slot and layout."""

    def __init__(self, graph: Graph, outgoing: Activation, memory: Any, constants: tuple[Any, ...]) -> None:
        self._graph = graph
        self._outgoing: Activation | None = outgoing
        self._memory = memory
        self._constants = constants
        self._free: list[None] = [None]  # empty while somebody needs the outputs of the last launch

    def fits(self, incoming: Value) -> bool:
        """Whether it may be launched now, for this input."""
        return bool(self._free) and (not incoming.layout.paths or constants_of(incoming) == self._constants)

    def launch(self, stage: BoundStage, batch: Microbatch) -> Activation:
        """Queues it; returns its outputs."""
        self._graph.launch(stage.stream)
        outgoing = self._outgoing
        assert outgoing is not None  # it is not closed
        if stage.is_last:
            copies = stage.adapter.copied(stage, batch.turn, outgoing)
            # The stage must not write there, if nobody wants the result, before the copy has.
            stage.outputs.hold(batch.end, (copies.keep, batch.exit), batch.turn, False)
            return copies
        return Activation(stage.device, outgoing.value, outgoing.spans, Lease(self._free.pop(), self._free))

    def close(self) -> None:
        """No launch is left to run."""
        self._graph.close()
        self._outgoing = self._memory = None  # in this order: torch's tensors before their pool


class Trial:
    """What is known of a stage's inputs of one layout."""

    __slots__ = ("constants", "proven", "refused", "returned", "runs", "sizes")

    def __init__(self) -> None:
        self.runs = 0
        self.constants: tuple[Any, ...] = ()  # plain values of the input
        self.returned: tuple[Layout, tuple[Any, ...]] | None = None  # layout and plain values of the output
        self.sizes: list[int] = []  # of the blocks that a call takes
        self.refused = ""  # why it stays eager
        self.proven = False

    def objection(self, incoming: Value, outgoing: Activation) -> str:
        """What one more eager run says against a graph; "" for nothing."""
        given, plain = constants_of(incoming), constants_of(outgoing.value)
        if given is None or plain is None:
            return "it is given or returns plain values other than numbers, texts and None"
        returned = outgoing.layout, plain
        if self.returned is None:
            self.constants, self.returned = given, returned
        if given != self.constants:
            return "the plain values that it is given change"
        return self.change(returned)

    def change(self, returned: tuple[Layout, tuple[Any, ...]]) -> str:
        """What differs from the runs before."""
        assert self.returned is not None  # an eager run has set it
        if returned[0] is not self.returned[0] and not returned[0].same(self.returned[0]):
            return f"its outputs change from {self.returned[0]!r} to {returned[0]!r}"
        return "" if returned[1] == self.returned[1] else "the plain values that it returns change"


class Graphs:
    """Runs one stage: by graphs where that may be, otherwise eagerly."""

    def __init__(self, stage: BoundStage, mode: str, leaving: Leaving) -> None:
        """mode: "auto" or "on"."""
        self._stage = stage
        self._adapter: Adapter = stage.adapter
        self._leaving = leaving
        self._proves = mode == "auto"
        self._trials: dict[Layout, Trial] = {}
        self.refused = ""  # why nothing is captured any more
        if stage.adapter.uncapturable:
            self._refuse_all(stage.adapter.uncapturable)

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """As Adapter.run()."""
        stage.output = None  # or a graph would find its outputs in use
        captured: Captured | None = slot.graphs.get(incoming.layout)
        if captured is not None:
            if captured.fits(incoming):
                return captured.launch(stage, batch)
            return self._adapter.run(stage, batch, slot, incoming)
        trial = self._trial(incoming)
        if trial is None:
            return self._adapter.run(stage, batch, slot, incoming)
        if trial.runs < WARM:
            return self._warm_up(trial, batch, slot, incoming)
        if constants_of(incoming) != trial.constants:
            return self._adapter.run(stage, batch, slot, incoming)
        if self._proves and not trial.proven:
            return self._prove(trial, batch, slot, incoming)
        return self._capture_and_launch(trial, batch, slot, incoming)

    def _trial(self, incoming: Value) -> Trial | None:
        """None: run it eagerly and think no more of it."""
        trial = self._trials.get(incoming.layout)
        if trial is None and not self.refused and incoming.complete:
            if len(self._trials) == LAYOUTS:
                self._refuse_all(f"its inputs have more than {LAYOUTS} layouts")
                return None
            trial = self._trials[incoming.layout] = Trial()
        return trial if trial is not None and not trial.refused and not self.refused and incoming.complete else None

    def _warm_up(self, trial: Trial, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        sizes: list[int] = []
        blocks = self._stage.blocks

        def take(turn: int, nbytes: int) -> Lease:
            sizes.append(nbytes)
            return blocks.find(turn, nbytes)

        blocks.instead = take
        try:
            outgoing = self._adapter.run(self._stage, batch, slot, incoming)
        finally:
            blocks.instead = None
        trial.runs += 1
        trial.sizes = sizes
        self._refuse(trial, incoming, trial.objection(incoming, outgoing))
        return outgoing

    def _capture_and_launch(self, trial: Trial, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        captured = self._captured(trial, batch, slot, incoming)
        if captured is None:
            return self._adapter.run(self._stage, batch, slot, incoming)
        slot.graphs[incoming.layout] = captured
        return captured.launch(self._stage, batch)

    def _prove(self, trial: Trial, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Runs it eagerly, and then the graph on the same input: a stage may have changed that, so it is kept."""
        stage = self._stage
        kept = stage.blocks.take(batch.turn, incoming.layout.nbytes)
        self._copy(kept.item.address, slot.address, incoming.layout.nbytes)
        outgoing = self._adapter.run(stage, batch, slot, incoming)
        captured = self._captured(trial, batch, slot, incoming)
        if captured is None:
            return outgoing
        try:
            self._copy(slot.address, kept.item.address, incoming.layout.nbytes)
            tried = captured.launch(stage, batch)
            for stream in stage.streams:
                stream.synchronize()
            trial.proven = self._same(outgoing, tried)
        except BaseException:
            self._leaving.add(captured, batch.turn + 1)
            raise
        if trial.proven:
            slot.graphs[incoming.layout] = captured
        else:
            captured.close()
            self._refuse(trial, incoming, "its graph gives other bits than the stage itself")
        return outgoing

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        device = self._stage.device
        self._stage.stream.copy(target, source, nbytes, dst_device=device, src_device=device)

    def _same(self, one: Activation, other: Activation) -> bool:
        """Whether two complete outputs of one layout are equal to the bit."""
        with closing(Fetch(self._stage.runtime, self._stage.device)) as fetch:
            found = [fetch.read(activation, partial(_bytes, activation)) for activation in (one, other)]
        return found[0] == found[1]

    def _captured(self, trial: Trial, batch: Microbatch, slot: Slot, incoming: Value) -> Captured | None:
        """None, and never tried again for this layout, where it cannot be captured."""
        try:
            graph, outgoing, memory = self._record(trial.sizes, batch, slot, incoming)
        except BaseException as error:
            if isinstance(error, DeviceFault):
                raise
            if not isinstance(error, Exception):  # Ctrl-C in the stage's function
                self._stage.report(batch, error)
                raise Stopped from error
            if isinstance(error, Unsupported):
                self._refuse_all(str(error))
            else:
                self._refuse(trial, incoming, f"it cannot be captured: {type(error).__name__}: {error}")
            return None
        captured = Captured(graph, outgoing, memory, trial.constants)
        plain = constants_of(outgoing.value)
        self._refuse(trial, incoming, trial.change((outgoing.layout, plain)) if plain is not None else "")
        if not trial.refused:
            return captured
        captured.close()
        return None

    def _record(
        self, sizes: list[int], batch: Microbatch, slot: Slot, incoming: Value
    ) -> tuple[Graph, Activation, Any]:
        """Memory is taken before: no driver lets it be allocated during a capture. Nor may the collector free any."""
        stage = self._stage
        blocks = [stage.blocks.take(batch.turn, nbytes) for nbytes in sizes]
        left = deque(blocks)

        def take(turn: int, nbytes: int) -> Lease:
            if not left or left[0].item.nbytes < nbytes:
                raise InvalidArgument("it takes other memory than in the calls before")
            return left.popleft()

        collects = gc.isenabled()
        with self._adapter.memory(stage, slot, incoming) as memory:
            try:
                gc.disable()
                stage.blocks.instead = take
                stage.stream.begin_capture()
                outgoing = self._adapter.queue(stage, batch.turn, slot, incoming)
                graph = stage.stream.end_capture()
            except BaseException:
                _abandon(stage.stream)
                raise
            finally:
                stage.blocks.instead = None
                if collects:
                    gc.enable()
        return graph, outgoing, (blocks, memory)

    # ---- what is not captured, and why ----

    def _refuse(self, trial: Trial, incoming: Value, why: str) -> None:
        if why:
            trial.refused = why
            self._tell(f"stays eager for inputs {incoming.layout!r}", why)

    def _refuse_all(self, why: str) -> None:
        self.refused = why
        self._tell("stays eager", why)

    def _tell(self, what: str, why: str) -> None:
        log.warning("stage %d (%s) %s: %s", self._stage.index, self._stage.name, what, why)

    @property
    def eager(self) -> str:
        """Why inputs of some layout, or all, are run eagerly for good; "" if none are."""
        return self.refused or next((trial.refused for trial in list(self._trials.values()) if trial.refused), "")


def constants_of(value: Value) -> tuple[Any, ...] | None:
    """The plain leaves of a value, so that equal ones are the same to a stage; None if there are others than constants,
    or they are not there yet."""
    if not value.layout.paths:
        return ()
    if not value.complete:
        return None
    found = value.values()
    if not all(type(leaf) in CONSTANTS for leaf in found):
        return None
    return tuple([(type(leaf), repr(leaf)) for leaf in found])  # 0.0 and -0.0 are equal, NaN is not


def _bytes(activation: Activation, memory: Any) -> list[bytes]:
    return [memory[offset : offset + nbytes].tobytes() for offset, _, nbytes in activation.spans]


def _abandon(stream: Stream) -> None:
    """Ends a capture in which something went wrong."""
    try:
        stream.end_capture().close()
    except DeviceFault:
        raise
    except Error as error:
        log.debug("ending a capture: %s", error)  # what went wrong has spoiled it, or it had not begun
