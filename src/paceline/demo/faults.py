"""Planted faults: turns a `FaultPlan` into real slowness and real failures of one rank."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.types import FaultKind, FaultPlan, Rank


class Faults:
    """What is planted in one rank; the loop calls `next_step` once per step, the parts below ask `seconds`.

    Args:
        plan: The run's faults.
        rank: This rank.
    """

    def __init__(self, plan: FaultPlan, rank: Rank) -> None:
        self._plan = plan
        self._rank = rank
        self._step = 0
        self._heap: list[Any] = []

    def seconds(self, kind: FaultKind) -> float:
        """Extra seconds of this kind in the present step."""
        return sum(f.seconds for f in self._plan.at(self._rank, self._step) if f.kind is kind)

    def next_step(self) -> None:
        """Between two steps: work outside the step, garbage collections and failures happen here."""
        for fault in self._plan.at(self._rank, self._step):
            match fault.kind:
                case FaultKind.OUTSIDE:
                    time.sleep(fault.seconds)
                case FaultKind.GC:
                    self._collect_for(fault.seconds)
                case FaultKind.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                case FaultKind.STOP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                case FaultKind.RAISE:
                    raise RuntimeError(f"planted failure in step {self._step}")
                case _:
                    pass
        self._step += 1

    def _collect_for(self, seconds: float) -> None:
        """One real collection over a heap grown until it takes about `seconds`."""
        start = time.perf_counter()
        gc.collect()
        took = time.perf_counter() - start
        if took < seconds:
            count = 1_000_000 if took <= 0 else min(2_000_000, int((seconds / took - 1) * (len(self._heap) + 100_000)))
            with contextlib.suppress(MemoryError):
                gc.disable()
                self._heap.extend([] for _ in range(count))
                gc.enable()


class StandIn(nn.Module):
    """Stands in for an accelerator: sleeps in forward and backward, plus whatever is planted there.

    Args:
        faults: This rank's faults.
        forward_s: Sleep in forward, seconds.
        backward_s: Sleep in backward, seconds.
    """

    def __init__(self, faults: Faults, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self._faults = faults
        self._forward_s = forward_s
        self._backward_s = backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, later."""
        if not (self.training and torch.is_grad_enabled()):
            return x
        time.sleep(self._forward_s + self._faults.seconds(FaultKind.FORWARD))
        out: Tensor = _SleepInBackward.apply(x, self._backward_s + self._faults.seconds(FaultKind.COMPUTE))  # type: ignore[no-untyped-call]
        return out


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class SlowDataset(Dataset[Any]):
    """A data set whose reading may be planted to be slow, once per batch."""

    def __init__(self, dataset: Any, faults: Faults) -> None:
        self._dataset = dataset
        self._faults = faults

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self._faults.seconds(FaultKind.DATA))
        return [self._dataset[index] for index in indices]
