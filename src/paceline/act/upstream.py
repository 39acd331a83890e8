"""A worker's end of its link with one server: turns buckets into messages, and answers into tickets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.channel import HEADER_SIZE, Channel, header
from paceline.act.comm import CommThread
from paceline.act.groups import own_connection
from paceline.act.messages import Down, Spot, Up
from paceline.act.peers import Peers, Ticket
from paceline.act.shards import Shards
from paceline.decide.ledger import Lease
from paceline.errors import PacelineError
from paceline.types import Rank


class Expelled(PacelineError):  # noqa: N818 - a state of affairs, caught where it can arise
    """The servers went on without this worker: it was silent for too long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says when it releases a worker; the lease is the chief's."""

    version: int
    lease: Lease | None
    spot: Spot


class Passer(Protocol):
    """Who passes on to children what comes from servers."""

    def take_place(self, spot: Spot) -> None:
        """From now on the worker has this place in the tree."""

    def pass_on(self, server: int, bucket: int, version: int, message: Tensor) -> None:
        """A piece of parameters has come."""

    def cut(self, child: int) -> None:
        """A child is gone."""


class ServerLink(threading.Thread):
    """Listens on its own thread; sends on another, in order.

    Args:
        store: The job's, prefixed for this run.
        number: Of this worker's links, unique for ever.
        server: Whose other end it is.
        shards: How the model is cut.
        num_buffers: Numbers in the model's buffers; they come from server 0 alone.
        wire_dtype: What parameters come in.
        peers: Where the server's failure is noted.
        rank: The server's.
        passer: Passes parameters on.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        server: int,
        shards: Shards,
        num_buffers: int,
        wire_dtype: torch.dtype,
        peers: Peers,
        rank: Rank,
        passer: Passer,
    ) -> None:
        super().__init__(name=f"paceline-server-{server}", daemon=True)
        self.messages = shards.messages(torch.empty(shards.sizes[server], dtype=wire_dtype), server)
        self.buffers = torch.empty(num_buffers if server == 0 else 0, dtype=torch.float64)
        self.is_cancelled = False  # what is being computed will be thrown away
        self.answer: Ticket[Answer] = peers.ticket()
        self.parameters: Ticket[None] = peers.ticket()
        self.more: Ticket[Answer] = peers.ticket()
        self._store = store
        self._prefix = f"link/{number}/{server}"
        self._peers = peers
        self._rank = rank
        self._server = server
        self._passer = passer
        self._version = self._complete = -1  # of the last answer, and of the parameters that are all here
        self._is_final = False
        self._is_expelled = False
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._connected: Ticket[None] = peers.ticket()
        self._sender = CommThread(peers, name=f"paceline-to-server-{server}")
        self.start()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send when all before has been sent; must not change until the server's answer."""

        def job() -> None:
            self._connected.wait()
            assert self._channel is not None
            self._channel.send(tensors)

        self._sender.submit(job)

    def expect(self) -> None:
        """The next parameters are those after the gradient that is about to be sent."""
        with self._lock:
            self.answer, self.parameters = self._peers.ticket(), self._peers.ticket()
            self._version = -1
            if self._is_expelled:
                self._expel()

    def ask_for_more(self, epoch: int) -> Ticket[Answer]:
        """One more batch; the chief alone has them."""
        with self._lock:
            self.more = self._peers.ticket()
            if self._is_expelled:
                self._expel()
        self.send([header(Up.MORE, epoch)])
        return self.more

    def close(self) -> None:
        """Stop sending, when all has been sent."""
        self._sender.close()

    def end(self, timeout_s: float) -> None:
        """Wait for both threads, after the final parameters."""
        self._sender.join(timeout_s)
        self.join(timeout_s)

    def run(self) -> None:
        """Turn messages into tickets until the last one, or until the connection breaks."""
        try:
            self._channel = Channel(own_connection(self._store), self._prefix, position=1)
            self._connected.resolve(None)
            while self._receive(self._channel):
                pass
        except Exception as error:  # the shell's one place: a broken link is news about the server
            if not self._is_final:
                self._peers.suspect(self._rank, f"the connection to it broke ({error})")

    def _expel(self) -> None:
        expelled = Expelled("the servers went on without this worker, which gave no sign of life")
        for ticket in (self.answer, self.parameters, self.more):
            ticket.fail(expelled)

    def _receive(self, channel: Channel) -> bool:
        told = torch.empty(HEADER_SIZE, dtype=torch.float64)
        channel.receive([told])
        kind, version, lease_epoch, count, tree, parent, num_children = (int(value) for value in told[:7])
        match Down(kind):
            case Down.CANCEL:
                self.is_cancelled = True
                return True
            case Down.CUT:
                self._passer.cut(version)
                return True
            case Down.EXPELLED:
                with self._lock:
                    self._is_final = self._is_expelled = True
                    self._expel()
                return False
        numbers = torch.empty(count + num_children, dtype=torch.int64)
        channel.receive([numbers])
        positions, children = tuple(numbers[:count].tolist()), tuple(numbers[count:].tolist())
        spot = Spot(tree, parent, children)
        answer = Answer(version, Lease(lease_epoch, positions) if count else None, spot)
        if kind == Down.LEASE:
            self.more.resolve(answer)
            return True
        if kind != Down.AGAIN:
            self.is_cancelled = False
            self._passer.take_place(spot)
            channel.receive([self.buffers])
            with self._lock:
                self._version = version
                self.answer.resolve(answer)
                if self._complete == version:  # the parent was faster
                    self.parameters.resolve(None)
        if parent < 0:
            for bucket, message in enumerate(self.messages):
                channel.receive([message])
                if children:
                    self._passer.pass_on(self._server, bucket, version, message)
            self._is_final = kind == Down.FINAL
            self.have_parameters(version)
        return not self._is_final

    def have_parameters(self, version: int) -> None:
        """All of this version's parameters are here, from the server or from the parent."""
        with self._lock:
            self._complete = version
            if version == self._version:  # else the answer is still to come, or this worker has pushed since
                self.parameters.resolve(None)
