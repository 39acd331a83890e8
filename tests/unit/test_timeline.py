"""A recorded run as a trace by the clock."""

import pytest

from paceline.errors import TraceError
from paceline.sim.timeline import Timeline
from paceline.types import StepTiming


def steps(rank: int, origin_s: float, *own_s: float, wait_s: float = 0.5) -> list[StepTiming]:
    """A rank's steps, one after the other, on a clock that showed `origin_s` at the first."""
    timings, now_s = [], origin_s
    for step, seconds in enumerate(own_s, start=1):
        timings.append(StepTiming(rank, step, now_s, backward_s=seconds, wait_s=wait_s))
        now_s += seconds + wait_s
    return timings


def test_a_rank_is_slow_when_it_was_whatever_its_clock_shows():
    # Rank 1 is slow in its second step, from 1.5 s on; it does two steps where rank 0 does three.
    trace = Timeline.of({0: steps(0, 7.0, 1.0, 1.0, 1.0), 1: steps(1, 900.0, 1.0, 3.0, wait_s=0.5)}, "run")
    assert (trace.num_ranks, trace.reference_s, trace.length_s) == (2, 1.0, 5.0)
    assert [trace.slowdown(1, 0, now_s) for now_s in (0.0, 1.49, 1.5, 4.99)] == [1.0, 1.0, 3.0, 3.0]
    assert {trace.slowdown(0, step, now_s) for step in (0, 9) for now_s in (0.0, 4.0)} == {1.0}
    assert trace.slowdown(1, 0, 5.0 + 1.0) == 1.0, "from the start again"
    assert trace.slowdown(1, 0, 5.0 + 2.0) == 3.0
    assert trace.has_stragglers
    assert not Timeline.of({0: steps(0, 0.0, 1.0), 1: steps(1, 0.0, 1.05)}, "run").has_stragglers


@pytest.mark.parametrize(
    ("timings", "wanted"),
    [
        ({}, "at least one step"),
        ({0: steps(0, 0.0, 1.0), 1: []}, r"got none of \[1\]"),
        ({0: steps(0, 0.0, 1.0, 0.0)}, "run, rank 0, step 2: wanted an own time > 0 s, got 0.0"),
    ],
)
def test_what_cannot_be_a_trace_is_refused(timings, wanted):
    with pytest.raises(TraceError, match=wanted):
        Timeline.of(timings, "run")
