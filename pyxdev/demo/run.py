"""The demo: a prompt through the pipeline in microbatches, one at a time and pipelined, on one device and several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyxdev._native import Runtime
from pyxdev.demo.model import model_file
from pyxdev.demo.stages import make_stages
from pyxdev.demo.tokenizer import Tokenizer
from pyxdev.errors import InvalidArgument, NoPeerAccess
from pyxdev.executor import Executor, Ticket
from pyxdev.loader.loader import load
from pyxdev.settings import HostStage

log = logging.getLogger("pyxdev")

Logits = np.ndarray[Any, Any]

# How far logits may be from those of the one-device run. NumPy adds in the same order whatever the split, so there the
# bits are equal. A GPU's matrix product may be another kernel on another device; float32 strays by 1e-4 (see
# tests/unit/test_demo_reference.py), and a mistake costs more than 1e-2.
TOLERANCE = {"sim": 0.0, "cuda": 1e-3, "hip": 1e-3}


@dataclass(frozen=True)
class Work:
    """What is asked of the model. microbatch: tokens of the prompt that go through the stages together; tokens: how
    many are generated at most."""

    prompt: str
    microbatch: int = 64
    tokens: int = 32


@dataclass(frozen=True)
class Row:
    """One pipeline. Rates are tokens of the prompt a second, on the runtime's clock; bound is the speedup of equal
    stages and free copies, m*n/(m+n-1)."""

    devices: int
    path: str
    in_flight: int
    microbatches: int
    one_at_a_time: float
    pipelined: float
    speedup: float
    bound: float


@dataclass(frozen=True)
class Outcome:
    """Everything that came of it. top: the ten best (id, logit) after the prompt. difference: the largest between any
    run's logits after the prompt and those of the one-device run; tolerance: how large it may be."""

    text: str
    prompt: list[int]
    generated: list[int]
    top: list[tuple[int, float]]
    difference: float
    tolerance: float
    rows: list[Row]

    @property
    def logits_agree(self) -> bool:
        return self.difference <= self.tolerance


def run(
    runtime: Runtime,
    devices: Sequence[int],
    paths: Sequence[HostStage],
    work: Work,
    tensor_split: Sequence[float] | None = None,
    in_flight: int | str = "auto",
) -> Outcome:
    """Runs the work on the first of the devices alone and then on all of them, once for each of `paths`, which are
    values of the setting host_stage. The text is that of the first path's run. Where there are several paths, one that
    these devices do not have is left out, with a warning."""
    with _one_thread() if runtime.backend == "sim" else nullcontext():
        return _run(runtime, devices, paths, work, tensor_split, in_flight)


def _one_thread() -> AbstractContextManager[object]:
    """NumPy's products on one thread. They are so small that more of them mostly wait for each other: on two cores they
    take three times as long together."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(1, "blas")
    return limits


def _run(
    runtime: Runtime,
    devices: Sequence[int],
    paths: Sequence[HostStage],
    work: Work,
    tensor_split: Sequence[float] | None,
    in_flight: int | str,
) -> Outcome:
    for name, value, least in (("microbatch", work.microbatch, 1), ("tokens", work.tokens, 0)):
        if value < least:
            raise InvalidArgument(f"{name} is {value}; numbers from {least} up are allowed")
    with load(model_file(), devices[:1], runtime=runtime) as weights:
        tokenizer = Tokenizer(weights.metadata)
        prompt = tokenizer.encode(tokenizer.chat(work.prompt))
        context = len(prompt) + work.tokens
        inputs = microbatches(prompt, work.microbatch)
        with Executor(devices[:1], make_stages(weights, context), runtime=runtime) as executor:
            expected = _logits(_one_at_a_time(executor, inputs))
    with load(model_file(), devices, tensor_split=tensor_split, runtime=runtime, progress=True) as weights:
        stages = make_stages(weights, context)
    rows: list[Row] = []
    generated: list[int] = []
    differences: list[float] = []
    for path in paths:
        used = devices[: len(stages)]
        try:
            executor = Executor(used, stages, runtime=runtime, in_flight=in_flight, host_stage=path)
        except NoPeerAccess as error:
            if len(paths) == 1:
                raise
            log.warning("no run with host_stage %s: %s", path, error)
            continue
        with executor:
            row, tickets = _measure(executor, inputs, len(prompt))
            rows.append(row)
            differences += [float(np.abs(_logits(ticket) - expected).max()) for ticket in tickets]
            if not generated:
                generated = _continue(executor, tickets[-1], work.tokens, tokenizer.end)
    best = np.argsort(-expected, kind="stable")[:10]
    return Outcome(
        text=tokenizer.decode(generated),
        prompt=prompt,
        generated=generated,
        top=[(int(token), float(expected[token])) for token in best],
        difference=float(np.max(differences)),  # NaN if any is
        tolerance=TOLERANCE[runtime.backend],
        rows=rows,
    )


def microbatches(prompt: Sequence[int], size: int) -> list[dict[str, Any]]:
    """The prompt in pieces of at most `size` tokens, as the first stage takes them. The last one asks for logits."""
    pieces = []
    for start in range(0, len(prompt), size):
        tokens = np.asarray(prompt[start : start + size], dtype=np.int64)
        want = "nothing" if start + size < len(prompt) else "logits"
        pieces.append({"tokens": tokens, "start": start, "want": want})
    return pieces


def _measure(executor: Executor, inputs: Sequence[Any], tokens: int) -> tuple[Row, tuple[Ticket, Ticket]]:
    """The prompt one microbatch at a time, then pipelined; the last ticket of each."""
    _one_at_a_time(executor, (inputs[0], inputs[-1]))  # memory is taken and code is loaded before time is
    clock = executor.runtime.clock
    begin = clock()
    single = _one_at_a_time(executor, inputs)
    middle = clock()
    pipelined = _pipelined(executor, inputs)
    end = clock()
    plan = executor.plan()
    m, n = len(inputs), len(plan.stages)
    row = Row(
        devices=n,
        path="+".join(sorted({link.path for link in plan.links})) or "direct",
        in_flight=plan.in_flight,
        microbatches=m,
        one_at_a_time=tokens / (middle - begin),
        pipelined=tokens / (end - middle),
        speedup=(middle - begin) / (end - middle),
        bound=m * n / (m + n - 1),
    )
    return row, (single, pipelined)


def _one_at_a_time(executor: Executor, inputs: Sequence[Any]) -> Ticket:
    for x in inputs:
        ticket = executor.submit(x)
        ticket.result()
    return ticket


def _pipelined(executor: Executor, inputs: Sequence[Any]) -> Ticket:
    tickets = [executor.submit(x) for x in inputs]
    for ticket in tickets:
        ticket.result()
    return tickets[-1]


def _continue(executor: Executor, ticket: Ticket, tokens: int, end: int) -> list[int]:
    """At most `tokens` ids from the one the ticket stands for on, up to the end of the answer. A ticket is the input of
    the next, which is on its way before the host sees the token."""
    generated: list[int] = []
    for left in range(tokens, 0, -1):
        following = executor.submit(ticket) if left > 1 else ticket
        token = int(ticket.result()["tokens"][0])
        if token == end:
            break
        generated.append(token)
        ticket = following
    return generated


def _logits(ticket: Ticket) -> Logits:
    logits = ticket.result()["logits"]
    return logits if isinstance(logits, np.ndarray) else np.asarray(logits.cpu())
