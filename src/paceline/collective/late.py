"""Around one late rank: turns ranks and chunks into the all-reduce that ends soonest after it arrives. Pure.

Until the late rank comes, the early ranks reduce-scatter among themselves. Then it swaps one chunk a round with that
chunk's owner, both add, and finished chunks spread along the rotating pattern while the next ones are swapped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.collective.classic import message_names, ring, ring_reduce_scatter
from paceline.collective.late_many import around_many
from paceline.collective.late_pattern import Pattern, num_doublings, pattern
from paceline.collective.late_tail import Tail, tail
from paceline.collective.schedule import (
    ListedSchedule,
    Messages,
    Move,
    Schedule,
    Step,
    Transfer,
    chunk_range,
    chunks_of,
    shards_of,
)
from paceline.errors import ScheduleError


def late_lower_bound(num_ranks: int, num_chunks: int) -> int:
    """Return the fewest rounds after the late rank's arrival: K - 1 + ceil(log2 n).

    It must send K chunks, one a round; the last is then with two ranks at most and doubles until all have it.

    Args:
        num_ranks: n, >= 2.
        num_chunks: K, >= 1.

    Returns:
        Rounds.

    Source:
        Ours; the count of a round-optimal broadcast of K blocks.

    Example:
        >>> late_lower_bound(8, 7), late_lower_bound(7, 6)
        (9, 8)
    """
    return num_chunks - 1 + num_doublings(num_ranks)


@lru_cache(maxsize=128)
def around_one(num_ranks: int, late: int, num_chunks: int) -> Schedule:
    """Return the all-reduce that ends in the fewest rounds after one late rank has arrived.

    m - 1 early rounds of s / m bytes, m = n - 1; then K - 1 + ceil(log2 n) rounds of s / K bytes. For K <=
    ceil(log2 n) there is one round more in some cases, and always for n = 3 with K > 2.

    Args:
        num_ranks: n, >= 2.
        late: Which rank is late, 0..n-1.
        num_chunks: K, >= 1; best a multiple of n - 1.

    Returns:
        The schedule; O(n log n) memory whatever K is, from n = 4 on.

    Raises:
        ScheduleError: a number out of range.

    Source:
        StragglAR (arXiv 2505.23523): the early reduce-scatter and the swaps. Ours differs: any n, any K, any late
        rank, and the bound is met where theirs needs more rounds (n = 12, 48, 96, 192) or fails (odd n).

    Example:
        >>> schedule = around_one(8, late=2, num_chunks=14)
        >>> schedule.num_early_rounds, schedule.num_rounds - schedule.num_early_rounds
        (6, 16)
    """
    if num_ranks < 2 or not 0 <= late < num_ranks or num_chunks < 1:
        raise ScheduleError(
            f"want num_ranks >= 2, late in 0..num_ranks-1 and num_chunks >= 1, got num_ranks={num_ranks}, "
            f"late={late}, num_chunks={num_chunks}"
        )
    if num_ranks <= 3:
        return _few(num_ranks, late, num_chunks)
    itinerary = pattern(num_ranks)
    return LateSchedule(num_ranks, num_chunks, (late,), itinerary, tail(itinerary, num_chunks))


def around(num_ranks: int, late: Collection[int], num_chunks: int | None = None) -> Schedule:
    """Return the all-reduce for a set of late ranks: around one, around several, or the ring where that is better.

    Args:
        num_ranks: n, >= 2.
        late: Late ranks, in any order.
        num_chunks: K, >= 1; None for one per owner around one late rank and four around several. The ring has n.

    Returns:
        A schedule named "late", or the ring: for no late rank, and for more than a third of the ranks.

    Raises:
        ScheduleError: a number out of range, or a rank twice.

    Source:
        Ours: from k = n/2 on the ring costs no more than the late data takes to come in.

    Example:
        >>> [around(9, late).name for late in ((), (4,), (1, 2, 3), (1, 2, 3, 4))]
        ['ring', 'late', 'late', 'ring']
    """
    k = len(late)
    if len(set(late) & set(range(num_ranks))) != k:
        raise ScheduleError(f"want different late ranks in 0..{num_ranks - 1}, got {tuple(late)}")
    if k == 0 or (k > 1 and 3 * k > num_ranks):
        return ring(num_ranks)
    if k == 1:
        return around_one(num_ranks, *late, num_chunks=num_ranks - 1 if num_chunks is None else num_chunks)
    return around_many(num_ranks, tuple(sorted(late)), 4 * (num_ranks - k) if num_chunks is None else num_chunks)


@dataclass(frozen=True, slots=True)
class LateSchedule:
    """A schedule around one late rank, worked out round by round when asked; see `Schedule` and `around_one`.

    Logically the late rank is the last; two names are swapped where another one is late.
    """

    num_ranks: int
    num_chunks: int
    late: tuple[int]
    pattern: Pattern = field(compare=False, repr=False)
    tail: Tail = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Of the algorithm."""
        return "late"

    @property
    def num_shards(self) -> int:
        """One for every early rank, unless there are fewer chunks."""
        return min(self.num_chunks, self.num_ranks - 1)

    @property
    def num_early_rounds(self) -> int:
        """Of the early ranks' reduce-scatter."""
        return self.num_ranks - 2

    @property
    def num_rounds(self) -> int:
        """All rounds."""
        return self.num_early_rounds + self.num_chunks + len(self.tail)

    @property
    def blocks(self) -> tuple[range, ...]:
        """The shards, where they have several chunks."""
        return shards_of(self.num_shards, self.num_chunks)

    def chunks_of(self, chunk: int) -> range:
        """The chunks in a message."""
        if 0 <= chunk < self.num_chunks:
            return range(chunk, chunk + 1)
        return chunks_of(self.num_chunks, self.blocks, chunk)

    def chunk_range(self, chunk: int, numel: int) -> tuple[int, int]:
        """Where a chunk (or block) lies in a buffer."""
        return chunk_range(self.num_shards, self.num_chunks, self.chunks_of(chunk), numel)

    def rounds(self) -> Iterator[Messages]:
        """All messages, round by round."""
        names = _names(self.num_ranks, self.late[0])
        m = self.num_ranks - 1
        yield from self._early_rounds(names[:m])
        ranks, send, target = np.arange(m), np.array(self.pattern.send), np.array(self.pattern.target)
        for t in range(self.num_chunks):
            time = (t - ranks) % m
            sends = (time != 0) & (send[time] <= t)
            source = ranks[sends]
            time = time[sends]
            messages = np.empty((len(source) + 2, 4), dtype=np.int32)
            messages[:2] = (t % m, m, t, 1), (m, t % m, t, 1)
            messages[2:] = np.stack(
                (source, (source + target[time]) % m, t - send[time], np.zeros_like(source)), axis=1
            )
            messages[:, :2] = names[messages[:, :2]]
            yield messages
        for exchanges in self.tail:
            messages = np.pad(np.array(exchanges, dtype=np.int32).reshape(-1, 3), ((0, 0), (0, 1)))
            messages[:, :2] = names[messages[:, :2]]
            yield messages

    def _early_rounds(self, names: NDArray[np.int32]) -> Iterator[Messages]:
        """A ring in which position i sends block i - 1 - q in round q, as in `ring_reduce_scatter`."""
        m, blocks = len(names), message_names(self.num_shards, self.num_chunks)
        for q in range(m - 1):
            block = (np.arange(m) - 1 - q) % m
            messages = np.stack((names, np.roll(names, -1), block + blocks.start, np.ones_like(block)), axis=1)
            yield messages[block < len(blocks)].astype(np.int32)

    def program(self, rank: int) -> Iterator[Step]:
        """What one rank does, round by round; O(1) work per step."""
        names: list[int] = _names(self.num_ranks, self.late[0]).tolist()
        m, me = self.num_ranks - 1, names[rank]  # swapping two names is its own inverse
        blocks = message_names(self.num_shards, self.num_chunks)
        for q in range(m - 1):
            if me == m:
                yield Step()
                continue
            sent, received = (me - 1 - q) % m, (me - 2 - q) % m
            yield Step(
                Move(names[(me + 1) % m], blocks[sent], True) if sent < len(blocks) else None,
                Move(names[(me - 1) % m], blocks[received], True) if received < len(blocks) else None,
            )
        for t in range(self.num_chunks):
            time = (t - me) % m
            if me == m or time == 0:
                swap = Move(names[t % m if me == m else m], t, True)
                yield Step(swap, swap)
                continue
            sent, received = t - self.pattern.send[time], t - self.pattern.land[time]
            yield Step(
                Move(names[(me + self.pattern.target[time]) % m], sent, False) if sent >= 0 else None,
                Move(names[(me + self.pattern.source[time]) % m], received, False) if received >= 0 else None,
            )
        for exchanges in self.tail:
            yield Step(
                next((Move(names[b], c, False) for a, b, c in exchanges if a == me), None),
                next((Move(names[a], c, False) for a, b, c in exchanges if b == me), None),
            )


