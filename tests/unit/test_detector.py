"""Who is slow: found quickly when it is true, never claimed when it is noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.predict.detector import Detector, DetectorState, Row, carried_loss, phase_median, rows_beside
from paceline.types import StepTiming

BASE_S = 0.05
WARMUP = Detector().warmup_rows
Slowness = Callable[[int], float]  # extra seconds in a step


def noisy_rows(
    num_rows: int,
    seed: int = 0,
    noise: float = 0.05,
    extra: dict[int, Slowness] | None = None,
    num_ranks: int = 4,
    shared: float = 0.0,
) -> Iterator[list[StepTiming]]:
    """Rows as a cluster shows them: every rank with its own lognormal noise, `shared` noise hitting all alike.

    The waits are those of BSP: everybody waits for the slowest.
    """
    rng = random.Random(seed)
    for step in range(1, num_rows + 1):
        together = rng.lognormvariate(0, shared)
        own = [BASE_S * together * rng.lognormvariate(0, noise) for _ in range(num_ranks)]
        for rank, slowness in (extra or {}).items():
            own[rank] += slowness(step)
        yield [timing(rank, step, seconds, wait=max(own) - seconds) for rank, seconds in enumerate(own)]


def timing(rank: int, step: int, own: float, wait: float = 0.0) -> StepTiming:
    """A step whose own time is split over phases as usual."""
    return StepTiming(
        rank, step, 0.0, data_s=0.1 * own, forward_s=0.3 * own, backward_s=0.6 * own, wait_s=wait, samples=32
    )


def fed(detector: Detector, rows: Iterable[Iterable[StepTiming]]) -> Iterator[tuple[int, DetectorState]]:
    """The step and the state after each row."""
    state = None
    for row in rows:
        row = list(row)
        state = detector.init(frozenset(t.rank for t in row)) if state is None else state
        for seen in row:
            state = detector.observe(state, seen)
        yield row[0].step, state


def first_named(rows: Iterable[Iterable[StepTiming]]) -> tuple[int, set[int]] | None:
    """The first step after which somebody is slow, and who."""
    return next(((step, set(state.slow)) for step, state in fed(Detector(), rows) if state.slow), None)


def from_step(start: int, seconds: float) -> Slowness:
    """So much slower from this step on."""
    return lambda step: seconds if step >= start else 0.0


# What must be found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_five_times_slower_is_found_within_five_rows_after_warmup(seed, noise):
    step, slow = first_named(noisy_rows(30, seed, noise, {2: from_step(1, 4 * BASE_S)}))
    assert slow == {2}
    assert step <= WARMUP + 5


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [1.3, 1.4])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_a_third_slower_is_found_within_twenty_rows(seed, ratio, noise):
    step, slow = first_named(noisy_rows(40, seed, noise, {1: from_step(1, (ratio - 1) * BASE_S)}))
    assert slow == {1}
    assert step <= WARMUP + 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ratio", "within"), [(5.0, 5), (1.4, 20)])
def test_a_rank_that_becomes_slow_later_is_found_as_quickly(seed, ratio, within):
    onset = 100
    step, slow = first_named(noisy_rows(200, seed, 0.05, {3: from_step(onset, (ratio - 1) * BASE_S)}))
    assert slow == {3}
    assert onset < step < onset + within


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_found_in_a_world_of_any_size(seed, num_ranks):
    step, slow = first_named(noisy_rows(30, seed, 0.05, {1: from_step(1, 4 * BASE_S)}, num_ranks))
    assert slow == {1}
    assert step <= WARMUP + 5


@pytest.mark.parametrize("seed", range(5))
def test_two_slow_ranks_of_four_are_both_found(seed):
    rows = noisy_rows(60, seed, 0.05, {0: from_step(1, 4 * BASE_S), 3: from_step(1, 2 * BASE_S)})
    states = list(fed(Detector(), rows))
    assert states[-1][1].slow == {0, 3}
    assert all(state.slow <= {0, 3} for _, state in states)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("period", [5, 10, 14])
def test_pauses_now_and_then_are_found_and_the_rank_stays_named(seed, period):
    rows = noisy_rows(300, seed, 0.05, {2: lambda step: 0.3 if step % period == 0 else 0.0})
    states = list(fed(Detector(), rows))
    named = [step for step, state in states if state.slow == {2}]
    assert named
    assert named[0] <= WARMUP + 60
    assert named == list(range(named[0], 301))  # named once, not again and again
    assert all(state.slow <= {2} for _, state in states)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_is_slow_in_a_loud_cluster_is_found(seed):
    step, slow = first_named(noisy_rows(60, seed, 0.1, {2: from_step(1, BASE_S)}, shared=0.4))
    assert slow == {2}
    assert step <= WARMUP + 12


# What must not be claimed


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_names_nobody(seed):
    rng = random.Random(1000 + seed)
    hiccups = {rank: {rng.randrange(1, 2001): rng.uniform(0.5, 5.0) for _ in range(4)} for rank in range(4)}
    rows = noisy_rows(
        2000,
        seed,
        noise=0.05 + 0.1 * seed / 19,  # 5 to 15 %
        extra={rank: lambda step, at=at: at.get(step, 0.0) for rank, at in hiccups.items()},
        shared=0.3 * (seed % 3),
    )
    assert first_named(rows) is None


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_noise_alone_names_nobody_in_a_small_or_large_world(num_ranks):
    rows = 1000 if num_ranks < 16 else 200
    for seed in range(2):
        assert first_named(noisy_rows(rows, seed, 0.1, num_ranks=num_ranks)) is None


def test_a_slowness_that_goes_round_names_nobody():
    rng = random.Random(5)
    unlucky = [rank for _ in range(126) for rank in rng.sample(range(4), 4)]  # everybody once in four rows
    extra = {rank: (lambda step, rank=rank: 0.2 * (unlucky[step] == rank)) for rank in range(4)}
    assert first_named(noisy_rows(500, 5, 0.05, extra)) is None


def test_tiny_steps_are_left_alone():
    rows = ([timing(rank, step, 0.004 if rank == 1 else 0.001) for rank in range(4)] for step in range(1, 300))
    assert first_named(rows) is None  # four times slower, but 3 ms: below the least effect in seconds


def test_warmup_rows_do_not_count():
    slow_start = {0: lambda step: 3.0 if step <= WARMUP else 0.0}
    assert first_named(noisy_rows(60, 1, 0.05, slow_start)) is None


@given(waits=st.lists(st.floats(0, 10), min_size=4, max_size=4))
def test_waiting_is_no_slowness_and_hides_none(waits):
    rows = [
        [timing(rank, step, 5 * BASE_S if rank == 2 else BASE_S, wait=waits[rank]) for rank in range(4)]
        for step in range(1, 12)
    ]
    step, slow = first_named(rows)
    assert slow == {2}
    assert step <= WARMUP + 5
    even = [[timing(rank, step, BASE_S, wait=waits[rank]) for rank in range(4)] for step in range(1, 80)]
    assert first_named(even) is None


def test_a_step_with_an_expected_stretch_does_not_count():
    rows = []
    for row in noisy_rows(200, 3, 0.02):
        slow = row[1]
        if slow.step % 2:  # every other step writes a checkpoint, and is slow in the rest as well
            row[1] = replace(slow, expected_s=2.0, other_s=0.5)
        rows.append(row)
    assert first_named(rows) is None
    unmarked = [[replace(t, expected_s=0.0) for t in row] for row in rows]
    assert first_named(unmarked) is not None


# How long it lasts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ratio", "noise"), [(5.0, 0.05), (1.4, 0.05), (5.0, 0.1)])
def test_a_rank_that_has_recovered_is_cleared_and_not_named_again(seed, ratio, noise):
    recovery = 100
    extra = {2: lambda step: (ratio - 1) * BASE_S if 20 <= step < recovery else 0.0}
    states = dict(fed(Detector(), noisy_rows(300, seed, noise, extra)))
    assert all(states[step].slow == {2} for step in range(45, recovery))
    assert states[recovery + 11].slow == frozenset()
    assert all(states[step].slow == frozenset() for step in range(recovery + 11, 301))


@pytest.mark.parametrize("seed", range(3))
def test_pauses_that_have_stopped_are_cleared(seed):
    extra = {2: lambda step: 0.3 if step % 10 == 0 and step <= 150 else 0.0}
    states = dict(fed(Detector(), noisy_rows(300, seed, 0.05, extra)))
    assert states[150].slow == {2}
    assert states[180].slow == frozenset()
    assert all(states[step].slow == frozenset() for step in range(180, 301))


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_slow_again_is_named_again(seed):
    extra = {2: lambda step: 4 * BASE_S if 20 <= step < 60 or step >= 120 else 0.0}
    states = dict(fed(Detector(), noisy_rows(160, seed, 0.05, extra)))
    assert [states[step].slow for step in (55, 90, 126)] == [{2}, set(), {2}]


# What it must not depend on


def interleaved(rows: list[list[StepTiming]], rng: random.Random) -> list[StepTiming]:
    """The timings in another order of arrival; each rank's own stay in order, as each rank sends them."""
    queues = [list(of_rank) for of_rank in zip(*rows, strict=True)]
    order = []
    while any(queues):
        queue = rng.choice([q for q in queues if q])
        order += [queue.pop(0) for _ in range(min(len(queue), rng.randrange(1, 6)))]
    return order


