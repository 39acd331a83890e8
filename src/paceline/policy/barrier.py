"""Policies that wait: BSP, KSync and Deadline turn arrivals into updates of all, of the first, of those in time. Pure.

What one group of ranks does that waits for all its members is here too: BSP is one group, `group.py` has several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.policy import quorum
from paceline.policy.base import Action, Apply, Arrive, Event, Join, LateRule, Leave, Release, Tick, Wake, Work
from paceline.policy.quorum import QuorumState
from paceline.policy.rankset import NOBODY, RankSet
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class BspState:
    """Who computes, whose gradient is in, and who waits without one (joined in between)."""

    computing: RankSet
    arrived: RankSet = NOBODY
    idle: RankSet = NOBODY

    @property
    def members(self) -> RankSet:
        """Everybody who takes part."""
        return self.computing | self.arrived | self.idle


def take(state: BspState, event: Arrive | Join | Leave) -> BspState:
    """Take in who arrived, joined or left."""
    rank = event.rank
    match event:
        case Arrive():
            if rank not in state.computing:
                return state
            return BspState(state.computing.minus(rank), state.arrived.plus(rank), state.idle)
        case Join():
            return BspState(state.computing, state.arrived, state.idle.plus(rank))
        case Leave():
            return BspState(state.computing.minus(rank), state.arrived.minus(rank), state.idle.minus(rank))


def fire(state: BspState, group: RankSet) -> tuple[BspState, tuple[Action, ...]]:
    """Make the update of these ranks' gradients once none of them computes any more, and let them go on."""
    if state.computing & group:
        return state, ()
    arrived = state.arrived & group
    released = arrived | (state.idle & group)
    # Ranks that just joined have nothing to apply, but must not wait for each other.
    applied = (Apply(tuple(arrived)),) if arrived else ()
    state = BspState(state.computing | released, state.arrived - arrived, state.idle - released)
    return state, (*applied, *map(Release, released))


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous parallel (= SSGD): an update is everybody's gradient, and everybody waits for it.

    Source:
        Valiant 1990; what DistributedDataParallel does.

    Example:
        >>> bsp = BSP()
        >>> state = bsp.init(frozenset({0, 1}))
        >>> state, actions = bsp.step(state, Arrive(1)); actions
        ()
        >>> state, actions = bsp.step(state, Arrive(0)); actions
        (Apply(ranks=(0, 1), weights=None), Release(rank=0), Release(rank=1))
    """

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    @property
    def staleness_bound(self) -> int | None:
        """Zero: nobody computes while an update is applied."""
        return 0

    def init(self, ranks: frozenset[Rank]) -> BspState:
        """Return the state in which every rank computes its first gradient."""
        return BspState(RankSet.of(ranks))

    def step(self, state: BspState, event: Event) -> tuple[BspState, tuple[Action, ...]]:
        """Fire when the last member arrives, or when the last one missing leaves."""
        if isinstance(event, Tick):
            return state, ()
        state = take(state, event)
        return (state, ()) if state.computing else fire(state, state.members)


@dataclass(frozen=True, slots=True)
class KSync:
    """Backup workers (K-sync): an update is the first `k` gradients; the others are late.

    Where fewer than `k` ranks can still be in time (some left), it takes those. Who joins goes on at once.

    Args:
        k: Gradients per update, >= 1.
        late: What becomes of the others. "drop": a late rank goes on at once when it arrives. "cancel": it goes on
            when the update fires. "join_next": it waits for the next update, which its gradient joins. "carry": it
            waits too, and its gradient is one of the next `k`; that is KAsync.

    Raises:
        ValueError: k below 1, or an unknown late rule.

    Source:
        drop: Chen et al. 2016, backup workers (arXiv 1604.00981). cancel: Dutta et al. 2018, K-sync (arXiv
        1803.01113). join_next: LGC (Xu et al., INFOCOM 2021), late gradient compensation; ours differs: a late
        gradient joins the first update after its arrival, however late it is, where LGC cuts batches into blocks so
        that it is never more than one update late. For the blocks put a `DropCompute` around it.

    Example:
        >>> policy = KSync(2, late="join_next")
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> for event in (Arrive(0), Arrive(1), Arrive(2), Arrive(0), Arrive(1)):
        ...     state, actions = policy.step(state, event)
        >>> actions[0]
        Apply(ranks=(0, 1, 2), weights=None)
    """

    k: int
    late: LateRule = "drop"

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be >= 1, got {self.k}")
        quorum.check_late_rule(self.late)

    @property
    def staleness_bound(self) -> int | None:
        """Zero where late gradients are never applied, else None."""
        return quorum.staleness_bound(self.late)

    def init(self, ranks: frozenset[Rank]) -> QuorumState:
        """Return the state in which every rank computes its first gradient."""
        return quorum.begin(ranks)

    def step(self, state: QuorumState, event: Event) -> tuple[QuorumState, tuple[Action, ...]]:
        """Fire when the k-th gradient that counts arrives, or when no more can come."""
        state, actions = quorum.take(state, event, self.late)
        if not quorum.is_complete(state, self.k):
            return state, actions
        state, fired = quorum.fire(state, self.late)
        return state, (*actions, *fired)


@dataclass(frozen=True, slots=True)
class DeadlineState:
    """Where everybody stands, how many wakes were asked for, and whether the last one is still waited for."""

    quorum: QuorumState
    num_wakes: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Deadline:
    """An update is whatever arrives within a time after its first gradient; sooner when all that can be are in.

    Args:
        after_s: From the first gradient that counts to the update, seconds, > 0.
        late: What becomes of the others, as in `KSync`; under "carry" a late gradient starts the clock like any other.

    Raises:
        ValueError: a time that is not positive and finite, or an unknown late rule.

    Source:
        P-Reduce (Miao et al., SIGMOD 2021) closes a group a fixed time after its first member is ready; ours
        differs: gradients instead of models, and a rule for those that come too late.

    Example:
        >>> policy = Deadline(0.5, late="cancel")
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> state, actions = policy.step(state, Arrive(1)); actions
        (Wake(after_s=0.5, token=1),)
        >>> state, actions = policy.step(state, Arrive(0)); actions
        ()
        >>> policy.step(state, Tick(1))[1][:3]
        (Apply(ranks=(0, 1), weights=None), Cancel(rank=2), Release(rank=0))
    """

    after_s: float
    late: LateRule = "drop"

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.after_s < math.inf:
            raise ValueError(f"after_s must be positive and finite, got {self.after_s}")
        quorum.check_late_rule(self.late)

    @property
    def staleness_bound(self) -> int | None:
        """Zero where late gradients are never applied, else None."""
        return quorum.staleness_bound(self.late)

    def init(self, ranks: frozenset[Rank]) -> DeadlineState:
        """Return the state in which every rank computes its first gradient."""
        return DeadlineState(quorum.begin(ranks))

    def step(self, state: DeadlineState, event: Event) -> tuple[DeadlineState, tuple[Action, ...]]:
        """Fire when nobody who is in time is missing, or when the time is over."""
        gathered, actions = quorum.take(state.quorum, event, self.late)
        over = state.waits and event == Tick(state.num_wakes)
        if over or quorum.is_complete(gathered, None):
            gathered, fired = quorum.fire(gathered, self.late)
            actions = (*actions, *fired)
        waits, num_wakes = bool(gathered.arrived), state.num_wakes
        if waits and not state.waits:
            num_wakes += 1
            actions = (*actions, Wake(self.after_s, num_wakes))
        return DeadlineState(gathered, num_wakes, waits), actions
