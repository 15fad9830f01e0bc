"""What a path stands for: sets of files, folders, links, and names that lie."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files as mf
import pytest

from pyxdev.errors import FileRefused, ReadError
from pyxdev.loader.files import open_model

NAMES = ("a", "b", "c", "d")


def tensors_of(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """name -> bytes, read through the model's own descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    with open_model(path) as model:
        found = {
            tensor.name: model.files[file].read(tensor.offset, tensor.nbytes)
            for tensor, file in zip(model.tensors, model.file_of, strict=True)
        }
    assert len(os.listdir("/proc/self/fd")) == before
    return found


def refusal(path: str | os.PathLike[str]) -> str:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileRefused) as caught:
        open_model(path)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
    return str(caught.value)


def shard(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mf.packed([(name, "U8", (3,), name.encode() * 3) for name in names]))
    return path


WHOLE = {name: name.encode() * 3 for name in NAMES}


def write_index(folder: Path, weight_map: Any, metadata: Any = None) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards and their index."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name, tensors in zip(names, (("a", "b"), ("c",), ("d",)), strict=True):
        shard(tmp_path / name, *tensors)
    write_index(tmp_path, {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}, {"total_size": 12})
    return tmp_path


def split_part(path: Path, number: int, count: int, total: int, *names: str, alignment: int = 32, **extra: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = [
        mf.key("split.no", mf.UINT16, number),
        mf.key("split.count", mf.UINT16, count),
        mf.key("split.tensors.count", mf.INT32, total),
    ]
    if number == 0:
        keys.insert(0, mf.key("general.architecture", mf.STRING, "llama"))
    path.write_bytes(mf.packed_gguf([(name, 24, (3,), name.encode() * 3) for name in names], keys, alignment))
    return path


def split_set(folder: Path, stem: str = "model", suffix: str = "gguf") -> list[Path]:
    return [
        split_part(folder / f"{stem}-0000{number + 1}-of-00003.{suffix}", number, 3, 4, *names)
        for number, names in enumerate((("a", "b"), ("c",), ("d",)))
    ]


# ---- index.json ----


def test_shards_by_index_folder_and_without_index(shards: Path) -> None:
    assert tensors_of(shards / "model.safetensors.index.json") == WHOLE
    assert tensors_of(shards) == WHOLE
    shard(shards / "consolidated.safetensors", "a")  # not in the index, so not part of the model
    assert tensors_of(shards) == WHOLE
    (shards / "consolidated.safetensors").unlink()
    (shards / "model.safetensors.index.json").unlink()
    assert tensors_of(shards) == WHOLE


def test_one_shard_alone_is_itself(shards: Path) -> None:
    with open_model(shards / "model-00002-of-00003.safetensors") as model:
        assert [tensor.name for tensor in model.tensors] == ["c"]
        assert any("part 2 of 3" in note for note in model.notes)


@pytest.mark.parametrize("total", [12, 13, "12", None, [1]])
def test_a_wrong_total_is_noted_only(shards: Path, total: Any) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] = {"total_size": total}
    path.write_text(json.dumps(index))
    with open_model(path) as model:
        assert bool(model.notes) == (total not in (12, None))


@pytest.mark.parametrize("whole", [True, False])
def test_a_missing_shard(shards: Path, whole: bool) -> None:
    (shards / "model-00002-of-00003.safetensors").unlink()
    if not whole:
        (shards / "model.safetensors.index.json").unlink()
    message = refusal(shards)
    assert "model-00002-of-00003.safetensors" in message and "missing" in message


def test_an_index_out_of_date(shards: Path) -> None:
    shard(shards / "model-00002-of-00003.safetensors", "x")
    message = refusal(shards)
    assert "tensor c" in message and "not there" in message and "model-00002" in message
    shard(shards / "model-00002-of-00003.safetensors", "c", "x")
    message = refusal(shards)
    assert "tensor x" in message and "does not list it" in message
    shard(shards / "model-00002-of-00003.safetensors", "c", "a")
    message = refusal(shards)
    assert "tensor a" in message and "lists it in model-00001-of-00003.safetensors" in message


@pytest.mark.parametrize("escaped", [False, True])
def test_one_name_in_two_shards_without_index(shards: Path, escaped: bool) -> None:
    (shards / "model.safetensors.index.json").unlink()
    path = shard(shards / "model-00003-of-00003.safetensors", "a")
    if escaped:  # a header that the scanner does not read
        path.write_bytes(mf.safetensors(b'{"\\u0061":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}', b"aaa"))
    message = refusal(shards)
    assert "duplicate" in message and "tensor a" in message
    assert "model-00001-of-00003" in message and "model-00003-of-00003" in message


