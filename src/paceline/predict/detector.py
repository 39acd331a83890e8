"""Who is slow: turns every rank's timings into the set of slow ranks, and abstains when the evidence is thin.

Rows are aligned by step, never by arrival. In each row a rank's *excess* is its own time above the median of the
other ranks; waiting is no part of it, so a victim has none. A rank is slow when, over its last rows, its excess costs
a minimum share of the time, in enough rows, and stands out from what the other ranks show.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.types import Rank, StepTiming


@dataclass(frozen=True, slots=True)
class Tier:
    """One way for evidence to be enough: large effects need few rows, small ones many.

    Args:
        num_rows: Rows looked back on.
        min_lost_ratio: Least share of those rows' time that the excess costs. While fewer rows are there, the share
            must be larger by sqrt(num_rows / rows there), as the mean of noise is.
        min_hits: Least number of rows that carry the excess: rows in which it is above the minimum effect, none
            counting for more than the last of these. So one long hiccup is no slowness.
    """

    num_rows: int
    min_lost_ratio: float
    min_hits: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's step beside what the other ranks needed for the same one.

    Args:
        timing: The rank's step.
        beside: The same step of the ranks it is compared with; it may be among them.
        reference_s: Median own time of the others, seconds.
        excess_s: Own time above the reference, seconds; negative when faster.
    """

    timing: StepTiming
    beside: Mapping[Rank, StepTiming]
    reference_s: float
    excess_s: float

    @property
    def reference(self) -> StepTiming:
        """Phase by phase median of the others; its `rank` is -1. Computed on demand: only verdicts look at it."""
        return phase_median([t for rank, t in self.beside.items() if rank != self.timing.rank])


