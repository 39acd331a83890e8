"""Uneven work: turns the ranks' speeds into batch sizes with which all of them finish together. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from paceline.types import Rank


def balanced_batches(
    speeds: Sequence[float], total: int, least: int | Sequence[int] = 1, most: int | Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the whole batch sizes of a given sum whose slowest rank finishes soonest.

    minimise max_i b_i / v_i  subject to  sum b_i = B,  lo_i <= b_i <= hi_i

    Everybody starts at the least; each further sample goes to the rank that would finish first with it, at equal times
    to the lower rank. Giving a sample elsewhere never ends sooner, so the result is a true minimum. O(B log N).

    Args:
        speeds: Samples per second by rank, finite, > 0. Only their ratios matter.
        total: B, samples.
        least: lo, samples, >= 0: by rank, or one for all.
        most: hi, samples, likewise; None for no bound.

    Returns:
        Samples by rank.

    Raises:
        ValueError: no rank, a speed that is not positive and finite, or bounds that no batch sizes of this sum meet.

    Source:
        AntDT-ND (arXiv 2404.09679) and LB-BSP (1806.02508) state the problem for work proportional to the batch; this
        solver is ours. LB-BSP rounds the proportional shares, which can miss the minimum by a sample.

    Example:
        >>> balanced_batches([100.0, 100.0, 10.0, 100.0], total=128)
        (42, 41, 4, 41)
        >>> balanced_batches([100.0, 100.0, 10.0, 100.0], total=128, least=8)
        (40, 40, 8, 40)
    """
    num_ranks = len(speeds)
    low = [least] * num_ranks if isinstance(least, int) else list(least)
    unbounded = total if most is None else most
    high = [unbounded] * num_ranks if isinstance(unbounded, int) else list(unbounded)
    _check(speeds, total, low, high)
    batches = list(low)
    first = [((batches[i] + 1) / speeds[i], i) for i in range(num_ranks) if batches[i] < high[i]]
    heapq.heapify(first)
    for _ in range(total - sum(low)):
        _, i = heapq.heappop(first)
        batches[i] += 1
        if batches[i] < high[i]:
            heapq.heappush(first, ((batches[i] + 1) / speeds[i], i))
    return tuple(batches)


def lasting_means(samples: Mapping[Rank, Sequence[float]]) -> dict[Rank, float]:
    """Return means drawn together by as much as their differences may be chance.

    mean + max(0, 1 - W / B) * (mean_i - mean)

    with B the variance of the means and W the mean square of their standard errors. Batches that follow raw means
    follow noise: they look better on the steps that they were made from than on the next ones.

    Args:
        samples: At least one per rank, any unit.

    Returns:
        A mean by rank, same unit. Where each rank has one sample nothing is known of chance, and nothing is drawn.

    Source:
        Efron, Morris 1975 (empirical Bayes, James-Stein), with the variances estimated.

    Example:
        >>> lasting_means({0: [1.0, 3.0], 1: [3.0, 1.0], 2: [1.0, 3.0]})
        {0: 2.0, 1: 2.0, 2: 2.0}
        >>> lasting_means({0: [1.0], 1: [5.0]})
        {0: 1.0, 1: 5.0}
    """
    means = {rank: fmean(values) for rank, values in samples.items()}
    if len(means) < 2:
        return means
    middle, between = fmean(means.values()), variance(means.values())
    within = fmean(variance(values) / len(values) if len(values) > 1 else 0.0 for values in samples.values())
    kept = max(0.0, 1.0 - within / between) if between else 0.0
    return {rank: middle + kept * (mean - middle) for rank, mean in means.items()}


def slowest_s(batches: Sequence[int], speeds: Sequence[float]) -> float:
    """Return when the last rank finishes: max_i b_i / v_i, seconds.

    Example:
        >>> slowest_s((32, 32), (100.0, 10.0))
        3.2
    """
    return max(batch / speed for batch, speed in zip(batches, speeds, strict=True))


def _check(speeds: Sequence[float], total: int, low: list[int], high: list[int]) -> None:
    if not speeds or not all(v > 0 and math.isfinite(v) for v in speeds):
        raise ValueError(f"speeds must be positive and finite, for one rank at least, got {list(speeds)}")
    if not len(low) == len(high) == len(speeds):
        raise ValueError(f"wanted bounds for {len(speeds)} ranks, got {len(low)} and {len(high)}")
    if not all(0 <= lo <= hi for lo, hi in zip(low, high, strict=True)):
        raise ValueError(f"wanted 0 <= least <= most for every rank, got {low} and {high}")
    if not sum(low) <= total <= sum(high):
        raise ValueError(f"{total} samples do not fit between the bounds, which allow {sum(low)} to {sum(high)}")
