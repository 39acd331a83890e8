"""One rank's program over elements: turns a schedule and a buffer's length into exchanges that can be run as they are.

A schedule speaks of rounds and chunks; the wire of peers and elements. What may overlap is settled here, once per
schedule and length, so that the loop that runs a program has nothing left to work out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from paceline.collective.schedule import Move, Schedule, Step

Span = tuple[int, int]
NEVER = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """One message: elements [start, stop) to or from a position of the group; never empty."""

    peer: int
    start: int
    stop: int
    adds: bool

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does in one round in which it does anything, and what that has to wait for.

    Args:
        send, receive: The messages; not both None.
        needs: Index of the last exchange whose receive the send passes on; it must be complete first.
        clear: Index of the last exchange (this one included) that sends what the receive writes to; its send must be
            complete before anything is written there. In a swap, that is this exchange.
        saves: What the receive writes to for the first time in this call.
        finishes: Where the receive adds the last contribution that this rank will add or take over.
        beside: What arrives has to wait in scratch memory: it adds, or it would overwrite what is sent meanwhile.
    """

    send: Piece | None
    receive: Piece | None
    needs: int = NEVER
    clear: int = NEVER
    saves: tuple[Span, ...] = ()
    finishes: tuple[Span, ...] = ()
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """All of one rank's exchanges.

    Args:
        early: Those that need no late rank; indices count from 0.
        completion: The others; indices count from 0 again, as all of `early` is complete before.
        scratch_numel: Longest message that is received beside the buffer, elements.
    """

    early: tuple[Exchange, ...]
    completion: tuple[Exchange, ...]
    scratch_numel: int


def compile_program(schedule: Schedule, position: int, numel: int) -> Program:
    """Return what a rank does to all-reduce a buffer of `numel` elements.

    Pauses and empty messages are left out; both sides of a message work out its length from the same rule, so both
    leave it out.

    Args:
        schedule: Verified.
        position: This rank's position in the schedule, 0..num_ranks-1.
        numel: Length of the buffer, elements, >= 0.

    Returns:
        The program. O(rounds + chunks) to build and to hold.

    Example:
        >>> from paceline.collective.schedule import ListedSchedule, Transfer
        >>> swap = ListedSchedule("swap", 2, 1, 1, ((Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)),))
        >>> exchange, = compile_program(swap, 0, 5).completion
        >>> exchange.receive, exchange.clear, exchange.saves, exchange.finishes
        (Piece(peer=1, start=0, stop=5, adds=True), 0, ((0, 5),), ((0, 5),))
        >>> compile_program(swap, 0, 0).completion
        ()
    """
    spans = _Spans(schedule, numel)
    steps = iter(schedule.program(position))
    phases = [
        [step for step in phase if spans.piece(step.send) or spans.piece(step.receive)]
        for phase in (list(islice(steps, schedule.num_early_rounds)), list(steps))
    ]
    last_write: dict[int, tuple[int, int]] = {}  # chunk -> phase and index of the receive that writes there last
    for number, phase in enumerate(phases):
        for index, step in enumerate(phase):
            if step.receive is not None and spans.piece(step.receive):
                last_write.update(dict.fromkeys(spans.chunks(step.receive.chunk), (number, index)))
    saved: set[int] = set()
    early, completion = (
        tuple(_exchanges(number, phase, spans, saved, last_write)) for number, phase in enumerate(phases)
    )
    beside = [e.receive.numel for e in (*early, *completion) if e.receive is not None and e.beside]
    return Program(early, completion, max(beside, default=0))


class _Spans:
    """Where chunks lie in a buffer of one length."""

    def __init__(self, schedule: Schedule, numel: int) -> None:
        self._schedule = schedule
        self._numel = numel

    def chunks(self, chunk: int) -> tuple[int, ...]:
        """The chunks behind a chunk's number, which may stand for a whole shard."""
        if chunk < self._schedule.num_chunks:
            return (chunk,)
        first = chunk - self._schedule.num_chunks
        return tuple(range(first, self._schedule.num_chunks, self._schedule.num_shards))

    def span(self, chunk: int) -> Span:
        return self._schedule.chunk_range(chunk, self._numel)

    def joined(self, chunks: list[int]) -> tuple[Span, ...]:
        """The elements of chunks of one shard, ascending, neighbours joined."""
        spans: list[Span] = []
        for start, stop in sorted(self.span(chunk) for chunk in chunks):
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            elif start < stop:
                spans.append((start, stop))
        return tuple(spans)

    def piece(self, move: Move | None) -> Piece | None:
        if move is None:
            return None
        start, stop = self.span(move.chunk)
        return Piece(move.peer, start, stop, move.adds) if start < stop else None


def _exchanges(
    number: int, steps: list[Step], spans: _Spans, saved: set[int], last_write: dict[int, tuple[int, int]]
) -> Iterator[Exchange]:
    """The exchanges of one phase, in order; chunks that they write to are noted in `saved`."""
    sent: dict[int, int] = {}  # chunk -> index of the exchange that sent it last
    received: dict[int, int] = {}
    for index, step in enumerate(steps):
        send, receive = spans.piece(step.send), spans.piece(step.receive)
        needs = clear = NEVER
        saves: tuple[Span, ...] = ()
        finishes: tuple[Span, ...] = ()
        if send is not None and step.send is not None:
            chunks = spans.chunks(step.send.chunk)
            needs = max(received.get(chunk, NEVER) for chunk in chunks)
            sent.update(dict.fromkeys(chunks, index))
        if receive is not None and step.receive is not None:
            chunks = spans.chunks(step.receive.chunk)
            clear = max(sent.get(chunk, NEVER) for chunk in chunks)
            received.update(dict.fromkeys(chunks, index))
            saves = spans.joined([chunk for chunk in chunks if chunk not in saved])
            saved.update(chunks)
            if receive.adds:
                finishes = spans.joined([chunk for chunk in chunks if last_write[chunk] == (number, index)])
        beside = receive is not None and (receive.adds or clear == index)
        yield Exchange(send, receive, needs, clear, saves, finishes, beside)
