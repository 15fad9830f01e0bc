"""What a path stands for: one model file, or the set of files that make one model.

A path is a model file, any part of a GGUF split set, a *.safetensors.index.json, a folder, or a model's folder in a
Hugging Face cache. Names are judged as they are written, before links are followed: a cache links its snapshots to
blobs elsewhere, and only the link's name says which part of a set it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np

from pyxdev import _native
from pyxdev.errors import FileRefused
from pyxdev.loader import gguf, safetensors
from pyxdev.loader.header import Column, Header, ModelFile, Tensors, refused, shown

MAX_INDEX = 64 << 20
_INDEX = ".safetensors.index.json"
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})(\.gguf)", re.IGNORECASE | re.DOTALL)
_SHARD = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})(\.safetensors)", re.IGNORECASE | re.DOTALL)
_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass
class Model:
    """The opened files of one model and all their tensors, by file, then by offset. Closing it closes the files."""

    format: str
    files: list[ModelFile]
    tensors: Tensors
    file_of: Column  # tensor -> file
    metadata: Mapping[str, Any]
    notes: list[str]
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> Model:
    """Opens and checks every file that belongs to the model at `path`.

    Raises FileRefused for anything that is not one whole, well-formed model; nothing is left open then.
    """
    text = os.fsdecode(path)
    with ExitStack() as stack:
        if os.path.isdir(text):
            model = _open_folder(text, stack)
        elif text.lower().endswith(".json"):
            model = _open_index(text, stack)
        else:
            model = _open_file(text, stack)
        model._stack = stack.pop_all()
        return model


# ---- one file --------------------------------------------------------------------------------------------------------


def _read(path: str, stack: ExitStack) -> tuple[ModelFile, Header]:
    file = stack.enter_context(ModelFile(path))
    is_gguf = file.read(0, min(4, file.size)) == b"GGUF" or path.lower().endswith(".gguf")
    return file, (gguf if is_gguf else safetensors).read(file, _native)


def _open_file(path: str, stack: ExitStack) -> Model:
    file, header = _read(path, stack)
    if header.format == "gguf" and _whole(file, header, _SPLIT_COUNT, 1) > 1:
        return _open_split_set(file, header, stack)
    model = _merge([file], [header])
    if header.format == "safetensors" and (shard := _SHARD.fullmatch(os.path.basename(path))) and int(shard[3]) > 1:
        model.notes.append(f"{shown(path)} is part {int(shard[2])} of {int(shard[3])} by its name; only it is loaded")
    return model


def _merge(files: list[ModelFile], headers: list[Header]) -> Model:
    """One model of all files; the first one's metadata speaks for it. No tensor may be in two files."""
    tensors = Tensors.joined([header.tensors for header in headers])
    file_of = np.repeat(np.arange(len(files)), [len(header.tensors) for header in headers])
    if len(files) > 1 and not tensors.distinct:
        seen: dict[str, int] = {}
        for tensor, number in zip(tensors, file_of.tolist(), strict=True):
            other = seen.setdefault(tensor.name, number)
            if other != number:
                raise refused(
                    files[number].path, f"duplicate tensor name, also in {shown(files[other].path, 4096)}", tensor.name
                )
    metadata = headers[0].metadata if headers else {}
    notes = [
        f"{shown(file.path)}: {note}" for file, header in zip(files, headers, strict=True) for note in header.notes
    ]
    return Model(headers[0].format if headers else "safetensors", files, tensors, file_of, metadata, notes)


# ---- GGUF split sets -------------------------------------------------------------------------------------------------


def _whole(file: ModelFile, header: Header, key: str, absent: int) -> int:
    value = header.metadata.get(key, absent)
    if type(value) is not int or value < 0:
        raise refused(file.path, f"{key} is {shown(str(value))}; a whole number from 0 up is wanted")
    return value