def _names(num_ranks: int, late: int) -> NDArray[np.int32]:
    """The rank behind every logical one: the late one is the last."""
    names = np.arange(num_ranks, dtype=np.int32)
    names[[late, -1]] = names[[-1, late]]
    return names


def _few(num_ranks: int, late: int, num_chunks: int) -> ListedSchedule:
    """Two or three ranks: no pattern to follow."""
    names: list[int] = _names(num_ranks, late).tolist()
    m, k = num_ranks - 1, num_chunks
    num_shards = min(k, m)
    early = ring_reduce_scatter(tuple(names[:m]), tuple(message_names(num_shards, k)))
    if num_ranks == 3 and k > 2:
        steps = [_one_way(t, k) for t in range(k + 2)]
    else:
        steps = [[Transfer(m, t % m, t, True), Transfer(t % m, m, t, True)] for t in range(k)]
        if num_ranks == 3:  # rank 1 lacks chunk 0 still, and rank 0 chunk 1 if there is one
            steps.append([Transfer(0, 1, 0, False), Transfer(2, 0, 1, False)][:k])
    named = tuple(tuple(t._replace(source=names[t.source], target=names[t.target]) for t in step) for step in steps)
    return ListedSchedule(
        "late", num_ranks, k, num_shards, early + named, shards_of(num_shards, k), (late,), len(early)
    )


def _one_way(t: int, num_chunks: int) -> list[Transfer]:
    """Round t with three ranks: the late one gives chunk t, its owner gives the finished one back, and then on."""
    step = [Transfer(2, t % 2, t, True)] if t < num_chunks else []
    if 1 <= t <= num_chunks:
        step.append(Transfer((t - 1) % 2, 2, t - 1, False))
    return [*step, Transfer(t % 2, (t + 1) % 2, t - 2, False)] if t >= 2 else step
