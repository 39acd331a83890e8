"""The noise scale, against gradients drawn from a distribution whose true noise scale is known."""

import math

import numpy as np
import pytest

from paceline.predict.noise import NoiseEstimator, unbiased_pair
from paceline.types import NormSample

DIM, NUM_RANKS = 200, 4


def gradients(batch: int, signal_sq: float, trace: float, num_steps: int, rng: np.random.Generator):
    """Norm samples by step: every rank's gradient is drawn from N(G, Sigma / batch), Sigma uneven over dimensions."""
    true = rng.normal(size=DIM)
    true *= math.sqrt(signal_sq) / np.linalg.norm(true)
    variances = rng.uniform(0.2, 1.8, DIM)
    variances *= trace / variances.sum()
    for step in range(num_steps):
        local = true + rng.normal(size=(NUM_RANKS, DIM)) * np.sqrt(variances / batch)
        averaged_sq = float((local.mean(axis=0) ** 2).sum())
        yield [
            NormSample(rank, step, float((local[rank] ** 2).sum()), averaged_sq, batch, NUM_RANKS * batch)
            for rank in range(NUM_RANKS)
        ]


def estimated(batch: int, signal_sq: float, trace: float, num_steps: int, seed: int, decay: float = 0.95):
    """The estimate after so many steps."""
    estimator = NoiseEstimator(decay=decay)
    for samples in gradients(batch, signal_sq, trace, num_steps, np.random.default_rng(seed)):
        estimator = estimator.observe(samples)
    return estimator.estimate()


@pytest.mark.parametrize("batch", [8, 32, 128])
@pytest.mark.parametrize(("signal_sq", "trace"), [(4.0, 400.0), (1.0, 20.0), (0.01, 5.0)])
def test_enough_steps_come_within_ten_percent(batch, signal_sq, trace):
    seen = estimated(batch, signal_sq, trace, num_steps=2500, seed=1, decay=0.9995)
    assert seen.value == pytest.approx(trace / signal_sq, rel=0.1)
    assert seen.num_samples == 2500
    assert seen.step == 2499


@pytest.mark.parametrize("batch", [16, 64])
def test_interval_holds_the_truth_nearly_always_and_is_no_wider_than_needed(batch):
    seen = [estimated(batch, 4.0, 400.0, num_steps=120, seed=seed) for seed in range(60)]
    covered = sum(s.low <= 100.0 <= s.high for s in seen)
    assert covered >= 52  # 95 % of 60 is 57; fewer than 52 has a chance below 1 % at 95 %
    widths = [s.high - s.low for s in seen]
    errors = [abs(s.value - 100.0) for s in seen]
    assert np.mean(widths) < 8 * np.mean(errors)  # for a normal law with exact intervals it is 4.9


def test_old_steps_are_forgotten():
    rng = np.random.default_rng(3)
    estimator = NoiseEstimator(decay=0.9)
    for samples in gradients(32, 4.0, 40.0, 100, rng):
        estimator = estimator.observe(samples)
    assert estimator.estimate().value == pytest.approx(10.0, rel=0.25)
    for samples in gradients(32, 4.0, 4000.0, 100, rng):
        estimator = estimator.observe(samples)
    assert estimator.estimate().value == pytest.approx(1000.0, rel=0.25)


def test_memory_is_that_of_the_decay():
    estimator = NoiseEstimator(decay=0.5)
    for step, trace in enumerate((0.0, 0.0, 8.0)):
        estimator = estimator.observe([norms(signal=1.0, trace=trace, step=step)])
    assert estimator.estimate().value == pytest.approx(8.0 * 0.5 / 0.875)


def norms(signal: float, trace: float, small: int = 8, large: int = 32, step: int = 0) -> NormSample:
    """The sample whose unbiased pair is exactly (signal, trace)."""
    return NormSample(0, step, signal + trace / small, signal + trace / large, small, large)


@pytest.mark.parametrize(("signal", "trace"), [(1.0, 4.0), (0.0, 3.0), (2.5, 0.0), (-1.0, 20.0)])
def test_pair_inverts_what_batches_do_to_norms(signal, trace):
    s = norms(signal, trace)
    assert unbiased_pair(s.local_sq, s.averaged_sq, 8, 32) == pytest.approx((signal, trace))


@pytest.mark.parametrize(("small", "large"), [(0, 8), (8, 8), (16, 8), (-1, 8)])
def test_pair_needs_two_batches_in_order(small, large):
    with pytest.raises(ValueError, match="0 < small < large"):
        unbiased_pair(1.0, 1.0, small, large)


def test_noise_that_drowns_the_signal_is_infinite():
    seen = NoiseEstimator().observe([norms(signal=-0.5, trace=40.0)]).estimate()
    assert (seen.value, seen.low, seen.high) == (math.inf, 0.0, math.inf)


def test_no_noise_is_zero():
    seen = NoiseEstimator().observe([norms(signal=1.0, trace=-0.5)]).estimate()
    assert (seen.value, seen.low, seen.high) == (0.0, 0.0, math.inf)


def test_two_steps_make_no_interval_but_three_do():
    estimator = NoiseEstimator()
    for step, trace in enumerate((4.0, 5.0)):
        estimator = estimator.observe([norms(1.0, trace, step=step)])
    assert (estimator.estimate().low, estimator.estimate().high) == (0.0, math.inf)
    seen = estimator.observe([norms(1.0, 6.0, step=2)]).estimate()
    assert 0.0 < seen.low < seen.value < seen.high < math.inf


def test_the_ranks_own_norms_are_averaged():
    a, b = norms(1.0, 2.0), norms(1.0, 6.0)
    mixed = [a, NormSample(1, 0, b.local_sq, a.averaged_sq, 8, 32)]
    mean = NormSample(0, 0, (a.local_sq + b.local_sq) / 2, a.averaged_sq, 8, 32)
    assert NoiseEstimator().observe(mixed) == NoiseEstimator().observe([mean])


@pytest.mark.parametrize(
    "bad",
    [
        NormSample(0, 1, math.nan, 1.0, 8, 32),
        NormSample(0, 1, 1.0, math.inf, 8, 32),
        NormSample(0, 1, 1.0, 1.0, 8, 8),
        NormSample(0, 1, 1.0, 1.0, 0, 8),
    ],
)
def test_a_sample_that_says_nothing_changes_nothing(bad):
    estimator = NoiseEstimator().observe([norms(1.0, 4.0)])
    assert estimator.observe([bad]) == estimator


def test_nothing_observed_is_an_error():
    with pytest.raises(ValueError, match="no gradient norms"):
        NoiseEstimator().estimate()


@pytest.mark.parametrize("decay", [1.0, -0.01, 1.5])
def test_decay_must_forget_something(decay):
    with pytest.raises(ValueError, match="decay"):
        NoiseEstimator(decay=decay)
