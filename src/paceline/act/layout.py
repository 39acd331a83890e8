"""Flat views of a model: turns its tensors into one buffer per dtype and back, keyed by parameter, never by bucket."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class FlatLayout:
    """Places of a fixed list of tensors in one flat CPU buffer per dtype.

    Args:
        tensors: In an order that is the same on all ranks.

    Example:
        >>> a, b = torch.ones(2), torch.arange(3.0)
        >>> layout = FlatLayout([a, b])
        >>> flat = layout.empty(); layout.gather([a, b], flat); flat[0]
        tensor([1., 1., 0., 1., 2.])
        >>> layout.view(flat, 1).shape
        torch.Size([3])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtypes = list(dict.fromkeys(t.dtype for t in tensors))
        self.sizes = [0] * len(self.dtypes)
        self._places: list[tuple[int, int, torch.Size]] = []
        for tensor in tensors:
            which = self.dtypes.index(tensor.dtype)
            self._places.append((which, self.sizes[which], tensor.shape))
            self.sizes[which] += tensor.numel()

    def empty(self) -> list[Tensor]:
        """New uninitialised buffers, one per dtype, on the CPU."""
        return [torch.empty(size, dtype=dtype) for size, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def view(self, flat: Sequence[Tensor], index: int) -> Tensor:
        """The part of `flat` that belongs to tensor number `index`, in its shape."""
        which, offset, shape = self._places[index]
        return flat[which].narrow(0, offset, shape.numel()).view(shape)

    def gather(self, tensors: Iterable[Tensor], flat: Sequence[Tensor]) -> None:
        """Copy the tensors into `flat`."""
        for index, tensor in enumerate(tensors):
            self.view(flat, index).copy_(tensor.detach())

    def scatter(self, flat: Sequence[Tensor], tensors: Iterable[Tensor]) -> None:
        """Copy `flat` into the tensors, in place."""
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                tensor.copy_(self.view(flat, index))


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a 63-bit hash of the tensors' bits: equal on two ranks exactly when every bit is (but for chance).

    Example:
        >>> fingerprint([torch.zeros(3)]) == fingerprint([torch.zeros(3)])
        True
        >>> fingerprint([torch.zeros(3)]) == fingerprint([-torch.zeros(3)])
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1
