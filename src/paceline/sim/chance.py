"""Stragglers that come by chance: turns rates and sizes into a `Trace`. Pure.

Two draw every step for itself, two draw stretches of time. Time is cut into frames that are drawn each for itself,
so that any moment can be asked for directly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from paceline.sim.draws import Stream, generator, uniform
from paceline.sim.family import Family, want
from paceline.types import Rank

_SWITCHES_PER_FRAME: Final = 64  # mean; few enough to draw at once, so many that a frame without any is no concern
_CACHED_FRAMES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class ShiftedExponential(Family):
    """Every step of every rank takes its least time and, on top, an exponential one, drawn anew.

    factor = 1 + mean_excess E with E ~ Exp(1): independent over ranks and steps, so nobody is slow for long.

    Args:
        mean_excess: Mean of the part on top, > 0, as a share of the least time.
        jitter: As for all families, but 0: the family is noise already.

    Source:
        The usual model of stragglers in the analysis of K-sync and coded computation: shift + Exp(rate).

    Example:
        >>> trace = ShiftedExponential(4, mean_excess=0.5)
        >>> all(trace.slowdown(rank, step, 0.0) >= 1.0 for rank in range(4) for step in range(99))
        True
    """

    jitter: float = 0.0
    mean_excess: float = 0.5

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        want(self.mean_excess > 0, "a mean_excess > 0", self.mean_excess)

    @property
    def name(self) -> str:
        """The family and its mean excess."""
        return f"exponential-{self.mean_excess:g}"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """1 and the excess drawn for this step."""
        return 1.0 - self.mean_excess * math.log1p(-uniform(self.seed, rank, step))


@dataclass(frozen=True, slots=True)
class Pareto(Family):
    """Every step of every rank draws from a heavy tail: most are quick, a few take very long.

    factor = U ** (-1 / tail) with U uniform in (0, 1]: independent over ranks and steps, at least 1, and cut at a
    limit, so that one draw cannot stop a simulation.

    Args:
        tail: Exponent of the tail, > 1; the smaller, the heavier.
        limit: Largest factor, > 1.
        jitter: As for all families, but 0: the family is noise already.

    Example:
        >>> trace = Pareto(4, tail=1.5, limit=20.0)
        >>> all(1.0 <= trace.slowdown(rank, step, 0.0) <= 20.0 for rank in range(4) for step in range(999))
        True
    """

    jitter: float = 0.0
    tail: float = 2.0
    limit: float = 50.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        want(self.tail > 1, "a tail > 1", self.tail)
        want(self.limit > 1, "a limit > 1", self.limit)

    @property
    def name(self) -> str:
        """The family and its tail."""
        return f"pareto-{self.tail:g}"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The factor drawn for this step."""
        return min(self.limit, math.exp(-math.log1p(-uniform(self.seed, rank, step)) / self.tail))


@dataclass(frozen=True, slots=True)
class Markov(Family):
    """Every rank for itself is slow for a while and fast for a while; both lengths are exponential.

    Args:
        slow_factor: While slow, > 1.
        mean_slow_s: Mean length of a slow stretch, > 0.
        mean_fast_s: Mean length of a fast stretch, > 0. At any moment a rank is slow with probability
            mean_slow / (mean_slow + mean_fast), at time 0 as well.

    Source:
        A two-state Markov chain in continuous time. Drawn as its uniformised twin: at the moments of one Poisson
        process, whose rate is the sum of both rates, the state is drawn anew from the stationary distribution,
        whatever it was. So a state depends on the last such moment alone, not on all before it.

    Example:
        >>> trace = Markov(4, slow_factor=4.0, jitter=0.0)
        >>> {trace.slowdown(0, 0, now_s) for now_s in range(1000)} == {1.0, 4.0}
        True
    """

    slow_factor: float = 4.0
    mean_slow_s: float = 10.0
    mean_fast_s: float = 30.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        want(self.slow_factor > 1, "a slow_factor > 1", self.slow_factor)
        want(self.mean_slow_s > 0, "a mean_slow_s > 0", self.mean_slow_s)
        want(self.mean_fast_s > 0, "a mean_fast_s > 0", self.mean_fast_s)

    @property
    def name(self) -> str:
        """The family and its factor."""
        return f"markov-{self.slow_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The slow factor in slow stretches."""
        both_s = self.mean_slow_s + self.mean_fast_s
        frame_s = _SWITCHES_PER_FRAME * self.mean_slow_s * self.mean_fast_s / both_s
        frame, within = divmod(now_s / frame_s, 1.0)
        while True:
            times, levels = _switches(self.seed, rank, int(frame))
            last = bisect_right(times, within) - 1
            if last >= 0:
                return self.slow_factor if levels[last] < self.mean_slow_s / both_s else 1.0
            frame, within = frame - 1, 1.0  # nothing switched yet in this frame; frame -1 always has a state


