"""The schedule: turns a collective into a value that says who sends what to whom in which round. Pure.

Every rank begins with its own contribution to every chunk and ends with the sum of all. A round is one step of every
rank's program and no barrier: ranks wait for their own messages only. Within a round everybody reads before anybody
writes, so a message carries what its sender held when the round began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ScheduleError

Messages = NDArray[np.int32]
"""The messages of one round: shape [messages, 4]; columns source, target, chunk, adds (0 or 1)."""


class Transfer(NamedTuple):
    """One message of a round: `source` sends `chunk` to `target`, which adds it or takes it over.

    Args:
        source, target: Ranks, 0..num_ranks-1.
        chunk: A chunk, 0..num_chunks-1, or `num_chunks + i` for all chunks of block i in one message.
        adds: Whether the target adds what it receives to what it holds; if not, it overwrites.
    """

    source: int
    target: int
    chunk: int
    adds: bool


Steps = tuple[tuple[Transfer, ...], ...]
"""Transfers by round."""


class Move(NamedTuple):
    """One rank's half of a transfer.

    Args:
        peer: The other rank.
        chunk: What is sent: pass it to `Schedule.chunk_range` as it is. A number from `num_chunks` on stands for a
            block of chunks.
        adds: Whether the receiving side adds; if not, it overwrites.
    """

    peer: int
    chunk: int
    adds: bool


class Step(NamedTuple):
    """What one rank does in one round: at most one send and one receive, at the same time; none of both is a pause."""

    send: Move | None = None
    receive: Move | None = None

    @property
    def is_swap(self) -> bool:
        """Whether both sides send each other the same chunk and add.

        What arrives must wait in scratch memory until the own send is complete, and be added only then.

        Example:
            >>> Step(Move(4, 0, True), Move(4, 0, True)).is_swap, Step(Move(4, 0, True), Move(4, 1, True)).is_swap
            (True, False)
        """
        return self.send is not None and self.send == self.receive and self.send.adds


class Schedule(Protocol):
    """A collective as a value: build, verify, cost, then run. Immutable; equal arguments give equal schedules."""

    @property
    def name(self) -> str:
        """Of the algorithm."""
        ...

    @property
    def num_ranks(self) -> int:
        """n, >= 2."""
        ...

    @property
    def num_chunks(self) -> int:
        """K, >= 1: into how many chunks the buffer is cut."""
        ...

    @property
    def num_shards(self) -> int:
        """Into how many equal parts the buffer is cut first; chunk c lies in shard c mod num_shards."""
        ...

    @property
    def blocks(self) -> tuple[range, ...]:
        """Chunks that lie side by side and travel in one message; block i is called `num_chunks + i` there."""
        ...

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that have no part in the first `num_early_rounds` rounds, ascending."""
        ...

    @property
    def num_early_rounds(self) -> int:
        """Rounds that need no late rank; they come first."""
        ...

    @property
    def num_rounds(self) -> int:
        """All rounds, the early ones included."""
        ...

    def rounds(self) -> Iterator[Messages]:
        """All messages, round by round; `num_rounds` arrays."""
        ...

    def program(self, rank: int) -> Iterator[Step]:
        """What one rank does; one step per round, `num_rounds` steps."""
        ...

    def chunks_of(self, chunk: int) -> range:
        """The chunks in a message: one, or those of a block (from `num_chunks` on)."""
        ...

    def chunk_range(self, chunk: int, numel: int) -> tuple[int, int]:
        """First element of a chunk (or block) in a buffer of `numel`, and the one after its last; no padding."""
        ...


