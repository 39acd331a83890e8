"""What workers and servers say to each other: turns kinds, numbers and timings into headers and back.

worker                                        server
PUSH  base version, loss scale, then a message per bucket ──▶  held until an update takes it in, or it is dropped
ABANDON                       ──▶  instead of a gradient that was cancelled
TIMING, MORE, BYE             ──▶  to the chief alone, but for BYE: a step's times, one more batch, the loop is over
                              ◀──  PARAMETERS version, the loop's epoch, (the chief's:) a lease and the buffers
                              ◀──  LEASE to MORE · CANCEL to a gradient under way · EXPELLED · FINAL parameters
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.act.channel import header
from paceline.decide.ledger import Lease
from paceline.types import StepTiming


class Up(IntEnum):
    """What a worker says."""

    BYE = 0
    PUSH = 1
    ABANDON = 2
    TIMING = 3
    MORE = 4
    PUSH_VIA = 5


class Down(IntEnum):
    """What a server says."""

    PARAMETERS = 0
    LEASE = 1
    CANCEL = 2
    EXPELLED = 3
    FINAL = 4
    AGAIN = 5
    CUT = 6


_TIMED = tuple(field.name for field in fields(StepTiming) if field.name != "rank")


def timing_header(timing: StepTiming) -> Tensor:
    """A step's times on the wire.

    Example:
        >>> timing = StepTiming(2, 7, 1.5, backward_s=0.25, samples=32)
        >>> timing_of(2, timing_header(timing)) == timing
        True
    """
    values = [getattr(timing, name) for name in _TIMED]
    return header(Up.TIMING, *(math.nan if value is None else value for value in values))


def timing_of(rank: int, told: Tensor) -> StepTiming:
    """The times behind `timing_header`."""
    values: dict[str, Any] = dict(zip(_TIMED, told[1:].tolist(), strict=False))
    for name, value in values.items():
        if math.isnan(value):
            values[name] = None
        elif name in ("step", "samples"):
            values[name] = int(value)
    return StepTiming(rank, **values)


@dataclass(frozen=True, slots=True)
class Spot:
    """A worker's place in the transmission tree, by numbers of links: nobody above or below where there is no tree."""

    tree: int = 0
    parent: int = -1
    children: tuple[int, ...] = ()


def answer_tensors(kind: Down, version: int, lease: Lease | None = None, spot: Spot | None = None) -> list[Tensor]:
    """A header, and what belongs to it: a lease's positions, and children."""
    spot = spot or Spot()
    positions = lease.positions if lease else ()
    lease_epoch = lease.epoch if lease else -1
    told = header(kind, version, lease_epoch, len(positions), spot.tree, spot.parent, len(spot.children))
    return [told, torch.tensor((*positions, *spot.children), dtype=torch.int64)]


class Buffers:
    """A model's buffers (BatchNorm's running statistics, say) as one vector; those that are no numbers stay behind.

    A server adds the sample-weighted mean of how the contributors to an update changed them. Under BSP that is the mean
    of all ranks' buffers; a stale contributor undoes nobody's change.

    Example:
        >>> buffers = Buffers([torch.ones(2), torch.tensor(5)])
        >>> before = buffers.gather()
        >>> buffers.scatter(before + 1.0); buffers.gather()
        tensor([2., 2., 6.], dtype=torch.float64)
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = [t for t in tensors if t.dtype is not torch.bool and not t.is_complex()]
        self.size = sum(t.numel() for t in self._tensors)

    def gather(self) -> Tensor:
        """Their values, float64, which holds every integer that they count to exactly."""
        parts = [t.detach().reshape(-1).to("cpu", torch.float64) for t in self._tensors]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def scatter(self, vector: Tensor) -> None:
        """Set their values, in place; integers are rounded."""
        for t, part in zip(self._tensors, vector.split([t.numel() for t in self._tensors]), strict=True):
            value = part if t.is_floating_point() else part.round()
            with torch.no_grad():
                t.copy_(value.view(t.shape))
