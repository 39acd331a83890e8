"""The choice of mode: truly the best one, with hysteresis, and explained."""

import math
import random
import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.candidates import LIVE, PARAMETER_SERVER, RING, Mode
from paceline.decide.placement import choose_parents
from paceline.decide.rehearse import Conditions, Estimate, OwnStep, estimate
from paceline.decide.selector import Selector
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.group import GroupSync
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, KAsync

OWN = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=7)
NOISE = st.one_of(st.just(0.0), st.floats(0.1, 1e6), st.just(math.inf))
COMM = st.one_of(st.just(0.0), st.floats(0.0, 0.2))


EVEN = Mode(BSP())


def conditions(own, noise=60.0, comm=0.0, batch=32, cost=0.1, **rest) -> Conditions:
    return Conditions.constant(dict(enumerate(own)), batch, comm_s=comm, noise_scale=noise, staleness_cost=cost, **rest)


def in_ring(policy) -> set[int] | None:
    """Who is in the ring; None for everybody."""
    return set(policy.ring) if isinstance(policy, AttachedRing) else None


@given(own=OWN, noise=NOISE, comm=COMM, cost=st.floats(0, 1))
def test_picks_the_best_of_all_rings_of_the_fastest_by_brute_force(own, noise, comm, cost):
    given = conditions(own, noise, comm, cost=cost)
    selector = Selector(min_gain=1.0, keep_gain=1.0)
    choice = selector.choose(EVEN, given)
    order = sorted(range(len(own)), key=lambda rank: own[rank])
    costs = [estimate(BSP(), given).time_to_accuracy_s]
    for x in range(1, len(own)):
        if own[order[x]] < 1.2 * median(own[rank] for rank in order[:x]):
            continue  # the fastest that would be left out is no slower than the ring
        ring = AttachedRing(tuple(order[:x]), dict.fromkeys(order[x:], order[0]), selector.max_staleness)
        costs.append(estimate(ring, given).time_to_accuracy_s)
    assert choice.estimate.time_to_accuracy_s == pytest.approx(min(costs))
    assert choice.gain == pytest.approx(costs[0] / min(costs))
    assert estimate(choice.mode.policy, given) == choice.estimate
    assert choice.staying == estimate(BSP(), given)


@pytest.mark.parametrize("families", [LIVE, RING, PARAMETER_SERVER], ids=["live", "ring", "ps"])
@given(own=OWN, noise=NOISE, comm=COMM, rule=st.sampled_from(["linear", "sqrt", "adascale"]))
def test_picks_the_best_of_every_family(families, own, noise, comm, rule):
    given = conditions(own, noise, comm, lr_rule=rule, arch="ps" if families is PARAMETER_SERVER else "ring")
    choice = Selector(min_gain=1.0, keep_gain=1.0, families=families).choose(EVEN, given)
    found = [EVEN, *(mode for family in families for mode in family(BSP(), given, 16))]
    costs = [estimate(mode.policy, given, mode.batch_sizes).time_to_accuracy_s for mode in found]
    assert choice.estimate.time_to_accuracy_s == min(costs)
    assert choice.mode == found[costs.index(min(costs))]  # the first of equals: BSP before all others
    assert choice.gain == costs[0] / min(costs)


@given(own=OWN, noise=NOISE, comm=COMM)
def test_a_change_promises_the_least_gain_and_staying_promises_nothing(own, noise, comm):
    given = conditions(own, noise, comm)
    choice = Selector().choose(EVEN, given)
    if choice.mode == EVEN:
        assert choice.gain == 1.0
        assert choice.estimate == choice.staying
        eager = Selector(min_gain=1.0, keep_gain=1.0).choose(EVEN, given)
        assert eager.gain < 1.1
    else:
        assert choice.gain >= 1.1


# Where the exchange costs as much as computing, even ranks that are all alike do better without one (see below): two of
# them from half of their own time on. Up to a fifth nobody does.
@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("comm", [0.0, 0.001, 0.01])
def test_equal_ranks_stay_bsp_at_any_noise(num_ranks, comm):
    for noise in (0.0, 1.0, 60.0, 1e3, 1e6, 1e9, math.inf):
        for cost in (0.0, 0.1):
            given = conditions([0.05] * num_ranks, noise, comm, cost=cost)
            for selector in (Selector(), Selector(min_gain=1.0, keep_gain=1.0)):
                assert selector.choose(EVEN, given).mode == EVEN


def test_even_where_the_exchange_is_far_dearer_than_computing_equal_ranks_stay_together():
    # One rank alone exchanges nothing: 50 ms an update instead of 550, which its estimate, rightly, finds attractive.
    given = conditions([0.05, 0.052, 0.054, 0.05], comm=0.5)
    alone = AttachedRing((0,), dict.fromkeys((1, 2, 3), 0))
    assert estimate(alone, given).time_to_accuracy_s < estimate(BSP(), given).time_to_accuracy_s
    assert Selector().choose(EVEN, given).mode == EVEN


