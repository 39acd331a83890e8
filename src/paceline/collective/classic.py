"""The classic all-reduces: turns a number of ranks into a ring, halving and doubling, a tree or a plain exchange. Pure.

Nobody is late in them: every round needs the ranks that it names, from the first on.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collective.schedule import ListedSchedule, Steps, Transfer
from paceline.errors import ScheduleError


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


def message_names(num_shards: int, num_chunks: int) -> range:
    """Return what the shards are called in messages: by their only chunk, or as blocks where they have several.

    Example:
        >>> message_names(3, 3), message_names(3, 6)
        (range(0, 3), range(6, 9))
    """
    return range(num_chunks) if num_shards == num_chunks else range(num_chunks, num_chunks + num_shards)


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
    n = _checked(num_ranks)
    everyone = tuple(range(n))
    gather = tuple(tuple(Transfer(i, (i + 1) % n, (i - q) % n, False) for i in range(n)) for q in range(n - 1))
    return ListedSchedule("ring", n, n, n, ring_reduce_scatter(everyone, everyone) + gather)


@lru_cache(maxsize=64)
def halving_doubling(num_ranks: int) -> ListedSchedule:
    """Return recursive halving and doubling: reduce-scatter and all-gather over distances that halve, then double.

    p = 2^floor(log2 n) ranks take part: 2 log2 p alpha + 2 (p-1)/p s beta. Where n > p, each other rank first gives
    all it has to one of them and gets all at the end: 2 alpha + 2 s beta more.

    Args:
        num_ranks: n, >= 2.

    Returns:
        The schedule, with p chunks.

    Raises:
        ScheduleError: less than two ranks.

    Source:
        Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section
        4.5. Theirs folds the ranks beyond a power of two in two halves; ours in one message, which takes as long.

    Example:
        >>> halving_doubling(4).num_rounds, halving_doubling(7).num_rounds
        (4, 6)
    """
    n = _checked(num_ranks)
    levels = n.bit_length() - 1
    p = 1 << levels
    # Node 1 of a binary tree is the whole buffer, nodes 2i and 2i + 1 are the halves of node i, p + c is chunk c.
    blocks = tuple(
        range(node * (p >> depth) - p, (node + 1) * (p >> depth) - p)
        for depth in range(levels)
        for node in range(1 << depth, 2 << depth)
    )

    def name(node: int) -> int:
        return node - p if node >= p else p + node - 1

    halving, doubling = [], []
    for depth in range(levels):
        bit = p >> (depth + 1)
        kept = [(p + rank) >> (levels - depth - 1) for rank in range(p)]  # the node that a rank keeps at this depth
        halving.append(tuple(Transfer(rank, rank ^ bit, name(kept[rank] ^ 1), True) for rank in range(p)))
        doubling.append(tuple(Transfer(rank, rank ^ bit, name(kept[rank]), False) for rank in range(p)))
    fold = tuple(Transfer(p + i, i, name(1), True) for i in range(n - p))
    unfold = tuple(Transfer(i, p + i, name(1), False) for i in range(n - p))
    steps = ([fold] if fold else []) + halving + doubling[::-1] + ([unfold] if unfold else [])
    return ListedSchedule("halving", n, p, p, tuple(steps), blocks)


@lru_cache(maxsize=64)
def tree(num_ranks: int) -> ListedSchedule:
    """Return the binomial tree: reduce to rank 0, then broadcast, everything in one chunk.

    2 ceil(log2 n) (alpha + s beta): for messages so small that only rounds count.

    Args:
        num_ranks: n, >= 2.

    Returns:
        The schedule.

    Raises:
        ScheduleError: less than two ranks.

    Source:
        Thakur, Rabenseifner and Gropp 2005, section 4.5: reduce followed by broadcast, both binomial.

    Example:
        >>> [len(step) for step in tree(6).steps]
        [3, 1, 1, 1, 1, 3]
    """
    n = _checked(num_ranks)
    distances = [1 << level for level in range((n - 1).bit_length())]
    edges = [[(parent, parent + d) for parent in range(0, n - d, 2 * d)] for d in distances]
    up = tuple(tuple(Transfer(child, parent, 0, True) for parent, child in level) for level in edges)
    down = tuple(tuple(Transfer(parent, child, 0, False) for parent, child in level) for level in edges[::-1])
    return ListedSchedule("tree", n, 1, 1, up + down)


@lru_cache(maxsize=64)
def direct(num_ranks: int) -> ListedSchedule:
    """Return the direct exchange: everybody sends each chunk to its owner, and each owner its sum to everybody.

    2 (n-1) alpha + 2 (n-1)/n s beta like the ring, but every contribution makes one hop up and one down.

    Args:
        num_ranks: n, >= 2.

    Returns:
        The schedule, with n chunks; rank i owns chunk i.

    Raises:
        ScheduleError: less than two ranks.

    Source:
        The scattered all-to-all of MPICH, used as reduce-scatter and all-gather (Thakur et al. 2005, section 4.3).

    Example:
        >>> direct(4).num_rounds, [step.send.peer for step in direct(4).program(1)]
        (6, [2, 3, 0, 2, 3, 0])
    """
    n = _checked(num_ranks)
    scatter = [tuple(Transfer(i, (i + d) % n, (i + d) % n, True) for i in range(n)) for d in range(1, n)]
    gather = [tuple(Transfer(i, (i + d) % n, i, False) for i in range(n)) for d in range(1, n)]
    return ListedSchedule("direct", n, n, n, tuple(scatter + gather))


def _checked(num_ranks: int) -> int:
    if num_ranks < 2:
        raise ScheduleError(f"a collective needs at least 2 ranks, got {num_ranks}")
    return num_ranks
