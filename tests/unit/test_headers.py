"""The header readers: what loads, and what every refusal names."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import model_files as mf
import pytest

from pyxdev.errors import FileRefused, ReadError
from pyxdev.loader import gguf, safetensors
from pyxdev.loader.header import Header, ModelFile, Tensor, shown

F32, F16, Q4_0, Q4_1, Q8_0, MXFP4 = 0, 1, 2, 3, 8, 39


def read(path: Path, content: bytes | None = None) -> Header:
    if content is not None:
        path.write_bytes(content)
    with ModelFile(path) as file:
        return gguf.read(file) if path.suffix == ".gguf" else safetensors.read(file)


def refusal(path: Path, content: bytes) -> str:
    with pytest.raises(FileRefused) as caught:
        read(path, content)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.fixture
def st(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def gg(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# ---- safetensors ----


def test_safetensors_whole(st: Path) -> None:
    content = mf.packed(
        [
            ("w", "F32", (2, 3), bytes(24)),
            ("s", "BF16", (), b"ab"),
            ("none", "I64", (0, 9), b""),
            ("z", "U8", (1,), b"z"),
        ],
        {"format": "pt"},
    )
    base = 8 + struct.unpack("<Q", content[:8])[0]
    header = read(st, content)
    assert header.tensors == (
        Tensor("w", "F32", (2, 3), base, 24),
        Tensor("s", "BF16", (), base + 24, 2),
        Tensor("none", "I64", (0, 9), base + 26, 0),
        Tensor("z", "U8", (1,), base + 26, 1),
    )
    assert header.metadata == {"format": "pt"}


@pytest.mark.parametrize("name", sorted(safetensors.BITS))
def test_safetensors_every_dtype_by_its_bits(st: Path, name: str) -> None:
    nbytes = 8 * safetensors.BITS[name] // 8
    header = read(st, mf.safetensors({"t": mf.entry(name, [2, 4], 0, nbytes)}, bytes(nbytes)))
    assert header.tensors[0][1:3] == (name, (2, 4))
    assert header.tensors[0].nbytes == nbytes


@pytest.mark.parametrize("odd", [1, 3])
def test_safetensors_packed_values_fill_bytes(st: Path, odd: int) -> None:
    message = refusal(st, mf.safetensors({"t": mf.entry("F4", [odd], 0, odd // 2)}, bytes(odd // 2)))
    assert "tensor t" in message and "F4" in message


def test_safetensors_order_of_the_header_does_not_matter(st: Path) -> None:
    header = read(st, mf.safetensors({"b": mf.entry("U8", [2], 1, 3), "a": mf.entry("U8", [1], 0, 1)}, b"abb"))
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]


ONE = mf.entry("F32", [4], 0, 16)
SAFETENSORS_REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["empty file"]),
    "too short": (b"1234567", ["7 bytes"]),
    "length zero": (mf.safetensors(b"", length=0), ["empty header"]),
    "length huge": (mf.safetensors({"a": ONE}, bytes(16), length=2**63), [str(2**63), "file size"]),
    "length one too many": (mf.safetensors({"a": ONE}, length=len(json.dumps({"a": ONE})) + 1), ["file size"]),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", ["Git LFS pointer"]),
    "web page": (b"\n<!DOCTYPE html><html>Not found</html>", ["HTML"]),
    "cut": (mf.safetensors({"a": ONE}, bytes(9)), ["tensor a", "16 bytes wanted", "9 present"]),
    "cut away": (mf.safetensors({"a": ONE, "b": mf.entry("U8", [2], 16, 18)}, bytes(9)), ["tensor a", "9 present"]),
    "trailing": (mf.safetensors({"a": ONE}, bytes(21)), ["5 bytes after the last tensor"]),
    "only trailing": (mf.safetensors({}, b"x"), ["1 bytes after the last tensor"]),
    "overlap": (mf.safetensors({"b": mf.entry("F32", [4], 8, 24), "a": ONE}, bytes(24)), ["tensor a", "tensor b"]),
    "alias": (mf.safetensors({"b": ONE, "a": ONE}, bytes(16)), ["tensor a", "tensor b"]),
    "gap": (
        mf.safetensors({"a": ONE, "b": mf.entry("U8", [1], 17, 18)}, bytes(18)),
        ["tensor a", "tensor b", "gap of 1"],
    ),
    "gap in front": (mf.safetensors({"a": mf.entry("U8", [1], 2, 3)}, bytes(3)), ["tensor a", "gap of 2"]),
    "empty inside another": (
        mf.safetensors({"a": ONE, "z": mf.entry("U8", [0], 8, 8)}, bytes(16)),
        ["tensor a", "tensor z"],
    ),
    "reversed": (mf.safetensors({"a": mf.entry("F32", [4], 16, 0)}, bytes(16)), ["tensor a", "end 0", "start 16"]),
    "mismatch": (
        mf.safetensors({"a": mf.entry("F32", [1000, 1000], 0, 4)}, bytes(4)),
        ["tensor a", "4000000", "hold 4"],
    ),
    "overflow": (mf.safetensors({"a": mf.entry("F32", [2**62, 4], 0, 0)}), ["tensor a", "2**63-1"]),
    "overflow of many": (mf.safetensors({"a": mf.entry("U8", [2**40] * 60, 0, 0)}), ["tensor a", "2**63-1"]),
    "huge beside zero": (mf.safetensors({"a": mf.entry("U8", [0, 2**63], 0, 0)}), ["tensor a", "shape"]),
    "many dimensions": (mf.safetensors({"a": mf.entry("U8", [1] * 65, 0, 1)}, b"x"), ["tensor a", "64"]),
    "negative": (mf.safetensors({"a": mf.entry("F32", [-4], 0, 16)}, bytes(16)), ["tensor a", "shape", "-4"]),
    "fraction": (mf.safetensors({"a": mf.entry("F32", [4.0], 0, 16)}, bytes(16)), ["tensor a", "shape"]),
    "true": (mf.safetensors({"a": mf.entry("U8", [True], 0, 1)}, bytes(1)), ["tensor a", "shape"]),
    "shape text": (mf.safetensors({"a": mf.entry("F32", "4", 0, 16)}, bytes(16)), ["tensor a", "shape", "a string"]),
    "one offset": (
        mf.safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, bytes(16)),
        ["tensor a", "data_offsets"],
    ),
    "no offsets": (mf.safetensors({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)), ["tensor a", "missing"]),
    "entry is text": (mf.safetensors({"a": "F32"}), ["tensor a", "not an object"]),
    "unknown dtype": (mf.safetensors({"a": mf.entry("Q9", [4], 0, 4)}, bytes(4)), ["tensor a", "Q9"]),
    "dtype is a list": (mf.safetensors({"a": mf.entry(["F32"], [4], 0, 16)}, bytes(16)), ["tensor a", "dtype"]),
    "name twice": (
        mf.safetensors(json.dumps({"a": ONE})[:-1].encode() + b"," + json.dumps({"a": ONE})[1:].encode(), bytes(16)),
        ["duplicate tensor name a"],
    ),
    "field twice": (
        mf.safetensors(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        ["tensor a", "twice"],
    ),
    "metadata of numbers": (mf.safetensors({"__metadata__": {"n": 1}}), ["__metadata__ holds a non-string", "n"]),
    "metadata is a list": (mf.safetensors({"__metadata__": []}), ["__metadata__"]),
    "metadata twice": (mf.safetensors(b'{"__metadata__":{},"__metadata__":{}}'), ["__metadata__"]),
    "array": (mf.safetensors([1, 2, 3]), ["header is not an object"]),
    "not JSON": (mf.safetensors(b"{'a': 1}"), ["not JSON"]),
    "zeros": (mf.safetensors(bytes(4096)), ["not JSON: byte 0"]),
    "not UTF-8": (mf.safetensors(b'{"\xff":1}'), ["UTF-8"]),
    "deep": (mf.safetensors(b"[" * 200_000), ["nested too deep"]),
    "number of a million digits": (mf.safetensors(b'{"a":' + b"9" * 1_000_000 + b"}"), ["not JSON"]),
    "lone surrogate": (
        mf.safetensors(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        ["ud800", "Unicode"],
    ),
    "gguf under another name": (mf.gguf([], []), ["file size"]),
}


@pytest.mark.parametrize("case", SAFETENSORS_REFUSED)
def test_safetensors_refused(st: Path, case: str) -> None:
    content, wanted = SAFETENSORS_REFUSED[case]
    message = refusal(st, content)
    for word in wanted:
        assert word in message


def test_safetensors_cap_says_cap(st: Path) -> None:
    with st.open("wb") as file:
        file.write(struct.pack("<Q", safetensors.MAX_HEADER + 1) + b"{")
        file.truncate(safetensors.MAX_HEADER + 100)
    with pytest.raises(FileRefused, match=f"cap of {safetensors.MAX_HEADER} bytes"):
        read(st)


def test_names_survive(st: Path) -> None:
    names = ["a\0b/../\u202e", "n" * 100_000, "", " ", "tensor \x1b[31m", "日本"]
    header = read(st, mf.packed([(name, "U8", (1,), b"x") for name in names]))
    assert [tensor.name for tensor in header.tensors] == sorted(names, key=[t.name for t in header.tensors].index)
    assert {tensor.name for tensor in header.tensors} == set(names)


@pytest.mark.parametrize("name", ["a\0b", "\x1b[31m", "\u202e", "", "\udc80", "a\nb"])
def test_a_message_never_holds_control_characters(name: str) -> None:
    assert shown(name).isprintable() and shown(name)


def test_a_message_stays_short() -> None:
    assert len(shown("n" * 100_000)) < 200


# ---- gguf ----

RAMP = struct.pack("<8f", *range(8))
ARCH = mf.key("general.architecture", mf.STRING, "llama")


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_whole(gg: Path, version: int) -> None:
    infos = [
        mf.info("m", [8, 3], F16, 32),
        mf.info("v", [8], F32, 0),
        mf.info("s", [], F32, 96),
        mf.info("z", [0, 4], F32, 128),
    ]
    content = mf.gguf([ARCH], infos, RAMP + bytes(64) + RAMP, version=version)
    header = read(gg, content)
    base = len(content) - 128
    assert header.tensors == (
        Tensor("v", "F32", (8,), base, 32),
        Tensor("m", "F16", (3, 8), base + 32, 48),
        Tensor("s", "F32", (), base + 96, 4),
        Tensor("z", "F32", (4, 0), base + 128, 0),
    )
    assert dict(header.metadata) == {"general.architecture": "llama"}


def test_gguf_metadata_of_every_type(gg: Path) -> None:
    values = {
        "u8": (mf.UINT8, 200), "i8": (mf.INT8, -3), "u16": (mf.UINT16, 65535), "i16": (mf.INT16, -9),
        "u32": (mf.UINT32, 2**32 - 1), "i32": (mf.INT32, -(2**31)), "f32": (mf.FLOAT32, 0.5), "t": (mf.BOOL, True),
        "u64": (mf.UINT64, 2**64 - 1), "i64": (mf.INT64, -(2**63)), "f64": (mf.FLOAT64, 0.1), "s": (mf.STRING, "Ġé"),
    }  # fmt: skip
    arrays = {
        "strings": (mf.STRING, ["", "a", "Ġé"]), "floats": (mf.FLOAT32, [0.5, 1.5]), "none": (mf.UINT8, []),
        "bools": (mf.BOOL, [True, False]), "ints": (mf.INT32, [-1, 2**31 - 1]),
        "nested": (mf.ARRAY, [(mf.UINT8, [1, 2]), (mf.STRING, ["x"])]),
    }  # fmt: skip
    keys = [mf.key(name, *pair) for name, pair in values.items()]
    keys += [mf.key(name, mf.ARRAY, pair) for name, pair in arrays.items()]
    wanted = {name: pair[1] for name, pair in values.items()} | {name: pair[1] for name, pair in arrays.items()}
    wanted["nested"] = [[1, 2], ["x"]]
    metadata = read(gg, mf.gguf(keys)).metadata
    assert dict(metadata) == wanted
    assert len(metadata) == len(wanted) and "absent" not in metadata


def test_gguf_strings_that_are_not_utf8_keep_their_bytes(gg: Path) -> None:
    header = read(gg, mf.gguf([mf.key("k", mf.STRING, b"\xff\x00x")], [mf.info(b"n\xfe", [8], F32, 0)], RAMP))
    assert os.fsencode(header.metadata["k"]) == b"\xff\x00x"
    assert os.fsencode(header.tensors[0].name) == b"n\xfe"


def test_gguf_vocabulary_longer_than_one_read(gg: Path) -> None:
    rng = random.Random(5)
    words = ["x" * rng.randrange(20) for _ in range(60_000)] + ["y" * 700_000, "end"]
    keys = [
        mf.key("tokens", mf.ARRAY, (mf.STRING, words)),
        mf.key("types", mf.ARRAY, (mf.INT32, list(range(90_000)))),
        ARCH,
    ]
    header = read(gg, mf.gguf(keys, [mf.info("a", [8], F32, 0)], RAMP))
    assert header.metadata["tokens"] == words
    assert header.metadata["types"] == list(range(90_000))
    assert header.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("alignment", [1, 8, 16, 32, 64, 4096])
def test_gguf_alignment(gg: Path, alignment: int) -> None:
    for padding in range(33):  # every way the metadata can end against the alignment
        keys = [mf.key("k", mf.STRING, "x" * padding)]
        content = mf.packed_gguf([("a", F32, [4], RAMP[:16]), ("b", F32, [4], RAMP[16:])], keys, alignment)
        for tensor, wanted in zip(read(gg, content).tensors, (RAMP[:16], RAMP[16:]), strict=True):
            assert content[tensor.offset : tensor.offset + tensor.nbytes] == wanted


@pytest.mark.parametrize("number", sorted(gguf.TYPES))
def test_gguf_every_type_by_its_blocks(gg: Path, number: int) -> None:
    kind = gguf.TYPES[number]
    content = bytes(6 * kind.nbytes)
    (tensor,) = read(gg, mf.packed_gguf([("t", number, [2 * kind.values, 3], content)])).tensors
    assert tensor[1:3] == (kind.name, (3, 2 * kind.values))
    assert tensor.nbytes == len(content)


def test_gguf_types_agree_with_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    shared = theirs.keys() & gguf.TYPES.keys()
    assert len(shared) > 25
    assert {number: tuple(gguf.TYPES[number]) for number in shared} == {number: theirs[number] for number in shared}


def test_gguf_bytes_after_the_end_are_noted(gg: Path) -> None:
    whole = mf.gguf([ARCH], [mf.info("a", [8], F32, 0)], RAMP)
    assert read(gg, whole).notes == ()
    assert read(gg, whole + bytes(40)).notes == ("40 bytes after the last tensor",)


ALIGN = "general.alignment"
A = mf.info("a", [8], F32, 0)
GGUF_REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["empty file"]),
    "only the magic": (b"GGUF", ["cut inside the header", "version"]),
    "other magic": (b"GGJT" + bytes(100), ["GGJT"]),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", ["Git LFS pointer"]),
    "version 0": (mf.gguf(version=0), ["version 0", "2 and 3"]),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), ["version 1", "2 and 3"]),
    "version 4": (mf.gguf(version=4), ["version 4", "2 and 3"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    "big-endian with garbage": (b"GGUF" + struct.pack(">I", 2) + b"\xff" * 100, ["big-endian"]),
    "alignment 0": (mf.gguf([mf.key(ALIGN, mf.UINT32, 0)], [A], RAMP), ["general.alignment 0"]),
    "alignment 24": (mf.gguf([mf.key(ALIGN, mf.UINT32, 24)], [A], RAMP), ["general.alignment 24", "power of two"]),
    "alignment 2**31": (mf.gguf([mf.key(ALIGN, mf.UINT32, 2**31)], [A], RAMP), [f"general.alignment {2**31}"]),
    "alignment signed": (mf.gguf([mf.key(ALIGN, mf.INT32, 64)], [A], RAMP), ["general.alignment has the wrong type"]),
    "alignment text": (mf.gguf([mf.key(ALIGN, mf.STRING, "32")], [A], RAMP), ["general.alignment has the wrong type"]),
    "cut": (mf.gguf([ARCH], [A], RAMP[:20]), ["tensor a", "32 bytes wanted", "20 present"]),
    "cut before the data": (mf.gguf([ARCH], [A]), ["tensor a", "32 bytes wanted", "0 present"]),
    "far away": (mf.gguf([ARCH], [mf.info("a", [8], F32, 2**40)], RAMP), ["tensor a", "ends after the file"]),
    "wraps around": (mf.gguf([ARCH], [mf.info("a", [8], F32, 2**64 - 32)], RAMP), ["tensor a", "ends after the file"]),
    "not aligned": (mf.gguf([ARCH], [mf.info("a", [8], F32, 4)], RAMP * 2), ["tensor a", "offset 4", "multiple", "32"]),
    "overlap": (
        mf.gguf([ARCH], [mf.info("b", [8], F32, 32), mf.info("a", [16], F32, 0)], RAMP * 2),
        ["tensor a", "tensor b"],
    ),
    "alias": (mf.gguf([ARCH], [A, mf.info("b", [8], F32, 0)], RAMP), ["tensor a", "tensor b"]),
    "gap": (mf.gguf([ARCH], [A, mf.info("b", [8], F32, 96)], RAMP * 4), ["tensor a", "tensor b", "gap of 64"]),
    "name twice": (mf.gguf([ARCH], [A, mf.info("a", [8], F32, 32)], RAMP * 2), ["duplicate tensor name a"]),
    "key twice": (mf.gguf([ARCH, ARCH], [A], RAMP), ["duplicate metadata key general.architecture"]),
    "five dimensions": (mf.gguf([ARCH], [mf.info("a", [1] * 5, F32, 0)], RAMP), ["tensor a", "5 dimensions"]),
    "no end of dimensions": (
        mf.gguf([ARCH], [mf.text("a") + struct.pack("<I", 2**32 - 1) + bytes(40)], RAMP),
        ["tensor a", str(2**32 - 1)],
    ),
    "overflow": (mf.gguf([ARCH], [mf.info("a", [2**62, 4], F32, 0)], RAMP), ["tensor a", "2**63-1"]),
    "huge beside zero": (mf.gguf([ARCH], [mf.info("a", [0, 2**63], F32, 0)], RAMP), ["tensor a", "2**63-1"]),
    "removed type": (mf.gguf([ARCH], [mf.info("a", [32], 4, 0)], RAMP), ["tensor a", "type 4"]),
    "type to come": (mf.gguf([ARCH], [mf.info("a", [32], 999, 0)], RAMP), ["tensor a", "type 999"]),
    "part block": (mf.gguf([ARCH], [mf.info("a", [33], Q4_0, 0)], bytes(64)), ["tensor a", "33 values"]),
    "part block in a row": (mf.gguf([ARCH], [mf.info("a", [16, 2], Q4_0, 0)], bytes(64)), ["tensor a", "16 values"]),
    "scalar block": (mf.gguf([ARCH], [mf.info("a", [], Q8_0, 0)], bytes(64)), ["tensor a", "1 values"]),
    "type of a value": (mf.gguf([mf.text("k") + struct.pack("<I", 13) + bytes(8)]), ["metadata key k", "type 13"]),
    "type of an item": (mf.gguf([mf.text("k") + struct.pack("<IIQ", 9, 77, 1) + bytes(16)]), ["key k", "type 77"]),
    "key without end": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**48 - 1) + bytes(40), ["cut inside the header"]),
    "text without end": (mf.gguf([mf.text("k") + struct.pack("<IQ", 8, 2**64 - 1)]), ["metadata key k"]),
    "keys without end": (mf.gguf(counts=(0, 2**62)), [str(2**62)]),
    "tensors without end": (mf.gguf(counts=(2**64 - 1, 0)), [str(2**64 - 1)]),
    "numbers without end": (mf.gguf([mf.text("k") + struct.pack("<IIQ", 9, 4, 2**63)]), [str(2**63), "metadata key k"]),
    "strings without end": (mf.gguf([mf.text("k") + struct.pack("<IIQ", 9, 8, 2**61)]), [str(2**61), "metadata key k"]),
    "nested without end": (mf.gguf([mf.text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100]), ["nested"]),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_gguf_refused(gg: Path, case: str) -> None:
    content, wanted = GGUF_REFUSED[case]
    message = refusal(gg, content)
    for word in wanted:
        assert word in message


def test_gguf_cut_anywhere_is_refused(gg: Path) -> None:
    keys = [ARCH, mf.key("words", mf.ARRAY, (mf.STRING, ["a", "bc", ""])), mf.key("n", mf.UINT64, 5)]
    whole = mf.gguf(keys, [mf.info("a", [8], F32, 0)], RAMP)
    for length in range(len(whole)):
        refusal(gg, whole[:length])


def test_safetensors_cut_anywhere_is_refused(st: Path) -> None:
    whole = mf.packed([("a", "F32", (4,), bytes(16)), ("b", "U8", (3,), b"abc")], {"k": "v"})
    for length in range(len(whole)):
        refusal(st, whole[:length])


def test_gguf_sparse_giant_of_empty_strings_is_capped(gg: Path) -> None:
    with gg.open("wb") as file:
        file.write(mf.gguf([mf.text("k") + struct.pack("<IIQ", 9, 8, 2**30)], counts=(0, 1)))
        file.truncate(2**34)
    with pytest.raises(FileRefused, match="cap"):
        read(gg)


# ---- what is no regular file ----


def test_fifo_folder_and_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(FileRefused, match="FIFO"):
        ModelFile(tmp_path / "fifo.gguf")
    with pytest.raises(FileRefused, match="a folder"):
        ModelFile(tmp_path)
    with pytest.raises(FileRefused, match="no such file"):
        ModelFile(tmp_path / "absent.gguf")
    with pytest.raises(FileRefused, match="null"):
        ModelFile("a\0b")


def test_links(tmp_path: Path) -> None:
    (tmp_path / "dangling.gguf").symlink_to("../blobs/0123")
    with pytest.raises(FileRefused, match=r"dangling\.gguf.*\.\./blobs/0123"):
        ModelFile(tmp_path / "dangling.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    with pytest.raises(ReadError, match=r"loop\.gguf"):
        ModelFile(tmp_path / "loop.gguf")


def test_a_file_that_shrinks_after_open(st: Path) -> None:
    st.write_bytes(mf.packed([("a", "F32", (4,), bytes(16))]))
    with ModelFile(st) as file:
        os.truncate(st, 20)
        with pytest.raises(FileRefused, match=r"wanted at offset 8, 12 present|wanted at offset 0"):
            safetensors.read(file)
