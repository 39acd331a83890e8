"""What every published method keeps track of: turns observations into where the training stands, and plans. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from paceline.decide.plan import Adopted, Observation, Plan, Rejected
from paceline.policy.base import SyncPolicy
from paceline.types import Rank, StepTiming, Update

Rows = Sequence[Sequence[float]]
"""Own times in seconds, one row per step, one column per rank."""

MARGIN_VERSIONS = 2
"""A plan takes effect so many versions after the newest known one: by then every rank can know of it."""


@dataclass(frozen=True, slots=True)
class Course:
    """Where a training stands, as far as a published method keeps track of it; a value.

    Versions are counted from `Update`; a rank's own times restart when a plan is adopted, since they may depend on it.

    Args:
        policy: The one in force.
        batch_size: Samples per rank and gradient at the start.
        batch_sizes: The same by rank, now; its length is the world size.
        recent: Newest steps of every rank since the last plan, oldest first; only of those that have reported.
        version: Newest update, from 1; 0 before the first.
        since_version: The version at which the policy in force began.
        num_gradients: Gradients applied so far.
        num_plans: Plans made so far.
        pending: The plan that is neither adopted nor rejected yet.

    Example:
        >>> from paceline.policy.barrier import BSP
        >>> course = Course.begin(BSP(), num_ranks=2, batch_size=8)
        >>> update = Update(1, contributions={0: 8, 1: 8}, dropped={}, staleness={}, lr_scale=1.0)
        >>> course = course.take_in(update, keep=4)
        >>> course.version, course.num_gradients
        (1, 2)
    """

    policy: SyncPolicy[Any]
    batch_size: int
    batch_sizes: tuple[int, ...]
    recent: Mapping[Rank, tuple[StepTiming, ...]] = field(default_factory=dict)
    version: int = 0
    since_version: int = 0
    num_gradients: int = 0
    num_plans: int = 0
    pending: Plan | None = None

    @classmethod
    def begin(cls, policy: SyncPolicy[Any], num_ranks: int, batch_size: int) -> Course:
        """The course before the first step."""
        return cls(policy, batch_size, (batch_size,) * num_ranks)

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return len(self.batch_sizes)

    @property
    def reference_samples(self) -> int:
        """The global batch at the start, which the learning rate is tuned for."""
        return self.batch_size * self.num_ranks

    def take_in(self, seen: Observation, keep: int) -> Course:
        """Note one observation; of every rank's steps the newest `keep` stay.

        What cannot be true (a time of zero, an unknown rank, an update that is known already, news of a plan that is
        not pending) changes nothing.
        """
        match seen:
            case StepTiming() if is_usable(seen, self.num_ranks):
                steps = (*self.recent.get(seen.rank, ()), seen)[-keep:]
                return replace(self, recent={**self.recent, seen.rank: steps})
            case Update() if seen.version > self.version:
                num_gradients = self.num_gradients + len(seen.contributions)
                return replace(self, version=seen.version, num_gradients=num_gradients)
            case Adopted(plan) if self.pending is not None and plan.epoch == self.pending.epoch:
                version = max(self.version, plan.effective_step - 1)
                return replace(
                    self,
                    policy=self.pending.policy,
                    batch_sizes=self.pending.batch_sizes or (self.batch_size,) * self.num_ranks,
                    recent={},
                    version=version,
                    since_version=version,
                    pending=None,
                )
            case Rejected(plan) if self.pending is not None and plan.epoch == self.pending.epoch:
                return replace(self, pending=None)
        return self

    def propose(
        self,
        policy: SyncPolicy[Any],
        reason: str,
        lr_scale: float = 1.0,
        gain: float = 1.0,
        batch_sizes: tuple[int, ...] | None = None,
    ) -> tuple[Course, tuple[Plan, ...]]:
        """Make the next plan, which is pending from now on. A gain of 1.0 says that the method predicts none."""
        plan = Plan(
            epoch=self.num_plans + 1,
            effective_step=self.version + MARGIN_VERSIONS,
            policy=policy,
            lr_scale=lr_scale,
            predicted_gain=gain,
            reason=reason,
            batch_sizes=batch_sizes,
        )
        return replace(self, num_plans=plan.epoch, pending=plan), (plan,)

    def rows(self, least: int) -> list[tuple[StepTiming, ...]]:
        """The newest steps of all ranks side by side, oldest first, each row by rank.

        As many rows as the rank with the fewest steps has; none at all while that is less than `least`. Where ranks
        do not step together, a row holds steps of different times.
        """
        num_rows = min(len(self.recent.get(rank, ())) for rank in range(self.num_ranks))
        if num_rows < max(1, least):
            return []
        return list(zip(*(self.recent[rank][-num_rows:] for rank in range(self.num_ranks)), strict=True))

    def mean_own_s(self, num_steps: int) -> tuple[float, ...] | None:
        """Mean own time over the last `num_steps` by rank, seconds; None while some rank has fewer."""
        rows = self.rows(num_steps)[-num_steps:]
        return tuple(fmean(t.own_s for t in steps) for steps in zip(*rows, strict=True)) if rows else None


def is_usable(timing: StepTiming, num_ranks: int) -> bool:
    """Whether the timing is of a rank that takes part, with an own time between a nanosecond and thirty years."""
    return 0 <= timing.rank < num_ranks and 1e-9 <= timing.own_s <= 1e9


def comm_s(rows: list[tuple[StepTiming, ...]]) -> float:
    """Time of the reduction itself: the shortest wait of a row, median over the rows, seconds."""
    return median(min(t.wait_s for t in row) for row in rows)


def check_setup(num_ranks: int, batch_size: int) -> None:
    """Refuse a world without ranks or a batch without samples.

    Raises:
        ValueError: either is below 1.
    """
    if num_ranks < 1 or batch_size < 1:
        raise ValueError(f"wanted at least one rank and a batch of one, got {num_ranks} and {batch_size}")
