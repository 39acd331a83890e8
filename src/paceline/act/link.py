"""Links between an attached rank and its parent: turns gradients into parameters, each way at its own pace.

A link is a group of two with a thread of its own on both sides, since Gloo's point-to-point cannot be polled and a
timed wait breaks the pair. The protocol is strict request and answer, always begun by the child:

    child                                   parent
    GRADIENT (base version, samples) ────▶  kept until an update of the ring takes it in, or refuses it
    REQUEST  (no gradient)           ────▶  wants parameters and samples only
                                     ◀────  ANSWER: version, parameters, buffers, a lease or "epoch over"
    BYE                              ────▶  the link ends
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.comm import CommThread
from paceline.act.groups import make_group
from paceline.act.peers import Ticket
from paceline.decide.ledger import Lease

if TYPE_CHECKING:
    from paceline.act.session import Session

BYE, REQUEST, GRADIENT = 0, 1, 2
FOREVER = 2**31  # an epoch that no loop reaches: "over" up to here means the training is over
_HEADER_SIZE = 6
_CPU = torch.device("cpu")
_LINK_TIMEOUT = timedelta(days=7)  # a child may be arbitrarily slow; death is noticed by the connection closing


@dataclass(frozen=True, slots=True)
class Message:
    """What a child sends: `samples` > 0 means that a gradient came along, computed at version `base`."""

    kind: int
    base: int = 0
    samples: int = 0
    epoch: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a parent sends back: the parameters' version, and a lease or the last epoch that is over."""

    version: int
    lease: Lease | None
    over_epoch: int


def _send(group: dist.ProcessGroup, to: int, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        group.send([tensor], to, 0).wait()


def _receive(group: dist.ProcessGroup, source: int, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        group.recv([tensor], source, 0).wait()


def _header(*values: float) -> Tensor:
    """A fixed-size header; float64 holds every integer below 2^53 exactly."""
    header = torch.zeros(_HEADER_SIZE, dtype=torch.float64)
    header[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return header


class ParentLink(threading.Thread):
    """The parent's end: receives on its own thread, and answers when the training thread says so.

    Args:
        session: The run.
        child: Global rank of the child.
        prefix: Unique name for the link's group.
        is_over: Returns the last epoch that is over while the ring is between epochs, else None: then the child is
            answered at once, because no update will come until the loop goes on.
    """

    def __init__(self, session: Session, child: int, prefix: str, is_over: Callable[[], int | None]) -> None:
        super().__init__(name=f"paceline-link-{child}", daemon=True)
        self.child = child
        self.gradient = session.gradient_layout.empty()
        self.finite = True
        self._session = session
        self._prefix = prefix
        self._is_over = is_over
        self._change = threading.Condition()
        self._held: Message | None = None  # a gradient that no update has taken in yet
        self._asking: Message | None = None  # the message that waits for an answer
        self._answer: tuple[Lease | None, int] | None = None
        self.connected = session.peers.ticket()
        self.ended = session.peers.ticket()
        self.start()

    def take(self) -> tuple[Message | None, bool]:
        """What an update may take in now: a fully arrived gradient or None, and whether the child waits for a lease.

        The gradient stays readable in `gradient` until `answer`.
        """
        with self._change:
            held, self._held = self._held, None
            return held, self._asking is not None and self._asking.epoch < FOREVER

    def answer(self, lease: Lease | None, over_epoch: int = -1) -> None:
        """Let the child go on with the present parameters; without effect when it does not wait."""
        with self._change:
            if self._asking is not None:
                self._answer = (lease, over_epoch)
                self._change.notify_all()

    def answer_if_over(self) -> None:
        """Answer a child whose epoch the ring has finished: no update would do it."""
        with self._change:
            over = self._is_over()
            if self._asking is not None and over is not None and self._asking.epoch <= over:
                self._answer = (None, over)
                self._change.notify_all()

    def run(self) -> None:
        """Serve the child until it says bye or its connection breaks."""
        try:
            group = make_group(self._session.store, self._prefix, 0, 2, _LINK_TIMEOUT, _CPU)
            self.connected.resolve(None)
            while self._serve(group):
                pass
            self.ended.resolve(None)
        except BaseException as error:  # the shell's one place: a broken link is news about a peer
            why = self._session.peers.explain(error)
            self.connected.fail(why)
            self.ended.fail(why)

    def _serve(self, group: dist.ProcessGroup) -> bool:
        header = torch.empty(_HEADER_SIZE, dtype=torch.float64)
        _receive(group, 1, [header])
        kind, base, samples, epoch, scale = header.tolist()[:5]
        message = Message(int(kind), int(base), int(samples), int(epoch), scale)
        if message.kind == BYE:
            return False
        if message.kind == GRADIENT:
            _receive(group, 1, self.gradient)
            self.finite = all(bool(torch.isfinite(flat).all()) for flat in self.gradient)
        with self._change:
            if message.kind == GRADIENT:
                self._held = message
            self._asking = message
        self.answer_if_over()
        with self._change:
            while self._answer is None:
                self._change.wait(0.2)
                self._session.peers.check_quietly()
            lease, over = self._answer
            self._answer = self._asking = None
        flat = self._session.model_layout.empty()
        with self._session.model_lock:
            version = self._session.version
            self._session.model_layout.gather(self._session.model_tensors, flat)
        positions = lease.positions if lease else ()
        reply = [_header(version, over, lease.epoch if lease else -1, len(positions))]
        if positions:
            reply.append(torch.tensor(positions, dtype=torch.int64))
        _send(group, 1, [*reply, *flat])
        return True


class ChildLink:
    """The attached rank's end: one exchange at a time, on a thread of its own."""

    def __init__(self, session: Session, prefix: str) -> None:
        self._session = session
        self._comm = CommThread(session.peers, name="paceline-link")
        self._group: dist.ProcessGroup | None = None
        self._model = session.model_layout.empty()
        self.connected = self._comm.submit(lambda: self._connect(prefix))

    def exchange(self, message: Message, gradient: Sequence[Tensor] = ()) -> Ticket[Answer]:
        """Send a message, with a gradient if it is one; the ticket holds the `Answer`."""
        return self._comm.submit(lambda: self._exchange(message, gradient))

    def apply(self) -> None:
        """Copy the parameters and buffers of the last answer into the model. For the training thread."""
        with self._session.model_lock:
            self._session.model_layout.scatter(self._model, self._session.model_tensors)

    def bye(self) -> Ticket[None]:
        """End the link; the ticket is done when the parent has been told."""
        ticket = self._comm.submit(lambda: _send(self._ready(), 0, [_header(BYE)]))
        self._comm.close()
        return ticket

    def _connect(self, prefix: str) -> None:
        self._group = make_group(self._session.store, prefix, 1, 2, _LINK_TIMEOUT, _CPU)

    def _ready(self) -> dist.ProcessGroup:
        assert self._group is not None, "connecting comes first on this thread"
        return self._group

    def _exchange(self, message: Message, gradient: Sequence[Tensor]) -> Answer:
        group = self._ready()
        header = _header(message.kind, message.base, message.samples, message.epoch, message.scale)
        _send(group, 0, [header, *gradient])
        _receive(group, 0, [header])
        version, over, lease_epoch, count = (int(v) for v in header.tolist()[:4])
        lease = None
        if count:
            positions = torch.empty(count, dtype=torch.int64)
            _receive(group, 0, [positions])
            lease = Lease(lease_epoch, tuple(positions.tolist()))
        _receive(group, 0, self._model)
        return Answer(version, lease, over)
