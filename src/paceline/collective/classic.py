"""The classic all-reduces: turns a number of ranks into a ring, halving and doubling, a tree or a plain exchange. Pure.

Nobody is late in them: every round needs the ranks that it names, from the first on.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collective.schedule import ListedSchedule, Transfer

Steps = tuple[tuple[Transfer, ...], ...]


def ring_reduce_scatter(ranks: tuple[int, ...], blocks: tuple[int, ...]) -> Steps:
    """Return the rounds after which position i of a ring holds the sum of all in block i.

    In round q position i sends block i - 1 - q to position i + 1, which adds it.

    Args:
        ranks: The ring, by position; m of them.
        blocks: What block i is called in the messages, by position; fewer than m where the last ones are empty.

    Returns:
        m - 1 rounds.

    Example:
        >>> ring_reduce_scatter((0, 1), (0, 1))
        ((Transfer(source=0, target=1, chunk=1, adds=True), Transfer(source=1, target=0, chunk=0, adds=True)),)
    """
    m = len(ranks)
    return tuple(
        tuple(
            Transfer(ranks[i], ranks[(i + 1) % m], blocks[(i - 1 - q) % m], True)
            for i in range(m)
            if (i - 1 - q) % m < len(blocks)
        )
        for q in range(m - 1)
    )


@lru_cache(maxsize=64)
def ring(num_ranks: int) -> ListedSchedule:
    """Return the ring: reduce-scatter, then all-gather, with one chunk per rank.

    2 (n - 1) rounds of s / n bytes each: 2 (n-1) alpha + 2 (n-1)/n s beta.

    Args:
        num_ranks: n, >= 2.

    Returns:
        The schedule.

    Raises:
        ScheduleError: less than two ranks.

    Source:
        Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Ours shifts
        the blocks by one so that rank i ends the first half with block i.

    Example:
        >>> ring(4).num_rounds, [step.send.chunk for step in ring(4).program(0)]
        (6, [3, 2, 1, 0, 3, 2])
    """
    n = num_ranks
    everyone = tuple(range(n))
    gather = tuple(tuple(Transfer(i, (i + 1) % n, (i - q) % n, False) for i in range(n)) for q in range(n - 1))
    return ListedSchedule("ring", n, max(n, 1), max(n, 1), ring_reduce_scatter(everyone, everyone) + gather)
