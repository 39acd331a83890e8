"""How slow every rank is, when: turns measured step times into slowdowns that the simulator can ask for. Pure.

A trace answers one question, always with the same answer: by what factor does a rank's step take longer than the
reference? Synthetic ones are in `families.py`; those measured somewhere become a `Table` (readers in `parse.py` and
`operations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Protocol

from paceline.errors import TraceError
from paceline.types import Rank

STRAGGLER_RATIO = 1.1
"""A table has stragglers when its slowest rank takes this many times what a fast one does, in the mean over steps.

A fast one is the rank a quarter of the way up from the fastest: the very fastest of many ranks is fast by luck.
"""


class Trace(Protocol):
    """Who is slow when, as a pure function: no state, no clock, the same answer in any order of questions."""

    @property
    def name(self) -> str:
        """What to call it in a table, without blanks."""
        ...

    @property
    def num_ranks(self) -> int:
        """It speaks of ranks 0..num_ranks - 1."""
        ...

    @property
    def has_stragglers(self) -> bool:
        """False where all ranks are alike but for noise: there, nothing can be won by treating them differently."""
        ...

    def slowdown(self, rank: Rank, step: int, now_s: float) -> float:
        """Return the factor on the rank's reference compute time for one of its steps.

        Args:
            rank: Who, 0..num_ranks - 1.
            step: The rank's own count of local steps, from 0.
            now_s: When the step begins, virtual seconds, >= 0. The factor holds for the whole step, even where the
                slowness begins or ends in its middle.

        Returns:
            A ratio > 0; 1 is the reference, 2 takes twice as long. Below 1 only by noise.
        """
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """A measured trace: factors by rank and sample; beyond its end it repeats from the start.

    Args:
        name: What to call it.
        ratios: Factors by rank, then sample, > 0; as many samples for every rank.
        steps_per_sample: Steps that a sample stands for, >= 1; above 1 where the source looked at some steps only.
        reference_s: What a factor of 1 stands for, seconds; None where the source gives no unit.
        source_ranks: The ranks' numbers in the source, by rank here; empty where they are the same.
        carried: The samples that the source lacks, as (rank, sample); see `from_samples`.

    Raises:
        TraceError: no rank, no sample, rows of different length, a factor that is not a positive finite number, or
            less than one step per sample.

    Example:
        >>> trace = Table("two", ratios=((1.0, 1.0), (1.0, 4.0)))
        >>> trace.num_ranks, trace.slowdown(rank=1, step=3, now_s=0.0), trace.has_stragglers
        (2, 4.0, True)
    """

    name: str
    ratios: tuple[tuple[float, ...], ...]
    steps_per_sample: int = 1
    reference_s: float | None = None
    source_ranks: tuple[int, ...] = ()
    carried: frozenset[tuple[Rank, int]] = frozenset()
    has_stragglers: bool = field(init=False)

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.ratios}
        if len(lengths) != 1 or 0 in lengths:
            raise TraceError(f"{self.name}: wanted as many samples, at least 1, for every rank, got {sorted(lengths)}")
        wrong = next((x for row in self.ratios for x in row if not (math.isfinite(x) and x > 0)), None)
        if wrong is not None:
            raise TraceError(f"{self.name}: wanted factors that are positive and finite, got {wrong}")
        if self.steps_per_sample < 1:
            raise TraceError(f"{self.name}: wanted at least one step per sample, got {self.steps_per_sample}")
        fast = len(self.ratios) // 4
        spread = fmean(max(now) / sorted(now)[fast] for now in zip(*self.ratios, strict=True))
        object.__setattr__(self, "has_stragglers", spread >= STRAGGLER_RATIO)

    @property
    def num_ranks(self) -> int:
        """Ranks in the table."""
        return len(self.ratios)

    @property
    def num_steps(self) -> int:
        """Steps until it repeats."""
        return len(self.ratios[0]) * self.steps_per_sample

    def slowdown(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002 - the table goes by steps alone
        """Return the measured factor of the rank's step; see `Trace`."""
        row = self.ratios[rank]
        return row[step // self.steps_per_sample % len(row)]


def from_samples(
    name: str, samples: Iterable[tuple[int, int, float]], in_seconds: bool = True, steps_per_sample: int = 1
) -> Table:
    """Turn measured step times into a table of ratios.

    Steps and ranks are numbered anew, 0, 1, ..., in the order of their numbers in the source. The reference, a
    factor of 1, is the lowest of the ranks' median times: what the fastest rank usually needs. Several samples of a
    rank in a step are averaged. A sample that is missing is neither zero nor slow: the rank's last value before it
    is carried on (where there is none, the first one after it) and the place is kept in `carried`.

    Args:
        name: What to call the trace; also the source in an error.
        samples: (step, rank, time) in any order; numbers >= 0, times > 0 and finite, all in one unit.
        in_seconds: Whether that unit is a second.
        steps_per_sample: Steps that each stands for, >= 1; the table repeats it as often.

    Returns:
        The table.

    Raises:
        TraceError: no samples at all.

    Source:
        STAR's released scripts compare with the fastest rank of the same step. Ours takes one reference for the
        whole trace and the median of that rank, so that what slows all ranks together is kept and one lucky
        step changes nothing.

    Example:
        >>> table = from_samples("x", [(1, 0, 2.0), (1, 1, 6.0), (11, 0, 2.0)])
        >>> table.ratios, table.carried, table.reference_s
        (((1.0, 1.0), (3.0, 3.0)), frozenset({(1, 1)}), 2.0)
    """
    times: dict[int, dict[int, list[float]]] = {}
    for step, rank, time in samples:
        times.setdefault(rank, {}).setdefault(step, []).append(time)
    if not times:
        raise TraceError(f"{name}: no samples; wanted at least one")
    ranks = sorted(times)
    steps = sorted({step for by_step in times.values() for step in by_step})
    measured = [[fmean(times[rank][step]) if step in times[rank] else None for step in steps] for rank in ranks]
    reference = min(median(time for time in row if time is not None) for row in measured)
    return Table(
        name,
        ratios=tuple(tuple(time / reference for time in _carried_on(row)) for row in measured),
        steps_per_sample=steps_per_sample,
        reference_s=reference if in_seconds else None,
        source_ranks=tuple(ranks),
        carried=frozenset((r, s) for r, row in enumerate(measured) for s, time in enumerate(row) if time is None),
    )


def _carried_on(row: Sequence[float | None]) -> list[float]:
    """The row with every gap filled by the value before it, a leading one by the first value."""
    last = next(time for time in row if time is not None)
    filled = []
    for time in row:
        last = last if time is None else time
        filled.append(last)
    return filled