def after(members: Iterable[int], timings: Iterable[StepTiming], detector: Detector | None = None) -> DetectorState:
    """The state after these timings, in this order."""
    detector = detector or Detector()
    state = detector.init(frozenset(members))
    for seen in timings:
        state = detector.observe(state, seen)
    return state


SLOWNESS = st.fixed_dictionaries({}, optional={rank: st.floats(0.01, 0.3) for rank in range(4)})


@given(seed=st.integers(0, 999), slow=SLOWNESS, rng=st.integers(0, 999).map(random.Random))
def test_order_of_arrival_does_not_matter(seed, slow, rng):
    extra = {rank: from_step(8, seconds) for rank, seconds in slow.items()}
    rows = list(noisy_rows(30, seed, 0.1, extra))
    in_order = after(range(4), (t for row in rows for t in row))
    assert after(range(4), interleaved(rows, rng)) == in_order


@given(seed=st.integers(0, 999), slow=SLOWNESS, names=st.permutations(range(10, 14)))
def test_names_of_ranks_do_not_matter(seed, slow, names):
    extra = {rank: from_step(8, seconds) for rank, seconds in slow.items()}
    rows = list(noisy_rows(30, seed, 0.1, extra))
    original = after(range(4), (t for row in rows for t in row))
    renamed = after(names, (replace(t, rank=names[t.rank]) for row in rows for t in row))
    assert renamed.slow == {names[rank] for rank in original.slow}


