"""Builds model files byte by byte for tests, whole ones and damaged ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

# ---- safetensors ----


def entry(dtype: Any, shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file of this header (an object, or bytes as they are) and data; `length` lies about the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def packed(tensors: Iterable[tuple[str, str, Sequence[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """A whole file of (name, dtype, shape, bytes)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = bytearray()
    for name, dtype, shape, content in tensors:
        header[name] = entry(dtype, list(shape), len(data), len(data) + len(content))
        data += content
    return safetensors(header, bytes(data))


# ---- gguf ----

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
SCALARS = {UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?",
           UINT64: "Q", INT64: "q", FLOAT64: "d"}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    """A metadata value without its type; an array is (item type, items)."""
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        item, items = content
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, one) for one in items)
    return struct.pack("<" + SCALARS[kind], content)


def key(name: str | bytes, kind: int, content: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + value(kind, content)


def info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's entry; dims fastest first, as the format has them."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    keys: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file of finished parts; `counts` (tensors, keys) lies about how many there are."""
    tensors, pairs = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def packed_gguf(
    tensors: Iterable[tuple[str, int, Sequence[int], bytes]], keys: Sequence[bytes] = (), alignment: int = 32
) -> bytes:
    """A whole file of (name, type, dims fastest first, bytes), each padded to the alignment."""
    infos, data = [], bytearray()
    for name, kind, dims, content in tensors:
        infos.append(info(name, dims, kind, len(data)))
        data += content + bytes(-len(content) % alignment)
    if alignment != 32:
        keys = [*keys, key("general.alignment", UINT32, alignment)]
    return gguf(keys, infos, bytes(data), alignment=alignment)
