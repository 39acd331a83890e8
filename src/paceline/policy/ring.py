"""AttachedRing, GroupedRing: turn arrivals of a fast ring and of slow ranks attached to it into updates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from paceline.policy.base import Action, Apply, Arrive, Drop, Event, Join, Leave, Release, Work
from paceline.policy.group import check_groups, group_of_each
from paceline.policy.rankset import NOBODY, ZEROS, RankNumbers, RankSet
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class RingState:
    """Where everybody stands while an update is gathered.

    Args:
        version: Updates so far.
        ring: Members of the ring.
        attached: Everybody else.
        computing: Members of either that do not wait.
        held: Wait; their gradients can join the next update.
        partial: Wait; their gradients are in, but not yet all of their cluster's.
        clustered: Attached ranks that arrive together with their cluster (empty in an AttachedRing).
        begun: Version at which each rank began its gradient.
    """

    version: int
    ring: RankSet
    attached: RankSet
    computing: RankSet
    held: RankSet = NOBODY
    partial: RankSet = NOBODY
    clustered: RankSet = NOBODY
    begun: RankNumbers = ZEROS


def _begin(ring: tuple[Rank, ...], ranks: frozenset[Rank], clusters: Mapping[Rank, RankSet]) -> RingState:
    everybody = RankSet.of(ranks)
    present = RankSet.of(ring) & everybody
    attached = everybody - present
    clustered = attached & RankSet.of(clusters)
    return _with_ring(RingState(0, present, attached, computing=everybody, clustered=clustered))


def _step(
    state: RingState, event: Event, max_staleness: int, clusters: Mapping[Rank, RankSet]
) -> tuple[RingState, tuple[Action, ...]]:
    """Fire when the last ring member arrives; attached ranks never hold anybody up."""
    match event:
        case Arrive(rank) if rank in state.computing:
            state = _arrived(state, rank, clusters)
        case Join(rank):
            # It has no place in the plan: attached until the next one, with a fresh start at the next update.
            state = _with_ring(replace(state, attached=state.attached.plus(rank)))
        case Leave(rank):
            state = _without(state, rank, clusters)
        case _:
            return state, ()
    if not state.ring or state.ring & state.computing:
        return state, ()
    return _fire(state, max_staleness)


def _arrived(state: RingState, rank: Rank, clusters: Mapping[Rank, RankSet]) -> RingState:
    computing = state.computing.minus(rank)
    if rank not in state.clustered:
        return replace(state, computing=computing, held=state.held.plus(rank))
    return _gathered(replace(state, computing=computing, partial=state.partial.plus(rank)), clusters[rank])


def _gathered(state: RingState, cluster: RankSet) -> RingState:
    """A cluster whose gradients are all in can join the next update."""
    mates = cluster & state.clustered
    if not mates <= state.partial:
        return state
    return replace(state, held=state.held | mates, partial=state.partial - mates)


def _fire(state: RingState, max_staleness: int) -> tuple[RingState, tuple[Action, ...]]:
    # A ring member can be too stale as well: when the ring died and attached ranks took its place.
    staleness = {rank: state.version - state.begun[rank] for rank in state.held}
    fresh = tuple(rank for rank in staleness if staleness[rank] <= max_staleness)
    drops = [Drop(rank, staleness[rank]) for rank in staleness if staleness[rank] > max_staleness]
    applied = (Apply(fresh),) if fresh else ()
    version = state.version + len(applied)
    released = (state.ring | state.attached) - state.computing - state.partial
    state = replace(
        state,
        version=version,
        computing=state.computing | released,
        held=NOBODY,
        begun=state.begun.put(released, version),
    )
    return state, (*applied, *drops, *map(Release, released))


def _without(state: RingState, rank: Rank, clusters: Mapping[Rank, RankSet]) -> RingState:
    left = replace(
        state,
        ring=state.ring.minus(rank),
        attached=state.attached.minus(rank),
        computing=state.computing.minus(rank),
        held=state.held.minus(rank),
        partial=state.partial.minus(rank),
        clustered=state.clustered.minus(rank),
    )
    if rank in state.clustered:
        left = _gathered(left, clusters[rank])
    return _with_ring(left)


def _with_ring(state: RingState) -> RingState:
    """Where no ring member is left, the attached ranks carry on as the ring: somebody must fire."""
    if state.ring:
        return state
    held = state.held | state.partial
    return replace(state, ring=state.attached, attached=NOBODY, held=held, partial=NOBODY, clustered=NOBODY)


def _check_ring(ring: tuple[Rank, ...], attached: set[Rank], parents: set[Rank], max_staleness: int) -> None:
    if not ring:
        raise ValueError("the ring needs at least one rank, got none")
    if len(set(ring)) < len(ring):
        raise ValueError(f"a rank can be in the ring once, got {ring}")
    both = set(ring) & attached
    if both:
        raise ValueError(f"ranks {sorted(both)} are both in the ring and attached")
    strangers = parents - set(ring)
    if strangers:
        raise ValueError(f"parents must be in the ring {ring}, got {sorted(strangers)}")
    if max_staleness < 0:
        raise ValueError(f"max_staleness must be >= 0, got {max_staleness}")


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
        (Apply(ranks=(0, 1, 2), weights=None), Release(rank=0), Release(rank=1), Release(rank=2))
    """

    ring: tuple[Rank, ...]
    parent_of: Mapping[Rank, Rank] = field(default_factory=dict)
    max_staleness: int = 16

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_ring(self.ring, set(self.parent_of), set(self.parent_of.values()), self.max_staleness)

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

    def admits(self, staleness: int) -> bool:
        """Whether a gradient that stale may join an update: a parent asks before it adds it to its own."""
        return staleness <= self.max_staleness

    def init(self, ranks: frozenset[Rank]) -> RingState:
        """Return the state in which every rank computes its first gradient at version 0.

        A rank that the policy does not speak of counts as attached, as one that joins does.
        """
        return _begin(self.ring, ranks, {})

    def staleness(self, state: RingState, rank: Rank) -> int:
        """Versions between the parameters `rank` works on and the next update to fire."""
        return state.version - state.begun[rank]

    def step(self, state: RingState, event: Event) -> tuple[RingState, tuple[Action, ...]]:
        """Fire when the last ring member arrives; attached ranks never hold anybody up."""
        return _step(state, event, self.max_staleness, {})


