"""Readers of traces: good lines become a table; a bad line is named, with what was wanted and what was got."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import TraceError
from paceline.record import encode, parse
from paceline.sim.parse import from_csv, from_pai, from_timings
from paceline.sim.trace import from_samples
from paceline.types import StepTiming

HEADER = "step,rank,seconds"
PAI_HEADER = ",worker,gpu,time,batch_time_norm"


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.floats(1e-6, 1e6)), min_size=1))
def test_what_is_written_is_read(samples):
    lines = [HEADER, *(f"{step},{rank},{time!r}" for step, rank, time in samples)]
    assert from_csv(lines, "x") == from_samples("x", samples)


def test_columns_may_come_in_any_order_with_others_between():
    lines = ['"rank","note","seconds","step"', '1,"a, b",0.2,5', "0,,0.1,5"]
    assert from_csv(lines, "x").ratios == ((1.0,), (2.0,))


def test_line_ends_blanks_and_empty_lines_do_not_matter():
    lines = [f"{HEADER}\r\n", "1, 0, 0.1\r\n", "\r\n", "1,1,2e-1 \r\n", "\n"]
    assert from_csv(lines, "x").ratios == ((1.0,), (2.0,))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,0", "wanted 3 cells, got 2: '1,0'"),
        ("1,0,0.1,7", "wanted 3 cells, got 4: '1,0,0.1,7'"),
        ("one,0,0.1", "wanted a whole number >= 0 for 'step', got 'one'"),
        ("-1,0,0.1", "wanted a whole number >= 0 for 'step', got '-1'"),
        ("1.5,0,0.1", "wanted a whole number >= 0 for 'step', got '1.5'"),
        ("²,0,0.1", "wanted a whole number >= 0 for 'step', got '²'"),
        (f"{10**30},0,0.1", f"wanted a whole number >= 0 for 'step', got '{10**30}'"),
        ("1,,0.1", "wanted a whole number >= 0 for 'rank', got ''"),
        ("1,-2,0.1", "wanted a whole number >= 0 for 'rank', got '-2'"),
        ("1,0,", "wanted a number > 0 for 'seconds', got ''"),
        ("1,0,fast", "wanted a number > 0 for 'seconds', got 'fast'"),
        ("1,0,0", "wanted a number > 0 for 'seconds', got '0'"),
        ("1,0,-0.1", "wanted a number > 0 for 'seconds', got '-0.1'"),
        ("1,0,nan", "wanted a number > 0 for 'seconds', got 'nan'"),
        ("1,0,inf", "wanted a number > 0 for 'seconds', got 'inf'"),
        ("1,0," + "9" * 200_000, "wanted cells separated by commas, got: field larger than field limit (131072)"),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(TraceError) as caught:
        from_csv([HEADER, "1,0,0.1", "", line, "2,0,0.1"], "dir/my.csv")
    assert str(caught.value) == f"dir/my.csv, line 4: {message}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: wanted columns step, rank, seconds, got ''"),
        (["1,0,0.1"], "line 1: wanted columns step, rank, seconds, got '1,0,0.1'"),
        (["step,rank,ms", "1,0,5"], "line 1: wanted columns step, rank, seconds, got 'step,rank,ms'"),
    ],
)
def test_a_bad_header_is_named(lines, message):
    with pytest.raises(TraceError) as caught:
        from_csv(lines, "my.csv")
    assert str(caught.value) == f"my.csv, {message}"


def test_a_header_alone_is_no_trace():
    with pytest.raises(TraceError, match=r"^my\.csv: no samples; wanted at least one$"):
        from_csv([HEADER], "my.csv")


def test_pai_lines_are_read_by_their_columns():
    lines = [PAI_HEADER, "0,0,25,1,400", "1,1,25,1,800", "2,1,25,11,600", "3,1,25,11,1000", "4,0,25,21,400"]
    table = from_pai(lines, "job")
    assert table.ratios == ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert table.carried == {(0, 1), (1, 2)}
    assert table.reference_s is None
    assert table.num_steps == 30


def test_a_pai_time_of_zero_is_no_time():
    with pytest.raises(TraceError, match=r"^job, line 2: wanted a number > 0 for 'batch_time_norm', got '0'$"):
        from_pai([PAI_HEADER, "0,0,25,1,0"], "job")


def test_a_run_log_becomes_a_trace():
    timings = [
        StepTiming(rank, step, 0.0, data_s=0.01, backward_s=0.04 * (1 + rank), wait_s=5.0, expected_s=7.0)
        for step in range(1, 4)
        for rank in range(2)
    ]
    log = [json.dumps(encode(timing)) for timing in timings]
    table = from_timings((line.value for line in parse(log) if line.kind == "step"), "run")
    assert table.num_steps == 3
    assert table.reference_s == pytest.approx(0.05)
    assert table.ratios[1] == pytest.approx((1.8, 1.8, 1.8))
    assert not table.carried


def test_an_attached_rank_carries_its_last_time_on():
    ring = [StepTiming(0, step, 0.0, data_s=0.1) for step in range(1, 7)]
    attached = [StepTiming(1, step, 0.0, data_s=seconds) for step, seconds in ((3, 0.3), (6, 0.4))]
    table = from_timings(ring + attached, "run")
    assert table.ratios[1] == pytest.approx((3.0, 3.0, 3.0, 3.0, 3.0, 4.0))
    assert table.carried == {(1, 0), (1, 1), (1, 3), (1, 4)}


@pytest.mark.parametrize("own_s", [0.0, -1.0, math.nan, math.inf])
def test_a_step_without_own_time_is_refused(own_s):
    with pytest.raises(TraceError, match=rf"^run, rank 2, step 5: wanted an own time > 0 s, got {own_s}$"):
        from_timings([StepTiming(2, 5, 0.0, data_s=own_s)], "run")
