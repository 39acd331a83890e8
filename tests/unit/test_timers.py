"""The step clock, on a made-up clock whose times add up without rounding."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.resources import ThreadUsage, thread_usage
from paceline.measure.timers import GcTimer, StepClock
from paceline.types import OWN_PHASES, Phase

TICK = 1 / 1024  # seconds; sums of ticks are exact


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def made(usage=lambda: None) -> tuple[StepClock, Clock]:
    """A step clock and the clock it reads."""
    time = Clock()
    return StepClock(rank=3, now=time, usage=usage), time


PHASES = st.sampled_from([*sorted(set(OWN_PHASES) - {Phase.GC}), Phase.WAIT])
MOVES = st.lists(
    st.tuples(
        st.integers(0, 3000),  # ticks that pass before the move
        st.one_of(
            st.tuples(st.just("enter"), PHASES),
            st.tuples(st.just("gc"), st.integers(0, 4000)),
            st.tuples(st.sampled_from(["begin", "end", "close", "discard"]), st.none()),
        ),
    ),
    max_size=40,
)


@given(MOVES)
def test_phases_add_up_to_the_wall_whatever_happens(moves):
    clock, time = made()
    depth, begun, in_expected, in_wait, gc_s, num_steps = 0, 0.0, 0.0, 0.0, 0.0, 0
    phase = Phase.OTHER  # kept beside the clock, as the definition says it
    for ticks, (move, argument) in [*moves, (1, ("close", None))]:
        time.wait(ticks * TICK)
        in_expected += ticks * TICK if depth else 0.0
        in_wait += ticks * TICK if not depth and phase is Phase.WAIT else 0.0
        match move:
            case "enter":
                clock.enter(argument)
                phase = phase if depth else argument
            case "gc":
                clock.gc_pause(argument * TICK)
                gc_s += argument * TICK
            case "begin":
                clock.begin_expected()
                depth += 1
            case "end" if depth:
                clock.end_expected()
                depth -= 1
            case "discard":
                clock.discard_step()
                begun, in_expected, in_wait, gc_s = time.now_s, 0.0, 0.0, 0.0
            case "close":
                num_steps += 1
                timing = clock.close_step(step=num_steps, samples=8)
                assert timing.wall_s == time.now_s - begun
                assert sum(timing.of(p) for p in Phase) == timing.wall_s
                assert min(timing.of(p) for p in Phase) >= 0.0
                assert (timing.rank, timing.step, timing.samples) == (3, num_steps, 8)
                assert timing.started_s == begun
                assert timing.expected_s == in_expected
                assert timing.wait_s == in_wait
                assert timing.gc_s <= gc_s
                begun, in_expected, in_wait, gc_s = time.now_s, 0.0, 0.0, 0.0


def test_each_phase_gets_its_own_time():
    clock, time = made()
    for ticks, phase in enumerate((Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.WAIT, Phase.OPTIMIZER), start=1):
        clock.enter(phase)
        time.wait(ticks)
    timing = clock.close_step(1, 32)
    assert (timing.data_s, timing.forward_s, timing.backward_s, timing.wait_s, timing.optimizer_s) == (1, 2, 3, 4, 5)
    assert timing.own_s == 11
    assert clock.phase is Phase.OPTIMIZER  # a step border is no change of phase


def test_a_collection_is_charged_to_gc_instead_of_the_phase_it_interrupted():
    clock, time = made()
    clock.enter(Phase.FORWARD)
    time.wait(5.0)
    clock.gc_pause(2.0)
    clock.enter(Phase.BACKWARD)
    time.wait(1.0)
    timing = clock.close_step(1, 0)
    assert (timing.forward_s, timing.gc_s, timing.backward_s) == (3.0, 2.0, 1.0)


@pytest.mark.parametrize("expected", [False, True])
def test_a_collection_that_delays_nobody_is_not_charged(expected):
    clock, time = made()
    if expected:
        clock.begin_expected()
    else:
        clock.enter(Phase.WAIT)
    time.wait(5.0)
    clock.gc_pause(2.0)
    if expected:
        clock.end_expected()
    timing = clock.close_step(1, 0)
    assert (timing.gc_s, timing.wait_s + timing.expected_s) == (0.0, 5.0)


def test_no_more_is_charged_to_gc_than_has_passed():
    clock, time = made()
    time.wait(1.0)
    clock.gc_pause(9.0)
    clock.enter(Phase.DATA)
    time.wait(3.0)
    timing = clock.close_step(1, 0)
    assert (timing.gc_s, timing.data_s) == (1.0, 3.0)


def test_expected_stretches_nest_and_swallow_phase_changes():
    clock, time = made()
    clock.enter(Phase.OPTIMIZER)
    time.wait(1.0)
    clock.begin_expected()
    time.wait(2.0)
    clock.begin_expected()
    clock.enter(Phase.FORWARD)  # an evaluation inside the stretch runs the model's hooks
    time.wait(4.0)
    clock.end_expected()
    time.wait(8.0)
    clock.end_expected()
    time.wait(16.0)
    timing = clock.close_step(1, 0)
    assert (timing.expected_s, timing.optimizer_s, timing.forward_s) == (14.0, 17.0, 0.0)


def test_a_stretch_goes_on_over_a_step_border():
    clock, time = made()
    clock.enter(Phase.DATA)
    clock.begin_expected()
    time.wait(1.0)
    assert clock.close_step(1, 0).expected_s == 1.0
    time.wait(2.0)
    clock.end_expected()
    time.wait(4.0)
    timing = clock.close_step(2, 0)
    assert (timing.expected_s, timing.data_s) == (2.0, 4.0)


def test_idle_is_the_time_since_the_last_change():
    clock, time = made()
    time.wait(2.0)
    clock.enter(Phase.DATA)
    time.wait(3.0)
    assert clock.idle_s() == 3.0


def test_what_was_before_the_first_step_can_be_left_out():
    clock, time = made()
    time.wait(100.0)
    clock.discard_step()
    time.wait(1.0)
    timing = clock.close_step(1, 0)
    assert (timing.wall_s, timing.started_s) == (1.0, 100.0)


def test_cpu_use_is_that_of_the_step():
    accounts = iter([ThreadUsage(1.0, 0.5), ThreadUsage(3.0, 0.75), ThreadUsage(3.5, 2.75)])
    clock, _ = made(usage=lambda: next(accounts))
    first, second = clock.close_step(1, 0), clock.close_step(2, 0)
    assert (first.cpu_s, first.runqueue_s) == (2.0, 0.25)
    assert (second.cpu_s, second.runqueue_s) == (0.5, 2.0)


def test_cpu_use_is_unknown_where_the_kernel_keeps_no_account():
    clock, _ = made(usage=lambda: None)
    timing = clock.close_step(1, 0)
    assert (timing.cpu_s, timing.runqueue_s) == (None, None)


def test_the_kernels_account_grows():
    before = thread_usage()
    sum(range(10_000))
    after = thread_usage()
    if before is None or after is None:
        pytest.skip("this kernel keeps no account per thread")
    assert after.cpu_s > before.cpu_s
    assert after.runqueue_s >= before.runqueue_s


def test_gc_timer_reports_a_collection_and_stops_when_closed():
    times = iter(range(1000))
    pauses: list[float] = []
    timer = GcTimer(pauses.append, now=lambda: next(times))
    was_enabled = gc.isenabled()
    gc.disable()  # only our own collections
    try:
        gc.collect()
        assert pauses == [1]
        timer.close()
        timer.close()
        gc.collect()
        assert pauses == [1]
    finally:
        timer.close()
        if was_enabled:
            gc.enable()
