"""What a collective costs: turns schedules, sizes and a network's alpha and beta into seconds. Pure.

One full-duplex port per rank, alpha + bytes x beta per message. A round lasts as long as its longest message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import numpy as np

from paceline.collective.late_pattern import num_doublings
from paceline.collective.schedule import Messages, Schedule
from paceline.errors import ScheduleError


def cost_s(schedule: Schedule, nbytes: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return what a schedule costs after the last rank has arrived: sum of alpha + longest message x beta.

    Early rounds are not in it: they are hidden if the late ranks are late enough (`early_cost_s`). For a classic
    schedule there are none, so it is the whole.

    Args:
        schedule: Any.
        nbytes: Size of the buffer, bytes, >= 0.
        alpha_s: Per message, seconds, >= 0.
        beta_s_per_byte: Per byte through one port, seconds, >= 0.

    Returns:
        Seconds. Rounds are counted as if everybody waited for the longest message of each; ranks need not.

    Raises:
        ScheduleError: a negative number.

    Source:
        The alpha-beta model with one port per rank, as StragglAR's analytic simulator has it (released code).

    Example:
        >>> from paceline.collective.classic import ring
        >>> cost_s(ring(4), nbytes=400, alpha_s=1.0, beta_s_per_byte=0.01)
        12.0
    """
    return _rounds_s(
        schedule, islice(schedule.rounds(), schedule.num_early_rounds, None), nbytes, alpha_s, beta_s_per_byte
    )


