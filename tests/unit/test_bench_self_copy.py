"""The bench of bare staged copies, over the stand-in: every way gives the right bytes, and the rows make a table."""

import json
import sys
from pathlib import Path

import vendor_child

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import self_copy  # noqa: E402

MIB = 1 << 20


def rows_of(src: int, dst: int, what: str) -> list[self_copy.Row]:
    vendor_child.build_fakes()
    code = f"bare(({src}, {dst}), 1e-4, {MIB}, {what!r})"
    code = f"import json\nfrom bench.self_copy import bare\nprint(json.dumps({code}))"
    rows: list[self_copy.Row] = json.loads(vendor_child.run(code, vendor_child.FAKES))
    return rows


def test_every_way_is_right_on_one_device_and_between_two() -> None:
    for src, dst in ((0, 0), (0, 1)):
        rows = rows_of(src, dst, "sweep")
        copies = [row for row in rows if row["case"] == "copy"]
        assert len(copies) > 50
        assert all(row["right"] for row in copies)
        lanes = {row["method"] for row in copies if "lane" in row["method"]}
        assert bool(lanes) == (src == dst)  # the stand-in refuses an upload on a stream of another device
        lines = list(self_copy.report(rows))
        assert not any("WRONG" in line or "ended early" in line for line in lines)
        assert any(line.startswith("   1 MiB pairs") for line in lines)


def test_places() -> None:
    rows = rows_of(0, 0, "places")
    assert {row["method"] for row in rows if row["case"].startswith("cpu ")} == {"pairs"}
    assert not any(row["case"] == "ended early" for row in rows)
