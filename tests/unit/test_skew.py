"""Who is late, and what to do about it: from waits alone, the same on every rank."""

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.skew import Network, Reduction, SkewChooser, SkewState
from paceline.predict.gaps import GapWindow, gap_s

MB = 10**6
NETWORK = Network(num_ranks=8, nbytes=64 * MB, alpha_s=2e-4, beta_s_per_byte=2.1e-8)  # ports of 400 Mbit/s
EARLY_S = 6 / 7 * NETWORK.nbytes * NETWORK.beta_s_per_byte
WAITS = st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9)


def waits(late: int | None, gap: float, n: int = 8, transfer: float = 2.0) -> list[float]:
    """What everybody waits if one rank comes so much later."""
    return [transfer + (0.0 if late is None or rank == late else gap) for rank in range(n)]


def run(chooser: SkewChooser, exchanges: list[list[float]], state: SkewState | None = None) -> SkewState:
    state = state or chooser.init()
    for seen in exchanges:
        state, _ = chooser.step(state, seen)
    return state


# Gaps


@given(arrivals=WAITS)
def test_gaps_are_differences_of_arrivals(arrivals):
    end = max(arrivals) + 1.0
    seen = [end - at for at in arrivals]
    for rank, at in enumerate(arrivals):
        others = [other for i, other in enumerate(arrivals) if i != rank]
        assert gap_s(seen, rank) == pytest.approx(at - max(others))
    assert sum(gap_s(seen, rank) > 1e-9 for rank in range(len(arrivals))) <= 1  # one rank at most is the last


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 1.0)), min_size=1, max_size=40))
def test_a_window_names_the_rank_that_was_waited_for_most(events):
    window = GapWindow(size=16)
    for late, gap in events:
        window = window.observe(waits(late, gap, n=4))
    total = [0.0] * 4
    for late, gap in events[-16:]:
        total[late] += gap
    assert total[window.last()] == pytest.approx(max(total))
    assert len(window.waits_s) <= 16


# The network


@given(n=st.integers(2, 64), alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-6), nbytes=st.integers(10**6, 10**9))
def test_a_fit_finds_the_alpha_and_beta_of_a_ring(n, alpha, beta, nbytes):
    def ring_s(size: int) -> float:
        return 2 * (n - 1) * (alpha + size * beta / n)

    found = Network.fit(n, nbytes, (4, ring_s(4)), (4 * MB, ring_s(4 * MB)))
    assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-3)
    assert found.alpha_s == pytest.approx(alpha, rel=1e-3, abs=1e-6)
    assert found.ring_s == pytest.approx(ring_s(nbytes), rel=1e-2)


def test_a_fit_to_times_that_make_no_sense_is_still_positive():
    found = Network.fit(4, MB, (4, 0.1), (4 * MB, 0.05))
    assert found.alpha_s > 0
    assert found.beta_s_per_byte > 0


# Gains


@given(ratio=st.floats(0.05, 0.9))
def test_a_right_split_gains_nearly_gap_times_n_minus_1_over_n_and_a_wrong_one_loses_nearly_gap_over_n(ratio):
    fine = SkewChooser(replace(NETWORK, alpha_s=1e-9))
    gap = ratio * EARLY_S
    split = fine.reduction(3, gap)
    assert fine.gain_s(split, gap) == pytest.approx(gap * 7 / 8, rel=0.01)
    for wrong in (0.0, -gap):
        assert fine.gain_s(split, wrong) == pytest.approx(-gap / 8, rel=0.05)


# Choosing


def test_nothing_is_chosen_while_nobody_is_late_or_little_was_seen():
    chooser = SkewChooser(NETWORK)
    assert run(chooser, [waits(None, 0.0)] * 50).chosen.is_native
    assert run(chooser, [waits(2, 0.5)] * 3).chosen.is_native
    assert run(chooser, [waits(2, 0.5)] * 4).chosen.late == 2


def test_only_as_much_goes_around_the_late_rank_as_fills_its_gap():
    chooser = SkewChooser(NETWORK)
    half, all_of_it = (run(chooser, [waits(2, share * EARLY_S)] * 6).chosen for share in (0.5, 1.3))
    assert half.late_bytes == pytest.approx(NETWORK.nbytes / 2, rel=0.01)
    assert all_of_it.late_bytes == NETWORK.nbytes
    assert half.num_chunks % 7 == all_of_it.num_chunks % 7 == 0
    assert half.num_chunks < all_of_it.num_chunks