def test_a_shard_cut_by_one_byte(shards: Path) -> None:
    path = shards / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    message = refusal(shards)
    assert "model-00003-of-00003" in message and "tensor d" in message and "3 bytes wanted, 2 present" in message


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "x\0.safetensors", "", ".", "..", "a\\b", 7,
     None, ["a"], {"a": "b"}],
)  # fmt: skip
def test_names_that_leave_the_folder_are_refused_by_their_text(tmp_path: Path, name: Any) -> None:
    shard(tmp_path / "other" / "model.safetensors", "a")
    folder = tmp_path / "model"
    folder.mkdir()
    message = refusal(write_index(folder, {"a": name}))
    assert "weight_map gives" in message and "tensor a" in message


def test_a_name_in_a_subfolder_is_fine(tmp_path: Path) -> None:
    shard(tmp_path / "sub" / "x.safetensors", "a")
    assert tensors_of(write_index(tmp_path, {"a": "sub/x.safetensors"})) == {"a": b"aaa"}


def test_shards_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, word in (("fifo.safetensors", "FIFO"), ("folder.safetensors", "folder")):
        message = refusal(write_index(tmp_path, {"a": name}))
        assert word in message and name in message


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}', "not json", "\0" * 50, "[" * 99999],
)
def test_not_an_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert str(path) in refusal(path)


def test_an_index_of_nothing(tmp_path: Path) -> None:
    assert tensors_of(write_index(tmp_path, {})) == {}


# ---- GGUF split sets ----


@pytest.mark.parametrize("suffix", ["gguf", "GGUF"])
@pytest.mark.parametrize("stem", ["model", "with spaces", "new\nline", "a-00001-of-00002", "\udcff"])
def test_a_split_set_from_any_part_and_the_folder(tmp_path: Path, stem: str, suffix: str) -> None:
    parts = split_set(tmp_path, stem, suffix)
    for path in [*parts, tmp_path]:
        assert tensors_of(path) == WHOLE
        with open_model(path) as model:
            assert model.metadata["general.architecture"] == "llama"
            assert [Path(file.path).name for file in model.files] == [part.name for part in parts]


def test_parts_of_their_own_alignment(tmp_path: Path) -> None:
    parts = split_set(tmp_path)
    split_part(parts[1], 1, 3, 4, "c", alignment=64)
    assert tensors_of(parts[0]) == WHOLE


def test_a_missing_part(tmp_path: Path) -> None:
    parts = split_set(tmp_path)
    parts[1].unlink()
    for path in (parts[0], parts[2], tmp_path):
        message = refusal(path)
        assert "missing" in message and parts[1].name in message


def damage_renamed(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("whole.gguf"))


def damage_swapped(parts: list[Path]) -> Path:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)
    return parts[0]


def damage_foreign(parts: list[Path]) -> Path:
    return split_part(parts[1], 1, 3, 9, "c")


def damage_count(parts: list[Path]) -> Path:
    split_part(parts[2], 2, 4, 4, "d")
    return parts[0]


def damage_total(parts: list[Path]) -> Path:
    for number, names in enumerate((("a", "b"), ("c",), ("d",))):
        split_part(parts[number], number, 3, 5, *names)
    return parts[0]


def damage_duplicate(parts: list[Path]) -> Path:
    return split_part(parts[2], 2, 3, 4, "a")


def damage_unsplit(parts: list[Path]) -> Path:
    parts[1].write_bytes(mf.packed_gguf([("c", 24, (3,), b"ccc")]))
    return parts[0]


def damage_kind(parts: list[Path]) -> Path:
    keys = [mf.key("split.count", mf.STRING, "3")]
    parts[0].write_bytes(mf.packed_gguf([("a", 24, (3,), b"aaa")], keys))
    return parts[0]


def damage_glued(parts: list[Path]) -> Path:
    glued = parts[0].with_name("glued.gguf")
    glued.write_bytes(b"".join(part.read_bytes() for part in parts))
    return glued


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_renamed, ["whole.gguf", "one of 3 parts", "-of-00003.gguf"]),
        (damage_swapped, ["split.no is 1, 0 is wanted"]),
        (damage_foreign, ["split.tensors.count"]),
        (damage_count, ["split.count is 4", "3"]),
        (damage_total, ["split.tensors.count is 5", "4 tensors"]),
        (damage_duplicate, ["duplicate", "tensor a", "00001-of-00003", "00003-of-00003"]),
        (damage_unsplit, ["00002-of-00003", "split"]),
        (damage_kind, ["split.count is 3", "whole number"]),
        (damage_glued, ["glued", "gguf-split"]),
    ],
)
def test_a_damaged_set(tmp_path: Path, damage: Callable[[list[Path]], Path], words: list[str]) -> None:
    parts = split_set(tmp_path)
    path = damage(parts)
    message = refusal(path if path.exists() else parts[0])
    for word in words:
        assert word in message


