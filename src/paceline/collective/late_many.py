"""Around several late ranks: turns who is late into an all-reduce that takes their data in at once. Pure.

The early ranks reduce-scatter first. Then, round by round: late ranks give their parts of the oldest unfinished chunks
to the owners, the last part of a chunk in a swap that leaves both with the sum; all other ports spread finished chunks.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collective.classic import message_names, ring_reduce_scatter
from paceline.collective.schedule import ListedSchedule, Steps, Transfer, shards_of
from paceline.collective.spread import SpreadRound, bits, renamed
from paceline.errors import ScheduleError

_PACES = (1.0, 1.1, 1.25, 1.5)  # of giving, against the pace at which both halves of the work end together


@lru_cache(maxsize=32)
def around_many(num_ranks: int, late: tuple[int, ...], num_chunks: int) -> ListedSchedule:
    """Return an all-reduce around k late ranks that arrive together.

    At least (n + k - 1)/n s beta after their arrival. Worth it up to about k = n/3; see `late.around`.

    Args:
        num_ranks: n, >= 2.
        late: k different ranks, 1 <= k < n.
        num_chunks: K, >= 1; best some multiple of n - k.

    Returns:
        The schedule: the shortest of those that some paces of giving lead to.

    Raises:
        ScheduleError: a number out of range, or a rank twice.

    Source:
        Ours; StragglAR (arXiv 2505.23523) knows one late rank only. Proficz 2018, "Improving all-reduce collective
        operations for imbalanced process arrival patterns", pre-reduces what has arrived in a tree and a ring.

    Example:
        >>> schedule = around_many(8, late=(1, 6), num_chunks=24)
        >>> schedule.num_early_rounds, schedule.num_rounds - schedule.num_early_rounds
        (5, 30)
    """
    k, e = len(late), num_ranks - len(late)
    if num_ranks < 2 or num_chunks < 1 or not 1 <= k < num_ranks or len(set(late) & set(range(num_ranks))) != k:
        raise ScheduleError(
            f"want num_ranks >= 2, 1 to num_ranks - 1 different late ranks and num_chunks >= 1, "
            f"got num_ranks={num_ranks}, late={late}, num_chunks={num_chunks}"
        )
    early = [rank for rank in range(num_ranks) if rank not in late]
    names = [*early, *sorted(late)]
    num_shards = min(num_chunks, e)
    first = ring_reduce_scatter(tuple(early), tuple(message_names(num_shards, num_chunks)))
    paces = {pace * k * e / (e + k - 1) for pace in _PACES} | {float(k)}
    then = min((_Run(e, k, num_chunks).steps(pace) for pace in sorted(paces)), key=len)
    named = tuple(tuple(t._replace(source=names[t.source], target=names[t.target]) for t in step) for step in then)
    blocks = shards_of(num_shards, num_chunks)
    return ListedSchedule(
        "late", num_ranks, num_chunks, num_shards, first + named, blocks, tuple(sorted(late)), len(first)
    )


class _Run:
    """One attempt; ranks are logical: e early ones, then the k late ones. Sets of ranks are bits."""

    def __init__(self, e: int, k: int, num_chunks: int) -> None:
        self._e, self._k, self._n = e, k, e + k
        self._everyone = (1 << self._n) - 1
        late = self._everyone & ~((1 << e) - 1)
        self._to_give = dict.fromkeys(range(num_chunks), late)  # oldest first; finished chunks leave
        self._num_to_give = [num_chunks] * k
        self._holders: dict[int, int] = {}  # of finished chunks that somebody lacks
        self._num_lacking = [0] * self._n  # of those, by rank

    def steps(self, pace: float) -> Steps:
        """All rounds, with at most `pace` gifts per round on average."""
        steps: list[tuple[Transfer, ...]] = []
        tokens = 0.0
        while self._to_give or self._holders:
            tokens = min(tokens + pace, self._k + pace)
            gifts, sending, receiving = self._gifts(int(tokens))
            tokens -= len({t.chunk for t in gifts})
            step = gifts + self._spread(sending, receiving, len(steps))
            steps.append(tuple(step))
            self._finish(gifts)
        return tuple(steps)

    def _gifts(self, most: int) -> tuple[list[Transfer], int, int]:
        """Gifts of late ranks to owners, one per owner and giver; and the ports that they keep busy."""
        step: list[Transfer] = []
        sending = receiving = num_gifts = 0
        for chunk, givers in list(self._to_give.items())[: 2 * self._e]:
            if num_gifts == most:
                break
            owner = chunk % self._e
            free = givers & ~sending
            is_last = givers.bit_count() == 1
            if receiving >> owner & 1 or not free:
                continue
            giver = max(bits(free), key=lambda rank: self._num_to_give[rank - self._e])
            if is_last:  # a swap; the ports back are free, since only swaps use them, and those use both ways
                step.append(Transfer(owner, giver, chunk, True))
                sending |= 1 << owner
                receiving |= 1 << giver
            step.append(Transfer(giver, owner, chunk, True))
            sending |= 1 << giver
            receiving |= 1 << owner
            num_gifts += 1
        return step, sending, receiving

    def _spread(self, sending: int, receiving: int, turn: int) -> list[Transfer]:
        """Finished chunks through the ports that are left, one more of each in turns; who lacks most is served first.

        Served otherwise, some ranks fall behind and the end drags on: up to a tenth more rounds.
        """
        order = sorted(range(self._n), key=lambda rank: (-self._num_lacking[rank], (rank - turn) % self._n))
        chunks = sorted(self._holders)
        holds = [renamed(self._holders[chunk] & ~sending, order) for chunk in chunks]
        lacks = [renamed(self._everyone & ~(self._holders[chunk] | receiving), order) for chunk in chunks]
        planned = SpreadRound(holds, lacks)
        growing = list(range(len(chunks)))
        while growing:
            growing = [i for i in growing if planned.add(i)]
        step = [Transfer(order[source], order[target], chunks[i], False) for source, target, i in planned.exchanges()]
        for _, target, chunk, _ in step:
            self._num_lacking[target] -= 1
            self._holders[chunk] |= 1 << target
            if self._holders[chunk] == self._everyone:
                del self._holders[chunk]
        return step

    def _finish(self, gifts: list[Transfer]) -> None:
        for giver, owner, chunk, _ in gifts:
            if giver < self._e:
                continue  # the other half of a swap
            self._num_to_give[giver - self._e] -= 1
            self._to_give[chunk] &= ~(1 << giver)
            if not self._to_give[chunk]:
                del self._to_give[chunk]
                if self._n > 2:
                    self._holders[chunk] = 1 << owner | 1 << giver
                    self._num_lacking = [
                        num + (rank not in (owner, giver)) for rank, num in enumerate(self._num_lacking)
                    ]
