"""Takes out one wait of the C runtime at a time and runs the C test that must notice: every wait is there for a
reason, and the simulated devices can tell. Data only: the golden call lists of tests/c are not asked."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", f"-I{ROOT / 'native'}", f"-I{ROOT / 'tests/c'}"]

# name, file, text, its replacement, the test that fails
MUTANTS = [
    (
        "staged: the source is not waited for",
        "link.c",
        "int nothing = !all->width;\n    int status = wait_for(link->out, order->source_ready, err);",
        "int nothing = !all->width;\n    int status = XD_OK;",
        "test_pipeline",
    ),
    (
        "staged: the destination is not waited for",
        "link.c",
        "status = wait_for(link->in, order->dest_free, err);",
        "status = XD_OK;",
        "test_pipeline",
    ),
    (
        "staged: the upload does not wait for its tile",
        "link.c",
        "status = xd_stream_wait(link->in, filled, err);",
        "status = XD_OK;",
        "test_pipeline",
    ),
    (
        "staged: a tile is free when it is filled, not when it is uploaded",
        "link.c",
        "last = link->in;",
        "last = link->out;",
        "test_pipeline",
    ),
    (
        "staged: arrived when the first leg is over",
        "link.c",
        "status = record(order->arrived, link->in, err);",
        "status = record(order->arrived, link->out, err);",
        "test_pipeline",
    ),
    (
        "a copy of nothing arrives before its source is ready",
        "link.c",
        "status = wait_for(link->in, order->source_ready, err);",
        "status = XD_OK;",
        "test_nothing",
    ),
    (
        "direct: the source is not waited for",
        "link.c",
        "{\n    int status = wait_for(link->out, order->source_ready, err);\n    if (!status && order->dest_free !=",
        "{\n    int status = XD_OK;\n    if (!status && order->dest_free !=",
        "test_pipeline",
    ),
    (
        "direct: the destination is not waited for",
        "link.c",
        "status = wait_for(link->out, order->dest_free, err);",
        "status = XD_OK;",
        "test_pipeline",
    ),
    (
        "ring: a stream does not wait for the tile",
        "ring.c",
        "status = xd_stream_wait(stream, ring->tiles[index].free, err);",
        "status = XD_OK;",
        "test_pipeline",
    ),
    (
        "ring: the host does not wait for the tile",
        "ring.c",
        "status = xd_event_wait(mine->free, left, &done, err);",
        "status = XD_OK, done = 1, (void)left;",
        "test_job",
    ),
    (
        "force_sync: the host does not wait",
        "stream.c",
        "return xd_event_wait(event, XD_FOREVER, &done, err);",
        "return (void)done, XD_OK;",
        "test_pipeline",
    ),
    (
        "throttle: the oldest is not waited for",
        "throttle.c",
        "int status = xd_event_wait(exit, remaining, came, err);",
        "int status = XD_OK; *came = 1; (void)exit; (void)remaining;",
        "test_window",
    ),
]


def compile_object(source: Path, out: Path, *flags: str) -> Path:
    subprocess.run(["cc", *FLAGS, *flags, "-c", source, "-o", out], check=True)
    return out


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All of the runtime and the tests' own parts, compiled once."""
    out = tmp_path_factory.mktemp("mutants")
    tests = {f"{mutant[4]}.c" for mutant in MUTANTS}
    sources = [
        *(ROOT / "native").glob("*.c"),
        *(ROOT / "native/sim").glob("*.c"),
        *(path for path in (ROOT / "tests/c").glob("*.c") if not path.name.startswith("test_") or path.name in tests),
    ]
    return {
        f"{path.parent.name}/{path.name}": compile_object(path, out / f"{path.parent.name}_{path.stem}.o")
        for path in sources
    }


def run(objects: dict[str, Path], test: str, out: Path) -> int:
    parts = [path for name, path in objects.items() if not name.startswith("c/test_") or name == f"c/{test}.c"]
    subprocess.run(["cc", *parts, "-o", out, "-lpthread", "-lm", "-ldl"], check=True)
    return subprocess.run([out], capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("test", sorted({mutant[4] for mutant in MUTANTS}))
def test_unchanged_runtime_passes(objects: dict[str, Path], test: str, tmp_path: Path) -> None:
    assert run(objects, test, tmp_path / test) == 0


@pytest.mark.parametrize("name, file, text, replacement, test", MUTANTS, ids=[mutant[0] for mutant in MUTANTS])
def test_missing_wait_is_noticed(
    objects: dict[str, Path], tmp_path: Path, name: str, file: str, text: str, replacement: str, test: str
) -> None:
    source = (ROOT / "native" / file).read_text()
    assert source.count(text) == 1, f"{file} does not say {text!r} once: adapt the list"
    shutil.copytree(ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("*.c"))
    mutant = tmp_path / "native" / file
    mutant.write_text(source.replace(text, replacement))
    changed = objects | {f"native/{file}": compile_object(mutant, tmp_path / "mutant.o")}
    assert run(changed, test, tmp_path / test) == 1, name
