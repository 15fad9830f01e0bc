"""What the header readers share: an opened model file, what a header says, and how one is refused. Pure Python."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pyxdev.errors import FileRefused, ReadError

MAX_VALUES = 2**63 - 1  # what a shape may multiply up to; also the largest single dimension


BlockType = tuple[str, int, int]  # name; values and bits of a block


class Tensor(NamedTuple):
    """One tensor of a file. `shape` counts values, slowest dimension first (row-major), whatever order the file uses;
    `offset` is from the start of the file; `dtype` is the file's own name for the type ("F32", "BF16", "Q4_1")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


_Kind = TypeVar("_Kind")


class Scan(Protocol):
    """The entries of a clean header; see pyxdev._native."""

    @property
    def entries(self) -> bytearray: ...
    @property
    def extents(self) -> bytearray: ...
    @property
    def metadata(self) -> bytes: ...
    @property
    def end(self) -> int: ...
    def tensors(self, base: int, undecodable: str, kind: type[_Kind], /) -> list[_Kind]: ...
    def numbers(self, words: Sequence[str], /) -> bytearray: ...


class Scanner(Protocol):
    """Reads clean headers fast, and answers None for all others: pyxdev._native, or nothing."""

    def scan_safetensors(self, header: bytes, present: int, types: Sequence[BlockType | None], /) -> Scan | None: ...

    def scan_gguf(
        self,
        held: bytearray,
        at: int,
        count: int,
        alignment: int,
        file_bytes: int,
        types: Sequence[BlockType | None],
        /,
    ) -> Scan | None: ...

    def scan_gguf_strings(self, held: bytearray, at: int, count: int, /) -> int | None: ...


Column = NDArray[np.int64]
# An entry of a Scan, as C lays it out.
_ENTRY = np.dtype(
    [("offset", "u8"), ("nbytes", "u8"), ("name", "u4"), ("name_bytes", "u4"), ("extents", "u4"), ("rank", "u4"),
     ("hash", "u8"), ("type", "i4")],
    align=True,
)  # fmt: skip


