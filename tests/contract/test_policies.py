"""What every SyncPolicy promises, checked against a shell that keeps the truth.

A new policy is one line in `POLICIES`. That the checks see something is shown at the end: each promise is broken by
policies with a planted bug, and the check of that promise must find it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from policy_shell import NUM_KNOWN, RANKS, Shell, survives_pickling

from paceline.policy import catalog
from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.base import (
    Action,
    Apply,
    Arrive,
    Cancel,
    Drop,
    Event,
    Join,
    Leave,
    Release,
    SyncPolicy,
    Wake,
    Work,
)
from paceline.policy.group import GroupSync
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing, GroupedRing
from paceline.policy.stale import ASP, SSP, KAsync, Zeno
from paceline.types import Rank

POLICIES: list[SyncPolicy[Any]] = [
    BSP(),
    KSync(3),
    KSync(2, late="cancel"),
    KSync(3, late="join_next"),
    KSync(2, late="carry"),
    Deadline(0.5),
    Deadline(0.5, late="cancel"),
    Deadline(0.5, late="join_next"),
    Deadline(0.5, late="carry"),
    SSP(0),
    SSP(2),
    ASP(),
    ASP(max_staleness=0),
    ASP(max_staleness=3),
    KAsync(3),
    Zeno(0.001, 0.0, 10),
    Zeno(0.0, 0.0, None),
    GroupSync(((0, 1, 2, 3),)),
    GroupSync(((0, 2), (3,))),  # rank 1 is in none
    GroupSync(((3, 4), (0, 1), (2, 5))),
    AttachedRing(ring=(0, 1, 2, 3)),
    AttachedRing(ring=(0, 1, 3), parent_of={2: 0}),
    AttachedRing(ring=(0, 1), parent_of={2: 1, 3: 0}, max_staleness=0),
    AttachedRing(ring=(3, 1), parent_of={0: 1, 2: 1}, max_staleness=2),
    AttachedRing(ring=(2,), parent_of={0: 2, 1: 2, 3: 2}, max_staleness=1),
    AttachedRing(ring=(0, 1), parent_of={2: 0}, max_staleness=3),  # rank 3 has no place in it
    GroupedRing(ring=(0, 1), clusters=((3, 2),), parent_of={3: 1}),
    GroupedRing(ring=(2,), clusters=((0, 1, 3),), parent_of={0: 2}, max_staleness=1),
    GroupedRing(ring=(1,), clusters=((0, 2), (3, 4)), parent_of={0: 1, 3: 1}, max_staleness=2),  # rank 4 starts late
    LocalSGD(8),
    LocalSGD(4, DropCompute(0.2, KSync(3, late="cancel"))),
    DropCompute(0.2, Zeno()),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)

NUMBERS = st.integers(0, 11)
QUIET = ["arrive"] * 6 + ["arrive badly", "stray", "tick", "old tick"]
DRAWN = {
    "ranks": st.sets(st.sampled_from(sorted(RANKS)), min_size=1).map(frozenset) | st.just(RANKS),
    "moves": st.lists(st.tuples(st.sampled_from(QUIET + ["arrive"] * 4 + ["leave", "join"]), NUMBERS), max_size=60),
    "quiet_moves": st.lists(st.tuples(st.sampled_from(QUIET), NUMBERS), max_size=30),
    "leavers": st.lists(NUMBERS, min_size=1, max_size=3),
    "rng": st.integers(0, 1000).map(random.Random),
}


def drawn(check: Callable[..., None]) -> Callable[..., None]:
    """Let hypothesis draw the check's arguments, by their names."""
    return given(**{name: DRAWN[name] for name in inspect.signature(check).parameters if name in DRAWN})(check)


@every_policy
@drawn
def test_applies_only_held_gradients_once_and_releases_only_who_waits(policy, ranks, moves):
    shell = Shell(policy, ranks)
    shell.make(moves)
    assert not shell.breaches("safety")


@every_policy
@drawn
def test_updates_keep_happening_and_nobody_waits_for_ever(policy, ranks, moves, rng):
    shell = Shell(policy, ranks)
    shell.make(moves)
    shell.check_goes_on(rng)
    assert not shell.breaches("progress")


@every_policy
@drawn
def test_no_applied_gradient_is_staler_than_declared(policy, ranks, moves):
    shell = Shell(policy, ranks)
    shell.make(moves)
    assert not shell.breaches("staleness")


@every_policy
@settings(max_examples=100)
@drawn
def test_survivors_go_on_whoever_leaves(policy, quiet_moves, leavers, rng):
    shell = Shell(policy)
    shell.make(quiet_moves)
    for number in leavers:
        whom = [*sorted(shell.computing), *sorted(shell.waiting)]  # most often one that others wait for
        shell.feed(Leave(whom[number % len(whom)]))
        shell.check_goes_on(rng)
    assert len(shell.alive) == len(RANKS) - len(leavers)
    assert not shell.broken


