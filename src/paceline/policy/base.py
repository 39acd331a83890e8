"""The interface of every synchronisation mode: turns an event into actions and a new state. Pure.

A shell is a loop and a `match`: it feeds what happened and carries out what comes back. Live and simulated shells
feed the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from paceline.types import Rank

S = TypeVar("S")


LateRule = Literal["drop", "cancel", "join_next", "carry"]
"""What becomes of a gradient that misses its update.

drop: thrown away on arrival. cancel: its rank is told to give up at once. join_next: joins the next update, on top of
that one's own quorum. carry: counts towards the next update's quorum.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does between a release and its arrival.

    Args:
        local_steps: Optimizer steps of its own; above 1 it contributes the change of its model instead of a gradient.
        limit_s: It stops after the micro-batch in which this time has passed, and contributes what it has; None for
            no limit.

    Raises:
        ValueError: less than one step or a limit that is not positive.
    """

    local_steps: int = 1
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ValueError(f"local_steps must be >= 1, got {self.local_steps}")
        if self.limit_s is not None and not self.limit_s > 0:
            raise ValueError(f"limit_s must be positive, got {self.limit_s}")


@dataclass(frozen=True, slots=True)
class Score:
    """How a gradient compares with a trusted one, for policies that look before they accept (Zeno++).

    Args:
        dot: Inner product of both.
        norm_sq: Squared 2-norm of the rank's gradient, >= 0.
        trusted_norm_sq: Squared 2-norm of the trusted one, >= 0.
        learning_rate: In force now, > 0.
    """

    dot: float
    norm_sq: float
    trusted_norm_sq: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Arrive:
    """A rank has finished a gradient and waits to be released; scored where the policy asks for it."""

    rank: Rank
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """A rank has come (back); it waits for its first release."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank is gone for good: dead, or done. A gradient of its that is held goes with it."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Tick:
    """The time asked for with `Wake` has passed; `token` says which of them."""

    token: int


Event = Arrive | Join | Leave | Tick


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply one update made of exactly these ranks' gradients, each held by the shell.

    Args:
        ranks: Whose.
        weights: Factor on each one's share of the sample-weighted mean; None for 1 each.
    """

    ranks: tuple[Rank, ...]
    weights: tuple[float, ...] | None = None


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
class Cancel:
    """Tell this computing rank to give up its gradient, which counts as dropped; from now on it waits to be released.

    Where the gradient is on its way already, the shell throws it away and announces no arrival.
    """

    rank: Rank


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` with this token when so much time has passed; one that nobody needs any more does no harm.

    Args:
        after_s: From now, seconds, > 0.
        token: Comes back with the tick; no two that are under way have the same.
    """

    after_s: float
    token: int


Action = Apply | Drop | Release | Cancel | Wake


class SyncPolicy(Protocol[S]):
    """Decides whose gradients join which update and who may go on. A frozen dataclass is its own configuration.

    What every policy promises, and the contract suite checks: it applies only gradients that have arrived and each
    at most once; it releases only ranks that wait, and cancels only ranks that compute; as long as computing ranks
    arrive and wakes are answered nobody waits for ever, whoever leaves or joins; its staleness bound holds; the same
    input gives the same output; states pickle, and the policy survives JSON (`catalog.py`). It takes no notice of
    arrivals of ranks that it does not expect.
    """

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness of an applied gradient, versions; None for unbounded."""
        ...

    @property
    def work(self) -> Work:
        """What a rank does between a release and its arrival."""
        ...

    @property
    def wants_scores(self) -> bool:
        """Whether arrivals must carry a score."""
        ...

    def init(self, ranks: frozenset[Rank]) -> S:
        """Return the state in which every rank computes its first gradient at version 0."""
        ...

    def step(self, state: S, event: Event) -> tuple[S, tuple[Action, ...]]:
        """Take in one event; return the new state and what the shell must do, in order."""
        ...
