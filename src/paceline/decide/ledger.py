"""Sample leases: turns an epoch into batches for whoever asks, so that every sample is trained once or counted. Pure.

The ring takes its batches from the front of the epoch's order, attached ranks from the back. Ring members advance
the ledger in step and hold equal copies; nobody is asked for a batch. With everybody in the ring the batches are
those of torch's DistributedSampler, without its repeated samples at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions in the order of one epoch, to be trained by one rank.

    Args:
        epoch: The epoch, from 0.
        positions: Places in that epoch's permutation.
    """

    epoch: int
    positions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of an epoch: what is free, what is leased, what is settled. A value; every change returns a new one.

    Invariant: `trained + dropped + leased + free == num_samples` within an epoch.

    Args:
        num_samples: Samples in the data set, >= 1.
        batch_size: Samples per rank and step, >= 1.
        epoch: The current epoch; -1 before the first.
        free: Half-open ranges of positions not handed out, in order.
        leases: What attached ranks hold.
        trained, dropped: Samples settled in this epoch.
        total_trained, total_dropped: The same over all earlier epochs.

    Raises:
        ValueError: an empty data set or batch.

    Example:
        >>> ledger = Ledger(num_samples=10, batch_size=2).next_epoch()
        >>> ledger, leases = ledger.draw((0, 1))
        >>> leases[0].positions, leases[1].positions, ledger.num_free
        ((0, 2), (1, 3), 6)
    """

    num_samples: int
    batch_size: int
    epoch: int = -1
    free: tuple[tuple[int, int], ...] = ()
    leases: Mapping[Rank, Lease] = field(default_factory=dict)
    trained: int = 0
    dropped: int = 0
    total_trained: int = 0
    total_dropped: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise ValueError(
                f"wanted at least one sample and a batch of one, got {self.num_samples} and {self.batch_size}"
            )

    @property
    def num_free(self) -> int:
        """Samples of this epoch that nobody has been given."""
        return sum(stop - start for start, stop in self.free)

    def next_epoch(self) -> Ledger:
        """Begin the next epoch. What the last one left free (a loop that ended early) counts as dropped there."""
        return replace(
            self,
            epoch=self.epoch + 1,
            free=((0, self.num_samples),),
            trained=0,
            dropped=0,
            total_trained=self.total_trained + self.trained,
            total_dropped=self.total_dropped + self.dropped + (self.num_free if self.epoch >= 0 else 0),
        )

    def draw(self, ring: tuple[Rank, ...]) -> tuple[Ledger, dict[Rank, Lease]]:
        """Hand every ring member its next batch; samples count as trained.

        Every member gets a sample or none does: a short rest is spread over the ring, and a rest too small for two
        samples each (BatchNorm fails on a batch of one) is avoided by making the block before it shorter. Where that
        is impossible (batches of 1 to 3) some get a batch of one, and a rest smaller than the ring is dropped and
        counted.

        Args:
            ring: The members, in ring order.

        Returns:
            The new ledger, and the batch by rank; empty when the epoch is exhausted.
        """
        members, free = len(ring), self.num_free
        if not self.can_draw(members):
            return replace(self, free=(), dropped=self.dropped + free), {}
        block = min(members * self.batch_size, free)
        rest = free - block
        for least in (members * min(2, self.batch_size), members):
            if 0 < rest < least and block - (least - rest) >= least:
                block -= least - rest
                break
        positions, left = _take_front(self.free, block)
        leases = {rank: Lease(self.epoch, positions[i::members]) for i, rank in enumerate(ring)}
        return replace(self, free=left, trained=self.trained + block), leases

    def can_draw(self, members: int) -> bool:
        """Whether `members` ranks can each get a batch from what is free."""
        return self.num_free >= members

    def grant(self, rank: Rank, num_samples: int, num_members: int) -> Ledger:
        """Lease samples from the back to an attached rank, unless the ring needs what is left.

        Args:
            rank: The attached rank; must hold no lease.
            num_samples: How many, >= 1.
            num_members: Size of the ring, which keeps a full block for itself.

        Returns:
            The ledger with `leases[rank]`, or unchanged when the epoch has too little left.
        """
        assert rank not in self.leases, f"rank {rank} already holds {self.leases[rank]}"
        if self.num_free < num_samples + num_members * (self.batch_size + 1):
            return self
        positions, left = _take_back(self.free, num_samples)
        return replace(self, free=left, leases={**self.leases, rank: Lease(self.epoch, positions)})

    def take(self, rank: Rank, num_samples: int) -> tuple[Ledger, Lease | None]:
        """Lease samples from the front to a rank that works at its own pace, on top of what it holds.

        Begins the next epoch where nothing is free. What a rank holds is of one epoch, so one that holds something
        then gets nothing. A rest of a single sample is avoided where that is possible (BatchNorm fails on it).

        Args:
            rank: Who.
            num_samples: How many, >= 1; fewer at the end of the epoch.

        Returns:
            The new ledger, and what was leased now (`leases[rank]` has all that the rank holds), or None.

        Example:
            >>> ledger, lease = Ledger(num_samples=5, batch_size=3).take(rank=7, num_samples=4)
            >>> lease, ledger.num_free
            (Lease(epoch=0, positions=(0, 1, 2)), 2)
        """
        held = self.leases.get(rank)
        if held is not None and (held.epoch != self.epoch or not self.free):
            return self, None
        ledger = self if self.free else self.next_epoch()
        count = min(num_samples, ledger.num_free)
        if ledger.num_free - count == 1 and count > 2:
            count -= 1
        positions, left = _take_front(ledger.free, count)
        lease = Lease(ledger.epoch, positions)
        all_held = Lease(ledger.epoch, (held.positions if held else ()) + positions)
        return replace(ledger, free=left, leases={**ledger.leases, rank: all_held}), lease

    def settle(self, rank: Rank, trained: bool) -> Ledger:
        """Close an attached rank's lease: its gradient is in an update, or it was dropped.

        A lease of an earlier epoch is booked to the totals. Without a lease this changes nothing.
        """
        lease = self.leases.get(rank)
        if lease is None:
            return self
        leases = {r: held for r, held in self.leases.items() if r != rank}
        counter = "trained" if trained else "dropped"
        if lease.epoch < self.epoch:
            counter = f"total_{counter}"
        return replace(self, leases=leases, **{counter: getattr(self, counter) + len(lease)})

    def reclaim(self, rank: Rank) -> Ledger:
        """Take an untouched lease back: free again in its own epoch, dropped when that has passed."""
        lease = self.leases.get(rank)
        if lease is None:
            return self
        if lease.epoch < self.epoch:
            return self.settle(rank, trained=False)
        leases = {r: held for r, held in self.leases.items() if r != rank}
        return replace(self, leases=leases, free=(*self.free, *_ranges(lease.positions)))


def _take_front(free: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    taken: list[int] = []
    left = list(free)
    while count > 0:
        start, stop = left.pop(0)
        cut = min(stop, start + count)
        taken.extend(range(start, cut))
        count -= cut - start
        if cut < stop:
            left.insert(0, (cut, stop))
    return tuple(taken), tuple(left)


def _take_back(free: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    taken: list[int] = []
    left = list(free)
    while count > 0:
        start, stop = left.pop()
        cut = max(start, stop - count)
        taken = [*range(cut, stop), *taken]
        count -= stop - cut
        if start < cut:
            left.append((start, cut))
    return tuple(taken), tuple(left)


def _ranges(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for position in sorted(positions):
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges
