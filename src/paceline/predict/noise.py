"""Gradient noise scale: turns squared gradient norms of two batch sizes into an estimate with its uncertainty. Pure.

The norms come from whoever has gradients at two batch sizes at once: every rank's own (small batch) and the averaged
one (large batch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.types import NoiseScale, NormSample


def unbiased_pair(small_sq: float, large_sq: float, small: float, large: float) -> tuple[float, float]:
    """Return unbiased estimates of the squared true gradient and of the noise trace.

    |G|^2 = (B_L |G_L|^2 - B_S |G_S|^2) / (B_L - B_S);  tr(Sigma) = (|G_S|^2 - |G_L|^2) / (1/B_S - 1/B_L)

    Args:
        small_sq: E|G_S|^2: squared norm of the small-batch gradient, mean over the ranks.
        large_sq: |G_L|^2: squared norm of the large-batch gradient.
        small: B_S, samples, > 0.
        large: B_L, samples, > `small`.

    Returns:
        (|G|^2, tr(Sigma)); each unbiased, so either may be negative in a single step.

    Raises:
        ValueError: not 0 < `small` < `large`.

    Source:
        McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1; STAR names the same
        quantity PGNS and reads it from tables, ours measures it online.

    Example:
        >>> unbiased_pair(small_sq=1.5, large_sq=1.125, small=8, large=32)
        (1.0, 4.0)
    """
    if not 0 < small < large:
        raise ValueError(f"batch sizes must satisfy 0 < small < large, got {small} and {large}")
    signal = (large * large_sq - small * small_sq) / (large - small)
    trace = (small_sq - large_sq) / (1.0 / small - 1.0 / large)
    return signal, trace


@dataclass(frozen=True, slots=True)
class NoiseEstimator:
    """Smoothed gradient noise scale phi = EMA(tr Sigma) / EMA(|G|^2); the value is its own state.

    Numerator and denominator are smoothed apart, because the ratio of single-step estimates is biased and wild. The
    interval is the delta method's, from exponentially weighted second moments.

    Args:
        decay: Weight of the past per sample, 0 <= decay < 1; 0.95 remembers about 20 samples.

    Example:
        >>> estimator = NoiseEstimator()
        >>> for step in range(5):
        ...     ranks = [NormSample(rank, step, 1.5, 1.125, 8, 32) for rank in range(4)]
        ...     estimator = estimator.observe(ranks)
        >>> estimator.estimate().value
        4.0
    """

    decay: float = 0.95
    num_samples: int = 0
    step: int = 0
    weight: float = 0.0  # sum of the weights, to undo the start at zero
    weight_sq: float = 0.0  # sum of squared weights: effective sample size = weight^2 / weight_sq
    signal: float = 0.0
    trace: float = 0.0
    signal_sq: float = 0.0
    trace_sq: float = 0.0
    cross: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")

    def observe(self, samples: list[NormSample]) -> NoiseEstimator:
        """Take in one step: the samples of all ranks that took part in the same exchange.

        Args:
            samples: At least one; all of the same step.

        Returns:
            The new state; unchanged when a norm is not finite or the batch sizes do not differ.
        """
        small = sum(s.local_samples for s in samples) / len(samples)
        large = samples[0].averaged_samples
        small_sq = sum(s.local_sq for s in samples) / len(samples)
        large_sq = samples[0].averaged_sq
        if not (math.isfinite(small_sq) and math.isfinite(large_sq) and 0 < small < large):
            return self
        signal, trace = unbiased_pair(small_sq, large_sq, small, large)
        fresh, keep = 1.0 - self.decay, self.decay
        return replace(
            self,
            num_samples=self.num_samples + 1,
            step=samples[0].step,
            weight=keep * self.weight + fresh,
            weight_sq=keep * keep * self.weight_sq + fresh * fresh,
            signal=keep * self.signal + fresh * signal,
            trace=keep * self.trace + fresh * trace,
            signal_sq=keep * self.signal_sq + fresh * signal * signal,
            trace_sq=keep * self.trace_sq + fresh * trace * trace,
            cross=keep * self.cross + fresh * signal * trace,
        )

    def estimate(self) -> NoiseScale:
        """Return the noise scale so far.

        Returns:
            `value` is `inf` when the smoothed |G|^2 is not positive (noise drowns the signal) and 0 when the trace
            is not; the interval is [0, inf] until three samples are in.

        Raises:
            ValueError: nothing observed yet.
        """
        if self.num_samples == 0:
            raise ValueError("no gradient norms observed yet")
        signal, trace = self.signal / self.weight, max(0.0, self.trace / self.weight)
        if signal <= 0.0:
            return NoiseScale(self.step, math.inf, 0.0, math.inf, self.num_samples)
        value = trace / signal
        if self.num_samples < 3 or value == 0.0:
            return NoiseScale(self.step, value, 0.0, math.inf, self.num_samples)
        var_signal = max(0.0, self.signal_sq / self.weight - signal * signal)
        var_trace = max(0.0, self.trace_sq / self.weight - trace * trace)
        covariance = self.cross / self.weight - signal * trace
        relative = var_trace / trace**2 + var_signal / signal**2 - 2.0 * covariance / (trace * signal)
        effective = self.weight**2 / self.weight_sq
        margin = 1.96 * value * math.sqrt(max(0.0, relative) / effective)
        return NoiseScale(self.step, value, max(0.0, value - margin), value + margin, self.num_samples)