def test_names_that_only_look_like_parts(tmp_path: Path) -> None:
    one = tmp_path / "one" / "model-00001-of-00001.gguf"
    one.parent.mkdir()
    one.write_bytes(mf.packed_gguf([("a", 24, (3,), b"aaa")]))
    assert tensors_of(one) == tensors_of(one.parent) == {"a": b"aaa"}
    inside = tmp_path / "x-00001-of-00002.gguf" / "whole.gguf"
    inside.parent.mkdir()
    shutil.copy(one, inside)
    assert tensors_of(inside) == tensors_of(inside.parent) == {"a": b"aaa"}
    many = tmp_path / "many"
    many.mkdir()
    for number in (1, 2):
        shutil.copy(one, many / f"model-0000{number}-of-00002.gguf")
    assert "2 models in this folder" in refusal(many)
    middle = tmp_path / "middle"
    for number in (1, 2):
        shard(middle / f"model.safetensors-0000{number}-of-00002.safetensors", NAMES[number])
    assert set(tensors_of(middle)) == {"b", "c"}


def test_a_name_that_claims_a_billion_parts(tmp_path: Path) -> None:
    path = tmp_path / "m-000000001-of-999999999.gguf"
    keys = [mf.key("split.no", mf.UINT16, 0), mf.key("split.count", mf.UINT32, 999999999)]
    path.write_bytes(mf.packed_gguf([("a", 24, (3,), b"aaa")], keys))
    assert "missing" in refusal(path)


# ---- folders, links, caches ----


def test_folders(tmp_path: Path) -> None:
    assert "no .safetensors or .gguf" in refusal(tmp_path)
    shard(tmp_path / "model.safetensors", "a")
    (tmp_path / "config.json").write_text("{}")
    assert tensors_of(tmp_path) == {"a": b"aaa"}
    shard(tmp_path / "other.safetensors", "b")
    message = refusal(tmp_path)
    assert "2 models" in message and "model.safetensors" in message and "other.safetensors" in message
    assert "no such file" in refusal(tmp_path / "absent")


def hugging_face_cache(base: Path, files: dict[str, Path]) -> Path:
    """snapshots/<revision>/<name> are links to blobs whose names say nothing."""
    root = base / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    for number, (name, source) in enumerate(files.items()):
        shutil.copy(source, root / "blobs" / f"{number:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_cache_of_shards_and_of_split_parts(shards: Path, tmp_path: Path) -> None:
    snapshot = hugging_face_cache(tmp_path / "st", {path.name: path for path in sorted(shards.glob("model*"))})
    assert tensors_of(snapshot) == tensors_of(snapshot.parents[1]) == WHOLE
    assert tensors_of(snapshot / "model.safetensors.index.json") == WHOLE
    parts = split_set(tmp_path / "parts")
    snapshot = hugging_face_cache(tmp_path / "gg", {path.name: path for path in parts})
    for path in (snapshot, snapshot.parents[1], snapshot / parts[2].name):
        assert tensors_of(path) == WHOLE


def test_a_cache_of_several_snapshots(tmp_path: Path) -> None:
    whole = shard(tmp_path / "w.safetensors", "a")
    root = hugging_face_cache(tmp_path / "c", {"model.safetensors": whole}).parents[1]
    shard(root / "snapshots" / "ffff" / "model.safetensors", "b")
    assert tensors_of(root) == {"a": b"aaa"}
    (root / "refs" / "main").write_text("../../..")
    assert "2 models" in refusal(root)


def test_links_that_lead_nowhere(shards: Path, tmp_path: Path) -> None:
    broken = shards / "model-00002-of-00003.safetensors"
    broken.unlink()
    broken.symlink_to("../../blobs/feed")
    message = refusal(shards)
    assert "model-00002-of-00003" in message and "../../blobs/feed" in message
    broken.unlink()
    broken.symlink_to(broken.name)
    with pytest.raises(ReadError, match="model-00002-of-00003"):
        open_model(shards)


def test_names_that_are_not_text(tmp_path: Path) -> None:
    path = shard(tmp_path / os.fsdecode(b"m\xff\n.safetensors"), "a")
    assert tensors_of(path) == tensors_of(os.fsencode(path)) == {"a": b"aaa"}  # type: ignore[arg-type]
    os.truncate(path, path.stat().st_size - 1)
    message = refusal(path)
    assert message.isprintable() and "udcff" in message


def test_a_gguf_file_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(mf.packed_gguf([("a", 24, (3,), b"aaa")]))
    assert tensors_of(path) == {"a": b"aaa"}
