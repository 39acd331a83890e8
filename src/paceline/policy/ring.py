"""AttachedRing: turns arrivals of a fast ring and of slow ranks attached to it into updates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from paceline.policy.base import Action, Apply, Arrive, Drop, Event, Join, Leave, Release, Tick, Work
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class RingState:
    """Updates so far, who is in the ring and who attached, whose gradient is in, and at which version it was begun."""

    version: int
    ring: frozenset[Rank]
    attached: frozenset[Rank]
    arrived: frozenset[Rank]
    idle: frozenset[Rank]
    base: Mapping[Rank, int]


@dataclass(frozen=True, slots=True)
class AttachedRing:
    """The fast ranks form a ring that updates in step; each slow rank is attached to a parent in it.

    An update fires when the whole ring has arrived, and holds whatever attached ranks have fully sent by then; they
    are released with the new parameters. A gradient older than the bound is dropped and counted.

    Args:
        ring: Ranks that update in step, at least one.
        parent_of: Parent in the ring of every attached rank.
        max_staleness: Most versions between the parameters of an attached rank's gradient and the update, >= 0.

    Raises:
        ValueError: an empty ring, a rank both in the ring and attached, a parent outside the ring, a negative bound.

    Source:
        STAR (arXiv 2512.09685), all-reduce architecture, released scripts: ring plus children of parents. Ours
        differs: a sample-weighted mean instead of a plain sum, a staleness bound, and state transfer when roles
        change (the scripts promote a child with stale parameters).

    Example:
        >>> policy = AttachedRing(ring=(0, 1), parent_of={2: 0}, max_staleness=8)
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> state, _ = policy.step(state, Arrive(2))
        >>> state, _ = policy.step(state, Arrive(1))
        >>> policy.step(state, Arrive(0))[1]
        (Apply(ranks=(0, 1, 2)), Release(rank=0), Release(rank=1), Release(rank=2))
    """

    ring: tuple[Rank, ...]
    parent_of: Mapping[Rank, Rank] = field(default_factory=dict)
    max_staleness: int = 16

    def __post_init__(self) -> None:
        if not self.ring:
            raise ValueError("the ring needs at least one rank, got none")
        if len(set(self.ring)) < len(self.ring):
            raise ValueError(f"a rank can be in the ring once, got {self.ring}")
        both = set(self.ring) & set(self.parent_of)
        if both:
            raise ValueError(f"ranks {sorted(both)} are both in the ring and attached")
        strangers = set(self.parent_of.values()) - set(self.ring)
        if strangers:
            raise ValueError(f"parents must be in the ring {self.ring}, got {sorted(strangers)}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness of an applied gradient, versions."""
        return self.max_staleness

    @property
    def ranks(self) -> frozenset[Rank]:
        """All ranks the policy speaks of."""
        return frozenset(self.ring) | frozenset(self.parent_of)

    def children_of(self, rank: Rank) -> tuple[Rank, ...]:
        """The ranks attached to `rank`, in order."""
        return tuple(sorted(child for child, parent in self.parent_of.items() if parent == rank))

    def init(self, ranks: frozenset[Rank]) -> RingState:
        """Return the state in which every rank computes its first gradient at version 0.

        A rank that the policy does not speak of counts as attached, as one that joins does.
        """
        ring = frozenset(self.ring) & ranks
        state = RingState(
            version=0,
            ring=ring,
            attached=ranks - ring,
            arrived=frozenset(),
            idle=frozenset(),
            base=dict.fromkeys(ranks, 0),
        )
        return _with_ring(state)

    def staleness(self, state: RingState, rank: Rank) -> int:
        """Versions between the parameters `rank` works on and the next update to fire."""
        return state.version - state.base[rank]

    def admits(self, staleness: int) -> bool:
        """Whether a gradient that stale may join an update: a parent asks before it adds it to its own."""
        return staleness <= self.max_staleness

    def step(self, state: RingState, event: Event) -> tuple[RingState, tuple[Action, ...]]:
        """Fire when the last ring member arrives; attached ranks never hold anybody up."""
        match event:
            case Arrive(rank) if rank in state.ring | state.attached:
                state = replace(state, arrived=state.arrived | {rank})
            case Join(rank):
                # It has no place in the plan: attached until the next one, with a fresh start at the next update.
                joined = replace(
                    state,
                    attached=state.attached | {rank},
                    idle=state.idle | {rank},
                    base={**state.base, rank: state.version},
                )
                state = _with_ring(joined)
            case Leave(rank):
                state = self._without(state, rank)
            case Tick() | Arrive():
                return state, ()
        if not state.ring or not state.ring <= state.arrived | state.idle:
            return state, ()
        return self._fire(state)

    def _fire(self, state: RingState) -> tuple[RingState, tuple[Action, ...]]:
        # A ring member can be too stale as well: when the ring died and attached ranks took its place.
        late = [rank for rank in sorted(state.arrived) if not self.admits(self.staleness(state, rank))]
        drops = tuple(Drop(rank, self.staleness(state, rank)) for rank in late)
        fresh = tuple(sorted(state.arrived - frozenset(late)))
        if not fresh:
            return self._release(state, drops)
        return self._release(replace(state, version=state.version + 1), (Apply(fresh), *drops))

    def _release(self, state: RingState, before: tuple[Action, ...]) -> tuple[RingState, tuple[Action, ...]]:
        waiting = sorted(state.arrived | state.idle)
        state = replace(
            state,
            arrived=frozenset(),
            idle=frozenset(),
            base={**state.base, **dict.fromkeys(waiting, state.version)},
        )
        return state, (*before, *(Release(rank) for rank in waiting))

    def _without(self, state: RingState, rank: Rank) -> RingState:
        gone = frozenset({rank})
        left = replace(
            state,
            ring=state.ring - gone,
            attached=state.attached - gone,
            arrived=state.arrived - gone,
            idle=state.idle - gone,
            base={r: v for r, v in state.base.items() if r != rank},
        )
        return _with_ring(left)


def _with_ring(state: RingState) -> RingState:
    """Where no ring member is left, the attached ranks carry on as the ring: somebody must fire."""
    return state if state.ring else replace(state, ring=state.attached, attached=frozenset())