def chunk_range(num_shards: int, num_chunks: int, chunks: range, numel: int) -> tuple[int, int]:
    """Return where a run of chunks lies in a buffer of any length, without padding.

    Shard i is [numel i // m, numel (i+1) // m). Chunk c is part c // m of the b parts of shard c mod m, cut by the
    same rule. All chunks together cover every element once.

    Args:
        num_shards: m, 1..num_chunks.
        num_chunks: K.
        chunks: One or more of 0..K-1 that lie side by side.
        numel: Length of the buffer, elements (or bytes), >= 0.

    Returns:
        `(start, stop)`; equal where there is nothing, which nobody sends or receives.

    Raises:
        ScheduleError: a negative length.

    Source:
        StragglAR (arXiv 2505.23523) cuts n - 1 chunks of numel // (n - 1) elements, so its tail is lost unless the
        caller pads. Ours cuts everything into chunks that differ by one element at most within a shard.

    Example:
        >>> [chunk_range(2, 4, range(chunk, chunk + 1), 11) for chunk in range(4)]
        [(0, 2), (5, 8), (2, 5), (8, 11)]
        >>> chunk_range(2, 4, range(1, 4, 2), 11)
        (5, 11)
    """
    if numel < 0:
        raise ScheduleError(f"a buffer cannot have {numel} elements")

    def edge(chunk: int, end: int) -> int:
        part, shard = divmod(chunk, num_shards)
        num_parts = (num_chunks - shard + num_shards - 1) // num_shards
        start, stop = numel * shard // num_shards, numel * (shard + 1) // num_shards
        return start + (stop - start) * (part + end) // num_parts

    return edge(chunks[0], 0), edge(chunks[-1], 1)


def chunks_of(num_chunks: int, blocks: Sequence[range], chunk: int) -> range:
    """Return the chunks that a message means by `chunk`.

    Raises:
        ScheduleError: no such chunk or block.

    Example:
        >>> chunks_of(4, (range(0, 4, 2), range(1, 4, 2)), 3), chunks_of(4, (range(0, 4, 2), range(1, 4, 2)), 5)
        (range(3, 4), range(1, 4, 2))
    """
    if not 0 <= chunk < num_chunks + len(blocks):
        raise ScheduleError(f"chunk must be in 0..{num_chunks + len(blocks) - 1}, got {chunk}")
    return range(chunk, chunk + 1) if chunk < num_chunks else blocks[chunk - num_chunks]


def shards_of(num_shards: int, num_chunks: int) -> tuple[range, ...]:
    """Return the shards as blocks; none where each is but one chunk.

    Example:
        >>> shards_of(2, 5), shards_of(5, 5)
        ((range(0, 5, 2), range(1, 5, 2)), ())
    """
    if num_shards == num_chunks:
        return ()
    return tuple(range(shard, num_chunks, num_shards) for shard in range(num_shards))


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule that holds its messages; see `Schedule` for the fields.

    Args:
        steps: The transfers of every round.

    Raises:
        ScheduleError: less than two ranks or one chunk, or shards that leave elements out.

    Example:
        >>> swap = ListedSchedule("swap", 2, 1, 1, ((Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)),))
        >>> [step.is_swap for step in swap.program(0)], swap.chunk_range(0, 5)
        ([True], (0, 5))
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_shards: int
    steps: Steps
    blocks: tuple[range, ...] = ()
    late: tuple[int, ...] = ()
    num_early_rounds: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ScheduleError(f"a collective needs at least 2 ranks, got {self.num_ranks}")
        if not 1 <= self.num_shards <= self.num_chunks:
            raise ScheduleError(f"num_shards must be in 1..num_chunks = {self.num_chunks}, got {self.num_shards}")

    @property
    def num_rounds(self) -> int:
        """All rounds."""
        return len(self.steps)

    def rounds(self) -> Iterator[Messages]:
        """All messages, round by round."""
        for step in self.steps:
            yield np.array(step, dtype=np.int32).reshape(-1, 4)

    def program(self, rank: int) -> Iterator[Step]:
        """What one rank does, round by round."""
        for step in self.steps:
            send = next((Move(t.target, t.chunk, t.adds) for t in step if t.source == rank), None)
            receive = next((Move(t.source, t.chunk, t.adds) for t in step if t.target == rank), None)
            yield Step(send, receive)

    def chunks_of(self, chunk: int) -> range:
        """The chunks in a message."""
        return chunks_of(self.num_chunks, self.blocks, chunk)

    def chunk_range(self, chunk: int, numel: int) -> tuple[int, int]:
        """Where a chunk (or block) lies in a buffer."""
        return chunk_range(self.num_shards, self.num_chunks, self.chunks_of(chunk), numel)


def steps_of(schedule: Schedule) -> Steps:
    """Return all transfers of a schedule, round by round: for people, JSON and tests.

    Example:
        >>> pair = ListedSchedule("pair", 2, 1, 1, ((Transfer(0, 1, 0, True),), (Transfer(1, 0, 0, False),)))
        >>> steps_of(pair) == pair.steps
        True
    """
    return tuple(
        tuple(Transfer(source, target, chunk, bool(adds)) for source, target, chunk, adds in messages.tolist())
        for messages in schedule.rounds()
    )
