"""The modes worth judging: all of a kind, each once, and only such as can be carried out."""

import math
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.batches import balanced_batches
from paceline.decide.candidates import (
    LIVE,
    PARAMETER_SERVER,
    RING,
    Family,
    Mode,
    balanced,
    groups,
    orders,
    quorums,
    rings,
)
from paceline.decide.rehearse import Conditions, OwnStep, estimate
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.group import GroupSync
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, KAsync

OWN = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8)
BATCH = 32
EVERY_FAMILY = (rings, quorums, orders, groups, balanced)


def conditions(*own: float, **rest: float) -> Conditions:
    return Conditions.constant(dict(enumerate(own)), BATCH, **rest)


def modes(family: Family, *own: float, current: SyncPolicy[Any] | None = None, max_staleness: int = 16) -> list[Mode]:
    """All that a family finds, by default from BSP."""
    return list(family(current or BSP(), conditions(*own), max_staleness))


def policies(family: Family, *own: float, **rest: Any) -> list[Any]:
    """Their policies: these leave the batches as they are."""
    found = modes(family, *own, **rest)
    assert all(mode.batch_sizes is None for mode in found)
    return [mode.policy for mode in found]


# All of them


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.__name__)
@given(own=OWN)
def test_every_mode_is_found_once_and_can_be_rehearsed(family, own):
    given = conditions(*own, comm_s=0.01)
    found = list(family(BSP(), given, 4))
    assert len({(repr(mode.policy), mode.batch_sizes) for mode in found}) == len(found)
    for mode in found:
        assert 0 < estimate(mode.policy, given, mode.batch_sizes).time_to_accuracy_s < math.inf


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.__name__)
def test_a_rank_alone_has_hardly_a_choice(family):
    wanted = {orders: [Mode(ASP(16))], balanced: [Mode(BSP(), (BATCH,))]}
    assert modes(family, 0.1) == wanted.get(family, [])


def test_what_a_shell_can_carry_out():
    assert set(LIVE) == {rings}
    assert set(LIVE) < set(RING)
    assert orders in RING  # as a star around one rank
    assert groups not in RING
    assert rings not in PARAMETER_SERVER
    assert {*RING, *PARAMETER_SERVER} == set(EVERY_FAMILY)


# Rings


@given(OWN, st.integers(0, 20))
def test_rings_are_those_of_the_fastest_for_every_size_that_leaves_out_only_slower_ranks(own, bound):
    found = policies(rings, *own, max_staleness=bound)
    fastest = sorted(own)
    wanted = [x for x in range(len(own) - 1, 0, -1) if fastest[x] >= 1.2 * median(fastest[:x])]
    assert [len(policy.ring) for policy in found] == wanted  # the largest first: it wins ties
    for policy in found:
        assert policy.ranks == set(range(len(own)))
        assert list(policy.ring) == sorted(policy.ring)
        assert policy.max_staleness == bound
        assert max(own[rank] for rank in policy.ring) <= min(own[rank] for rank in policy.parent_of)


def test_children_are_spread_over_the_ring():
    _, two, _ = policies(rings, 0.05, 0.3, 0.04, 0.25)
    assert two == AttachedRing((0, 2), {1: 2, 3: 0}, 16)  # rank 2 has most time to spare


def test_at_equal_times_present_members_come_first():
    own = (0.25, 0.05, 0.05, 0.25)
    present = AttachedRing((1, 2, 3), {0: 1})
    assert [set(ring.ring) for ring in policies(rings, *own, current=present)] == [{1, 2, 3}, {1, 2}]
    assert [set(ring.ring) for ring in policies(rings, *own)] == [{0, 1, 2}, {1, 2}]


def test_ranks_of_like_speed_are_not_parted():
    assert policies(rings, 0.1, 0.11, 0.12, 0.13) == policies(rings, 0.01, 0.0101) == []
    assert [policy.ring for policy in policies(rings, 0.1, 0.11, 0.12, 0.14, 0.3)] == [(0, 1, 2, 3), (0, 1, 2)]


# Quorums


@pytest.mark.parametrize(
    ("num_ranks", "ks"), [(1, []), (2, [1]), (3, [2]), (4, [3, 2]), (5, [4, 3]), (8, [7, 6, 5, 4]), (9, [8, 7, 6, 5])]
)
def test_quorums_are_at_least_half_of_the_ranks(num_ranks, ks):
    assert policies(quorums, *[0.1] * num_ranks) == [KSync(k, "drop") for k in ks]
    assert all(2 * k >= num_ranks for k in ks)


def test_in_a_quorum_every_rank_goes_on_telling_its_own_time():
    # Who is told to give up never finishes a gradient, so nobody would learn that it has recovered.
    assert {policy.late for policy in policies(quorums, *[0.1] * 6)} == {"drop"}


