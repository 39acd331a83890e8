"""Time to accuracy: turns own times, noise scale and staleness into the cost of each synchronisation mode. Pure.

Two factors make time to accuracy: how long an update takes, and how many updates are needed. Both are *relative*:
they rank modes against each other on the same job and predict no absolute time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.policy.barrier import BSP
from paceline.policy.ring import AttachedRing
from paceline.types import Rank

LrRule = Literal["linear", "sqrt", "none"]
_LARGEST_NOISE = 1e9  # stands in for an infinite noise scale: then progress is proportional to samples


def updates_needed(batch_samples: float, noise_scale: float) -> float:
    """Return the relative number of updates to a given accuracy with updates of this batch.

    n(b) = 1 + phi / b

    Args:
        batch_samples: Samples per update, > 0.
        noise_scale: phi, samples, >= 0; `inf` means that only the number of samples counts.

    Returns:
        A relative count; only ratios between batches mean anything.

    Raises:
        ValueError: a batch that is not positive, or a negative noise scale.

    Source:
        McCandlish et al. 2018 (critical batch); STAR's scripts drop the same constant.

    Example:
        >>> round(updates_needed(640, 1389.5845), 3)
        3.171
    """
    if not batch_samples > 0:
        raise ValueError(f"an update needs samples, got batch_samples={batch_samples}")
    if not noise_scale >= 0:
        raise ValueError(f"noise_scale must be >= 0, got {noise_scale}")
    return 1.0 + min(noise_scale, _LARGEST_NOISE) / batch_samples


def kasync_interval_s(own_times_s: Sequence[float], x: int, num_updates: int = 1000) -> float:
    """Return the mean time between updates when any `x` arrivals make one (static x-order).

    Every rank computes on its own; the x-th arrival since the last update fires the next and restarts those x.

    Args:
        own_times_s: Own time per gradient of every rank, seconds, > 0.
        x: Gradients per update, 1..len(own_times_s).
        num_updates: Updates simulated, > 0.

    Returns:
        Seconds.

    Raises:
        ValueError: x out of range or a time that is not positive.

    Source:
        STAR's stand-alone simulator (x = 1 gives 1 / sum(1 / t_i), x = N gives max t). Ours keeps a heap of finish
        times instead of sorting the remaining ones, and gives the same numbers.

    Example:
        >>> round(kasync_interval_s([100, 105, 110, 115, 120, 150, 200, 400], x=8), 1)
        400.0
    """
    if not 1 <= x <= len(own_times_s):
        raise ValueError(f"x must be in 1..{len(own_times_s)}, got {x}")
    if not all(t > 0 for t in own_times_s):
        raise ValueError(f"own times must be positive, got {list(own_times_s)}")
    if x == 1:
        return 1.0 / sum(1.0 / t for t in own_times_s)  # nobody waits: the rates add up
    finish = [(t, rank) for rank, t in enumerate(own_times_s)]
    heapq.heapify(finish)
    now = 0.0
    for _ in range(num_updates):
        done = [heapq.heappop(finish) for _ in range(x)]
        now = done[-1][0]
        for _, rank in done:
            heapq.heappush(finish, (now + own_times_s[rank], rank))
    return now / num_updates


def kasync_interval_linear_s(own_times_s: Sequence[float], x: int) -> float:
    """Return STAR's closed form for the same interval: linear in the x-th smallest own time.

    t(x) = h + (s_N - h) (s_x - s_1) / (s_N - s_1) with h = 1 / sum(1 / t_i) and s the sorted times.

    Kept to compare with the source: it is far too optimistic for interior x (with seven ranks at 100 ms and one at
    130 ms it claims seven gradients every 12.9 ms), so decisions use `kasync_interval_s`.

    Raises:
        ValueError: x out of range, or all times equal, where the form is undefined.

    Example:
        >>> round(kasync_interval_linear_s([100, 105, 110, 115, 120, 150, 200, 400], x=5), 2)
        42.27
    """
    if not 1 <= x <= len(own_times_s):
        raise ValueError(f"x must be in 1..{len(own_times_s)}, got {x}")
    s = sorted(own_times_s)
    if s[0] == s[-1]:
        raise ValueError("the linear form is undefined when all own times are equal")
    together = 1.0 / sum(1.0 / t for t in s)
    return together + (s[-1] - together) * (s[x - 1] - s[0]) / (s[-1] - s[0])


def grouped_time_s(groups: Sequence[Sequence[float]], batch_size: float, noise_scale: float) -> float:
    """Return the time per unit of progress when each group updates on its own (dynamic x-order).

    T = 1 / sum over groups of 1 / (n(|g| B) max t): the progress rates of the groups add up.

    Args:
        groups: Own times of the ranks of each group, seconds.
        batch_size: Samples per rank and gradient, > 0.
        noise_scale: Samples, >= 0.

    Source:
        STAR's scripts. Staleness between groups is not in it.

    Example:
        >>> round(grouped_time_s([[100, 105, 110, 115, 120], [150], [200], [400]], 128, 1389.5845), 1)
        261.6
    """
    rates = (1.0 / (updates_needed(len(g) * batch_size, noise_scale) * max(g)) for g in groups)
    return 1.0 / sum(rates)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What an estimate rests on.

    Args:
        own_times_s: Forecast own time per step by rank, seconds, > 0.
        comm_s: Time of the reduction itself, without waiting for anybody, seconds, >= 0.
        batch_size: Samples per rank and step, > 0.
        noise_scale: Samples, >= 0.
        staleness_cost: Extra updates per version of mean staleness, as a ratio, >= 0.
    """

    own_times_s: Mapping[Rank, float]
    comm_s: float
    batch_size: float
    noise_scale: float
    staleness_cost: float = 0.1


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted cost of one policy.

    Args:
        interval_s: Time between updates, seconds.
        batch_samples: Mean samples per update.
        mean_staleness: Versions, weighted by samples.
        time_to_accuracy_s: Seconds per unit of progress; lower is better.
    """

    interval_s: float
    batch_samples: float
    mean_staleness: float
    time_to_accuracy_s: float


def estimate(policy: BSP | AttachedRing, given: Conditions) -> Estimate:
    """Predict the time to accuracy of a policy.

    T = interval * n(batch per update) * (1 + lambda * mean staleness)

    BSP's interval is the slowest own time plus the reduction. AttachedRing's is the slowest *ring* member's; an
    attached rank with own time t joins every k-th update on average, k = t / interval + 1, with staleness k - 1: what
    it has sent waits for an update to take it in, so even an equally fast one misses every other.

    Args:
        policy: What to judge.
        given: Forecasts and noise, for every rank of the policy.

    Returns:
        The estimate; `time_to_accuracy_s` compares only with others made from the same `given`.

    Source:
        STAR, heuristic selection (AR: t(x) = s_x, ring gradients only). Ours differs: contributions of attached
        ranks count, a gradient beyond the staleness bound does not, and staleness costs. Without that last term
        the heuristic degenerates to ASGD.

    Example:
        >>> given = Conditions({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}, 0.0, batch_size=32, noise_scale=60.0)
        >>> bsp = estimate(BSP(), given)
        >>> ring = estimate(AttachedRing(ring=(0, 1, 3), parent_of={2: 0}), given)
        >>> round(bsp.time_to_accuracy_s / ring.time_to_accuracy_s, 1)
        4.5
    """
    times = given.own_times_s
    if isinstance(policy, BSP):
        interval = max(times.values()) + given.comm_s
        batch, staleness = given.batch_size * len(times), 0.0
    else:
        interval = max(times[rank] for rank in policy.ring) + given.comm_s
        share, stale = float(len(policy.ring)), 0.0
        for child in policy.parent_of:
            every = times[child] / interval + 1.0
            if every - 1 <= policy.max_staleness:
                share += 1.0 / every
                stale += (every - 1) / every
        batch, staleness = given.batch_size * share, stale / share
    needed = updates_needed(batch, given.noise_scale)
    time_s = interval * needed * (1.0 + given.staleness_cost * staleness)
    return Estimate(interval, batch, staleness, time_s)


def lr_scale(rule: LrRule, batch_samples: float, reference_samples: float) -> float:
    """Return the factor on the learning rate for an update of another batch than the tuned one.

    linear: b / b_ref (SGD);  sqrt: sqrt(b / b_ref) (Adam and its kin);  none: 1

    Args:
        rule: Which rule.
        batch_samples: Samples in the update, > 0.
        reference_samples: Samples that the learning rate was tuned for, > 0.

    Raises:
        ValueError: an unknown rule or a batch that is not positive.

    Source:
        Goyal et al. 2017 (linear); Krizhevsky 2014, Malladi et al. 2022 (square root). STAR's division by N
        instead of x is the linear rule.

    Example:
        >>> lr_scale("linear", 96, 128), lr_scale("sqrt", 32, 128)
        (0.75, 0.5)
    """
    if not (batch_samples > 0 and reference_samples > 0):
        raise ValueError(f"batches must be positive, got {batch_samples} and {reference_samples}")
    ratio = batch_samples / reference_samples
    match rule:
        case "linear":
            return ratio
        case "sqrt":
            return math.sqrt(ratio)
        case "none":
            return 1.0
    raise ValueError(f"unknown learning rate rule {rule!r}; wanted 'linear', 'sqrt' or 'none'")
