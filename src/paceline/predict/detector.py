"""Who is slow: turns every rank's timings into the set of slow ranks, and abstains when the evidence is thin.

Rows are aligned by step, never by arrival. In each row a rank's *excess* is its own time above the median of the
other ranks; waiting is no part of it, so a victim has none. A rank is slow when, over its last rows, its excess costs
a minimum share of the time, in enough rows, and stands out from what the other ranks show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from paceline.types import Rank, StepTiming


@dataclass(frozen=True, slots=True)
class Tier:
    """One way for evidence to be enough: large effects need few rows, small ones many.

    Args:
        num_rows: Rows looked back on.
        min_lost_ratio: Least share of those rows' time that the excess costs.
        min_hits: Least number of rows in which the excess is above the minimum effect.
    """

    num_rows: int
    min_lost_ratio: float
    min_hits: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's step beside what the other ranks needed for the same one."""

    timing: StepTiming
    reference: StepTiming  # phase by phase median of the other ranks; `rank` is -1

    @property
    def excess_s(self) -> float:
        """Own time above the reference, seconds; negative when faster."""
        return self.timing.own_s - self.reference.own_s


@dataclass(frozen=True, slots=True)
class DetectorState:
    """What the detector remembers; a value, replaced at every observation."""

    members: frozenset[Rank]
    open_rows: Mapping[int, Mapping[Rank, StepTiming]]
    closed_rows: Mapping[int, Mapping[Rank, StepTiming]]
    windows: Mapping[Rank, tuple[Row, ...]]
    slow: frozenset[Rank]
    seen_rows: int


@dataclass(frozen=True, slots=True)
class Detector:
    """Names slow ranks from own times.

    Args:
        tiers: Any one suffices.
        warmup_rows: Rows ignored at the start (allocation, bucket rebuild, caches), >= 0.
        min_effect_ratio, min_effect_s: A row is a hit when the excess is above both.
        dominance: The excess must be this many times the median positive excess of the other ranks.
        clear_lost_ratio: A slow rank is cleared when its last `clear_rows` rows cost less than this.
        clear_rows: See above.

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

    tiers: tuple[Tier, ...] = (Tier(5, 0.4, 5), Tier(10, 0.2, 9), Tier(20, 0.09, 16), Tier(60, 0.15, 4))
    warmup_rows: int = 3
    min_effect_ratio: float = 0.1
    min_effect_s: float = 0.005
    dominance: float = 3.0
    clear_lost_ratio: float = 0.05
    clear_rows: int = 6

    def init(self, ranks: frozenset[Rank]) -> DetectorState:
        """Return the state before the first step."""
        return DetectorState(ranks, {}, {}, dict.fromkeys(ranks, ()), frozenset(), 0)

    def set_members(self, state: DetectorState, members: frozenset[Rank]) -> DetectorState:
        """From now on a row is complete when these ranks are in it: the ring, while others are attached."""
        return replace(state, members=members, open_rows={}, closed_rows={})

    def observe(self, state: DetectorState, timing: StepTiming) -> DetectorState:
        """Take in one rank's step.

        Rows close when every member has reported the step; a rank outside the members (attached) is compared with
        the closed row of the version it started from.
        """
        if timing.rank not in state.members:
            row = state.closed_rows.get(timing.step)
            return state if row is None else self._judge(self._push(state, row, {timing.rank: timing}))
        row = {**state.open_rows.get(timing.step, {}), timing.rank: timing}
        if len(row) < len(state.members):
            return replace(state, open_rows=_newest({**state.open_rows, timing.step: row}))
        open_rows = {step: r for step, r in state.open_rows.items() if step > timing.step}
        state = replace(state, open_rows=open_rows, seen_rows=state.seen_rows + 1)
        if state.seen_rows <= self.warmup_rows:
            return state
        state = replace(state, closed_rows=_newest({**state.closed_rows, timing.step: row}))
        return self._judge(self._push(state, row, row))

    def lost_ratio(self, rows: tuple[Row, ...]) -> float:
        """Share of the rows' time that the excess costs, 0..1."""
        total = sum(max(row.timing.own_s, row.reference.own_s) for row in rows)
        return sum(max(0.0, row.excess_s) for row in rows) / total if total > 0 else 0.0

    def _push(
        self, state: DetectorState, row: Mapping[Rank, StepTiming], whose: Mapping[Rank, StepTiming]
    ) -> DetectorState:
        keep = max(tier.num_rows for tier in self.tiers)
        windows = dict(state.windows)
        for rank, timing in whose.items():
            others = [t for r, t in row.items() if r != rank]
            if others and timing.expected_s == 0.0:
                windows[rank] = (*windows.get(rank, ()), Row(timing, phase_median(others)))[-keep:]
        return replace(state, windows=windows)

    def _judge(self, state: DetectorState) -> DetectorState:
        slow = {rank for rank in state.windows if self._is_slow(state, rank)}
        return replace(state, slow=frozenset(slow))

    def _is_slow(self, state: DetectorState, rank: Rank) -> bool:
        window = state.windows[rank]
        if rank in state.slow:
            return self.lost_ratio(window[-self.clear_rows :]) >= self.clear_lost_ratio
        return any(self._meets(state, rank, tier) for tier in self.tiers)

    def _meets(self, state: DetectorState, rank: Rank, tier: Tier) -> bool:
        rows = state.windows[rank][-tier.num_rows :]
        hits = sum(row.excess_s > max(self.min_effect_s, self.min_effect_ratio * row.reference.own_s) for row in rows)
        if hits < tier.min_hits or self.lost_ratio(rows) < tier.min_lost_ratio:
            return False
        own_excess = sum(max(0.0, row.excess_s) for row in rows)
        others = [
            sum(max(0.0, row.excess_s) for row in window[-len(rows) :])
            for other, window in state.windows.items()
            if other != rank
        ]
        return own_excess >= self.dominance * median(others)


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


def _newest(rows: dict[int, Mapping[Rank, StepTiming]], limit: int = 256) -> Mapping[int, Mapping[Rank, StepTiming]]:
    """Bound the rows kept: what is older than `limit` steps back is forgotten."""
    newest = max(rows)
    return {step: row for step, row in rows.items() if step > newest - limit}
