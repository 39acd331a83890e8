"""The choice of mode: truly the best one, with hysteresis, and explained."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.estimate import Conditions, estimate
from paceline.decide.placement import choose_parents
from paceline.decide.selector import Selector
from paceline.policy.barrier import BSP
from paceline.policy.ring import AttachedRing

OWN = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=7)
NOISE = st.one_of(st.just(0.0), st.floats(0.1, 1e6), st.just(math.inf))
COMM = st.one_of(st.just(0.0), st.floats(0.0, 0.2))


def conditions(own, noise=60.0, comm=0.0, batch=32, cost=0.1) -> Conditions:
    return Conditions(dict(enumerate(own)), comm, batch, noise, cost)


def in_ring(policy) -> set[int] | None:
    """Who is in the ring; None for everybody."""
    return set(policy.ring) if isinstance(policy, AttachedRing) else None


@given(own=OWN, noise=NOISE, comm=COMM, cost=st.floats(0, 1))
def test_picks_the_best_of_all_rings_of_the_fastest_by_brute_force(own, noise, comm, cost):
    given = conditions(own, noise, comm, cost=cost)
    selector = Selector(min_gain=1.0, keep_gain=1.0)
    choice = selector.choose(BSP(), given)
    order = sorted(range(len(own)), key=lambda rank: own[rank])
    costs = [estimate(BSP(), given).time_to_accuracy_s]
    for x in range(1, len(own)):
        ring = AttachedRing(tuple(order[:x]), dict.fromkeys(order[x:], order[0]), selector.max_staleness)
        costs.append(estimate(ring, given).time_to_accuracy_s)
    assert choice.estimate.time_to_accuracy_s == pytest.approx(min(costs))
    assert choice.gain == pytest.approx(costs[0] / min(costs))
    assert estimate(choice.policy, given) == choice.estimate
    assert choice.staying == estimate(BSP(), given)


@given(own=OWN, noise=NOISE, comm=COMM)
def test_a_change_promises_the_least_gain_and_staying_promises_nothing(own, noise, comm):
    given = conditions(own, noise, comm)
    choice = Selector().choose(BSP(), given)
    if choice.policy == BSP():
        assert choice.gain == 1.0
        assert choice.estimate == choice.staying
        eager = Selector(min_gain=1.0, keep_gain=1.0).choose(BSP(), given)
        assert eager.gain < 1.1
    else:
        assert choice.gain >= 1.1


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("comm", [0.0, 0.001, 0.05, 0.5])
def test_equal_ranks_stay_bsp_at_any_noise(num_ranks, comm):
    for noise in (0.0, 1.0, 60.0, 1e3, 1e6, 1e9, math.inf):
        for cost in (0.0, 0.1):
            given = conditions([0.05] * num_ranks, noise, comm, cost=cost)
            for selector in (Selector(), Selector(min_gain=1.0, keep_gain=1.0)):
                assert selector.choose(BSP(), given).policy == BSP()


@given(num_ranks=st.integers(2, 16), noise=NOISE, comm=COMM, data=st.data())
def test_nearly_equal_ranks_stay_bsp(num_ranks, noise, comm, data):
    own = data.draw(st.lists(st.floats(0.0485, 0.0515), min_size=num_ranks, max_size=num_ranks))
    assert Selector().choose(BSP(), conditions(own, noise, comm)).policy == BSP()


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("noise", [0.0, 60.0, 1e4, math.inf])
def test_one_rank_five_times_slower_is_attached_and_nobody_else(num_ranks, noise):
    for slow in (0, num_ranks // 2, num_ranks - 1):
        own = [0.05] * num_ranks
        own[slow] = 0.25
        choice = Selector().choose(BSP(), conditions(own, noise, comm=0.002))
        assert set(choice.policy.parent_of) == {slow}
        assert in_ring(choice.policy) == set(range(num_ranks)) - {slow}
        assert f"rank {slow} (250 ms)" in choice.reason
        assert choice.gain > 2


def test_two_slow_ranks_are_both_attached():
    choice = Selector().choose(BSP(), conditions([0.05, 0.25, 0.05, 0.3]))
    assert choice.policy == AttachedRing((0, 2), {1: 0, 3: 2}, 16)


def test_the_bound_is_the_selectors():
    assert Selector(max_staleness=7).choose(BSP(), conditions([0.05, 0.05, 0.25])).policy.max_staleness == 7


@pytest.mark.parametrize("current", [BSP(), AttachedRing((0, 1, 3), {2: 0})], ids=["bsp", "ring"])
@pytest.mark.parametrize("slow", [0.05, 0.06, 0.25])
def test_the_reason_is_one_sentence(current, slow):
    reason = Selector().choose(current, conditions([0.05, 0.05, slow, 0.05])).reason
    assert "\n" not in reason
    assert not re.search(r"[.!?]\s", reason)
    assert len(reason.split()) > 5


def slow_at_ratio(wanted: float) -> float:
    """The slow rank's own time at which attaching it promises just this ratio over BSP."""
    low, high = 0.05, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        given = conditions([0.05, 0.05, middle, 0.05])
        ratio = estimate(BSP(), given).time_to_accuracy_s / estimate(RING, given).time_to_accuracy_s
        low, high = (middle, high) if ratio < wanted else (low, middle)
    return high


