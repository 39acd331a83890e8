"""What all synthetic stragglers share: turns a family's factor and its noise into a `Trace`. Pure.

Every family is a frozen dataclass whose answer depends on its fields, the rank and the step or the time alone. All of
them add noise: a lognormal factor with median 1, drawn anew for every rank and step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from paceline.sim.draws import normal
from paceline.types import Rank


def want(is_right: bool, wanted: str, got: object) -> None:
    """Raise a ValueError that says what was wanted and what was got, unless it is right."""
    if not is_right:
        raise ValueError(f"wanted {wanted}, got {got}")


@dataclass(frozen=True, slots=True)
class Family(ABC):
    """What all families share.

    Args:
        num_ranks: Ranks, >= 1.
        seed: Two traces that differ in nothing else are two draws of the same family, 0..2**64 - 1.
        jitter: Standard deviation of the logarithm of the noise factor, >= 0; 0.015 is 1.5 %.

    Raises:
        ValueError: a field, here or in a family, out of its range.
    """

    num_ranks: int
    seed: int = 0
    jitter: float = 0.015

    has_stragglers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        want(self.num_ranks >= 1, "num_ranks >= 1", self.num_ranks)
        want(0 <= self.seed < 2**64, "a seed in 0..2**64 - 1", self.seed)
        want(0 <= self.jitter < 1, "a jitter in 0..1", self.jitter)

    @property
    @abstractmethod
    def name(self) -> str:
        """The family and what distinguishes it most."""

    @abstractmethod
    def factor(self, rank: Rank, step: int, now_s: float) -> float:
        """Return the slowdown without noise, >= 1."""

    def slowdown(self, rank: Rank, step: int, now_s: float) -> float:
        """Return the factor on the rank's reference compute time; see `Trace`."""
        noise = math.exp(self.jitter * normal(self.seed, rank, step)) if self.jitter else 1.0
        return noise * self.factor(rank, step, now_s)

    def want_rank(self, rank: Rank) -> None:
        """Raise a ValueError unless the rank is one of the family's."""
        want(0 <= rank < self.num_ranks, f"a rank in 0..{self.num_ranks - 1}", rank)