def test_observing_leaves_the_old_state_alone():
    detector = Detector(warmup_rows=0)
    rows = list(noisy_rows(8, 1, 0.05, {1: from_step(1, 0.2)}))
    state = after(range(4), (t for row in rows for t in row), detector)
    kept = replace(state, open_rows=dict(state.open_rows), windows=dict(state.windows))
    detector.observe(state, timing(0, 9, 0.3))
    assert state == kept


def test_a_step_that_one_rank_never_reported_is_left_out():
    rows = [[t for t in row if (t.rank, t.step) != (3, 10)] for row in noisy_rows(40, 2, 0.05, {1: from_step(1, 0.2)})]
    state = after(range(4), (t for row in rows for t in row))
    assert state.slow == {1}
    assert 10 not in {row.timing.step for row in state.windows[0]}
    assert state.open_rows == {}


def test_what_is_remembered_is_bounded():
    state = after(range(2), (t for row in noisy_rows(600, 1, num_ranks=2) for t in row))
    assert len(state.windows[0]) <= 60
    assert len(state.closed_rows) <= 256
    alone = after(range(2), (timing(0, step, BASE_S) for step in range(600)))
    assert len(alone.open_rows) <= 256


# While ranks are attached


def ring_and_attached(own_attached: Slowness, num_rows: int = 60, seed: int = 0) -> Iterator[list[StepTiming]]:
    """A ring of 0, 1, 3, and rank 2 attached: its step carries the version it started from."""
    rng = random.Random(seed)
    next_version = 1
    for version in range(1, num_rows + 1):
        row = [timing(rank, version, BASE_S * rng.lognormvariate(0, 0.05)) for rank in (0, 1, 3)]
        if version == next_version:
            own = own_attached(version)
            next_version += 1 + int(own / BASE_S)
            row.append(timing(2, version, own))
        yield row


