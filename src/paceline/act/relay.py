"""The transmission tree's links between workers: turns children's buckets into sums, and passes parameters on.

A child sends its buckets to its parent instead of to the servers; the parent adds them to its own, weighted by samples,
and sends the mean of the group. Parameters come back the same way, piece by piece. Headers still go straight between
every worker and the servers, so who has arrived, and who is released with what, is told as without a tree.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.channel import HEADER_SIZE, Channel, header
from paceline.act.comm import CommThread
from paceline.act.groups import own_connection
from paceline.act.messages import Spot, Up
from paceline.act.peers import Peers
from paceline.act.shards import Shards
from paceline.act.upstream import ServerLink


def bucket_range(shards: Shards, flat: Tensor, bucket: int) -> Tensor:
    """The part of a whole model's vector that is this bucket, for all servers."""
    return flat[shards.spans[0][bucket][0] : shards.spans[-1][bucket][1]]


class _End(threading.Thread):
    """What both ends have: a channel, a sender that waits for it, and the news that the other side is gone."""

    def __init__(self, store: dist.Store, prefix: str, position: int, peers: Peers) -> None:
        super().__init__(name=f"paceline-{prefix}", daemon=True)
        self.is_gone = False
        self._store = store
        self._prefix = prefix
        self._position = position
        self._ready = threading.Event()
        self._change = threading.Condition()
        self._sender = CommThread(peers, name=f"paceline-send-{prefix}")

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send when all before has been sent; must not change until then."""

        def job() -> None:
            self._ready.wait()
            if not self.is_gone:
                self._channel.send(tensors)

        self._sender.submit(job)

    def cut(self) -> None:
        """The other side is gone: nobody waits for it any more."""
        with self._change:
            self.is_gone = True
            self._change.notify_all()
        self._ready.set()

    def close(self) -> None:
        """Stop sending, when all has been sent."""
        self._sender.close()

    def run(self) -> None:
        """Receive until the other side is gone."""
        try:
            self._channel = Channel(own_connection(self._store), self._prefix, self._position)
            self._ready.set()
            while True:
                self._receive(self._channel)
        except Exception:  # the shell's one place: servers notice the loss of a worker themselves
            self.cut()

    def _receive(self, channel: Channel) -> None:
        raise NotImplementedError


class ChildPort(_End):
    """A parent's end: keeps what the child has sent until it is summed.

    Args:
        store: The job's, prefixed for this run.
        prefix: Of the channel; unique.
        shards: How the model is cut.
        wire_dtype: What travels.
        peers: For the sender.
    """

    def __init__(self, store: dist.Store, prefix: str, shards: Shards, wire_dtype: torch.dtype, peers: Peers) -> None:
        super().__init__(store, prefix, 0, peers)
        self._shards = shards
        self._flat = torch.empty(shards.num_elements, dtype=wire_dtype)
        self._turn = (-1, 0.0, 1.0)  # version, samples, loss scale
        self._arrived = 0
        self.start()

    def add_to(self, total: Tensor, bucket: int, version: int) -> float:
        """Wait for the child's bucket of this version, and add it times its samples; how many those are, 0 if gone."""
        with self._change:
            self._change.wait_for(lambda: self.is_gone or (self._turn[0] == version and self._arrived > bucket))
            if self.is_gone and not (self._turn[0] == version and self._arrived > bucket):
                return 0.0
        _, samples, scale = self._turn
        total.add_(bucket_range(self._shards, self._flat, bucket), alpha=samples / scale)
        return samples

    def _receive(self, channel: Channel) -> None:
        told = torch.empty(HEADER_SIZE, dtype=torch.float64)
        channel.receive([told])
        with self._change:
            self._turn, self._arrived = (int(told[0]), float(told[1]), float(told[2])), 0
        for bucket in range(self._shards.num_buckets):
            channel.receive([bucket_range(self._shards, self._flat, bucket)])
            with self._change:
                self._arrived += 1
                self._change.notify_all()


class ParentPort(_End):
    """A child's end: what parameters arrive go to the links of the servers that they are from.

    Args:
        store, prefix, peers: As above.
        shards: How the model is cut.
        links: With the servers.
    """

    def __init__(
        self, store: dist.Store, prefix: str, shards: Shards, links: Sequence[ServerLink], peers: Peers
    ) -> None:
        super().__init__(store, prefix, 1, peers)
        self._shards = shards
        self._links = links
        self.start()

    def _receive(self, channel: Channel) -> None:
        told = torch.empty(HEADER_SIZE, dtype=torch.float64)
        channel.receive([told])
        server, bucket, version = (int(value) for value in told[:3])
        place = self._links[server].messages[bucket]
        piece = torch.empty_like(place)
        channel.receive([piece])
        with self._change:
            if self.is_gone:  # of a parent that was stopped and goes on: what it sends is old
                return
            place.copy_(piece)
        if bucket + 1 == self._shards.num_buckets:
            self._links[server].have_parameters(version)


