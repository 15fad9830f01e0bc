"""Every wait of link.c, ring.c, stream.c and throttle.c is needed: tests/c/test_hops.c fails when one is taken out.

The list below is the list of waits (and of records that a later wait relies on). Each is taken out alone, the runtime
is built with that one file changed, and the program must find wrong bytes within a few seeds. Unchanged it must pass.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", f"-I{ROOT / 'native'}", f"-I{ROOT / 'tests/c'}"]
PROGRAM = ROOT / "tests/c/test_hops.c"
SEEDS = 8

# Name, file, the line (with as many around it as make it unique), what stands there instead, the scene that shows it.
MUTATIONS = [
    (
        "direct: source ready",
        "link.c",
        "int status = wait_for(link->out, order->source_ready, err);\n    if (!status && order->dest_free != ",
        "int status = XD_OK;\n    if (!status && order->dest_free != ",
        "direct, slow producer",
    ),
    (
        "direct: destination free",
        "link.c",
        "        status = wait_for(link->out, order->dest_free, err);",
        "        status = XD_OK;",
        "direct, slow consumer",
    ),
    (
        "staged: source ready",
        "link.c",
        "int status = wait_for(link->out, order->source_ready, err);\n    if (!status && all->width)",
        "int status = XD_OK;\n    if (!status && all->width)",
        "staged, slow producer",
    ),
    (
        "staged: destination free",
        "link.c",
        "        status = wait_for(link->in, dest_free, err);",
        "        status = XD_OK;",
        "staged, slow consumer",
    ),
    (
        "staged: tile filled",
        "link.c",
        "        status = xd_stream_wait(link->in, filled, err);",
        "        status = XD_OK;",
        "staged, slow producer",
    ),
    (
        "staged: tile free",
        "link.c",
        "        status = xd_stream_wait(link->out, link->freed[half_of(link, link->next)], err);",
        "        status = XD_OK;",
        "staged",
    ),
    (
        "staged: tile free is waited for again in the next round",
        "link.c",
        "    link->waited = 0;\n    return status;",
        "    return status;",
        "staged",
    ),
    (
        "staged: tile free is recorded after its upload",
        "link.c",
        "        status = xd_event_record(link->freed[half_of(link, tile)], link->in, err);",
        "        status = xd_event_record(link->freed[half_of(link, tile)], link->out, err);",
        "staged",
    ),
    (
        "staged: a half is free after its last tile",
        "link.c",
        "    if (!status && ends_half(link, tile))",
        "    if (!status && begins_half(link, tile))",
        "staged",
    ),
    (
        "staged: a half is waited for before its first tile",
        "link.c",
        "    if (begins_half(link, link->next) && !link->waited)",
        "    if (ends_half(link, link->next) && !link->waited)",
        "staged",
    ),
    (
        "staged: released is recorded after the last tile",
        "link.c",
        "last && released ? released : link->filled",
        "!row && !at && released ? released : link->filled",
        "staged",
    ),
    (
        "staged: arrived is recorded on the destination's stream",
        "link.c",
        "        status = record(arrived, link->in, err);",
        "        status = record(arrived, link->out, err);",
        "staged",
    ),
    (
        "staged: a copy of nothing waits for its destination",
        "link.c",
        "        status = wait_for(link->in, order->dest_free, err);",
        "        status = XD_OK;",
        "a copy of nothing, staged",
    ),
    (
        "staged: a copy of nothing carries source ready over",
        "link.c",
        "        status = wait_for(link->in, order->source_ready, err);",
        "        status = XD_OK;",
        "a copy of nothing, staged",
    ),
    (
        "forced: the host waits instead of the stream",
        "stream.c",
        "return xd_event_wait(event, XD_FOREVER, &done, err);",
        "return (void)done, XD_OK;",
        "waits by the host",
    ),
    (
        "ring: the host waits for a free tile",
        "ring.c",
        "        status = xd_event_wait(mine->free, left, &done, err);",
        "        (void)left;\n        done = 1;",
        "from stream to stream through a ring",
    ),
    (
        "throttle: the host waits for the oldest exit",
        "throttle.c",
        "    int status = xd_event_wait(exit, remaining, came, err);",
        "    int status = XD_OK;\n    (void)exit;\n    (void)remaining;\n    (void)err;\n    *came = 1;",
        "host slots behind a throttle",
    ),
]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100, check=False)


def compile_to(out: Path, *arguments: object) -> None:
    built = run(*COMPILE, "-o", out, *arguments)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Object file by source of the whole runtime and of the program, unchanged."""
    where = tmp_path_factory.mktemp("native")
    sources = [PROGRAM, *sorted((ROOT / "native").glob("*.c")), *sorted((ROOT / "native/sim").glob("*.c"))]
    built = {}
    for source in sources:
        built[source] = where / f"{source.parent.name}_{source.stem}.o"
        compile_to(built[source], "-c", source)
    return built


def run_seeds(program: Path, objects: dict[Path, Path]) -> subprocess.CompletedProcess[str]:
    compile_to(program, *objects.values(), "-pthread", "-lm", "-ldl")
    return run(program, 1, SEEDS)


def test_nothing_is_found_in_the_runtime_as_it_is(objects, tmp_path):
    done = run_seeds(tmp_path / "hops", objects)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "line", "instead", "scene"), [row[1:] for row in MUTATIONS], ids=[row[0] for row in MUTATIONS]
)
def test_every_wait_is_needed(objects, tmp_path, file, line, instead, scene):
    source = ROOT / "native" / file
    text = source.read_text()
    assert text.count(line) == 1, f"{file} has changed: say anew which line this wait is"
    for header in (ROOT / "native").glob("*.h"):
        shutil.copy(header, tmp_path)
    mutant = tmp_path / file
    mutant.write_text(text.replace(line, instead))
    compile_to(tmp_path / "mutant.o", "-c", mutant)
    done = run_seeds(tmp_path / "hops", objects | {source: tmp_path / "mutant.o"})
    assert done.returncode == 1, f"no seed of {SEEDS} shows it: {done.stderr}"
    assert scene in done.stderr
    assert "is wrong" in done.stderr
