"""The tail: turns what everybody lacks when the late rank has run dry into the last rounds. Pure.

Ranks are logical: 0..m-1 early, m the late one, which swaps no more and may send whatever it holds.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collective.late_pattern import Pattern, num_doublings
from paceline.collective.spread import Exchange, SpreadRound, renamed

Tail = tuple[tuple[Exchange, ...], ...]
_MAX_ATTEMPTS = 200  # orders in which ranks are tried: the first does mostly, one of 72 up to n = 1024, but for these
_KNOWN_ATTEMPTS = {985: 161, 999: 101, 1003: 104, 1007: 597, 1015: 139, 1019: 155}
_MAX_ATTEMPTS_FEW = 32  # with so few chunks that there may be no plan at all


def tail(pattern: Pattern, num_chunks: int) -> Tail:
    """Return the rounds after the last swap: L - 1 of them; for K <= L sometimes L.

    Once the oldest chunk that somebody may lack is no longer the first, one chunk more only turns the ranks by one.
    So one plan serves every K from L + 1 on: the bound met for one is met for all.

    Args:
        pattern: Of n ranks, n >= 4.
        num_chunks: K, >= 1.

    Returns:
        Messages (source, target, chunk) by round; all of them overwrite.

    Source:
        Ours. For powers of two in closed form, as StragglAR (arXiv 2505.23523) gives its last chunk log2 n - 1 more
        rounds; else round by round by augmenting paths, newest chunk first.

    Example:
        >>> from paceline.collective.late_pattern import pattern
        >>> tail(pattern(4), 3)
        (((1, 2, 1), (2, 1, 2), (3, 0, 2)),)
    """
    m = len(pattern.land)
    shift = max(0, num_chunks - max(pattern.birth))

    def moved(rank: int) -> int:
        return m if rank == m else (rank + shift) % m

    steps = _unmoved(pattern, num_chunks - shift)
    return tuple(tuple((moved(a), moved(b), c + shift) for a, b, c in step) for step in steps)


@lru_cache(maxsize=256)
def _unmoved(pattern: Pattern, num_chunks: int) -> Tail:
    n = len(pattern.land) + 1
    levels = num_doublings(n)
    if n == 1 << levels:
        return _power_of_two(pattern, num_chunks, levels)
    holds, lacks = _state(pattern, num_chunks)
    few = num_chunks <= levels
    for num_rounds in (levels - 1, levels):
        first = 0 if few else _KNOWN_ATTEMPTS.get(n, 0)
        for attempt in range(first, first + (_MAX_ATTEMPTS_FEW if few else _MAX_ATTEMPTS)):
            names = sorted(range(n), key=lambda rank: _mixed(rank + (attempt << 16)) if attempt else rank)
            found = _plan(holds.copy(), lacks.copy(), names, num_rounds, most_first=few and attempt % 2 == 0)
            if found is not None:
                return found
    raise AssertionError(f"no tail for {n} ranks and {num_chunks} chunks")


def _power_of_two(pattern: Pattern, num_chunks: int, levels: int) -> Tail:
    """The pattern goes on; ranks that it leaves idle get the last chunk, whose holders double every round."""
    m = len(pattern.land)
    steps, sources = [], [m]
    for t in range(num_chunks, num_chunks + levels - 1):
        step = []
        for r in range(m):
            s = (t - r) % m
            if s and 0 <= t - pattern.send[s] < num_chunks:
                step.append((r, (r + pattern.target[s]) % m, t - pattern.send[s]))
        idle = [r for r in range(m) if pattern.land[(t - r) % m] < t - num_chunks + 1]
        step += [(source, target, num_chunks - 1) for source, target in zip(sources, idle, strict=True)]
        sources += idle
        steps.append(tuple(step))
    return tuple(steps)


def _state(pattern: Pattern, num_chunks: int) -> tuple[list[int], list[int]]:
    """Who holds and who lacks each chunk after the last swap, as bits."""
    m = len(pattern.land)
    everyone = (2 << m) - 1
    holds = []
    for chunk in range(num_chunks):
        early = (r for r in range(m) if chunk + pattern.birth[(chunk - r) % m] < num_chunks)
        holds.append(1 << m | sum(1 << r for r in early))
    return holds, [everyone & ~ranks for ranks in holds]


def _plan(holds: list[int], lacks: list[int], names: list[int], num_rounds: int, most_first: bool) -> Tail | None:
    """Rounds after which nobody lacks anything, or None: first what must double now, then whatever fits.

    Ranks are tried in the order of `names`; with few chunks those that lack most go first.
    """
    steps = []
    for rounds_left in reversed(range(num_rounds)):
        order = sorted(names, key=lambda rank: -sum(s >> rank & 1 for s in lacks)) if most_first else names
        planned = SpreadRound([renamed(ranks, order) for ranks in holds], [renamed(ranks, order) for ranks in lacks])
        newest_first = range(len(holds) - 1, -1, -1)
        for c in newest_first:
            wanted = -(-len(names) >> rounds_left)
            while holds[c].bit_count() + planned.num_receivers(c) < wanted and planned.add(c):
                pass
        for c in newest_first:
            while planned.add(c):
                pass
        steps.append(tuple((order[source], order[target], c) for source, target, c in planned.exchanges()))
        for _, target, c in steps[-1]:
            holds[c] |= 1 << target
            lacks[c] &= ~(1 << target)
    return None if any(lacks) else tuple(steps)


def _mixed(x: int) -> int:
    """A fixed shuffle: an integer hash, the same on every rank and for every version of every library."""
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ x >> 16
