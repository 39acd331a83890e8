"""BSP and the attached ring by example; what all policies promise is in tests/contract/test_policies.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.barrier import BSP
from paceline.policy.base import Apply, Arrive, Drop, Join, Leave, Release, Tick
from paceline.policy.ring import AttachedRing, GroupedRing

RANKS = frozenset(range(4))


def after(policy, *events, ranks=RANKS):
    """The state after these events, and what the last one brought."""
    state, actions = policy.init(ranks), ()
    for event in events:
        state, actions = policy.step(state, event)
    return state, actions


def arrivals(*ranks):
    return [Arrive(rank) for rank in ranks]


def test_bsp_waits_for_the_last():
    assert after(BSP(), *arrivals(3, 0, 2))[1] == ()
    assert after(BSP(), *arrivals(3, 0, 2, 1))[1] == (Apply((0, 1, 2, 3)), *map(Release, range(4)))


def test_bsp_fires_when_the_one_it_waits_for_leaves():
    assert after(BSP(), *arrivals(3, 0, 2), Leave(1))[1] == (Apply((0, 2, 3)), Release(0), Release(2), Release(3))


def test_bsp_lets_who_joins_wait_for_the_update_but_not_for_itself():
    state, actions = after(BSP(), *arrivals(0, 1), Join(7), *arrivals(2, 3))
    assert actions == (Apply((0, 1, 2, 3)), *map(Release, (0, 1, 2, 3, 7)))
    assert set(state.members) == RANKS | {7}
    assert after(BSP(), *map(Leave, range(4)), Join(7))[1] == (Release(7),)


def test_bsp_takes_no_notice_of_time_and_strangers():
    before = after(BSP(), *arrivals(0, 1))[0]
    assert BSP().step(before, Tick(3)) == (before, ())
    assert BSP().step(before, Arrive(9)) == (before, ())


RING = AttachedRing(ring=(0, 1, 3), parent_of={2: 0}, max_staleness=2)


def test_the_ring_never_waits_for_an_attached_rank():
    state, actions = after(RING, *arrivals(0, 3, 1) * 50)
    assert actions == (Apply((0, 1, 3)), Release(0), Release(1), Release(3))
    assert state.version == 50


def test_an_attached_rank_waits_for_the_next_update_of_the_ring():
    state, actions = after(RING, *arrivals(0, 1, 2))
    assert actions == ()
    assert RING.step(state, Arrive(3))[1] == (Apply((0, 1, 2, 3)), *map(Release, range(4)))


@pytest.mark.parametrize("updates_before", [0, 1, 2, 3, 4])
def test_a_gradient_older_than_the_bound_is_dropped_and_its_rank_starts_anew(updates_before):
    state, actions = after(RING, *arrivals(0, 1, 3) * updates_before, *arrivals(2, 0, 1, 3))
    released = tuple(map(Release, range(4)))
    if updates_before <= 2:
        assert actions == (Apply((0, 1, 2, 3)), *released)
    else:
        assert actions == (Apply((0, 1, 3)), Drop(2, updates_before), *released)
    assert RING.staleness(state, 2) == 0
    assert after(RING, *arrivals(0, 1, 3) * updates_before)[0].begun[2] == 0


def test_a_parent_admits_up_to_the_bound():
    assert [RING.admits(staleness) for staleness in (0, 2, 3)] == [True, True, False]


def test_attached_ranks_carry_on_when_the_ring_is_gone():
    policy = AttachedRing(ring=(0,), parent_of={1: 0, 2: 0}, max_staleness=1)
    ranks = frozenset({0, 1, 2})
    state, actions = after(policy, *arrivals(1), Leave(0), *arrivals(2), ranks=ranks)
    assert actions == (Apply((1, 2)), Release(1), Release(2))
    assert (set(state.ring), set(state.attached)) == ({1, 2}, set())


def test_carrying_on_drops_what_had_become_too_stale():
    policy = AttachedRing(ring=(0,), parent_of={1: 0, 2: 0}, max_staleness=1)
    start = [*arrivals(0, 0), Leave(0)]  # two updates without 1 and 2
    state, actions = after(policy, *start, *arrivals(1, 2), ranks=frozenset({0, 1, 2}))
    assert actions == (Drop(1, 2), Drop(2, 2), Release(1), Release(2))
    assert state.version == 2  # nothing was applied
    assert after(policy, *start, *arrivals(1, 2, 1, 2), ranks=frozenset({0, 1, 2}))[1][0] == Apply((1, 2))


def test_who_joins_is_attached_and_starts_at_the_next_update():
    state, actions = after(RING, Leave(1), Join(1), *arrivals(0, 3))
    assert actions == (Apply((0, 3)), Release(0), Release(1), Release(3))
    assert (set(state.ring), set(state.attached)) == ({0, 3}, {1, 2})
    assert RING.staleness(state, 1) == 0


def test_who_joins_after_everybody_has_left_goes_on_alone():  # found by hypothesis: it waited for ever
    state, actions = after(RING, *map(Leave, range(4)), Join(5))
    assert actions == (Release(5),)
    assert RING.step(state, Arrive(5))[1] == (Apply((5,)), Release(5))


def test_ranks_that_start_without_the_ring_carry_on_as_the_ring():  # found by hypothesis: they waited for ever
    assert after(RING, Arrive(2), ranks=frozenset({2}))[1] == (Apply((2,)), Release(2))


def test_a_rank_without_a_place_in_the_plan_is_attached():  # found by hypothesis: it was never released
    policy = AttachedRing(ring=(0, 1), parent_of={2: 0})
    assert after(policy, *arrivals(3, 0, 1))[1] == (Apply((0, 1, 3)), Release(0), Release(1), Release(3))


def test_what_the_ring_knows_of_itself():
    policy = AttachedRing(ring=(4, 1), parent_of={7: 1, 0: 1, 2: 4})
    assert policy.ranks == {0, 1, 2, 4, 7}
    assert policy.children_of(1) == (0, 7)
    assert policy.children_of(7) == ()
    assert policy.staleness_bound == policy.max_staleness == 16
    assert BSP().staleness_bound == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ring": ()}, "at least one rank"),
        ({"ring": (0, 1, 0)}, "in the ring once"),
        ({"ring": (0, 1), "parent_of": {1: 0}}, r"ranks \[1\] are both"),
        ({"ring": (0, 1), "parent_of": {2: 3}}, r"got \[3\]"),
        ({"ring": (0, 1), "max_staleness": -1}, "must be >= 0, got -1"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttachedRing(**arguments)


CLUSTER = GroupedRing(ring=(0,), clusters=((2, 1), (3,)), parent_of={2: 0, 3: 0}, max_staleness=1)


def test_a_cluster_arrives_when_its_last_member_does():
    state, actions = after(CLUSTER, *arrivals(1, 3, 0))
    assert actions == (Apply((0, 3)), Release(0), Release(3))
    state, actions = after(CLUSTER, *arrivals(1, 3, 0, 2, 0))
    assert actions == (Apply((0, 1, 2)), Release(0), Release(1), Release(2))
    assert state.version == 2


def test_a_cluster_ages_as_one():
    assert after(CLUSTER, *arrivals(1, 0, 0, 2, 0))[1] == (
        Apply((0,)),
        Drop(1, 2),
        Drop(2, 2),
        *map(Release, (0, 1, 2)),
    )


def test_a_cluster_goes_on_without_the_mate_that_leaves():
    assert after(CLUSTER, *arrivals(1), Leave(2), *arrivals(0))[1][0] == Apply((0, 1))
    assert after(CLUSTER, Leave(2), *arrivals(1, 0))[1][0] == Apply((0, 1))


def test_a_mate_that_comes_back_is_on_its_own():
    events = [*arrivals(1), Leave(2), Join(2), *arrivals(0)]  # 1 and 2 go on here
    assert after(CLUSTER, *events, *arrivals(2, 0))[1] == (Apply((0, 2)), Release(0), Release(2))


def test_clusters_dissolve_where_the_ring_is_gone():
    assert after(CLUSTER, *arrivals(1, 3), Leave(0))[1] == ()
    assert after(CLUSTER, *arrivals(1, 3), Leave(0), *arrivals(2))[1] == (Apply((1, 2, 3)), *map(Release, (1, 2, 3)))


def test_what_a_grouped_ring_knows_of_itself():
    assert CLUSTER.ranks == {0, 1, 2, 3}
    assert CLUSTER.staleness_bound == 1


@given(events=st.lists(st.tuples(st.sampled_from([Arrive, Arrive, Arrive, Join, Leave]), st.integers(0, 4))))
def test_clusters_of_one_are_an_attached_ring(events):
    attached = AttachedRing(ring=(0, 1), parent_of={2: 0, 3: 1}, max_staleness=1)
    grouped = GroupedRing(ring=(0, 1), clusters=((2,), (3,)), parent_of={2: 0, 3: 1}, max_staleness=1)
    states = attached.init(RANKS), grouped.init(RANKS)
    alive = set(RANKS)
    for kind, rank in events:
        if (kind is Join) == (rank in alive):
            continue
        alive = alive - {rank} if kind is Leave else alive | {rank}
        (a, expected), (b, actions) = attached.step(states[0], kind(rank)), grouped.step(states[1], kind(rank))
        assert actions == expected
        states = a, b


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clusters": ((2, 3), ())}, "at least one rank"),
        ({"clusters": ((2, 3), (3,))}, "in one group, once"),
        ({"clusters": ((3, 2),)}, r"got \[3\] and \[2\]"),
        ({"clusters": ((2, 1),)}, r"ranks \[1\] are both"),
        ({"clusters": ((2, 3),), "parent_of": {2: 3}}, r"got \[3\]"),
        ({"clusters": ((2, 3),), "ring": ()}, "at least one rank"),
    ],
)
def test_a_grouped_ring_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupedRing(**{"ring": (0, 1), "parent_of": {2: 0}, **arguments})
