"""Small models and loops that the multi-process tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.act.layout import fingerprint


class Net(nn.Module):
    """A little of everything that makes DDP behave differently."""

    def __init__(self, batch_norm: bool = False, unused: bool = False, double: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if batch_norm else nn.Identity(), nn.Tanh())
        self.head = nn.Linear(16, 3)
        self.extra = nn.Linear(16, 3) if unused else None
        self.gain = nn.Parameter(torch.ones(16, dtype=torch.float64)) if double else None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.gain is not None:
            h = (h * self.gain).to(h.dtype)
        self.calls += 1
        if self.extra is not None and self.calls % 2:
            return self.extra(h)
        return self.head(h)


Step = Callable[[DistributedDataParallel, torch.optim.Optimizer, Tensor, Tensor, int], None]


def plain_step(ddp: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, _step: int) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()


def accumulating_step(ddp: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
    sync = step % 3 == 2
    with contextlib.nullcontext() if sync else ddp.no_sync():
        nn.functional.cross_entropy(ddp(x), y).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()


def train_fixed(
    rank: int,
    mode: str | None,
    run_dir: Path,
    build: Callable[[], nn.Module],
    step_fn: Step = plain_step,
    num_steps: int = 12,
    ddp_args: dict[str, Any] | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    optimizer_fn: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
) -> int:
    """Train on fixed data and return the fingerprint of everything learned. `mode` None is DDP without Paceline."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(wrap(build()), **(ddp_args or {}))
    optimizer = optimizer_fn(ddp.parameters())
    pace = paceline.attach(ddp, optimizer, mode=mode, run_dir=run_dir) if mode else None
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_steps):
        x = torch.randn(6, 8, generator=generator)
        y = torch.randint(0, 3, (6,), generator=generator)
        step_fn(ddp, optimizer, x, y, step)
    if pace is not None:
        pace.close()
    return fingerprint([*ddp.module.parameters(), *ddp.module.buffers()])
