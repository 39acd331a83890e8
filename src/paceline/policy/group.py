"""Groups of ranks of like speed: turns own times into groups, and the arrival of a whole group into an update. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.policy.barrier import BspState, fire, take
from paceline.policy.base import Action, Event, Tick, Work
from paceline.policy.rankset import RankSet
from paceline.types import Rank


def groups_by_speed(own_times_s: Mapping[Rank, float], min_gap_ratio: float = 0.2) -> tuple[tuple[Rank, ...], ...]:
    """Return groups of ranks of like speed: neighbours in order of own time part where the gap is large.

    Sorted by own time, a new group begins at every t_i > (1 + min_gap_ratio) t_{i-1}.

    Args:
        own_times_s: Own time per gradient by rank, seconds, each positive and finite.
        min_gap_ratio: Smallest gap that parts two groups, relative to the faster side, > 0. Only neighbours are
            compared: a long row of small gaps stays one group, so try several ratios where that matters.

    Returns:
        Groups from the fastest to the slowest, each in order of rank; every rank in exactly one.

    Raises:
        ValueError: no ranks, a time or a ratio that is not positive and finite.

    Source:
        STAR's dynamic x-order clusters predicted times with Ward linkage at a distance of 50 ms. Ours differs: Ward's
        distance grows with the size of the clusters and 50 ms means nothing without the step time, so the gap is
        relative and between neighbours only; STAR's 20 % straggler tolerance is the default.

    Example:
        >>> times = dict(enumerate((0.1, 0.4, 0.11, 0.12, 0.15, 0.2, 0.105, 0.115)))
        >>> groups_by_speed(times)
        ((0, 2, 3, 6, 7), (4,), (5,), (1,))
    """
    if not own_times_s:
        raise ValueError("there are no groups without ranks, got no own times")
    wrong = {rank: time for rank, time in own_times_s.items() if not 0 < time < math.inf}
    if wrong:
        raise ValueError(f"own times must be positive and finite, got {wrong}")
    if not 0 < min_gap_ratio < math.inf:
        raise ValueError(f"min_gap_ratio must be positive and finite, got {min_gap_ratio}")
    groups: list[list[Rank]] = []
    before_s = -math.inf
    for time_s, rank in sorted((time_s, rank) for rank, time_s in own_times_s.items()):
        if not groups or time_s > (1 + min_gap_ratio) * before_s:
            groups.append([])
        groups[-1].append(rank)
        before_s = time_s
    return tuple(tuple(sorted(group)) for group in groups)


def check_groups(groups: tuple[tuple[Rank, ...], ...]) -> None:
    """Raise ValueError for an empty group or a rank that is in two."""
    if not all(groups):
        raise ValueError(f"a group needs at least one rank, got {groups}")
    ranks = [rank for group in groups for rank in group]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"a rank can be in one group, once, got {groups}")


def group_of_each(groups: tuple[tuple[Rank, ...], ...]) -> dict[Rank, RankSet]:
    """Every rank's group, itself included."""
    sets = {group: RankSet.of(group) for group in groups}
    return {rank: sets[group] for group in groups for rank in group}


@dataclass(frozen=True, slots=True)
class GroupSync:
    """STAR's dynamic x-order: each group updates on its own when all its members have arrived.

    Within a group it is BSP; between groups nobody waits, so gradients become stale by the other groups' updates.

    Args:
        groups: Ranks that update together. A rank that is in none updates alone.

    Raises:
        ValueError: an empty group, or a rank in two.

    Source:
        STAR (arXiv 2512.09685), released scripts. Ours differs: a group whose member leaves goes on (theirs hangs),
        and groups can be formed anew by the next plan (theirs stay once formed).

    Example:
        >>> from paceline.policy.base import Arrive
        >>> policy = GroupSync(groups=((0, 1), (2,)))
        >>> state = policy.init(frozenset({0, 1, 2}))
        >>> state, actions = policy.step(state, Arrive(0)); actions
        ()
        >>> state, actions = policy.step(state, Arrive(2)); actions
        (Apply(ranks=(2,), weights=None), Release(rank=2))
        >>> policy.step(state, Arrive(1))[1]
        (Apply(ranks=(0, 1), weights=None), Release(rank=0), Release(rank=1))
    """

    groups: tuple[tuple[Rank, ...], ...]
    _group_of: Mapping[Rank, RankSet] = field(init=False, repr=False, compare=False)

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_groups(self.groups)
        # Kept, not computed on demand: it is asked for at every event.
        object.__setattr__(self, "_group_of", group_of_each(self.groups))

    @property
    def staleness_bound(self) -> int | None:
        """None: other groups may update any number of times while a rank computes."""
        return None

    def init(self, ranks: frozenset[Rank]) -> BspState:
        """Return the state in which every rank computes its first gradient."""
        return BspState(RankSet.of(ranks))

    def step(self, state: BspState, event: Event) -> tuple[BspState, tuple[Action, ...]]:
        """Fire a group when its last member arrives, or when the last one missing leaves."""
        if isinstance(event, Tick):
            return state, ()
        group = self._group_of.get(event.rank)
        return fire(take(state, event), RankSet.of((event.rank,)) if group is None else group)
