"""ASP, SSP, KAsync and Zeno by example; what all policies promise is in tests/contract/test_policies.py."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.base import Apply, Arrive, Drop, Join, Leave, Release, Score, Tick
from paceline.policy.stale import ASP, SSP, KAsync, Zeno

RANKS = frozenset(range(4))


def after(policy, *events, ranks=RANKS):
    """The state after these events, and what the last one brought."""
    state, actions = policy.init(ranks), ()
    for event in events:
        state, actions = policy.step(state, event)
    return state, actions


def arrivals(*ranks):
    return [Arrive(rank) for rank in ranks]


# ASP


def test_every_gradient_is_an_update():
    assert after(ASP(), *arrivals(2, 2, 2, 1))[1] == (Apply((1,)), Release(1))
    assert ASP().staleness_bound is None


def test_beyond_the_limit_it_is_dropped_and_its_rank_starts_anew():
    policy = ASP(max_staleness=2)
    assert after(policy, *arrivals(0, 0, 1))[1] == (Apply((1,)), Release(1))
    assert after(policy, *arrivals(0, 0, 0, 1))[1] == (Drop(1, 3), Release(1))
    assert after(policy, *arrivals(0, 0, 0, 1, 1))[1] == (Apply((1,)), Release(1))
    assert policy.staleness_bound == 2


def test_who_joins_starts_with_the_version_of_now():
    policy = ASP(max_staleness=0)
    assert after(policy, *arrivals(0, 0), Leave(1), Join(1))[1] == (Release(1),)
    assert after(policy, *arrivals(0, 0), Leave(1), Join(1), *arrivals(1))[1] == (Apply((1,)), Release(1))
    state = after(policy, Leave(1))[0]
    assert policy.step(state, Arrive(1)) == policy.step(state, Tick(1)) == (state, ())


# SSP


def test_who_is_too_far_ahead_waits_for_the_slowest():
    policy, pair = SSP(bound=2), frozenset({0, 1})
    for num_done in range(1, 3):
        assert after(policy, *arrivals(*[0] * num_done), ranks=pair)[1] == (Apply((0,)), Release(0))
    assert after(policy, *arrivals(0, 0, 0), ranks=pair)[1] == (Apply((0,)),)
    assert after(policy, *arrivals(0, 0, 0, 1), ranks=pair)[1] == (Apply((1,)), Release(0), Release(1))


def test_ssp_bounds_clocks_not_versions():
    assert SSP(3).staleness_bound is None


def test_who_waits_goes_on_when_the_slowest_leaves():
    assert after(SSP(0), *arrivals(0, 1, 2), Leave(3))[1] == tuple(map(Release, range(3)))
    assert after(SSP(0), *arrivals(0, 1), Leave(3))[1] == ()
    assert after(SSP(0), *map(Leave, range(4)))[0].lead == ()
    assert after(SSP(1), *arrivals(0), Leave(0))[0] == SSP(1).init(RANKS - {0})


def test_who_joins_starts_at_the_least_clock():
    state, actions = after(SSP(1), *arrivals(0, 1, 2, 3, 0), Join(7))
    assert actions == (Release(7),)
    assert [set(ranks) for ranks in state.lead] == [{1, 2, 3, 7}, {0}]
    assert after(SSP(1), *map(Leave, range(4)), Join(7))[1] == (Release(7),)


def test_ssp_takes_no_notice_of_time_strangers_and_who_waits():
    state = after(SSP(0), *arrivals(0))[0]
    for event in (Tick(1), Arrive(9), Arrive(0)):
        assert SSP(0).step(state, event) == (state, ())


@given(bound=st.integers(0, 3), picks=st.lists(st.integers(0, 99), max_size=200))
def test_clocks_stay_within_the_bound_and_so_does_staleness(bound, picks):
    policy = SSP(bound)
    state = policy.init(RANKS)
    clock, begun, running = dict.fromkeys(RANKS, 0), dict.fromkeys(RANKS, 0), set(RANKS)
    for version, pick in enumerate(picks):
        rank = sorted(running)[pick % len(running)]
        state, actions = policy.step(state, Arrive(rank))
        assert actions[0] == Apply((rank,))
        assert version - begun[rank] <= 3 * (2 * bound + 1)
        clock[rank] += 1
        running.discard(rank)
        for action in actions[1:]:
            running.add(action.rank)
            begun[action.rank] = version + 1
        least = min(clock.values())
        assert running == {r for r in RANKS if clock[r] - least <= bound}


# KAsync


def test_any_x_make_an_update_and_go_on_together():
    assert after(KAsync(2), *arrivals(3))[1] == ()
    assert after(KAsync(2), *arrivals(3, 1))[1] == (Apply((1, 3)), Release(1), Release(3))
    assert after(KAsync(2), *arrivals(3, 1, 3, 0))[1] == (Apply((0, 3)), Release(0), Release(3))
    assert after(KAsync(9), *arrivals(3, 1, 2, 0))[1][0] == Apply((0, 1, 2, 3))
    assert KAsync(2).staleness_bound is None


@given(picks=st.lists(st.integers(0, 3), max_size=40))
def test_x_of_one_is_asp(picks):
    policies = KAsync(1), ASP()
    states = [policy.init(RANKS) for policy in policies]
    for rank in picks:
        answers = [policy.step(state, Arrive(rank)) for policy, state in zip(policies, states, strict=True)]
        assert answers[0][1] == answers[1][1]
        states = [state for state, _ in answers]


# Zeno


SCORE = Score(dot=3.0, norm_sq=9.0, trusted_norm_sq=4.0, learning_rate=0.5)


def accepted(score, rho=0.1, epsilon=0.0):
    """The published rule, with the vectors: v = (2, 0), g = (dot / 2, the rest of its length)."""
    v = (2.0, 0.0)
    g = (score.dot / 2, math.sqrt(score.norm_sq - (score.dot / 2) ** 2))
    scale = math.hypot(*v) / math.hypot(*g)
    g = (g[0] * scale, g[1] * scale)
    eta = score.learning_rate
    return eta * (v[0] * g[0] + v[1] * g[1]) - rho * (g[0] ** 2 + g[1] ** 2) + eta * epsilon >= 0


@given(
    dot=st.floats(-6, 6),
    rho=st.floats(0, 2),
    epsilon=st.floats(0, 2),
    eta=st.floats(0.01, 1),
)
def test_the_rule_is_the_published_one(dot, rho, epsilon, eta):
    score = replace(SCORE, dot=dot, learning_rate=eta)
    edge = eta * dot * 2 / 3 - rho * 4 + eta * epsilon
    if abs(edge) > 1e-9:
        assert (Zeno(rho, epsilon, None).weight(score) is not None) == accepted(score, rho, epsilon)


def test_what_is_accepted_gets_the_length_of_the_trusted_one():
    policy = Zeno(0.1, 0.0, 1)
    assert after(policy, Arrive(2, SCORE))[1] == (Apply((2,), (2 / 3,)), Release(2))
    assert after(policy, Arrive(2, replace(SCORE, dot=-3.0)))[1] == (Drop(2, 0), Release(2))


def test_slack_accepts_what_would_be_dropped():
    against = replace(SCORE, dot=-0.3)
    assert Zeno(0.0, 0.0, None).weight(against) is None
    assert Zeno(0.0, 0.3, None).weight(against) == 2 / 3


def test_a_gradient_that_is_too_stale_is_dropped_unseen():
    events = [Arrive(0, SCORE), Arrive(0, SCORE), Arrive(1, SCORE)]
    assert after(Zeno(0.1, 0.0, 1), *events)[1] == (Drop(1, 2), Release(1))
    assert after(Zeno(0.1, 0.0, None), *events)[1][0] == Apply((1,), (2 / 3,))
    assert Zeno(0.1, 0.0, 1).staleness_bound == 1


@pytest.mark.parametrize("norm_sq", [0.0, math.inf, math.nan])
def test_a_gradient_without_a_length_is_dropped(norm_sq):
    assert Zeno().weight(replace(SCORE, norm_sq=norm_sq)) is None
    assert Zeno().weight(replace(SCORE, dot=math.nan)) is None


def test_zeno_lets_who_joins_go_on_at_once():
    assert after(Zeno(), Leave(1), Join(1))[1] == (Release(1),)
    assert after(Zeno(), Leave(1), Arrive(1, SCORE))[1] == ()


def test_an_arrival_without_a_score_is_the_shells_mistake():
    with pytest.raises(AssertionError, match="wants a score"):
        after(Zeno(), Arrive(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ASP(max_staleness=-1), "max_staleness must be >= 0 or None, got -1"),
        (lambda: SSP(-1), "bound must be >= 0, got -1"),
        (lambda: KAsync(0), "x must be >= 1, got 0"),
        (lambda: Zeno(-0.1, 0.0, 1), "rho must be >= 0 and finite, got -0.1"),
        (lambda: Zeno(0.1, math.inf, 1), "epsilon must be >= 0 and finite, got inf"),
        (lambda: Zeno(0.1, 0.0, -1), "got -1"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
