"""KSync and Deadline by example; what all policies promise is in tests/contract/test_policies.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.base import Apply, Arrive, Cancel, Drop, Join, Leave, Release, Tick, Wake
from paceline.policy.stale import KAsync

RANKS = frozenset(range(4))


def after(policy, *events, ranks=RANKS):
    """The state after these events, and what the last one brought."""
    state, actions = policy.init(ranks), ()
    for event in events:
        state, actions = policy.step(state, event)
    return state, actions


def arrivals(*ranks):
    return [Arrive(rank) for rank in ranks]


def released(*ranks):
    return tuple(map(Release, ranks))


# KSync


@pytest.mark.parametrize("late", ["drop", "join_next", "carry"])
def test_an_update_is_the_first_k(late):
    assert after(KSync(3, late), *arrivals(3, 0))[1] == ()
    assert after(KSync(3, late), *arrivals(3, 0, 2))[1] == (Apply((0, 2, 3)), *released(0, 2, 3))


def test_a_late_gradient_is_dropped_when_it_arrives_and_its_rank_is_in_time_again():
    policy = KSync(3)
    state, actions = after(policy, *arrivals(0, 1, 2, 0, 1, 2, 3))
    assert actions == (Drop(3, 2), Release(3))
    assert policy.step(state, Arrive(3))[1] == ()
    assert after(policy, *arrivals(0, 1, 2, 3, 3, 0, 1))[1] == (Apply((0, 1, 3)), *released(0, 1, 3))


def test_who_is_late_is_cancelled_and_goes_on_with_the_others():
    state, actions = after(KSync(2, late="cancel"), *arrivals(1, 2))
    assert actions == (Apply((1, 2)), Cancel(0), Cancel(3), *released(0, 1, 2, 3))
    assert set(state.on_time) == RANKS


def test_a_late_gradient_joins_the_next_update_on_top_of_its_quorum():
    policy = KSync(2, late="join_next")
    assert after(policy, *arrivals(0, 1, 2))[1] == ()
    assert after(policy, *arrivals(0, 1, 2, 3, 0))[1] == ()  # 2 and 3 do not count
    assert after(policy, *arrivals(0, 1, 2, 3, 0, 1))[1] == (Apply((0, 1, 2, 3)), *released(0, 1, 2, 3))


def test_a_late_gradient_that_carries_counts_towards_the_next_quorum():
    policy = KSync(2, late="carry")
    assert after(policy, *arrivals(0, 1, 3, 2))[1] == (Apply((2, 3)), *released(2, 3))


@given(
    x=st.integers(1, 5),
    events=st.lists(st.tuples(st.sampled_from([Arrive, Arrive, Arrive, Join, Leave]), st.integers(0, 5))),
)
def test_carry_is_kasync(x, events):
    policies = KSync(x, late="carry"), KAsync(x)
    states = [policy.init(RANKS) for policy in policies]
    for kind, rank in events:
        answers = [policy.step(state, kind(rank)) for policy, state in zip(policies, states, strict=True)]
        assert answers[0] == answers[1]
        states = [state for state, _ in answers]


@given(order=st.permutations(sorted(RANKS)), late=st.sampled_from(["drop", "cancel", "join_next", "carry"]))
def test_k_of_all_is_bsp(order, late):
    assert after(KSync(4, late), *arrivals(*order))[1] == after(BSP(), *arrivals(*order))[1]


def test_where_ranks_leave_the_quorum_is_what_is_left():
    assert after(KSync(3), Leave(0), *arrivals(1), Leave(2), Leave(3))[1] == (Apply((1,)), Release(1))
    # Only late ones are left: they join an update of their own.
    policy = KSync(3, late="join_next")
    events = [*arrivals(0, 1, 2, 3), Leave(0), Leave(1), Leave(2)]
    assert after(policy, *events)[1] == (Apply((3,)), Release(3))


def test_who_joins_goes_on_at_once_and_counts():
    state, actions = after(KSync(3), *arrivals(0, 1), Join(7))
    assert actions == (Release(7),)
    assert KSync(3).step(state, Arrive(7))[1] == (Apply((0, 1, 7)), *released(0, 1, 7))


@pytest.mark.parametrize(("late", "bound"), [("drop", 0), ("cancel", 0), ("join_next", None), ("carry", None)])
def test_what_is_late_is_stale_where_it_is_applied(late, bound):
    assert KSync(2, late).staleness_bound == Deadline(1.0, late).staleness_bound == bound


# Deadline


def test_the_clock_starts_at_the_first_arrival_and_its_end_makes_the_update():
    policy = Deadline(0.5)
    assert after(policy, *arrivals(2))[1] == (Wake(0.5, 1),)
    assert after(policy, *arrivals(2, 0))[1] == ()
    state, actions = after(policy, *arrivals(2, 0), Tick(1))
    assert actions == (Apply((0, 2)), *released(0, 2))
    assert policy.step(state, Arrive(1))[1] == (Drop(1, 1), Release(1))


def test_all_in_time_make_the_update_at_once_and_the_tick_then_does_nothing():
    state, actions = after(Deadline(0.5), *arrivals(2, 0, 1, 3))
    assert actions == (Apply((0, 1, 2, 3)), *released(0, 1, 2, 3))
    assert Deadline(0.5).step(state, Tick(1)) == (state, ())


def test_an_old_tick_does_not_end_the_next_update():
    assert after(Deadline(0.5), *arrivals(0, 1, 2, 3, 0))[1] == (Wake(0.5, 2),)
    assert after(Deadline(0.5), *arrivals(0, 1, 2, 3, 0), Tick(1))[1] == ()
    assert after(Deadline(0.5), *arrivals(0, 1, 2, 3, 0), Tick(2))[1] == (Apply((0,)), Release(0))


def test_nobody_waits_for_a_rank_whose_gradient_would_be_dropped():
    # 3 missed the first update, so that the second is complete without it.
    events = [*arrivals(0, 1, 2), Tick(1), *arrivals(0, 1, 2)]
    assert after(Deadline(0.5), *events)[1] == (Apply((0, 1, 2)), *released(0, 1, 2))
    assert after(Deadline(0.5, late="carry"), *events)[1] == ()


def test_a_late_gradient_joins_without_starting_the_clock():
    policy = Deadline(0.5, late="join_next")
    events = [*arrivals(0, 1, 2), Tick(1), *arrivals(3)]
    assert after(policy, *events)[1] == ()
    assert after(policy, *events, *arrivals(1))[1] == (Wake(0.5, 2),)
    assert after(policy, *events, *arrivals(1), Tick(2))[1] == (Apply((1, 3)), *released(1, 3))


def test_a_carried_gradient_starts_the_clock():
    events = [*arrivals(0, 1, 2), Tick(1), *arrivals(3)]
    assert after(Deadline(0.5, late="carry"), *events)[1] == (Wake(0.5, 2),)


def test_the_deadline_cancels_who_is_late():
    assert after(Deadline(0.5, late="cancel"), *arrivals(0, 1), Tick(1))[1] == (
        Apply((0, 1)),
        Cancel(2),
        Cancel(3),
        *released(0, 1, 2, 3),
    )


def test_the_clock_stops_when_the_only_one_in_leaves():
    state, actions = after(Deadline(0.5), *arrivals(2), Leave(2), Tick(1))
    assert actions == ()
    assert Deadline(0.5).step(state, Arrive(0))[1] == (Wake(0.5, 2),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KSync(0), "k must be >= 1, got 0"),
        (lambda: KSync(2, late="wait"), "late must be one of drop, cancel, join_next, carry, got 'wait'"),
        (lambda: Deadline(0.0), "after_s must be positive and finite, got 0.0"),
        (lambda: Deadline(float("inf")), "got inf"),
        (lambda: Deadline(float("nan")), "got nan"),
        (lambda: Deadline(1.0, late="block"), "got 'block'"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
