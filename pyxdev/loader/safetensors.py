"""Reads the header of a .safetensors file. Pure: imports nothing of ours but header.py and errors.py.

The file is a 64-bit little-endian header length, the header (a JSON object: name -> dtype, shape, data_offsets), then
the data. Every byte of the data belongs to exactly one tensor. A header may be at most MAX_HEADER bytes: a limit of
this reader, not of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, TypeGuard

from pyxdev.errors import FileRefused
from pyxdev.loader.header import (
    MAX_VALUES,
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

MAX_HEADER = 256 << 20
MAX_RANK = 64

# Bits of one value. F4 and F6 values are packed; a shape counts values.
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_TYPES = [(name, 1, bits) for name, bits in BITS.items()]
_CHUNK = 4 << 20

Pairs = tuple[tuple[str, Any], ...]  # a JSON object, with its duplicates; a JSON array is a list


def read(file: ModelFile, scanner: Scanner | None = None) -> Header:
    """The header of an opened file, tensors in the order of their data. A scanner is asked first, if there is one.

    Raises FileRefused for anything that is not a whole, well-formed file.
    """
    head = file.read(0, min(64, file.size))
    check_impostor(file, head)
    if not head:
        raise refused(file.path, "empty file: a header length of 8 bytes is wanted, 0 bytes are present")
    if len(head) < 8:
        raise refused(file.path, f"too short for a header length: 8 bytes wanted, {len(head)} bytes present")
    length = int.from_bytes(head[:8], "little")
    if length == 0:
        raise refused(file.path, "empty header: the header length is 0")
    if length > file.size - 8:
        raise refused(
            file.path,
            f"the header length is {length}, the file size is {file.size}: "
            "not a safetensors file, or cut inside the header",
        )
    if length > MAX_HEADER:
        raise refused(file.path, f"the header length is {length}, over the cap of {MAX_HEADER} bytes of this reader")

    text = _read_text(file, 8, length)
    base = 8 + length
    if scanner and (scan := scanner.scan_safetensors(text, file.size - base, _TYPES)):
        found = Tensors.scanned(scan, base, "strict")
        if found.distinct:
            stated = _metadata(file, _parse_json(file, 8, scan.metadata)) if scan.metadata else {}
            return Header("safetensors", found, stated)
    pairs = _object(file, _parse_json(file, 8, text), "the header")
    metadata: dict[str, str] = {}
    entries: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for name, entry in pairs:
        if name == "__metadata__":
            metadata = _metadata(file, entry)
        else:
            entries.append(_entry(file, name, entry))
    if len(dict(pairs)) < len(pairs):
        raise _duplicate(file, [name for name, _ in pairs])
    entries.sort(key=itemgetter(0, 1))
    _check_cover(file, entries, file.size - base)
    tensors = [Tensor(name, dtype, shape, base + begin, end - begin) for begin, end, name, dtype, shape in entries]
    return Header("safetensors", Tensors.listed(tensors), metadata)


def read_json(file: ModelFile, offset: int, length: int) -> Any:
    """JSON text of a file. Objects come as tuples of pairs, so that duplicate keys stay visible; arrays as lists."""
    return _parse_json(file, offset, _read_text(file, offset, length))


def _read_text(file: ModelFile, offset: int, length: int) -> bytes:
    chunks: list[bytes] = []
    for at in range(0, length, _CHUNK):
        chunk = file.read(offset + at, min(_CHUNK, length - at))
        if (zero := chunk.find(0)) >= 0:  # before the rest of a sparse giant is read
            raise refused(file.path, f"not JSON: byte 0 at offset {offset + at + zero}")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse_json(file: ModelFile, offset: int, text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=tuple)
    except UnicodeDecodeError as error:
        raise refused(file.path, f"not JSON: not UTF-8 at byte {offset + error.start}") from error
    except RecursionError as error:
        raise refused(file.path, "not JSON that can be read: nested too deep") from error
    except ValueError as error:
        raise refused(file.path, f"not JSON: {error}") from error


def _object(file: ModelFile, value: Any, what: str, tensor: str | None = None) -> Pairs:
    if not isinstance(value, tuple):
        raise refused(file.path, f"{what} is not an object but {_json_kind(value)}", tensor)
    return value


def _metadata(file: ModelFile, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    pairs = _object(file, value, "__metadata__")
    for key, text in pairs:
        if not isinstance(text, str):
            raise refused(file.path, f"__metadata__ holds a non-string: {shown(key)} is {_json_kind(text)}")
    metadata = dict(pairs)
    if len(metadata) < len(pairs):
        raise _duplicate(file, [key for key, _ in pairs], "key of __metadata__")
    return metadata


def _entry(file: ModelFile, name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    pairs = _object(file, entry, "its entry", name)
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise refused(file.path, f"a field stands twice in its entry: {[key for key, _ in pairs]}", name)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(dtype, str):
        found = shown(dtype) if isinstance(dtype, str) else _json_kind(dtype)
        raise refused(file.path, f"unknown dtype {found}; known: {' '.join(BITS)}", name)
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise refused(
            file.path,
            f"shape: at most {MAX_RANK} whole numbers of 0 to 2**63-1 are wanted, found {_brief(shape)}",
            name,
        )
    if not _counts(offsets) or len(offsets) != 2:
        raise refused(
            file.path, f"data_offsets: two whole numbers of 0 to 2**63-1 are wanted, found {_brief(offsets)}", name
        )
    begin, end = offsets
    if end < begin:
        raise refused(file.path, f"data_offsets: the end {end} is before the start {begin}", name)
    values = count_values(shape)
    if values is None:
        raise refused(file.path, f"shape {_brief(shape)} has more than 2**63-1 values", name)
    if values * bits % 8:
        raise refused(file.path, f"{values} values of {dtype} ({bits} bits each) do not fill whole bytes", name)
    if values * bits // 8 != end - begin:
        raise refused(
            file.path,
            f"shape {_brief(shape)} of {dtype} wants {values * bits // 8} bytes, "
            f"data_offsets [{begin}, {end}] hold {end - begin}",
            name,
        )
    if not name.isascii() and not _is_unicode(name):
        raise refused(file.path, "its name is not valid Unicode (a lone surrogate)", name)
    return begin, end, name, dtype, tuple(shape)


def _check_cover(file: ModelFile, entries: list[tuple[int, int, str, str, tuple[int, ...]]], present: int) -> None:
    """The tensors, sorted by their data, must cover all `present` bytes without overlap or gap."""
    reached, before = 0, None
    for begin, end, name, _, _ in entries:
        if begin < reached:
            raise refused(
                file.path,
                f"overlaps tensor {shown(before or '')}: it starts at {begin}, where the other ends at {reached}",
                name,
            )
        if begin > reached:
            after = "the header" if before is None else f"tensor {shown(before)}"
            raise refused(file.path, f"a gap of {begin - reached} bytes between {after} and this tensor", name)
        if end > present:
            raise refused(file.path, f"cut short: {end - begin} bytes wanted, {max(0, present - begin)} present", name)
        reached, before = end, name
    if reached < present:
        raise refused(
            file.path,
            f"{present - reached} bytes after the last tensor: {reached} bytes of data wanted, {present} found",
        )


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_VALUES for item in value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _duplicate(file: ModelFile, names: Iterable[str], what: str = "tensor name") -> FileRefused:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            break
        seen.add(name)
    return refused(file.path, f"duplicate {what} {shown(name)}")


def _brief(value: Any) -> str:
    return shown(str(value)) if isinstance(value, list) else _json_kind(value)


def _json_kind(value: Any) -> str:
    if value is None:
        return "missing"
    kinds: dict[type, str] = {tuple: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), f"a number ({shown(str(value))})")
