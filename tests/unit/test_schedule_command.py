"""The command `paceline schedule`: facts as JSON, words and a picture."""

import json

import pytest
from typer.testing import CliRunner

from paceline import cli
from paceline.collective.late import around_one
from paceline.collective.schedule import Transfer, steps_of
from paceline.errors import ConfigError


def run(*arguments):
    return CliRunner().invoke(cli.app, ["schedule", *map(str, arguments)])


@pytest.mark.parametrize("n", [4, 7, 8, 12])
def test_json_has_what_it_promises_and_meets_the_bound(n):
    told = json.loads(run("--ranks", n, "--json").output)
    assert {
        "algorithm", "num_ranks", "num_chunks", "late", "rounds", "lower_bound_rounds", "verified", "cost_s", "steps"
    } <= told.keys()  # fmt: skip
    assert told["verified"] is True
    assert told["rounds"] == told["lower_bound_rounds"] == len(told["steps"])
    assert (told["algorithm"], told["num_ranks"], told["num_chunks"], told["late"]) == ("late", n, n - 1, [n - 1])
    everything = told["early_steps"] + told["steps"]
    assert steps_of(around_one(n, n - 1, n - 1)) == tuple(tuple(Transfer(**t) for t in step) for step in everything)


def test_flags_reach_the_schedule():
    told = json.loads(run("--ranks", 8, "--late", "2,5", "--chunks", 12, "--json").output)
    assert (told["late"], told["num_chunks"], told["verified"]) == ([2, 5], 12, True)
    told = json.loads(run("--ranks", 8, "--algorithm", "tree", "--nbytes", 10, "--alpha-s", 1, "--beta-s-per-byte", 2,
                          "--json").output)  # fmt: skip
    assert (told["algorithm"], told["cost_s"]) == ("tree", 6 * 21.0)


def test_words():
    output = run("--ranks", 8).output
    for expected in ("0⇄7:c0", "Verified: 9 rounds after the arrival, 6 before it; no less than 9", "2.88 ms", "1.36x"):
        assert expected in output
    assert "32 more; --json" in run("--ranks", 35).output
    assert "ring takes" not in run("--ranks", 4, "--algorithm", "ring").output


@pytest.mark.parametrize(
    "arguments",
    [("--late", "x"), ("--late", "8"), ("--algorithm", "star"), ("--draw", "a.gif"), ("--draw", "nowhere/a.svg")],
)
def test_wrong_usage(arguments):
    assert isinstance(run("--ranks", 8, *arguments).exception, ConfigError)


@pytest.mark.parametrize(
    ("suffix", "arguments"),
    [("svg", ("--ranks", 5, "--chunks", 8)), ("png", ("--ranks", 5, "--late", "1,4", "--chunks", 3)),
     ("svg", ("--ranks", 40)), ("png", ("--ranks", 4, "--algorithm", "halving"))],
)  # fmt: skip
def test_pictures(tmp_path, suffix, arguments):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{suffix}"
    result = run(*arguments, "--draw", path)
    assert result.exit_code == 0, result.exception
    start = path.read_bytes()[:300]
    assert b"<svg" in start if suffix == "svg" else start.startswith(b"\x89PNG")


def test_a_wrong_schedule_is_a_failure(monkeypatch):
    wrong = around_one(4, 3, 3)
    from paceline.collective import explain

    monkeypatch.setattr(explain, "build", lambda *_: explain.ListedSchedule("cut", 4, 3, 3, steps_of(wrong)[:-1]))
    result = run("--ranks", 4)
    assert result.exit_code == 1
    assert "WRONG, cut: at the end rank" in result.output
