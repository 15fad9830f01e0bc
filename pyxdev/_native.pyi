"""The native runtime: streams, events, memory, links, throttle, reader. See native/xdev.h for the rules. What the
public classes do stands with them, for help()."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from pyxdev.settings import Settings

_Kind = TypeVar("_Kind")

HOST: int  # the device ordinal of page-locked host memory

class Driver:
    """A driver table, not yet opened. Given to one Runtime, which takes it over."""

    @property
    def name(self) -> str: ...

class FaultDriver(Driver):
    """Wraps another driver; makes a chosen call fail. Stays usable as a handle after a Runtime took it over."""

    def __init__(self, inner: Driver) -> None: ...
    def arm(self, at: int, *, sticky: bool = False, status: str = "DRIVER") -> None:
        """Call number `at` from now on fails with `status` (a name of xd_status), once or from then on. 0 disarms."""
    @property
    def calls(self) -> int: ...

def cuda_symbols() -> list[tuple[str, int, bool]]:
    """(name, version to ask of cuGetProcAddress, optional) of every entry point the CUDA driver uses."""

def cuda_driver(symbols: Mapping[str, int]) -> Driver: ...
def hip_symbols() -> list[tuple[str, int, bool]]: ...
def hip_driver(symbols: Mapping[str, int]) -> Driver: ...
def sim_faults() -> list[str]:
    """The names of the faults that a simulated machine can have."""

def sim_driver(machine: Mapping[str, Any]) -> SimDriver: ...

class SimDriver(Driver):
    def pass_time(self, seconds: float) -> None:
        """The submitting thread does something else for so many seconds of simulated time."""
    def watch(self, on: bool) -> None:
        """False: the ordering checker says nothing about what comes, for a race on purpose. True: it does again."""
    def violations(self) -> list[str]:
        """What the ordering checker has found so far, raised or not; the first 64 in words."""
    def trace(self) -> list[tuple[str, int, int, int, int, int, int, int, int, int, str]]:
        """What engines and the host did so far, as pyxdev.trace.Span takes it. Needs a machine with run.trace."""

class DeviceInfo:
    name: str
    uuid: str
    pci: str
    arch: str
    memory: int
    integrated: bool
    copy_engines: int

class Live:
    streams: int
    events: int
    graphs: int
    buffers: int
    rings: int
    links: int
    throttles: int
    readers: int
    device_bytes: int
    pinned_bytes: int
    def any(self) -> bool: ...

class Runtime:
    def __init__(self, driver: Driver, *, force_sync: bool = False) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def driver(self) -> Driver: ...
    @property
    def backend(self) -> str: ...
    @property
    def device_count(self) -> int: ...
    def device_info(self, device: int) -> DeviceInfo: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...
    def peer_capable(self, device: int, peer: int) -> bool: ...
    def peer_enable(self, device: int, peer: int) -> bool: ...
    def clock(self) -> float: ...
    force_sync: bool
    managed: bool  # closed by garbage collection, when its last child is gone, without a warning
    settings: Settings  # set by pyxdev.backends.open()
    topology: dict[Any, Any]  # set by pyxdev.topology
    def live(self) -> Live: ...
    def stream(self, device: int) -> Stream: ...
    def adopt_stream(self, device: int, handle: int) -> Stream: ...
    def event(self, *, timing: bool = False) -> Event: ...
    def buffer(self, device: int, nbytes: int, *, managed: bool = False) -> Buffer: ...
    def link(
        self,
        src: int,
        dst: int,
        *,
        path: str = "staged",
        direct_from: int = 0,
        direct_to: int = 0,
        max_bytes: int = 0,
        tile_bytes: int = 0,
        tiles: int = 0,
        rate: float = 0.0,
        gate: bool = True,
    ) -> Link: ...
    def ring(self, tiles: int, tile_bytes: int, pageable: bool = False) -> Ring: ...
    def throttle(self, limit: int) -> Throttle: ...
    def host_access(self, address: int, nbytes: int, *, write: bool) -> None: ...

class Stream:
    @property
    def runtime(self) -> Runtime: ...
    @property
    def device(self) -> int: ...
    @property
    def handle(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def wait(self, event: Event) -> None: ...
    def idle(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> bool: ...
    def fill(self, address: int, byte: int, nbytes: int) -> None: ...
    def copy(
        self,
        dst: int,
        src: int,
        width: int,
        *,
        dst_device: int,
        src_device: int,
        height: int = 1,
        dst_pitch: int = 0,
        src_pitch: int = 0,
    ) -> None: ...
    def begin_capture(self) -> None: ...
    def end_capture(self) -> Graph: ...
    def launch(
        self,
        run: Callable[[], object],
        *,
        cost: float = 0.0,
        label: str = "",
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
        failed: Callable[[BaseException], object] | None = None,
    ) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...

class Event:
    @property
    def device(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def record(self, stream: Stream) -> None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def elapsed_since(self, begin: Event) -> float: ...

class Graph:
    """What a stream captured: copies, fills and kernels, with the addresses they had then."""

    @property
    def device(self) -> int: ...
    def launch(self, stream: Stream) -> None:
        """Queues all of it on a stream of the same device."""
    def close(self) -> None:
        """No launch may be left to run."""
    @property
    def closed(self) -> bool: ...

class Buffer:
    @property
    def runtime(self) -> Runtime: ...
    @property
    def device(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    # Buffer protocol (writable bytes): page-locked memory and simulated devices only; BufferError otherwise.
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Link:
    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def copy(
        self,
        dst: int,
        src: int,
        width: int,
        *,
        height: int = 1,
        dst_pitch: int = 0,
        src_pitch: int = 0,
        source_ready: Event | None = None,
        dest_free: Event | None = None,
        released: Event | None = None,
        arrived: Event | None = None,
    ) -> None: ...
    def drain(self) -> None: ...
    def path(self, nbytes: int) -> str: ...
    def tile(self, nbytes: int) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...

class Tile:
    address: int
    nbytes: int
    index: int

class Ring:
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def tiles(self) -> int: ...
    @property
    def tile_bytes(self) -> int: ...
    @property
    def pageable(self) -> bool: ...
    def acquire(self, timeout: float | None = None) -> Tile | None: ...
    def submit(self, tile: Tile, reader: Stream) -> None: ...
    def release(self, tile: Tile) -> None: ...
    def drain(self) -> None: ...

class Throttle:
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def limit(self) -> int: ...
    def admit(self, timeout: float | None = None) -> bool: ...
    def retire(self, stream: Stream) -> None: ...
    def retire_at(self, lease: Lease) -> None: ...
    def withdraw(self) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def blocked(self) -> float: ...

class Lease:
    """Something that was taken from a list: when nothing refers to the lease any more, it is appended there again."""

    def __init__(self, item: object, home: list[Any]) -> None: ...
    @property
    def item(self) -> Any: ...
    @property
    def home(self) -> list[Any]: ...

class Reader:
    """Runs file pieces into device memory through a pinned ring; see xd_reader in native/xdev.h."""

    def __init__(
        self,
        runtime: Runtime,
        pieces: Any,
        *,
        tiles: int = 0,
        workers: int = 0,
        streams: int = 0,
        tile_bytes: int = 0,
        ring: Ring | None = None,
        async_uploads: bool = True,
        io: str = "auto",
        verify: bool = False,
        calls: int = 0,
    ) -> None:
        """pieces: a C-contiguous int64 array, one row a piece: descriptor, direct descriptor or -1, device, offset,
        bytes, address. workers: threads of run(), each with its share of the tiles; at most 64, 0: 4. streams:
        of a device, 1 to 16; the workers take turns. ring: instead of `tiles` and `tile_bytes`, taken over: it is
        closed here and with the reader. io: "auto" or "direct". verify: checksums are kept for verify().
        calls: address of an xd_io table, for tests."""
    def run(self) -> None:
        """Reads all pieces, on this thread and on threads that end before it returns; then every byte is on its device.
        Without the GIL; Ctrl-C is not seen: keep it off the main thread. Raises the first error of any thread."""
    def verify(self) -> None:
        """Reads back what was uploaded and compares checksums; for a reader opened with verify=True, after run().
        DriverError names the first range that is wrong."""
    def cancel(self) -> None:
        """run() and verify() raise Cancelled, within one tile."""
    def progress(self, device: int) -> tuple[int, int, float, float]:
        """Bytes handed to the device so far, how many of them were read past the page cache, and when the first and the
        last of them were handed over: seconds as time.monotonic() counts them, 0.0 before the first."""
    @property
    def times(self) -> tuple[float, float]:
        """Seconds that all workers together have spent in reads, and waiting for tiles and uploads."""
    def refused(self, fd: int) -> int:
        """The errno with which direct I/O was refused for a file, 0 if it was not."""
    @property
    def failed(self) -> int | None:
        """The first row of `pieces` in the tile that was being read when the first worker failed."""
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

# Clean headers of model files; None says only that somebody else must judge. types: (name, values, bits of a block) by
# number.

class Scan:
    """The entries of a header in file order. Two may still have one name, and then one hash."""

    @property
    def entries(self) -> bytearray:
        """One a tensor, as xd_scan_entry: offset and bytes (uint64), place and length of the name in the header, place
        of the shape in `extents`, dimensions (uint32), hash of the name (uint64), type (int32)."""
    @property
    def extents(self) -> bytearray:
        """The shapes one after the other, uint64."""
    @property
    def metadata(self) -> bytes:
        """The text of __metadata__ of a safetensors file, empty if there is none."""
    @property
    def end(self) -> int:
        """Where the entries of a GGUF file end in the header."""
    def tensors(self, base: int, undecodable: str, kind: type[_Kind]) -> list[_Kind]:
        """kind, a NamedTuple of name, dtype, shape, offset + base and bytes, for each entry. undecodable: what is done
        with a name that is not UTF-8, as in bytes.decode."""
    def numbers(self, words: Sequence[str]) -> bytearray:
        """For each entry (int64) the number of up to nine digits that follows one of the words in its name, both
        between dots; the first one, or -1."""

def scan_safetensors(header: bytes, present: int, types: Sequence[tuple[str, int, int] | None]) -> Scan | None:
    """present: bytes after the header. All of it is UTF-8."""

def scan_gguf(
    held: bytearray,
    at: int,
    count: int,
    alignment: int,
    file_bytes: int,
    types: Sequence[tuple[str, int, int] | None],
) -> Scan | None:
    """The `count` entries from `at` on. `held` must stay as it is while the Scan is used."""

def scan_gguf_strings(held: bytearray, at: int, count: int) -> int | None:
    """Where `count` strings end."""

class Array:
    def __init__(
        self,
        runtime: Runtime,
        device: int,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        *,
        strides: tuple[int, ...] | None = None,
        nbytes: int | None = None,
        owner: object = None,
        ready: Event | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def device(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def owner(self) -> object: ...
    @property
    def exported(self) -> bool:
        """Was the memory ever shown to another library, through this array or one made from it?"""
    @property
    def ready(self) -> Event | None: ...
    @property
    def raw(self) -> Array: ...
    def numpy(self) -> Any: ...
    def torch(self) -> Any: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
