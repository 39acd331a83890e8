"""What every SyncPolicy promises, checked against a shell that keeps the truth.

A new policy is one line in `POLICIES`.
"""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policy.barrier import BSP
from paceline.policy.base import Action, Apply, Arrive, Drop, Event, Join, Leave, Release, SyncPolicy, Tick, Wake
from paceline.policy.ring import AttachedRing
from paceline.types import Rank

POLICIES: list[SyncPolicy[Any]] = [
    BSP(),
    AttachedRing(ring=(0, 1, 2, 3)),
    AttachedRing(ring=(0, 1, 3), parent_of={2: 0}),
    AttachedRing(ring=(0, 1), parent_of={2: 1, 3: 0}, max_staleness=0),
    AttachedRing(ring=(3, 1), parent_of={0: 1, 2: 1}, max_staleness=2),
    AttachedRing(ring=(2,), parent_of={0: 2, 1: 2, 3: 2}, max_staleness=1),
    AttachedRing(ring=(0, 1), parent_of={2: 0}, max_staleness=3),  # rank 3 has no place in it
]
RANKS = frozenset(range(4))
NUM_KNOWN = 6  # ranks 4 and 5 may join later

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)


@dataclass
class Shell:
    """Carries out a policy's actions, keeps the truth, and notes every broken promise under the promise's name."""

    policy: SyncPolicy[Any]
    ranks: frozenset[Rank] = RANKS
    asks_twice: bool = False  # checks purity as well, which takes most of the time
    version: int = 0
    computing: dict[Rank, int] = field(default_factory=dict)  # the version each one's parameters have
    waiting: set[Rank] = field(default_factory=set)
    held: dict[Rank, int] = field(default_factory=dict)  # gradients: the version each was begun at
    num_released: dict[Rank, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = copy.deepcopy(self.policy)  # a policy that changed itself must not spoil the next example
        self.state = self.policy.init(self.ranks)
        self.computing = dict.fromkeys(self.ranks, 0)

    @property
    def alive(self) -> set[Rank]:
        return set(self.computing) | self.waiting

    def feed(self, event: Event) -> None:
        """Let the event happen, ask the policy, carry out what it says."""
        match event:
            case Arrive(rank) if rank in self.computing:
                self.held[rank] = self.computing.pop(rank)
                self.waiting.add(rank)
            case Join(rank):
                self.waiting.add(rank)
            case Leave(rank):
                self.computing.pop(rank, None)
                self.held.pop(rank, None)
                self.waiting.discard(rank)
        self.state, actions = self._asked(event)
        version_before = self.version
        for action in actions:
            self._carry_out(action, version_before)
        if self.alive and not self.computing:
            self._break("progress", f"all of {sorted(self.alive)} wait after {event}")

    def _asked(self, event: Event) -> tuple[Any, tuple[Action, ...]]:
        if not self.asks_twice:
            return self.policy.step(self.state, event)
        twin, policy_before = copy.deepcopy(self.state), copy.deepcopy(self.policy)
        answer = self.policy.step(self.state, event)
        if self.state != twin or self.policy != policy_before:
            self._break("purity", f"{event} changed its input")
        if self.policy.step(twin, event) != answer:
            self._break("purity", f"{event} gave two answers")
        if pickle.loads(pickle.dumps(answer)) != answer:
            self._break("purity", f"the answer to {event} does not survive pickling")
        return answer

    def _carry_out(self, action: Action, version_before: int) -> None:
        match action:
            case Apply(ranks):
                if not ranks or len(set(ranks)) < len(ranks):
                    self._break("safety", f"{action} holds no gradient, or one twice")
                for rank in set(ranks):
                    self._apply(rank)
                self.version += 1
            case Drop(rank, staleness):
                if rank not in self.held:
                    self._break("safety", f"{action} of a gradient that is not held")
                elif staleness != version_before - self.held.pop(rank):
                    self._break("staleness", f"{action} does not say the true staleness")
            case Release(rank):
                if rank not in self.waiting:
                    self._break("safety", f"{action} of a rank that does not wait")
                    return
                if rank in self.held:
                    self._break("safety", f"{action} while its gradient is neither applied nor dropped")
                    del self.held[rank]
                self.waiting.remove(rank)
                self.computing[rank] = self.version
                self.num_released[rank] = self.num_released.get(rank, 0) + 1
            case Wake():
                pass

    def _apply(self, rank: Rank) -> None:
        if rank not in self.held:
            self._break("safety", f"applied rank {rank}'s gradient, which is not held")
            return
        staleness, bound = self.version - self.held.pop(rank), self.policy.staleness_bound
        if bound is not None and staleness > bound:
            self._break("staleness", f"applied rank {rank}'s gradient, {staleness} versions old, bound {bound}")

    def _break(self, promise: str, what: str) -> None:
        self.broken.append(f"{promise}: {what}")

    def breaches(self, promise: str) -> list[str]:
        """The broken promises of one kind."""
        return [b for b in self.broken if b.startswith(promise)]

    def make(self, moves: list[tuple[str, int]]) -> None:
        """Turn drawn moves into events that can happen: `number` picks among the ranks the move can concern."""
        for kind, number in moves:
            match kind:
                case "arrive":
                    concerned, make = sorted(self.computing), Arrive
                case "leave":
                    concerned, make = sorted(self.alive), Leave
                case "join":
                    concerned, make = sorted(set(range(NUM_KNOWN)) - self.alive), Join
                case "stray":  # a message of a rank that has left, or of one nobody knows
                    concerned, make = sorted(set(range(NUM_KNOWN + 2)) - self.alive), Arrive
                case _:
                    concerned, make = [number], Tick
            if concerned:
                self.feed(make(concerned[number % len(concerned)]))

    def go_on(self, num_rounds: int, rng: random.Random) -> None:
        """Let every rank that computes arrive once per round, in any order."""
        for _ in range(num_rounds):
            for rank in rng.sample(sorted(self.computing), len(self.computing)):
                if rank in self.computing:
                    self.feed(Arrive(rank))

    def check_goes_on(self, rng: random.Random) -> None:
        """Everybody alive is released again and again, and updates happen, once computing ranks arrive."""
        version, released = self.version, dict(self.num_released)
        alive = self.alive
        # Two rounds release everybody once: a rank that arrives right after an update waits for the next one. One
        # more goes into a gradient that proves too stale.
        self.go_on(9, rng)
        if alive and self.version < version + 3:
            self._break("progress", f"{self.version - version} updates in 9 rounds of {sorted(alive)}")
        for rank in alive:
            if self.num_released.get(rank, 0) < released.get(rank, 0) + 3:
                self._break("progress", f"rank {rank} was not released 3 times in 9 rounds")


NUMBERS = st.integers(0, 11)
WORK = st.tuples(st.sampled_from(["arrive"] * 6 + ["stray", "tick"]), NUMBERS)
ANYTHING = st.tuples(st.sampled_from(["arrive"] * 10 + ["leave", "join", "stray", "tick"]), NUMBERS)
STARTERS = st.sets(st.sampled_from(sorted(RANKS)), min_size=1).map(frozenset) | st.just(RANKS)
RNG = st.integers(0, 1000).map(random.Random)


@every_policy
@given(ranks=STARTERS, moves=st.lists(ANYTHING, max_size=60))
def test_applies_only_held_gradients_once_and_releases_only_who_waits(policy, ranks, moves):
    shell = Shell(policy, ranks)
    shell.make(moves)
    assert not shell.breaches("safety")


@every_policy
@given(ranks=STARTERS, moves=st.lists(ANYTHING, max_size=60), rng=RNG)
def test_updates_keep_happening_and_nobody_waits_for_ever(policy, ranks, moves, rng):
    shell = Shell(policy, ranks)
    shell.make(moves)
    shell.check_goes_on(rng)
    assert not shell.breaches("progress")


@every_policy
@given(ranks=STARTERS, moves=st.lists(ANYTHING, max_size=60))
def test_no_applied_gradient_is_staler_than_declared(policy, ranks, moves):
    shell = Shell(policy, ranks)
    shell.make(moves)
    assert not shell.breaches("staleness")


@every_policy
@pytest.mark.parametrize("first", sorted(RANKS))
@settings(max_examples=20)  # times four ranks that leave first
@given(moves=st.lists(WORK, max_size=30), others=st.permutations(sorted(RANKS)), num_others=st.integers(0, 2), rng=RNG)
def test_survivors_go_on_whoever_leaves(policy, first, moves, others, num_others, rng):
    shell = Shell(policy)
    shell.make(moves)
    leavers = [first, *[rank for rank in others if rank != first][:num_others]]
    for rank in leavers:
        shell.feed(Leave(rank))
        shell.check_goes_on(rng)
    assert shell.alive == RANKS - set(leavers)
    assert not shell.broken


@every_policy
@given(moves=st.lists(ANYTHING, max_size=40), rng=RNG)
def test_whoever_comes_back_takes_part_again(policy, moves, rng):
    shell = Shell(policy)
    shell.make(moves)
    for rank in sorted(set(range(NUM_KNOWN)) - shell.alive):
        shell.feed(Join(rank))
    shell.check_goes_on(rng)
    assert shell.alive == set(range(NUM_KNOWN))
    assert not shell.broken


@every_policy
@given(ranks=STARTERS, moves=st.lists(ANYTHING, max_size=40))
def test_same_input_same_output_and_everything_pickles(policy, ranks, moves):
    shell = Shell(policy, ranks, asks_twice=True)
    first = copy.deepcopy(shell.state)
    shell.make(moves)
    assert not shell.breaches("purity")
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.init(ranks) == first
