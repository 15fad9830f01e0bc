"""Reads the header of a .gguf file. Pure: imports nothing of ours but header.py and errors.py.

Versions 2 and 3, little-endian. GGUF writes a shape fastest dimension first; here it is reversed, so that it reads like
NumPy's. Alignment is a power of two up to MAX_ALIGNMENT, as in ggml. A header may be at most MAX_HEADER bytes and an
array at most MAX_ITEMS long: limits of this reader, far above any model known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pyxdev.loader.header import (
    Header,
    ModelFile,
    Scanner,
    Tensor,
    Tensors,
    check_impostor,
    count_values,
    refused,
    shown,
)

VERSIONS = (2, 3)
MAX_HEADER = 128 << 20
MAX_ITEMS = 1 << 22
MAX_ALIGNMENT = 1 << 24
MAX_DIMS = 4
MAX_NESTING = 4


class Type(NamedTuple):
    """A ggml type: `values` of a row make one block of `nbytes`."""

    name: str
    values: int
    nbytes: int


# By the type's number. Numbers that are missing were given up by ggml or do not exist yet.
TYPES = {
    0: Type("F32", 1, 4), 1: Type("F16", 1, 2), 2: Type("Q4_0", 32, 18), 3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22), 7: Type("Q5_1", 32, 24), 8: Type("Q8_0", 32, 34), 9: Type("Q8_1", 32, 40),
    10: Type("Q2_K", 256, 84), 11: Type("Q3_K", 256, 110), 12: Type("Q4_K", 256, 144), 13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210), 15: Type("Q8_K", 256, 292), 16: Type("IQ2_XXS", 256, 66), 17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98), 19: Type("IQ1_S", 256, 50), 20: Type("IQ4_NL", 32, 18), 21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82), 23: Type("IQ4_XS", 256, 136), 24: Type("I8", 1, 1), 25: Type("I16", 1, 2),
    26: Type("I32", 1, 4), 27: Type("I64", 1, 8), 28: Type("F64", 1, 8), 29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2), 34: Type("TQ1_0", 256, 54), 35: Type("TQ2_0", 256, 66), 39: Type("MXFP4", 32, 17),
    40: Type("NVFP4", 64, 36), 41: Type("Q1_0", 128, 18),
}  # fmt: skip

# Metadata types by their number, as struct formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_KEY = "general.alignment"
_U64 = struct.Struct("<Q")
_FIRST_READ = 256 << 10
_BLOCK_TYPES = [
    (TYPES[number].name, TYPES[number].values, 8 * TYPES[number].nbytes) if number in TYPES else None
    for number in range(max(TYPES) + 1)
]
_LONGEST_ENTRY = 256  # bytes of a tensor's entry that the scanner waits for
_MAX_SCANNED = 1 << 20  # tensors: bounds the memory that a false count can cost


def read(file: ModelFile, scanner: Scanner | None = None) -> Header:
    """The header of an opened file, tensors in the order of their data. A scanner is asked first, if there is one.

    Strings that are not UTF-8 keep their bytes as surrogate escapes. Metadata values are made when they are asked for.
    Raises FileRefused for anything that is not a whole, well-formed file.
    """
    cursor = _Cursor(file, scanner)
    tensor_count, key_count = _preamble(cursor)
    metadata = _metadata(cursor, key_count)
    alignment = _alignment(file, metadata)
    if (placed := _scan(cursor, tensor_count, alignment)) is not None:
        end = int(placed.offset[-1] + placed.nbytes[-1]) if placed else _round_up(cursor.at, alignment)
    else:
        tensors = _tensors(cursor, tensor_count, alignment)
        data = _round_up(cursor.at, alignment)
        tensors = [tensor._replace(offset=data + tensor.offset) for tensor in sorted(tensors, key=_by_offset)]
        end = _check_cover(file, tensors, data, alignment)
        placed = Tensors.listed(tensors)
    notes = (f"{file.size - end} bytes after the last tensor",) if file.size > _round_up(end, alignment) else ()
    return Header("gguf", placed, metadata, notes)


class _Cursor:
    """Reads a header from its start, growing the part held in memory only as far as lengths say and the file allows."""

    def __init__(self, file: ModelFile, scanner: Scanner | None) -> None:
        self.file = file
        self.scanner = scanner
        self.held = bytearray(file.read(0, min(file.size, _FIRST_READ)))
        self.at = 0

    def need(self, nbytes: int, what: str) -> int:
        """Makes the next nbytes available, steps over them and returns where they start."""
        at, end = self.at, self.at + nbytes
        if end > len(self.held):
            self._grow(end, what)
        self.at = end
        return at

    def _grow(self, end: int, what: str) -> None:
        if end > self.file.size:
            raise refused(
                self.file.path,
                f"cut inside the header: {what} wants {end - self.at} bytes at offset "
                f"{self.at}, {self.file.size - self.at} present",
            )
        if end > MAX_HEADER:
            raise refused(
                self.file.path,
                f"the header is longer than the cap of {MAX_HEADER} bytes of this reader: {what} ends at {end}",
            )
        self.hold(end)

    def hold(self, end: int) -> None:
        """Reads up to `end` at least, which the file and the cap must allow."""
        size = min(self.file.size, MAX_HEADER, max(end, 2 * len(self.held)))
        self.held += self.file.read(len(self.held), size - len(self.held))

    def number(self, code: str, what: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self.held, self.need(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        at = self.need(length, what)
        return self.held[at : at + length].decode("utf-8", "surrogateescape")

    def check_count(self, count: int, least: int, what: str) -> None:
        """`count` things of at least `least` bytes must fit into the rest of the file."""
        if count * least > self.file.size - self.at:
            raise refused(
                self.file.path,
                f"cut inside the header, or a false count: {count} {what} want at least "
                f"{count * least} bytes at offset {self.at}, "
                f"{self.file.size - self.at} present",
            )

    def skip(self, kind: int, what: str, depth: int = 0) -> None:
        """Steps over a value, checking that all of it is there."""
        if kind in _SCALARS:
            self.need(struct.calcsize("<" + _SCALARS[kind]), what)
        elif kind == _STRING:
            self.need(self.number("Q", what), what)
        elif kind == _ARRAY:
            self._skip_array(what, depth)
        else:
            raise refused(self.file.path, f"{what} has type {kind}; known: 0 to 12")

    def _skip_array(self, what: str, depth: int) -> None:
        if depth == MAX_NESTING:
            raise refused(self.file.path, f"{what} is nested deeper than {MAX_NESTING}")
        item, count = self.number("I", what), self.number("Q", what)
        if item in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[item])
            self.check_count(count, width, f"values of {what}")
            self.need(count * width, what)
            return
        self.check_count(count, 8 if item == _STRING else 12, f"values of {what}")
        if count > MAX_ITEMS:
            raise refused(self.file.path, f"{what} has {count} values, over the cap of {MAX_ITEMS} of this reader")
        if item == _STRING:
            self._skip_strings(count, what)
            return
        for _ in range(count):
            self.skip(item, what, depth + 1)

    def _skip_strings(self, count: int, what: str) -> None:
        """The hot loop: a vocabulary has hundreds of thousands of strings."""
        if self.scanner and (end := self.scanner.scan_gguf_strings(self.held, self.at, count)) is not None:
            self.at = end
            return
        unpack, held, at, limit = _U64.unpack_from, self.held, self.at, len(self.held)
        for _ in range(count):
            if at + 8 <= limit:
                step = at + 8 + unpack(held, at)[0]
                if step <= limit:
                    at = step
                    continue
            self.at = at
            self.skip(_STRING, what)
            at, limit = self.at, len(held)
        self.at = at


class _Metadata(Mapping[str, Any]):
    """key -> value, each made from the header's bytes when asked for: a vocabulary costs nothing until it is wanted."""

    def __init__(self, held: bytearray) -> None:
        self._held = held
        self._places: dict[str, tuple[int, int]] = {}

    def __getitem__(self, key: str) -> Any:
        kind, at = self._places[key]
        return self._value(kind, at)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<{len(self)} keys of GGUF metadata>"

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        """The value that starts at `at`, and where it ends. Its bytes were checked when the header was read."""
        if kind == _STRING:
            begin = at + 8
            end = begin + _U64.unpack_from(self._held, at)[0]
            return self._held[begin:end].decode("utf-8", "surrogateescape"), end
        if kind == _ARRAY:
            return self._array(at)
        form = "<" + _SCALARS[kind]
        return struct.unpack_from(form, self._held, at)[0], at + struct.calcsize(form)

    def _array(self, at: int) -> tuple[list[Any], int]:
        item, count = struct.unpack_from("<IQ", self._held, at)
        at += 12
        if item in _SCALARS:
            end = at + count * struct.calcsize("<" + _SCALARS[item])
            if item == _BOOL:
                return [byte != 0 for byte in self._held[at:end]], end
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self._held, at)), end
        values = []
        for _ in range(count):
            value, at = self._value(item, at)
            values.append(value)
        return values, at


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts."""
    file = cursor.file
    check_impostor(file, bytes(cursor.held[:64]))
    if not file.size:
        raise refused(file.path, "empty file: the magic GGUF is wanted, 0 bytes are present")
    magic = bytes(cursor.held[:4])
    if magic != b"GGUF":
        raise refused(file.path, f"the magic GGUF is wanted, found {magic.decode('latin-1')!r}")
    cursor.need(4, "the magic")
    version = cursor.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise refused(
            file.path,
            f"a big-endian file (version bytes {version.to_bytes(4, 'little').hex(' ')}); "
            "only little-endian files load",
        )
    if version not in VERSIONS:
        raise refused(file.path, f"GGUF version {version}; versions {' and '.join(map(str, VERSIONS))} load")
    tensors, keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the metadata count")
    cursor.check_count(keys, 13, "metadata keys")
    cursor.check_count(tensors, 24, "tensors")
    return tensors, keys


def _metadata(cursor: _Cursor, count: int) -> _Metadata:
    metadata = _Metadata(cursor.held)
    for number in range(count):
        key = cursor.string(f"the name of metadata key {number}")
        if key in metadata:
            raise refused(cursor.file.path, f"duplicate metadata key {shown(key)}")
        kind = cursor.number("I", f"the type of metadata key {shown(key)}")
        metadata._places[key] = (kind, cursor.at)
        cursor.skip(kind, f"metadata key {shown(key)}")
    return metadata


def _alignment(file: ModelFile, metadata: _Metadata) -> int:
    if _KEY not in metadata:
        return 32
    kind, _ = metadata._places[_KEY]
    if kind != _UINT32:
        raise refused(file.path, f"{_KEY} has the wrong type: {kind} found, {_UINT32} (unsigned 32 bits) wanted")
    value: int = metadata[_KEY]
    if value == 0 or value & (value - 1) or value > MAX_ALIGNMENT:
        raise refused(file.path, f"{_KEY} {value}; a power of two from 1 to {MAX_ALIGNMENT} is wanted")
    return value


def _scan(cursor: _Cursor, count: int, alignment: int) -> Tensors | None:
    """The tensors as the scanner reads them, or None."""
    file, begin = cursor.file, cursor.at
    if not cursor.scanner or count > _MAX_SCANNED:
        return None
    while True:
        scan = cursor.scanner.scan_gguf(cursor.held, begin, count, alignment, file.size, _BLOCK_TYPES)
        if scan:
            tensors = Tensors.scanned(scan, _round_up(scan.end, alignment), "surrogateescape")
            if not tensors.distinct:
                return None
            cursor.at = scan.end
            return tensors
        held = len(cursor.held)
        if held >= min(file.size, MAX_HEADER, begin + _LONGEST_ENTRY * count):
            return None
        cursor.hold(held + 1)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> list[Tensor]:
    """Tensor entries, offsets still from the start of the data."""
    file, tensors, names = cursor.file, [], set()
    for number in range(count):
        name = cursor.string(f"the name of tensor {number}")
        if name in names:
            raise refused(file.path, f"duplicate tensor name {shown(name)}")
        names.add(name)
        what = f"the entry of tensor {shown(name)}"
        dims = cursor.number("I", what)
        if dims > MAX_DIMS:
            raise refused(file.path, f"{dims} dimensions; at most {MAX_DIMS} are known", name)
        extents = struct.unpack_from(f"<{dims}Q", cursor.held, cursor.need(8 * dims, what))
        kind, offset = struct.unpack_from("<IQ", cursor.held, cursor.need(12, what))
        nbytes = _nbytes(file, name, kind, extents)
        if offset % alignment:
            raise refused(file.path, f"its offset {offset} is not a multiple of the alignment {alignment}", name)
        tensors.append(Tensor(name, TYPES[kind].name, extents[::-1], offset, nbytes))
    return tensors


def _nbytes(file: ModelFile, name: str, kind: int, extents: tuple[int, ...]) -> int:
    block = TYPES.get(kind)
    if block is None:
        raise refused(file.path, f"type {kind} is not known; known: {' '.join(map(str, TYPES))}", name)
    values = count_values(extents)
    if values is None or max(extents, default=0) > 2**63 - 1:
        raise refused(file.path, f"dimensions {list(extents)} make more than 2**63-1 values", name)
    row = extents[0] if extents else 1
    if row % block.values:
        raise refused(file.path, f"{row} values do not fill blocks of {block.values} ({block.name})", name)
    return values // block.values * block.nbytes


def _check_cover(file: ModelFile, tensors: list[Tensor], data: int, alignment: int) -> int:
    """The tensors, sorted by offset, must lie in the file without overlap and with no more than padding in between."""
    end, before = data, None
    for tensor in tensors:
        if tensor.offset < end:
            raise refused(file.path, f"overlaps tensor {shown(before or '')}: it starts at {tensor.offset}, "
                                     f"where the other ends at {end}", tensor.name)  # fmt: skip
        if tensor.nbytes and tensor.offset + tensor.nbytes > file.size:
            raise refused(file.path, f"ends after the file: {tensor.nbytes} bytes wanted at offset {tensor.offset}, "
                                     f"{max(0, file.size - tensor.offset)} present", tensor.name)  # fmt: skip
        if tensor.offset > _round_up(end, alignment):
            after = "the header" if before is None else f"tensor {shown(before)}"
            raise refused(
                file.path, f"a gap of {tensor.offset - end} bytes between {after} and this tensor", tensor.name
            )
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return end


def _by_offset(tensor: Tensor) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
