"""The referee: turns any schedule into a yes, or the first reason why it is no all-reduce. Pure.

It knows nothing of how a schedule was built. It follows the set of contributions that every rank holds of every chunk
through the rounds, as bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.collective.schedule import Messages, Schedule
from paceline.errors import ScheduleError

_WORD = 64
Sets = NDArray[np.uint64]  # [..., words]: the ranks whose contributions are in a sum


def verify(schedule: Schedule) -> None:
    """Check that a schedule is an all-reduce that every rank can run, without any tensor.

    At the start rank r holds {r} of every chunk. A message carries what its sender held when the round began. A
    receiver that adds must hold none of it yet; one that overwrites must lose nothing and gain something. In every
    round a rank sends at most one message and receives at most one, never to or from itself; it receives what it
    sends in the same round only in a swap. Late ranks are idle in the early rounds. At the end everybody holds
    everything of every chunk.

    Args:
        schedule: What to check. Takes n² K / 8 bytes and a few array operations per round.

    Raises:
        ScheduleError: the first violation, with its round, ranks and chunk.

    Source:
        A reduced chunk as the set of its contributions is msccl-tools' idea (`check_implements`). StragglAR's
        checker (arXiv 2505.23523, released code) skips the exchanges with the late rank, so that schedules with
        double receives pass; ours skips nothing.

    Example:
        >>> from paceline.collective.classic import ring
        >>> from paceline.collective.schedule import ListedSchedule
        >>> verify(ring(5))
        >>> verify(ListedSchedule("cut", 5, 5, 5, ring(5).steps[:-1]))
        Traceback (most recent call last):
        ...
        paceline.errors.ScheduleError: cut: at the end rank 0 lacks the contribution of rank 1 to chunk 1
    """
    n = schedule.num_ranks
    words = -(-n // _WORD)
    own = np.zeros((n, words), dtype=np.uint64)
    own[np.arange(n), np.arange(n) // _WORD] = np.uint64(1) << (np.arange(n) % _WORD).astype(np.uint64)
    held: Sets = np.repeat(own[:, None, :], schedule.num_chunks, axis=1)  # [ranks, chunks, words]
    num_rounds = 0
    for index, messages in enumerate(schedule.rounds()):
        _check_ports(schedule, index, messages)
        _deliver(schedule, index, messages, held)
        num_rounds += 1
    if num_rounds != schedule.num_rounds:
        raise ScheduleError(f"{schedule.name}: {num_rounds} rounds, but it says {schedule.num_rounds}")
    _check_complete(schedule, held, np.bitwise_or.reduce(own, axis=0))


def _check_ports(schedule: Schedule, index: int, messages: Messages) -> None:
    source, target, chunk, adds = messages.T
    n, most = schedule.num_ranks, schedule.num_chunks + schedule.num_shards

    def check(wrong: NDArray[np.bool_], what: str) -> None:
        _check(schedule, index, messages, wrong, what)

    check(np.any(messages < 0, axis=1) | (source >= n) | (target >= n), f"ranks must be in 0..{n - 1}")
    check((chunk >= most) | (adds > 1), f"chunks must be in 0..{most - 1}, and it adds or not")
    check(source == target, "a rank cannot send to itself")
    check(np.bincount(source, minlength=n)[source] > 1, "its sender sends more than one message in this round")
    check(np.bincount(target, minlength=n)[target] > 1, "its receiver receives more than one message in this round")
    if index < schedule.num_early_rounds:
        for rank in schedule.late:
            check((source == rank) | (target == rank), "a late rank takes part in an early round")
    row_of = np.full(n, -1)
    row_of[source] = np.arange(len(messages))
    back = row_of[target]  # what the receiver itself sends in this round
    is_swap = (target[back] == source) & (adds + adds[back] == 2)
    check((back >= 0) & (chunk[back] == chunk) & ~is_swap, "its receiver is sending the same chunk")


def _deliver(schedule: Schedule, index: int, messages: Messages, held: Sets) -> None:
    rows, chunk = _chunks(schedule, messages[:, 2])
    each = messages[rows]
    source, target, adds = each[:, 0], each[:, 1], each[:, 3:] == 1
    sent, before = held[source, chunk], held[target, chunk]  # copies: everybody reads before anybody writes
    # Who adds must hold nothing of what comes; who overwrites must find all it holds in it, and more.
    wrong = ((sent & before) != np.where(adds, 0, before)).any(axis=1)
    _check(schedule, index, each, wrong & adds[:, 0], "a contribution would be counted twice")
    _check(schedule, index, each, wrong, "overwriting would lose a contribution")
    _check(schedule, index, each, (sent == before).all(axis=1), "it brings nothing new")
    held[target, chunk] = sent | before


def _check(schedule: Schedule, index: int, messages: Messages, wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        source, target, chunk, _ = messages[int(np.argmax(wrong))].tolist()
        raise ScheduleError(
            f"{schedule.name}: round {index}, chunk {chunk} from rank {source} to rank {target}: {what}"
        )


def _chunks(schedule: Schedule, chunk: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Row of the message and chunk, for every chunk in every message: a shard is several."""
    num_chunks, num_shards = schedule.num_chunks, schedule.num_shards
    if not (chunk >= num_chunks).any():
        return np.arange(len(chunk)), chunk
    first = np.where(chunk >= num_chunks, chunk - num_chunks, chunk)
    count = np.where(chunk >= num_chunks, (num_chunks - first + num_shards - 1) // num_shards, 1)
    row = np.repeat(np.arange(len(chunk)), count)
    block = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, (first[row] + num_shards * block).astype(np.int32)


def _check_complete(schedule: Schedule, held: Sets, everyone: Sets) -> None:
    missing = everyone & ~held
    if missing.any():
        rank, chunk, word = (int(i) for i in np.argwhere(missing)[0])
        bits = int(missing[rank, chunk, word])
        absent = word * _WORD + (bits & -bits).bit_length() - 1
        raise ScheduleError(
            f"{schedule.name}: at the end rank {rank} lacks the contribution of rank {absent} to chunk {chunk}"
        )
