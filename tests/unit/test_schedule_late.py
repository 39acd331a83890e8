"""Around late ranks: golden patterns and the bound on rounds, for every number of ranks."""

import pytest

from paceline.collective.late import around_many, around_one, late_lower_bound
from paceline.collective.late_pattern import num_doublings, pattern
from paceline.collective.late_tail import tail
from paceline.collective.schedule import steps_of
from paceline.collective.verify import verify
from paceline.errors import ScheduleError
from paceline.report.schedule import messages_text


def numbers(text):
    return tuple(int(word) for word in text.split())


GOLDEN = {  # ranks: land, birth, send, target from rank-time 1 on
    5: ("0 3 1 4", "0 1 3 4", "0 1 4 3", "3 3 2"),
    6: ("0 3 1 4 2", "0 1 2 3 4", "0 1 4 2 3", "4 4 4 3"),
    7: ("0 3 1 4 2 2", "0 1 2 2 3 4", "0 1 2 2 4 3", "5 4 4 1 4"),
    8: ("0 3 3 2 2 1 3", "0 2 2 3 1 3 3", "0 1 2 3 3 3 2", "3 6 2 2 6 2"),
    9: ("0 4 4 1 5 2 5 3", "0 5 1 2 3 4 4 5", "0 1 2 5 4 5 3 4", "6 5 7 3 7 7 5"),
    12: ("0 4 4 1 5 2 5 2 4 3 3", "0 5 1 2 4 2 3 3 4 4 5", "0 1 2 5 2 3 4 5 3 4 4", "9 8 10 8 7 5 1 9 7 2"),
}

EIGHT = """
0⇄7:c0
0→3:c0 1⇄7:c1
0→6:c0 1→4:c1 2⇄7:c2 3→5:c0
0→2:c0 1→0:c1 2→5:c2 3⇄7:c3 4→6:c1 5→4:c0 6→1:c0
0→2:c1 1→3:c1 2→1:c2 3→6:c3 4⇄7:c4 5→0:c2 6→5:c1
0→6:c2 1→3:c2 2→4:c2 3→2:c3 4→0:c4 5⇄7:c5 6→1:c3
0→2:c4 1→0:c3 2→4:c3 3→5:c3 4→3:c4 5→1:c5 6⇄7:c6
1→3:c5 2→1:c4 3→5:c4 4→6:c4 5→4:c5 6→2:c6 7→0:c6
0→3:c6 2→4:c6 3→2:c5 4→6:c5 5→0:c5 6→5:c6 7→1:c6
"""
FIVE = """
0⇄4:c0
0→3:c0 1⇄4:c1
1→0:c1 2⇄4:c2
0→2:c0 2→1:c2 3⇄4:c3
"""


def rounds_after(schedule):
    return schedule.num_rounds - schedule.num_early_rounds


def lines_after(schedule):
    """The rounds after the arrival, as golden tables have them."""
    steps = steps_of(schedule)[schedule.num_early_rounds :]
    return [messages_text([t._asdict() for t in step], schedule.num_chunks).replace("  ", " ") for step in steps]


@pytest.mark.parametrize("n", GOLDEN)
def test_golden_patterns(n):
    land, birth, send, target = map(numbers, GOLDEN[n])
    found = pattern(n)
    assert (found.land, found.birth, found.send, found.target[1:]) == (land, birth, send, target)


def test_golden_schedules():
    assert lines_after(around_one(8, 7, 7)) == [line for line in EIGHT.splitlines() if line]
    # Tails of other numbers of ranks may differ, as long as they are no longer and verify.
    assert lines_after(around_one(5, 4, 4))[:4] == [line for line in FIVE.splitlines() if line]
    assert rounds_after(around_one(5, 4, 4)) == 6


@pytest.mark.parametrize("n", [*range(4, 130), 255, 257, 511, 513, 999, 1000, 1023, 1024])
def test_patterns_never_clash(n):
    """Every rank-time receives one chunk and sends one it holds; offsets never name the rank itself."""
    land, send, birth, target, source = pattern(n)
    m, oldest = n - 1, num_doublings(n) + (n & (n - 1) > 0)
    assert len({(s - age) % m for s, age in enumerate(land)}) == m
    assert all(birth[(s - land[s]) % m] == land[s] for s in range(m))
    assert all(birth[(s - send[s]) % m] < send[s] for s in range(1, m))
    assert land[0] == send[0] == birth[0] == 0
    assert max(land) <= oldest
    assert 0 not in target[1:]
    assert 0 not in source[1:]
    for s in range(1, m):
        assert land[(s - target[s]) % m] == send[s]  # who is sent to at this moment receives just that
        assert source[(s - target[s]) % m] == -target[s] % m


