"""Who comes late: turns the waits of all ranks in one exchange into gaps between arrivals, without clocks. Pure.

All ranks leave an all-reduce nearly together, so how long each was in it tells when it came: the difference of two
waits is the difference of two arrivals, whatever the hosts' clocks say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.types import Rank


def gap_s(waits_s: Sequence[float], rank: Rank) -> float:
    """Return how long after the last of the others a rank came, seconds; negative where it was not the last.

    Args:
        waits_s: Completion minus entry, by rank, seconds.
        rank: Which.

    Example:
        >>> [round(gap_s((0.5, 0.1, 0.4), rank), 1) for rank in range(3)]
        [-0.4, 0.3, -0.3]
    """
    return min(wait for other, wait in enumerate(waits_s) if other != rank) - waits_s[rank]


@dataclass(frozen=True, slots=True)
class GapWindow:
    """The latest exchanges' waits; a value.

    Args:
        size: How many exchanges are kept, >= 1.
        waits_s: By exchange, oldest first: the waits by rank, seconds.

    Example:
        >>> window = GapWindow(size=2)
        >>> for waits in ((0.5, 0.1, 0.4), (0.5, 0.2, 0.5), (0.6, 0.1, 0.6)):
        ...     window = window.observe(waits)
        >>> window.last(), [round(gap, 1) for gap in window.gaps_s(1)]
        (1, [0.3, 0.5])
    """

    size: int = 16
    waits_s: tuple[tuple[float, ...], ...] = ()

    def observe(self, waits_s: Sequence[float]) -> GapWindow:
        """Take in one exchange."""
        return replace(self, waits_s=(*self.waits_s, tuple(waits_s))[-self.size :])

    def gaps_s(self, rank: Rank) -> list[float]:
        """By exchange, oldest first: how long after the last of the others a rank came, seconds."""
        return [gap_s(waits, rank) for waits in self.waits_s]

    def last(self) -> Rank:
        """The rank that the others would have waited for longest in sum; the lowest of equals."""
        num_ranks = len(self.waits_s[-1])
        return max(range(num_ranks), key=lambda rank: (sum(max(0.0, gap) for gap in self.gaps_s(rank)), -rank))
