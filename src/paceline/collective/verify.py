"""The referee: turns any schedule into a yes, or the first reason why it is no all-reduce. Pure.

It knows nothing of how a schedule was built. It follows the set of contributions that every rank holds of every chunk
through the rounds, as bits.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.collective.schedule import Messages, Schedule
from paceline.errors import ScheduleError

_WORD = 64
Indices = NDArray[np.intp]
Sets = NDArray[np.uint64]  # [..., words]: the ranks whose contributions are in a sum


def verify(schedule: Schedule) -> None:
    """Check that a schedule is an all-reduce that every rank can run, without any tensor.

    At the start rank r holds {r} of every chunk. A message carries what its sender held when the round began. A
    receiver that adds must hold none of it yet; one that overwrites must lose nothing and gain something. In every
    round a rank sends at most one message and receives at most one, never to or from itself; it receives what it
    sends in the same round only in a swap. Late ranks are idle in the early rounds. At the end everybody holds
    everything of every chunk.

    Args:
        schedule: What to check. Takes n² K / 8 bytes, and memory for all messages.

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
    rounds = list(schedule.rounds())
    if len(rounds) != schedule.num_rounds:
        raise ScheduleError(f"{schedule.name}: {len(rounds)} rounds, but it says {schedule.num_rounds}")
    index = np.repeat(np.arange(len(rounds)), [len(messages) for messages in rounds])
    messages = np.concatenate([np.empty((0, 4), dtype=np.int32), *rounds])
    _check_ports(schedule, index, messages)
    _deliver(schedule, index, messages, held)
    _check_complete(schedule, held, np.bitwise_or.reduce(own, axis=0))


def _check_ports(schedule: Schedule, index: Indices, messages: Messages) -> None:
    """All that can be said of a message without knowing what its sender holds."""
    source, target, chunk, adds = messages.T
    n, most = schedule.num_ranks, schedule.num_chunks + len(schedule.blocks)

    def check(wrong: NDArray[np.bool_], what: str) -> None:
        _check(schedule, index, messages, wrong, what)

    check(np.any(messages < 0, axis=1) | (source >= n) | (target >= n), f"ranks must be in 0..{n - 1}")
    check((chunk >= most) | (adds > 1), f"chunks must be in 0..{most - 1}, and it adds or not")
    check(source == target, "a rank cannot send to itself")
    out, into = index * n + source, index * n + target  # a rank in a round
    check(np.bincount(out)[out] > 1, "its sender sends more than one message in this round")
    check(np.bincount(into)[into] > 1, "its receiver receives more than one message in this round")
    is_late = np.zeros(n, dtype=np.bool_)
    is_late[list(schedule.late)] = True
    is_early_round = index < schedule.num_early_rounds
    check(is_early_round & (is_late[source] | is_late[target]), "a late rank takes part in an early round")
    row_of = np.full(schedule.num_rounds * n, -1)
    row_of[out] = np.arange(len(messages))
    back = row_of[into]  # what the receiver itself sends in this round
    is_swap = (target[back] == source) & (adds + adds[back] == 2)
    check((back >= 0) & (chunk[back] == chunk) & ~is_swap, "its receiver is sending the same chunk")


def _deliver(schedule: Schedule, index: Indices, messages: Messages, held: Sets) -> None:
    rows, chunks = _chunks(schedule, messages[:, 2])
    messages, index = messages[rows], index[rows]
    flat = held.reshape(-1, held.shape[2])  # a view: one set for every rank and chunk
    sources = messages[:, 0].astype(np.intp) * schedule.num_chunks + chunks
    targets = messages[:, 1].astype(np.intp) * schedule.num_chunks + chunks
    # Who adds must hold nothing of what comes; who overwrites must find all it holds in it, and more.
    may_share = np.where(messages[:, 3:] == 1, np.uint64(0), ~np.uint64(0))
    starts = np.searchsorted(index, np.arange(schedule.num_rounds + 1)).tolist()
    for start, stop in pairwise(starts):
        now = slice(start, stop)
        target = targets[now]
        sent, before = flat.take(sources[now], axis=0), flat.take(target, axis=0)  # copies: all read before any writes
        wrong, useless = (sent & before) != (before & may_share[now]), (sent == before).all(axis=1)
        if wrong.any() or useless.any():
            adds, wrong = messages[now, 3] == 1, wrong.any(axis=1)
            _check(schedule, index[now], messages[now], wrong & adds, "a contribution would be counted twice")
            _check(schedule, index[now], messages[now], wrong, "overwriting would lose a contribution")
            _check(schedule, index[now], messages[now], useless, "it brings nothing new")
        flat[target] = sent | before


def _check(schedule: Schedule, index: Indices, messages: Messages, wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        source, target, chunk, _ = messages[first].tolist()
        raise ScheduleError(
            f"{schedule.name}: round {index[first]}, chunk {chunk} from rank {source} to rank {target}: {what}"
        )


def _chunks(schedule: Schedule, chunk: NDArray[np.int32]) -> tuple[Indices, Indices]:
    """Row of the message and chunk, for every chunk in every message: a block is several."""
    ranges = [*(range(c, c + 1) for c in range(schedule.num_chunks)), *schedule.blocks]
    first, step, count = np.array([(r.start, r.step, len(r)) for r in ranges])[chunk].T
    row = np.repeat(np.arange(len(chunk)), count)
    part = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, first[row] + step[row] * part


def _check_complete(schedule: Schedule, held: Sets, everyone: Sets) -> None:
    missing = everyone & ~held
    if missing.any():
        rank, chunk, word = (int(i) for i in np.argwhere(missing)[0])
        bits = int(missing[rank, chunk, word])
        absent = word * _WORD + (bits & -bits).bit_length() - 1
        raise ScheduleError(
            f"{schedule.name}: at the end rank {rank} lacks the contribution of rank {absent} to chunk {chunk}"
        )
