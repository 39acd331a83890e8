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
        self._holds = holds
        self._lacks = lacks
        self._senders = [0] * len(holds)
        self._receivers = [0] * len(holds)

    def num_receivers(self, chunk: int) -> int:
        """How many ranks get the chunk in this round, so far."""
        return self._receivers[chunk].bit_count()

    def add(self, chunk: int) -> bool:
        """Give a chunk one more sender and one more receiver, re-assigning others where needed; False: impossible."""
        before = self._senders.copy()
        if _augment(self._holds, self._senders, chunk):
            if _augment(self._lacks, self._receivers, chunk):
                return True
            self._senders = before
        return False

    def exchanges(self) -> Iterator[Exchange]:
        """The messages: inside a chunk the i-th sender feeds the i-th receiver, both in ascending order."""
        for chunk, (senders, receivers) in enumerate(zip(self._senders, self._receivers, strict=True)):
            for source, target in zip(bits(senders), bits(receivers), strict=True):
                yield source, target, chunk


def _augment(eligible: Sequence[int], assigned: list[int], chunk: int) -> bool:
    """Assign one more rank to the chunk: the shortest chain in which each takes a rank from the next."""
    taken = 0
    for ranks in assigned:
        taken |= ranks
    came_from = {chunk: chunk}
    queue = [chunk]
    for at in queue:
        spare = eligible[at] & ~taken
        if not spare:
            reached = [d for d, ranks in enumerate(assigned) if d not in came_from and eligible[at] & ranks]
            came_from |= dict.fromkeys(reached, at)
            queue += reached
            continue
        bit = spare & -spare
        while True:
            assigned[at] |= bit
            if at == chunk:
                return True
            before = came_from[at]
            given = eligible[before] & assigned[at] & ~bit
            bit = given & -given
            assigned[at] ^= bit
            at = before
    return False


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
