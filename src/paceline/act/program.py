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
        is_independent: It is another lane's than the exchange before, so it needs nothing of what that brings.
        clear: Index of the last exchange (this one included) that sends what the receive writes to; its send must be
            complete before anything is written there. In a swap, that is this exchange.
        saves: What the receive writes to for the first time in this call.
        finishes: Where the receive adds the last contribution that this rank will add or take over.
        beside: What arrives has to wait in scratch memory: it adds, or it would overwrite what is sent meanwhile.
    """

    send: Piece | None
    receive: Piece | None
    is_independent: bool = False
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


def compile_program(schedule: Schedule, position: int, numel: int, num_lanes: int = 1) -> Program:
    """Return what a rank does to all-reduce a buffer of `numel` elements.

    Pauses and empty messages are left out; both sides of a message work out its length from the same rule, so both
    leave it out. Lanes are equal parts of the buffer, each reduced by the schedule on its own; of every round, all
    lanes have their turn before the next round's. An exchange then never waits for what the one before it brings, so
    with two lanes one message is on its way while the other's ends are waking up.

    Args:
        schedule: Verified.
        position: This rank's position in the schedule, 0..num_ranks-1.
        numel: Length of the buffer, elements, >= 0.
        num_lanes: How many parts, >= 1.

    Returns:
        The program. O(rounds + chunks) to build and to hold, times lanes.

    Source:
        StragglAR (arXiv 2505.23523) runs its rounds one after the other. Lanes are ours.

    Example:
        >>> from paceline.collective.schedule import ListedSchedule, Transfer
        >>> swap = ListedSchedule("swap", 2, 1, 1, ((Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)),))
        >>> exchange, = compile_program(swap, 0, 5).completion
        >>> exchange.receive, exchange.clear, exchange.saves, exchange.finishes
        (Piece(peer=1, start=0, stop=5, adds=True), 0, ((0, 5),), ((0, 5),))
        >>> [(e.send.start, e.send.stop) for e in compile_program(swap, 0, 5, num_lanes=2).completion]
        [(0, 2), (2, 5)]
        >>> compile_program(swap, 0, 0).completion
        ()
    """
    lanes = [_Spans(schedule, numel * i // num_lanes, numel * (i + 1) // num_lanes, i) for i in range(num_lanes)]
    steps = iter(schedule.program(position))
    phases = [
        [turn for step in phase for lane in lanes if (turn := lane.turn(step)) is not None]
        for phase in (list(islice(steps, schedule.num_early_rounds)), list(steps))
    ]
    last_write: dict[int, tuple[int, int]] = {}  # chunk -> phase and index of the receive that writes there last
    for number, phase in enumerate(phases):
        for index, turn in enumerate(phase):
            last_write.update(dict.fromkeys(turn.written, (number, index)))
    saved: set[int] = set()
    early, completion = (tuple(_exchanges(number, phase, saved, last_write)) for number, phase in enumerate(phases))
    beside = [e.receive.numel for e in (*early, *completion) if e.receive is not None and e.beside]
    return Program(early, completion, max(beside, default=0))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A step of one lane: its messages, and which chunks (numbered over all lanes) they read and write."""

    send: Piece | None
    receive: Piece | None
    read: tuple[int, ...]
    written: tuple[int, ...]
    spans: _Spans


class _Spans:
    """Where the chunks of one lane lie."""

    def __init__(self, schedule: Schedule, start: int, stop: int, lane: int) -> None:
        self._schedule = schedule
        self._start = start
        self._numel = stop - start
        self._first_chunk = lane * schedule.num_chunks

    def turn(self, step: Step) -> _Turn | None:
        """What a step comes to here; None if nothing."""
        send, read = self._message(step.send)
        receive, written = self._message(step.receive)
        return _Turn(send, receive, read, written, self) if send or receive else None

    def joined(self, chunks: list[int]) -> tuple[Span, ...]:
        """The elements of chunks, ascending, neighbours joined."""
        spans: list[Span] = []
        for start, stop in sorted(self._span(chunk - self._first_chunk) for chunk in chunks):
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            elif start < stop:
                spans.append((start, stop))
        return tuple(spans)

    def _message(self, move: Move | None) -> tuple[Piece | None, tuple[int, ...]]:
        if move is None:
            return None, ()
        start, stop = self._span(move.chunk)
        if start == stop:
            return None, ()
        chunks = tuple(self._first_chunk + chunk for chunk in self._schedule.chunks_of(move.chunk))
        return Piece(move.peer, start, stop, move.adds), chunks

    def _span(self, chunk: int) -> Span:
        start, stop = self._schedule.chunk_range(chunk, self._numel)
        return self._start + start, self._start + stop


def _exchanges(
    number: int, turns: list[_Turn], saved: set[int], last_write: dict[int, tuple[int, int]]
) -> Iterator[Exchange]:
    """The exchanges of one phase, in order; chunks that they write to are noted in `saved`."""
    sent: dict[int, int] = {}  # chunk -> index of the exchange that sent it last
    for index, turn in enumerate(turns):
        finishes: tuple[Span, ...] = ()
        sent.update(dict.fromkeys(turn.read, index))
        clear = max((sent.get(chunk, NEVER) for chunk in turn.written), default=NEVER)
        saves = turn.spans.joined([chunk for chunk in turn.written if chunk not in saved])
        saved.update(turn.written)
        adds = turn.receive is not None and turn.receive.adds
        if adds:
            finishes = turn.spans.joined([chunk for chunk in turn.written if last_write[chunk] == (number, index)])
        beside = adds or (turn.receive is not None and clear == index)
        is_independent = index > 0 and turn.spans is not turns[index - 1].spans
        yield Exchange(turn.send, turn.receive, is_independent, clear, saves, finishes, beside)
