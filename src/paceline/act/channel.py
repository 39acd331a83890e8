"""A channel between two ranks: turns a store prefix into a pair that carries headers, tensors and JSON, both ways.

Gloo's point-to-point cannot be polled, and a timed wait on it breaks the pair, so whoever receives does so on a thread
of its own. The two directions have tags of their own: one thread may send while another receives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.groups import make_group

HEADER_SIZE = 16
_FOREVER = timedelta(days=7)  # a peer may be arbitrarily slow; death is noticed by the connection closing


def header(*values: float) -> Tensor:
    """A fixed-size header; float64 holds every integer below 2^53 exactly."""
    told = torch.zeros(HEADER_SIZE, dtype=torch.float64)
    told[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return told


class Channel:
    """One end of a pair. Blocks until both ends are there.

    Args:
        store: The job's store.
        prefix: Unique among all channels that ever live on the store.
        position: 0 at one end, 1 at the other.
    """

    def __init__(self, store: dist.Store, prefix: str, position: int) -> None:
        self._other = 1 - position
        self._tag = position  # of what this end sends
        self._group = make_group(store, prefix, position, 2, _FOREVER, torch.device("cpu"))

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send, one after the other; empty ones are skipped on both sides."""
        for tensor in tensors:
            if tensor.numel():
                self._group.send([tensor], self._other, self._tag).wait()

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Receive straight into these."""
        for tensor in tensors:
            if tensor.numel():
                self._group.recv([tensor], self._other, 1 - self._tag).wait()

    def send_json(self, value: Any) -> None:
        """Send a JSON-ready value."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send((torch.tensor([len(data)], dtype=torch.int64), data))

    def receive_json(self) -> Any:
        """Receive what `send_json` sent."""
        size = torch.empty(1, dtype=torch.int64)
        self.receive((size,))
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive((data,))
        return json.loads(data.numpy().tobytes())