def _open_split_set(first: ModelFile, header: Header, stack: ExitStack) -> Model:
    """All parts of the set that an opened part belongs to. Part numbers count from 1 in names, from 0 in metadata."""
    count = _whole(first, header, _SPLIT_COUNT, 1)
    folder, name = os.path.split(first.path)
    pattern = _PART.fullmatch(name)
    if not pattern or int(pattern[3]) != count:
        glued = "; parts glued together must be merged with gguf-split" if header.notes else ""
        raise refused(
            first.path,
            f"it is one of {count} parts ({_SPLIT_COUNT}), but its name does not end in "
            f"-NNNNN-of-{count:05}.gguf, so the others cannot be found{glued}",
        )
    names = _part_names(pattern)
    files: list[ModelFile] = []
    headers: list[Header] = []
    _check_set(first.path, folder, names)
    for number, part in enumerate(_part_names(pattern)):
        file, found = (first, header) if part == name else _read(os.path.join(folder, part), stack)
        if found.format != "gguf":
            raise refused(file.path, f"a GGUF file is wanted, part {number + 1} of {count}")
        for key, wanted in (
            (_SPLIT_COUNT, count),
            (_SPLIT_NO, number),
            (_SPLIT_TENSORS, _whole(first, header, _SPLIT_TENSORS, 0)),
        ):
            if _whole(file, found, key, 0) != wanted:
                raise refused(
                    file.path,
                    f"{key} is {_whole(file, found, key, 0)}, {wanted} is wanted: it is renamed or of another set",
                )
        files.append(file)
        headers.append(found)
    model = _merge(files, headers)
    total = _whole(first, header, _SPLIT_TENSORS, len(model.tensors))
    if total != len(model.tensors):
        raise refused(first.path, f"{_SPLIT_TENSORS} is {total}, the {count} parts hold {len(model.tensors)} tensors")
    return model


def _part_names(match: re.Match[str]) -> Iterator[str]:
    """The names of all parts, from the match of any."""
    stem, number, count, suffix = match.groups()
    return (f"{stem}-{part:0{len(number)}}-of-{count}{suffix}" for part in range(1, int(count) + 1))


def _check_set(path: str, folder: str, names: Iterator[str]) -> None:
    """Looks no further than it takes to know: a name may claim any number of parts."""
    there = set(os.listdir(folder or "."))
    _refuse_missing(path, [name for name in islice(names, len(there) + 4) if name not in there], "of this set")


