"""The same blocks through torch.distributed.pipelining: ScheduleGPipe, a process for each device.

measure() starts the two processes, each running this file, and ends them at a deadline: a rank that fails leaves the
other waiting for it. They meet over a file, and each microbatch is one sequence of the batch that rank 0 is given.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import json
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 40.0  # seconds that a rank waits for the other
ROUNDS = (3, 25)

Found = dict[str, Any]  # stage_us, m, seconds, host, error


def measure(
    stages: dict[int, tuple[int, ...]], microbatches: list[int], budget: float, deadline: float, backend: str = "nccl"
) -> tuple[list[Found], str]:
    """What was found, and why there is no more of it ("": all is there).

    stages: the Size of each length in us. budget: seconds of measuring altogether. backend "gloo" runs on CPUs.
    """
    work = {"stages": list(stages.items()), "microbatches": microbatches, "budget": budget, "backend": backend}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps(work))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in (0, 1):
                with (folder / f"log{rank}").open("wb") as log:
                    command = [sys.executable, __file__, str(rank), name]
                    ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            reason = _wait(ranks, deadline)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if reason:
            said = [(folder / f"log{rank}").read_text(errors="replace").strip().splitlines() for rank in (0, 1)]
            reason += "".join(f"; rank {rank}: {lines[-1]}" for rank, lines in enumerate(said) if lines)
        rows = folder / "rows"
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else [], reason


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Until both are through, one has failed or the deadline is over."""
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with {code}"
        if None not in codes:
            return ""
        time.sleep(0.05)
    return f"not through after {deadline:g} s"


# ---- one rank --------------------------------------------------------------------------------------------------------


def run(rank: int, folder: Path) -> None:
    import torch
    from torch import distributed

    from bench.blocks import Size, distance, make_inputs, make_stage

    work = json.loads((folder / "work.json").read_text())
    on_gpu = work["backend"] == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        work["backend"], init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=PATIENCE), device_id=device if on_gpu else None,
    )  # fmt: skip
    cases = len(work["stages"]) * len(work["microbatches"])
    for us, numbers in work["stages"]:
        size = Size(*numbers)
        stages = [make_stage(size, index, device) for index in (0, 1) if rank == 1 or index == 0]
        xs = make_inputs(size, max(work["microbatches"]), device)
        for m in work["microbatches"]:
            rounds = max(ROUNDS[0], min(ROUNDS[1], int(work["budget"] / cases / (2e-6 * us * (m + 1)))))
            times, y = _time(stages[rank], rank, torch.cat(xs[:m]) if rank == 0 else None, m, device, rounds)
            both: list[Any] = [None, None]
            distributed.all_gather_object(both, times)
            if rank == 1:
                wanted = [stages[1](stages[0](x)) for x in xs[:m]]
                error = max(map(distance, y.split(1), wanted))
                # From the first submission on rank 0 to the end on rank 1; both count the same clock.
                runs = [(there[2] - here[0], here[1] - here[0]) for here, there in zip(*both, strict=True)]
                with (folder / "rows").open("a") as file:
                    found = {"stage_us": us, "m": m, "error": error, "runs": runs}
                    file.write(json.dumps(found) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


def _time(stage: Any, rank: int, x: Any, m: int, device: Any, rounds: int) -> tuple[list[tuple[float, ...]], Any]:
    """(begin, submitted, end) of each round on this rank, and the last output."""
    import torch
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, device), n_microbatches=m)
    times, y = [], None
    for _ in range(rounds + 2):
        distributed.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.monotonic()
        y = schedule.step(*([x] if rank == 0 else []))
        submitted = time.monotonic()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((begin, submitted, time.monotonic()))
    return times[2:], y


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
