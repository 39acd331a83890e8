"""Policies that hardly wait: ASP, SSP, KAsync and Zeno turn an arrival into an update at once, or nearly so. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.policy import quorum
from paceline.policy.base import Action, Apply, Arrive, Drop, Event, Join, Leave, Release, Score, Work
from paceline.policy.quorum import QuorumState
from paceline.policy.rankset import NOBODY, ZEROS, RankNumbers, RankSet
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class AspState:
    """Updates so far, who takes part (everybody computes), and at which version each one began."""

    version: int
    members: RankSet
    begun: RankNumbers = ZEROS


def _came_or_went(state: AspState, event: Event) -> tuple[AspState, tuple[Action, ...]]:
    """Who joins goes on at once."""
    match event:
        case Join(rank):
            begun = state.begun.put_one(rank, state.version)
            return AspState(state.version, state.members.plus(rank), begun), (Release(rank),)
        case Leave(rank):
            return AspState(state.version, state.members.minus(rank), state.begun), ()
    return state, ()


def _applied(state: AspState, rank: Rank, weight: float | None = None) -> tuple[AspState, tuple[Action, ...]]:
    version = state.version + 1
    state = AspState(version, state.members, state.begun.put_one(rank, version))
    return state, (Apply((rank,), None if weight is None else (weight,)), Release(rank))


def _dropped(state: AspState, rank: Rank) -> tuple[AspState, tuple[Action, ...]]:
    staleness = state.version - state.begun[rank]
    state = AspState(state.version, state.members, state.begun.put_one(rank, state.version))
    return state, (Drop(rank, staleness), Release(rank))


def _check_max_staleness(max_staleness: int | None) -> None:
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness must be >= 0 or None, got {max_staleness}")


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous parallel (= ASGD): every gradient is an update of its own, and nobody waits.

    Args:
        max_staleness: A gradient that is more versions old than this is dropped; None for no limit.

    Raises:
        ValueError: a negative limit.

    Source:
        Dean et al. 2012 (DistBelief, Downpour SGD); the limit as in Zeno++'s and other demos.

    Example:
        >>> policy = ASP(max_staleness=0)
        >>> state = policy.init(frozenset({0, 1}))
        >>> state, actions = policy.step(state, Arrive(0)); actions
        (Apply(ranks=(0,), weights=None), Release(rank=0))
        >>> policy.step(state, Arrive(1))[1]
        (Drop(rank=1, staleness=1), Release(rank=1))
    """

    max_staleness: int | None = None

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_max_staleness(self.max_staleness)

    @property
    def staleness_bound(self) -> int | None:
        """The limit."""
        return self.max_staleness

    def init(self, ranks: frozenset[Rank]) -> AspState:
        """Return the state in which every rank computes its first gradient."""
        return AspState(0, RankSet.of(ranks))

    def step(self, state: AspState, event: Event) -> tuple[AspState, tuple[Action, ...]]:
        """Apply what arrives, or drop it as too stale."""
        match event:
            case Arrive(rank) if rank in state.members:
                if self.max_staleness is not None and state.version - state.begun[rank] > self.max_staleness:
                    return _dropped(state, rank)
                return _applied(state, rank)
        return _came_or_went(state, event)