def test_a_pattern_needs_four_ranks():
    with pytest.raises(ScheduleError, match="at least 4 ranks, got 3"):
        pattern(3)


def test_all_numbers_of_ranks_up_to_256_meet_the_bound_and_verify():
    for n in range(4, 257):
        schedule = around_one.__wrapped__(n, (n * n) % n if n % 3 else n // 2, n - 1)
        assert rounds_after(schedule) == late_lower_bound(n, n - 1) == n - 2 + (n - 1).bit_length()
        verify(schedule)


@pytest.mark.parametrize("n", [257, 400, 511, 512, 513, 700, 999, 1007, 1019, 1024])
def test_more_ranks_meet_the_bound_for_any_number_of_chunks(n):
    for k in (n - 1, n + 5, 10**6):
        assert rounds_after(around_one(n, 5, k)) == late_lower_bound(n, k)


@pytest.mark.parametrize("n", [7, 12, 48, 96, 192])
def test_where_the_authors_schedules_miss_the_bound(n):
    theirs = {7: 10, 12: 15, 48: 55, 96: 106, 192: 209}
    assert rounds_after(around_one(n, n - 1, n - 1)) == {7: 8, 12: 14, 48: 52, 96: 101, 192: 198}[n] < theirs[n]


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 100])
def test_two_chunks_per_owner_and_numbers_that_do_not_divide(n):
    for k in {2 * (n - 1), n + 1, n - 2, 3 * n + 1, (n - 1).bit_length() + 1}:
        schedule = around_one(n, 0, k)
        assert rounds_after(schedule) == late_lower_bound(n, k)
        verify(schedule)


@pytest.mark.parametrize("n", range(4, 57))
def test_fewer_chunks_than_doublings_meet_the_bound_too(n):
    for k in range(1, (n - 1).bit_length() + 1):
        schedule = around_one(n, n // 2, k)
        assert rounds_after(schedule) == late_lower_bound(n, k)
        verify(schedule)


@pytest.mark.parametrize(("n", "k"), [(57, 6), (117, 5), (117, 7), (125, 7)])
def test_one_round_more_in_a_few_cases_with_hardly_any_chunks(n, k):
    schedule = around_one(n, n - 1, k)
    assert rounds_after(schedule) == late_lower_bound(n, k) + 1
    verify(schedule)


def test_two_and_three_ranks():
    for late in (0, 1):
        for k in (1, 2, 5):
            assert rounds_after(around_one(2, late, k)) == k
    for late in (0, 1, 2):
        assert [rounds_after(around_one(3, late, k)) for k in (1, 2, 3, 4, 9)] == [2, 3, 5, 6, 11]


@pytest.mark.parametrize("n", [6, 8, 11])
def test_any_rank_may_be_late(n):
    for late in range(n):
        schedule = around_one(n, late, 2 * (n - 1))
        assert schedule.late == (late,)
        verify(schedule)


@pytest.mark.parametrize("n", [9, 16, 21])
def test_one_tail_serves_every_number_of_chunks(n):
    found = pattern(n)
    m, few, many = n - 1, max(found.birth) + 1, 5 * n + 3
    turned = [
        [
            (a if a == m else (a + many - few) % m, b if b == m else (b + many - few) % m, c + many - few)
            for a, b, c in s
        ]
        for s in tail(found, few)
    ]
    assert [list(step) for step in tail(found, many)] == turned


def test_memory_does_not_grow_with_the_chunks():
    few, many = around_one(9, 8, 16), around_one(9, 8, 8 * 10**6)
    assert [len(step) for step in many.tail] == [len(step) for step in few.tail]
    program = many.program(3)
    assert sum(1 for _, step in zip(range(100), program, strict=False) if step.receive) > 80


MANY = [  # ranks, late, rounds with four chunks per owner that a list scheduler took, at least
    (8, 1, 31), (8, 2, 30), (8, 3, 31), (8, 4, 28), (16, 2, 64), (16, 4, 66), (16, 8, 60), (32, 2, 130),
    (32, 4, 132), (7, 2, 26), (12, 3, 48),
]  # fmt: skip


@pytest.mark.parametrize(("n", "k", "rounds"), MANY)
def test_several_late_ranks_take_no_more_rounds_than_specified(n, k, rounds):
    schedule = around_many(n, tuple(range(n - k, n)), 4 * (n - k))
    verify(schedule)
    assert rounds_after(schedule) <= rounds


def test_any_set_of_ranks_may_be_late():
    for late in ((0, 1), (2, 6), (5, 0), (3, 1, 4)):
        schedule = around_many(7, late, 9)
        assert schedule.late == tuple(sorted(late))
        verify(schedule)