@every_policy
@drawn
def test_whoever_comes_back_takes_part_again(policy, moves, rng):
    shell = Shell(policy)
    shell.make(moves)
    for rank in sorted(set(range(NUM_KNOWN)) - shell.alive):
        shell.feed(Join(rank))
    shell.check_goes_on(rng)
    assert shell.alive == set(range(NUM_KNOWN))
    assert not shell.broken


@every_policy
@drawn
def test_same_input_same_output_and_everything_pickles(policy, ranks, moves):
    shell = Shell(policy, ranks, asks_twice=True)
    first = copy.deepcopy(shell.state)
    shell.make(moves)
    assert not shell.breaches("purity")
    assert survives_pickling(policy)
    assert policy.init(ranks) == first


@every_policy
def test_survives_json(policy):
    again = catalog.from_json(json.loads(json.dumps(catalog.to_json(policy), allow_nan=False)))
    assert type(again) is type(policy)
    assert again == policy


@every_policy
def test_says_what_a_shell_must_know(policy):
    assert isinstance(policy.work, Work)
    assert isinstance(policy.wants_scores, bool)
    assert policy.staleness_bound is None or policy.staleness_bound >= 0


def test_every_kind_of_policy_is_checked():
    assert {type(policy) for policy in POLICIES} == set(catalog.POLICIES)


# Planted bugs: the checks above must see them.

Step = Callable[[SyncPolicy[Any], Any, Event], tuple[Any, tuple[Action, ...]]]


@dataclass
class Mutant:
    """A policy with a planted bug: its steps are those of a sound one, spoilt."""

    inner: SyncPolicy[Any]
    spoilt: Step
    bound: int | None = -1  # -1: as the inner policy
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def staleness_bound(self) -> int | None:
        return self.inner.staleness_bound if self.bound == -1 else self.bound

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Action, ...]]:
        if self.spoilt is counts_its_calls:
            self.calls += 1
        return self.spoilt(self.inner, state, event)


def as_it_is(inner, state, event):
    return inner.step(state, event)


def counts_its_calls(inner, state, event):
    return inner.step(state, event)


def only(*kinds: type) -> Callable[[Step], Step]:
    """The bug shows at these events only."""

    def limit(spoilt: Step) -> Step:
        def step(inner, state, event):
            return (spoilt if isinstance(event, kinds) else as_it_is)(inner, state, event)

        return step

    return limit


def spoil_actions(change: Callable[[tuple[Action, ...]], Any]) -> Step:
    """Right states, wrong actions."""

    def step(inner, state, event):
        state, actions = inner.step(state, event)
        return state, tuple(change(actions))

    return step


def without(kind: type) -> Step:
    return spoil_actions(lambda actions: [a for a in actions if not isinstance(a, kind)])


def twice(kind: type) -> Step:
    return spoil_actions(lambda actions: [a for a in actions for _ in range(2 if isinstance(a, kind) else 1)])


def ignored(_inner, state, _event):
    return state, ()


def applies_everybody(inner, state, event):
    answer = inner.step(state, event)
    return (answer[0], (Apply(tuple(RANKS)),)) if isinstance(event, Arrive) else answer


def keeps_the_gradient_of_who_left(inner, state, event):
    after, actions = inner.step(state, event)
    return (replace(after, arrived=after.arrived | (state.arrived - after.arrived)) if not actions else after), actions


def does_not_fire(inner, state, event):
    """Takes the leaver out, and leaves it at that."""
    after, actions = inner.step(state, event)
    rank = event.rank
    if not actions:
        return after, ()
    return replace(
        state, computing=state.computing.minus(rank), arrived=state.arrived.minus(rank), idle=state.idle.minus(rank)
    ), ()


def takes_joining_for_arriving(inner, state, event):
    state = replace(state, computing=state.computing.plus(event.rank))
    return inner.step(state, Arrive(event.rank))


def drops_everything(inner, state, event):
    state, actions = inner.step(state, event)
    if not isinstance(event, Arrive) or not actions:
        return state, actions
    return replace(state, version=0), (Drop(event.rank, 0), Release(event.rank))


def releases_first(actions):
    return sorted(actions, key=lambda action: not isinstance(action, Release))


def miscounts(actions):
    return [replace(a, staleness=a.staleness + 1) if isinstance(a, Drop) else a for a in actions]


def adds_a_weight(actions):
    return [replace(a, weights=(*a.weights, 1.0)) if isinstance(a, Apply) else a for a in actions]


def forgets_the_last(actions):
    releases = [a for a in actions if isinstance(a, Release)]
    return [a for a in actions if a not in releases[1:]]


@dataclass
class Diary:
    """A state that is changed in place."""

    entries: list[Event]
    inner: Any


class KeepsADiary(Mutant):
    def init(self, ranks: frozenset[Rank]) -> Diary:
        return Diary([], self.inner.init(ranks))

    def step(self, state: Diary, event: Event) -> tuple[Diary, tuple[Action, ...]]:
        state.entries.append(event)
        inner, actions = self.inner.step(state.inner, event)
        return Diary(state.entries, inner), actions