@dataclass(frozen=True, slots=True)
class Zeno:
    """Zeno++: ASP that looks at every gradient first and drops those that point away from a trusted one.

    With v the trusted gradient, g~ = g |v| / |g| and eta the learning rate, g is accepted when
    eta <v, g~> - rho |g~|^2 + eta epsilon >= 0, and applied as g~.

    Args:
        rho: Price of the gradient's length, >= 0; larger accepts less.
        epsilon: Slack in the loss, >= 0; larger accepts more.
        max_staleness: A gradient that is more versions old than this is dropped unseen; None for no limit.

    Raises:
        ValueError: a negative or infinite rho or epsilon, or a negative limit.

    Source:
        Xie, Koyejo, Gupta, ICML 2020 (arXiv 1903.07020), algorithm and demo values. Ours differs from the public
        code, which charges rho on the length before scaling: we follow the formula. A gradient of length zero, or one
        whose numbers are not finite, is dropped.

    Example:
        >>> policy = Zeno()
        >>> state = policy.init(frozenset({0, 1}))
        >>> along = Score(dot=2.0, norm_sq=4.0, trusted_norm_sq=1.0, learning_rate=0.1)
        >>> state, actions = policy.step(state, Arrive(0, along)); actions
        (Apply(ranks=(0,), weights=(0.5,)), Release(rank=0))
        >>> policy.step(state, Arrive(1, Score(-2.0, 4.0, 1.0, 0.1)))[1]
        (Drop(rank=1, staleness=1), Release(rank=1))
    """

    rho: float = 0.001
    epsilon: float = 0.0
    max_staleness: int | None = 10

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("rho", self.rho), ("epsilon", self.epsilon)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        _check_max_staleness(self.max_staleness)

    @property
    def staleness_bound(self) -> int | None:
        """The limit."""
        return self.max_staleness

    def weight(self, score: Score) -> float | None:
        """The factor |v| / |g| for an accepted gradient; None for one that is refused."""
        if not 0 < score.norm_sq < math.inf:
            return None
        scale = math.sqrt(score.trusted_norm_sq / score.norm_sq)
        eta = score.learning_rate
        gain = eta * score.dot * scale - self.rho * score.trusted_norm_sq + eta * self.epsilon
        return scale if gain >= 0 else None

    def init(self, ranks: frozenset[Rank]) -> AspState:
        """Return the state in which every rank computes its first gradient."""
        return AspState(0, RankSet.of(ranks))

    def step(self, state: AspState, event: Event) -> tuple[AspState, tuple[Action, ...]]:
        """Apply what arrives and is accepted, drop the rest."""
        match event:
            case Arrive(rank, score) if rank in state.members:
                assert score is not None, "Zeno wants a score with every arrival"
                if self.max_staleness is not None and state.version - state.begun[rank] > self.max_staleness:
                    return _dropped(state, rank)
                weight = self.weight(score)
                return _dropped(state, rank) if weight is None else _applied(state, rank, weight)
        return _came_or_went(state, event)


@dataclass(frozen=True, slots=True)
class KAsync:
    """STAR's static x-order: any `x` gradients that arrive make an update, and their ranks go on together.

    A rank waits until its own gradient is in an update; the others keep computing, so that theirs become stale.

    Args:
        x: Gradients per update, >= 1; where fewer ranks are left, as many as there are.

    Raises:
        ValueError: x below 1.

    Source:
        STAR (arXiv 2512.09685), released scripts; K-async SGD of Dutta et al. 2018 (arXiv 1803.01113). Ours differs
        from STAR's: a mean of the x gradients and a separate learning rate rule, where the scripts divide by N.

    Example:
        >>> policy = KAsync(2)
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> for rank in (2, 0, 0, 1):
        ...     state, actions = policy.step(state, Arrive(rank))
        >>> actions  # rank 1's gradient is one version old
        (Apply(ranks=(0, 1), weights=None), Release(rank=0), Release(rank=1))
    """

    x: int

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.x < 1:
            raise ValueError(f"x must be >= 1, got {self.x}")

    @property
    def staleness_bound(self) -> int | None:
        """None: others may update any number of times while a rank computes."""
        return None

    def init(self, ranks: frozenset[Rank]) -> QuorumState:
        """Return the state in which every rank computes its first gradient."""
        return quorum.begin(ranks)

    def step(self, state: QuorumState, event: Event) -> tuple[QuorumState, tuple[Action, ...]]:
        """Fire when x gradients are in, or all that can come."""
        state, actions = quorum.take(state, event, "carry")
        if not quorum.is_complete(state, self.x):
            return state, actions
        state, fired = quorum.fire(state, "carry")
        return state, (*actions, *fired)


