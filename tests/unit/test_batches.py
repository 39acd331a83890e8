"""Uneven batches: the true minimum, by brute force."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.batches import balanced_batches, lasting_means, slowest_s


def all_splits(total: int, low: list[int], high: list[int]):
    """Every tuple of whole numbers of this sum within the bounds."""
    for head in itertools.product(*(range(lo, hi + 1) for lo, hi in zip(low[:-1], high[:-1], strict=True))):
        rest = total - sum(head)
        if low[-1] <= rest <= high[-1]:
            yield (*head, rest)


@given(
    ranks=st.lists(
        st.tuples(st.integers(1, 40) | st.floats(0.01, 100.0), st.integers(0, 3), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    ),
    at=st.floats(0, 1),
)
def test_no_other_split_ends_sooner(ranks, at):
    speeds, low, room = (list(column) for column in zip(*ranks, strict=True))
    high = [lo + more for lo, more in zip(low, room, strict=True)]
    total = sum(low) + round(at * sum(room))
    batches = balanced_batches(speeds, total, low, high)
    assert sum(batches) == total
    assert all(lo <= b <= hi for lo, b, hi in zip(low, batches, high, strict=True))
    best = min(slowest_s(split, speeds) for split in all_splits(total, low, high))
    assert slowest_s(batches, speeds) == best


@given(speeds=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), per_rank=st.integers(1, 40))
def test_only_ratios_matter_and_faster_ranks_get_no_less(speeds, per_rank):
    batches = balanced_batches(speeds, per_rank * len(speeds))
    assert balanced_batches([4.0 * speed for speed in speeds], per_rank * len(speeds)) == batches
    for i, j in itertools.combinations(range(len(speeds)), 2):
        if speeds[i] > speeds[j]:
            assert batches[i] >= batches[j]


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_equal_speeds_share_evenly_and_the_rest_goes_to_the_lower_ranks(num_ranks):
    assert balanced_batches([7.0] * num_ranks, 5 * num_ranks) == (5,) * num_ranks
    assert balanced_batches([7.0, 7.0, 7.0], 11) == (4, 4, 3)


def test_the_share_of_a_slow_rank_is_proportional():
    assert balanced_batches([100.0] * 7 + [50.0], 150) == (20,) * 7 + (10,)


def test_one_bound_for_all_is_a_bound_for_each():
    speeds = [100.0, 1.0, 50.0]
    assert balanced_batches(speeds, 30, 4, 20) == balanced_batches(speeds, 30, [4, 4, 4], [20, 20, 20]) == (18, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4), "positive and finite"),
        (([1.0, 0.0], 4), "positive and finite"),
        (([1.0, math.inf], 4), "positive and finite"),
        (([1.0, math.nan], 4), "positive and finite"),
        (([1.0, 1.0], 4, [1]), "bounds for 2 ranks"),
        (([1.0, 1.0], 4, 1, [4]), "bounds for 2 ranks"),
        (([1.0, 1.0], 4, -1), "0 <= least <= most"),
        (([1.0, 1.0], 4, 3, 2), "0 <= least <= most"),
        (([1.0, 1.0], 1), "allow 2 to 2"),
        (([1.0, 1.0], 9, 1, 4), "allow 2 to 8"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        balanced_batches(*arguments)


# Means that last


@given(st.dictionaries(st.integers(0, 8), st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9), min_size=1))
def test_lasting_means_lie_between_their_middle_and_the_raw_means(samples):
    raw = {rank: fmean(values) for rank, values in samples.items()}
    middle, lasting = fmean(raw.values()), lasting_means(samples)
    assert list(lasting) == list(samples)
    assert fmean(lasting.values()) == pytest.approx(middle)
    for rank, mean in raw.items():
        assert min(middle, mean) - 1e-9 <= lasting[rank] <= max(middle, mean) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_lasting_means_foretell_the_next_steps_better_where_ranks_are_alike_and_as_well_where_not(seed):
    rng = random.Random(seed)

    def error(speeds: list[float], noise: float) -> tuple[float, float]:
        samples = {rank: [v * rng.uniform(1 - noise, 1 + noise) for _ in range(16)] for rank, v in enumerate(speeds)}
        raw, lasting = {rank: fmean(v) for rank, v in samples.items()}, lasting_means(samples)
        return tuple(sum((means[r] - s) ** 2 for r, s in enumerate(speeds)) for means in (raw, lasting))

    raw, lasting = error([1.0] * 8, noise=0.9)
    assert lasting < raw
    raw, lasting = error([1.0] * 7 + [10.0], noise=0.2)
    assert lasting < 1.1 * raw