def early_cost_s(schedule: Schedule, nbytes: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return what the rounds before the late ranks' arrival cost; arguments as in `cost_s`.

    Time from the arrival of the last early rank, with the late ones `gap_s` behind it, to the end:
    max(gap_s, early_cost_s) + cost_s.

    Example:
        >>> from paceline.collective.late import around_one
        >>> early_cost_s(around_one(4, late=3, num_chunks=3), nbytes=300, alpha_s=1.0, beta_s_per_byte=0.01)
        4.0
    """
    return _rounds_s(schedule, islice(schedule.rounds(), schedule.num_early_rounds), nbytes, alpha_s, beta_s_per_byte)


def _rounds_s(schedule: Schedule, rounds: Iterable[Messages], nbytes: int, alpha_s: float, beta: float) -> float:
    if not (nbytes >= 0 and alpha_s >= 0 and beta >= 0):
        raise ScheduleError(f"bytes, alpha and beta must be >= 0, got {nbytes}, {alpha_s} and {beta}")
    ranges = (schedule.chunk_range(chunk, nbytes) for chunk in range(schedule.num_chunks + len(schedule.blocks)))
    sizes = np.array([stop - start for start, stop in ranges])
    longest = (int(sizes[messages[:, 2]].max(initial=0)) for messages in rounds)
    return math.fsum(alpha_s + size * beta for size in longest if size > 0)  # nothing is sent where there is nothing


def late_rounds(num_ranks: int, num_chunks: int) -> int:
    """Return how many rounds follow the late rank's arrival: K - 1 + ceil(log2 n), one more for n = 3 and K > 2.

    Example:
        >>> late_rounds(8, 7), late_rounds(3, 4)
        (9, 6)
    """
    return num_chunks - 1 + num_doublings(num_ranks) + (num_ranks == 3 and num_chunks > 2)


def tuned_num_chunks(num_ranks: int, nbytes: float, alpha_s: float, beta_s_per_byte: float) -> int:
    """Return the number of chunks around one late rank that takes the least time after its arrival.

    (K + L - 1)(alpha + s beta / K) is least at K = sqrt((L-1) s beta / alpha); of the multiples of m = n - 1, the
    owners' number, the nearest, but not less than m.

    Args:
        num_ranks: n, >= 2.
        nbytes: s, bytes, >= 0.
        alpha_s: Per message, seconds, > 0.
        beta_s_per_byte: Per byte through one port, seconds, >= 0.

    Returns:
        K, >= 1.

    Raises:
        ScheduleError: a number out of range.

    Source:
        Ours; StragglAR (arXiv 2505.23523) always takes K = n - 1. More chunks cut the critical delay up to 3.7 times.

    Example:
        >>> [tuned_num_chunks(n, 2**30, 3e-6, 1 / (450 * 2**30)) for n in (4, 5, 8, 16, 64)]
        [27, 40, 35, 45, 63]
    """
    _check(num_ranks, nbytes, alpha_s, beta_s_per_byte)
    if not alpha_s > 0:
        raise ScheduleError(f"without a cost per message there is no best number of chunks: alpha_s is {alpha_s}")
    m = num_ranks - 1
    best = math.sqrt((num_doublings(num_ranks) - 1) * nbytes * beta_s_per_byte / alpha_s)
    return m * max(1, round(best / m))


def critical_delay_s(num_ranks: int, num_chunks: int, nbytes: float, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return how late the late rank must be for the late schedule to break even with the ring.

    D* = (K + L - 1 - n) alpha + ((n-2) / (n (n-1)) + (L-1) / K) s beta.

    Args:
        num_ranks: n, >= 2.
        num_chunks: K, >= 1.
        nbytes: s, bytes, >= 0.
        alpha_s: Per message, seconds, >= 0.
        beta_s_per_byte: Per byte through one port, seconds, >= 0.

    Returns:
        Seconds behind the last early rank; negative where it always wins.

    Raises:
        ScheduleError: a number out of range.

    Source:
        Ours, exact in the model; StragglAR (arXiv 2505.23523) gives (log n - 2) alpha + (log n / n) s beta.

    Example:
        >>> round(1e3 * critical_delay_s(8, 7, 2**30, 3e-6, 1 / (450 * 2**30)), 2)
        0.88
    """
    early_s, late_s, ring_s = _times_s(num_ranks, num_chunks, nbytes, alpha_s, beta_s_per_byte)
    return early_s + late_s - ring_s


def gain_s(
    gap_s: float, num_ranks: int, num_chunks: int, nbytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return what the late schedule saves against the ring: clamp(gap, 0, T_RS) - D*.

    Args:
        gap_s: Arrival of the rank that was expected late minus the latest other arrival, seconds; negative where it
            was the wrong rank.
        num_ranks, num_chunks, nbytes, alpha_s, beta_s_per_byte: As in `critical_delay_s`.

    Returns:
        Seconds; negative for a loss.

    Raises:
        ScheduleError: a number out of range.

    Source:
        Ours, exact in the model; StragglAR does not look at delays that do not hide the whole reduce-scatter.

    Example:
        >>> model = dict(num_ranks=8, num_chunks=35, nbytes=2**30, alpha_s=3e-6, beta_s_per_byte=1 / (450 * 2**30))
        >>> [round(1e3 * gain_s(gap, **model), 2) for gap in (1.0, 0.0, -1.0)]
        [1.47, -0.45, -0.45]
    """
    if math.isnan(gap_s):
        raise ScheduleError("a gap must be a number, got nan")
    early_s, late_s, ring_s = _times_s(num_ranks, num_chunks, nbytes, alpha_s, beta_s_per_byte)
    return min(max(gap_s, 0.0), early_s) - (early_s + late_s - ring_s)


def split_bytes(gap_s: float, num_ranks: int, nbytes: int, beta_s_per_byte: float) -> int:
    """Return how much of a buffer to send through the late schedule, so that its early part just fills the gap.

    s' = gap (n-1) / ((n-2) beta), at most s; the rest goes through the ring. With fine chunks a right prediction
    gains gap (n-1)/n and a wrong one loses gap / n, so there is no critical delay.

    Args:
        gap_s: Predicted, seconds; nothing is sent where it is not positive.
        num_ranks: n, >= 2.
        nbytes: s, bytes, >= 0.
        beta_s_per_byte: Per byte through one port, seconds, > 0.

    Returns:
        Bytes, 0..nbytes.

    Raises:
        ScheduleError: a number out of range.

    Source:
        Ours. StragglAR (arXiv 2505.23523) sends the whole gradient or nothing.

    Example:
        >>> split_bytes(0.007, 4, 12 * 2**30, 78e-3 / (12 * 2**30)) / 2**30
        1.6153846150264144
    """
    _check(num_ranks, nbytes, 0.0, beta_s_per_byte)
    if not beta_s_per_byte > 0 or math.isnan(gap_s):
        raise ScheduleError(f"want a gap and a beta > 0, got {gap_s} and {beta_s_per_byte}")
    if gap_s <= 0:
        return 0
    if num_ranks == 2:  # nothing to do before the late rank comes: any size fills the gap
        return nbytes
    return int(min(gap_s * (num_ranks - 1) / ((num_ranks - 2) * beta_s_per_byte), nbytes))


def _times_s(n: int, num_chunks: int, nbytes: float, alpha_s: float, beta: float) -> tuple[float, float, float]:
    """The early reduce-scatter, the rest of the late schedule, and the ring."""
    _check(n, nbytes, alpha_s, beta)
    if num_chunks < 1:
        raise ScheduleError(f"num_chunks must be >= 1, got {num_chunks}")
    shards = min(n - 1, num_chunks)
    return (
        (n - 2) * (alpha_s + nbytes * beta / shards),
        late_rounds(n, num_chunks) * (alpha_s + nbytes * beta / num_chunks),
        2 * (n - 1) * (alpha_s + nbytes * beta / n),
    )


def _check(num_ranks: int, nbytes: float, alpha_s: float, beta_s_per_byte: float) -> None:
    if num_ranks < 2:
        raise ScheduleError(f"a collective needs at least 2 ranks, got {num_ranks}")
    if not all(0 <= value < math.inf for value in (nbytes, alpha_s, beta_s_per_byte)):
        raise ScheduleError(
            f"bytes, alpha and beta must be finite and >= 0, got {nbytes}, {alpha_s} and {beta_s_per_byte}"
        )
