"""Which stage runs where, how many microbatches are in flight, how many slots a hop has: decided once, at open."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyxdev.adapters.function import CFunction, pointer
from pyxdev.errors import InvalidArgument

MOST_IN_FLIGHT = 4096
# Slots of a hop: with stage times that vary by 30 %, 1, 2, 3 and 4 slots keep 0.71, 0.93, 0.956 and 0.967 of the rate.
AUTOMATIC_DEPTH = 4
GRAPH = ("off", "auto", "on")


@dataclass(frozen=True)
class Stage:
    """A stage, with more to say about it than its function.

    fn: fn(x) -> y, or fn(stage, x) -> y with the adapters raw, numba and cuda.core; it queues its work on its stage's
        stream and returns. Or a C function: a CFunction, or what one is made of but an address.
    device: the ordinal of its device; None: as the executor's `devices` say.
    adapter: what arrays are to it: "numpy", "torch", "cupy", "numba", "cuda.core", "raw"; None: as the executor's
        `adapter` says.
    out: what the outputs will look like, for stages that run later than they are submitted (NumPy on simulated
        devices): an example of y, or a function of x that returns one, where x has a Spec (shape, dtype) for each array
        and plain values where they are known. Anything with a shape and a dtype will do for an array. None: learned by
        waiting for the first call with new input shapes, or other bool, str or None among the plain values; numbers are
        taken not to matter for shapes. A C function always needs it.
    cost: seconds of a simulated device; a number or a function of x as for `out`.
    name: for messages and traces, and for `inputs` of later stages.
    inputs: the earlier stage whose output is x, by name or number (-1: the one before), or a sequence of several, and x
        is the tuple of their outputs; () for none. None: the one before; for the first stage: what is submitted.
    graph: "off", "auto" or "on"; None: as the executor's `graph` says.
    sync_check: "warn" or "error" where a torch stage makes the host wait for the device (`.item()`, `.cpu()`, masks),
        as torch.cuda.set_sync_debug_mode finds it, a mode of the whole process while the stage runs. None: neither.
    """

    fn: Callable[..., Any] | CFunction
    device: int | None = None
    adapter: str | None = None
    out: Any = None
    cost: float | Callable[[Any], float] = 0.0
    name: str | None = None
    inputs: str | int | Sequence[str | int] | None = None
    graph: str | None = None
    sync_check: str | None = None

    def __post_init__(self) -> None:
        if pointer(self.fn) is not None:
            object.__setattr__(self, "fn", CFunction(self.fn))
        if isinstance(self.fn, CFunction):
            if self.out is None:
                raise InvalidArgument(f"a stage's fn is {self.fn!r}, a C function, which needs out=")
            if self.adapter not in (None, "c"):
                raise InvalidArgument(f'adapter is {self.adapter!r}; a C function has its own, "c"')
        elif not callable(self.fn):
            raise InvalidArgument(f"a stage's fn is {self.fn!r}; a callable or a CFunction is allowed")
        if self.graph is not None:
            check_graph(self.graph, "a stage's graph")
        if self.sync_check not in (None, "warn", "error"):
            raise InvalidArgument(f"a stage's sync_check is {self.sync_check!r}; warn, error or None are allowed")

    @property
    def label(self) -> str:
        """The name given, or that of the function."""
        if isinstance(self.fn, CFunction):
            return self.name or self.fn.name
        return self.name or str(getattr(self.fn, "__name__", type(self.fn).__name__))


@dataclass(frozen=True)
class LinkPlan:
    """One hop between devices. pinned: bytes of its page-locked ring. nbytes: what the latest microbatch sent over it,
    0 before the first. gb_s: as measured for copies of about that size when the path was chosen; 0.0: not measured."""

    src: int
    dst: int
    path: str
    why: str
    pinned: int
    nbytes: int
    gb_s: float


@dataclass(frozen=True)
class StagePlan:
    """One stage. slots: bytes of memory its inputs have so far; outputs: the same for its outputs. inputs: the numbers
    of the stages that it reads; none for the first. graph: "off", "auto" or "on"; captured: graphs that there are now;
    eager: why some of its inputs, or all, will not be run by graphs, "" if nothing speaks against it."""

    name: str
    device: int
    adapter: str
    depth: int
    slots: int
    outputs: int
    inputs: tuple[int, ...]
    graph: str
    captured: int
    eager: str


@dataclass(frozen=True)
class Plan:
    """What an executor uses. Device memory grows with the first microbatches and then stays as it is."""

    stages: tuple[StagePlan, ...]
    links: tuple[LinkPlan, ...]
    in_flight: int
    depth: int
    pinned: int  # bytes of page-locked memory
    memory: dict[int, int]  # bytes by device


def check_ordinals(devices: Any, count: int, backend: str) -> list[int]:
    """`devices` as a list of ordinals below count. Each wrong form has a message of its own."""
    if isinstance(devices, str | bytes | dict | set | frozenset) or not isinstance(devices, Iterable):
        raise InvalidArgument(f"devices is {devices!r}; a sequence of device numbers is allowed, such as [0, 1]")
    checked = [check_ordinal(device, f"devices[{n}]", count, backend) for n, device in enumerate(devices)]
    if not checked:
        raise InvalidArgument("devices is empty; at least one device number is needed, such as [0]")
    return checked


def check_ordinal(device: Any, what: str, count: int, backend: str) -> int:
    allowed = f"there are {count} {backend} devices: " + (f"0 to {count - 1}" if count > 1 else "0")
    if isinstance(device, bool):
        raise InvalidArgument(f"{what} is {device}, a bool; a device number is allowed, {allowed}")
    if isinstance(device, str | bytes):
        raise InvalidArgument(f"{what} is the text {device!r}; a device number is allowed, {allowed}")
    if isinstance(device, float):
        raise InvalidArgument(f"{what} is {device!r}, no whole number; a device number is allowed, {allowed}")
    try:
        ordinal = operator.index(device)
    except TypeError:
        raise InvalidArgument(
            f"{what} is {device!r}, a {type(device).__name__}; a device number is allowed, {allowed}"
        ) from None
    if not 0 <= ordinal < count:
        raise InvalidArgument(f"{what} is {ordinal}; {allowed}")
    return ordinal


def check_stages(stages: Any) -> list[Stage]:
    """`stages` as a list of Stage."""
    if isinstance(stages, Stage) or not isinstance(stages, Iterable):
        raise InvalidArgument(f"stages is {stages!r}; a sequence of callables or Stages is allowed")
    checked = []
    for n, stage in enumerate(stages):
        if not isinstance(stage, Stage | CFunction) and not callable(stage) and pointer(stage) is None:
            raise InvalidArgument(f"stages[{n}] is {stage!r}; a callable, a C function or a Stage is allowed")
        checked.append(stage if isinstance(stage, Stage) else Stage(stage))
    if not checked:
        raise InvalidArgument("stages is empty; at least one stage is needed")
    return checked


def place(devices: Any, stages: Sequence[Stage], count: int, backend: str) -> list[int]:
    """The device of each stage: its own, or else one device after the other, in equal shares of neighbouring stages."""
    ordinals = check_ordinals(devices, count, backend)
    if len(ordinals) > len(stages):
        raise InvalidArgument(
            f"there are {len(ordinals)} devices for {len(stages)} stages; at most one device for each stage is allowed"
        )
    spread = [ordinals[n * len(ordinals) // len(stages)] for n in range(len(stages))]
    return [
        spread[n] if stage.device is None else check_ordinal(stage.device, f"the device of stage {n}", count, backend)
        for n, stage in enumerate(stages)
    ]


def wire(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """The numbers of the stages that each one reads. Every output but the last has a reader: it is by its readers that
    the end of a microbatch is known."""
    if stages[0].inputs is not None:
        raise InvalidArgument(
            f"inputs of stage 0 ({stages[0].label}) is {stages[0].inputs!r}; the first stage gets what is submitted"
        )
    wired = [(), *(_sources(stages, n) for n in range(1, len(stages)))]
    unread = set(range(len(stages) - 1)).difference(*wired)
    for n in sorted(unread):
        raise InvalidArgument(f"nothing reads the output of stage {n} ({stages[n].label}); a later one's inputs must")
    return wired


def _sources(stages: Sequence[Stage], n: int) -> tuple[int, ...]:
    inputs = stages[n].inputs
    if inputs is None:
        return (n - 1,)
    if isinstance(inputs, str | int):
        return (_source(stages, n, inputs),)
    if not isinstance(inputs, Sequence):
        raise InvalidArgument(
            f"inputs of stage {n} is {inputs!r}; a stage before it by name or number is allowed, or a sequence of them"
        )
    return tuple([_source(stages, n, one) for one in inputs])


def _source(stages: Sequence[Stage], n: int, given: Any) -> int:
    names = [stage.label for stage in stages[:n]]
    if isinstance(given, str) and names.count(given) == 1:
        return names.index(given)
    if isinstance(given, int) and not isinstance(given, bool) and -n <= given < n:
        return given % n
    several = isinstance(given, str) and given in names
    raise InvalidArgument(
        f"inputs of stage {n} has {given!r}, which {'several' if several else 'none'} of the stages before it have for "
        f"a name; allowed: -{n} to {n - 1}, {', '.join(sorted(set(names)))}"
    )


def slots(depth: int, sources: tuple[int, ...], n: int, in_flight: int) -> int:
    """Slots of stage n, if there are `depth` for a hop between neighbours: what comes past other stages waits there
    until they are through with it."""
    return max(depth, min(in_flight, n - min(sources, default=n) + 1)) if len(sources) else depth


def bound(value: Any, what: str, automatic: int) -> int:
    """in_flight or depth: "auto" or a number from 1 up."""
    if isinstance(value, str) and value == "auto":
        return automatic
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_IN_FLIGHT:
        raise InvalidArgument(f"{what} is {value!r}; allowed: auto, or a whole number from 1 to {MOST_IN_FLIGHT}")
    return value


def patience(watchdog: Any) -> float:
    """The watchdog's seconds; inf for None."""
    if watchdog is None:
        return math.inf
    if isinstance(watchdog, bool) or not isinstance(watchdog, int | float) or not watchdog > 0:
        raise InvalidArgument(f"watchdog is {watchdog!r}; seconds above 0 are allowed, or None for none")
    return watchdog


def check_graph(value: Any, what: str) -> str:
    """How stages use graphs."""
    if value not in GRAPH:
        raise InvalidArgument(f"{what} is {value!r}; allowed: {', '.join(GRAPH)}")
    return str(value)


def automatic_in_flight(stages: int) -> int:
    """Twice the stages: as many starve no stage when their times vary by 30 %."""
    return 2 * stages