@dataclass(frozen=True, slots=True)
class GroupedRing:
    """AttachedRing for many slow ranks: they form clusters, each a ring of its own whose leader is attached.

    A cluster's gradients arrive together, summed in its ring, as one contribution of its leader: it joins the next
    update once all its members have arrived, and they go on together. The fast ring waits for none of them, and a
    parent serves one leader instead of many ranks. A member that leaves and comes back is attached on its own.

    Args:
        ring: Ranks that update in step, at least one.
        clusters: Ranks that arrive together, the leader first.
        parent_of: Parent in the ring of every leader.
        max_staleness: Most versions between the parameters of an attached gradient and the update, >= 0.

    Raises:
        ValueError: as for AttachedRing; an empty cluster, a rank in two, or leaders that are not those with a parent.

    Source:
        STAR's trees of parents and children and its dynamic x-order, joined; the combination is ours.

    Example:
        >>> policy = GroupedRing(ring=(0,), clusters=((1, 2),), parent_of={1: 0})
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> state, _ = policy.step(state, Arrive(2))
        >>> state, actions = policy.step(state, Arrive(0)); actions
        (Apply(ranks=(0,), weights=None), Release(rank=0))
        >>> state, _ = policy.step(state, Arrive(1))
        >>> policy.step(state, Arrive(0))[1][0]
        Apply(ranks=(0, 1, 2), weights=None)
    """

    ring: tuple[Rank, ...]
    clusters: tuple[tuple[Rank, ...], ...]
    parent_of: Mapping[Rank, Rank]
    max_staleness: int = 16
    _cluster_of: Mapping[Rank, RankSet] = field(init=False, repr=False, compare=False)

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_groups(self.clusters)
        leaders = sorted(cluster[0] for cluster in self.clusters)
        if leaders != sorted(self.parent_of):
            raise ValueError(f"every cluster's first rank has a parent, got {leaders} and {sorted(self.parent_of)}")
        attached = {rank for cluster in self.clusters for rank in cluster}
        _check_ring(self.ring, attached, set(self.parent_of.values()), self.max_staleness)
        # Kept, not computed on demand: it is asked for at every event.
        object.__setattr__(self, "_cluster_of", group_of_each(self.clusters))

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness of an applied gradient, versions."""
        return self.max_staleness

    @property
    def ranks(self) -> frozenset[Rank]:
        """All ranks the policy speaks of."""
        return frozenset(self.ring).union(*self.clusters)

    def init(self, ranks: frozenset[Rank]) -> RingState:
        """Return the state in which every rank computes its first gradient at version 0."""
        return _begin(self.ring, ranks, self._cluster_of)

    def step(self, state: RingState, event: Event) -> tuple[RingState, tuple[Action, ...]]:
        """Fire when the last ring member arrives, with every cluster that is complete by then."""
        return _step(state, event, self.max_staleness, self._cluster_of)
