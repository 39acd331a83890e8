"""The interface of every synchronisation mode: turns an event into actions and a new state. Pure.

A shell is a loop and a `match`: it feeds what happened and carries out what comes back. Live and simulated shells
feed the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from paceline.types import Rank

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Arrive:
    """A rank has finished a gradient and waits to be released."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Join:
    """A rank has come (back); it waits for its first release."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank is gone for good: dead, or done."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; asked for with `Wake`."""

    now_s: float


Event = Arrive | Join | Leave | Tick


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply one update made of exactly these ranks' gradients, each held by the shell."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw this rank's held gradient away and count it; `staleness` in versions says why."""

    rank: Rank
    staleness: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let this waiting rank go on, with the parameters as they are now."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` at this time."""

    at_s: float


Action = Apply | Drop | Release | Wake


class SyncPolicy(Protocol[S]):
    """Decides whose gradients join which update and who may go on. A frozen dataclass is its own configuration.

    What every policy promises, and the contract suite checks: it applies only gradients that have arrived and each
    at most once; it releases only ranks that wait; its staleness bound holds; survivors go on when a rank leaves;
    the same input gives the same output, and states pickle.
    """

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness of an applied gradient, versions; None for unbounded."""
        ...

    def init(self, ranks: frozenset[Rank]) -> S:
        """Return the state in which every rank computes its first gradient at version 0."""
        ...

    def step(self, state: S, event: Event) -> tuple[S, tuple[Action, ...]]:
        """Take in one event; return the new state and what the shell must do, in order."""
        ...