@pytest.mark.parametrize("then", [waits(5, 0.5), waits(None, 0.0)], ids=["another rank", "nobody"])
def test_a_wrong_choice_is_given_up_within_ten_exchanges(then):
    chooser = SkewChooser(NETWORK)
    state = run(chooser, [waits(2, 0.5)] * 30)
    assert state.chosen.late == 2
    changed, number = None, 0
    while changed is None and number < 10:
        state, changed = chooser.step(state, then)
        number += 1
    assert changed is not None
    assert changed.is_native
    assert "rank 2 was not late as expected" in changed.reason
    assert state.window.waits_s == ()  # else the old gaps would bring the old choice back


def test_a_new_late_rank_is_found_after_the_old_one():
    chooser = SkewChooser(NETWORK)
    state = run(chooser, [waits(2, 0.5)] * 30 + [waits(5, 0.5)] * 12)
    assert state.chosen.late == 5


@given(seed=st.integers(0, 1000), right=st.floats(0.0, 1.0))
def test_what_is_chosen_would_have_gained_on_what_was_seen(seed, right):
    rng, chooser = random.Random(seed), SkewChooser(NETWORK)
    exchanges = [waits(2 if rng.random() < right else rng.randrange(8), rng.uniform(0.0, 1.0)) for _ in range(16)]
    state = chooser.init()
    for number, seen in enumerate(exchanges):
        state, changed = chooser.step(state, seen)
        if changed is not None and not changed.is_native:
            made = fmean(chooser.gain_s(changed, gap_s(e, changed.late)) for e in state.window.waits_s)
            assert made >= chooser.min_gain_ratio * NETWORK.ring_s
            assert changed.gain_s == pytest.approx(made)
            assert str(changed.late) in changed.reason
            assert number >= 3


def test_a_steady_choice_is_kept_though_gaps_vary():
    rng, chooser = random.Random(0), SkewChooser(NETWORK)
    state, changes = chooser.init(), 0
    for _ in range(300):
        state, changed = chooser.step(state, waits(6, rng.uniform(0.45, 0.75)))
        changes += changed is not None
    assert state.chosen.late == 6
    assert changes <= 4


def test_two_ranks_with_the_same_numbers_choose_the_same():
    exchanges = [waits(1, 0.3), waits(1, 0.5), waits(4, 0.1)] * 5
    assert run(SkewChooser(NETWORK), exchanges) == run(SkewChooser(NETWORK), exchanges)


# Late is not slow


def test_a_slow_link_is_told_from_a_late_rank():
    chooser = SkewChooser(NETWORK)
    slow = run(chooser, [waits(None, 0.0, transfer=3 * NETWORK.ring_s)] * 8)
    assert slow.chosen.is_native
    assert chooser.slow_link(slow) == pytest.approx(3.0)
    late = [waits(3, 2 * NETWORK.ring_s, transfer=NETWORK.ring_s)] * 3
    assert chooser.slow_link(run(chooser, late)) is None
    assert chooser.slow_link(run(chooser, [waits(None, 0.0, transfer=NETWORK.ring_s)] * 8)) is None
    assert chooser.slow_link(chooser.init()) is None


def test_a_reduction_says_whether_it_is_the_backends_own():
    assert Reduction().is_native
    assert not Reduction(late=0, late_bytes=1, num_chunks=7).is_native
    assert math.isclose(SkewChooser(NETWORK).gain_s(Reduction(), 1.0), 0.0)


def test_the_gap_counted_on_is_the_one_that_gains_most_not_the_smallest_seen():
    chooser = SkewChooser(NETWORK, min_calls=16)
    state = run(chooser, [waits(2, 0.02)] * 4 + [waits(2, 0.6)] * 12)
    assert state.chosen.gap_s == pytest.approx(0.6)


def test_what_is_split_off_costs_a_rings_messages_once_more():
    chooser = SkewChooser(NETWORK)
    split = Reduction(late=2, late_bytes=NETWORK.nbytes - 1, num_chunks=70)
    whole = replace(split, late_bytes=NETWORK.nbytes)
    extra_s = chooser.gain_s(whole, 0.5) - chooser.gain_s(split, 0.5)
    assert extra_s == pytest.approx(2 * 7 * NETWORK.alpha_s, rel=1e-3)
