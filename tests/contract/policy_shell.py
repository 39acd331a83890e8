"""A shell for policies that keeps the truth: turns drawn moves into events, and notes every broken promise."""

from __future__ import annotations

import copy
import math
import pickle
import random
from dataclasses import dataclass, field, replace
from typing import Any

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
    Score,
    SyncPolicy,
    Tick,
    Wake,
)
from paceline.types import Rank

RANKS = frozenset(range(4))
NUM_KNOWN = 6  # ranks 4 and 5 may join later
GOOD = Score(dot=1.0, norm_sq=4.0, trusted_norm_sq=1.0, learning_rate=0.1)
BAD = replace(GOOD, dot=-1.0)


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
    wakes: set[int] = field(default_factory=set)  # tokens under way
    num_released: dict[Rank, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = copy.deepcopy(self.policy)  # a policy that changed itself must not spoil the next example
        self.state = self.policy.init(self.ranks)
        self.computing = dict.fromkeys(self.ranks, 0)

    @property
    def alive(self) -> set[Rank]:
        return set(self.computing) | self.waiting

    def arrive(self, rank: Rank, is_good: bool = True) -> None:
        """Let a rank's gradient arrive, with a score where the policy wants one."""
        score = (GOOD if is_good else BAD) if self.policy.wants_scores else None
        self.feed(Arrive(rank, score))

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
            case Tick(token):
                self.wakes.discard(token)
        self.state, actions = self._asked(event)
        version_before = self.version
        for action in actions:
            self._carry_out(action, version_before)
        if self.alive and not self.computing and not self.wakes:
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
        if not survives_pickling(answer):
            self._break("purity", f"the answer to {event} does not survive pickling")
        return answer

    def _carry_out(self, action: Action, version_before: int) -> None:
        match action:
            case Apply(ranks, weights):
                if not ranks or len(set(ranks)) < len(ranks):
                    self._break("safety", f"{action} holds no gradient, or one twice")
                if weights is not None and (len(weights) != len(ranks) or not all(0 <= w < math.inf for w in weights)):
                    self._break("safety", f"{action} has weights that cannot be")
                for rank in set(ranks):
                    self._apply(rank)
                self.version += 1
            case Drop(rank, staleness):
                if rank not in self.held:
                    self._break("safety", f"{action} of a gradient that is not held")
                elif staleness != version_before - self.held.pop(rank):
                    self._break("staleness", f"{action} does not say the true staleness")
            case Cancel(rank):
                if rank not in self.computing:
                    self._break("safety", f"{action} of a rank that does not compute")
                    return
                del self.computing[rank]
                self.waiting.add(rank)
            case Release(rank):
                self._release(rank)
            case Wake(after_s, token):
                if token in self.wakes or not 0 < after_s < math.inf:
                    self._break("safety", f"{action} while {self.wakes} are under way")
                self.wakes.add(token)

    def _apply(self, rank: Rank) -> None:
        if rank not in self.held:
            self._break("safety", f"applied rank {rank}'s gradient, which is not held")
            return
        staleness, bound = self.version - self.held.pop(rank), self.policy.staleness_bound
        if bound is not None and staleness > bound:
            self._break("staleness", f"applied rank {rank}'s gradient, {staleness} versions old, bound {bound}")

    def _release(self, rank: Rank) -> None:
        if rank not in self.waiting:
            self._break("safety", f"released rank {rank}, which does not wait")
            return
        if rank in self.held:
            self._break("safety", f"released rank {rank} while its gradient is neither applied nor dropped")
            del self.held[rank]
        self.waiting.remove(rank)
        self.computing[rank] = self.version
        self.num_released[rank] = self.num_released.get(rank, 0) + 1

    def _break(self, promise: str, what: str) -> None:
        self.broken.append(f"{promise}: {what}")

    def breaches(self, promise: str) -> list[str]:
        """The broken promises of one kind."""
        return [b for b in self.broken if b.startswith(promise)]

    def make(self, moves: list[tuple[str, int]]) -> None:
        """Turn drawn moves into events that can happen: `number` picks among the ranks the move can concern."""
        for kind, number in moves:
            if kind == "tick":  # the time is over
                concerned = sorted(self.wakes)
            elif kind == "old tick":  # of a wake that is over, or that another policy asked for
                concerned = sorted({number} - self.wakes)
            elif kind == "join":
                concerned = sorted(set(range(NUM_KNOWN)) - self.alive)
            elif kind == "stray":  # a message of a rank that has left, or of one nobody knows
                concerned = sorted(set(range(NUM_KNOWN + 2)) - self.alive)
            else:
                concerned = sorted(self.alive if kind == "leave" else self.computing)
            if not concerned:
                continue
            picked = concerned[number % len(concerned)]
            if kind in ("arrive", "arrive badly", "stray"):
                self.arrive(picked, is_good=kind != "arrive badly")
            else:
                self.feed({"leave": Leave, "join": Join, "tick": Tick, "old tick": Tick}[kind](picked))

    def go_on(self, num_rounds: int, rng: random.Random) -> None:
        """Let every rank that computes arrive once per round, in any order, then every wake be answered."""
        for _ in range(num_rounds):
            for rank in rng.sample(sorted(self.computing), len(self.computing)):
                if rank in self.computing:
                    self.arrive(rank)
            for token in sorted(self.wakes):
                self.feed(Tick(token))

    def check_goes_on(self, rng: random.Random) -> None:
        """Everybody alive is released again and again, and updates happen, once computing ranks arrive."""
        version, released = self.version, dict(self.num_released)
        alive = self.alive
        # Two rounds release everybody once: a rank that arrives right after an update waits for the next one. More
        # go into gradients that prove too stale, and into others' catching up with a rank that is ahead.
        self.go_on(12, rng)
        if alive and self.version < version + 3:
            self._break("progress", f"{self.version - version} updates in 12 rounds of {sorted(alive)}")
        for rank in alive:
            if self.num_released.get(rank, 0) < released.get(rank, 0) + 3:
                self._break("progress", f"rank {rank} was not released 3 times in 12 rounds")


def survives_pickling(value: Any) -> bool:
    """Whether it pickles, and comes back equal."""
    try:
        return bool(pickle.loads(pickle.dumps(value)) == value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
