"""What every schedule promises: it verifies, spoilt it does not, it costs what is published, and real numbers add up.

A new schedule is one line in `SCHEDULES`. The referee is the judge here, so it is judged too: every schedule is spoilt
in every way that one message can be, and where the referee is content, a replay with numbers must agree.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collective.classic import direct, halving_doubling, ring, tree
from paceline.collective.cost import cost_s, early_cost_s, late_rounds
from paceline.collective.late import around, around_many, around_one
from paceline.collective.schedule import ListedSchedule, Move, Schedule, Step, Transfer, steps_of
from paceline.collective.verify import verify
from paceline.errors import ScheduleError

CLASSIC = (ring, halving_doubling, tree, direct)
SCHEDULES: list[Schedule] = [
    *(build(n) for build in CLASSIC for n in (2, 3, 4, 5, 7, 8)),
    *(around_one(n, late=n // 3, num_chunks=k) for n in (2, 3, 4, 5, 6, 7, 8, 9) for k in (1, 2, n - 1, n + 2)),
    around_one(11, late=10, num_chunks=20),
    around_one(16, late=0, num_chunks=31),
    *(
        around_many(n, late, k)
        for n, late, k in ((5, (0, 4), 3), (7, (1, 2), 11), (8, (0, 3, 6), 10), (4, (1, 2, 3), 2))
    ),
]


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_ranks}-{schedule.num_chunks}-{','.join(map(str, schedule.late))}"


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)


def listed(schedule: Schedule, steps: tuple[tuple[Transfer, ...], ...]) -> ListedSchedule:
    """The same schedule with other messages."""
    return ListedSchedule(
        schedule.name, schedule.num_ranks, schedule.num_chunks, schedule.num_shards, steps, schedule.blocks,
        schedule.late, schedule.num_early_rounds,
    )  # fmt: skip


def content(schedule: Schedule) -> bool:
    """Whether the referee lets it pass."""
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def replay(schedule: Schedule, numel: int, seed: int = 0) -> bool:
    """Carry a schedule out on random integers, rank by rank, as programs say: does everybody end with the sum?"""
    rng = random.Random(seed)
    data = [[rng.randrange(-999, 999) for _ in range(numel)] for _ in range(schedule.num_ranks)]
    wanted = [sum(column) for column in zip(*data, strict=True)]
    programs = [schedule.program(rank) for rank in range(schedule.num_ranks)]
    for steps in zip(*programs, strict=True):
        in_flight = {}
        for rank, step in enumerate(steps):
            if step.send is not None:
                start, stop = schedule.chunk_range(step.send.chunk, numel)
                in_flight[rank, step.send.peer] = (step.send.chunk, step.send.adds, data[rank][start:stop])
        for rank, step in enumerate(steps):
            if step.receive is None:
                continue
            chunk, adds, values = in_flight.pop((step.receive.peer, rank))
            assert (chunk, adds) == (step.receive.chunk, step.receive.adds)
            start, stop = schedule.chunk_range(chunk, numel)
            held = data[rank][start:stop]
            data[rank][start:stop] = [a + b for a, b in zip(held, values, strict=True)] if adds else values
        assert not in_flight, "a message that nobody receives"
    return all(row == wanted for row in data)


def ports_hold(schedule: Schedule) -> bool:
    """Whether every rank sends and receives at most one message a round, none of them its own."""
    return all(
        max(Counter(t.source for t in step).values(), default=0) <= 1
        and max(Counter(t.target for t in step).values(), default=0) <= 1
        and all(t.source != t.target for t in step)
        for step in steps_of(schedule)
    )


@every_schedule
def test_it_verifies(schedule):
    verify(schedule)


@every_schedule
@pytest.mark.parametrize("numel", [0, 1, 7, 60])
def test_carried_out_rank_by_rank_it_gives_the_exact_sum_for_any_length(schedule, numel):
    assert replay(schedule, numel)


@every_schedule
def test_chunks_and_blocks_cover_every_element_once_without_padding(schedule):
    for numel in (0, 1, 13, 64, 997):
        covered = Counter(i for c in range(schedule.num_chunks) for i in range(*schedule.chunk_range(c, numel)))
        assert covered == Counter(range(numel))
        for block in range(schedule.num_chunks, schedule.num_chunks + len(schedule.blocks)):
            pieces = [schedule.chunk_range(c, numel) for c in schedule.chunks_of(block)]
            assert schedule.chunk_range(block, numel) == (pieces[0][0], pieces[-1][1])
            assert all(a[1] == b[0] for a, b in pairwise(pieces))


@every_schedule
def test_programs_are_the_rounds_and_late_ranks_pause_in_the_early_ones(schedule):
    steps = steps_of(schedule)
    assert len(steps) == schedule.num_rounds
    for rank in range(schedule.num_ranks):
        sends = [{t.source: Move(t.target, t.chunk, t.adds) for t in step}.get(rank) for step in steps]
        receives = [{t.target: Move(t.source, t.chunk, t.adds) for t in step}.get(rank) for step in steps]
        program = list(schedule.program(rank))
        assert program == [Step(send, receive) for send, receive in zip(sends, receives, strict=True)]
        if rank in schedule.late:
            assert program[: schedule.num_early_rounds] == [Step()] * schedule.num_early_rounds


@every_schedule
def test_only_a_swap_receives_the_chunk_that_is_being_sent(schedule):
    for rank in range(schedule.num_ranks):
        for step in schedule.program(rank):
            if step.send is not None and step.receive is not None and step.send.chunk == step.receive.chunk:
                assert step.is_swap


@every_schedule
def test_no_message_can_be_dropped(schedule):
    steps = steps_of(schedule)
    for index, step in enumerate(steps):
        for at in range(len(step)):
            assert not content(listed(schedule, (*steps[:index], step[:at] + step[at + 1 :], *steps[index + 1 :])))


@every_schedule
def test_a_message_spoilt_in_any_way_is_found_or_does_no_harm(schedule):
    """Another sender, receiver, chunk, the other way of receiving, said twice, or in another round."""
    steps = steps_of(schedule)
    rng = random.Random(name_of(schedule))
    num_found = 0
    spoilt = []
    for _ in range(60):
        index = rng.randrange(len(steps))
        if not steps[index]:
            continue
        at = rng.randrange(len(steps[index]))
        old = steps[index][at]
        other = rng.randrange(schedule.num_ranks)
        new = rng.choice([
            old._replace(source=other), old._replace(target=other), old._replace(adds=not old.adds),
            old._replace(chunk=rng.randrange(schedule.num_chunks + len(schedule.blocks))),
        ])  # fmt: skip
        rest = [*steps[index][:at], *steps[index][at + 1 :]]
        if new != old:
            spoilt.append((*steps[:index], (*rest, new), *steps[index + 1 :]))
            spoilt.append((*steps[:index], (*steps[index], new), *steps[index + 1 :]))
        elsewhere = rng.randrange(len(steps))
        if elsewhere != index:
            moved = [*steps[:index], tuple(rest), *steps[index + 1 :]]
            moved[elsewhere] = (*moved[elsewhere], old)
            spoilt.append(tuple(moved))
    for messages in spoilt:
        if not content(listed(schedule, messages)):
            num_found += 1
        else:  # such as another holder of the same chunk as the sender, whose port was free
            harmless = listed(schedule, messages)
            assert ports_hold(harmless)
            assert replay(harmless, 60)
    assert num_found >= 0.9 * len(spoilt)


@pytest.mark.parametrize("n", [*range(2, 34), 48, 63, 64, 65])
def test_classic_schedules_verify_for_every_number_of_ranks(n):
    for build in CLASSIC:
        verify(build(n))


ALPHA, BETA = 3.0, 0.25


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 12, 16, 21])
def test_classic_schedules_cost_what_is_published(n):
    size = 2**10 * 3 * 5 * 7 * 11
    size -= size % (n * (1 << n.bit_length()))
    p, log_p, log_n = 1 << (n.bit_length() - 1), n.bit_length() - 1, (n - 1).bit_length()
    ring_s = 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * size * BETA
    folded_s = 0 if n == p else 2 * ALPHA + 2 * size * BETA
    assert cost_s(ring(n), size, ALPHA, BETA) == pytest.approx(ring_s, rel=1e-12)
    assert cost_s(direct(n), size, ALPHA, BETA) == pytest.approx(ring_s, rel=1e-12)
    assert cost_s(tree(n), size, ALPHA, BETA) == pytest.approx(2 * log_n * (ALPHA + size * BETA), rel=1e-12)
    halving_s = 2 * log_p * ALPHA + 2 * (p - 1) / p * size * BETA + folded_s
    assert cost_s(halving_doubling(n), size, ALPHA, BETA) == pytest.approx(halving_s, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 12, 16, 33])
@pytest.mark.parametrize("per_owner", [1, 2, 4])
def test_one_late_rank_costs_what_is_published(n, per_owner):
    k = per_owner * (n - 1)
    size = 1000 * k
    schedule = around_one(n, late=n - 1, num_chunks=k)
    early_s = (n - 2) * (ALPHA + size * BETA / (n - 1))
    assert early_cost_s(schedule, size, ALPHA, BETA) == pytest.approx(early_s, rel=1e-12)
    late_s = late_rounds(n, k) * (ALPHA + size * BETA / k)
    assert cost_s(schedule, size, ALPHA, BETA) == pytest.approx(late_s, rel=1e-12)


@given(data=st.data())
def test_any_late_ranks_any_chunks_any_length(data):
    n = data.draw(st.integers(2, 14))
    late = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    num_chunks = data.draw(st.integers(1, 3 * n))
    schedule = around(n, late, num_chunks)
    verify(schedule)
    assert replay(schedule, data.draw(st.integers(0, 50)), seed=1)
    if len(late) > 1:
        beyond_the_rule = around_many(n, tuple(sorted(late)), num_chunks)
        verify(beyond_the_rule)
        assert replay(beyond_the_rule, 17)


def spoil(name: str) -> ListedSchedule:
    """A ring over three ranks with one thing wrong."""
    good = ring(3)
    first, *rest = good.steps
    a, b, c = first
    wrong = {
        "itself": (a._replace(target=a.source), b, c),
        "sends more than one": (a, b._replace(source=a.source, target=b.target), c),
        "receives more than one": (a, b, c._replace(target=a.target)),
        "ranks must be in": (a._replace(target=3), b, c),
        "chunks must be in": (a._replace(chunk=9), b, c),
        "sending the same chunk": (a, b._replace(chunk=a.chunk), c),
        "lose a contribution": (a._replace(adds=False), b, c),
    }[name]
    return replace(good, steps=(wrong, *rest))


@pytest.mark.parametrize(
    "what",
    ["itself", "sends more than one", "receives more than one", "ranks must be in", "chunks must be in",
     "sending the same chunk", "lose a contribution"],
)  # fmt: skip
def test_the_referee_says_what_is_wrong(what):
    with pytest.raises(ScheduleError, match=what):
        verify(spoil(what))


def test_the_referee_says_what_is_wrong_in_the_end():
    good = ring(3)
    with pytest.raises(ScheduleError, match=r"round 4, chunk \d from rank \d to rank \d: it brings nothing new"):
        verify(replace(good, steps=(*good.steps, good.steps[-1])))
    with pytest.raises(ScheduleError, match="counted twice"):
        verify(replace(good, steps=(good.steps[0], *good.steps)))
    late = around_one(4, 3, 3)
    early = ListedSchedule("late", 4, 3, 3, steps_of(late), (), (0,), 2)
    with pytest.raises(ScheduleError, match="a late rank takes part in an early round"):
        verify(early)


class ShortOfItsWord:
    """A ring that promises a round more than it has."""

    num_rounds = 5

    def __getattr__(self, name):
        return getattr(ring(3), name)


def test_the_referee_counts_rounds():
    with pytest.raises(ScheduleError, match="4 rounds, but it says 5"):
        verify(ShortOfItsWord())
