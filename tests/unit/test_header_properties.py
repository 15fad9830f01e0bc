"""Header readers on generated files, whole and damaged: what is written is read, what is damaged is refused or still
consistent, and the fast scanner never says anything that the readers in Python do not."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import header_rules
import model_files as mf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyxdev import _native
from pyxdev.loader import gguf, safetensors
from pyxdev.loader.header import Header, ModelFile

BOUNDED = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)
Named = list[tuple[str, Any, tuple[int, ...], bytes]]  # name, type, shape slowest first, bytes

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["a", 'quo"te', "back\\slash", "blk.0.w", "model.layers.3.w", "\0", "", "{", "dtype", "日本", "\U0001f600", "\x7f"]
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def safetensors_models(draw: Callable[..., Any]) -> Named:
    tensors: Named = []
    for name in draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(safetensors.BITS)))
        shape = draw(SHAPES)
        if math.prod(shape) * safetensors.BITS[dtype] % 8:
            shape = (*shape, 8)
        nbytes = math.prod(shape) * safetensors.BITS[dtype] // 8
        tensors.append((name, dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes))))
    return tensors


@st.composite
def safetensors_files(draw: Callable[..., Any]) -> tuple[Named, bytes]:
    """Tensors, and a file of them: entries and fields in any order, any spacing, padding or none."""
    tensors = draw(safetensors_models())
    entries: list[tuple[str, Any]] = []
    data = b""
    for name, dtype, shape, content in tensors:
        entry = mf.entry(dtype, list(shape), len(data), len(data) + len(content))
        data += content
        entries.append((name, {key: entry[key] for key in draw(st.permutations(sorted(entry)))}))
    if draw(st.booleans()):
        metadata = draw(st.dictionaries(NAMES, NAMES, max_size=3))
        entries.append(("__metadata__", metadata))
    header = dict(draw(st.permutations(entries)))
    text = json.dumps(
        header,
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")])),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, None, 1])),
    ).encode()
    return tensors, mf.safetensors(text + b" " * draw(st.integers(0, 8)), data)


KEY_VALUES = st.one_of(
    st.tuples(st.just(mf.UINT32), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(mf.INT64), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(mf.BOOL), st.booleans()),
    st.tuples(st.just(mf.FLOAT64), st.floats(allow_nan=False)),
    st.tuples(st.just(mf.STRING), NAMES),
    st.tuples(st.just(mf.ARRAY), st.tuples(st.just(mf.STRING), st.lists(NAMES, max_size=5))),
    st.tuples(st.just(mf.ARRAY), st.tuples(st.just(mf.INT16), st.lists(st.integers(-9, 9), max_size=5))),
)


@st.composite
def gguf_files(draw: Callable[..., Any]) -> tuple[Named, bytes]:
    """Tensors, and a file of them: entries in any order, any version, alignment and metadata."""
    tensors: Named = []
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        kind = draw(st.sampled_from(sorted(gguf.TYPES)))
        block = gguf.TYPES[kind]
        dims = draw(st.lists(st.integers(0, 3), max_size=4))
        if dims or block.values > 1:
            dims = [draw(st.integers(0, 2)) * block.values, *dims[1:]]
        nbytes = math.prod(dims) // block.values * block.nbytes
        tensors.append((name, kind, tuple(reversed(dims)), draw(st.binary(min_size=nbytes, max_size=nbytes))))
    alignment = draw(st.sampled_from([1, 8, 16, 32, 64, 256]))
    keys = draw(st.dictionaries(NAMES.filter(lambda key: key != "general.alignment"), KEY_VALUES, max_size=4))
    parts = [mf.key(name, kind, value) for name, (kind, value) in keys.items()]
    if alignment != 32 or draw(st.booleans()):
        parts.append(mf.key("general.alignment", mf.UINT32, alignment))
    infos, data = [], b""
    for name, kind, shape, content in tensors:
        infos.append(mf.info(name, shape[::-1], kind, len(data)))
        data += content + bytes(-len(content) % alignment)
    if data and draw(st.booleans()):  # the last padding may be missing
        data = data[: len(data) - (-len(tensors[-1][3]) % alignment)]
    infos = draw(st.permutations(infos))
    return tensors, mf.gguf(parts, infos, data, version=draw(st.sampled_from([2, 3])), alignment=alignment)


FILES = {"safetensors": safetensors_files(), "gguf": gguf_files()}


def check_content(tensors: Named, content: bytes, header: Header | str) -> None:
    assert isinstance(header, Header), header
    found = {tensor.name: tensor for tensor in header.tensors}
    assert found.keys() == {name for name, *_ in tensors}
    for name, kind, shape, data in tensors:
        tensor = found[name]
        assert tensor.shape == shape
        assert tensor.dtype == (gguf.TYPES[kind].name if header.format == "gguf" else kind)
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == data


@pytest.mark.parametrize("form", FILES)
def test_what_is_written_is_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"model.{form}"

    @BOUNDED
    @given(FILES[form])
    def reads(file: tuple[Named, bytes]) -> None:
        tensors, content = file
        path.write_bytes(content)
        check_content(tensors, content, header_rules.check(str(path), form))

    reads()


@st.composite
def damaged(draw: Callable[..., Any], files: st.SearchStrategy[tuple[Named, bytes]]) -> bytes:
    """A whole file with up to three faults in it: cut, lengthened, bytes or numbers changed, runs copied or dropped."""
    content = bytearray(draw(files)[1])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.integers(0, 6)):
            case 0:
                del content[at:]
            case 1:
                content += draw(st.binary(min_size=1, max_size=40))
            case 2 if content:
                content[at] = draw(st.integers(0, 255))
            case 3:
                special = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, len(content)])
                content[at : at + 8] = struct.pack("<Q", draw(special))
            case 4:
                content[at:at] = content[at : at + draw(st.integers(1, 60))]
            case 5:
                del content[at : at + draw(st.integers(1, 60))]
            case _:
                word = draw(
                    st.sampled_from([b"0", b"9" * 19, b"-1", b'"', b"\\", b"{", b"}", b"[", b",", b"\xff", b"1e9"])
                )
                content[at : at + draw(st.integers(0, 2))] = word
    return bytes(content)


@pytest.mark.parametrize("form", FILES)
def test_what_is_damaged_is_refused_or_consistent(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"model.{form}"

    @settings(BOUNDED, max_examples=250)
    @given(damaged(FILES[form]))
    def holds(content: bytes) -> None:
        path.write_bytes(content)
        header_rules.check(str(path), form)

    holds()


@pytest.mark.parametrize("form", FILES)
def test_the_scanner_does_read_clean_files(tmp_path: Path, form: str) -> None:
    """Otherwise the tests above would compare the readers with themselves."""
    if form == "gguf":
        content = mf.packed_gguf([(f"blk.{n}.w", 8, [64, n % 3], bytes(68 * (n % 3))) for n in range(500)])
    else:
        content = mf.packed([(f"blk.{n}.w", "BF16", [n % 3, 5], bytes(10 * (n % 3))) for n in range(500)], {"a": "b"})
    path = tmp_path / f"model.{form}"
    path.write_bytes(content)
    answers: list[object] = []

    class Spy:
        scan_gguf_strings = staticmethod(_native.scan_gguf_strings)

        @staticmethod
        def scan_gguf(*arguments: Any) -> Any:
            answers.append(_native.scan_gguf(*arguments))
            return answers[-1]

        @staticmethod
        def scan_safetensors(*arguments: Any) -> Any:
            answers.append(_native.scan_safetensors(*arguments))
            return answers[-1]

    header = header_rules.read(str(path), form, Spy())
    assert isinstance(header, Header) and len(header.tensors) == 500
    assert answers[-1] is not None and not header.tensors._made, "a load needs none of them"
    assert header == header_rules.read(str(path), form, None) or form == "gguf"
    assert header.tensors == header_rules.check(str(path), form).tensors  # type: ignore[union-attr]


def test_the_scanner_reads_shapes_of_many_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(mf.packed([(f"t{n}", "U8", [1] * 64, b"x") for n in range(20)]))
    with ModelFile(path) as file:
        length = int.from_bytes(file.read(0, 8), "little")
        scan = _native.scan_safetensors(file.read(8, length), 20, [("U8", 1, 8)])
    assert scan is not None and len(scan.extents) == 20 * 64 * 8
    header = header_rules.check(str(path), "safetensors")
    assert isinstance(header, Header) and header.tensors[19].shape == (1,) * 64


@pytest.mark.parametrize("text", [b'{"k":"\xef"}', b'{"k":"v","k":"w"}', b'{"\xff":""}'])
def test_metadata_is_judged_alike(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    path.write_bytes(mf.safetensors(b'{"__metadata__":' + text + b"," + entry + b"}", b"x"))
    assert isinstance(header_rules.check(str(path), "safetensors"), str)


def test_a_vocabulary_is_skipped_fast_and_right(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    words = [f"w{n}" * (n % 7) for n in range(30_000)]
    keys = [mf.key("tokens", mf.ARRAY, (mf.STRING, words)), mf.key("after", mf.UINT8, 7)]
    path.write_bytes(mf.gguf(keys, [mf.info("a", [8], 0, 0)], bytes(32)))
    header = header_rules.check(str(path), "gguf")
    assert isinstance(header, Header)
    assert header.metadata["tokens"] == words and header.metadata["after"] == 7