@lru_cache(maxsize=_CACHED_FRAMES)
def _switches(seed: int, rank: Rank, frame: int) -> tuple[list[float], list[float]]:
    """When the state is drawn anew, as shares of the frame in order, and what was drawn, uniform in [0, 1)."""
    rng = generator(seed, Stream.SWITCHES, rank, frame + 1)
    num_switches = int(rng.poisson(_SWITCHES_PER_FRAME))
    if frame < 0:
        return [0.0], [float(rng.random())]
    times = sorted(rng.random(num_switches).tolist())
    return times, rng.random(num_switches).tolist()


@dataclass(frozen=True, slots=True)
class Episodes(Family):
    """Fail-slow episodes: now and then a host, with all its ranks, is slow for minutes, each time by another factor.

    Onsets are a Poisson process per host that begins at time 0; lengths are exponential, cut at a longest one;
    factors are uniform in a range. Where episodes overlap the largest factor holds.

    Args:
        ranks_per_host: Ranks that an episode hits together, neighbours by number, >= 1.
        mean_gap_s: Mean time between the onsets on a host, > 0.
        mean_length_s: Mean length of an episode before the cut, > 0.
        longest_s: Longest length, > 0.
        least_factor, most_factor: Range of the factor, 1 < least <= most.

    Source:
        FALCON (arXiv 2410.12588): fail-slow of computation lasts 10 minutes in the mean, of communication 24. It
        is rare there (below 2 % of jobs); ours is as frequent as the gap says, and range and shapes are our own.

    Example:
        >>> trace = Episodes(2, mean_gap_s=600.0, jitter=0.0)
        >>> quick = sum(trace.slowdown(0, 0, 10.0 * i) == 1.0 for i in range(1000))
        >>> 0 < quick < 1000
        True
    """

    ranks_per_host: int = 1
    mean_gap_s: float = 3600.0
    mean_length_s: float = 600.0
    longest_s: float = 3600.0
    least_factor: float = 1.5
    most_factor: float = 4.0

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        want(self.ranks_per_host >= 1, "ranks_per_host >= 1", self.ranks_per_host)
        lengths = (self.mean_gap_s, self.mean_length_s, self.longest_s)
        want(min(lengths) > 0, "mean_gap_s, mean_length_s and longest_s > 0", lengths)
        factors = (self.least_factor, self.most_factor)
        want(1 < self.least_factor <= self.most_factor, "1 < least_factor <= most_factor", factors)

    @property
    def name(self) -> str:
        """The family and its largest factor."""
        return f"episodes-{self.most_factor:g}x"

    def factor(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002
        """The largest factor of the episodes that the rank's host is in."""
        host, frame = rank // self.ranks_per_host, int(now_s // self.longest_s)
        lengths, level = (self.mean_gap_s, self.mean_length_s, self.longest_s), -1.0
        for index in (frame - 1, frame):  # none is longer than a frame
            if index >= 0:
                for start_s, end_s, drawn in _episodes(self.seed, host, index, *lengths):
                    if start_s <= now_s < end_s:
                        level = max(level, drawn)
        return 1.0 if level < 0 else self.least_factor + level * (self.most_factor - self.least_factor)


@lru_cache(maxsize=_CACHED_FRAMES)
def _episodes(
    seed: int, host: int, frame: int, mean_gap_s: float, mean_length_s: float, longest_s: float
) -> tuple[tuple[float, float, float], ...]:
    """The episodes that begin in a frame: start, end, and where in the range of factors, 0..1."""
    rng = generator(seed, Stream.EPISODES, host, frame)
    num_episodes = int(rng.poisson(longest_s / mean_gap_s))
    starts = longest_s * (frame + rng.random(num_episodes))
    ends = starts + (mean_length_s * rng.exponential(size=num_episodes)).clip(max=longest_s)
    return tuple(zip(starts.tolist(), ends.tolist(), rng.random(num_episodes).tolist(), strict=True))