def _refuse_missing(path: str, missing: list[str], what: str) -> None:
    if missing:
        first = ", ".join(shown(name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise refused(path, f"{len(missing)} files {what} are missing: {first}")


# ---- index.json ------------------------------------------------------------------------------------------------------


def _open_index(path: str, stack: ExitStack) -> Model:
    """The safetensors shards that an index names: exactly the tensors that it lists, each in its shard."""
    with ModelFile(path) as file:
        if file.size > MAX_INDEX:
            raise refused(path, f"an index of {file.size} bytes; the cap of this reader is {MAX_INDEX}")
        pairs = safetensors.read_json(file, 0, file.size)
    index = dict(pairs) if isinstance(pairs, tuple) else {}
    if not isinstance(index.get("weight_map"), tuple):
        raise refused(path, "not an index of safetensors shards: weight_map (an object) is wanted")
    shard_of = dict(index["weight_map"])
    if len(shard_of) < len(index["weight_map"]):
        raise refused(path, "weight_map names a tensor twice")
    for tensor, shard in shard_of.items():
        _check_shard_name(path, tensor, shard)
    folder = os.path.dirname(path)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not os.path.lexists(os.path.join(folder, shard))]
    _refuse_missing(path, missing, "that this index names")
    files, headers = [], []
    for shard in shards:
        file, header = _read(os.path.join(folder, shard), stack)
        _check_listed(path, file, header, {tensor for tensor, of in shard_of.items() if of == shard}, shard_of)
        files.append(file)
        headers.append(header)
    model = _merge(files, headers)
    _note_total(path, index.get("metadata"), model)
    return model


def _check_shard_name(path: str, tensor: str, shard: Any) -> None:
    """A shard's name must stay in the index's folder by its text alone."""
    if not isinstance(shard, str):
        raise refused(path, f"weight_map gives {shown(str(shard))}, a file name is wanted", tensor)
    if "\0" in shard or "\\" in shard or ":" in shard or not shard:
        raise refused(path, f"weight_map gives the file name {shown(shard)}, which is not allowed", tensor)
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise refused(path, f"weight_map gives the file name {shown(shard)}, which leaves the folder", tensor)


def _check_listed(path: str, file: ModelFile, header: Header, listed: set[str], shard_of: Mapping[str, Any]) -> None:
    present = {tensor.name for tensor in header.tensors}
    if absent := sorted(listed - present):
        raise refused(
            file.path, f"not there, but the index {shown(path)} lists it here ({len(absent)} such)", absent[0]
        )
    if extra := sorted(present - listed):
        where = shard_of.get(extra[0])
        says = "does not list it" if where is None else f"lists it in {shown(where)}"
        raise refused(file.path, f"the index {shown(path)} {says} ({len(extra)} such): it is out of date", extra[0])


def _note_total(path: str, metadata: Any, model: Model) -> None:
    stated = dict(metadata).get("total_size") if isinstance(metadata, tuple) else None
    total = int(model.tensors.nbytes.sum())
    if stated is not None and stated != total:
        model.notes.append(f"{shown(path)}: total_size is {shown(str(stated))}, the tensors have {total} bytes")


# ---- folders ---------------------------------------------------------------------------------------------------------


def _open_folder(path: str, stack: ExitStack) -> Model:
    """The one model in a folder: an index first, else the only file or the only set of parts."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise refused(path, f"the folder cannot be read: {error.strerror}") from error
    if "snapshots" in names and os.path.isdir(os.path.join(path, "snapshots")):
        return _open_folder(_snapshot(path), stack)
    if indices := [name for name in names if name.lower().endswith(_INDEX)]:
        return _open_index(os.path.join(path, _only(path, indices)), stack)
    models = [name for name in names if name.lower().endswith((".safetensors", ".gguf"))]
    if not models:
        raise refused(path, "no .safetensors or .gguf file in this folder")
    sets = {(found[1], found[3]) for name in models if (found := _PART.fullmatch(name))}
    if len(sets) == 1 and all(map(_PART.fullmatch, models)):
        model = _open_file(os.path.join(path, models[0]), stack)
        if len(model.files) < len(models):  # named like parts, but each is whole
            _only(path, models)
        return model
    shards = [match for match in map(_SHARD.fullmatch, models) if match]
    if len(models) == len(shards) > 1 and len({(match[1], match[3]) for match in shards}) == 1:
        _check_set(path, path, _part_names(shards[0]))
        opened = [_read(os.path.join(path, name), stack) for name in models]
        return _merge([file for file, _ in opened], [header for _, header in opened])
    return _open_file(os.path.join(path, _only(path, models)), stack)


def _only(path: str, names: list[str]) -> str:
    if len(names) > 1:
        listed = ", ".join(shown(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
        raise refused(path, f"{len(names)} models in this folder, give one of them: {listed}")
    return names[0]


def _snapshot(path: str) -> str:
    """The snapshot of a Hugging Face cache that refs/main names, or the only one."""
    folder = os.path.join(path, "snapshots")
    try:
        with ModelFile(os.path.join(path, "refs", "main")) as file:
            revision = file.read(0, min(file.size, 256)).decode("utf-8", "surrogateescape").strip()
    except FileRefused:
        revision = ""
    if revision and os.path.basename(revision) == revision and os.path.isdir(os.path.join(folder, revision)):
        return os.path.join(folder, revision)
    names = sorted(os.listdir(folder))
    if not names:
        raise refused(path, "no snapshot in this cache folder")
    return os.path.join(folder, _only(folder, names))
