"""The evaluation's table: turns rows into times to accuracy with intervals, comparisons, and the summary. Pure.

*Time to accuracy* (TTA) is a mean over seeds, with a 95 % interval from bootstrap: 2,000 means of as many seeds drawn
with replacement. A run that never reached the target counts as ten times the virtual time that its whole budget took
(as solvers are compared by PAR10): finite, so that means and medians are, and so long that never arriving cannot look
good by ending early. How many seeds arrived stands beside every mean.

*Ratios* are between such means, in one situation (architecture, trace and task) each; medians are over situations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from paceline.decide.baselines import BASELINES
from paceline.decide.rehearse import Arch
from paceline.evaluate.grid import ARCHS, SITUATIONS
from paceline.evaluate.run import LIMIT, Row

PENALTY: Final = 10.0  # times the end of the budget
SLOW: Final = 3.0  # slowdown from which on STAR's set-up is comparable
STAR: Final = tuple(name for name in BASELINES if name.endswith("-star"))
PUBLISHED: Final = tuple(name for name in BASELINES if name not in STAR)
FIXED: Final = "fixed:"
_NUM_RESAMPLES = 2000

Curve = tuple[tuple[float, int, float], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One method in one situation, over its seeds.

    Args:
        arch, trace, task, method: Which.
        tta_s: Mean time to accuracy, virtual seconds.
        low_s, high_s: Its 95 % interval.
        accuracy: Mean final accuracy, 0..1.
        num_seeds: Runs without an error.
        num_reached: Those that reached the target.
    """

    arch: Arch
    trace: str
    task: str
    method: str
    tta_s: float
    low_s: float
    high_s: float
    accuracy: float
    num_seeds: int
    num_reached: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One situation: ours against the rest. A time or a name is None where there was no such run.

    Args:
        arch, trace, task: Which.
        auto, ssgd: The cells.
        published: Of the papers' versions, the one with the lowest TTA.
        fixed: Of the fixed modes, likewise.
        limit_s: TTA if SSGD's number of samples were trained at the summed rate of all ranks, virtual seconds.
    """

    arch: Arch
    trace: str
    task: str
    auto: Cell
    ssgd: Cell | None
    published: Cell | None
    fixed: Cell | None
    limit_s: float | None

    @property
    def accuracy_gap_points(self) -> float | None:
        """Final accuracy of auto minus that of SSGD, percentage points."""
        return None if self.ssgd is None else 100.0 * (self.auto.accuracy - self.ssgd.accuracy)

    def ratio_to(self, other: Cell | float | None) -> float | None:
        """TTA of auto over another one; None where there is none."""
        if other is None:
            return None
        return self.auto.tta_s / (other.tta_s if isinstance(other, Cell) else other)


def tta_or_penalty_s(row: Row) -> float:
    """Time to accuracy of a run; ten times its end where the target was never reached."""
    return row.tta_s if row.tta_s is not None else PENALTY * row.virtual_s


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean; the same every time.

    Example:
        >>> interval([2.0]), interval([1.0, 3.0])
        ((2.0, 2.0), (1.0, 3.0))
    """
    picks = np.random.default_rng(0).integers(0, len(values), (_NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[picks].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def cells(rows: Iterable[Row]) -> list[Cell]:
    """Merge the seeds of every situation and method, in order of appearance, without errors and limits."""
    groups: dict[tuple[Arch, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.error is None and row.job.method != LIMIT:
            groups[row.job.arch, row.job.trace, row.job.task, row.job.method].append(row)
    return [_cell(*key, group) for key, group in groups.items()]


def _cell(arch: Arch, trace: str, task: str, method: str, rows: Sequence[Row]) -> Cell:
    times = [tta_or_penalty_s(row) for row in rows]
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    num_reached = sum(row.tta_s is not None for row in rows)
    return Cell(arch, trace, task, method, fmean(times), *interval(times), fmean(accuracies), len(rows), num_reached)


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Set auto against the rest in every situation in which it ran."""
    made: dict[tuple[Arch, str, str], dict[str, Cell]] = defaultdict(dict)
    for cell in cells(rows):
        made[cell.arch, cell.trace, cell.task][cell.method] = cell
    return [
        Comparison(
            arch,
            trace,
            task,
            auto=by_method["auto"],
            ssgd=by_method.get("ssgd"),
            published=_best(by_method[name] for name in PUBLISHED if name in by_method),
            fixed=_best(cell for name, cell in by_method.items() if name.startswith(FIXED)),
            limit_s=limit_s(
                [row for row in rows if (row.job.arch, row.job.trace, row.job.task) == (arch, trace, task)]
            ),
        )
        for (arch, trace, task), by_method in made.items()
        if "auto" in by_method
    ]


def _best(candidates: Iterator[Cell] | Iterable[Cell]) -> Cell | None:
    return min(candidates, key=lambda cell: cell.tta_s, default=None)


def limit_s(rows: Iterable[Row]) -> float | None:
    """Return when all ranks together have trained as many samples as SSGD needed to the target, mean over seeds.

    Args:
        rows: Of one situation.

    Returns:
        Virtual seconds; None where SSGD never reached the target, or it or the limit did not run.
    """
    by_job = {(row.job.method, row.job.seed): row for row in rows if row.error is None}
    times = []
    for (method, seed), row in by_job.items():
        if method == "ssgd" and row.tta_s is not None and (LIMIT, seed) in by_job:
            needed = np.interp(row.tta_s, [t for t, _, _ in row.curve], [n for _, n, _ in row.curve])
            rate = by_job[LIMIT, seed].curve
            times.append(float(np.interp(needed, [n for _, n, _ in rate], [t for t, _, _ in rate])))
    return fmean(times) if times else None


def tabulate(rows: Sequence[Row]) -> dict[str, Any]:
    """Turn all rows into what `paceline evaluate --json` prints.

    Args:
        rows: Of any situations, methods and seeds.

    Returns:
        "rows": one per situation and method. "comparisons": one per situation. "summary": medians; a figure for
        which nothing ran is None. "errors": what failed.
    """
    compared = compare(rows)
    return {
        "rows": [_row_json(cell) for cell in cells(rows)],
        "comparisons": [_comparison_json(comparison) for comparison in compared],
        "summary": summarise(compared, cells(rows)),
        "errors": [{**_names(row.job), "seed": row.job.seed, "error": row.error} for row in rows if row.error],
    }


def summarise(compared: Sequence[Comparison], made: Sequence[Cell]) -> dict[str, Any]:
    """The figures that the claims are about; a figure for which nothing ran is None."""
    calm = [c.ratio_to(c.ssgd) for c in compared if SITUATIONS[c.trace].split == "calm"]
    regret = [c.ratio_to(c.fixed) for c in compared if SITUATIONS[c.trace].split == "test"]
    gaps = _known(c.accuracy_gap_points for c in compared)
    return {
        **{arch: _of_arch([c for c in compared if c.arch == arch], made) for arch in ARCHS},
        "accuracy_gap_points": fmean(gaps) if gaps else None,
        "accuracy_gap_points_worst": min(gaps, default=None),
        "no_straggler_ratio": max(_known(calm), default=None),
        "selector_regret": {"median": _median(regret), "p95": _percentile(regret, 95.0)},
    }


def _of_arch(compared: Sequence[Comparison], made: Sequence[Cell]) -> dict[str, Any]:
    with_stragglers = [c for c in compared if SITUATIONS[c.trace].slowdown > 1.0]
    slow = [c for c in with_stragglers if SITUATIONS[c.trace].slowdown >= SLOW]
    cell_of = {(c.arch, c.trace, c.task, c.method): c for c in made}
    reduction = {}
    for name in BASELINES:
        among = slow if name == "ssgd" or name in STAR else with_stragglers
        ratios = _known(c.ratio_to(cell_of.get((c.arch, c.trace, c.task, name))) for c in among)
        if ratios:
            reduction[name] = 1.0 - median(ratios)
    against_best = [c.ratio_to(c.published) for c in with_stragglers]
    return {
        "reduction": reduction,
        "vs_best_published": {"median": _median(against_best), "worst": max(_known(against_best), default=None)},
        "vs_limit": _median(c.ratio_to(c.limit_s) for c in with_stragglers),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return median(known) if known else None


def _percentile(values: Iterable[float | None], percent: float) -> float | None:
    known = _known(values)
    return float(np.percentile(known, percent)) if known else None


def _names(of: Any) -> dict[str, str]:
    return {"arch": of.arch, "trace": of.trace, "task": of.task, "method": of.method}


def _row_json(cell: Cell) -> dict[str, Any]:
    return {
        **_names(cell),
        "tta_s": cell.tta_s,
        "tta_s_low": cell.low_s,
        "tta_s_high": cell.high_s,
        "accuracy": cell.accuracy,
        "num_seeds": cell.num_seeds,
        "num_reached": cell.num_reached,
    }


def _comparison_json(c: Comparison) -> dict[str, Any]:
    situation = SITUATIONS[c.trace]
    best: Mapping[str, Cell | None] = {"published": c.published, "fixed": c.fixed}
    return {
        "arch": c.arch,
        "trace": c.trace,
        "task": c.task,
        "slowdown": situation.slowdown,
        "split": situation.split,
        "auto_s": c.auto.tta_s,
        "ssgd_s": c.ssgd and c.ssgd.tta_s,
        **{f"best_{kind}": cell and cell.method for kind, cell in best.items()},
        **{f"best_{kind}_s": cell and cell.tta_s for kind, cell in best.items()},
        "limit_s": c.limit_s,
        "vs_ssgd": c.ratio_to(c.ssgd),
        "vs_best_published": c.ratio_to(c.published),
        "regret": c.ratio_to(c.fixed),
        "vs_limit": c.ratio_to(c.limit_s),
        "accuracy_gap_points": c.accuracy_gap_points,
    }