# Orders


@given(OWN, st.integers(0, 20))
def test_orders_are_asgd_and_every_x(own, bound):
    asgd, *rest = policies(orders, *own, max_staleness=bound)
    # A bound of so many full updates is n times as many versions where every gradient is one.
    assert asgd == ASP(bound * len(own))
    assert rest == [KAsync(x) for x in range(2, len(own))]  # x = n is BSP


# Groups


def test_groups_are_formed_at_several_gaps():
    found = policies(groups, 0.1, 0.13, 0.2, 0.5)
    assert found == [
        GroupSync(((0,), (1,), (2,), (3,))),  # gaps of 30, 54 and 150 %: each is above 20 ...
        GroupSync(((0, 1), (2,), (3,))),  # ... two above 50 ...
        GroupSync(((0, 1, 2), (3,))),  # ... and one above 100
    ]


def test_the_same_groups_are_formed_once():
    assert policies(groups, 0.1, 0.1, 0.5, 0.5) == [GroupSync(((0, 1), (2, 3)))]


def test_ranks_of_like_speed_form_no_groups():
    assert policies(groups, 0.1, 0.11, 0.12, 0.13) == []


# Balanced batches


@given(
    own=OWN,
    fixed=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    batch=st.integers(4, 128),
)
def test_balanced_batches_have_the_same_sum_and_leave_nobody_out(own, fixed, batch):
    given = Conditions.constant(dict(enumerate(own)), batch, fixed_ratio=fixed)
    (mode,) = balanced(BSP(), given, 16)
    assert mode.policy == BSP()
    assert sum(mode.batch_sizes) == batch * len(own)
    assert min(mode.batch_sizes) >= 1


@given(own=OWN, fixed=st.sampled_from([0.0, 0.2, 0.5]))
def test_with_balanced_batches_all_finish_together(own, fixed):
    given = conditions(*own, fixed_ratio=fixed)
    (mode,) = balanced(BSP(), given, 16)

    def own_s(rank: int, samples: float) -> float:
        return own[rank] * (fixed + (1 - fixed) * samples / BATCH)

    done = [own_s(rank, size) for rank, size in enumerate(mode.batch_sizes)]
    # Nobody who could give a sample away is later than somebody would be who took it. A fixed part counts as whole
    # samples (32 * 0.2 / 0.8 = 8), so this is exact.
    taken = min(own_s(rank, size + 1) for rank, size in enumerate(mode.batch_sizes))
    for rank, size in enumerate(mode.batch_sizes):
        if size > 1:
            assert done[rank] <= taken * (1 + 1e-9)
    assert estimate(BSP(), given, mode.batch_sizes).interval_s == pytest.approx(max(done))
    assert max(done) <= max(own) * (1 + 1e-9)  # never later than with even batches


def test_without_a_fixed_part_batches_are_those_of_the_solver():
    own = (0.1, 0.1, 1.0, 0.1)
    (mode,) = balanced(BSP(), conditions(*own, fixed_ratio=0.0), 16)
    assert mode.batch_sizes == balanced_batches([1 / t for t in own], 4 * BATCH) == (42, 41, 4, 41)


def test_a_fixed_part_is_nothing_that_a_smaller_batch_saves():
    # Half of rank 2's 0.2 s is fixed: at s samples it needs 0.1 + 0.1 s / 32, the others 0.05 + 0.05 s / 32.
    (mode,) = balanced(BSP(), conditions(0.1, 0.1, 0.2, fixed_ratio=0.5), 16)
    assert mode.batch_sizes == (45, 45, 6)


def test_speeds_are_seen_through_the_batches_in_force():
    # Rank 1 took as long for half a batch: it is slower, though its own times are alike (1.8 times, as 20 % is fixed).
    steps = {0: (OwnStep(0.1, 32), OwnStep(0.1, 32)), 1: (OwnStep(0.1, 16), OwnStep(0.1, 16))}
    given = Conditions(steps, comm_s=0.0, batch_size=32, noise_scale=60.0, batch_sizes=(32, 16))
    (mode,) = balanced(BSP(), given, 16)
    assert mode.batch_sizes == next(balanced(BSP(), conditions(0.1, 0.18), 16)).batch_sizes


def test_where_batches_make_no_difference_the_sum_still_holds():
    given = conditions(0.1, 0.4, fixed_ratio=1.0)
    (mode,) = balanced(BSP(), given, 16)
    assert sum(mode.batch_sizes) == 2 * BATCH
    assert estimate(BSP(), given, mode.batch_sizes) == estimate(BSP(), given)