@given(num_ranks=st.integers(2, 16), noise=NOISE, comm=st.floats(0.0, 0.01), data=st.data())
def test_nearly_equal_ranks_stay_bsp(num_ranks, noise, comm, data):
    own = data.draw(st.lists(st.floats(0.0485, 0.0515), min_size=num_ranks, max_size=num_ranks))
    assert Selector().choose(EVEN, conditions(own, noise, comm)).mode == EVEN


@given(num_ranks=st.integers(2, 8), seed=st.integers(0, 1000))
def test_ranks_that_are_alike_in_the_mean_stay_bsp_when_their_steps_vary_a_little(num_ranks, seed):
    rng = random.Random(seed)
    steps = {r: tuple(OwnStep(0.05 * rng.lognormvariate(0, 0.03), 32) for _ in range(16)) for r in range(num_ranks)}
    given = Conditions(steps, comm_s=0.002, batch_size=32, noise_scale=60.0)
    assert Selector().choose(EVEN, given).mode == EVEN


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("noise", [0.0, 60.0, 1e4, math.inf])
def test_one_rank_five_times_slower_is_attached_and_nobody_else(num_ranks, noise):
    for slow in (0, num_ranks // 2, num_ranks - 1):
        own = [0.05] * num_ranks
        own[slow] = 0.25
        choice = Selector().choose(EVEN, conditions(own, noise, comm=0.002))
        assert set(choice.mode.policy.parent_of) == {slow}
        assert in_ring(choice.mode.policy) == set(range(num_ranks)) - {slow}
        assert f"rank {slow} (250 ms)" in choice.reason
        assert choice.gain > 2


def test_two_slow_ranks_are_both_attached():
    choice = Selector().choose(EVEN, conditions([0.05, 0.25, 0.05, 0.3]))
    assert choice.mode == Mode(AttachedRing((0, 2), {1: 0, 3: 2}, 16))


def test_the_bound_is_the_selectors():
    assert Selector(max_staleness=7).choose(EVEN, conditions([0.05, 0.05, 0.25])).mode.policy.max_staleness == 7


# What to choose from


def test_a_slow_rank_gets_a_smaller_batch_where_that_is_enough():
    # A rank that computes at two thirds of the speed: with 26 samples it is in time, and nothing is stale or lost.
    given = conditions([0.05] * 7 + [0.075], fixed_ratio=0.0)
    choice = Selector(families=RING).choose(EVEN, given)
    assert choice.mode.policy == BSP()
    assert sum(choice.mode.batch_sizes) == 8 * 32
    assert choice.mode.batch_sizes[7] < 28 < min(choice.mode.batch_sizes[:7])
    assert choice.staying.interval_s == pytest.approx(0.075)
    assert choice.estimate.interval_s < 0.055
    assert f"{choice.mode.batch_sizes[7]} samples" in choice.reason


def test_batches_go_back_to_even_when_the_slow_rank_has_recovered():
    uneven = Mode(BSP(), (33, 33, 33, 29))
    choice = Selector(families=RING).choose(uneven, conditions([0.05] * 4, fixed_ratio=0.0))
    assert choice.mode == EVEN
    assert choice.staying.interval_s == pytest.approx(0.05 * 33 / 32)


def test_batches_are_judged_from_even_whatever_is_in_force():
    # Rank 1 computes 8 of 32 samples at present: as fast per gradient, four times slower per sample.
    steps = {0: (OwnStep(0.05, 56),), 1: (OwnStep(0.05, 8),)}
    given = Conditions(steps, 0.0, 32, 60.0, fixed_ratio=0.0, batch_sizes=(56, 8))
    choice = Selector(families=RING).choose(Mode(BSP(), (56, 8)), given)
    assert choice.mode == Mode(BSP(), (56, 8))
    assert choice.staying.interval_s == pytest.approx(0.05)
    rings = Selector().choose(EVEN, given)
    assert rings.staying.interval_s == pytest.approx(0.2)  # what even batches would take rank 1


def test_backup_workers_win_where_everybody_is_slow_now_and_then():
    own = [[0.05] * 8 for _ in range(8)]
    for rank in range(8):
        own[rank][rank] = 0.5  # one rank in every row, never the same
    steps = {rank: tuple(OwnStep(s, 32) for s in window) for rank, window in enumerate(own)}
    given = Conditions(steps, comm_s=0.002, batch_size=32, noise_scale=60.0, staleness_limit=0.1)
    choice = Selector(families=RING).choose(EVEN, given)
    assert isinstance(choice.mode.policy, KSync)
    assert choice.staying.interval_s == pytest.approx(0.502)
    assert choice.gain > 2.5
    assert "KSync" in choice.reason


@pytest.mark.parametrize(("cost", "kinds"), [(0.0, (ASP, KAsync)), (5.0, (KSync, GroupSync, BSP))])
def test_what_staleness_costs_decides_who_waits(cost, kinds):
    given = conditions([0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25], cost=cost, arch="ps", fixed_ratio=1.0)
    choice = Selector(families=PARAMETER_SERVER).choose(EVEN, given)
    assert isinstance(choice.mode.policy, kinds)


# One sentence


@pytest.mark.parametrize("families", [LIVE, RING, PARAMETER_SERVER], ids=["live", "ring", "ps"])
@pytest.mark.parametrize(
    "current",
    [EVEN, Mode(AttachedRing((0, 1, 3), {2: 0})), Mode(KSync(3)), Mode(BSP(), (36, 36, 20, 36))],
    ids=["bsp", "ring", "quorum", "batches"],
)
@pytest.mark.parametrize("slow", [0.05, 0.06, 0.075, 0.25])
def test_the_reason_is_one_sentence(families, current, slow):
    reason = Selector(families=families).choose(current, conditions([0.05, 0.05, slow, 0.05])).reason
    assert "\n" not in reason
    assert not re.search(r"[.!?]\s", reason)
    assert len(reason.split()) > 5


# Hysteresis

RING_OF_THREE = AttachedRing((0, 1, 3), {2: 0})


def ratio_at(slow: float) -> float:
    """What the ring of the three others promises over BSP when rank 2 takes so long."""
    given = conditions([0.05, 0.05, slow, 0.05])
    return estimate(BSP(), given).time_to_accuracy_s / estimate(RING_OF_THREE, given).time_to_accuracy_s


def slow_at_ratio(wanted: float) -> float:
    """The slow rank's own time at which attaching it promises just this ratio over BSP."""
    low, high = 0.05, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio_at(middle) < wanted else (low, middle)
    return high


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
    slow = slow_at_ratio(ratio)
    assert ratio_at(slow) == pytest.approx(ratio)
    given = conditions([0.05, 0.05, slow, 0.05])
    assert isinstance(Selector().choose(EVEN, given).mode.policy, from_bsp)
    assert isinstance(Selector().choose(Mode(RING_OF_THREE), given).mode.policy, from_ring)


def test_going_back_promises_what_it_brings_no_more():
    given = conditions([0.05, 0.05, slow_at_ratio(1.02), 0.05])
    choice = Selector().choose(Mode(RING_OF_THREE), given)
    assert choice.mode == EVEN
    assert choice.gain == pytest.approx(1 / 1.02, rel=1e-6)
    assert choice.estimate == estimate(BSP(), given)
    assert choice.staying == estimate(RING_OF_THREE, given)
    assert "back into one update" in choice.reason


@pytest.mark.parametrize("families", [LIVE, RING, PARAMETER_SERVER], ids=["live", "ring", "ps"])
@given(own=OWN, noise=NOISE, comm=COMM)
def test_what_was_chosen_is_kept_while_nothing_changes(families, own, noise, comm):
    given = conditions(own, noise, comm)
    selector = Selector(families=families)
    first = selector.choose(EVEN, given).mode
    assert selector.choose(first, given).mode == first


def test_a_better_ring_replaces_a_ring():
    choice = Selector().choose(Mode(RING_OF_THREE), conditions([0.05, 0.25, 0.05, 0.05]))
    assert choice.mode == Mode(AttachedRing((0, 2, 3), {1: 0}, 16))
    assert choice.gain > 2


def test_bsp_replaces_a_ring_that_has_lost_its_point_by_far():
    current = Mode(AttachedRing((0,), {1: 0, 2: 0, 3: 0}))
    choice = Selector().choose(current, conditions([0.05] * 4, noise=1e6))
    assert choice.mode == EVEN
    assert choice.gain > 1.1
    assert "alike again" in choice.reason


def test_at_equal_times_present_members_stay_in_the_ring():
    own = [0.25, 0.05, 0.05, 0.25]
    current = Mode(AttachedRing((1, 2, 3), {0: 1}))
    rings = [in_ring(mode.policy) for mode in Selector().candidates(current, conditions(own))]
    assert rings == [None, {1, 2, 3}, {1, 2}]


@dataclass(frozen=True)
class Stuck:
    """A policy that never updates."""

    inner: SyncPolicy[Any] = field(default_factory=BSP)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, state: Any, _event: Any) -> Any:
        return state, ()


def test_a_mode_that_leads_nowhere_is_left():
    choice = Selector().choose(Mode(Stuck()), conditions([0.05] * 4))
    assert choice.mode == EVEN
    assert choice.gain == math.inf
    assert choice.staying == Estimate(math.inf, 0.0, 0.0, math.inf)


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
