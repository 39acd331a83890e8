"""What every Forecaster promises. A new forecaster is one line in `FORECASTERS`."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.predict.forecast import Ewma, Forecaster, LastValue
from paceline.types import Forecast, StepTiming

FORECASTERS: list[Forecaster[Any]] = [
    LastValue(),
    LastValue(num_steps=1),
    LastValue(num_steps=5),
    Ewma(),
    Ewma(decay=0.0),
    Ewma(decay=0.95, jump_ratio=0.2, num_jump=1),
]
AS_BUILT: list[Forecaster[Any]] = [LastValue(), Ewma()]  # these also follow a jump within three steps

every_forecaster = pytest.mark.parametrize("forecaster", FORECASTERS, ids=repr)
OWN_S = st.floats(1e-4, 100.0)
STEPS = st.lists(st.tuples(st.integers(0, 2), OWN_S), max_size=40)  # (rank, own time)


def timing(rank: int, own_s: float) -> StepTiming:
    """A step with its time spread over phases, and a wait that no forecast may see."""
    return StepTiming(rank, 1, 0.0, data_s=own_s / 2, backward_s=own_s / 2, wait_s=7.0)


def after(forecaster: Forecaster[Any], steps: list[tuple[int, float]], ranks: int = 3) -> Any:
    """The state after these steps."""
    state = forecaster.init(frozenset(range(ranks)))
    for rank, own_s in steps:
        state = forecaster.observe(state, timing(rank, own_s))
    return state


@every_forecaster
@given(steps=STEPS)
def test_knows_nothing_before_the_first_step_of_a_rank(forecaster, steps):
    seen = {rank for rank, _ in steps}
    state = after(forecaster, steps)
    for rank in (0, 1, 2, 9):
        assert (forecaster.forecast(state, rank) is None) == (rank not in seen)


@every_forecaster
@given(own_times=st.lists(OWN_S, min_size=1, max_size=40))
def test_forecast_lies_within_what_was_seen(forecaster, own_times):
    forecast = forecaster.forecast(after(forecaster, [(0, own) for own in own_times]), 0)
    low, high = min(own_times), max(own_times)
    assert low * (1 - 1e-9) <= forecast.mean_s <= high * (1 + 1e-9)
    assert 0.0 <= forecast.std_s <= (high - low) * (1 + 1e-9)
    assert 1 <= forecast.num_samples <= len(own_times)


@every_forecaster
@given(own_s=OWN_S, num_steps=st.integers(1, 30))
def test_constant_series_is_forecast_exactly(forecaster, own_s, num_steps):
    forecast = forecaster.forecast(after(forecaster, [(0, own_s)] * num_steps), 0)
    assert forecast.mean_s == pytest.approx(own_s, rel=1e-15, abs=0)  # to the last bit but one: a sum is divided
    assert forecast.std_s == 0.0


@every_forecaster
def test_spread_of_a_varying_series_is_not_zero(forecaster):
    forecast = forecaster.forecast(after(forecaster, [(0, own) for own in (1.0, 1.1, 1.0, 1.1, 1.0, 1.1)]), 0)
    wanted = 0.0 if forecaster in (LastValue(num_steps=1), Ewma(decay=0.0)) else 0.05
    assert forecast.std_s == pytest.approx(wanted, rel=0.2)


@every_forecaster
@given(steps=STEPS, rank=st.integers(0, 2), own_s=OWN_S)
def test_a_step_changes_the_forecast_of_its_own_rank_only(forecaster, steps, rank, own_s):
    state = after(forecaster, steps)
    new = forecaster.observe(state, timing(rank, own_s))
    for other in {0, 1, 2} - {rank}:
        assert forecaster.forecast(new, other) == forecaster.forecast(state, other)


@every_forecaster
@given(steps=STEPS)
def test_a_rank_that_joins_late_is_learned_like_any_other(forecaster, steps):
    late, known = after(forecaster, steps, ranks=0), after(forecaster, steps)
    assert [forecaster.forecast(late, rank) for rank in range(3)] == [
        forecaster.forecast(known, rank) for rank in range(3)
    ]


@every_forecaster
@given(steps=STEPS, rank=st.integers(0, 2), own_s=OWN_S)
def test_observing_is_pure_and_state_pickles(forecaster, steps, rank, own_s):
    state = after(forecaster, steps)
    before = copy.deepcopy(state)
    new = forecaster.observe(state, timing(rank, own_s))
    assert state == before
    assert forecaster.observe(before, timing(rank, own_s)) == new
    assert pickle.loads(pickle.dumps(new)) == new
    assert pickle.loads(pickle.dumps(forecaster)) == forecaster


@pytest.mark.parametrize("forecaster", AS_BUILT, ids=repr)
@given(
    level_s=st.floats(0.01, 1.0),
    ratio=st.floats(1.6, 20.0) | st.floats(0.05, 0.45),
    num_before=st.integers(1, 60),
    rng=st.integers(0, 1000).map(random.Random),
)
def test_a_jump_of_level_is_followed_within_three_steps(forecaster, level_s, ratio, num_before, rng):
    levels = [level_s] * num_before + [level_s * ratio] * 3
    steps = [level * rng.uniform(0.99, 1.01) for level in levels]
    forecast = forecaster.forecast(after(forecaster, [(0, own) for own in steps]), 0)
    assert forecast.mean_s == pytest.approx(level_s * ratio, rel=0.03)


@pytest.mark.parametrize("forecaster", AS_BUILT, ids=repr)
def test_one_hiccup_is_not_taken_for_a_new_level(forecaster):
    steps = [(0, 0.05)] * 20 + [(0, 1.0)] + [(0, 0.05)] * 5
    assert forecaster.forecast(after(forecaster, steps), 0).mean_s < 0.15


@pytest.mark.parametrize(
    "build",
    [
        lambda: LastValue(num_steps=0),
        lambda: Ewma(decay=1.0),
        lambda: Ewma(decay=-0.1),
        lambda: Ewma(jump_ratio=0.0),
        lambda: Ewma(num_jump=0),
    ],
)
def test_a_bad_configuration_cannot_be_built(build):
    with pytest.raises(ValueError, match="got"):
        build()


def test_ewma_is_a_plain_mean_until_its_window_is_full():
    forecaster = Ewma(decay=0.8)
    means = [
        forecaster.forecast(after(forecaster, [(0, own) for own in (1.0, 1.2, 1.4, 1.0, 1.4)[:n]]), 0).mean_s
        for n in range(1, 6)
    ]
    assert means == pytest.approx([1.0, 1.1, 1.2, 1.15, 1.2])


def test_ewma_moves_by_its_decay_once_its_window_is_full():
    forecaster = Ewma(decay=0.8, jump_ratio=10.0)
    state = after(forecaster, [(0, 1.0)] * 30 + [(0, 2.0)])
    assert forecaster.forecast(state, 0) == Forecast(pytest.approx(1.2), pytest.approx(0.4), 31)


def test_ewma_steps_off_on_both_sides_are_no_jump():
    forecaster = Ewma()
    state = after(forecaster, [(0, 1.0)] * 10 + [(0, 2.0), (0, 0.2), (0, 2.0)])
    assert forecaster.forecast(state, 0).num_samples == 13
