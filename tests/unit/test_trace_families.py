"""Synthetic stragglers: the same question has the same answer, and each family is what it says it is."""

from __future__ import annotations

import math
import pickle
from itertools import groupby, pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim import chance, draws
from paceline.sim.families import (
    FAMILIES,
    Calm,
    Constant,
    Drifting,
    Episodes,
    Heterogeneous,
    Markov,
    Pareto,
    Rotating,
    ShiftedExponential,
    Throttled,
)

every_family = pytest.mark.parametrize("kind", FAMILIES)
SEED = st.integers(0, 2**64 - 1)
QUESTION = st.tuples(st.integers(0, 7), st.integers(0, 10**6), st.floats(0, 1e6))


def forget_all() -> None:
    """Empty the caches: what comes next is drawn anew."""
    for cached in (draws._uniforms, draws._normals, draws.permutation, chance._switches, chance._episodes):
        cached.cache_clear()


# What all promise


@every_family
@given(seed=SEED, questions=st.lists(QUESTION, min_size=1, max_size=20))
def test_the_same_question_has_the_same_answer_in_any_order(kind, seed, questions):
    trace = FAMILIES[kind](num_ranks=8, seed=seed)
    answers = {question: trace.slowdown(*question) for question in questions}
    forget_all()
    again = FAMILIES[kind](num_ranks=8, seed=seed)
    assert {question: again.slowdown(*question) for question in reversed(questions)} == answers
    assert pickle.loads(pickle.dumps(trace)) == again


@every_family
@given(seed=SEED, question=QUESTION)
def test_a_slowdown_is_a_float_of_at_least_one_but_for_noise(kind, seed, question):
    trace = FAMILIES[kind](num_ranks=8, seed=seed)
    factor, slowdown = trace.factor(*question), trace.slowdown(*question)
    assert type(factor) is float
    assert type(slowdown) is float
    assert 1.0 <= factor < math.inf
    assert factor * math.exp(-8 * trace.jitter) <= slowdown <= factor * math.exp(8 * trace.jitter)


@every_family
def test_seeds_and_ranks_and_steps_differ(kind):
    one, other = FAMILIES[kind](num_ranks=8, seed=1), FAMILIES[kind](num_ranks=8, seed=2)
    questions = [(rank, step, 7.0 * step) for rank in range(8) for step in range(600)]
    assert one != other
    assert sum(one.slowdown(*q) == other.slowdown(*q) for q in questions) < 5
    assert len({one.slowdown(*q) for q in questions}) > len(questions) - 5  # no number is drawn twice


@every_family
def test_it_says_what_it_is(kind):
    trace = FAMILIES[kind](num_ranks=8)
    assert trace.num_ranks == 8
    assert trace.name.startswith(kind)
    assert not set(trace.name) & set(" \t\n")
    assert trace.has_stragglers is (kind != "calm")


@every_family
@pytest.mark.parametrize("wrong", [{"num_ranks": 0}, {"seed": -1}, {"seed": 2**64}, {"jitter": -0.1}, {"jitter": 1.0}])
def test_every_family_refuses_what_cannot_be(kind, wrong):
    with pytest.raises(ValueError, match=r"wanted .*, got"):
        FAMILIES[kind](**{"num_ranks": 4, **wrong})


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Constant, {"rank": 4}),
        (Constant, {"rank": -1}),
        (Constant, {"slow_factor": 1.0}),
        (Heterogeneous, {"class_factors": (2.0,)}),
        (Heterogeneous, {"class_factors": (0.5, 1.0)}),
        (Throttled, {"rank": 4}),
        (Throttled, {"slow_factor": 0.1}),
        (Throttled, {"period_s": 0.0}),
        (Rotating, {"slow_factor": 1.0}),
        (Rotating, {"turn_s": None}),
        (Rotating, {"turn_steps": 3}),
        (Rotating, {"turn_s": 0.0}),
        (Rotating, {"turn_s": None, "turn_steps": 0}),
        (Drifting, {"rank": 4}),
        (Drifting, {"slow_factor": 1.0}),
        (Drifting, {"start_s": -1.0}),
        (Drifting, {"ramp_s": 0.0}),
        (ShiftedExponential, {"mean_excess": 0.0}),
        (Pareto, {"tail": 1.0}),
        (Pareto, {"limit": 1.0}),
        (Markov, {"slow_factor": 1.0}),
        (Markov, {"mean_slow_s": 0.0}),
        (Markov, {"mean_fast_s": -1.0}),
        (Episodes, {"ranks_per_host": 0}),
        (Episodes, {"mean_gap_s": 0.0}),
        (Episodes, {"longest_s": 0.0}),
        (Episodes, {"least_factor": 1.0}),
        (Episodes, {"least_factor": 5.0}),
    ],
)
def test_a_field_out_of_range_is_refused(kind, wrong):
    with pytest.raises(ValueError, match=r"wanted .*, got"):
        kind(num_ranks=4, **wrong)


