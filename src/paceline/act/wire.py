"""Point-to-point on a process group: turns exchanges into sends and receives that fill a flat buffer in place.

Two ways to run the same program. Gloo transfers a message only once its receiver has posted, and each post is cheap:
receives are posted one exchange ahead, so that the next sender can start the moment it is ready, and no further, or two
senders would share this rank's port. NCCL wants one batch per round and orders everything on a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.program import Exchange, Piece, Span

_TAG = 0  # both sides post the messages of a pair in the same order; Gloo keeps a table entry for every tag ever used


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
        later: What else has to be kept before the call's end, in pieces that fit into the waits of one exchange each.
    """

    flat: Tensor
    kept: Tensor
    scratch: tuple[Tensor, Tensor]
    divisor: int | None
    saved: list[Span] = field(default_factory=list)
    later: list[Span] = field(default_factory=list)

    def save(self, spans: Sequence[Span]) -> None:
        """Keep the input at these elements, before they are written to for the first time."""
        for start, stop in spans:
            self.kept[start:stop].copy_(self.flat[start:stop])
            self.saved.append((start, stop))

    def save_some(self) -> None:
        """Keep the next piece of what is not urgent, while messages are on their way."""
        if self.later:
            self.save([self.later.pop()])

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
    """Every message on its own: for Gloo.

    A rank has one send under way at a time: two would share its port, and the first, for which somebody waits, would
    arrive as late as the second. Where the next exchange is another lane's, its receive is posted and its send starts
    as soon as the own send is out, so that ports do not idle while processes wake up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def run(self, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        """Run a program to its end; see `Wire`."""
        _Stream(self._group, exchanges, buffers).run()


class _Stream:
    """One run."""

    def __init__(self, group: dist.ProcessGroup, exchanges: Sequence[Exchange], buffers: Buffers) -> None:
        self._group = group
        self._exchanges = exchanges
        self._buffers = buffers
        self._receives: dict[int, dist.Work] = {}
        self._sends: dict[int, dist.Work] = {}

    def run(self) -> None:
        for index, exchange in enumerate(self._exchanges):
            self._post_receive(index)
            self._post_send(index)
            ahead = self._exchanges[index + 1] if index + 1 < len(self._exchanges) else None
            goes_ahead = ahead is not None and ahead.is_independent
            if ahead is not None and goes_ahead and (ahead.beside or ahead.clear < index):
                self._post_receive(index + 1)
            if exchange.beside:
                self._buffers.save(exchange.saves)
            self._buffers.save_some()
            if exchange.send is not None:
                _wait(self._sends.pop(index), exchange.send)
            if goes_ahead:
                self._post_send(index + 1)
            if exchange.receive is not None:
                _wait(self._receives.pop(index), exchange.receive)
            if exchange.beside:
                self._buffers.take_in(index, exchange)

    def _post_receive(self, index: int) -> None:
        exchange = self._exchanges[index]
        if exchange.receive is None or index in self._receives:
            return
        if not exchange.beside:
            self._buffers.save(exchange.saves)
        try:
            work = self._group.recv([self._buffers.target(index, exchange)], exchange.receive.peer, _TAG)
        except RuntimeError as error:
            raise WireError(exchange.receive.peer, error) from None
        self._receives[index] = work

    def _post_send(self, index: int) -> None:
        piece = self._exchanges[index].send
        if piece is None or index in self._sends:
            return
        try:
            work = self._group.send([self._buffers.flat[piece.start : piece.stop]], piece.peer, _TAG)
        except RuntimeError as error:
            raise WireError(piece.peer, error) from None
        self._sends[index] = work


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
            works = self._post(index, exchange, buffers)
            buffers.save_some()
            for work, piece in works:
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
