"""Layout, costs and requests for schedules by example; their promises are in tests/contract/test_schedules.py."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collective.classic import direct, halving_doubling, ring, tree
from paceline.collective.cost import (
    cost_s,
    critical_delay_s,
    early_cost_s,
    gain_s,
    late_rounds,
    split_bytes,
    tuned_num_chunks,
)
from paceline.collective.explain import build, facts, lower_bound_rounds
from paceline.collective.late import around, around_many, around_one
from paceline.collective.schedule import ListedSchedule, Step, chunk_range
from paceline.collective.spread import SpreadRound
from paceline.errors import ConfigError, ScheduleError

GIB = 2**30
ALPHA, BETA = 3e-6, 1 / (450 * GIB)

# Layout


def test_shards_first_then_their_chunks():
    where = [chunk_range(3, 7, range(c, c + 1), 100) for c in range(7)]
    assert where == [(0, 11), (33, 49), (66, 83), (11, 22), (49, 66), (83, 100), (22, 33)]


def test_a_buffer_of_no_length_has_empty_chunks():
    assert {around_one(5, 0, 8).chunk_range(c, 0) for c in range(12)} == {(0, 0)}


def test_less_elements_than_chunks():
    lengths = [stop - start for start, stop in (around_one(5, 0, 8).chunk_range(c, 3) for c in range(8))]
    assert sum(lengths) == 3
    assert set(lengths) == {0, 1}


@pytest.mark.parametrize("schedule", [ring(4), around_one(5, 0, 8), around_one(5, 0, 4)])
def test_there_is_no_chunk_beyond_the_last_block_nor_before_the_first(schedule):
    last = schedule.num_chunks + len(schedule.blocks) - 1
    schedule.chunk_range(last, 10)
    for chunk in (-1, last + 1):
        with pytest.raises(ScheduleError, match=f"chunk must be in 0..{last}, got {chunk}"):
            schedule.chunk_range(chunk, 10)
    with pytest.raises(ScheduleError, match="-1 elements"):
        schedule.chunk_range(0, -1)


# What cannot be built


@pytest.mark.parametrize("build_classic", [ring, halving_doubling, tree, direct])
@pytest.mark.parametrize("n", [1, 0, -1])
def test_a_collective_needs_two_ranks(build_classic, n):
    with pytest.raises(ScheduleError, match=f"at least 2 ranks, got {n}"):
        build_classic(n)


@pytest.mark.parametrize(("n", "late", "k"), [(1, 0, 1), (4, 4, 1), (4, -1, 1), (4, 0, 0), (2, 0, -3)])
def test_one_late_rank_out_of_range(n, late, k):
    with pytest.raises(ScheduleError, match="want num_ranks >= 2"):
        around_one(n, late, k)


@pytest.mark.parametrize(
    ("n", "late", "k"), [(1, (0,), 1), (4, (0, 0), 1), (4, (4,), 1), (4, (), 1), (3, (0, 1, 2), 1), (4, (0, 1), 0)]
)
def test_several_late_ranks_out_of_range(n, late, k):
    with pytest.raises(ScheduleError, match="want num_ranks >= 2"):
        around_many(n, late, k)


def test_a_listed_schedule_checks_itself():
    for n, k, shards, what in ((1, 1, 1, "2 ranks"), (2, 1, 2, "num_shards"), (2, 1, 0, "num_shards")):
        with pytest.raises(ScheduleError, match=what):
            ListedSchedule("none", n, k, shards, ())


def test_errors_are_errors_of_configuration():
    with pytest.raises(ConfigError):
        ring(1)


# Which schedule


def test_nobody_late_and_too_many_late_mean_the_ring():
    assert around(6, ()) == around(6, (1, 2, 3)) == ring(6)
    assert around(6, {5, 4}).late == (4, 5)
    assert around(6, [3]).late == (3,)
    assert around(2, [1]).name == "late"
    with pytest.raises(ScheduleError, match="different late ranks"):
        around(6, (1, 1))
    with pytest.raises(ScheduleError, match="different late ranks"):
        around(6, (6,))


def test_chunks_by_default():
    assert around(8, (2,)).num_chunks == 7
    assert around(8, (2, 3)).num_chunks == 24
    assert around(8, (2,), 9).num_chunks == 9


def test_schedules_are_cached_compare_and_hash_by_what_they_are():
    assert around_one(9, 3, 16) is around_one(9, 3, 16)
    assert around_one(9, 3, 16) == around_one.__wrapped__(9, 3, 16)
    assert len({around_one(9, 3, 16), around_one.__wrapped__(9, 3, 16), around_one(9, 4, 16)}) == 2


@pytest.mark.parametrize(
    ("algorithm", "late", "chunks", "what"),
    [
        ("star", (), None, "algorithm must be one of"),
        ("ring", (1,), None, "ring has no late ranks"),
        ("tree", (), 7, "cuts 1 chunks"),
        ("late", (9,), None, "late=9"),
        ("late", (1, 9), None, "late="),
        ("late", (1,), 0, "num_chunks=0"),
        ("late", (1, 2), 0, "num_chunks=0"),
    ],
)
def test_requests_that_make_no_sense(algorithm, late, chunks, what):
    with pytest.raises(ScheduleError, match=what):
        build(algorithm, 8, late, chunks)


def test_requests_by_name():
    assert build("ring", 8, (), 8) == ring(8)
    assert build("halving", 8) == halving_doubling(8)
    assert build("late", 8, (2, 1)).late == (1, 2)
    with pytest.raises(ScheduleError, match="at least 2 ranks"):
        build("late", 1)


def test_bounds():
    assert lower_bound_rounds(ring(6)) == ring(6).num_rounds
    assert lower_bound_rounds(direct(6)) == 10
    assert lower_bound_rounds(tree(6)) == 3
    assert lower_bound_rounds(around_many(8, (0, 1), 24)) == 27


def test_facts_tell_when_a_schedule_is_wrong():
    told = facts(ListedSchedule("idle", 2, 1, 1, ((),)), 8, 1.0, 1.0)
    assert told["verified"] is False
    assert "lacks the contribution" in told["violation"]
    assert told["cost_s"] == 0


# Costs


PUBLISHED = [  # ranks, ring ms, K = m: ms, speed-up, D* ms, tuned K, ms, speed-up, D* ms
    (4, 3.35, 2.98, 1.13, 1.11, 27, 2.39, 1.40, 0.53),
    (5, 3.58, 3.35, 1.07, 1.45, 40, 2.46, 1.46, 0.56),
    (6, 3.73, 3.13, 1.19, 1.19, 40, 2.46, 1.52, 0.52),
    (8, 3.93, 2.88, 1.36, 0.88, 35, 2.46, 1.60, 0.45),
    (16, 4.26, 2.72, 1.57, 0.58, 45, 2.51, 1.69, 0.37),
    (32, 4.49, 2.61, 1.72, 0.36, 62, 2.56, 1.75, 0.31),
    (64, 4.75, 2.60, 1.83, 0.22, 63, 2.60, 1.83, 0.22),
    (256, 5.96, 3.07, 1.94, 0.09, 255, 3.07, 1.94, 0.09),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]}-ranks")
def test_published_times_and_speed_ups_over_the_ring(row):
    n, ring_ms, *rest = row
    tuned = tuned_num_chunks(n, GIB, ALPHA, BETA)
    assert tuned == rest[3]
    ring_s = cost_s(ring(n), GIB, ALPHA, BETA)
    assert 1e3 * ring_s == pytest.approx(ring_ms, abs=0.006)
    for k, (late_ms, speed_up, delay_ms) in ((n - 1, rest[:3]), (tuned, rest[4:])):
        late_s = cost_s(around_one(n, n - 1, k), GIB, ALPHA, BETA)
        assert 1e3 * late_s == pytest.approx(late_ms, abs=0.006)
        assert ring_s / late_s == pytest.approx(speed_up, abs=0.006)  # published from rounded times
        assert 1e3 * critical_delay_s(n, k, GIB, ALPHA, BETA) == pytest.approx(delay_ms, abs=0.006)


def test_three_ranks_are_slower_than_the_ring():
    assert cost_s(ring(3), GIB, ALPHA, BETA) / cost_s(around_one(3, 2, 2), GIB, ALPHA, BETA) == pytest.approx(
        0.89, abs=0.005
    )


@given(
    n=st.integers(2, 20),
    per_owner=st.integers(1, 4),
    gap=st.floats(-5.0, 50.0),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1e-3),
)
def test_gain_and_critical_delay_are_what_schedules_cost(n, per_owner, gap, alpha, beta):
    k = per_owner * (n - 1)
    size = 100 * k * n
    schedule = around_one(n, 0, k)
    early_s, late_s = (f(schedule, size, alpha, beta) for f in (early_cost_s, cost_s))
    ring_s = cost_s(ring(n), size, alpha, beta)
    delay_s = critical_delay_s(n, k, size, alpha, beta)
    assert delay_s == pytest.approx(early_s + late_s - ring_s, abs=1e-9)
    lateness = max(gap, 0.0)
    saved_s = (lateness + ring_s) - (max(lateness, early_s) + late_s)
    assert gain_s(gap, n, k, size, alpha, beta) == pytest.approx(saved_s, abs=1e-9)
    if n > 3:
        levels = (n - 1).bit_length()
        formula_s = (k + levels - 1 - n) * alpha + ((n - 2) / (n * (n - 1)) + (levels - 1) / k) * size * beta
        assert delay_s == pytest.approx(formula_s, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16, 33])
@pytest.mark.parametrize("size", [0, 1000, 10**6, 10**9])
def test_no_other_number_of_chunks_is_much_better_than_the_tuned_one(n, size):
    alpha, beta = 1e-5, 1e-9

    def after_arrival_s(k):
        return (k + (n - 1).bit_length() - 1) * (alpha + size * beta / k)

    tuned = tuned_num_chunks(n, size, alpha, beta)
    assert tuned % (n - 1) == 0
    best = min(after_arrival_s(i * (n - 1)) for i in range(1, 4000 // n))
    assert after_arrival_s(tuned) <= 1.02 * best


def test_split_fills_the_gap_and_no_more():
    n, size, beta = 8, 10**9, 1e-9
    for gap in (0.0, 0.01, 0.3):
        share = split_bytes(gap, n, size, beta)
        assert (n - 2) / (n - 1) * share * beta == pytest.approx(gap, abs=1e-8)
        fine = 7 * 10**6  # chunks
        gains = [gain_s(g, n, fine, share, 0.0, beta) for g in (gap, -1.0)]
        assert gains == [pytest.approx(gap * (n - 1) / n, abs=1e-6), pytest.approx(-gap / n, abs=1e-6)]
    assert split_bytes(9.9, n, size, beta) == split_bytes(math.inf, n, size, beta) == size
    assert split_bytes(-0.1, n, size, beta) == 0
    assert [split_bytes(gap, 2, size, beta) for gap in (-1, 0, 0.1)] == [0, 0, size]


def test_a_cost_counts_rounds_in_which_something_is_sent():
    assert cost_s(ring(4), 0, 1.0, 1.0) == 0
    assert cost_s(ring(4), 1, 1.0, 0.0) == 6.0  # three rounds up, three down, of one byte at least somewhere
    assert late_rounds(2, 5) == 5


@pytest.mark.parametrize(
    "call",
    [
        lambda: cost_s(ring(4), -1, 1.0, 1.0),
        lambda: early_cost_s(ring(4), 1, -1.0, 1.0),
        lambda: cost_s(ring(4), 1, 1.0, math.nan),
        lambda: tuned_num_chunks(1, 1, 1.0, 1.0),
        lambda: tuned_num_chunks(4, 1, 0.0, 1.0),
        lambda: tuned_num_chunks(4, math.inf, 1.0, 1.0),
        lambda: critical_delay_s(4, 0, 1, 1.0, 1.0),
        lambda: gain_s(math.nan, 4, 3, 1, 1.0, 1.0),
        lambda: split_bytes(0.1, 4, 1, 0.0),
        lambda: split_bytes(math.nan, 4, 1, 1.0),
        lambda: split_bytes(0.1, 1, 1, 1.0),
    ],
)
def test_numbers_that_make_no_sense(call):
    with pytest.raises(ScheduleError):
        call()


# Parts


def test_a_swap_is_told_from_other_steps():
    swaps = [step.is_swap for step in around_one(5, 4, 4).program(4)]
    assert swaps == [False] * 3 + [True] * 4 + [False] * 2
    assert not Step().is_swap
    assert not any(step.is_swap for step in ring(4).program(0))


def test_a_rank_that_another_chunk_needs_more_is_given_up():
    planned = SpreadRound(holds=[0b011, 0b001], lacks=[0b100, 0b1000])
    assert planned.add(0)
    assert planned.add(1)
    assert sorted(planned.exchanges()) == [(0, 3, 1), (1, 2, 0)]


def test_a_sender_without_a_receiver_is_not_kept():
    planned = SpreadRound(holds=[0b01, 0b01], lacks=[0b00, 0b10])
    assert [planned.add(0), planned.add(1)] == [False, True]
    assert list(planned.exchanges()) == [(0, 1, 1)]
