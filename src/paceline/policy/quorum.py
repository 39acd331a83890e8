"""The counting behind KSync, Deadline and KAsync: turns arrivals into updates of the first few, and sorts the others.

A rank computes *on time* while its gradient can still count towards the update that is being gathered, and *late* once
that update has gone without it. What then becomes of the gradient is the late rule (`base.LateRule`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from paceline.policy.base import Action, Apply, Arrive, Cancel, Drop, Event, Join, LateRule, Leave, Release
from paceline.policy.rankset import NOBODY, ZEROS, RankNumbers, RankSet
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class QuorumState:
    """Where everybody stands while an update is gathered.

    Args:
        version: Updates so far.
        on_time: Compute a gradient that counts towards this update.
        late: Compute a gradient that has missed its update.
        arrived: Wait; their gradients count towards this update.
        joining: Wait; their late gradients go into this update on top of those that count.
        begun: Version at which each late rank began its gradient.
    """

    version: int
    on_time: RankSet
    late: RankSet = NOBODY
    arrived: RankSet = NOBODY
    joining: RankSet = NOBODY
    begun: RankNumbers = ZEROS


def check_late_rule(rule: str) -> None:
    """Raise ValueError unless this is a late rule."""
    if rule not in get_args(LateRule):
        raise ValueError(f"late must be one of {', '.join(get_args(LateRule))}, got {rule!r}")


def staleness_bound(rule: LateRule) -> int | None:
    """Largest staleness of an applied gradient under this rule, versions: 0 where late ones are never applied."""
    return 0 if rule in ("drop", "cancel") else None


def begin(ranks: frozenset[Rank]) -> QuorumState:
    """Return the state in which every rank computes its first gradient."""
    return QuorumState(0, RankSet.of(ranks))


def take(state: QuorumState, event: Event, rule: LateRule) -> tuple[QuorumState, tuple[Action, ...]]:
    """Take in who arrived, joined or left; fires nothing.

    A late gradient is dropped or kept here, as the rule says. Who joins goes on at once: its gradient counts.
    """
    match event:
        case Arrive(rank) if rank in state.on_time:
            return replace(state, on_time=state.on_time.minus(rank), arrived=state.arrived.plus(rank)), ()
        case Arrive(rank) if rank in state.late and rule == "join_next":
            return replace(state, late=state.late.minus(rank), joining=state.joining.plus(rank)), ()
        case Arrive(rank) if rank in state.late:
            dropped = Drop(rank, state.version - state.begun[rank])
            state = replace(state, late=state.late.minus(rank), on_time=state.on_time.plus(rank))
            return state, (dropped, Release(rank))
        case Join(rank):
            return replace(state, on_time=state.on_time.plus(rank)), (Release(rank),)
        case Leave(rank):
            return _without(state, rank), ()
    return state, ()


def is_complete(state: QuorumState, k: int | None) -> bool:
    """Whether the update fires: `k` that count are in, or all that can be (always all where `k` is None)."""
    if k is not None and len(state.arrived) >= k:
        return True
    return not state.on_time and has_gradient(state)


def has_gradient(state: QuorumState) -> bool:
    """Whether there is anything to apply."""
    return bool(state.arrived or state.joining)


def fire(state: QuorumState, rule: LateRule) -> tuple[QuorumState, tuple[Action, ...]]:
    """Make the update of all gradients that are held, and let their ranks go on."""
    held = state.arrived | state.joining
    missed = state.on_time
    cancelled = missed if rule == "cancel" else NOBODY
    released = held | cancelled
    actions: tuple[Action, ...] = (Apply(tuple(held)), *map(Cancel, cancelled), *map(Release, released))
    version = state.version + 1
    if rule == "carry":
        return QuorumState(version, missed | released), actions
    if rule == "cancel":
        return QuorumState(version, released), actions
    begun = state.begun.put(missed, state.version)  # whoever computed on time began at the present version
    return QuorumState(version, released, state.late | missed, begun=begun), actions


def _without(state: QuorumState, rank: Rank) -> QuorumState:
    return replace(
        state,
        on_time=state.on_time.minus(rank),
        late=state.late.minus(rank),
        arrived=state.arrived.minus(rank),
        joining=state.joining.minus(rank),
    )
