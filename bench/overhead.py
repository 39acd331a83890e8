"""What Paceline costs when nobody is slow: step time under `observe` and `auto` as a ratio to plain DDP.

Four ranks train the demo's CNN, steps paced to about 50 ms. Rounds interleave the systems in changing order, all in the
same processes, each block with a model, a DDP and an attachment of its own that end with it: systems differ in nothing
else. A round gives one ratio per system, from the median step of each block. Prints JSON with the mean ratio and
a bootstrap 95 % interval. Run it on an otherwise idle machine:

    python bench/overhead.py --rounds 20
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.act.attach import attach
from paceline.act.local import run_local
from paceline.demo.faults import Faults, StandIn
from paceline.demo.task import build_model, digits
from paceline.types import FaultPlan

SYSTEMS = ("ddp", "observe", "auto")
STEP_S = 0.04  # paced part; computing and exchanging gradients brings a step to about 50 ms
WARMUP_STEPS = 10


def block(rank: int, system: str, run_dir: Path, num_steps: int) -> list[float]:
    """Train `num_steps` steps and return their durations, seconds."""
    stand_in = StandIn(Faults(FaultPlan(), rank), STEP_S / 3, STEP_S * 2 / 3)
    ddp = DistributedDataParallel(build_model(0, stand_in))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    dataset, _, _ = digits()
    pace = attach(ddp, optimizer, mode=system, run_dir=run_dir) if system != "ddp" else None  # type: ignore[arg-type]
    if system == "auto":
        assert pace is not None
        loader: Any = pace.data(dataset, batch_size=32)
    else:
        loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset), drop_last=True)
    durations: list[float] = []
    while len(durations) < WARMUP_STEPS + num_steps:
        last = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            now = time.perf_counter()
            durations.append(now - last)
            last = now
    if pace is not None:
        pace.close()
    return durations[WARMUP_STEPS : WARMUP_STEPS + num_steps]


def series(
    rank: int, rounds: int, num_steps: int, directory: Path, progress: Synchronized[int]
) -> dict[str, list[float]]:
    """All blocks of all rounds; the median step of each, by system, seconds."""
    medians: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for number in range(rounds):
        for position in range(len(SYSTEMS)):
            system = SYSTEMS[(number + position) % len(SYSTEMS)]
            gc.collect()  # what an earlier block left is not this one's
            dist.barrier()
            medians[system].append(median(block(rank, system, directory / f"{number}-{system}", num_steps)))
            if rank == 0:
                progress.value += 1
    return medians


def main(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps per block.")] = 40,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 4,
) -> None:
    """Measure and print."""
    import paceline.report.charts  # noqa: F401 - once here, before the forks, instead of in every block

    logging.getLogger("paceline").setLevel(logging.ERROR)
    progress = multiprocessing.get_context("fork").Value("i", 0)
    with tempfile.TemporaryDirectory() as directory, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("blocks", total=rounds * len(SYSTEMS))
        outcomes = run_local(
            series, ranks, rounds, steps, Path(directory), progress, timeout_s=3600.0,
            on_tick=lambda: bar.update(task, completed=progress.value),
        )  # fmt: skip
    failed = [o.error for o in outcomes if o.error]
    if failed:
        raise SystemExit(f"a rank failed: {failed[0]}")
    # The reduction makes all ranks equally long; take the slowest anyway.
    blocks = {
        system: [max(times) for times in zip(*(outcome.value[system] for outcome in outcomes), strict=True)]
        for system in SYSTEMS
    }
    result: dict[str, Any] = {"ranks": ranks, "rounds": rounds, "steps_per_block": steps, "target_ratio": 1.01}
    result["step_ms"] = {system: round(fmean(values) * 1e3, 3) for system, values in blocks.items()}
    for system in SYSTEMS[1:]:
        ratios = [ours / plain for ours, plain in zip(blocks[system], blocks["ddp"], strict=True)]
        result[system] = _with_interval(ratios)
    print(json.dumps(result, indent=2))


def _with_interval(ratios: list[float]) -> dict[str, float]:
    """Mean of paired ratios with a bootstrap 95 % interval."""
    rng = np.random.default_rng(0)
    means = rng.choice(ratios, size=(10_000, len(ratios))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "ratio": round(fmean(ratios), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "median": round(median(ratios), 4),
    }


if __name__ == "__main__":
    typer.run(main)