class Relay:
    """One worker's way to the servers and back, through the tree where there is one.

    Args:
        store: The job's, prefixed for this run.
        number: Of the worker's links.
        shards: How the model is cut.
        wire_dtype: What travels.
        peers: For the senders.
    """

    def __init__(self, store: dist.Store, number: int, shards: Shards, wire_dtype: torch.dtype, peers: Peers) -> None:
        self.links: Sequence[ServerLink] = ()  # once they are there; until then nobody sends
        self._store = store
        self._number = number
        self._shards = shards
        self._wire_dtype = wire_dtype
        self._peers = peers
        self._lock = threading.Lock()
        self._spot = Spot()
        self._parent: ParentPort | None = None
        self._children: dict[int, ChildPort] = {}
        self._summer: CommThread | None = None
        self._turn = (0, 0.0, 1.0)

    # ---- the way down: called by the links' threads ------------------------------------------------------------------

    def take_place(self, spot: Spot) -> None:
        """From now on the worker has this place; every server says so, the first counts."""
        with self._lock:
            if spot == self._spot:
                return
            self._leave_place()
            self._spot = spot
            prefix = f"tree/{spot.tree}"
            if spot.parent >= 0:
                name = f"{prefix}/{self._number}"
                self._parent = ParentPort(self._store, name, self._shards, self.links, self._peers)
            for child in spot.children:
                self._children[child] = ChildPort(
                    self._store, f"{prefix}/{child}", self._shards, self._wire_dtype, self._peers
                )
            if spot.children:
                self._summer = CommThread(self._peers, name="paceline-sum")

    def pass_on(self, server: int, bucket: int, version: int, message: Tensor) -> None:
        """Send a piece of parameters to all children."""
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.send([header(server, bucket, version), message])

    def cut(self, child: int) -> None:
        """A child is gone: nobody waits for it any more."""
        with self._lock:
            port = self._children.get(child)
        if port is not None:
            port.cut()

    # ---- the way up: called by the training thread -------------------------------------------------------------------

    def begin(self, version: int, samples: int, scale: float, abandons: bool) -> None:
        """A gradient of this version begins to leave, or word that there will be none."""
        self._turn = version, float(samples), scale
        for link in self.links:
            link.expect()
        if abandons:
            told = header(Up.ABANDON)
        elif self._parent is not None:
            told = header(Up.PUSH_VIA, self._spot.parent)
            self._parent.send([header(version, samples, scale)])
        else:
            told = header(Up.PUSH, version, 1.0 if self._children else scale)
        for link in self.links:
            link.send([told])

    def send(self, flat: Tensor, bucket: int) -> None:
        """A bucket is ready; it must not change until the servers' answer."""
        if self._parent is not None:
            self._parent.send([bucket_range(self._shards, flat, bucket)])
        elif self._summer is not None:
            self._summer.submit(lambda: self._send_sum(flat, bucket))
        else:
            self._send_straight(flat, bucket)

    def end(self, buffers: Tensor) -> None:
        """The last bucket has been sent; how buffers have changed goes straight to the chief."""
        if self._summer is not None:
            self._summer.submit(lambda: self.links[0].send([buffers]))
        else:
            self.links[0].send([buffers])

    def leave(self, farewell: Tensor) -> None:
        """Say farewell to the servers after all that is still to be sent, and leave the tree."""

        def say() -> None:
            for link in self.links:
                link.send([farewell])
                link.close()

        if self._summer is not None:
            self._summer.submit(say)
        else:
            say()
        with self._lock:
            self._leave_place()

    def _send_straight(self, flat: Tensor, bucket: int) -> None:
        for server, link in enumerate(self.links):
            link.send([self._shards.message(flat, server, bucket)])

    def _send_sum(self, flat: Tensor, bucket: int) -> None:
        """The mean gradient of this worker and its children, by samples; those that are gone are not in it."""
        version, samples, scale = self._turn
        own = bucket_range(self._shards, flat, bucket)
        total = own.float().mul_(samples / scale) if own.dtype is torch.bfloat16 else own.mul_(samples / scale)
        for child in self._children.values():
            samples += child.add_to(total, bucket, version)
        torch.div(total, samples, out=total)
        if total is not own:
            own.copy_(total)
        self._send_straight(flat, bucket)

    def _leave_place(self) -> None:
        if self._parent is not None:
            self._parent.cut()
        for port in (self._parent, *self._children.values()):
            if port is not None:
                port.close()
        if self._summer is not None:
            self._summer.close()
        self._parent, self._children, self._summer = None, {}, None
