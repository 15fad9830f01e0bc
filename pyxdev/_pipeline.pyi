"""What the executor does for every stage of every microbatch; executor/stages.py has the order of it all."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from pyxdev._native import Array, Buffer, Event, Lease, Link, Runtime, Stream
from pyxdev.adapters.activation import Spec

_T = TypeVar("_T")

ARRAY: str
PLAIN: str

class Node(NamedTuple):
    """A tuple, list, dict or named tuple; children are Nodes, ARRAY or PLAIN."""

    kind: type
    keys: tuple[Any, ...] | None  # of a dict
    children: tuple[Any, ...]

_Structure = Any  # Node | "array" | "plain"; hashable

def flatten(x: Any, is_array: Callable[[Any], bool] | type | None, arrays: list[Any], plain: list[Any]) -> _Structure:
    """Appends the leaves of x, in order, to arrays and plain; returns the structure. is_array: what tells arrays, or
    their class; None for Arrays alone.

    Raises InvalidArgument for a subclass of tuple, list or dict that build() could not make again.
    """

def build(structure: _Structure, arrays: Iterator[Any], plain: Iterator[Any]) -> Any:
    """The value of this structure, with leaves taken in order."""

def plain_paths(structure: _Structure, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the plain leaves are, in order: the keys and positions that lead to each."""

