"""What a schedule is worth: turns a request for one into rounds, bound, verdict, cost and messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.collective.classic import direct, halving_doubling, ring, tree
from paceline.collective.cost import cost_s, critical_delay_s, early_cost_s
from paceline.collective.late import around_one, late_lower_bound
from paceline.collective.late_many import around_many
from paceline.collective.late_pattern import num_doublings
from paceline.collective.schedule import ListedSchedule, Schedule, Steps, steps_of
from paceline.collective.verify import verify
from paceline.errors import ScheduleError

CLASSIC: dict[str, Callable[[int], ListedSchedule]] = {
    "ring": ring,
    "halving": halving_doubling,
    "tree": tree,
    "direct": direct,
}
ALGORITHMS = (*CLASSIC, "late")


def build(algorithm: str, num_ranks: int, late: Sequence[int] = (), num_chunks: int | None = None) -> Schedule:
    """Return the schedule that somebody asked for by name.

    Args:
        algorithm: One of `ALGORITHMS`.
        num_ranks: n, >= 2.
        late: Late ranks, for "late" only; the last rank where none is given.
        num_chunks: K, for "late" only; None for one per owner around one late rank, four around several.

    Returns:
        The schedule.

    Raises:
        ScheduleError: an unknown name, a number out of range, or late ranks or chunks for a classic algorithm.

    Example:
        >>> build("late", 8).late, build("late", 8).num_chunks, build("ring", 8).num_rounds
        ((7,), 7, 14)
    """
    if algorithm not in ALGORITHMS:
        raise ScheduleError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if num_ranks < 2:
        raise ScheduleError(f"a collective needs at least 2 ranks, got {num_ranks}")
    if algorithm != "late":
        schedule = CLASSIC[algorithm](num_ranks)
        if late or num_chunks not in (None, schedule.num_chunks):
            raise ScheduleError(
                f"{algorithm} has no late ranks and cuts {schedule.num_chunks} chunks for {num_ranks} ranks: "
                f"leave both out, or ask for late"
            )
        return schedule
    late = tuple(late) or (num_ranks - 1,)
    if len(late) == 1:
        return around_one(num_ranks, late[0], num_ranks - 1 if num_chunks is None else num_chunks)
    return around_many(
        num_ranks, tuple(sorted(late)), 4 * max(1, num_ranks - len(late)) if num_chunks is None else num_chunks
    )


def lower_bound_rounds(schedule: Schedule) -> int:
    """Return how many rounds no schedule of its kind can do without, after the late ranks' arrival.

    One late rank: K - 1 + ceil(log2 n). k late ranks: their data and the sums through n ports, (n + k - 1) K / n.
    Nobody late: the volume 2 (n-1) K / n where every message is one chunk, and ceil(log2 n) in any case.

    Args:
        schedule: Any.

    Returns:
        Rounds.

    Example:
        >>> [lower_bound_rounds(build(name, 8)) for name in ("late", "ring", "halving", "tree")]
        [9, 14, 3, 3]
    """
    n, k = schedule.num_ranks, schedule.num_chunks
    if len(schedule.late) == 1:
        return late_lower_bound(n, k)
    if schedule.late:
        return max(-(-(n + len(schedule.late) - 1) * k // n), num_doublings(n))
    volume = 0 if schedule.blocks else -(-2 * (n - 1) * k // n)
    return max(volume, num_doublings(n))


def facts(schedule: Schedule, nbytes: int, alpha_s: float, beta_s_per_byte: float) -> dict[str, Any]:
    """Return all there is to say about a schedule, as JSON would have it.

    Args:
        schedule: Any.
        nbytes: Size of the buffer, bytes, >= 0.
        alpha_s: Per message, seconds, >= 0.
        beta_s_per_byte: Per byte through one port, seconds, >= 0.

    Returns:
        `algorithm`, `num_ranks`, `num_chunks`, `late`; `rounds` after the late ranks' arrival and their
        `lower_bound_rounds`; `verified`, with `violation` where it is not; `cost_s` of these rounds, `ring_s` and, for
        one late rank, `critical_delay_s`; `steps`: by round, the messages `{source, target, chunk, adds}`.
        `early_steps` and `early_cost_s`: the same for what comes before. `blocks`: the chunks behind a chunk number
        from `num_chunks` on.

    Raises:
        ScheduleError: a negative number.

    Example:
        >>> told = facts(build("late", 5), nbytes=400, alpha_s=1.0, beta_s_per_byte=0.01)
        >>> told["rounds"], told["lower_bound_rounds"], told["verified"], told["cost_s"], len(told["early_steps"])
        (6, 6, True, 12.0, 3)
    """
    n, num_chunks, num_early = schedule.num_ranks, schedule.num_chunks, schedule.num_early_rounds
    violation = None
    try:
        verify(schedule)
    except ScheduleError as error:
        violation = str(error)
    model = (nbytes, alpha_s, beta_s_per_byte)
    steps = steps_of(schedule)
    return {
        "algorithm": schedule.name,
        "num_ranks": n,
        "num_chunks": num_chunks,
        "late": list(schedule.late),
        "rounds": len(steps) - num_early,
        "lower_bound_rounds": lower_bound_rounds(schedule),
        "verified": violation is None,
        "violation": violation,
        "cost_s": cost_s(schedule, *model),
        "early_cost_s": early_cost_s(schedule, *model),
        "ring_s": cost_s(ring(n), *model),
        "critical_delay_s": critical_delay_s(n, num_chunks, *model) if len(schedule.late) == 1 else None,
        "blocks": [list(chunks) for chunks in schedule.blocks],
        "early_steps": _listed(steps[:num_early]),
        "steps": _listed(steps[num_early:]),
    }


def _listed(steps: Steps) -> list[list[dict[str, Any]]]:
    return [[transfer._asdict() for transfer in step] for step in steps]
