"""Measured traces: samples become ratios, gaps stay visible, and the end is the beginning."""

from __future__ import annotations

import math
import pickle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import TraceError
from paceline.sim.trace import Table, from_samples

SAMPLES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.floats(1e-6, 1e6)), min_size=1, max_size=60)


@given(SAMPLES, st.integers(0, 9))
def test_the_order_of_samples_does_not_matter(samples, seed):
    shuffled = Random(seed).sample(samples, len(samples))
    assert from_samples("x", shuffled).carried == from_samples("x", samples).carried
    for one, other in zip(from_samples("x", shuffled).ratios, from_samples("x", samples).ratios, strict=True):
        assert one == pytest.approx(other)


@given(SAMPLES, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(samples, factor):
    scaled = from_samples("x", [(step, rank, time * factor) for step, rank, time in samples])
    for one, other in zip(scaled.ratios, from_samples("x", samples).ratios, strict=True):
        assert one == pytest.approx(other)


@given(SAMPLES)
def test_what_is_missing_is_the_rank_s_neighbour_never_zero(samples):
    table = from_samples("x", samples)
    assert len(table.carried) == table.num_ranks * table.num_steps - len({sample[:2] for sample in samples})
    for rank, step in table.carried:
        before = [s for s in range(step) if (rank, s) not in table.carried]
        after = [s for s in range(step, table.num_steps) if (rank, s) not in table.carried]
        assert table.ratios[rank][step] == table.ratios[rank][before[-1] if before else after[0]] > 0


def test_ranks_and_steps_are_numbered_anew_in_order():
    table = from_samples("x", [(11, 8, 3.0), (1, 8, 2.0), (1, 4, 1.0), (11, 4, 1.0)])
    assert table.source_ranks == (4, 8)
    assert table.ratios == ((1.0, 1.0), (2.0, 3.0))


def test_duplicates_are_averaged():
    assert from_samples("x", [(1, 0, 1.0), (1, 1, 2.0), (1, 1, 4.0)]).ratios == ((1.0,), (3.0,))


def test_the_reference_is_what_the_fastest_rank_usually_needs():
    table = from_samples("x", [(step, rank, 2.0 + rank) for step in range(5) for rank in range(3)] + [(9, 2, 0.1)])
    assert table.reference_s == 2.0
    assert from_samples("x", [(1, 0, 476.0)], in_seconds=False).reference_s is None


def test_it_repeats_from_the_start_and_time_does_not_matter():
    table = Table("x", ((1.0, 2.0, 3.0),))
    assert [table.slowdown(0, step, 0.0) for step in range(7)] == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]
    assert table.slowdown(0, 1, 1e9) == 2.0


def test_a_sample_can_stand_for_several_steps():
    table = from_samples("x", [(1, 0, 1.0), (11, 0, 2.0), (21, 0, 1.0)], steps_per_sample=3)
    assert table.num_steps == 9
    assert [table.slowdown(0, step, 0.0) for step in range(10)] == [1.0] * 3 + [2.0] * 3 + [1.0] * 4


@pytest.mark.parametrize(
    ("ratios", "has_stragglers"),
    [
        ([[1.0]] * 8, False),
        ([[1.0]] * 7 + [[1.3]], True),
        ([[1.0, 1.0, 1.0, 1.0]] * 7 + [[1.1, 1.0, 1.1, 1.0]], False),
        ([[1.0]] * 3 + [[1.3]] * 5, True),  # most are slow, and the median rank with them
        ([[0.8]] + [[1.0]] * 7, False),  # one is fast
        ([[1.0, 9.0]] * 8, False),  # all are slow together
        ([[5.0]], False),
    ],
)
def test_whether_there_are_stragglers(ratios, has_stragglers):
    assert Table("x", tuple(map(tuple, ratios))).has_stragglers is has_stragglers


@pytest.mark.parametrize(
    "ratios", [(), ((),), ((1.0,), (1.0, 2.0)), ((0.0,),), ((-1.0,),), ((math.nan,),), ((math.inf,),)]
)
def test_what_is_no_table_is_refused(ratios):
    with pytest.raises(TraceError, match=r"^somewhere: wanted .*, got"):
        Table("somewhere", ratios)


def test_a_sample_stands_for_at_least_one_step():
    with pytest.raises(TraceError, match="at least one step per sample, got 0"):
        Table("x", ((1.0,),), steps_per_sample=0)


def test_nothing_is_no_trace():
    with pytest.raises(TraceError, match=r"^nothing\.csv: no samples"):
        from_samples("nothing.csv", [])


def test_a_table_is_a_value():
    table = from_samples("x", [(1, 0, 1.0), (2, 1, 2.0)])
    assert pickle.loads(pickle.dumps(table)) == table
    assert hash(table) == hash(from_samples("x", [(2, 1, 2.0), (1, 0, 1.0)]))
