"""A server's end of its link with one worker: turns messages into events for the server's one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.channel import HEADER_SIZE, Channel, header
from paceline.act.comm import CommThread
from paceline.act.groups import own_connection
from paceline.act.messages import Down, Up
from paceline.act.peers import Peers, Ticket
from paceline.act.shards import Shards
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class Event:
    """What happened on a link: `kind` is connected, pushed, timing, more, bye or lost; `told` goes with it."""

    kind: str
    link: int
    told: Any = None


class GuestLink(threading.Thread):
    """Receives on its own thread; sends on another, in order. What it receives stays until the worker is released.

    Args:
        store: The job's, prefixed for this run.
        number: Of the link, unique for ever.
        rank: The worker's.
        server: Whose end this is, 0..num_servers-1.
        shards: How the model is cut.
        num_buffers: Numbers in the model's buffers; they come to server 0 alone.
        wire_dtype: What gradients come in.
        inbox: Where events go.
        peers: For the sending thread.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        rank: Rank,
        server: int,
        shards: Shards,
        num_buffers: int,
        wire_dtype: torch.dtype,
        inbox: queue.SimpleQueue[Any],
        peers: Peers,
    ) -> None:
        super().__init__(name=f"paceline-guest-{number}", daemon=True)
        self.number = number
        self.rank = rank
        self.gradient = torch.empty(shards.sizes[server], dtype=wire_dtype)
        self.buffers = torch.empty(num_buffers if server == 0 else 0, dtype=torch.float64)
        self.scale = 1.0
        self.via: int | None = None  # the parent's link, whose gradient this one's is a part of
        self._messages = shards.messages(self.gradient, server)
        self.pushed_s = (0.0, 0.0)  # when its last gradient began and ended to arrive
        self._store = store
        self._prefix = f"link/{number}/{server}"
        self._inbox = inbox
        self._channel: Channel | None = None
        self._sender = CommThread(peers, name=f"paceline-to-guest-{number}")
        self.start()

    @property
    def is_connected(self) -> bool:
        """Whether the worker has come to this link."""
        return self._channel is not None

    def send(self, tensors: Sequence[Tensor]) -> Ticket[None]:
        """Send when all before has been sent; must not change until then."""
        assert self._channel is not None, "a link is used only when it is connected"
        channel = self._channel
        return self._sender.submit(lambda: channel.send(tensors))

    def expel(self) -> None:
        """Tell the worker, if it ever wakes, that it takes no part any more."""
        if self._channel is not None:
            self.send([header(Down.EXPELLED)])
        self._sender.close()

    def close(self) -> None:
        """Stop sending, when all has been sent."""
        self._sender.close()

    def end(self, timeout_s: float) -> None:
        """Wait for both threads, after `close` and the worker's farewell."""
        self._sender.join(timeout_s)
        self.join(timeout_s)

    def run(self) -> None:
        """Turn messages into events until the worker leaves or its connection breaks."""
        try:
            self._channel = Channel(own_connection(self._store), self._prefix, position=0)
            self._inbox.put(Event("connected", self.number, self.rank))
            while self._receive(self._channel):
                pass
        except Exception as error:  # the shell's one place: a broken link is news about the worker
            self._inbox.put(Event("lost", self.number, f"its connection broke ({error})"))

    def _receive(self, channel: Channel) -> bool:
        told = torch.empty(HEADER_SIZE, dtype=torch.float64)
        channel.receive([told])
        match Up(int(told[0])):
            case Up.PUSH:
                self.scale, self.via = float(told[2]), None
                began_s, total = time.monotonic(), torch.zeros(())
                for message in self._messages:
                    channel.receive([message])
                    total = total + message.sum(dtype=torch.float64)  # not finite if anything in it is not
                self.pushed_s = began_s, time.monotonic()
                channel.receive([self.buffers])
                self._inbox.put(Event("pushed", self.number, bool(torch.isfinite(total))))
            case Up.PUSH_VIA:
                self.scale, self.via = 1.0, int(told[1])
                channel.receive([self.buffers])
                self._inbox.put(Event("pushed", self.number, True))
            case Up.ABANDON:
                self._inbox.put(Event("pushed", self.number, True))
            case Up.TIMING:
                self._inbox.put(Event("timing", self.number, told))
            case Up.MORE:
                self._inbox.put(Event("more", self.number, int(told[1])))
            case Up.BYE:
                self._inbox.put(Event("bye", self.number, int(told[1])))
                return False
        return True
