"""The run log: what goes in comes out, and what cannot be read says where."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.record import LOG_NAME, SCHEMA_VERSION, Line, RunLog, decode, encode, parse, read
from paceline.types import NoiseScale, NormSample, StepTiming, Update, Verdict

# Durations are kept to 0.1 microseconds, everything else as it is.
SECONDS = st.integers(0, 10**12).map(lambda n: round(n * 1e-7, 7))
NUMBER = st.floats(allow_nan=False)
COUNT = st.integers(0, 10**6)
RANK = st.integers(0, 64)
TEXT = st.text(max_size=20)
BY_RANK = st.dictionaries(RANK, COUNT, max_size=3)

VALUES = {
    "step": st.builds(
        StepTiming,
        rank=RANK,
        step=COUNT,
        started_s=SECONDS,
        data_s=SECONDS,
        forward_s=SECONDS,
        backward_s=SECONDS,
        optimizer_s=SECONDS,
        gc_s=SECONDS,
        other_s=SECONDS,
        wait_s=SECONDS,
        expected_s=SECONDS,
        samples=COUNT,
        cpu_s=st.none() | SECONDS,
        runqueue_s=st.none() | SECONDS,
    ),
    "norms": st.builds(
        NormSample,
        rank=RANK,
        step=COUNT,
        local_sq=NUMBER,
        averaged_sq=NUMBER,
        local_samples=COUNT,
        averaged_samples=COUNT,
    ),
    "noise": st.builds(NoiseScale, step=COUNT, value=NUMBER, low=NUMBER, high=NUMBER, num_samples=COUNT),
    "verdict": st.builds(
        Verdict,
        step=COUNT,
        rank=RANK,
        host=TEXT,
        phase=TEXT,
        cause=TEXT,
        slowdown=NUMBER,
        excess_s=SECONDS,
        lost_ratio=NUMBER,
        since_step=COUNT,
        evidence=TEXT,
    ),
    "update": st.builds(
        Update, version=COUNT, contributions=BY_RANK, dropped=BY_RANK, staleness=BY_RANK, lr_scale=NUMBER
    ),
}


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_every_kind_comes_back_as_it_was(kind, data):
    value = data.draw(VALUES[kind])
    through_text = json.loads(json.dumps({**encode(value), "time_s": 1.5}))
    assert through_text["kind"] == kind
    assert decode(through_text) == value


def test_only_times_are_rounded_a_small_gradient_is_not():
    norms = NormSample(0, 5, local_sq=3.25e-9, averaged_sq=1.5e-12, local_samples=8, averaged_samples=32)
    assert decode(encode(norms)) == norms
    assert encode(StepTiming(0, 1, 0.0, data_s=0.123456789))["data_s"] == 0.1234568


def test_what_is_not_logged_is_refused():
    with pytest.raises(TypeError, match="cannot log a dict"):
        encode({"kind": "step"})


def test_other_kinds_have_no_value():
    assert decode({"kind": "event", "message": "hello"}) is None
    assert list(parse(['{"kind": "event", "message": "hello"}\n'])) == [
        Line("event", {"kind": "event", "message": "hello"}, None)
    ]


def test_a_log_is_written_continued_and_read(tmp_path):
    step = StepTiming(1, 2, 0.5, data_s=0.25)
    with RunLog(tmp_path / "new" / "run") as log:
        log.write("run", schema=SCHEMA_VERSION, world_size=4)
        log.write_value(step, time_s=3.0)
        log.flush()
        assert len(read(log.directory)) == 2
    log.close()
    with RunLog(tmp_path / "new" / "run") as log:
        log.write("end", samples=None)
    lines = read(tmp_path / "new" / "run")
    assert [line.kind for line in lines] == ["run", "step", "end"]
    assert lines[1].value == step
    assert lines[1].data["time_s"] == 3.0
    assert lines[0].data["world_size"] == 4


RUN = json.dumps({"kind": "run", "schema": SCHEMA_VERSION})
STEP = json.dumps(encode(StepTiming(0, 1, 0.0)))


@pytest.mark.parametrize("cut", range(1, len(STEP)))
def test_an_unfinished_last_line_is_left_out(cut):
    assert [line.kind for line in parse([RUN + "\n", STEP[:cut]])] == ["run"]


def test_a_last_line_that_only_lacks_its_end_counts():
    assert [line.kind for line in parse([RUN + "\n", STEP])] == ["run", "step"]


@pytest.mark.parametrize("tail", [STEP, STEP[:20]])
def test_a_survivor_can_go_on_with_the_log_of_a_writer_that_was_killed(tmp_path, tail):
    (tmp_path / LOG_NAME).write_text(f"{RUN}\n{STEP}\n{tail}", encoding="utf-8")
    with RunLog(tmp_path) as log:
        log.write("failure", rank=0)
    kinds = [line.kind for line in read(tmp_path)]
    assert kinds[:2] == ["run", "step"]
    assert kinds[-1] == "failure"


def test_empty_lines_are_passed_over():
    assert [line.kind for line in parse([RUN, "\n", "   \n", STEP])] == ["run", "step"]


@pytest.mark.parametrize(
    "bad",
    [
        STEP[:20],
        "[1, 2]",
        '"run"',
        "{}",
        '{"kind": 3}',
        '{"kind": "step", "rank": 0}',
        '{"kind": "step", "rank": 0, "step": 1, "started_s": 0, "surprise": 1}',
        '{"kind": "update", "version": 1, "contributions": {"x": 1}, "dropped": {}, "staleness": {}, "lr_scale": 1}',
        '{"kind": "update", "version": 1, "contributions": 7, "dropped": {}, "staleness": {}, "lr_scale": 1}',
        '{"kind": "run", "schema": "two"}',
    ],
)
def test_a_bad_line_in_the_middle_names_file_and_line(tmp_path, bad):
    (tmp_path / LOG_NAME).write_text(f"{RUN}\n{bad}\n{STEP}\n", encoding="utf-8")
    with pytest.raises(RecordError, match=rf"{LOG_NAME}, line 2"):
        read(tmp_path)


def test_a_newer_schema_is_refused_and_an_older_one_read():
    newer = json.dumps({"kind": "run", "schema": SCHEMA_VERSION + 1})
    with pytest.raises(RecordError, match="update paceline"):
        list(parse([newer], "somewhere"))
    assert [line.kind for line in parse(['{"kind": "run"}'])] == ["run"]


def test_no_log_is_an_error_that_says_what_was_wanted(tmp_path):
    with pytest.raises(RecordError, match="no run log at"):
        read(tmp_path)


@pytest.mark.parametrize(("text", "got"), [("", "nothing"), (STEP + "\n", "step")])
def test_a_log_begins_with_the_run(tmp_path, text, got):
    (tmp_path / LOG_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=f"got {got}"):
        read(tmp_path)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_infinity_is_written_as_json_that_everybody_reads_and_comes_back(tmp_path):
    noise = NoiseScale(3, math.inf, 0.0, math.inf, 5)
    verdict = Verdict(9, 1, "a", "data", "data", math.inf, 0.2, 1.0, 4, "slow")
    with RunLog(tmp_path) as log:
        log.write("run", schema=SCHEMA_VERSION, deep={"list": [1.5, -math.inf]}, nothing=math.nan)
        log.write_value(noise)
        log.write_value(verdict)
    text = (tmp_path / LOG_NAME).read_text(encoding="utf-8")
    first, *_ = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert (first["deep"], first["nothing"]) == ({"list": [1.5, None]}, None)
    assert [line.value for line in read(tmp_path)] == [None, noise, verdict]


def test_an_encoded_line_is_written_as_it_came_but_never_as_anything_other_than_json(tmp_path):
    verdict = Verdict(9, 1, "a", "data", "data", math.inf, 0.2, 1.0, 4, "slow")
    plain = StepTiming(rank=1, step=2, started_s=0.5, data_s=0.25)
    with RunLog(tmp_path) as log:
        log.write("run", schema=SCHEMA_VERSION, time_s=1.5)
        for value in (plain, verdict):
            log.write_encoded(json.dumps(encode(value)), 1.5)
    for line in (tmp_path / LOG_NAME).read_text(encoding="utf-8").splitlines():
        assert json.loads(line, parse_constant=refuse)["time_s"] == 1.5
    assert [line.value for line in read(tmp_path)] == [None, plain, verdict]