# What each is


def test_calm_is_calm():
    logs = [math.log(Calm(8, jitter=0.02).slowdown(rank, step, 0.0)) for rank in range(8) for step in range(2000)]
    assert fmean(logs) == pytest.approx(0.0, abs=0.001)
    assert math.sqrt(fmean(x * x for x in logs)) == pytest.approx(0.02, rel=0.03)


def test_noise_of_one_rank_says_nothing_about_another_or_the_next_step():
    rows = [[math.log(Calm(4).slowdown(rank, step, 0.0)) for step in range(5000)] for rank in range(2)]
    power = fmean(x * x for x in rows[0])
    assert fmean(a * b for a, b in zip(*rows, strict=True)) / power == pytest.approx(0.0, abs=0.05)
    assert fmean(a * b for a, b in pairwise(rows[0])) / power == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("num_ranks", [3, 7, 8, 64])
def test_classes_are_of_equal_size(num_ranks):
    trace = Heterogeneous(num_ranks, class_factors=(1.0, 2.0, 4.0), seed=5)
    factors = [trace.factor(rank, 0, 0.0) for rank in range(num_ranks)]
    sizes = [factors.count(factor) for factor in (1.0, 2.0, 4.0)]
    assert sum(sizes) == num_ranks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_the_turn_goes_round_and_everybody_has_one(num_ranks):
    trace = Rotating(num_ranks, turn_s=5.0, seed=3)
    whose = [[r for r in range(num_ranks) if trace.factor(r, 0, 5.0 * turn + 4.9) > 1] for turn in range(6 * num_ranks)]
    assert all(len(ranks) == 1 for ranks in whose)
    for first in range(0, 6 * num_ranks, num_ranks):
        assert sorted(rank for (rank,) in whose[first : first + num_ranks]) == list(range(num_ranks))


def test_every_round_has_an_order_of_its_own():
    trace = Rotating(8, turn_s=None, turn_steps=1, seed=3)
    whose = [next(r for r in range(8) if trace.factor(r, step, 0.0) > 1) for step in range(48)]
    assert len({tuple(whose[first : first + 8]) for first in range(0, 48, 8)}) == 6


def test_drifting_never_gets_faster_and_leaves_the_others_alone():
    trace = Drifting(4, rank=2, slow_factor=5.0, start_s=50.0, ramp_s=100.0)
    factors = [trace.factor(2, 0, float(now)) for now in range(0, 300, 5)]
    assert factors == sorted(factors)
    assert (factors[10], factors[20], factors[-1]) == (1.0, 3.0, 5.0)
    assert trace.factor(1, 0, 1000.0) == 1.0


def test_throttling_hits_one_rank_only():
    trace = Throttled(4, rank=3)
    assert [trace.factor(rank, 0, 90.0) for rank in range(4)] == [1.0, 1.0, 1.0, 10.0]


def test_exponential_has_its_mean_and_no_memory():
    trace = ShiftedExponential(8, mean_excess=0.5, seed=4)
    excess = [trace.slowdown(rank, step, 0.0) - 1.0 for rank in range(8) for step in range(4000)]
    assert fmean(excess) == pytest.approx(0.5, rel=0.02)
    later = [x - 0.5 for x in excess if x > 0.5]
    assert fmean(later) == pytest.approx(0.5, rel=0.04)


def test_pareto_has_its_tail():
    trace = Pareto(8, tail=2.0, limit=50.0, seed=4)
    factors = [trace.slowdown(rank, step, 0.0) for rank in range(8) for step in range(5000)]
    for level in (2.0, 5.0):
        assert fmean(factor > level for factor in factors) == pytest.approx(level**-2.0, rel=0.06)
    assert max(factors) <= 50.0
    assert max(Pareto(8, tail=1.1, limit=3.0).slowdown(0, step, 0.0) for step in range(500)) == 3.0


