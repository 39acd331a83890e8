"""DDP with one late rank, in the shaped-network lab: what `collective="auto"` saves per step, against its prediction.

Every rank trains the same linear model; one is late with its backward, by a part of T_RS (the time of the others'
reduce-scatter). Rounds alternate between plain DDP and `collective="auto"` in fresh processes. The saving is the
difference of median steps, after those in which the late rank is still being found; the prediction is the one in the
run log. Needs root; says "skipped" without.

    python bench/late_ddp.py --ranks 8 --size-mb 16 --delay-ratio 0.8
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allreduce import early_time_s
from netlab import Lab, skip_or
from paceline.act.attach import attach
from paceline.act.local import run_local
from paceline.record import read

SYSTEMS = ("ddp", "auto")
WIDTH = 1000
SETTLE_STEPS = 10  # in which the late rank is found


def block(rank: int, system: str, run_dir: Path, size_mb: float, delay_s: float, late: int, steps: int) -> Any:
    """Train; return the durations of the steps after the first ones, and the model's weights on rank 0."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, round(size_mb * 1e6 / 4 / (WIDTH + 1)))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    pace = attach(ddp, optimizer, run_dir=run_dir, collective="auto") if system == "auto" else None
    durations = []
    for _ in range(SETTLE_STEPS + steps):
        began = time.monotonic()
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, WIDTH, generator=generator)).square().mean()
        if rank == late:
            time.sleep(delay_s)
        loss.backward()
        optimizer.step()
        durations.append(time.monotonic() - began)
    if pace is not None:
        pace.close()
    return durations[SETTLE_STEPS:], model.weight.detach().numpy() if rank == 0 else None


def main(
    ranks: Annotated[int, typer.Option(help="Processes, 4 or more.")] = 8,
    size_mb: Annotated[float, typer.Option(help="Gradients, 10^6 bytes.")] = 16.0,
    rate_mbit: Annotated[float, typer.Option(help="Port rate, Mbit/s.")] = 400.0,
    delay_ratio: Annotated[float, typer.Option(help="How late the late rank is, in T_RS.")] = 0.8,
    late: Annotated[int, typer.Option(help="Which rank is late.")] = 2,
    rounds: Annotated[int, typer.Option(help="Alternations.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps measured per block.")] = 12,
) -> None:
    """Measure and print JSON."""
    delay_s = delay_ratio * early_time_s(ranks, size_mb, rate_mbit)

    def run() -> None:
        step_s: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        predicted: list[float] = []
        choices: list[dict[str, Any]] = []
        furthest = 0.0
        for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
            weights = {}
            for system in SYSTEMS:
                with tempfile.TemporaryDirectory() as directory, Lab(ranks, rate_mbit) as lab:
                    arguments = (system, Path(directory), size_mb, delay_s, late, steps)
                    outcomes = run_local(block, ranks, *arguments, prepare=lab.entrance(), timeout_s=300.0)
                    failed = [o.error for o in outcomes if o.error]
                    if failed:
                        raise SystemExit(f"a rank failed: {failed[0]}")
                    step_s[system].append(median(outcomes[0].value[0]))
                    weights[system] = outcomes[0].value[1]
                    if system == "auto":
                        chosen = [line.data for line in read(Path(directory)) if line.kind == "collective"]
                        choices += [{k: c[k] for k in ("late", "late_bytes", "num_chunks", "gap_s")} for c in chosen]
                        predicted.append(chosen[-1]["gain_s"] if chosen else 0.0)
            furthest = max(furthest, float(abs(weights["auto"] - weights["ddp"]).max()))
        saved_s = fmean(step_s["ddp"]) - fmean(step_s["auto"])
        result = {
            "ranks": ranks,
            "size_mb": size_mb,
            "rate_mbit": rate_mbit,
            "delay_s": round(delay_s, 4),
            "step_s": {system: [round(s, 4) for s in values] for system, values in step_s.items()},
            "saved_s": round(saved_s, 4),
            "predicted_s": round(fmean(predicted), 4),
            "saved_over_predicted": round(saved_s / fmean(predicted), 3) if fmean(predicted) else None,
            "choices": choices,
            "largest_weight_difference": furthest,
        }
        print(json.dumps(result, indent=2))

    skip_or(run)


if __name__ == "__main__":
    typer.run(main)
