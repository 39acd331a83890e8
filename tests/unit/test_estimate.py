"""The factors of time to accuracy: the published numbers, and what any of them must obey."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.estimate import (
    grouped_time_s,
    kasync_interval_linear_s,
    kasync_interval_s,
    lr_scale,
    progress,
    updates_needed,
)

# STAR, section c of our specification: ResNet-56 tables at epoch 0, batch 1024.
TIMES_MS = (100, 105, 110, 115, 120, 150, 200, 400)
NOISE, BATCH = 1389.5845, 128
SIMULATED = (16.72, 36.01, 57.69, 85.50, 107.52, 117.53, 166.70, 400)
LINEAR = (16.72, 23.11, 29.50, 35.88, 42.27, 80.60, 144.48, 400)


def times_to_progress(interval) -> list[float]:
    """T(x) = t(x) n(x B) for x = 1..8."""
    return [interval(x) * updates_needed(x * BATCH, NOISE) for x in range(1, 9)]


def argmin(values: list[float]) -> int:
    """Which x, counted from 1."""
    return 1 + values.index(min(values))


@pytest.mark.parametrize(("x", "interval"), [*enumerate(SIMULATED, start=1)])
def test_golden_simulated_intervals(x, interval):
    assert kasync_interval_s(TIMES_MS, x) == pytest.approx(interval, abs=0.006)


@pytest.mark.parametrize(("x", "interval"), [*enumerate(LINEAR, start=1)])
def test_golden_linear_intervals(x, interval):
    assert kasync_interval_linear_s(TIMES_MS, x) == pytest.approx(interval, abs=0.006)


def test_golden_choice_with_the_simulator_is_asgd():
    times = times_to_progress(lambda x: kasync_interval_s(TIMES_MS, x))
    assert argmin(times) == 1
    assert times[0] == pytest.approx(198.2, abs=0.06)
    assert times[7] == pytest.approx(942.8, abs=0.06)


def test_golden_choice_with_the_linear_form_is_four():
    times = times_to_progress(lambda x: kasync_interval_linear_s(TIMES_MS, x))
    assert argmin(times) == 4
    assert times[3] == pytest.approx(133.3, abs=0.06)


def test_golden_choice_for_all_reduce_is_five():
    times = times_to_progress(lambda x: sorted(TIMES_MS)[x - 1])
    assert argmin(times) == 5
    assert times[4] == pytest.approx(380.5, abs=0.06)


def test_golden_groups():
    groups = [TIMES_MS[:5], [150], [200], [400]]
    assert grouped_time_s(groups, BATCH, NOISE) == pytest.approx(261.6, abs=0.06)


def test_golden_warning_about_the_linear_form():
    times = [100] * 7 + [130]
    assert kasync_interval_linear_s(times, 7) == pytest.approx(12.9, abs=0.06)
    assert kasync_interval_s(times, 7) == pytest.approx(100, rel=0.02)


TIMES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8)


@given(TIMES)
def test_one_gradient_per_update_comes_at_the_sum_of_the_rates(times):
    assert kasync_interval_s(times, 1) == pytest.approx(1 / sum(1 / t for t in times))


@given(TIMES)
def test_all_gradients_per_update_come_at_the_slowest_pace(times):
    assert kasync_interval_s(times, len(times)) == pytest.approx(max(times))


@given(TIMES, st.data())
def test_waiting_for_more_gradients_never_makes_updates_more_frequent(times, data):
    x = data.draw(st.integers(1, len(times)))
    fewer = kasync_interval_s(times, max(1, x - 1), num_updates=2000)
    assert fewer <= kasync_interval_s(times, x, num_updates=2000) * 1.02


@pytest.mark.parametrize("interval", [kasync_interval_s, kasync_interval_linear_s])
@pytest.mark.parametrize("x", [0, 4, -1])
def test_x_must_name_a_number_of_ranks(interval, x):
    with pytest.raises(ValueError, match=r"x must be in 1\.\.3"):
        interval([0.1, 0.2, 0.3], x)


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="must be positive"):
        kasync_interval_s([0.1, 0.0], 1)


def test_the_linear_form_is_undefined_for_equal_times():
    with pytest.raises(ValueError, match="undefined"):
        kasync_interval_linear_s([0.1, 0.1], 1)


@pytest.mark.parametrize(("batch", "noise"), [(0, 1.0), (-1, 1.0), (8, -0.1), (8, math.nan), (math.nan, 1.0)])
def test_updates_needed_refuses_what_means_nothing(batch, noise):
    with pytest.raises(ValueError, match="got"):
        updates_needed(batch, noise)


def test_with_infinite_noise_only_the_number_of_samples_counts():
    assert updates_needed(64, math.inf) / updates_needed(128, math.inf) == pytest.approx(2.0)


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 1e6))
def test_a_larger_batch_never_needs_more_updates_nor_fewer_than_its_share(small, factor, noise):
    few, many = updates_needed(small * factor, noise), updates_needed(small, noise)
    assert few <= many <= few * factor * (1 + 1e-9)


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=4), st.floats(0, 1e6))
def test_one_more_group_never_slows_progress(groups, noise):
    rest = grouped_time_s(groups[1:], 32, noise) if len(groups) > 1 else math.inf
    alone = max(groups[0]) * updates_needed(32 * len(groups[0]), noise)
    assert grouped_time_s(groups, 32, noise) == pytest.approx(1 / (1 / rest + 1 / alone))


@pytest.mark.parametrize(
    ("rule", "batch", "scale"),
    [("linear", 96, 0.75), ("linear", 128, 1.0), ("sqrt", 32, 0.5), ("sqrt", 512, 2.0), ("none", 7, 1.0)],
)
def test_learning_rate_follows_the_batch(rule, batch, scale):
    assert lr_scale(rule, batch, 128) == scale


SIZES = st.floats(1, 1e5)
SCALES = st.one_of(st.just(0.0), st.floats(0.1, 1e6), st.just(math.inf))


def test_golden_adascale_gain():
    # (1 + 1389.5845 / 1024) / (1 + 1389.5845 / 512): half the batch of STAR's tables is worth 63 % of the progress
    assert lr_scale("adascale", 512, 1024, NOISE) == pytest.approx(0.634625, abs=1e-6)
    assert lr_scale("adascale", 1024, 1024, NOISE) == 1.0


@given(SIZES, SIZES, SCALES)
def test_adascale_lies_between_no_rule_and_the_linear_one(batch, reference, noise):
    linear, none = batch / reference, 1.0
    low, high = min(linear, none), max(linear, none)
    assert low * (1 - 1e-9) <= lr_scale("adascale", batch, reference, noise) <= high * (1 + 1e-9)


@given(SIZES, SIZES, SIZES, SCALES)
def test_adascale_never_gives_a_larger_batch_less(batch, reference, more, noise):
    assert lr_scale("adascale", batch + more, reference, noise) >= lr_scale("adascale", batch, reference, noise)


@given(SIZES, SIZES)
def test_adascale_is_the_linear_rule_where_all_is_noise_and_no_rule_where_nothing_is(batch, reference):
    # an infinite noise scale counts as 1e9 samples: against batches of 1e5 that is infinite up to 1e-4
    assert lr_scale("adascale", batch, reference, math.inf) == pytest.approx(batch / reference, rel=2e-4)
    assert lr_scale("adascale", batch, reference, 0.0) == 1.0


@given(SIZES, SIZES)
def test_adascale_is_the_linear_rule_while_the_noise_is_unknown(batch, reference):
    assert lr_scale("adascale", batch, reference) == lr_scale("linear", batch, reference)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
def test_only_adascale_asks_for_the_noise(rule):
    assert lr_scale(rule, 96, 128, noise_scale=7.0) == lr_scale(rule, 96, 128)


@pytest.mark.parametrize(
    ("rule", "batch", "reference"),
    [("linear", 0, 1), ("sqrt", 1, 0), ("adascale", -1, 1), ("none", math.nan, 1), ("cubic", 1, 1)],
)
def test_learning_rate_refuses_what_it_does_not_know(rule, batch, reference):
    with pytest.raises(ValueError, match=r"got|unknown"):
        lr_scale(rule, batch, reference)


# The progress of an update


@given(
    rule=st.sampled_from(["linear", "sqrt", "none", "adascale"]), batch=st.integers(1, 4096), noise=st.floats(0, 1e6)
)
def test_progress_is_never_more_than_the_rate_gives_nor_than_the_noise_allows(rule, batch, noise):
    made = progress(rule, batch, 128, noise)
    assert made == min(lr_scale(rule, batch, 128, noise), updates_needed(128, noise) / updates_needed(batch, noise))
    assert progress(rule, 128, 128, noise) == 1.0


@given(rule=st.sampled_from(["linear", "sqrt", "none", "adascale"]), parts=st.integers(2, 64))
def test_where_noise_is_all_cutting_an_update_up_makes_no_more_progress(rule, parts):
    assert parts * progress(rule, 128 / parts, 128, 1e9) <= 1.0 + 1e-6
