"""Policies that wait: BSP turns everybody's arrival into one update. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from paceline.policy.base import Action, Apply, Arrive, Event, Join, Leave, Release, Tick, Work
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class BspState:
    """Who takes part, whose gradient is in, and who waits without one (joined in between)."""

    members: frozenset[Rank]
    arrived: frozenset[Rank] = frozenset()
    idle: frozenset[Rank] = frozenset()


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
        (Apply(ranks=(0, 1)), Release(rank=0), Release(rank=1))
    """

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    @property
    def staleness_bound(self) -> int | None:
        """Zero: nobody computes while an update is applied."""
        return 0

    def init(self, ranks: frozenset[Rank]) -> BspState:
        """Return the state in which every rank computes its first gradient."""
        return BspState(ranks)

    def step(self, state: BspState, event: Event) -> tuple[BspState, tuple[Action, ...]]:
        """Fire when the last member arrives, or when the last one missing leaves."""
        match event:
            case Arrive(rank) if rank in state.members:
                state = replace(state, arrived=state.arrived | {rank})
            case Join(rank):
                state = replace(state, members=state.members | {rank}, idle=state.idle | {rank})
            case Leave(rank):
                gone = frozenset({rank})
                state = BspState(state.members - gone, state.arrived - gone, state.idle - gone)
            case Tick() | Arrive():
                return state, ()
        if state.arrived | state.idle != state.members:
            return state, ()
        # Ranks that just joined have nothing to apply, but must not wait for each other.
        applied = (Apply(tuple(sorted(state.arrived))),) if state.arrived else ()
        released = tuple(Release(rank) for rank in sorted(state.arrived | state.idle))
        return BspState(state.members), (*applied, *released)
