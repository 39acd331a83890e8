"""Point-to-point on a process group: turns exchanges into sends and receives that fill a flat buffer in place.

Two ways to run the same program. Gloo transfers a message only once its receiver has posted, and each post is cheap:
receives are posted one exchange ahead, so that the next sender can start the moment it is ready, and no further, or two
senders would share this rank's port. NCCL wants one batch per round and orders everything on a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.program import Exchange, Piece, Span

_TAG = 0  # both sides post the messages of a pair in the same order; Gloo keeps a table entry for every tag ever used
_SENDS_AHEAD = 1


class WireError(RuntimeError):
    """The transport gave up on a message.

    Args:
        peer: Position of the peer whose message it was.
        cause: What the transport said.
    """

    def __init__(self, peer: int, cause: BaseException) -> None:
        super().__init__(f"the exchange with position {peer} failed: {cause}")
        self.peer = peer
        self.is_closed = "imed out" not in str(cause) and "timeout" not in str(cause)


@dataclass(slots=True)
class Buffers:
    """What one call works on; all of one dtype and device.

    Args:
        flat: What is reduced, in place; shape [numel].
        kept: The input, where it has been written over; shape [>= numel].
        scratch: What is received beside, alternately; two of shape [>= longest such message].
        divisor: What finished sums are divided by; None for sums.
        saved: Which spans of `kept` are valid.
    """

    flat: Tensor
    kept: Tensor
    scratch: tuple[Tensor, Tensor]
    divisor: int | None
    saved: list[Span] = field(default_factory=list)

    def save(self, spans: Sequence[Span]) -> None:
        """Keep the input at these elements, before they are written to for the first time."""
        for start, stop in spans:
            self.kept[start:stop].copy_(self.flat[start:stop])
            self.saved.append((start, stop))

    def restore(self) -> None:
        """Put the input back wherever it has been written over."""
        for start, stop in self.saved:
            self.flat[start:stop].copy_(self.kept[start:stop])

    def target(self, index: int, exchange: Exchange) -> Tensor:
        """Where the message of an exchange is received: in place if possible."""
        assert exchange.receive is not None
        if exchange.beside:
            return self.scratch[index % 2][: exchange.receive.numel]
        return self.flat[exchange.receive.start : exchange.receive.stop]

    def take_in(self, index: int, exchange: Exchange) -> None:
        """Add what was received beside, or put it into place.

        Every addition rounds once, to the buffer's own dtype (bf16 and fp16 are added in float32 first), and adds the
        same two numbers at both ends of a swap: both get the same bits. A finished sum is divided before it is passed
        on, so everybody else copies those bits.
        """
        assert exchange.receive is not None
        part = self.flat[exchange.receive.start : exchange.receive.stop]
        if not exchange.receive.adds:
            part.copy_(self.target(index, exchange))
            return
        part.add_(self.target(index, exchange))
        if self.divisor is not None:
            for start, stop in exchange.finishes:
                self.flat[start:stop].div_(self.divisor)


class Wire(Protocol):
    """A way to run programs on a group."""

    def run(self, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        """Run a program to its end.

        Raises:
            WireError: a message failed; the group is of no use any more.
        """
        ...


def _wait(work: dist.Work, piece: Piece) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise WireError(piece.peer, error) from None


class StreamedWire:
    """Every message on its own, receives posted one exchange ahead: for Gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def run(self, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        """Run a program to its end; see `Wire`."""
        _Stream(self._group, exchanges, buffers).run()


class _Stream:
    """One run: receives complete in order; sends start as soon as their data is there, and complete in order."""

    def __init__(self, group: dist.ProcessGroup, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        self._group = group
        self._exchanges = exchanges
        self._buffers = buffers
        self._receives: dict[int, dist.Work] = {}
        self._sends: deque[tuple[int, Piece, dist.Work]] = deque()
        self._next_send = 0

    def run(self) -> None:
        for index, exchange in enumerate(self._exchanges):
            receive = exchange.receive
            if receive is not None and index not in self._receives:
                if not exchange.beside:
                    self._finish_sends(exchange.clear)
                self._post_receive(index, exchange)
            self._post_sends(index)
            self._look_ahead(index + 1)
            if receive is not None:
                if exchange.beside:
                    self._buffers.save(exchange.saves)
                _wait(self._receives.pop(index), receive)
                if exchange.beside:
                    self._finish_sends(exchange.clear)
                    self._buffers.take_in(index, exchange)
            self._finish_sends(index - 1)
        self._finish_sends(len(self._exchanges))

    def _look_ahead(self, index: int) -> None:
        """Post the next receive, unless it would write over what is still to be sent."""
        if index >= len(self._exchanges):
            return
        exchange = self._exchanges[index]
        sent = self._sends[0][0] if self._sends else self._next_send  # index of the first send that is not complete
        if exchange.receive is not None and (exchange.beside or exchange.clear < sent):
            self._post_receive(index, exchange)

    def _post_receive(self, index: int, exchange: Exchange) -> None:
        assert exchange.receive is not None
        if not exchange.beside:
            self._buffers.save(exchange.saves)
        try:
            work = self._group.recv([self._buffers.target(index, exchange)], exchange.receive.peer, _TAG)
        except RuntimeError as error:
            raise WireError(exchange.receive.peer, error) from None
        self._receives[index] = work

    def _post_sends(self, index: int) -> None:
        """Start the sends up to `_SENDS_AHEAD` exchanges ahead whose data is there: all receives before `index` are."""
        last = min(index + _SENDS_AHEAD, len(self._exchanges) - 1)
        while self._next_send <= last and self._exchanges[self._next_send].needs < index:
            piece = self._exchanges[self._next_send].send
            if piece is not None:
                part = self._buffers.flat[piece.start : piece.stop]
                try:
                    work = self._group.send([part], piece.peer, _TAG)
                except RuntimeError as error:
                    raise WireError(piece.peer, error) from None
                self._sends.append((self._next_send, piece, work))
            self._next_send += 1

    def _finish_sends(self, last: int) -> None:
        """Wait for the sends of all exchanges up to `last`."""
        while self._sends and self._sends[0][0] <= last:
            _, piece, work = self._sends[0]
            _wait(work, piece)
            self._sends.popleft()


class BatchedWire:
    """One batch per exchange, as `dist.batch_isend_irecv` issues it: for NCCL.

    Waiting only orders the current stream after the batch there, so additions queue behind their messages without the
    host waiting. Written for NCCL and tested on Gloo: **no part of it has run on NCCL yet.**
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._coalesces = bool(group._get_backend(device).supports_coalescing)

    def run(self, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        """Run a program to its end; see `Wire`."""
        for index, exchange in enumerate(exchanges):
            if exchange.receive is not None:
                buffers.save(exchange.saves)
            for work, piece in self._post(index, exchange, buffers):
                _wait(work, piece)
            if exchange.beside:
                buffers.take_in(index, exchange)

    def _post(self, index: int, exchange: Exchange, buffers: Buffers) -> list[tuple[dist.Work, Piece]]:
        # `dist.batch_isend_irecv` itself accepts registered groups only, which `make_group` cannot make.
        works: list[tuple[dist.Work, Piece]] = []
        send, receive = exchange.send, exchange.receive
        peer = (receive or send).peer  # type: ignore[union-attr]  # never both None
        try:
            if self._coalesces:
                self._group._start_coalescing(self._device)
            if send is not None:
                part = buffers.flat[send.start : send.stop]
                works.append((self._group.send([part], send.peer, _TAG), send))
            if receive is not None:
                works.append((self._group.recv([buffers.target(index, exchange)], receive.peer, _TAG), receive))
            if self._coalesces:
                return [(self._group._end_coalescing(self._device), works[-1][1])]
        except RuntimeError as error:
            raise WireError(peer, error) from None
        return works