def attached_state(detector: Detector, rows_before: Iterable[list[StepTiming]]) -> DetectorState:
    """The state when rank 2 has just been attached after these rows of all four."""
    state = after(range(4), (t for row in rows_before for t in row), detector)
    return detector.set_members(state, frozenset({0, 1, 3}))


@pytest.mark.parametrize("order", ["ring first", "attached first"])
def test_an_attached_rank_is_held_against_the_rings_rows(order):
    detector = Detector()
    state = attached_state(detector, noisy_rows(20, 0, 0.05, {2: from_step(1, 0.2)}))
    assert state.slow == {2}
    for row in ring_and_attached(lambda _: 5 * BASE_S):
        for seen in row if order == "ring first" else reversed(row):
            state = detector.observe(state, seen)
        assert state.slow == {2}
    fresh = [row for row in state.windows[2] if row.timing.step > 1][-5:]
    assert all(row.timing.own_s == pytest.approx(5 * BASE_S) for row in fresh)
    assert all(row.reference.own_s == pytest.approx(BASE_S, rel=0.15) for row in fresh)
    assert [row.timing.step for row in fresh] == [row.reference.step for row in fresh]


@pytest.mark.parametrize("order", ["ring first", "attached first"])
def test_an_attached_rank_that_has_recovered_is_cleared(order):
    detector = Detector()
    state = attached_state(detector, noisy_rows(20, 0, 0.05, {2: from_step(1, 0.2)}))
    num_steps = 0
    for row in ring_and_attached(lambda _: BASE_S):
        for seen in row if order == "ring first" else reversed(row):
            state = detector.observe(state, seen)
        num_steps += len(row) > 3
        if num_steps > 10:
            assert state.slow == frozenset()
    assert num_steps > 20


def test_a_slow_rank_in_the_ring_is_found_while_another_is_attached():
    detector = Detector()
    state = attached_state(detector, noisy_rows(20, 0, 0.05, {2: from_step(1, 0.2)}))
    for step in range(21, 31):
        for rank in (0, 1, 3):
            state = detector.observe(state, timing(rank, step, 5 * BASE_S if rank == 0 else BASE_S))
    assert state.slow == {0, 2}


def test_a_ring_of_one_has_nobody_to_be_held_against_but_serves_the_attached():
    detector = Detector(warmup_rows=0)
    state = detector.set_members(detector.init(frozenset({0, 1})), frozenset({0}))
    for step in range(10):
        state = detector.observe(state, timing(0, step, BASE_S))
        state = detector.observe(state, timing(1, step, 5 * BASE_S))
    assert state.windows[0] == ()
    assert state.slow == {1}


# Parts


def beside(step: StepTiming, other: StepTiming) -> Row:
    """A rank's step beside the other one's."""
    return rows_beside({step.rank: step}, {other.rank: other})[step.rank]


def test_excess_is_own_time_above_the_others():
    row = beside(timing(1, 1, 0.3, wait=9.0), timing(-1, 1, 0.1, wait=1.0))
    assert row.excess_s == pytest.approx(0.2)


def test_a_loss_is_what_enough_rows_carry():
    rows = [beside(timing(1, step, own), timing(-1, step, 0.1)) for step, own in enumerate((0.5, 0.3, 0.1, 0.05))]
    assert carried_loss(rows, 1) == pytest.approx((0.6, 0.6))  # being fast once makes up for nothing
    assert carried_loss(rows, 2) == pytest.approx((0.4, 0.5))  # the longest counts like the second longest
    assert carried_loss(rows, 3) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert carried_loss(rows[:1], 4) == pytest.approx((0.4, 0.8))
    assert carried_loss([], 4) == (0.0, 0.0)


def test_phase_median_is_taken_phase_by_phase():
    a = StepTiming(0, 4, 1.0, data_s=1, forward_s=9, samples=10, cpu_s=1.0, runqueue_s=None)
    b = StepTiming(1, 4, 2.0, data_s=2, forward_s=1, samples=30, cpu_s=3.0, runqueue_s=0.5)
    c = StepTiming(2, 4, 3.0, data_s=7, forward_s=2, samples=20, cpu_s=2.0, runqueue_s=0.7)
    got = phase_median([a, b, c])
    assert (got.rank, got.step, got.data_s, got.forward_s, got.samples) == (-1, 4, 2, 2, 20)
    assert (got.cpu_s, got.runqueue_s) == (2.0, 0.5)
