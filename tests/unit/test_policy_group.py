"""Groups by speed, GroupSync and the wrappers by example; promises are in tests/contract/test_policies.py."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import Apply, Arrive, Join, Leave, Release, Tick, Work
from paceline.policy.group import GroupSync, groups_by_speed
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, Zeno

RANKS = frozenset(range(4))


def after(policy, *events, ranks=RANKS):
    """The state after these events, and what the last one brought."""
    state, actions = policy.init(ranks), ()
    for event in events:
        state, actions = policy.step(state, event)
    return state, actions


def arrivals(*ranks):
    return [Arrive(rank) for rank in ranks]


# Groups by speed


def test_groups_of_star_s_example():
    times_ms = (100, 105, 110, 115, 120, 150, 200, 400)
    assert groups_by_speed(dict(enumerate(times_ms))) == ((0, 1, 2, 3, 4), (5,), (6,), (7,))


@given(times=st.dictionaries(st.integers(0, 99), st.floats(1e-3, 1e3), min_size=1), factor=st.floats(0.1, 10))
def test_groups_part_at_large_gaps_only_whatever_the_unit(times, factor):
    groups = groups_by_speed(times, min_gap_ratio=0.25)
    assert sorted(rank for group in groups for rank in group) == sorted(times)
    for faster, slower in pairwise(groups):
        assert min(times[r] for r in slower) > 1.25 * max(times[r] for r in faster)
    for group in groups:
        assert list(group) == sorted(group)
        ordered = sorted(times[r] for r in group)
        assert all(b <= 1.25 * a for a, b in pairwise(ordered))
    if all(abs(b / a - 1.25) > 1e-9 for a in times.values() for b in times.values()):
        assert groups_by_speed({rank: time * factor for rank, time in times.items()}, 0.25) == groups


@pytest.mark.parametrize(
    ("times", "ratio", "message"),
    [
        ({}, 0.2, "got no own times"),
        ({0: 0.1, 3: 0.0}, 0.2, r"got \{3: 0.0\}"),
        ({0: math.nan}, 0.2, "positive and finite"),
        ({0: 0.1}, 0.0, "min_gap_ratio must be positive and finite, got 0.0"),
    ],
)
def test_what_cannot_be_grouped_is_refused(times, ratio, message):
    with pytest.raises(ValueError, match=message):
        groups_by_speed(times, ratio)


# GroupSync

PAIRS = GroupSync(((0, 3), (1, 2)))


def test_each_group_updates_on_its_own():
    assert after(PAIRS, *arrivals(0, 1))[1] == ()
    assert after(PAIRS, *arrivals(0, 1, 3))[1] == (Apply((0, 3)), Release(0), Release(3))
    assert after(PAIRS, *arrivals(0, 1, 3, 3, 0))[1] == (Apply((0, 3)), Release(0), Release(3))
    assert after(PAIRS, *arrivals(0, 1, 3, 2))[1] == (Apply((1, 2)), Release(1), Release(2))
    assert PAIRS.staleness_bound is None


def test_a_group_goes_on_without_who_leaves_and_lets_who_comes_back_in_again():
    assert after(PAIRS, *arrivals(0), Leave(3))[1] == (Apply((0,)), Release(0))
    assert after(PAIRS, Leave(3), Join(3))[1] == ()
    assert after(PAIRS, Leave(3), Join(3), *arrivals(0))[1] == (Apply((0,)), Release(0), Release(3))
    assert after(PAIRS, Leave(3), Leave(0), Join(3))[1] == (Release(3),)


def test_a_rank_in_no_group_updates_alone():
    assert after(PAIRS, Join(7))[1] == (Release(7),)
    assert after(PAIRS, Join(7), *arrivals(7))[1] == (Apply((7,)), Release(7))


def test_groups_take_no_notice_of_time_and_strangers():
    state = after(PAIRS, *arrivals(0, 1))[0]
    assert PAIRS.step(state, Tick(1)) == PAIRS.step(state, Arrive(9)) == (state, ())


@given(events=st.lists(st.tuples(st.sampled_from([Arrive, Arrive, Arrive, Join, Leave]), st.integers(0, 3))))
def test_one_group_is_bsp(events):
    policies = GroupSync((tuple(RANKS),)), BSP()
    states = [policy.init(RANKS) for policy in policies]
    alive = set(RANKS)
    for kind, rank in events:
        if (kind is Join) == (rank in alive):
            continue
        alive = alive - {rank} if kind is Leave else alive | {rank}
        answers = [policy.step(state, kind(rank)) for policy, state in zip(policies, states, strict=True)]
        assert answers[0] == answers[1]
        states = [state for state, _ in answers]


@pytest.mark.parametrize(
    ("groups", "message"),
    [(((0, 1), ()), "at least one rank"), (((0, 1), (1, 2)), "in one group, once"), (((0, 0),), "once")],
)
def test_groups_that_cannot_be_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        GroupSync(groups)


# Wrappers


def test_wrappers_change_the_work_only():
    inner = AttachedRing((0, 1, 3), {2: 0}, max_staleness=3)
    policy = LocalSGD(8, DropCompute(0.2, inner))
    assert policy.work == Work(local_steps=8, limit_s=0.2)
    assert DropCompute(0.2, LocalSGD(8)).work == policy.work
    assert (policy.staleness_bound, policy.wants_scores) == (3, False)
    assert LocalSGD(2, Zeno()).wants_scores
    assert DropCompute(2.0, ASP()).staleness_bound is None
    assert after(policy, *arrivals(2, 0, 1, 3)) == after(inner, *arrivals(2, 0, 1, 3))
    assert LocalSGD(8).inner == DropCompute(0.2).inner == BSP()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(0), "local_steps must be >= 1, got 0"),
        (lambda: LocalSGD(2, LocalSGD(4)), "local steps inside local steps: .* makes 4"),
        (lambda: LocalSGD(2, DropCompute(0.2, LocalSGD(4))), "makes 4"),
        (lambda: DropCompute(0.0), "limit_s must be positive, got 0.0"),
        (lambda: DropCompute(0.2, LocalSGD(4, DropCompute(0.1, KSync(2)))), "a limit inside a limit: .* after 0.1 s"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
