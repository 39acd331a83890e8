"""The baselines as STAR's scripts have them, weaker than the papers they name: turn own times into plans. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.decide.baselines_course import Course, check_setup, is_usable
from paceline.decide.estimate import LrRule, lr_scale
from paceline.decide.plan import Adopted, Decision, Observation
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.policy.stale import ASP
from paceline.types import Rank, StepTiming


@dataclass(frozen=True, slots=True)
class SyncSwitchStarState:
    """The course, and when the next poll is due on rank 0's clock, seconds."""

    course: Course
    next_poll_s: float


@dataclass(frozen=True, slots=True)
class SyncSwitchStar:
    """Sync-Switch as in STAR's scripts: now and then, if any rank is slow, ASP for good.

    A poll is due when rank 0 begins a step `poll_s` after the last one (`StepTiming.started_s` is the clock). It
    compares the newest own time of every rank: is the largest above `slow_ratio` times the smallest?

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        poll_s: Seconds between polls, > 0; 25 in the scripts' other copy.
        slow_ratio: > 1.
        returns: Whether a poll that finds nobody slow goes back to BSP, as the scripts' `_manual_version` does.
        lr_rule: Their server divides an asynchronous gradient by N, which is the linear rule.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        STAR's released scripts (pcl-projects/Training-Sync-Mode), as facts: poll of about 200 s, 1.5 times the
        fastest, latched; no share of BSP, no rule for batch or learning rate. Ours differs: own times leave the push
        out, and the learning rate follows the rule of their other modes, without which ASP would diverge.

    Example:
        >>> decider = SyncSwitchStar(num_ranks=2, batch_size=8)
        >>> state = decider.init()
        >>> state, _ = decider.step(state, StepTiming(1, 1, 0.0, backward_s=0.5))
        >>> state, before = decider.step(state, StepTiming(0, 1, 0.0, backward_s=0.1))
        >>> state, plans = decider.step(state, StepTiming(0, 2, 200.0, backward_s=0.1))
        >>> before, plans[0].policy, plans[0].reason
        ((), ASP(max_staleness=None), 'rank 1 needs 5.0x the time of the fastest: asynchronous from now on')
    """

    num_ranks: int
    batch_size: int
    poll_s: float = 200.0
    slow_ratio: float = 1.5
    returns: bool = False
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        if not (self.poll_s > 0 and self.slow_ratio > 1):
            raise ValueError(f"wanted poll_s > 0 and slow_ratio > 1, got {self.poll_s} and {self.slow_ratio}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """Everybody in step."""
        return BSP()

    def init(self) -> SyncSwitchStarState:
        """Return the state before the first step; the first poll comes after `poll_s`."""
        return SyncSwitchStarState(Course.begin(BSP(), self.num_ranks, self.batch_size), self.poll_s)

    def step(self, state: SyncSwitchStarState, seen: Observation) -> tuple[SyncSwitchStarState, tuple[Decision, ...]]:
        """Poll when it is time."""
        state = replace(state, course=state.course.take_in(seen, keep=1))
        if not isinstance(seen, StepTiming) or seen.rank != 0 or not seen.started_s >= state.next_poll_s:
            return state, ()
        state = replace(state, next_poll_s=seen.started_s + self.poll_s)
        own = state.course.mean_own_s(num_steps=1)
        if own is None or state.course.pending is not None:
            return state, ()
        slowest = max(range(self.num_ranks), key=lambda rank: (own[rank], -rank))
        ratio = own[slowest] / min(own)
        is_asynchronous = isinstance(state.course.policy, ASP)
        if ratio > self.slow_ratio and not is_asynchronous:
            scale = lr_scale(self.lr_rule, self.batch_size, state.course.reference_samples)
            reason = f"rank {slowest} needs {ratio:.1f}x the time of the fastest: asynchronous from now on"
            course, plans = state.course.propose(ASP(), reason, scale)
        elif ratio <= self.slow_ratio and is_asynchronous and self.returns:
            course, plans = state.course.propose(BSP(), "no rank is slow at this poll: everybody in step again")
        else:
            return state, ()
        return replace(state, course=course), plans


@dataclass(frozen=True, slots=True)
class LbBspStarState:
    """The course, and the newest rows of the log since the last plan: rank, own time in seconds."""

    course: Course
    log: tuple[tuple[Rank, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LbBspStar:
    """LB-BSP as in STAR's scripts: the slowest rank of the newest rows loses 5 samples, the fastest gets 5.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient at the start.
        num_rows: Newest rows of the common log looked at, >= 1; None for one per rank.
        slow_ratio: It acts when slowest over fastest is above this, > 1.
        moved: Samples, >= 1.
        floor: The slowest rank's batch shrinks no further, >= 1. There is no ceiling.
        lr_rule: "none": the scripts add up the ranks' mean gradients whatever their batches are.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        STAR's released scripts (pcl-projects/Training-Sync-Mode), as facts: last 4 rows of a CSV with 4 workers, 1.5,
        5 samples, floor 10, global batch not conserved (at the floor only the fastest changes). Ours differs: as many
        rows as ranks, which is the same at 4 and favours the method elsewhere; gradients are weighted by batch (the
        barrier has no other mean; theirs are summed without weights); and nothing adds milliseconds to seconds.

    Example:
        >>> decider = LbBspStar(num_ranks=2, batch_size=12)
        >>> state, _ = decider.step(decider.init(), StepTiming(0, 1, 0.0, backward_s=0.1))
        >>> state, plans = decider.step(state, StepTiming(1, 1, 0.0, backward_s=0.4))
        >>> plans[0].batch_sizes, plans[0].reason
        ((17, 10), 'rank 1 needs 4.0x the time of rank 0: 5 samples more for the one, up to 5 less for the other')
    """

    num_ranks: int
    batch_size: int
    num_rows: int | None = None
    slow_ratio: float = 1.5
    moved: int = 5
    floor: int = 10
    lr_rule: LrRule = "none"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        if self.num_rows is not None and self.num_rows < 1:
            raise ValueError(f"num_rows must be >= 1 or None, got {self.num_rows}")
        if not (self.slow_ratio > 1 and self.moved >= 1 and self.floor >= 1):
            raise ValueError(
                f"wanted slow_ratio > 1, moved >= 1 and floor >= 1, got {self.slow_ratio}, {self.moved}, {self.floor}"
            )

    @property
    def initial(self) -> SyncPolicy[Any]:
        """Everybody in step, with even batches."""
        return BSP()

    def init(self) -> LbBspStarState:
        """Return the state before the first step."""
        return LbBspStarState(Course.begin(BSP(), self.num_ranks, self.batch_size))

    def step(self, state: LbBspStarState, seen: Observation) -> tuple[LbBspStarState, tuple[Decision, ...]]:
        """Look at the newest rows when there are enough since the last look."""
        course = state.course.take_in(seen, keep=1)
        state = replace(state, course=course)
        if isinstance(seen, Adopted):
            return replace(state, log=()), ()  # those rows are of the old batches
        if not isinstance(seen, StepTiming) or not is_usable(seen, self.num_ranks):
            return state, ()
        num_rows = self.num_rows or self.num_ranks
        log = (*state.log, (seen.rank, seen.own_s))[-num_rows:]
        if len(log) < num_rows or course.pending is not None:
            return replace(state, log=log), ()
        return self._look(replace(state, log=()), log)

    def _look(
        self, state: LbBspStarState, log: tuple[tuple[Rank, float], ...]
    ) -> tuple[LbBspStarState, tuple[Decision, ...]]:
        slowest, longest_s = max(log, key=lambda row: row[1])
        fastest, shortest_s = min(log, key=lambda row: row[1])
        if longest_s <= self.slow_ratio * shortest_s:
            return state, ()
        sizes = list(state.course.batch_sizes)
        sizes[slowest] = max(min(self.floor, sizes[slowest]), sizes[slowest] - self.moved)
        sizes[fastest] += self.moved
        reason = (
            f"rank {slowest} needs {longest_s / shortest_s:.1f}x the time of rank {fastest}: "
            f"{self.moved} samples more for the one, up to {self.moved} less for the other"
        )
        scale = lr_scale(self.lr_rule, sum(sizes), state.course.reference_samples)
        course, plans = state.course.propose(BSP(), reason, scale, batch_sizes=tuple(sizes))
        return replace(state, course=course), plans
