"""The rotating pattern: turns a number of ranks into the itinerary that all early ranks follow, shifted in time. Pure.

Chunk t is swapped with the late rank in round t, by its owner t mod m. From then on its age grows by one a round.
Early rank r has in round t the rank-time (t - r) mod m; what it receives and sends depends on that alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from paceline.errors import ScheduleError


class Pattern(NamedTuple):
    """One itinerary of length m = n - 1, by rank-time. At rank-time 0 a rank swaps its own chunk with the late rank.

    Args:
        land: Age of the chunk that is received.
        send: Age of the chunk that is sent.
        birth: For the chunk that is swapped at a rank's time s: at which age this rank receives it.
        target: To whom it is sent, as an offset to the own rank, modulo m.
        source: From whom it is received, likewise.
    """

    land: tuple[int, ...]
    send: tuple[int, ...]
    birth: tuple[int, ...]
    target: tuple[int, ...]
    source: tuple[int, ...]


def num_doublings(num_ranks: int) -> int:
    """Return ceil(log2 n): how often the holders of a chunk must double until all n ranks hold it.

    Example:
        >>> [num_doublings(n) for n in (2, 3, 4, 5, 8, 9)]
        [1, 2, 2, 3, 3, 4]
    """
    return (num_ranks - 1).bit_length()


@lru_cache(maxsize=128)
def pattern(num_ranks: int) -> Pattern:
    """Return the pattern for n ranks, one of them late.

    `land` is a juggling pattern with L - 1 balls, L = ceil(log2 n): no two messages ever meet at a receiver, and when
    the late rank has run dry every rank lacks L - 1 chunks. Ages reach L where n is a power of two, L + 1 elsewhere.

    Args:
        num_ranks: n, >= 4.

    Returns:
        The pattern; O(n) memory whatever the number of chunks. Found within about 0.1 s up to n = 1024.

    Raises:
        ScheduleError: less than 4 ranks, or no pattern found (never seen up to n = 1024).

    Source:
        StragglAR (arXiv 2505.23523) pairs ranks by hand for powers of two, by matchings for other even n, and has no
        schedule for odd n. Ours lets a rank send to one peer while it receives from another, which meets the bound
        for every n, and finds one short itinerary instead of n - 1 long programs.

    Example:
        >>> pattern(5).land, pattern(5).birth, pattern(5).send
        ((0, 3, 1, 4), (0, 1, 3, 4), (0, 1, 4, 3))
    """
    if num_ranks < 4:
        raise ScheduleError(f"a rotating pattern needs at least 4 ranks, got {num_ranks}")
    m, levels = num_ranks - 1, num_doublings(num_ranks)
    if num_ranks == 1 << levels:
        land, send = _power_of_two(levels, m)
        birth = _birth(land)
        assert birth is not None
        return Pattern(tuple(land), tuple(send), tuple(birth), *_peers(land, send))
    for profile in _profiles(levels, m):
        found = _landings(profile, levels, m)
        birth = found and _birth(found)
        if not found or not birth:
            continue
        senders = _senders(birth, levels)
        if senders:
            return Pattern(tuple(found), tuple(senders), tuple(birth), *_peers(found, senders))
    raise ScheduleError(f"no pattern for {num_ranks} ranks: use the ring")


def _power_of_two(levels: int, m: int) -> tuple[list[int], list[int]]:
    """Landing and sending ages in closed form; slots run against rank-time."""
    land, send = [levels] * m, [0] * m
    lengths = [levels] + [levels - i for i in range(1, levels) for _ in range(1 << (i - 1))]
    at = -levels % m
    for length in lengths:
        land[(at + length) % m] = levels - length
        for j in range(length):
            send[(at + j) % m] = levels - j
        at = (at + length) % m
    send[0] = 0
    return [land[-s % m] for s in range(m)], [send[-s % m] for s in range(m)]


def _profiles(levels: int, m: int) -> Iterator[list[int]]:
    """How many rank-times may receive at each age below L: every choice that leaves whole numbers for L and L + 1."""

    def extend(head: list[int]) -> Iterator[list[int]]:
        total = sum(head)
        if len(head) < levels - 1:
            for count in range(total, -1, -1):
                yield from extend([*head, count])
            return
        weight = sum((levels - age) * count for age, count in enumerate(head))
        most = min(total, (2 * m - total - weight) // 2)
        least = max(0, m - weight, -((2 * total + weight - 2 * m) // 3))
        for count in range(most, least - 1, -1):
            yield [*head, count]

    return extend([1])


def _landings(profile: list[int], levels: int, m: int) -> list[int] | None:
    """Lay the intervals of a profile round the circle; where two overlap by two, a chunk lands at age L + 1."""
    lengths = [levels + 1 - age for age, count in enumerate(profile) for _ in range(count)]
    left = sum((levels - age) * count for age, count in enumerate(profile)) - m
    num_long, num_three = sum(d >= 4 for d in lengths), lengths.count(3)
    chain = num_long + (num_three > 0)
    overlaps = [1] * len(lengths)
    for i in [*range(chain - 1), *range(chain, num_long + num_three - 1, 2)]:
        if left > 0:
            overlaps[i] = 2
            left -= 1
    if left:
        return None
    land, at = [levels] * m, 1
    for length, overlap in zip(lengths, overlaps, strict=True):
        land[(at - 1) % m] = levels + 1 - length
        if overlap == 2:
            land[(at + length - 2) % m] = levels + 1
        at += length - overlap
    return land


def _birth(land: list[int]) -> list[int] | None:
    """By rank-time of a chunk's swap, the age at which it is received; None unless every chunk is, once."""
    m = len(land)
    birth = [-1] * m
    for s, age in enumerate(land):
        birth[(s - age) % m] = age
    return birth if birth[0] == 0 and -1 not in birth and birth.count(0) == 1 else None


def _senders(birth: list[int], levels: int) -> list[int] | None:
    """Choose the age that each rank-time sends, out of the two it holds and others lack, as often as it is received."""
    m = len(birth)
    choices = [[e for e in range(1, levels + 2) if birth[(s - e) % m] < e] for s in range(m)]
    room = [0, *(birth.count(age) for age in range(1, levels + 2))]
    takers: list[list[int]] = [[] for _ in room]

    def place(s: int, seen: set[int]) -> bool:
        for age in choices[s]:
            if age in seen:
                continue
            seen.add(age)
            if len(takers[age]) < room[age]:
                takers[age].append(s)
                return True
            for i, other in enumerate(takers[age]):
                if place(other, seen):
                    takers[age][i] = s
                    return True
        return False

    if not all(place(s, set()) for s in range(1, m)):
        return None
    send = [0] * m
    for age, ranks in enumerate(takers):
        for s in ranks:
            send[s] = age
    return send


def _peers(land: list[int], send: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pair those that send at an age with those that receive at it, both in order."""
    m = len(land)
    target, source = [0] * m, [0] * m
    for age in range(1, max(land) + 1):
        senders = [s for s in range(1, m) if send[s] == age]
        receivers = [s for s in range(m) if land[s] == age]
        for w, v in zip(senders, receivers, strict=True):
            target[w], source[v] = (w - v) % m, (v - w) % m
    return tuple(target), tuple(source)
