"""Public traces of real jobs: what is known about them is found. Skipped where the data is not at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from paceline.predict.detector import Detector, DetectorState
from paceline.sim.operations import Operations, from_operations, read_operations
from paceline.sim.parse import from_pai
from paceline.sim.trace import Table
from paceline.sim.whatif import what_if
from paceline.types import StepTiming

STEP_S = 0.1  # what the fastest worker's step is taken to last: the source gives no unit
SAMPLE = 10  # steps per sample


def data(relative: str) -> Path:
    """A file in the nearest `shared/data` above this one; skips the test where there is none."""
    for folder in Path(__file__).resolve().parents:
        if (path := folder / "shared" / "data" / relative).is_file():
            return path
    pytest.skip(f"no shared/data/{relative} above {Path(__file__).name}")


@cache
def pai(job: int) -> Table:
    path = data(f"pai-minibatch/job_{job}_norm.csv")
    return from_pai(path.read_text(encoding="utf-8").splitlines(), path.name)


@cache
def operations(trace: str) -> Operations:
    path = data(f"whatif/trace-{trace}.parquet")
    return read_operations(path.read_bytes(), path.name)


# Mini-batch times of four jobs (Alibaba Cluster Trace Program, cluster-trace-gpu-v2020, CC BY 4.0)


@pytest.mark.parametrize(
    ("job", "num_samples", "num_carried", "first_and_last"),
    [(1, 300, 0, []), (2, 254, 139, []), (3, 249, 1, [(0, 0)]), (4, 2183, 1, [(9, 2182)])],
)
def test_the_tables_are_as_large_as_the_source_says_and_gaps_are_known(job, num_samples, num_carried, first_and_last):
    table = pai(job)
    assert (table.num_ranks, table.num_steps) == (10, num_samples * SAMPLE)
    assert len(table.carried) == num_carried
    assert set(first_and_last) <= table.carried
    assert table.has_stragglers


def test_the_slowdowns_are_those_of_the_source():
    medians = {job: [median(row) for row in pai(job).ratios] for job in (1, 2, 4)}
    assert [round(424 * x) for x in medians[1][:3]] == [476, 471, 466]
    whole = [row[:238] for row in pai(2).ratios]  # later on samples are scattered
    assert [686 * median(row) for row in whole] == pytest.approx(
        [708, 686, 747, 855, 851, 906, 834, 845, 841, 799], abs=2.5
    )
    slow = {rank for rank, x in enumerate(medians[4]) if x > 3}
    assert slow == {0, 5, 6, 7, 8}
    assert max(x for rank, x in enumerate(medians[4]) if rank not in slow) < 1.1


def timings(table: Table, per_sample: int, until: int | None = None) -> Iterator[list[StepTiming]]:
    """The rows that the detector would have seen, without the samples that the source lacks."""
    num_samples = table.num_steps // SAMPLE if until is None else until
    for step in range(num_samples * per_sample):
        sample = step // per_sample
        yield [
            StepTiming(rank, step, 0.0, backward_s=STEP_S * table.slowdown(rank, sample * SAMPLE, 0.0))
            for rank in range(table.num_ranks)
            if (rank, sample) not in table.carried
        ]


def states(table: Table, per_sample: int = SAMPLE, until: int | None = None) -> list[DetectorState]:
    """The detector's state at the end of every sample."""
    detector = Detector()
    state, seen = detector.init(frozenset(range(table.num_ranks))), []
    for step, row in enumerate(timings(table, per_sample, until), start=1):
        for timing in row:
            state = detector.observe(state, timing)
        if step % per_sample == 0:
            seen.append(state)
    return seen


def named(seen: list[DetectorState], rank: int) -> list[int]:
    """The samples at whose end the rank is slow."""
    return [sample for sample, state in enumerate(seen) if rank in state.slow]


def test_job_1_shows_a_transient_of_worker_6_and_mildly_slow_workers():
    seen = states(pai(1))
    transient = named(seen, 6)
    assert transient[0] == 181
    assert sum(181 <= sample <= 195 for sample in transient) >= 10
    assert all(sample <= 195 or 255 <= sample <= 257 for sample in transient)
    for rank in (0, 1, 2):  # slow throughout, by 10 %
        assert len(named(seen, rank)) > 50
    for rank in (3, 4, 5, 7, 8, 9):
        assert len(named(seen, rank)) <= 4


