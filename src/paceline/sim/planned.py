"""Stragglers that follow a plan: turns who, how much and when into a `Trace`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.sim.draws import Stream, permutation
from paceline.sim.family import Family, want
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class Calm(Family):
    """No stragglers: all ranks alike but for the noise.

    Example:
        >>> Calm(4, jitter=0.0).slowdown(rank=2, step=7, now_s=1.0)
        1.0
    """

    has_stragglers: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """calm."""
        return "calm"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """Always 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Constant(Family):
    """One rank is slower all the time, as a worse or misconfigured machine is.

    Args:
        rank: Which.
        slow_factor: By how much, > 1.

    Example:
        >>> trace = Constant(4, rank=1, slow_factor=2.0, jitter=0.0)
        >>> trace.name, [trace.slowdown(rank, 0, 0.0) for rank in range(4)]
        ('constant-2x', [1.0, 2.0, 1.0, 1.0])
    """

    rank: Rank = 0
    slow_factor: float = 3.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        self.want_rank(self.rank)
        want(self.slow_factor > 1, "a slow_factor > 1", self.slow_factor)

    @property
    def name(self) -> str:
        """The family and its factor."""
        return f"constant-{self.slow_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The slow factor for the one rank."""
        return self.slow_factor if rank == self.rank else 1.0


@dataclass(frozen=True, slots=True)
class Heterogeneous(Family):
    """Machines of several speed classes; the classes are as large as each other, give or take one rank.

    Args:
        class_factors: Factor of every class, >= 1, at least two; the seed shuffles who is in which.

    Example:
        >>> trace = Heterogeneous(4, class_factors=(1.0, 2.0), jitter=0.0)
        >>> sorted(trace.slowdown(rank, 0, 0.0) for rank in range(4))
        [1.0, 1.0, 2.0, 2.0]
    """

    class_factors: tuple[float, ...] = (1.0, 1.5, 3.0)

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        is_right = len(self.class_factors) >= 2 and all(factor >= 1 for factor in self.class_factors)
        want(is_right, "at least two class_factors, all >= 1", self.class_factors)

    @property
    def name(self) -> str:
        """The family and its slowest class."""
        return f"heterogeneous-{max(self.class_factors):g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The factor of the rank's class."""
        return self.class_factors[
            permutation(self.seed, Stream.CLASSES, self.num_ranks)[rank] % len(self.class_factors)
        ]


@dataclass(frozen=True, slots=True)
class Throttled(Family):
    """One rank's CPU is cut off and on in turn: STAR's set-up has a process at 10 % CPU, toggled every 60 s.

    Args:
        rank: Which.
        slow_factor: While cut, > 1; at 10 % CPU a step takes ten times as long.
        period_s: Length of every stretch, > 0; the first is a fast one.

    Source:
        STAR's released scripts (after LGC's and LB-BSP's harness) run cpulimit so. Ours begins without the limit,
        so that the fast speed is seen first.

    Example:
        >>> trace = Throttled(2, rank=1, jitter=0.0)
        >>> [trace.slowdown(1, 0, now_s) for now_s in (59.9, 60.0, 119.9, 120.0)]
        [1.0, 10.0, 10.0, 1.0]
    """

    rank: Rank = 0
    slow_factor: float = 10.0
    period_s: float = 60.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        self.want_rank(self.rank)
        want(self.slow_factor > 1, "a slow_factor > 1", self.slow_factor)
        want(self.period_s > 0, "a period_s > 0", self.period_s)

    @property
    def name(self) -> str:
        """The family and its factor."""
        return f"throttled-{self.slow_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The slow factor for the one rank in every second stretch."""
        return self.slow_factor if rank == self.rank and now_s // self.period_s % 2 else 1.0


@dataclass(frozen=True, slots=True)
class Rotating(Family):
    """One rank at a time is slow, and the turn goes round: everybody once, in an order of the seed, then anew.

    Args:
        slow_factor: For the rank whose turn it is, > 1.
        turn_s: Length of a turn in seconds, > 0; None to count steps.
        turn_steps: Length of a turn in the rank's own steps, >= 1; None to count seconds. Ranks that are not in
            step may then be slow at the same time.

    Raises:
        ValueError: also when not exactly one of the lengths is given.

    Example:
        >>> trace = Rotating(3, turn_s=None, turn_steps=2, jitter=0.0)
        >>> [sum(trace.slowdown(rank, step, 0.0) for rank in range(3)) for step in range(6)]
        [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """

    slow_factor: float = 3.0
    turn_s: float | None = 30.0
    turn_steps: int | None = None

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        want(self.slow_factor > 1, "a slow_factor > 1", self.slow_factor)
        lengths = (self.turn_s, self.turn_steps)
        want(lengths.count(None) == 1, "one of turn_s and turn_steps", lengths)
        want(self.turn_s is None or self.turn_s > 0, "a turn_s > 0", self.turn_s)
        want(self.turn_steps is None or self.turn_steps >= 1, "turn_steps >= 1", self.turn_steps)

    @property
    def name(self) -> str:
        """The family and its factor."""
        return f"rotating-{self.slow_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:
        """The slow factor for the rank whose turn it is."""
        turn = step // self.turn_steps if self.turn_steps is not None else int(now_s // (self.turn_s or 1.0))
        cycle, place = divmod(turn, self.num_ranks)
        is_slow = permutation(self.seed, Stream.TURNS, self.num_ranks, cycle)[rank] == place
        return self.slow_factor if is_slow else 1.0


@dataclass(frozen=True, slots=True)
class Drifting(Family):
    """One rank gets slower and slower, as with heat, a leak or a filling disk.

    Args:
        rank: Which.
        slow_factor: Where it ends, > 1.
        start_s: When it begins, >= 0.
        ramp_s: How long it takes, > 0; the factor grows evenly.

    Example:
        >>> trace = Drifting(2, rank=1, slow_factor=4.0, start_s=10.0, ramp_s=30.0, jitter=0.0)
        >>> [trace.slowdown(1, 0, now_s) for now_s in (0.0, 20.0, 99.0)]
        [1.0, 2.0, 4.0]
    """

    rank: Rank = 0
    slow_factor: float = 4.0
    start_s: float = 0.0
    ramp_s: float = 300.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        self.want_rank(self.rank)
        want(self.slow_factor > 1, "a slow_factor > 1", self.slow_factor)
        want(self.start_s >= 0, "a start_s >= 0", self.start_s)
        want(self.ramp_s > 0, "a ramp_s > 0", self.ramp_s)

    @property
    def name(self) -> str:
        """The family and where it ends."""
        return f"drifting-{self.slow_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """1 up to the start, then evenly up to the slow factor."""
        if rank != self.rank:
            return 1.0
        return 1.0 + (self.slow_factor - 1.0) * min(1.0, max(0.0, (now_s - self.start_s) / self.ramp_s))
