"""How many updates, how far apart: turns batch, noise scale and own times into the factors of time to accuracy. Pure.

All of them are *relative*: they rank modes against each other on the same job and predict no absolute time. What a
mode makes of them comes from `rehearse.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

LrRule = Literal["linear", "sqrt", "adascale", "none"]
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


def lr_scale(rule: LrRule, batch_samples: float, reference_samples: float, noise_scale: float | None = None) -> float:
    """Return the factor on the learning rate for an update of another batch than the tuned one.

    linear: b / b_ref (SGD);  sqrt: sqrt(b / b_ref) (Adam and its kin);  none: 1
    adascale: (1 + phi / b_ref) / (1 + phi / b), which is linear far below the noise scale and 1 far above it

    Args:
        rule: Which rule.
        batch_samples: Samples in the update, > 0.
        reference_samples: Samples that the learning rate was tuned for, > 0.
        noise_scale: phi, samples, >= 0, for "adascale"; while it is None that rule is the linear one.

    Raises:
        ValueError: an unknown rule or a batch that is not positive.

    Source:
        Goyal et al. 2017 (linear); Krizhevsky 2014, Malladi et al. 2022 (square root); Johnson et al. 2020
        (AdaScale's gain). STAR's division by N instead of x is the linear rule.

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
        case "adascale":
            if noise_scale is None:
                return ratio
            return updates_needed(reference_samples, noise_scale) / updates_needed(batch_samples, noise_scale)
        case "none":
            return 1.0
    raise ValueError(f"unknown learning rate rule {rule!r}; wanted 'linear', 'sqrt', 'adascale' or 'none'")


def progress(rule: LrRule, batch_samples: float, reference_samples: float, noise_scale: float) -> float:
    """Return the progress of an update relative to one of the reference batch.

    min(lr_scale(rule, b), n(b_ref) / n(b)) with n(b) = 1 + phi / b

    While steps are small progress goes with the learning rate; but a rate that shrinks more slowly than the noise in
    a smaller batch grows (the square root does, where noise is large) brings no more than the noise allows.

    Args:
        rule: How the learning rate follows the batch.
        batch_samples: Samples in the update, > 0.
        reference_samples: Samples that the learning rate was tuned for, > 0.
        noise_scale: phi, samples, >= 0.

    Source:
        Ours, from `lr_scale` and `updates_needed`.

    Example:
        >>> [round(progress(rule, 8, 16, 100.0), 2) for rule in ("linear", "sqrt", "none")]
        [0.5, 0.54, 0.54]
        >>> round(progress("sqrt", 8, 16, 1.0), 2)
        0.71
    """
    allowed = lr_scale("adascale", batch_samples, reference_samples, noise_scale)
    return min(lr_scale(rule, batch_samples, reference_samples, noise_scale), allowed)


def staleness_cost(momentum: float) -> float:
    """Return the price of staleness under an optimizer with this momentum: extra updates per full update of age.

    cost = 0.06 m / (1 - m)

    Args:
        momentum: m, of SGD, or Adam's beta1, in [0, 1).

    Source:
        Measured on digits and mnist1d in virtual time (`evaluate/grid.py`). Plain SGD loses nothing by staleness.

    Example:
        >>> staleness_cost(0.0), round(staleness_cost(0.9), 2)
        (0.0, 0.54)
    """
    return 0.06 * momentum / (1.0 - momentum)


def staleness_limit(momentum: float) -> float:
    """Return the mean age, in full updates, up to which staleness leaves the final accuracy as it is.

    limit = 3 (1 - m)

    Source:
        As `staleness_cost`. With a momentum of 0.9 updates of single gradients (0.9 full updates old) never reach the
        target, those of half of the ranks (0.5) end 2 points lower, those of three quarters (0.2) as high as BSP.

    Example:
        >>> staleness_limit(0.0), round(staleness_limit(0.9), 1)
        (3.0, 0.3)
    """
    return 3.0 * (1.0 - momentum)
