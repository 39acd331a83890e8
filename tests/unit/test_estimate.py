"""Time to accuracy: the published numbers, and what any estimate must obey."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.estimate import (
    Conditions,
    estimate,
    grouped_time_s,
    kasync_interval_linear_s,
    kasync_interval_s,
    lr_scale,
    updates_needed,
)
from paceline.policy.barrier import BSP
from paceline.policy.ring import AttachedRing

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


def test_golden_all_reduce_is_what_we_estimate_when_attached_ranks_do_not_count():
    times = dict(enumerate(TIMES_MS))
    for x in range(1, 8):
        ring = AttachedRing(tuple(range(x)), dict.fromkeys(range(x, 8), 0), max_staleness=0)
        got = estimate(ring, Conditions(times, 0.0, BATCH, NOISE))
        wanted = TIMES_MS[x - 1] * updates_needed(x * BATCH, NOISE)
        assert got.time_to_accuracy_s == pytest.approx(wanted)
    bsp = estimate(BSP(), Conditions(times, 0.0, BATCH, NOISE))
    assert bsp.time_to_accuracy_s == pytest.approx(942.8, abs=0.06)


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


def given_times(*own: float, comm: float = 0.0, noise: float = 60.0, cost: float = 0.1) -> Conditions:
    return Conditions(dict(enumerate(own)), comm, 32, noise, cost)


@given(
    own=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8),
    slower=st.floats(1.0, 10.0),
    comm=st.floats(0.0, 0.1),
    noise=st.floats(0, 1e6),
)
def test_bsp_costs_more_the_slower_its_slowest_rank(own, slower, comm, noise):
    slowest = max(own)
    now = estimate(BSP(), given_times(*own, comm=comm, noise=noise))
    later = estimate(BSP(), given_times(*own[:-1], slowest * slower, comm=comm, noise=noise))
    assert now.interval_s == slowest + comm
    assert now.batch_samples == 32 * len(own)
    assert now.mean_staleness == 0.0
    assert later.time_to_accuracy_s >= now.time_to_accuracy_s
    assert later.time_to_accuracy_s == pytest.approx(
        now.time_to_accuracy_s * (slowest * slower + comm) / (slowest + comm)
    )


@given(slow=st.floats(0.05, 0.7), low=st.floats(0, 2), more=st.floats(0, 2), comm=st.floats(0, 0.1))
def test_staleness_never_comes_cheaper(slow, low, more, comm):
    ring = AttachedRing((0, 1, 3), {2: 0})
    cheap = estimate(ring, given_times(0.05, 0.05, slow, 0.05, comm=comm, cost=low))
    dear = estimate(ring, given_times(0.05, 0.05, slow, 0.05, comm=comm, cost=low + more))
    assert dear.mean_staleness == cheap.mean_staleness > 0
    assert dear.time_to_accuracy_s >= cheap.time_to_accuracy_s
    assert cheap.time_to_accuracy_s == pytest.approx(
        cheap.interval_s * updates_needed(cheap.batch_samples, 60.0) * (1 + low * cheap.mean_staleness)
    )


@pytest.mark.parametrize(
    ("slow", "comm", "every"),
    [
        (0.05, 0.0, 2),  # just as fast: what it has sent waits for an update to take it in
        (0.05, 0.05, 1.5),
        (0.25, 0.0, 6),
        (0.25, 0.05, 3.5),
        (0.025, 0.0, 1.5),
    ],
)
def test_an_attached_rank_joins_every_kth_update(slow, comm, every):
    got = estimate(AttachedRing((0, 1, 3), {2: 0}), given_times(0.05, 0.05, slow, 0.05, comm=comm))
    share = 3 + 1 / every
    assert got.interval_s == pytest.approx(0.05 + comm)
    assert got.batch_samples == pytest.approx(32 * share)
    assert got.mean_staleness == pytest.approx((every - 1) / every / share)


def test_the_interval_is_that_of_the_slowest_ring_member():
    got = estimate(AttachedRing((0, 1), {2: 0, 3: 1}), given_times(0.05, 0.08, 0.25, 0.5, comm=0.01))
    assert got.interval_s == pytest.approx(0.09)


def test_a_gradient_beyond_the_bound_does_not_count():
    given = given_times(0.05, 0.05, 0.26, 0.05)
    within = estimate(AttachedRing((0, 1, 3), {2: 0}, max_staleness=6), given)
    beyond = estimate(AttachedRing((0, 1, 3), {2: 0}, max_staleness=5), given)
    assert within.batch_samples == pytest.approx(32 * (3 + 1 / 6.2))
    assert (beyond.batch_samples, beyond.mean_staleness) == (96, 0.0)


@pytest.mark.parametrize(
    ("rule", "batch", "scale"),
    [("linear", 96, 0.75), ("linear", 128, 1.0), ("sqrt", 32, 0.5), ("sqrt", 512, 2.0), ("none", 7, 1.0)],
)
def test_learning_rate_follows_the_batch(rule, batch, scale):
    assert lr_scale(rule, batch, 128) == scale


@pytest.mark.parametrize(("rule", "batch", "reference"), [("linear", 0, 1), ("sqrt", 1, 0), ("cubic", 1, 1)])
def test_learning_rate_refuses_what_it_does_not_know(rule, batch, reference):
    with pytest.raises(ValueError, match=r"got|unknown"):
        lr_scale(rule, batch, reference)
