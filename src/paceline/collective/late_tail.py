"""The tail: turns what everybody lacks when the late rank has run dry into the last rounds. Pure.

Ranks are logical: 0..m-1 early, m the late one, which swaps no more and may send whatever it holds.
"""

from __future__ import annotations

from paceline.collective.late_pattern import Pattern, num_doublings
from paceline.collective.spread import Exchange, SpreadRound

Tail = tuple[tuple[Exchange, ...], ...]
_MAX_ATTEMPTS = 200  # orders in which ranks are tried; the first does nearly always


def tail(pattern: Pattern, num_chunks: int) -> Tail:
    """Return the rounds after the last swap: L - 1 of them, or L where no plan of L - 1 is found.

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
    n = len(pattern.land) + 1
    levels = num_doublings(n)
    if n == 1 << levels:
        return _power_of_two(pattern, num_chunks, levels)
    first, holds, lacks = _state(pattern, num_chunks)
    for num_rounds in (levels - 1, levels):
        for attempt in range(_MAX_ATTEMPTS):
            order = _order(n, attempt)
            found = _plan([_renamed(s, order) for s in holds], [_renamed(s, order) for s in lacks], n, num_rounds)
            if found is not None:
                back = {new: old for old, new in enumerate(order)}
                return tuple(tuple((back[a], back[b], first + c) for a, b, c in step) for step in found)
    raise AssertionError(f"no tail for {n} ranks and {num_chunks} chunks")  # one round more than the bound always does


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


def _state(pattern: Pattern, num_chunks: int) -> tuple[int, list[int], list[int]]:
    """First chunk that somebody lacks after the last swap, and holders and lackers of each from there on, as bits."""
    m = len(pattern.land)
    first = max(0, num_chunks - max(pattern.birth))
    holds = []
    for chunk in range(first, num_chunks):
        ranks = 1 << m
        for r in range(m):
            if chunk + pattern.birth[(chunk - r) % m] < num_chunks:
                ranks |= 1 << r
        holds.append(ranks)
    everyone = (1 << (m + 1)) - 1
    return first, holds, [everyone & ~ranks for ranks in holds]


def _plan(holds: list[int], lacks: list[int], n: int, num_rounds: int) -> list[list[Exchange]] | None:
    """Rounds after which nobody lacks anything, or None: first what must double now, then whatever fits."""
    steps = []
    for rounds_left in reversed(range(num_rounds)):
        planned = SpreadRound(holds, lacks)
        newest_first = range(len(holds) - 1, -1, -1)
        for c in newest_first:
            wanted = -(-n >> rounds_left)
            while holds[c].bit_count() + planned.num_receivers(c) < wanted and planned.add(c):
                pass
        for c in newest_first:
            while planned.add(c):
                pass
        steps.append(list(planned.exchanges()))
        for _, target, c in steps[-1]:
            holds[c] |= 1 << target
            lacks[c] &= ~(1 << target)
    return None if any(lacks) else steps


def _order(n: int, attempt: int) -> list[int]:
    """A new name for every rank; the same everywhere. Attempt 0 leaves them as they are."""
    if attempt == 0:
        return list(range(n))
    mixed = sorted(range(n), key=lambda r: ((r + 1) * (2 * attempt + 1) * 2654435761) % (1 << 32) * attempt % 65521)
    order = [0] * n
    for new, old in enumerate(mixed):
        order[old] = new
    return order


def _renamed(ranks: int, order: list[int]) -> int:
    return sum(1 << order[r] for r in range(len(order)) if ranks >> r & 1)