RING = AttachedRing((0, 1, 3), {2: 0})


@pytest.mark.parametrize(
    ("ratio", "from_bsp", "from_ring"),
    [
        (1.005, BSP, BSP),  # not worth keeping
        (1.025, BSP, BSP),
        (1.035, BSP, AttachedRing),  # worth keeping, not worth a change
        (1.095, BSP, AttachedRing),
        (1.105, AttachedRing, AttachedRing),  # worth a change
        (2.0, AttachedRing, AttachedRing),
    ],
)
def test_hysteresis(ratio, from_bsp, from_ring):
    given = conditions([0.05, 0.05, slow_at_ratio(ratio), 0.05])
    assert isinstance(Selector().choose(BSP(), given).policy, from_bsp)
    assert isinstance(Selector().choose(RING, given).policy, from_ring)


def test_going_back_promises_what_it_brings_no_more():
    given = conditions([0.05, 0.05, slow_at_ratio(1.02), 0.05])
    choice = Selector().choose(RING, given)
    assert choice.policy == BSP()
    assert choice.gain == pytest.approx(1 / 1.02, rel=1e-6)
    assert choice.estimate == estimate(BSP(), given)
    assert choice.staying == estimate(RING, given)
    assert "back into the ring" in choice.reason


@given(own=OWN, noise=NOISE, comm=COMM)
def test_what_was_chosen_is_kept_while_nothing_changes(own, noise, comm):
    given = conditions(own, noise, comm)
    first = Selector().choose(BSP(), given).policy
    assert Selector().choose(first, given).policy == first


def test_a_better_ring_replaces_a_ring():
    choice = Selector().choose(RING, conditions([0.05, 0.25, 0.05, 0.05]))
    assert choice.policy == AttachedRing((0, 2, 3), {1: 0}, 16)
    assert choice.gain > 2


def test_bsp_replaces_a_ring_that_has_lost_its_point_by_far():
    choice = Selector().choose(AttachedRing((0,), {1: 0, 2: 0, 3: 0}), conditions([0.05] * 4, noise=1e6))
    assert choice.policy == BSP()
    assert choice.gain > 1.1
    assert "alike again" in choice.reason


def test_at_equal_times_present_members_stay_in_the_ring():
    own = [0.25, 0.05, 0.05, 0.25]
    rings = [in_ring(policy) for policy in Selector().candidates(AttachedRing((1, 2, 3), {0: 1}), conditions(own))]
    assert rings == [None, {1}, {1, 2}, {1, 2, 3}]


@pytest.mark.parametrize(("keep", "least"), [(0.9, 1.1), (1.2, 1.1)])
def test_gains_must_be_in_order(keep, least):
    with pytest.raises(ValueError, match="keep_gain"):
        Selector(min_gain=least, keep_gain=keep)


@given(own=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), num_children=st.integers(0, 12), data=st.data())
def test_parents_are_spread_and_the_fastest_come_first(own, num_children, data):
    ring = data.draw(st.permutations(range(len(own))))
    children = list(range(20, 20 + num_children))
    parents = choose_parents(ring, children, dict(enumerate(own)))
    assert set(parents) == set(children)
    load = [list(parents.values()).count(rank) for rank in ring]
    assert max(load) - min(load) <= 1
    busier = [own[rank] for rank, n in zip(ring, load, strict=True) if n > min(load)]
    idler = [own[rank] for rank, n in zip(ring, load, strict=True) if n == min(load)]
    assert not busier or max(busier) <= min(idler)


def test_no_ring_no_parents():
    with pytest.raises(ValueError, match="at least one rank"):
        choose_parents([], [1], {})
