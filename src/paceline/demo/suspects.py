"""Who is guilty, and of what: turns a planted cause and rank into a short observed training and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.act.attach import attach
from paceline.act.local import run_local
from paceline.demo.faults import Faults, SlowDataset, StandIn
from paceline.errors import PacelineError
from paceline.record import read
from paceline.types import Fault, FaultKind, FaultPlan, Rank, Verdict

# What is planted, and the cause that the verdict must name. "buffers" is a late loader under a model whose buffer
# broadcast moves everybody else's wait into their forward pass.
PLANTED = {"compute": "compute", "data": "data", "gc": "gc", "outside": "outside", "buffers": "data"}
_STEP_S = 0.04


def observed_training(
    rank: Rank, cause: str | None, slow_rank: Rank, run_dir: Path, num_steps: int, extra_s: float
) -> None:
    """Train on this rank for `num_steps` paced steps with the cause planted in `slow_rank`; observe only."""
    planted = () if cause is None else (Fault(slow_rank, _kind(cause), extra_s),)
    faults = Faults(FaultPlan(planted), rank)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64) if cause == "buffers" else nn.Identity()
    model = nn.Sequential(
        nn.Linear(16, 64), norm, StandIn(faults, _STEP_S / 3, _STEP_S * 2 / 3), nn.ReLU(), nn.Linear(64, 4)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(num_steps * 8, 16), torch.randint(0, 4, (num_steps * 8,)))
    pace = attach(ddp, optimizer, mode="observe", run_dir=run_dir)
    for x, y in DataLoader(SlowDataset(dataset, faults), batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        faults.next_step()
    pace.close()


def _kind(cause: str) -> FaultKind:
    return FaultKind.DATA if cause == "buffers" else FaultKind(cause)


def verdicts(
    cause: str | None, slow_rank: Rank, run_dir: Path, num_steps: int = 30, extra_s: float = 0.1, num_ranks: int = 4
) -> list[Verdict]:
    """Run one observed training and return its verdicts.

    Args:
        cause: One of `PLANTED`, or None for a clean run.
        slow_rank: Whom it hits.
        run_dir: Where the log goes; must not hold one yet.
        num_steps: Length.
        extra_s: Extra seconds per step.
        num_ranks: World size.

    Raises:
        PacelineError: a rank failed.
    """
    args: tuple[Any, ...] = (cause, slow_rank, run_dir, num_steps, extra_s)
    outcomes = run_local(observed_training, num_ranks, *args, timeout_s=60.0 + num_steps * (extra_s + 0.2))
    failed = [o.error for o in outcomes if o.error]
    if failed:
        raise PacelineError(f"a rank failed: {failed[0]}")
    return [line.value for line in read(run_dir) if isinstance(line.value, Verdict)]
