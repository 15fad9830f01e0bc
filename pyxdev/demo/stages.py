"""The stages of the demo's pipeline, made of a loaded model: which layers, what they return, what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyxdev.demo.llama import Activation, Config, LlamaStage
from pyxdev.demo.model import dequantise
from pyxdev.errors import InvalidArgument
from pyxdev.executor import Stage
from pyxdev.loader.placement import layer_of
from pyxdev.loader.weights import Weights

# A plain GPU, for the time that simulated devices take: float32 operations and bytes of memory a second.
OPERATIONS = 10e12
BANDWIDTH = 800e9

_FILE_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def make_stages(weights: Weights, context: int) -> list[Stage]:
    """A stage for each device that has layers, in their order, with room for `context` positions.

    NumPy stages on simulated devices, torch stages on others. The float32 values are made on the host from the bytes on
    the devices. InvalidArgument where a device's layers are not consecutive.
    """
    config = Config.from_metadata(weights.metadata)
    around = {name: _values(weights[name]) for name in weights if layer_of(name) is None}
    stages = []
    for device, layers in _layers(weights, config):
        values = {name: _values(weights[name]) for name in weights if layer_of(name) in layers}
        if layers.start == 0 or layers.stop == config.layers:
            values |= around
        xp, place = _namespace(weights.runtime.backend, device)
        values = {name: place(value) for name, value in values.items()}
        stages.append(_declare(LlamaStage(config, values, layers, context, xp), device))
        if xp is not np:
            xp.cuda.synchronize(device)  # what was made on torch's default stream is used on the stage's
    return stages


def _layers(weights: Weights, config: Config) -> list[tuple[int, range]]:
    """The devices with layers, and which; in the order of the layers."""
    devices = [weights[f"blk.{layer}.attn_norm.weight"].device for layer in range(config.layers)]
    runs: list[tuple[int, range]] = []
    for layer, device in enumerate(devices):
        if runs and runs[-1][0] == device:
            runs[-1] = device, range(runs[-1][1].start, layer + 1)
        else:
            runs.append((device, range(layer, layer + 1)))
    if len({device for device, _ in runs}) != len(runs):
        raise InvalidArgument(f"the layers are on devices {devices}; each device must have consecutive ones")
    return runs


def _namespace(backend: str, device: int) -> tuple[Any, Any]:
    """The array library of the stages on a device, and a function that brings a NumPy array there."""
    if backend == "sim":
        return np, lambda values: values
    import torch

    return torch, lambda values: torch.from_numpy(values).to(f"cuda:{device}")


def _values(array: Any) -> np.ndarray[Any, Any]:
    return dequantise(array.raw.numpy(), _FILE_TYPES.get(array.dtype, array.dtype), array.shape)


# ---- what simulated devices must know before the stage runs ----


def _declare(stage: LlamaStage, device: int) -> Stage:
    name = f"layers {stage.layers.start}-{stage.layers.stop - 1}"
    return Stage(stage, device, out=lambda x: outputs(stage, x), cost=lambda x: seconds(stage, x), name=name)


def outputs(stage: LlamaStage, x: Activation) -> Activation:
    """What the stage will return for x: see llama.py. Arrays stand for their shape and dtype."""
    start, want = x["start"], x["want"]
    n = _tokens(x)
    if not stage.last:
        return {"hidden": _array(n, stage.config.width), "start": start, "want": want}
    if want == "nothing":
        return {"start": start + n}
    y = {"start": start + n, "want": "token", "tokens": np.broadcast_to(np.int64(), 1)}
    return y | {"logits": _array(stage.config.vocab)} if want == "logits" else y


def seconds(stage: LlamaStage, x: Activation) -> float:
    """The time for x: that of its operations or that of the bytes it reads, whichever is longer."""
    config, n, layers = stage.config, _tokens(x), len(stage.layers)
    stop = x["start"] + n
    matrices = layers * config.layer_weights
    attention = layers * 2 * n * stop * config.heads * config.head_size
    cached = layers * 2 * stop * config.kv_heads * config.head_size
    time: float = max(2 * (n * matrices + attention) / OPERATIONS, 4 * (matrices + cached) / BANDWIDTH)
    if stage.last and x["want"] != "nothing":
        time += 4 * config.vocab * config.width / BANDWIDTH  # one token: its operations take less time than the bytes
    return time


def _tokens(x: Activation) -> int:
    return int((x["hidden"] if "hidden" in x else x["tokens"]).shape[0])


def _array(*shape: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.float32(), shape)