def test_markov_stretches_have_their_mean_lengths():
    trace = Markov(2, slow_factor=4.0, mean_slow_s=10.0, mean_fast_s=30.0, seed=9)
    level = [trace.factor(1, 0, 0.25 * i) for i in range(400_000)]
    assert set(level) == {1.0, 4.0}
    runs = [(factor, 0.25 * sum(1 for _ in run)) for factor, run in groupby(level)]
    assert fmean(seconds for factor, seconds in runs if factor == 4.0) == pytest.approx(10.0, rel=0.07)
    assert fmean(seconds for factor, seconds in runs if factor == 1.0) == pytest.approx(30.0, rel=0.07)
    # Frames are seamless: no more switches near their borders than elsewhere.
    frame_s = 64 * 10.0 * 30.0 / 40.0
    switches = [0.25 * i for i in range(1, len(level)) if level[i] != level[i - 1]]
    near = sum(min(s % frame_s, frame_s - s % frame_s) < 0.05 * frame_s for s in switches)
    assert near / len(switches) == pytest.approx(0.1, abs=0.02)


def test_markov_is_stationary_from_the_start_and_ranks_are_on_their_own():
    traces = [Markov(4, slow_factor=4.0, seed=seed) for seed in range(1500)]
    first = [trace.factor(0, 0, 0.0) > 1 for trace in traces]
    second = [trace.factor(1, 0, 0.0) > 1 for trace in traces]
    assert fmean(first) == pytest.approx(0.25, abs=0.04)
    assert fmean(a and b for a, b in zip(first, second, strict=True)) == pytest.approx(0.0625, abs=0.02)


def test_episodes_are_as_long_and_as_frequent_as_they_say():
    trace = Episodes(64, mean_gap_s=20_000.0, mean_length_s=600.0, longest_s=6000.0, seed=2)
    level = {rank: [trace.factor(rank, 0, 20.0 * i) for i in range(5000)] for rank in range(64)}
    runs = [
        (factor, 20.0 * sum(1 for _ in run)) for row in level.values() for factor, run in groupby(row) if factor > 1
    ]
    assert fmean(seconds for _, seconds in runs) == pytest.approx(600.0, rel=0.15)
    assert len(runs) == pytest.approx(64 * 100_000 / 20_000, rel=0.15)
    assert all(1.5 <= factor <= 4.0 for factor, _ in runs)
    assert max(seconds for _, seconds in runs) <= 6020.0
    assert fmean(factor for factor, _ in runs) == pytest.approx(2.75, rel=0.06)


def test_an_episode_goes_on_over_the_border_of_its_frame():
    trace = Episodes(16, mean_gap_s=20_000.0, mean_length_s=1e9, longest_s=1000.0, seed=2)  # all are cut at the longest
    rows = ([trace.factor(rank, 0, 10.0 * i) > 1 for i in range(10_000)] for rank in range(16))
    lengths = [10.0 * sum(run) for row in rows for is_slow, run in groupby(row) if is_slow]
    assert len(lengths) > 30
    assert all(seconds >= 990.0 for seconds in lengths)


def test_a_run_begins_before_any_episode():
    assert all(Episodes(64, mean_gap_s=60.0, seed=seed).factor(0, 0, 0.0) == 1.0 for seed in range(20))


def test_an_episode_hits_a_whole_host():
    trace = Episodes(8, ranks_per_host=4, mean_gap_s=900.0, seed=1)
    hosts = {tuple(trace.factor(rank, 0, 50.0 * i) for i in range(400)) for rank in range(8)}
    assert len(hosts) == 2


def test_where_episodes_overlap_the_largest_holds():
    busy = Episodes(1, mean_gap_s=100.0, mean_length_s=600.0, seed=1)
    calm = Episodes(1, mean_gap_s=1e5, mean_length_s=600.0, seed=1)
    assert fmean(busy.factor(0, 0, 3600.0 + 10.0 * i) for i in range(500)) > 3.0
    assert fmean(calm.factor(0, 0, 3600.0 + 10.0 * i) for i in range(500)) < 1.5
