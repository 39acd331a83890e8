"""Operation traces: read from Parquet, replayed as a graph, and blamed on whom they should be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paceline.errors import ConfigError, TraceError
from paceline.sim.operations import COLUMNS, Operations, from_operations, read_operations
from paceline.sim.whatif import what_if

Row = dict[str, Any]
GATHER_S, SYNC_S, CLIP_S, OPTIMIZER_S = 0.4, 0.3, 0.2, 0.1


def parquet_of(rows: Iterable[Row]) -> bytes:
    """The rows as such a trace is published: kinds as categories, times as 32-bit floats, more columns than needed."""
    rows = [{**row, "gmc": 0} for row in rows]
    table = pyarrow.table({name: [row[name] for row in rows] for name in (*COLUMNS, "gmc")})
    kinds = table["optype"].combine_chunks().dictionary_encode()
    table = table.set_column(table.column_names.index("optype"), "optype", kinds)
    for name in ("start_ts", "duration"):
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pyarrow.float32()))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def row(worker: tuple[int, int], kind: str, number: int, start: float, end: float, step: int = 7) -> Row:
    stage, replica = worker
    place = {"dp_rank": replica, "stage": stage, "rank": 10 * stage + replica, "step": step}
    return {**place, "optype": kind, "start_ts": start, "duration": end - start, "seq_id": number, "mc": -1}


def replicas(forward_s: Callable[[int, int], float], num_replicas: int = 4, num_batches: int = 4) -> list[Row]:
    """A job of one stage: forward and backward (twice as long) per micro-batch, between exchanges of all."""
    rows, done = [], []
    for replica in range(num_replicas):
        rows.append(row((0, replica), "params-all-gather", 0, 0.0, GATHER_S))
        now = GATHER_S
        for number in range(num_batches):
            for kind, factor in (("forward-compute", 1.0), ("backward-compute", 2.0)):
                seconds = factor * forward_s(replica, number)
                rows.append(row((0, replica), kind, number, now, now + seconds))
                now += seconds
        done.append(now)
    for replica in range(num_replicas):
        synced = max(done) + SYNC_S
        rows.append(row((0, replica), "grads-reduce-scatter", 0, done[replica], synced))
        rows.append(row((0, replica), "optimizer-clip-main-grad", 0, synced, synced + CLIP_S))
        rows.append(row((0, replica), "optimizer", 0, synced + CLIP_S, synced + CLIP_S + OPTIMIZER_S))
    return rows


def pipeline(compute_s: tuple[float, ...], send_s: float = 0.5, launch_s: float = 0.0) -> list[Row]:
    """One micro-batch through all stages and back (twice as slowly); then the first and the last meet.

    Who receives waits from the start.
    """
    rows, now = [], launch_s
    last, last_done = len(compute_s) - 1, 0.0
    for stage, seconds in enumerate(compute_s):
        rows.append(row((stage, 0), "forward-compute", 0, now, now + seconds))
        now += seconds
        if stage < last:
            rows.append(row((stage, 0), "forward-send", 0, now, now + send_s))
            rows.append(row((stage + 1, 0), "forward-recv", 0, 0.0, now + send_s))
            now += send_s
    for stage, seconds in reversed(list(enumerate(compute_s))):
        rows.append(row((stage, 0), "backward-compute", 0, now, now + 2 * seconds))
        now += 2 * seconds
        last_done = now if stage == last else last_done
        if stage > 0:
            rows.append(row((stage, 0), "backward-send", 0, now, now + send_s))
            rows.append(row((stage - 1, 0), "backward-recv", 0, 0.0, now + send_s))
            now += send_s
    rows.append(row((0, 0), "embedding-grads-all-reduce", 0, now, now + SYNC_S))
    rows.append(row((last, 0), "embedding-grads-all-reduce", 0, last_done, now + SYNC_S))
    return rows


def filled_pipeline(last_s: float, num_batches: int = 8) -> list[Row]:
    """Two stages and two replicas, forward only until the end: the first stage runs ahead of the second."""
    rows = []
    for replica in range(2):
        first, second = (0, replica), (1, replica)
        free = 0.0
        for number in range(num_batches):
            sent = 1.0 * (number + 1)
            rows.append(row(first, "forward-compute", number, sent - 1.0, sent))
            rows.append(row(first, "forward-send", number, sent, sent))
            rows.append(row(second, "forward-recv", number, sent - 1.0, sent))
            start = max(free, sent)
            free = start + last_s
            rows.append(row(second, "forward-compute", number, start, free))
        for worker in (first, second):
            end = 1.0 * num_batches if worker == first else free
            rows.append(row(worker, "backward-compute", 0, end, end + 1.0))
    return rows


def read(rows: Iterable[Row]) -> Operations:
    return read_operations(parquet_of(rows), "job")


# Reading


def test_columns_become_arrays_by_operation_and_step():
    rows = replicas(lambda replica, _: 1.0 + replica, num_replicas=2, num_batches=1)
    operations = read([*rows, *({**r, "step": 9, "duration": r["duration"] + 1.0} for r in rows)])
    assert operations.source_ranks == (0, 1)
    assert operations.stages.tolist() == [0, 0]
    assert operations.dp_ranks.tolist() == [0, 1]
    at = next(i for i, kind in enumerate(operations.kinds) if kind == "backward-compute" and operations.workers[i] == 1)
    assert operations.start_s[at].tolist() == pytest.approx([2.0 + GATHER_S] * 2)
    assert operations.duration_s[at].tolist() == pytest.approx([4.0, 5.0])


def test_as_a_trace_it_is_what_every_worker_computes():
    table = from_operations(read(replicas(lambda replica, _: 2.0 if replica == 3 else 1.0)))
    assert table.ratios == ((1.0,), (1.0,), (1.0,), (2.0,))
    assert table.reference_s == pytest.approx(12.0)
    assert table.source_ranks == (0, 1, 2, 3)


def test_a_worker_that_computes_nothing_is_named():
    rows = [r for r in replicas(lambda *_: 1.0) if r["rank"] != 2 or not r["optype"].endswith("compute")]
    with pytest.raises(TraceError, match=r"^job, rank 2: wanted compute operations"):
        from_operations(read(rows))


def with_cell(index: int, name: str, value: Any) -> list[Row]:
    rows = replicas(lambda *_: 1.0, num_replicas=2, num_batches=1)
    rows[index] = {**rows[index], name: value}
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (with_cell(2, "duration", -1.0), "row 3: wanted a duration >= 0 s, got -1.0"),
        (with_cell(4, "start_ts", float("inf")), "row 5: wanted a start_ts >= 0 s, got inf"),
        (with_cell(1, "stage", None), "row 2: wanted a value for 'stage', got none"),
        (with_cell(0, "mc", 1), r"row 1: wanted one model chunk per stage \(mc 0 or -1\), got more"),
        (with_cell(0, "step", 8), "step 8: wanted the same operations in every step, each once, got 0"),
        ([*with_cell(2, "mc", 0), *with_cell(2, "mc", 0)], "step 7: wanted the same .*, each once, got 2"),
        (with_cell(3, "rank", 0), r"row 1: wanted one stage and one dp_rank for rank 0, got another in row 4"),
        (with_cell(5, "stage", 1), r"row 4: wanted one stage and one dp_rank for rank 1, got another in row 6"),
    ],
)
def test_a_bad_row_is_named(rows, message):
    with pytest.raises(TraceError, match=f"^job, {message}"):
        read(rows)


def test_what_is_no_such_file_is_refused():
    with pytest.raises(TraceError, match=r"^job: wanted a Parquet file, got: "):
        read_operations(b"step,rank,seconds", "job")
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"rank": [0]}), sink)
    with pytest.raises(TraceError, match=r"^job: wanted columns dp_rank, stage, .*, got rank$"):
        read_operations(sink.getvalue().to_pybytes(), "job")
    whole = parquet_of(replicas(lambda *_: 1.0))
    with pytest.raises(TraceError, match=r"^job: wanted a Parquet file, got: "):
        read_operations(whole[: len(whole) // 2], "job")


def test_nothing_is_no_trace():
    empty = pyarrow.table(
        {name: pyarrow.array([], pyarrow.string() if name == "optype" else pyarrow.float32()) for name in COLUMNS}
    )
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(empty, sink)
    with pytest.raises(TraceError, match=r"^job: no operations"):
        read_operations(sink.getvalue().to_pybytes(), "job")


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[sim\]'"):
        read_operations(b"", "job")


# Replaying


@pytest.mark.parametrize("forward_s", [lambda *_: 1.0, lambda r, _: 1.0 + r, lambda r, k: 1.0 + (3 * r + k) % 4])
def test_a_replay_of_replicas_takes_as_long_as_it_took(forward_s):
    result = what_if(read(replicas(forward_s)))
    assert result.replayed_s == pytest.approx(result.recorded_s, rel=1e-6)


@pytest.mark.parametrize("compute_s", [(1.0, 1.0), (1.0, 2.0, 3.0), (3.0, 1.0, 1.0, 2.0)])
def test_a_replay_of_a_pipeline_takes_as_long_as_it_took(compute_s):
    result = what_if(read(pipeline(compute_s)))
    assert result.replayed_s == pytest.approx(result.recorded_s, rel=1e-6)


def test_a_replay_has_no_launch_delays():
    result = what_if(read(pipeline((1.0, 1.0), launch_s=2.0)))
    assert result.recorded_s - result.replayed_s == pytest.approx(2.0, rel=1e-6)


def test_one_slow_worker_is_blamed():
    result = what_if(read(replicas(lambda replica, _: 3.0 if replica == 2 else 1.0, num_replicas=8)))
    others_s = GATHER_S + SYNC_S + CLIP_S + OPTIMIZER_S
    assert result.blame == "worker"
    assert result.slow_ranks == (2,)
    assert result.replayed_s == pytest.approx(36.0 + others_s, rel=1e-6)
    assert result.ideal_s == pytest.approx(15.0 + others_s, rel=1e-6)  # mean of 1 x 36 and 7 x 12 seconds
    assert result.worker.share == pytest.approx(1.0, abs=1e-6)  # the others are faster than the mean
    assert result.worker.alone_s == pytest.approx(36.0 + others_s, rel=1e-6)
    assert result.dp_slowdowns[2] == pytest.approx(result.slowdown, rel=1e-6)
    assert max(result.dp_slowdowns[:2]) == pytest.approx(1.0, rel=1e-6)


def test_a_long_last_stage_is_blamed():
    result = what_if(read(filled_pipeline(last_s=3.0)))
    assert result.blame == "stage"
    assert result.stage_slowdowns[1] > 1.2 > result.stage_slowdowns[0]
    assert result.worker.share < 0.5


def test_uneven_sequences_are_blamed_on_nobody():
    lengths = np.random.default_rng(3).lognormal(0.0, 0.4, size=(20, 8, 4))
    steps = [
        {**r, "step": step}
        for step, of_step in enumerate(lengths)
        for r in replicas(lambda replica, number, of_step=of_step: float(of_step[replica, number]), num_replicas=8)
    ]
    result = what_if(read(steps))
    assert result.slowdown > 1.2
    assert result.worker.share < 0.5
    assert result.uneven_ratio == pytest.approx(0.35, abs=0.05)
    assert result.blame == "sequences"


def test_where_nothing_is_slow_nothing_is_blamed():
    result = what_if(read(replicas(lambda *_: 1.0)))
    assert result.slowdown == pytest.approx(1.0)
    assert result.worker.share == 0.0
    assert result.uneven_ratio == 0.0
    assert result.blame == "none"


def test_a_single_stage_is_not_blamed_for_being_the_last():
    result = what_if(read(replicas(lambda replica, _: 3.0 if replica < 4 else 1.0, num_replicas=8)))
    assert result.stage.share == pytest.approx(1.0)
    assert result.blame == "unclear"  # half of the workers are slow


@pytest.mark.parametrize("kind", ["forward-compute", "backward-compute"])
def test_without_forward_or_backward_nothing_is_uneven(kind):
    rows = [r for r in replicas(lambda replica, number: 1.0 + replica * number) if r["optype"] != kind]
    assert what_if(read(rows)).uneven_ratio == 0.0


def test_a_three_percent_of_workers_is_rounded_up():
    for num_workers, slow in ((4, 1), (33, 1), (34, 2)):
        rows = replicas(lambda replica, _: 1.0 + 0.01 * replica, num_replicas=num_workers, num_batches=1)
        assert what_if(read(rows)).slow_ranks == tuple(range(num_workers - slow, num_workers))


def test_operations_that_wait_in_a_circle_are_refused():
    operations = read(pipeline((1.0, 1.0)))
    # The first stage goes backward before forward, and only its forward makes the last stage send that back.
    late = [
        kind == "forward-compute" and worker == 0
        for kind, worker in zip(operations.kinds, operations.workers, strict=True)
    ]
    start_s = operations.start_s + 1000.0 * np.array(late)[:, None]
    with pytest.raises(TraceError, match=r"^job: wanted operations in order"):
        what_if(replace(operations, start_s=start_s))
