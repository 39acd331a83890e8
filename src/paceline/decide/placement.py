"""Where things go: turns spare time into parents for attached ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.types import Rank


def choose_parents(
    ring: Sequence[Rank], children: Sequence[Rank], own_times_s: Mapping[Rank, float]
) -> dict[Rank, Rank]:
    """Assign every attached rank a parent in the ring, by spare time and spread evenly.

    A ring member's spare time is what it waits for the slowest of the ring. Children are handed out one each in
    order of spare time, the round starting over only when every member has one.

    Args:
        ring: Ranks in the ring, at least one.
        children: Ranks to attach.
        own_times_s: Forecast own time by rank, seconds; needed for the ring.

    Returns:
        Parent by child.

    Source:
        STAR assigns by worker id, round-robin; ours by spare time, so that no slow member gets extra work while a
        fast one waits.

    Example:
        >>> choose_parents([0, 1, 3], [2, 4], {0: 0.05, 1: 0.04, 3: 0.03})
        {2: 3, 4: 1}
    """
    if not ring:
        raise ValueError("the ring needs at least one rank to be a parent, got none")
    by_spare = sorted(ring, key=lambda rank: (own_times_s[rank], rank))
    return {child: by_spare[i % len(by_spare)] for i, child in enumerate(sorted(children))}
