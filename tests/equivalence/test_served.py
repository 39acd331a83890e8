"""A live run with parameter servers, told again, decides the same, and in virtual time it takes as long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.act.local import run_local
from paceline.demo.run import DemoOptions, record_task
from paceline.demo.task import TaskResult, train
from paceline.evaluate import served
from paceline.evaluate.live import Comparison, simulate_run
from paceline.evaluate.replay import replay
from paceline.record import Line, read
from paceline.types import StepTiming

pytestmark = pytest.mark.timeout(120)
OPTIONS = DemoOptions(num_ranks=6, arch="ps")


def trained(system: str, run_dir: Path, num_epochs: int) -> TaskResult:
    config = replace(OPTIONS.config(system, seed=0), run_dir=run_dir, num_epochs=num_epochs)
    outcomes = run_local(train, OPTIONS.world_size, config)
    assert [outcome.error for outcome in outcomes] == [None] * OPTIONS.world_size
    return outcomes[config.recorder].value


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The log of a run in the mode "auto", with how BSP went beside it."""
    run_dir = tmp_path_factory.mktemp("served") / "auto"
    plain = trained("bsp", run_dir.with_name("bsp"), num_epochs=3)
    result = trained("auto", run_dir, num_epochs=8)
    config = replace(OPTIONS.config("auto", seed=0), run_dir=run_dir, num_epochs=8)
    record_task(config, result, plain=plain, target=0.9)
    return read(run_dir)


@pytest.fixture(scope="module")
def comparisons(lines: list[Line]) -> dict[str, Comparison]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "LATENCIES", (1.0,))
        return {comparison.name: comparison for comparison in simulate_run(lines)}


def test_told_the_same_it_decides_the_same(lines: list[Line]) -> None:
    replayed = replay(lines)
    assert replayed.is_equal, replayed.text()
    assert replayed.num_plans[0] >= 1


def test_the_simulator_chooses_what_the_live_run_chose(lines: list[Line], comparisons: dict[str, Comparison]) -> None:
    live = [line.data["policy"]["name"] for line in lines if line.kind == "plan" and line.data["status"] == "adopted"]
    assert [mode.partition("(")[0] for _, mode in comparisons["auto"].modes[:1]] == live[:1]


@pytest.mark.parametrize("name", ["BSP", "auto"])
def test_updates_follow_each_other_as_fast_as_live(comparisons: dict[str, Comparison], name: str) -> None:
    comparison = comparisons[name]
    assert comparison.paces
    assert all(pace.ratio == pytest.approx(1.0, abs=0.15) for pace in comparison.paces), comparison.paces
    assert comparison.is_close


def test_with_own_times_that_are_not_the_runs_it_is_off(lines: list[Line]) -> None:
    def faster(line: Line) -> Line:
        if not isinstance(line.value, StepTiming):
            return line
        return replace(line, value=replace(line.value, backward_s=line.value.backward_s / 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "LATENCIES", (1.0,))
        bsp, *_ = simulate_run([faster(line) for line in lines])
    assert not bsp.is_close