def rows_beside(whose: Mapping[Rank, StepTiming], beside: Mapping[Rank, StepTiming]) -> dict[Rank, Row]:
    """Put each rank's step beside the others'; a rank without others has no row.

    Example:
        >>> steps = {rank: StepTiming(rank, 1, 0.0, data_s=own) for rank, own in enumerate((0.1, 0.1, 0.5))}
        >>> {rank: round(row.excess_s, 1) for rank, row in rows_beside(steps, steps).items()}
        {0: -0.2, 1: -0.2, 2: 0.4}
    """
    own = {rank: timing.own_s for rank, timing in beside.items()}
    ordered = sorted(own.values())
    rows = {}
    for rank, timing in whose.items():
        if rank in own:
            reference_s = _median_without(ordered, own[rank])
            excess_s = own[rank] - reference_s
        else:
            reference_s = median(ordered)
            excess_s = timing.own_s - reference_s
        if len(own) > (rank in own):
            rows[rank] = Row(timing, beside, reference_s, excess_s)
    return rows


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of sorted numbers without one of them; 0 where it is the only one."""
    left_out, count = bisect_left(ordered, value), len(ordered) - 1
    if count == 0:
        return 0.0
    low, high = (count - 1) // 2, count // 2
    return 0.5 * (ordered[low + (low >= left_out)] + ordered[high + (high >= left_out)])


@dataclass(frozen=True, slots=True)
class DetectorState:
    """What the detector remembers; a value, replaced at every observation.

    Args:
        members: Ranks that make a row complete.
        open_rows, closed_rows: Timings by step and rank, before and after the row is complete.
        windows: The last rows of every rank.
        clear_after: For every slow rank, how many quiet rows end its episode.
        seen_rows: Rows completed so far.
    """

    members: frozenset[Rank]
    open_rows: Mapping[int, Mapping[Rank, StepTiming]]
    closed_rows: Mapping[int, Mapping[Rank, StepTiming]]
    windows: Mapping[Rank, tuple[Row, ...]]
    clear_after: Mapping[Rank, int]
    seen_rows: int

    @property
    def slow(self) -> frozenset[Rank]:
        """The ranks that are slow."""
        return frozenset(self.clear_after)


@dataclass(frozen=True, slots=True)
class Detector:
    """Names slow ranks from own times.

    Args:
        tiers: Any one suffices.
        warmup_rows: Rows ignored at the start (allocation, bucket rebuild, caches), >= 0.
        min_effect_ratio, min_effect_s: A row is a hit when the excess is above both.
        dominance: The excess must be this many times the median positive excess of the other ranks.
        clear_lost_ratio: A slow rank is cleared when the rows that end its episode lose less than this on balance.
        clear_rows: How many these are, at least; half of its tier's where that is more, so that pauses now and then
            are one episode.

    Source:
        Thresholds follow the ecosystem (10 % and 5 ms, warnings within 20 steps at 1.3x); ours differs from the
        published ones (STAR: (t - min) / min > 0.2; DLRover: t > 2 x median) in asking for persistence and for
        dominance over the other ranks' noise, so that a loud host raises no alarm.

    Example:
        >>> detector = Detector(warmup_rows=0)
        >>> state = detector.init(frozenset(range(4)))
        >>> for step in range(5):
        ...     for rank in range(4):
        ...         own = 0.25 if rank == 2 else 0.05
        ...         state = detector.observe(state, StepTiming(rank, step, 0.0, backward_s=own))
        >>> sorted(state.slow)
        [2]
    """

    tiers: tuple[Tier, ...] = (
        Tier(4, 0.5, 4),
        Tier(6, 0.4, 6),
        Tier(10, 0.15, 9),
        Tier(20, 0.09, 16),
        Tier(60, 0.15, 4),
    )
    warmup_rows: int = 2
    min_effect_ratio: float = 0.1
    min_effect_s: float = 0.005
    dominance: float = 3.0
    clear_lost_ratio: float = 0.05
    clear_rows: int = 6

    def init(self, ranks: frozenset[Rank]) -> DetectorState:
        """Return the state before the first step."""
        return DetectorState(ranks, {}, {}, dict.fromkeys(ranks, ()), {}, 0)

    def set_members(self, state: DetectorState, members: frozenset[Rank]) -> DetectorState:
        """From now on a row is complete when these ranks are in it: the ring, while others are attached.

        Nobody: no rank steps with another, and each step is compared with the latest of all others.
        """
        return replace(state, members=members, open_rows={}, closed_rows={})

    def observe(self, state: DetectorState, timing: StepTiming) -> DetectorState:
        """Take in one rank's step.

        Rows close when every member has reported the step; a rank outside the members (attached) is compared with
        the row of the version it started from, whichever of the two comes first.
        """
        rank, step, members = timing.rank, timing.step, state.members
        if not members:
            latest = {**state.closed_rows.get(0, {}), rank: timing}
            return self._judge(self._push(replace(state, closed_rows={0: latest}), latest, {rank: timing}), (rank,))
        if rank not in members and step in state.closed_rows:
            return self._judge(self._push(state, state.closed_rows[step], {rank: timing}), (rank,))
        row = {**state.open_rows.get(step, {}), rank: timing}
        if not members <= row.keys():
            return replace(state, open_rows=_newest({**state.open_rows, step: row}))
        open_rows = {s: r for s, r in state.open_rows.items() if s > step}
        state = replace(state, open_rows=open_rows, seen_rows=state.seen_rows + 1)
        if state.seen_rows <= self.warmup_rows:
            return state
        closed = {r: row[r] for r in members}
        state = replace(state, closed_rows=_newest({**state.closed_rows, step: closed}))
        return self._judge(self._push(state, closed, row), row)

    def _push(
        self, state: DetectorState, row: Mapping[Rank, StepTiming], whose: Mapping[Rank, StepTiming]
    ) -> DetectorState:
        keep = max(tier.num_rows for tier in self.tiers)
        windows = dict(state.windows)
        for rank, fresh in rows_beside(whose, row).items():
            if fresh.timing.expected_s == 0.0:
                windows[rank] = (*windows.get(rank, ())[1 - keep :], fresh)
        return replace(state, windows=windows)

    def _judge(self, state: DetectorState, ranks: Iterable[Rank]) -> DetectorState:
        windows, clear_after = dict(state.windows), dict(state.clear_after)
        for rank in ranks:
            met = [max(self.clear_rows, tier.num_rows // 2) for tier in self._tiers_met(state, rank)]
            if rank in clear_after:
                met.append(clear_after[rank])
            if not met:
                continue
            clear_after[rank] = min(met)
            last = windows[rank][-clear_after[rank] :]
            if rank in state.clear_after and _balance(last) < self.clear_lost_ratio:
                del clear_after[rank]
                windows[rank] = last  # what the episode showed must not name the rank again
        if clear_after == state.clear_after:
            return state
        return replace(state, windows=windows, clear_after=clear_after)

    def _tiers_met(self, state: DetectorState, rank: Rank) -> list[Tier]:
        window = state.windows.get(rank, ())
        if rank not in state.clear_after and not (window and self._is_hit(window[-1])):
            return []  # only a hit can make a rank slow; without one this saves most of the work of most steps
        hits = [self._is_hit(row) for row in window]
        return [
            tier
            for tier in self.tiers
            if sum(hits[-tier.num_rows :]) >= tier.min_hits and self._is_met(state, rank, tier)
        ]

    def _is_hit(self, row: Row) -> bool:
        return row.excess_s > self.min_effect_s and row.excess_s > self.min_effect_ratio * row.reference_s

    def _is_met(self, state: DetectorState, rank: Rank, tier: Tier) -> bool:
        rows = state.windows[rank][-tier.num_rows :]
        lost_s, lost_ratio = carried_loss(rows, tier.min_hits)
        if lost_ratio < tier.min_lost_ratio * math.sqrt(tier.num_rows / len(rows)):
            return False
        others = [
            sum(max(0.0, row.excess_s) for row in window[-len(rows) :])
            for other, window in state.windows.items()
            if other != rank
        ]
        return lost_s >= self.dominance * median(others)


def carried_loss(rows: Sequence[Row], num_carriers: int) -> tuple[float, float]:
    """What excess costs, as far as a number of rows carries it.

    No row counts for more than the `num_carriers`-th largest excess does, and being fast makes up for nothing.

    Args:
        rows: One rank's rows.
        num_carriers: How many, >= 1.

    Returns:
        Seconds in all, and as a share of the rows' time, 0..1; zeros without rows.

    Example:
        >>> even, hiccup = StepTiming(-1, 1, 0.0, data_s=1.0), StepTiming(0, 1, 0.0, data_s=9.0)
        >>> rows = [rows_beside({t.rank: t}, {1: even})[t.rank] for t in (hiccup, replace(even, rank=0))]
        >>> carried_loss(rows, 1), carried_loss(rows, 2)
        ((8.0, 0.8), (0.0, 0.0))
    """
    carriers = min(num_carriers, len(rows))
    excess = sorted([row.excess_s for row in rows if row.excess_s > 0.0], reverse=True)
    if not rows or len(excess) < carriers:
        return 0.0, 0.0
    lost_s = carriers * excess[carriers - 1] + sum(excess[carriers:])
    return lost_s, lost_s / (lost_s + sum([row.reference_s for row in rows]))


def _balance(rows: Sequence[Row]) -> float:
    """Share of the rows' time that the rank loses where being fast makes up for being slow."""
    lost_s = sum(row.excess_s for row in rows)
    total_s = sum(row.reference_s + max(0.0, row.excess_s) for row in rows)
    return lost_s / total_s if total_s > 0 else 0.0