class Layout:
    """The structure of a value, its arrays, and their places in a block of nbytes bytes, each at a multiple of 256."""

    def __init__(self, structure: _Structure, specs: tuple[Spec, ...]) -> None: ...
    @property
    def structure(self) -> _Structure: ...
    @property
    def specs(self) -> tuple[Spec, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def paths(self) -> list[tuple[Any, ...]]:
        """Of the plain leaves; see plain_paths()."""
    def fits(self, structure: _Structure, arrays: list[Any]) -> bool:
        """Whether a value of this structure, whose arrays tell shape and dtype as a Spec does, has this layout."""
    def same(self, other: Layout) -> bool:
        """Whether values of both look alike. Two layouts of one table nearly always are one object then."""
    def example(self, plain: Sequence[Any]) -> Any:
        """The value with a Spec for each array."""

class Layouts:
    """One Layout for each structure and its arrays."""

    LIMIT: int
    def __init__(self) -> None: ...
    def of(self, structure: _Structure, specs: tuple[Spec, ...]) -> Layout: ...
    def joined(self, parts: tuple[Layout, ...]) -> Layout:
        """Of a tuple of values, whose arrays lie one value after the other."""

class Value:
    """What a stage is given, but for the arrays' memory.

    plain: the plain leaves; filled in by the kernel of the stage where that runs later than it is submitted.
    guess: what is known of them when the next stage is submitted, UNKNOWN where nothing is.
    """

    def __init__(self, layout: Layout, plain: list[Any], guess: Sequence[Any]) -> None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def plain(self) -> list[Any]: ...
    @property
    def guess(self) -> Sequence[Any]: ...
    @property
    def complete(self) -> bool:
        """Whether the plain leaves are there."""
    def values(self) -> list[Any]:
        """The plain leaves."""

class Stopped(Exception):
    """A stage did not queue its work: the microbatch has failed, or one before it has."""

class Activation:
    """A value in memory of a device, or on its way there.

    spans: (offset in a block of the value's layout, address, bytes) of the arrays, empty ones left out.
    keep: what keeps the memory alive.
    ready: the event after which all is there.
    """

    ready: Any  # an Event, set by the stage
    def __init__(self, device: int, value: Value, spans: list[tuple[int, int, int]], keep: Any) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def value(self) -> Value: ...
    @property
    def spans(self) -> list[tuple[int, int, int]]: ...
    @property
    def keep(self) -> Any: ...
    @property
    def layout(self) -> Layout: ...
    def address(self, offset: int) -> int:
        """Where the array lies that has this offset in the layout; 0 for an empty one."""

class Events:
    """Events for a microbatch, which come back when nobody can wait for them any more."""

    def __init__(self, runtime: Runtime) -> None: ...
    def take(self) -> Event: ...
    def lend(self) -> Lease:
        """The same; it comes back by itself."""
    def give_back(self, event: Event) -> None: ...
    def close(self) -> None: ...

class Slot:
    """Device memory for one input of a stage.

    arrived: recorded by whoever filled it. free: recorded by the stage when it is done with it, which is also when its
    outputs are there. Both are events of the microbatch that uses it, or used it last. views: what the adapter made of
    the memory, graphs: what was captured over it, both by layout.
    """

    buffer: Buffer | None
    address: int
    nbytes: int
    arrived: Event
    free: Event
    def __init__(self, never: Event) -> None:
        """never: an event that is not recorded."""
    @property
    def views(self) -> dict[Any, Any]: ...
    @property
    def graphs(self) -> dict[Any, Any]: ...

class SlotRing:
    """Slots used in turn. never: an event that is not recorded."""

    def __init__(self, runtime: Runtime, depth: int, in_flight: int) -> None: ...
    @property
    def ring(self) -> list[Slot]: ...
    @property
    def arrivals(self) -> list[Event]: ...
    @property
    def never(self) -> Event: ...
    def of(self, turn: int) -> Slot:
        """The slot of this turn."""
    def take(self, turn: int, nbytes: int) -> Slot:
        """The same, with room for nbytes. Raises as enlarge(turn, nbytes), a subclass's, which makes room."""

class Blocks:
    """Memory for the outputs of one stage. Whoever queues a reader keeps the block until the stage's stream waits for
    that reader, so memory that comes back may be written by the stage's stream at once."""

    instead: Callable[[int, int], Lease] | None  # asked in place of find(), while it is there
    def __init__(self, runtime: Runtime, device: int, leaving: Any) -> None: ...
    def take(self, turn: int, nbytes: int) -> Lease:
        """A buffer of at least nbytes for microbatch `turn`, for as long as the lease is kept."""
    def find(self, turn: int, nbytes: int) -> Lease:
        """take(), as it is without `instead`."""
    def give(self, output: Activation, complete: Event) -> list[Array] | None:
        """An output that nobody else refers to, as arrays whose `ready` is complete. Its blocks serve again once the
        caller has dropped them, and outlive close(). None where arrays share a block, or one is from elsewhere."""
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None:
        """Blocks still in somebody's hands lose their memory too, but for what was given away."""

class Outputs:
    """Outputs of a stage that are still being read.

    in_flight: microbatches of the executor. most: outputs that are held, one for each reader, when settle() lets go of
    those of the oldest microbatch.
    """

    def __init__(self, stream: Stream, in_flight: int, most: int) -> None: ...
    def reader(self) -> Event:
        """An event for a reader to record; then hold() what it reads."""
    def hold(self, released: Event, keep: Any, turn: int, lent: bool = True) -> None:
        """Keeps outputs until the stage's stream waits for their reader, the microbatch of this turn, which has
        recorded `released`. lent: that is an event of reader()."""
    def settle(self, turn: int) -> None:
        """Lets go of outputs that were handed on depth microbatches ago."""
    def close(self) -> None: ...

def send(link: Link, source: Activation, address: int, free: Event, released: Event, arrived: Event) -> None:
    """Copies an activation to an address in a slot. Its arrays go one after the other on one link, so the first waits
    and the last records; only where a link takes small and large copies different ways, each waits for the one
    before."""

class Copies:
    """Copies of outputs, in memory that serves again once nobody refers to it."""

    def __init__(self, stream: Stream) -> None:
        """stream: copies, and reads nothing that others write while it does."""
    def of(self, output: Activation) -> tuple[list[Array], Event | None]:
        """Queues copies of an activation's arrays, if there are any, and records the event that is the `ready` of all.
        Raises what allocating and queueing raise; then some copies may be on their way."""
    def close(self) -> None:
        """Memory of copies that are still in use goes with them."""

class Costs:
    """What it costs to submit: the host's time for the last `kept` microbatches, seconds on the runtime's clock.

    begin(), lap() after each stage, and end(); pause() and resume() around a wait that is no cost.
    """

    def __init__(self, runtime: Runtime, stages: int, kept: int) -> None: ...
    def begin(self) -> None: ...
    def lap(self, stage: int) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...
    def means(self) -> list[float]:
        """Of each stage, and of what is besides."""
    def span(self) -> tuple[int, float]:
        """How many microbatches are kept, and the time from the beginning of the first to the end of the last."""

class Epoch:
    """The microbatches from one delivered error to the next. The first that fails cancels those after it."""

    failed: Microbatch | None
    def __init__(self) -> None: ...
    @property
    def over(self) -> bool:
        """Whether the ticket of the failed microbatch is gone, so that nobody can ask for its error any more."""

class Microbatch:
    """One input on its way. index: its place in the order of submission. turn: counts those that were admitted. end:
    the event recorded at the end of the last stage, lent by exit. ticket: a weak reference.

    Kernels that run later than they are submitted look at `stopped` first and report with fail().
    """

    error: BaseException | None
    cancelled: bool
    output: Activation | None
    ticket: Callable[[], Any] | None
    def __init__(self, index: int, turn: int, epoch: Epoch, ends: Events) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def exit(self) -> Lease: ...
    @property
    def end(self) -> Event: ...
    @property
    def stopped(self) -> bool:
        """Whether it has failed, or one before it has."""
    def fail(self, error: BaseException) -> None:
        """The first error of a microbatch is kept."""
    def outcome(self) -> BaseException | None:
        """The error to raise, once the device is through with the microbatch."""

class StageCore:
    """What a stage queues for every microbatch.

    ends: events of microbatches, by turn; not of the last stage. streams: its own, which is `stream`, and for the last
    stage, if it has graphs, one where what they have written is copied. kept: others than the next stage read the
    outputs; output: the latest, if so. fn: the stage's function. work: queues it; a trace puts itself in between.
    """

    is_last: bool
    kept: bool
    output: Any  # Activation | None
    fn: Any
    sync_check: str | None
    work: Callable[..., Activation]
    def __init__(self, stream: Stream, slots: SlotRing, outputs: Outputs, index: int, in_flight: int) -> None: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def slots(self) -> Any: ...
    @property
    def outputs(self) -> Outputs: ...
    @property
    def ends(self) -> list[Event]: ...
    @property
    def streams(self) -> list[Stream]: ...
    @property
    def index(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def run(self, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Queues the stage for one microbatch whose input is in the slot, or on its way there."""
    def leave(self, batch: Microbatch, slot: Slot) -> None:
        """What the stage has queued for a microbatch ends here. For the last stage that is the microbatch's own end."""
    def aside(self) -> Stream:
        """A stream that goes on from what has been queued so far, beside the stage's next work. The microbatch ends
        there."""
    def close(self) -> None: ...

class Hop:
    """From one stage to the next."""

    def __init__(self, link: Link, producer: StageCore, consumer: StageCore) -> None: ...
    @property
    def producer(self) -> Any: ...
    @property
    def consumer(self) -> Any: ...
    def run(self, batch: Microbatch, source: Activation) -> Activation:
        """Queues the copy of the producer's outputs into the consumer's next slot, and the consumer."""
    def sent(self) -> list[tuple[int, int]]:
        """(device, bytes) of what the latest microbatch has sent from there."""
    def close(self) -> None:
        """Nothing was opened."""

class Order:
    """A lock that knows its owner: a stage that submits to its own executor would wait for its own end."""

    def __init__(self) -> None: ...
    def run(self, act: Callable[..., _T], *args: Any) -> _T:
        """Calls act, one thread at a time. Raises InvalidArgument for a thread that is inside already."""

class Source:
    """An array on a device that a copy is going to read."""

    def __init__(self, device: int, address: int, ready: Event | None, keep: Any, stream: Stream | None) -> None:
        """ready: after which it is there. keep: what keeps its memory alive. stream: of the owner, whose work so far
        the copy comes after, and whose next work after the copy."""
    @property
    def device(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def ready(self) -> Event | None: ...
    @property
    def keep(self) -> Any: ...
    @property
    def stream(self) -> Stream | None: ...

class Piece:
    """An array of an earlier microbatch's result, on the last stage's device."""

    def __init__(self, activation: Activation, position: int) -> None: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def position(self) -> int: ...

class InputCopies:
    """Brings inputs into the slots of the first stage. A subclass has read_parts(x, executor), for what is no array;
    gather(turn, source, slot), for what is neither the output of a microbatch nor one array on a device; and
    foreign(leaf, error), what is raised for an array whose stream the runtime does not take."""

    def __init__(
        self, stage: StageCore, last: StageCore, links: Any, adapter: Any, layouts: Layouts, in_flight: int
    ) -> None:
        """stage, last: the first and the last of the line. links: whose between(src, dst) is a Link. adapter: of the
        first stage."""
    @property
    def stage(self) -> Any: ...
    @property
    def last(self) -> Any: ...
    @property
    def adapter(self) -> Any: ...
    @property
    def layouts(self) -> Layouts: ...
    def read(self, x: Any, executor: Any) -> Activation:
        """What is no ticket, as an activation whose arrays are still where they were and whose `ready` is None. Raises
        InvalidArgument for what cannot be sent, Cancelled for a ticket in it that has no result."""
    def send(self, batch: Microbatch, source: Activation) -> Slot:
        """Queues the copies into the first stage's slot of this turn."""
    def source(self, leaf: Any) -> Source | None:
        """An array, or a Piece, as a copy takes it. None for one on the host."""
    def copy(self, turn: int, leaf: Any, source: Source, slot: Slot, offset: int, nbytes: int, arrived: Event) -> None:
        """Copies an array of the caller's, which is kept until the microbatch has left, or a Piece, which is held until
        it has been read. It is done in the order of its owner's stream, if it has one, which itself copies within a
        device: that takes the fewest events."""
    def close(self) -> None: ...

class RawStage:
    """What a raw stage is given: its device, its stream, and memory in stream order.

    Whose the memory is, leases of leases tell. A block is ours for as long as its lease is alive; what the stage gets
    refers to a second lease, of the first. When nothing of the stage refers to the memory any more, through whatever
    array, view or export, the second one puts the first on the list `dropped`.
    """

    turn: int
    def __init__(self, stream: Stream, blocks: Blocks, index: int) -> None: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def device(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def dropped(self) -> list[Lease]: ...
    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised memory, free to be written by the stage's stream. It serves again when nobody refers to it."""
    def call(self, fn: Any, slot: Slot, incoming: Value, arrays: list[Any], plain: list[Any]) -> _Structure:
        """Calls fn(self, x) with Arrays over the slot, and takes apart what it returns; see flatten().

        Raises InvalidArgument for an array that cannot be an output, and what fn raises."""
    def output(self, layout: Layout, arrays: list[Any], plain: list[Any]) -> Activation:
        """The outputs, and copies of those whose memory is not from empty() or that the stage keeps. Only `arrays` may
        refer to them on our side; it is emptied."""
    def copy(self, address: int, nbytes: int) -> Lease:
        """A copy, in stream order."""

class Call:
    """A C function (xd_function in native/xdev.h) for inputs and outputs of known layouts, each packed in a block."""

    def __init__(self, stream: Stream, blocks: Blocks, function: int, user: int, given: Layout, value: Value) -> None:
        """given: of the input. value: the output."""
    def now(self, slot: Slot, turn: int) -> Activation:
        """Calls it, without the GIL and with the stream's device current. Raises FunctionFailed for what it returns
        other than 0."""
    def later(
        self, slot: Slot, turn: int, batch: Any, failed: Callable[[Any], object], cost: float, label: str
    ) -> Activation:
        """Calls it when the simulated stream gets there, unless batch.stopped. cost: seconds of the compute engine.
        failed: takes what it returned, if not 0, or the exception that kept it from being called."""

class Storages:
    """What torch tells of the memory that tensors share. native: torch._C."""

    def __init__(self, native: Any) -> None: ...
    def users(self, tensor: Any) -> int:
        """How many tensors share its memory. 0 where this torch cannot tell."""

class Views:
    """The tensors that a layout makes of a slot's memory."""

    def __init__(self, memory: Any, tensors: list[Any], storages: Storages) -> None: ...
    @property
    def memory(self) -> Any: ...
    @property
    def tensors(self) -> list[Any]: ...

class Loans:
    """Outputs of a torch stage that are the caller's results as they are.

    Their memory is the stage's stream's, as torch's allocator sees it: it would serve the stage again at once when the
    caller drops them, although his stream may still have to read it. So we keep another tensor over it until he has,
    and then the stage's stream waits for his.
    """

    def __init__(self, storages: Storages) -> None: ...
    def lend(self, tensor: Any, stream: Stream, theirs: tuple[int, int, int]) -> None:
        """theirs: the caller's stream as torch knows it."""
    def settle(self, stream: Stream) -> None:
        """Lets go of some that the caller has dropped; stream, the stage's, waits for his."""
    def close(self) -> list[tuple[Any, tuple[int, int, int]]]:
        """Those that the caller still has, and his streams."""

class TorchStage:
    """What the torch adapter does for every microbatch. A subclass has is_other_array(leaf), other_spec(leaf) and
    other_source(runtime, leaf), for leaves that are no tensors; dense(tensor); describe(tensor), the Spec of one of a
    kind that was not seen before; open_stream(stage); make_views(stage, slot, value); and watched(stage, x), which
    calls a stage that has sync_check."""

    def __init__(self, torch: Any, layouts: Any, streams: Any) -> None:
        """streams: whose of(runtime, device, handle) is a Stream."""
    def is_array(self, leaf: Any) -> bool: ...
    def spec(self, leaf: Any) -> Spec: ...
    def source(self, runtime: Runtime, leaf: Any) -> Source | None:
        """In the order of the caller's current stream."""
    def run(self, stage: Any, batch: Microbatch, slot: Slot, incoming: Value) -> Activation: ...
    def call(self, stage: Any, views: Views, incoming: Value) -> Activation:
        """Calls the stage's function on aliases of the views, with its stream and device current, and takes its outputs
        over. Raises what the function raises, InvalidArgument for outputs that cannot be sent."""
    def outgoing(self, device: int, value: Value, tensors: list[Any]) -> Activation:
        """A value whose arrays are these tensors."""
    def enter(self, stage: Any) -> Any:
        """Makes the stage's stream and device torch's current ones; leave() takes what it returns."""
    def leave(self, before: Any) -> None: ...
    def own(self, stage: Any, arrays: list[Any], n: int) -> Spec:
        """Makes output n a dense tensor that only we refer to."""
    def device_of(self, tensor: Any) -> int:
        """Its ordinal, or HOST. Raises InvalidArgument for a tensor elsewhere."""
    def their_stream(self, runtime: Runtime, device: int) -> Stream:
        """torch's current stream there."""
    def copy_of(self, tensor: Any, nbytes: int, stream: Stream) -> Any:
        """A dense tensor's copy, made by the current stream of its device, as which it is given. clone() is slower."""
    def views(self, memory: Any, tensors: list[Any]) -> Views: ...
    @property
    def loans(self) -> Loans: ...
    def lend(self, tensors: list[Any], stream: Stream) -> bool:
        """Gives these outputs, which are complete, to the caller, whose current stream this is. False if he must have
        copies."""