class KeepsAFunction(Mutant):
    def init(self, ranks: frozenset[Rank]) -> Any:
        return self.inner.init(ranks), self

    def step(self, state: Any, event: Event) -> Any:
        inner, actions = self.inner.step(state[0], event)
        return (inner, lambda: actions), actions


IS_FIRST_TIME = itertools.cycle([True, False])


def answers_otherwise_when_asked_again(inner, state, event):
    state, actions = inner.step(state, event)
    return state, actions if next(IS_FIRST_TIME) else actions[::-1]


SAFETY = test_applies_only_held_gradients_once_and_releases_only_who_waits
PROGRESS = test_updates_keep_happening_and_nobody_waits_for_ever
STALENESS = test_no_applied_gradient_is_staler_than_declared
SURVIVORS = test_survivors_go_on_whoever_leaves
RETURN = test_whoever_comes_back_takes_part_again
PURITY = test_same_input_same_output_and_everything_pickles
RING = AttachedRing(ring=(0, 1), parent_of={2: 0, 3: 1}, max_staleness=1)
CLUSTER = GroupedRing(ring=(0,), clusters=((1, 2, 3),), parent_of={1: 0})

MUTANTS = [
    ("applies gradients that are not held", SAFETY, Mutant(BSP(), applies_everybody)),
    ("applies every update twice", SAFETY, Mutant(KAsync(2), twice(Apply))),
    ("releases ranks that compute", SAFETY, Mutant(ASP(), twice(Release))),
    ("releases before it applies", SAFETY, Mutant(BSP(), spoil_actions(releases_first))),
    ("releases without applying", SAFETY, Mutant(SSP(1), without(Apply))),
    ("drops twice", SAFETY, Mutant(KSync(2), twice(Drop))),
    ("cancels who waits", SAFETY, Mutant(KSync(2, late="cancel"), twice(Cancel))),
    ("weighs more gradients than there are", SAFETY, Mutant(Zeno(), spoil_actions(adds_a_weight))),
    ("asks for one wake twice", SAFETY, Mutant(Deadline(0.5), twice(Wake))),
    ("applies the gradient of who has left", SAFETY, Mutant(BSP(), only(Leave)(keeps_the_gradient_of_who_left))),
    ("overlooks who leaves", PROGRESS, Mutant(BSP(), only(Leave)(ignored))),
    ("overlooks who leaves", SURVIVORS, Mutant(GroupSync(((0, 1), (2, 3))), only(Leave)(ignored))),
    ("overlooks that the slowest leaves", SURVIVORS, Mutant(SSP(0), only(Leave)(ignored))),
    ("overlooks that a mate leaves", SURVIVORS, Mutant(CLUSTER, only(Leave)(ignored))),
    ("fires at arrivals only", SURVIVORS, Mutant(BSP(), only(Leave)(does_not_fire))),
    ("overlooks who joins", PROGRESS, Mutant(KSync(3), only(Join)(ignored))),
    ("overlooks who joins", RETURN, Mutant(RING, only(Join)(ignored))),
    ("takes joining for arriving", RETURN, Mutant(BSP(), only(Join)(takes_joining_for_arriving))),
    ("releases one only", PROGRESS, Mutant(KAsync(3), spoil_actions(forgets_the_last))),
    ("never applies", PROGRESS, Mutant(ASP(), drops_everything)),
    ("never releases", PROGRESS, Mutant(Deadline(0.5, late="join_next"), without(Release))),
    ("applies what is too stale", STALENESS, Mutant(ASP(), as_it_is, bound=1)),
    ("applies what is one version too stale", STALENESS, Mutant(RING, as_it_is, bound=0)),
    ("applies what is late", STALENESS, Mutant(KSync(3, late="join_next"), as_it_is, bound=0)),
    ("miscounts versions", STALENESS, Mutant(ASP(max_staleness=0), spoil_actions(miscounts))),
    ("changes its state in place", PURITY, KeepsADiary(BSP(), as_it_is)),
    ("keeps what cannot be pickled", PURITY, KeepsAFunction(BSP(), as_it_is)),
    ("changes itself", PURITY, Mutant(BSP(), counts_its_calls)),
    ("answers otherwise when asked again", PURITY, Mutant(BSP(), answers_otherwise_when_asked_again)),
]


@pytest.mark.parametrize(("promise", "mutant"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_the_checks_see_a_policy_that(promise, mutant):
    found = drawn(promise.hypothesis.inner_test)
    any_example_will_do = settings(max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        any_example_will_do(found)(mutant)


@dataclass(frozen=True)
class Unlisted:
    """A policy that nobody told the catalog of."""


def test_the_checks_see_a_policy_that_json_cannot_hold():
    with pytest.raises(ValueError, match="not in the catalog"):
        test_survives_json(Unlisted())
    impostor = type("KSync", (), {"k": 1, "late": "drop"})()
    with pytest.raises(AssertionError):
        test_survives_json(impostor)