def test_job_2_shows_worker_5_and_nobody_else():
    seen = states(pai(2), until=238)
    # 3, 4, 6, 7 and 8 are slow beside the fastest, but like most: no more than 5 % above the median of the others.
    assert set().union(*(state.slow for state in seen)) == {5}
    assert len(named(seen, 5)) > 150


def test_job_3_shows_the_late_onset_of_four_workers():
    seen = states(pai(3))
    for rank, onset, within in ((6, 217, 2), (7, 217, 2), (9, 219, 12), (8, 222, 6)):
        slow = named(seen, rank)
        assert onset <= slow[0] <= onset + within
        assert len(slow) >= 0.8 * (len(seen) - slow[0])
    for rank in (0, 1):  # slow throughout, by 10 %, until others are slower
        assert named(seen, rank)
    assert set().union(*(state.slow for state in seen)) == {0, 1, 6, 7, 8, 9}


def test_job_4_shows_two_classes_and_two_that_jump():
    seen = states(pai(4), per_sample=1)
    assert all(state.slow == {0, 5, 6, 7, 8} for state in seen[9:])
    for rank, onset in ((5, 1872), (6, 1874)):

        def excess_s(sample: int, rank: int = rank) -> float:
            return median(row.excess_s for row in seen[sample].windows[rank][-10:])

        assert excess_s(onset + 10) > 3 * excess_s(onset - 1)  # named already; how slow it is has changed
        assert excess_s(len(seen) - 2) > 3 * excess_s(onset - 1)
    for rank in (0, 7, 8):
        before, after = (median(row.excess_s for row in seen[s].windows[rank][-10:]) for s in (1871, 1884))
        assert after < 2 * before


# Operation traces of three jobs (ByteDance-Seed/StragglerAnalysis, Apache-2.0)


@pytest.mark.parametrize("trace", ["AR", "SE", "ST"])
def test_the_replay_gives_the_published_numbers(trace):
    result = what_if(operations(trace))
    m_w, m_s = (json.loads(data(f"whatif/{which}-{trace}.json").read_text()) for which in ("mw", "ms"))
    assert result.worker.share == pytest.approx(m_w["Mw"], abs=0.02)
    assert result.stage.share == pytest.approx(m_s["Ms"], abs=0.02)
    for ours, published in (
        (result.replayed_s, m_w["tori"]),
        (result.ideal_s, m_w["tideal"]),
        (result.worker.ideal_s, m_w["trem"]),
        (result.worker.alone_s, m_w["tadd"]),
        (result.stage.ideal_s, m_s["trem"]),
        (result.stage.alone_s, m_s["tadd"]),
    ):
        assert ours == pytest.approx(published, rel=0.001)


@pytest.mark.parametrize(
    ("trace", "blame", "slowdown", "launch_delay"),
    [("AR", "worker", 1.973, 1.0068), ("SE", "sequences", 1.537, 1.0051), ("ST", "stage", 1.179, 1.0192)],
)
def test_the_right_one_is_blamed(trace, blame, slowdown, launch_delay):
    result = what_if(operations(trace))
    assert result.blame == blame
    assert result.slowdown == pytest.approx(slowdown, abs=0.001)
    assert result.recorded_s / result.replayed_s == pytest.approx(launch_delay, abs=0.0005)


def test_who_is_slow_is_who_the_source_says():
    job = what_if(operations("AR"))
    assert job.slow_ranks == (0,)
    assert job.dp_slowdowns[0] == pytest.approx(1.973, abs=0.001)
    assert max(job.dp_slowdowns[1:]) == pytest.approx(1.011, abs=0.001)
    assert what_if(operations("ST")).stage_slowdowns[3] == pytest.approx(1.232, abs=0.001)
    assert what_if(operations("SE")).stage_slowdowns == pytest.approx((1.168, 1.435), abs=0.002)


def test_as_step_times_they_show_the_same():
    tables = {trace: from_operations(operations(trace)) for trace in ("AR", "SE", "ST")}
    medians = {trace: [median(row) for row in table.ratios] for trace, table in tables.items()}
    assert {trace: (table.num_ranks, table.num_steps) for trace, table in tables.items()} == {
        "AR": (16, 44),
        "SE": (64, 43),
        "ST": (8, 32),
    }
    assert tables["AR"].source_ranks == tuple(range(0, 61, 4))
    assert medians["AR"][0] > 2.2 > 1.1 > max(medians["AR"][1:])
    assert min(medians["ST"][6:]) > 1.6 > 1.05 > max(medians["ST"][:6])
    assert all(table.has_stragglers for table in tables.values())
