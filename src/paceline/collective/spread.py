"""Spreading: turns who holds and who lacks which chunk into one round of messages, as many as the ports allow. Pure.

Sets of ranks are the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Exchange = tuple[int, int, int]  # source, target, chunk: the target takes over what it receives


class SpreadRound:
    """One round in the making: every chunk gets senders among its holders and receivers among those that lack it.

    Args:
        holds: By chunk, the ranks that may send it.
        lacks: By chunk, the ranks that may receive it; disjoint from its holders.

    Example:
        >>> planned = SpreadRound(holds=[0b001, 0b010], lacks=[0b110, 0b001])
        >>> planned.add(0), planned.add(1), planned.add(0)
        (True, True, False)
        >>> sorted(planned.exchanges())
        [(0, 1, 0), (1, 0, 1)]
    """

    def __init__(self, holds: Sequence[int], lacks: Sequence[int]) -> None:
        self._senders = _Assignment(holds)
        self._receivers = _Assignment(lacks)

    def num_receivers(self, chunk: int) -> int:
        """How many ranks get the chunk in this round, so far."""
        return self._receivers.of[chunk].bit_count()

    def add(self, chunk: int) -> bool:
        """Give a chunk one more sender and one more receiver, re-assigning others where needed; False: impossible."""
        before = self._senders.state()
        if self._senders.add(chunk):
            if self._receivers.add(chunk):
                return True
            self._senders.restore(before)
        return False

    def exchanges(self) -> Iterator[Exchange]:
        """The messages: inside a chunk the i-th sender feeds the i-th receiver, both in ascending order."""
        for chunk, (senders, receivers) in enumerate(zip(self._senders.of, self._receivers.of, strict=True)):
            for source, target in zip(bits(senders), bits(receivers), strict=True):
                yield source, target, chunk


class _Assignment:
    """Ranks by chunk: each rank with one chunk at most, and only where it is eligible."""

    def __init__(self, eligible: Sequence[int]) -> None:
        self._eligible = eligible
        self.of = [0] * len(eligible)
        self._taken = 0
        self._full: set[int] = set()  # chunks no chain leads on from: no later one will, as ranks are never given back

    def state(self) -> tuple[list[int], int]:
        return self.of.copy(), self._taken

    def restore(self, state: tuple[list[int], int]) -> None:
        self.of, self._taken = state

    def add(self, chunk: int) -> bool:
        """Give the chunk one more rank: the shortest chain in which each takes a rank from the next."""
        if chunk in self._full:
            return False
        came_from = {chunk: chunk}
        queue = [chunk]
        for at in queue:
            spare = self._eligible[at] & ~self._taken
            if spare:
                self._taken |= spare & -spare
                self._hand_on(spare & -spare, at, came_from)
                return True
            for other, ranks in enumerate(self.of):
                if self._eligible[at] & ranks and other not in came_from and other not in self._full:
                    came_from[other] = at
                    queue.append(other)
        self._full.update(queue)
        return False

    def _hand_on(self, bit: int, at: int, came_from: dict[int, int]) -> None:
        """Give a rank to the chunk at the end of a chain, which gives one of its own to the one before, and so on."""
        while came_from[at] != at:
            given = self._eligible[came_from[at]] & self.of[at]
            given &= -given
            self.of[at] ^= bit | given
            bit, at = given, came_from[at]
        self.of[at] |= bit


def bits(ranks: int) -> Iterator[int]:
    """The members of a set, ascending.

    Example:
        >>> list(bits(0b1011))
        [0, 1, 3]
    """
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest


def renamed(ranks: int, order: Sequence[int]) -> int:
    """The same set when rank `order[i]` is called i.

    Example:
        >>> bin(renamed(0b001, [2, 0, 1]))
        '0b10'
    """
    flags = format(ranks, f"0{len(order)}b")[::-1]
    return int("".join([flags[old] for old in reversed(order)]), 2)
