"""What must hold for any bytes given to a header reader: used by the property tests and by the fuzz target."""

from __future__ import annotations

import math
import os
import time

from pyxdev import _native
from pyxdev.errors import FileRefused
from pyxdev.loader import gguf, safetensors
from pyxdev.loader.header import Header, ModelFile, Scanner

LONGEST = 1.0  # seconds
BITS = {name: (1, bits) for name, bits in safetensors.BITS.items()}
BLOCKS = {kind.name: (kind.values, 8 * kind.nbytes) for kind in gguf.TYPES.values()}


def read(path: str, form: str, scanner: Scanner | None) -> Header | str:
    """The header, or the words of its refusal without the path. Anything else that is raised is a fault."""
    begin = time.monotonic()
    try:
        with ModelFile(path) as file:
            return (gguf.read if form == "gguf" else safetensors.read)(file, scanner)
    except FileRefused as error:
        message = str(error)
        assert message.startswith(path + ": ") and message.isprintable(), message
        assert len(message) < 10_000, "a message of this length helps nobody"
        return message.removeprefix(path)
    finally:
        assert time.monotonic() - begin < LONGEST, "took too long"


def check_whole(header: Header, size: int) -> None:
    """What loads is consistent: names once, shapes that fill their bytes, bytes in the file and of one tensor each."""
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)
    reached = 0
    for tensor in header.tensors:
        values, bits = (BLOCKS if header.format == "gguf" else BITS)[tensor.dtype]
        count = math.prod(tensor.shape)
        assert all(0 <= extent < 2**63 for extent in tensor.shape)
        assert count % values == 0 and count // values * bits == 8 * tensor.nbytes
        assert reached <= tensor.offset and (not tensor.nbytes or tensor.offset + tensor.nbytes <= size)
        reached = tensor.offset + tensor.nbytes
    for key in header.metadata:  # every value can be made
        assert header.metadata[key] is not None


def check(path: str, form: str) -> Header | str:
    """Reads with and without the scanner: both must say the same."""
    judged, scanned = read(path, form, None), read(path, form, _native)
    if isinstance(judged, str) or isinstance(scanned, str):
        assert judged == scanned
        return judged
    assert judged.tensors == scanned.tensors and judged.notes == scanned.notes
    for column in ("offset", "nbytes", "rows"):
        assert getattr(judged.tensors, column).tolist() == getattr(scanned.tensors, column).tolist(), column
    words = ("blk", "layers")
    assert judged.tensors.numbers(words).tolist() == scanned.tensors.numbers(words).tolist()
    assert list(judged.metadata) == list(scanned.metadata)
    for header in (judged, scanned):
        check_whole(header, os.stat(path).st_size)
    return judged
