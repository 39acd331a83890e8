"""A run's own times by the clock: turns recorded timings into a trace that is slow when the run was. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import TraceError
from paceline.sim.trace import STRAGGLER_RATIO
from paceline.types import Rank, StepTiming


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every rank's step took at any moment of a run; beyond its end it repeats from the start.

    A `Table` goes by steps: right where all ranks do the same number of them. A rank that was attached did fewer, and
    what slows several ranks at once (a busy host) would fall apart. So this one goes by time.

    Args:
        name: What to call it.
        reference_s: What a factor of 1 stands for, seconds, > 0.
        starts_s: By rank: when its steps began, seconds, in order, the first at 0.
        ratios: By rank: the steps' factors, > 0, as many.
        length_s: From the first start to the end of the last step, seconds, > 0.

    Example:
        >>> starts_s, ratios = ((0.0, 0.1), (0.0, 0.1)), ((1.0, 1.0), (1.0, 4.0))
        >>> trace = Timeline("run", 0.1, starts_s, ratios, length_s=0.5)
        >>> [trace.slowdown(1, step=0, now_s=now_s) for now_s in (0.05, 0.1, 0.49, 0.5)]
        [1.0, 4.0, 4.0, 1.0]
    """

    name: str
    reference_s: float
    starts_s: tuple[tuple[float, ...], ...]
    ratios: tuple[tuple[float, ...], ...]
    length_s: float

    @classmethod
    def of(cls, timings: Mapping[Rank, Sequence[StepTiming]], name: str) -> Timeline:
        """Turn the timings of one run into a trace.

        Every rank's clock is set to 0 at its own first step, which all ranks begin together; so clocks of different
        hosts are never compared. The reference is the lowest of the ranks' median own times.

        Args:
            timings: By rank, 0, 1, ..., each in order of time.
            name: What to call it.

        Returns:
            The trace.

        Raises:
            TraceError: a rank without timings, or an own time that is not positive.

        Example:
            >>> steps = {rank: [StepTiming(rank, 1, 5.0, data_s=own_s)] for rank, own_s in enumerate((0.1, 0.3))}
            >>> [round(Timeline.of(steps, "run").slowdown(rank, 0, 0.0), 6) for rank in (0, 1)]
            [1.0, 3.0]
        """
        silent = [rank for rank in sorted(timings) if not timings[rank]]
        if silent or not timings:
            raise TraceError(f"{name}: wanted at least one step of every rank, got none of {silent or 'any'}")
        rows = [timings[rank] for rank in sorted(timings)]
        wrong = next((t for row in rows for t in row if not t.own_s > 0), None)
        if wrong is not None:
            raise TraceError(
                f"{name}, rank {wrong.rank}, step {wrong.step}: wanted an own time > 0 s, got {wrong.own_s}"
            )
        reference_s = min(median(t.own_s for t in row) for row in rows)
        return cls(
            name,
            reference_s,
            tuple(tuple(t.started_s - row[0].started_s for t in row) for row in rows),
            tuple(tuple(t.own_s / reference_s for t in row) for row in rows),
            max(row[-1].started_s - row[0].started_s + row[-1].wall_s for row in rows),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks in the run."""
        return len(self.ratios)

    @property
    def has_stragglers(self) -> bool:
        """Whether a rank's median step takes `STRAGGLER_RATIO` times what the fastest one's does."""
        return max(median(row) for row in self.ratios) >= STRAGGLER_RATIO

    def slowdown(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002 - it goes by time alone
        """Return the factor of the step that the rank was in at this moment; see `Trace`."""
        return self.ratios[rank][bisect_right(self.starts_s[rank], now_s % self.length_s) - 1]