def phase_median(timings: list[StepTiming]) -> StepTiming:
    """The phase by phase median of some ranks' timings of one step; its `rank` is -1.

    The median's phases need not add up to the median step: `own_s` of the result is the sum of the phase medians,
    which for ranks doing the same work is the same thing within noise.

    Example:
        >>> a = StepTiming(0, 1, 0.0, data_s=0.1); b = StepTiming(1, 1, 0.0, data_s=0.3)
        >>> phase_median([a, b, b]).data_s
        0.3
    """
    first = timings[0]
    return StepTiming(
        rank=-1,
        step=first.step,
        started_s=0.0,
        data_s=median(t.data_s for t in timings),
        forward_s=median(t.forward_s for t in timings),
        backward_s=median(t.backward_s for t in timings),
        optimizer_s=median(t.optimizer_s for t in timings),
        gc_s=median(t.gc_s for t in timings),
        other_s=median(t.other_s for t in timings),
        wait_s=median(t.wait_s for t in timings),
        samples=int(median(t.samples for t in timings)),
        cpu_s=median(t.cpu_s or 0.0 for t in timings),
        runqueue_s=median(t.runqueue_s or 0.0 for t in timings),
    )


def _newest(rows: dict[int, Mapping[Rank, StepTiming]], limit: int = 64) -> Mapping[int, Mapping[Rank, StepTiming]]:
    """Bound the rows kept: beyond `limit` the oldest is forgotten."""
    if len(rows) > limit:
        del rows[min(rows)]
    return rows