@dataclass(frozen=True, slots=True)
class SspState:
    """`lead[i]`: ranks that have finished i gradients more than the slowest; the first and the last are not empty."""

    lead: tuple[RankSet, ...]


@dataclass(frozen=True, slots=True)
class SSP:
    """Stale synchronous parallel: every gradient is an update of its own; who is too far ahead waits for the slowest.

    A rank at clock c (finished gradients) goes on while c - the least clock of all <= bound. Who joins starts at the
    least clock.

    Args:
        bound: Largest lead at which a rank may begin a gradient, clocks, >= 0. At 0 all do the same steps, as in BSP,
            but every gradient is applied when it arrives.

    Raises:
        ValueError: a negative bound.

    Source:
        Ho et al., NeurIPS 2013. Ours differs: a rank gets the newest parameters at every release, where their
        workers may read cached ones.

    Example:
        >>> policy = SSP(bound=1)
        >>> state = policy.init(frozenset({0, 1}))
        >>> state, actions = policy.step(state, Arrive(0)); actions
        (Apply(ranks=(0,), weights=None), Release(rank=0))
        >>> state, actions = policy.step(state, Arrive(0)); actions
        (Apply(ranks=(0,), weights=None),)
        >>> policy.step(state, Arrive(1))[1]
        (Apply(ranks=(1,), weights=None), Release(rank=0), Release(rank=1))
    """

    bound: int

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(f"bound must be >= 0, got {self.bound}")

    @property
    def staleness_bound(self) -> int | None:
        """None: what is bounded is clocks. In versions that is (2 bound + 1) for each of the other ranks."""
        return None

    def init(self, ranks: frozenset[Rank]) -> SspState:
        """Return the state in which every rank computes its first gradient."""
        return SspState((RankSet.of(ranks),) if ranks else ())

    def step(self, state: SspState, event: Event) -> tuple[SspState, tuple[Action, ...]]:
        """Apply what arrives; release it unless it is too far ahead, and those whom it held back."""
        match event:
            case Arrive(rank):
                clock = _clock(state, rank)
                if clock is None or clock > self.bound:  # unknown, or waiting
                    return state, ()
                lead = [*state.lead, NOBODY] if clock + 1 == len(state.lead) else list(state.lead)
                left = lead[clock] = lead[clock].minus(rank)
                lead[clock + 1] = lead[clock + 1].plus(rank)
                goes_on = clock < self.bound
                if left or clock:  # the slowest are where they were
                    return SspState(tuple(lead)), (Apply((rank,)), Release(rank)) if goes_on else (Apply((rank,)),)
                state, released = self._caught_up(lead)
                return state, (Apply((rank,)), *map(Release, released.plus(rank) if goes_on else released))
            case Join(rank):
                least, *rest = state.lead or (NOBODY,)
                return SspState((least.plus(rank), *rest)), (Release(rank),)
            case Leave(rank):
                state, released = self._caught_up([ranks.minus(rank) for ranks in state.lead])
                return state, tuple(map(Release, released))
        return state, ()

    def _caught_up(self, lead: list[RankSet]) -> tuple[SspState, RankSet]:
        """The state after the slowest moved on or left, and who was waiting for that."""
        waiting = lead[self.bound + 1] if len(lead) > self.bound + 1 else NOBODY
        while lead and not lead[-1]:
            lead.pop()
        least = next((clock for clock, ranks in enumerate(lead) if ranks), 0)
        return SspState(tuple(lead[least:])), waiting if least else NOBODY


def _clock(state: SspState, rank: Rank) -> int | None:
    """Gradients that this rank has finished beyond the slowest; None where it takes no part."""
    for clock, ranks in enumerate(state.lead):
        if rank in ranks:
            return clock
    return None