class Tensors(Sequence[Tensor]):
    """Tensors in columns, an element each: `offset` and `nbytes` as Tensor has them, `rows` the first dimension of
    those with at least two, 0 of others. The Tensors themselves are made when the first is asked for: a model may have
    twenty thousand, and a load needs none."""

    def __init__(
        self,
        offset: Column,
        nbytes: Column,
        rows: Column,
        hashes: NDArray[np.uint64] | None,
        make: Callable[[], list[Tensor]],
        numbers: Callable[[Sequence[str]], Column],
    ) -> None:
        """hashes: of the names, None where they are not known."""
        self.offset, self.nbytes, self.rows = offset, nbytes, rows
        self.numbers = numbers
        self._hashes, self._make = hashes, make
        self._made: list[Tensor] | None = None

    @classmethod
    def listed(cls, tensors: Iterable[Tensor]) -> Self:
        kept = list(tensors)
        columns = np.array(
            [(one.offset, one.nbytes, one.shape[0] if len(one.shape) > 1 else 0) for one in kept], np.int64
        )
        offset, nbytes, rows = columns.reshape(-1, 3).T
        return cls(
            offset,
            nbytes,
            rows,
            hashes=None,
            make=lambda: kept,
            numbers=lambda words: np.array([number_after(one.name, words) for one in kept], np.int64),
        )

    @classmethod
    def scanned(cls, scan: Scan, base: int, undecodable: str) -> Self:
        """base: where in the file the data begins. undecodable: what is done with a name that is not UTF-8."""
        entries = np.frombuffer(scan.entries, _ENTRY)
        extents = np.append(np.frombuffer(scan.extents, np.int64), 0)  # so that a shape without extents has a place
        return cls(
            entries["offset"].astype(np.int64) + base,
            entries["nbytes"].astype(np.int64),
            np.where(entries["rank"] > 1, extents[entries["extents"]], 0),
            hashes=entries["hash"],
            make=lambda: scan.tensors(base, undecodable, Tensor),
            numbers=lambda words: np.frombuffer(scan.numbers(words), np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Tensors]) -> Tensors:
        """All of the parts, in order."""
        if len(parts) < 2:
            return parts[0] if parts else cls.listed([])
        hashes = [part._hashes for part in parts if part._hashes is not None]
        return cls(
            np.concatenate([part.offset for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            np.concatenate([part.rows for part in parts]),
            hashes=np.concatenate(hashes) if len(hashes) == len(parts) else None,
            make=lambda: list(chain.from_iterable(parts)),
            numbers=lambda words: np.concatenate([part.numbers(words) for part in parts]),
        )

    @property
    def distinct(self) -> bool:
        """Whether their hashes tell that no two have one name. Where they do not tell, the names must be compared."""
        if self._hashes is None:
            return False
        ordered = np.sort(self._hashes)
        return not (ordered[1:] == ordered[:-1]).any()

    def _all(self) -> list[Tensor]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return len(self.nbytes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def number_after(name: str, words: Sequence[str]) -> int:
    """The number of up to nine digits that follows one of the words in a name, both between dots: 3 in "blk.3.w". The
    first one, or -1."""
    for word, digits in pairwise(name.split(".")):
        if word in words and len(digits) <= 9 and digits.isascii() and digits.isdigit():
            return int(digits)
    return -1


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a header says, checked against the size of the file. `notes` are oddities that do not stop a load."""

    format: str
    tensors: Tensors
    metadata: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def shown(text: str, limit: int = 120) -> str:
    """A name as it may stand in a message: control characters and broken Unicode escaped, long names cut."""
    cut = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    return cut if cut and cut.isprintable() and cut == cut.strip() else repr(cut)


def refused(path: str, problem: str, tensor: str | None = None) -> FileRefused:
    """The error for a file that cannot be loaded; `problem` says what was wanted and what was found."""
    where = shown(path, 4096) + (": " if tensor is None else f": tensor {shown(tensor)}: ")
    return FileRefused(where + problem, operation="read_header")


class ModelFile:
    """A regular file opened for reading. Holds the descriptor until close(); `size` is the size when it was opened.

    Raises FileRefused for what is not a regular file, ReadError when the system refuses to open it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        self.fd = -1
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer. It changes nothing for a regular file.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        except FileNotFoundError as error:
            raise refused(self.path, _missing(self.path)) from error
        except ValueError as error:  # a NUL in the path
            raise refused(self.path, str(error)) from error
        except OSError as error:
            self.close()
            text = f"{shown(self.path, 4096)}: cannot be opened: {error.strerror}"
            raise ReadError(text, status="READ", code=error.errno or 0, operation="open") from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise refused(self.path, f"a regular file is wanted, this is {_kind(status.st_mode)}")
        self.size = status.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly nbytes at offset. FileRefused if the file ends before, ReadError if the system fails."""
        parts: list[bytes] = []
        got = 0
        while got < nbytes:
            try:
                part = os.pread(self.fd, min(nbytes - got, 1 << 30), offset + got)
            except OSError as error:
                text = f"{shown(self.path, 4096)}: reading {nbytes} bytes at {offset} failed: {error.strerror}"
                raise ReadError(text, status="READ", code=error.errno or 0, operation="pread") from error
            if not part:
                raise refused(self.path, f"ends early: {nbytes} bytes wanted at offset {offset}, {got} present")
            parts.append(part)
            got += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_impostor(file: ModelFile, head: bytes) -> None:
    """Raises FileRefused where the first bytes show that this is not the model file but a stand-in for it."""
    if head.startswith(b"version https://git-lfs"):
        raise refused(file.path, f"this is a Git LFS pointer, {file.size} bytes; fetch the real file (git lfs pull)")
    if head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        raise refused(file.path, f"this is a page of HTML, {file.size} bytes, not a model; download the file again")


def count_values(shape: list[int] | tuple[int, ...]) -> int | None:
    """The product of a shape, or None when it is above MAX_VALUES. Never makes a number much larger than that."""
    if 0 in shape:
        return 0
    values = 1
    for extent in shape:
        values *= extent
        if values > MAX_VALUES:
            return None
    return values


def _missing(path: str) -> str:
    if os.path.islink(path):
        return f"a link to {shown(os.readlink(path), 4096)}, where there is no file"
    return "no such file"


def _kind(mode: int) -> str:
    kinds = [
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ]
    return next((name for test, name in kinds if test(mode)), f"of mode {mode:o}")
