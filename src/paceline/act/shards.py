"""Shards: turns a model's parameters into buckets that travel as one piece, and into the part that each server keeps.

The model is one flat vector, its parameters in reverse order, since that is how backward finishes them. Neighbours form
buckets, and every server owns a part of every bucket: so all servers' ports are busy as soon as the first bucket is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.errors import ConfigError

_SMALLEST_SPLIT = 1024  # elements: a bucket below goes to servers in whole tensors, or one message would be tiny
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Torch optimizers that treat every element alike: a tensor may lie on several servers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start <= i < stop` of flattened parameter `param`, at `offset` in its server's vector."""

    param: int
    start: int
    stop: int
    offset: int


class Shards:
    """Where every element of a model travels and lives; the same on all ranks.

    Args:
        params: The parameters, in an order that is the same on all ranks.
        num_servers: How many servers share them, >= 1.
        bucket_bytes: Size from which a bucket is full, bytes of the parameters' dtype, > 0.
        splits: Whether a tensor may be cut; else every server keeps whole tensors, balanced as well as they allow.

    Raises:
        ConfigError: no parameters, or several dtypes that are not all 32 bits or less.

    Source:
        STAR puts whole tensors on the least loaded server by element count; so do we where the optimizer needs it.
        Else ours differs: cut evenly, so that the largest tensor sets no limit.

    Example:
        >>> shards = Shards([torch.zeros(3), torch.zeros(2, 2)], num_servers=2, bucket_bytes=1 << 20, splits=False)
        >>> shards.num_elements, shards.sizes, shards.pieces(0)
        (7, (4, 3), (Piece(param=1, start=0, stop=4, offset=0),))
    """

    def __init__(self, params: Sequence[Tensor], num_servers: int, bucket_bytes: int, splits: bool) -> None:
        if not params:
            raise ConfigError("the model has no parameters that require a gradient: there is nothing to serve")
        dtypes = {p.dtype for p in params}
        if (torch.float64 in dtypes and len(dtypes) > 1) or any(not d.is_floating_point for d in dtypes):
            raise ConfigError(f"parameters must be real, and float64 only if all are; got {sorted(map(str, dtypes))}")
        self.num_servers = num_servers
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.shapes = [p.shape for p in params]
        self._counts = [p.numel() for p in params]
        itemsize = self.dtype.itemsize
        self.buckets: list[tuple[int, ...]] = []  # the parameters that each needs
        self._offsets = [0] * len(params)
        self.spans: list[list[tuple[int, int]]] = [[] for _ in range(num_servers)]  # by server and bucket
        loads = [0] * num_servers
        place = 0
        limit = max(1, bucket_bytes // itemsize)
        for bucket in _bucketed(self._counts, limit):
            total = sum(self._counts[i] for i in bucket)
            if splits and total >= _SMALLEST_SPLIT * num_servers:
                ordered: Sequence[int] = bucket
                # A bucket with a large tensor in it is cut: what is sent in pieces can be passed on in pieces.
                parts = max(1, round(total / limit))
                edges = [place + total * part // parts for part in range(parts + 1)]
                cuts = [
                    [low + (high - low) * server // num_servers for server in range(num_servers + 1)]
                    for low, high in pairwise(edges)
                ]
            else:
                owned = _dealt(bucket, self._counts, loads)
                ordered = [i for mine in owned for i in mine]
                counts = [sum(self._counts[i] for i in mine) for mine in owned]
                cuts = [list(accumulate(counts, initial=place))]
            for i in ordered:
                self._offsets[i] = place
                place += self._counts[i]
            for cut in cuts:
                for server in range(num_servers):
                    self.spans[server].append((cut[server], cut[server + 1]))
                    loads[server] += cut[server + 1] - cut[server]
                self.buckets.append(tuple(i for i in ordered if self._overlaps(i, cut[0], cut[-1])))
        self.num_elements = place
        self.sizes = tuple(loads)
        self.buckets_of: dict[int, list[int]] = {i: [] for i in range(len(params))}
        for b, bucket in enumerate(self.buckets):
            for i in bucket:
                self.buckets_of[i].append(b)

    def _overlaps(self, param: int, start: int, stop: int) -> bool:
        return self._offsets[param] < stop and start < self._offsets[param] + self._counts[param]

    @property
    def num_buckets(self) -> int:
        """How many messages a gradient is, to every server."""
        return len(self.buckets)

    def view(self, flat: Tensor, param: int) -> Tensor:
        """The part of a whole model's vector that is parameter `param`, in its shape."""
        return flat.narrow(0, self._offsets[param], self._counts[param]).view(self.shapes[param])

    def message(self, flat: Tensor, server: int, bucket: int) -> Tensor:
        """The part of a whole model's vector that travels to `server` with `bucket`; may be empty."""
        start, stop = self.spans[server][bucket]
        return flat[start:stop]

    def messages(self, vector: Tensor, server: int) -> list[Tensor]:
        """A server's own vector, cut by bucket."""
        return list(vector.split([stop - start for start, stop in self.spans[server]]))

    def gather(self, tensors: Iterable[Tensor], flat: Tensor) -> None:
        """Copy all parameters into a whole model's vector."""
        for i, tensor in enumerate(tensors):
            self.view(flat, i).copy_(tensor.detach())

    def scatter(self, flat: Tensor, tensors: Iterable[Tensor]) -> None:
        """Copy a whole model's vector into the parameters, in place."""
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor.copy_(self.view(flat, i))

    def pieces(self, server: int) -> tuple[Piece, ...]:
        """What a server keeps, in the order of its vector."""
        pieces: list[Piece] = []
        offset = 0
        for bucket, (start, stop) in zip(self.buckets, self.spans[server], strict=True):
            for i in bucket:
                first, last = max(start, self._offsets[i]), min(stop, self._offsets[i] + self._counts[i])
                if first < last:
                    pieces.append(Piece(i, first - self._offsets[i], last - self._offsets[i], offset))
                    offset += last - first
        return tuple(pieces)


def _bucketed(counts: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Parameters from last to first, cut into runs of `limit` elements or a little more; the first one is smaller.

    The first bucket is a quarter, as DDP's is: what is finished first should not wait to travel.
    """
    buckets: list[list[int]] = [[]]
    filled, first = 0, True
    for i in reversed(range(len(counts))):
        if filled >= (limit // 4 if first else limit):
            buckets.append([])
            filled, first = 0, False
        buckets[-1].append(i)
        filled += counts[i]
    return [tuple(bucket) for bucket in buckets]


def _dealt(bucket: Sequence[int], counts: Sequence[int], loads: Sequence[int]) -> list[list[int]]:
    """Whole tensors to servers, the largest first to whoever has least so far."""
    owned: list[list[int]] = [[] for _ in loads]
    totals = list(loads)
    for i in sorted(bucket, key=lambda i: (-counts[i], i)):
        server = totals.index(min(totals))
        owned[server].append(i)
        totals[server] += counts[i]
    return owned
