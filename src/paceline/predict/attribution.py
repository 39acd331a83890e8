"""Why a rank is slow: turns its rows into the guilty phase and a cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from paceline.predict.detector import Row
from paceline.types import OWN_PHASES, Phase, Rank, StepTiming, Verdict

CAUSES = ("compute", "data", "gc", "outside", "cpu_contention", "uneven_work")

_CAUSE_OF_PHASE = {
    Phase.DATA: "data",
    Phase.FORWARD: "compute",
    Phase.BACKWARD: "compute",
    Phase.OPTIMIZER: "compute",
    Phase.GC: "gc",
    Phase.OTHER: "outside",
}
_WORDS = {
    "compute": "computing takes longer than elsewhere",
    "data": "the data loader is late",
    "gc": "garbage collection pauses the process",
    "outside": "work outside the training step",
    "cpu_contention": "it is ready to run but gets no core",
    "uneven_work": "it trains more samples per step",
}


def attribute(rows: Sequence[Row]) -> tuple[Phase, str]:
    """Name the phase and the cause behind a slow rank's excess.

    The phase is the one with the largest mean excess over the other ranks. The cause follows from the phase, unless
    direct evidence says more: time on the run queue covering half of the excess means contention for cores, and a
    sample count that explains the slowdown means uneven work.

    Args:
        rows: The rank's rows, at least one; from the first hit on gives the sharpest answer.

    Returns:
        The phase and one of `CAUSES`.

    Raises:
        ValueError: no rows.

    Source:
        Ours: own-time accounting by phase, checked against planted faults (bench/guilty.py).

    Example:
        >>> from paceline.predict.detector import rows_beside
        >>> slow = StepTiming(2, 1, 0.0, data_s=0.2, backward_s=0.04)
        >>> attribute([*rows_beside({2: slow}, {0: StepTiming(0, 1, 0.0, data_s=0.01, backward_s=0.05)}).values()])
        (<Phase.DATA: 'data'>, 'data')
    """
    if not rows:
        raise ValueError("no rows to attribute: the rank has not been observed")
    pairs = [(row.timing, row.reference) for row in rows]
    excess = {p: fmean(timing.of(p) - reference.of(p) for timing, reference in pairs) for p in OWN_PHASES}
    phase = max(OWN_PHASES, key=lambda p: excess[p])
    total = sum(excess.values())
    queued = fmean((timing.runqueue_s or 0.0) - (reference.runqueue_s or 0.0) for timing, reference in pairs)
    if queued > max(0.0, 0.5 * total) and phase is not Phase.GC:
        return phase, "cpu_contention"
    cause = _CAUSE_OF_PHASE[phase]
    if cause == "compute" and _explained_by_samples(pairs):
        return phase, "uneven_work"
    return phase, cause


def _explained_by_samples(pairs: Sequence[tuple[StepTiming, StepTiming]]) -> bool:
    if any(timing.samples == 0 or reference.samples == 0 for timing, reference in pairs):
        return False
    more = fmean(timing.samples / reference.samples for timing, reference in pairs)
    slower = fmean(timing.own_s for timing, _ in pairs) / fmean(reference.own_s for _, reference in pairs)
    return more > 1.1 and more >= 0.7 * slower


def _episode(rows: Sequence[Row], min_effect_s: float) -> Sequence[Row]:
    """The rows since the excess began that the last of them show."""
    limit = sorted(row.excess_s for row in rows)[-min(4, len(rows))]  # one hiccup must not outweigh many rows
    excess = [min(row.excess_s, limit) for row in rows]
    least = [max(min_effect_s, 0.1 * row.reference_s) for row in rows]
    start, bar = 0, 0.0
    for _ in range(8):  # two or three rounds settle it
        begin, most, above = None, 0.0, 0.0
        for i in reversed(range(len(rows))):
            above += excess[i] - max(bar, least[i])
            if above > most:
                begin, most = i, above
        if begin is None or (begin == start and bar > 0.0):
            break
        start, bar = begin, 0.5 * fmean(excess[begin:])
    return rows[start:]


def verdict(rank: Rank, host: str, rows: Sequence[Row], min_effect_s: float = 0.005) -> Verdict:
    """Put the finding about one slow rank into a `Verdict`.

    Args:
        rank: The slow rank.
        host: Its host name.
        rows: Its rows, at least one.
        min_effect_s: Rows with less excess than this do not mark the beginning of the episode, seconds.

    Returns:
        The verdict, judged on the rows since the episode began; on all rows where none shows an excess.

    Source:
        The episode is the suffix of rows whose excess above a bar adds up to most (CUSUM, Page 1954), with the bar
        at half of the episode's own mean: noise and hiccups before it are left out, rows between pauses are not.
    """
    episode = _episode(rows, min_effect_s)
    phase, cause = attribute(episode)
    own = fmean(r.timing.own_s for r in episode)
    reference = median(r.reference_s for r in episode)
    spans = sum(max(r.timing.own_s, r.reference_s) for r in episode)
    lost = sum(max(0.0, r.excess_s) for r in episode) / spans if spans > 0 else 0.0
    slowdown = own / reference if reference > 0 else float("inf")
    in_phase = fmean(r.timing.of(phase) for r in episode)
    others_in_phase = fmean(r.reference.of(phase) for r in episode)
    return Verdict(
        step=rows[-1].timing.step,
        rank=rank,
        host=host,
        phase=phase.value,
        cause=cause,
        slowdown=slowdown,
        excess_s=own - reference,
        lost_ratio=lost,
        since_step=episode[0].timing.step,
        evidence=(
            f"own time {own * 1e3:.0f} ms against {reference * 1e3:.0f} ms elsewhere over {len(episode)} steps; "
            f"{phase.value} {in_phase * 1e3:.0f} ms against {others_in_phase * 1e3:.0f} ms: {_WORDS[cause]}"
        ),
    )
