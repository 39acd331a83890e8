"""Sets of ranks beside frozensets, numbers by rank beside dicts."""

import copy
import operator
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.rankset import NOBODY, ZEROS, RankNumbers, RankSet

RANKS = st.integers(0, 200)
SETS = st.frozensets(RANKS, max_size=80)


@given(a=SETS, b=SETS, rank=RANKS)
def test_a_set_of_ranks_is_a_frozenset(a, b, rank):
    x, y = RankSet.of(a), RankSet.of(b)
    for combine in (operator.or_, operator.and_, operator.sub):
        assert frozenset(combine(x, y)) == combine(a, b)
    assert (x <= y) == (a <= b)
    assert RankSet.of(a & b) <= x
    assert (x == y) == (a == b)
    assert (rank in x) == (rank in a)
    assert set(x.plus(rank)) == a | {rank}
    assert set(x.minus(rank)) == a - {rank}
    assert (len(x), bool(x)) == (len(a), bool(a))


@given(a=SETS)
def test_it_iterates_in_order_hashes_pickles_and_copies(a):
    x = RankSet.of(a)
    assert list(x) == sorted(a)
    assert hash(x) == hash(RankSet.of(sorted(a)))
    assert pickle.loads(pickle.dumps(x)) == copy.deepcopy(x) == x
    assert eval(repr(x), {"RankSet": RankSet.of}) == x if a else repr(x) == "RankSet({})"


def test_it_holds_thousands_of_ranks():
    everybody = RankSet.of(range(4096))
    assert list(everybody.minus(7)) == [r for r in range(4096) if r != 7]
    assert everybody - everybody == NOBODY


def test_a_rank_is_not_negative():
    with pytest.raises(ValueError, match="negative shift"):
        RankSet.of([-1])


@given(puts=st.lists(st.tuples(SETS, st.integers(0, 99)), max_size=8))
def test_numbers_by_rank_are_a_dict_with_zeros(puts):
    numbers, expected = ZEROS, {}
    for ranks, number in puts:
        before, kept = numbers, [numbers[rank] for rank in range(201)]
        numbers = numbers.put(ranks, number)
        one_by_one = before
        for rank in ranks:
            one_by_one = one_by_one.put_one(rank, number)
        assert one_by_one == numbers
        expected |= dict.fromkeys(ranks, number)
        assert [before[rank] for rank in range(201)] == kept  # what was is as it was
    assert [numbers[rank] for rank in range(201)] == [expected.get(rank, 0) for rank in range(201)]
    assert pickle.loads(pickle.dumps(numbers)) == numbers


def test_changing_one_number_leaves_the_other_blocks_alone():
    numbers = RankNumbers().put(range(4096), 1)
    changed = numbers.put((70,), 2)
    assert [a is b for a, b in zip(numbers.blocks, changed.blocks, strict=True)].count(False) == 1
