"""The loop's batches: turns sample leases into collated batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, default_collate

from paceline.decide.ledger import Lease


class LeaseSource(Protocol):
    """Where a loader gets its leases from."""

    def begin_epoch(self) -> None:
        """The loop begins an epoch."""

    def next_lease(self) -> Lease | None:
        """The next batch's samples, or None when the epoch is over."""

    def before_fetch(self) -> None:
        """The samples of a batch are about to be read."""

    def after_fetch(self) -> None:
        """They are there."""


class LeaseLoader:
    """Batches of a data set, each sample of an epoch going to exactly one rank.

    With every rank in the ring, rank r of W gets what `DistributedSampler(shuffle, seed)` would give it, except that
    nothing is repeated to even out the end: the last batches are shorter instead.

    Args:
        source: Hands out leases.
        dataset: A map-style data set.
        batch_size: Samples per rank and step, >= 1.
        world_size: Ranks that share the data set.
        shuffle: A new order every epoch, the same on all ranks.
        seed: Of that order.
        collate_fn: Turns a list of samples into a batch; torch's default otherwise.
    """

    def __init__(
        self,
        source: LeaseSource,
        dataset: Dataset[Any],
        batch_size: int,
        world_size: int,
        shuffle: bool,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._source = source
        self._world_size = world_size
        self._shuffle = shuffle
        self._seed = seed
        self._collate = collate_fn or default_collate
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        """Steps per epoch with every rank in the ring; an attached rank's loop has fewer."""
        return -(-len(self.dataset) // (self.batch_size * self._world_size))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._source.begin_epoch()
        while (lease := self._source.next_lease()) is not None:
            self._source.before_fetch()
            try:
                batch = self._fetch(lease)
            finally:
                self._source.after_fetch()
            yield batch

    def _fetch(self, lease: Lease) -> Any:
        order = self._order_of(lease.epoch)
        indices = [order[position] for position in lease.positions]
        if hasattr(self.dataset, "__getitems__"):
            return self._collate(self.dataset.__getitems__(indices))
        return self._collate([self.dataset[index] for index in indices])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._order[0] != epoch:
            size = len(self.dataset)  # type: ignore[arg-type]
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(size, generator=generator).tolist() if self._shuffle else range(size)
            self._order = (epoch, order)
        return self._order[1]
