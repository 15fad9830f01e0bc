"""Every wait of reader.c is needed: tests/c/test_reader_order.c finds wrong bytes when one is taken out, and
tests/c/test_reader.c finds the checks of what was read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_mutations_native import ROOT, compile_to, run

ORDER, CALLS = ROOT / "tests/c/test_reader_order.c", ROOT / "tests/c/test_reader.c"
SEEDS = 8

# Name, file, the lines (as many as make them unique), what stands there instead, the program, what it says.
MUTATIONS = [
    (
        "a tile is filled again when its upload is over",
        "worker.c",
        "    int status = wait_tile(w, index, err);\n    if (status || reader->stop)",
        "    int status = XD_OK;\n    if (status || reader->stop)",
        ORDER,
        "asynchronous uploads",
    ),
    (
        "a tile's event is recorded after its upload",
        "worker.c",
        "    if (!status)\n        status = xd_event_record(w->own[index].free, stream, err);\n",
        "",
        ORDER,
        "asynchronous uploads",
    ),
    (
        "a worker gives its tiles back with what is on its way",
        "worker.c",
        "        if (w->own[i].stream)\n",
        "        if (0)\n",
        ORDER,
        "a file that ends early",
    ),
    (
        "a worker ends when its uploads are over",
        "worker.c",
        "    return status ? status : wait_tiles(w, err);\n",
        "    return (void)wait_tiles, status;\n",
        ORDER,
        "asynchronous uploads",
    ),
    (
        "a worker waits for its upload where it is told to",
        "worker.c",
        "    if (!status && reader->sync_uploads)\n        status = wait_tile(w, index, err);\n",
        "",
        CALLS,
        "test_reader.c",
    ),
    (
        "a worker waits for its upload from memory that is not page-locked",
        "reader.c",
        " || (given && xd_ring_is_pageable(given))",
        "",
        CALLS,
        "test_reader.c",
    ),
    (
        "reading back waits",
        "worker.c",
        "        status = wait_tile(w, 0, err);\n",
        "        status = XD_OK;\n",
        ORDER,
        "reading back",
    ),
    (
        "the end of a file is an error",
        "source.c",
        "    if (got < extent->end - extent->span[0].offset)\n        return fail_short(extent, got, err);\n",
        "",
        CALLS,
        "test_reader.c",
    ),
    (
        "the end of a file is an error for direct reads",
        "source.c",
        "return got < wanted ? fail_short(extent, got > before ? got - before : 0, err) : XD_OK;",
        "return (void)before, XD_OK;",
        CALLS,
        "test_reader.c",
    ),
    (
        "a short direct read goes on",
        "source.c",
        "        code = read_on(calls, source->fd, &part, 1, begin, wanted, &got);\n",
        "        got = wanted;\n",
        CALLS,
        "test_reader.c",
    ),
    (
        "a tile ends where a page ends, so that a direct read of it fits",
        "source.c",
        "(source->direct_fd < 0 ? offset : offset / PAGE * PAGE) + room",
        "offset + room + 0 * (uint64_t)source->direct_fd",
        CALLS,
        "test_reader.c",
    ),
    (
        "pieces of two files share no tile",
        "work.c",
        "job->source != &work->sources[item->source] || ",
        "",
        CALLS,
        "test_reader.c",
    ),
    (
        "a piece far from its neighbour in memory starts a tile",
        "work.c",
        "gap >= XD_SOURCE_PAGE || ",
        "",
        CALLS,
        "",  # it leaves the tile and ends with a signal
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Object file by source: the whole runtime and what the C tests share."""
    where = tmp_path_factory.mktemp("native")
    shared = [ROOT / "tests/c/recorder.c", ROOT / "tests/c/machine.c"]
    sources = [*shared, *sorted((ROOT / "native").glob("*.c")), *sorted((ROOT / "native/sim").glob("*.c"))]
    built = {}
    for source in sources:
        built[source] = where / f"{source.parent.name}_{source.stem}.o"
        compile_to(built[source], "-c", source)
    return built


def build(program: Path, out: Path, objects: dict[Path, Path]) -> Path:
    compile_to(out, program, *objects.values(), "-pthread", "-lm", "-ldl")
    return out


@pytest.mark.parametrize("program", [ORDER, CALLS], ids=lambda program: program.stem)
def test_nothing_is_found_in_the_reader_as_it_is(tmp_path: Path, objects: dict[Path, Path], program: Path) -> None:
    done = run(build(program, tmp_path / "program", objects), 1, SEEDS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "lines", "instead", "program", "says"), [row[1:] for row in MUTATIONS], ids=[row[0] for row in MUTATIONS]
)
def test_every_line_is_needed(
    tmp_path: Path, objects: dict[Path, Path], file: str, lines: str, instead: str, program: Path, says: str
) -> None:
    source = ROOT / "native" / file
    text = source.read_text()
    assert text.count(lines) == 1, f"{file} has changed: say anew which lines these are"
    for header in (ROOT / "native").glob("*.h"):
        shutil.copy(header, tmp_path)
    (tmp_path / file).write_text(text.replace(lines, instead))
    compile_to(tmp_path / "mutant.o", "-c", tmp_path / file)
    done = run(build(program, tmp_path / "program", objects | {source: tmp_path / "mutant.o"}), 1, SEEDS)
    assert done.returncode, "nothing shows it"
    assert says in done.stderr
