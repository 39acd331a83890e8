"""The same training, live and in virtual time, reaches its target accuracy at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from paceline.act.local import run_local
from paceline.cli import app
from paceline.demo.run import DemoOptions, record_task
from paceline.demo.simulated import TorchCNN, simulated_task
from paceline.demo.task import TaskConfig, build_model, digits, train
from paceline.errors import RecordError
from paceline.evaluate.live import LATENCIES, Comparison, measure_costs, simulate_run
from paceline.record import Line, read
from paceline.report.history import Run
from paceline.sim.training import Contribution, TaskLearner
from paceline.types import StepTiming

TARGET = 0.9  # reached after 30 to 45 updates, where the accuracy still climbs: 0.96 would take three times as long


def trained(system: Any, run_dir: Path) -> list[Line]:
    """Train as the demo does, with rank 2 five times slower, and return the log."""
    planted = DemoOptions().config("auto" if system == "auto" else "ddp", seed=0)
    config = replace(planted, system=system, run_dir=run_dir, num_epochs=5)
    outcomes = run_local(train, 4, config)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    record_task(config, outcomes[config.recorder].value, target=TARGET)
    return read(run_dir)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return trained("observe", tmp_path_factory.mktemp("observe"))


@pytest.fixture(scope="module")
def auto_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("auto")
    trained("auto", run_dir)
    return run_dir


def only(comparisons: tuple[Comparison, ...], name: str) -> Comparison:
    (comparison,) = comparisons
    assert comparison.name == name
    return comparison


def test_plain_ddp_takes_as_long_simulated_as_live(observed: list[Line]) -> None:
    comparison = only(simulate_run(observed), "plain DDP")
    assert comparison.ratio == pytest.approx(1.0, abs=0.15)
    assert comparison.is_close
    assert comparison.modes == ()


def test_auto_takes_as_long_simulated_as_live(auto_dir: Path) -> None:
    comparison = only(simulate_run(read(auto_dir)), "auto")
    assert comparison.ratio == pytest.approx(1.0, abs=0.15)
    assert "AttachedRing" in comparison.modes[0][1], "rank 2 was attached in the simulation, as it was live"


def test_the_command_says_so(auto_dir: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(auto_dir), "--simulate"])
    assert done.exit_code == 0, done.output
    assert "live and simulated" in done.output


def test_with_own_times_that_are_not_the_runs_it_is_off(observed: list[Line]) -> None:
    def faster(line: Line) -> Line:
        if not isinstance(line.value, StepTiming):
            return line
        return Line(line.kind, line.data, replace(line.value, backward_s=line.value.backward_s / 2))

    comparison = only(simulate_run([faster(line) for line in observed]), "plain DDP")
    assert not comparison.is_close
    assert comparison.ratio is not None
    assert comparison.ratio < 0.7


def test_a_run_of_another_program_cannot_be_simulated(observed: list[Line]) -> None:
    with pytest.raises(RecordError, match="paceline demo"):
        simulate_run([line for line in observed if line.kind != "task"])


def test_simulated_learning_is_torchs() -> None:
    """Ten updates of DDP with everybody in step, in torch and as the simulator makes them."""
    config = TaskConfig("ddp", seed=3)
    dataset, _, _ = digits()
    images, labels = dataset.tensors
    net = build_model(config.seed, nn.Identity())
    optimizer = torch.optim.Adam(net.parameters(), lr=config.lr)
    learner = TaskLearner(simulated_task(config, 0.96), config.seed)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed))
    for version in range(10):
        batch = order[128 * version : 128 * (version + 1)]
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
        draws = [Contribution(rank, version, (learner.draw(rank, 32),)) for rank in range(4)]
        learner.update(draws, lr_scale=1.0)
    ours, theirs = learner.parameters(), nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    assert not np.allclose(theirs, TorchCNN().initial(config.seed), atol=1e-2)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def timing(rank: int, step: int, started_s: float, own_s: float, wait_s: float) -> Line:
    value = StepTiming(rank, step, started_s, backward_s=own_s, wait_s=wait_s)
    return Line("step", {"kind": "step"}, value)


def test_costs_are_read_from_waits_and_starts() -> None:
    header = {"world_size": 3, "hosts": ["a"] * 3, "mode": "auto", "lr_rule": "sqrt", "max_staleness": 16}
    policy = {"name": "AttachedRing", "ring": [0, 1], "parent_of": {"2": 0}}
    plan = {"kind": "plan", "epoch": 1, "policy": policy}
    lines = [
        Line("run", {"kind": "run", **header}),
        *(timing(rank, 1, 10.0 * rank, 1.0 + rank, 2.4 - rank) for rank in range(3)),  # exchange: 0.4
        *(timing(rank, 2, 10.0 * rank + 3.4, 1.0, 0.4) for rank in range(3)),
        Line("plan", {**plan, "status": "proposed", "effective_step": 2}),
        Line("plan", {**plan, "status": "adopted", "effective_step": 3}),
        *(timing(rank, 3, 10.0 * rank + 4.8, 1.0, 1.2) for rank in range(2)),  # with the role change
        *(timing(rank, 4, 10.0 * rank + 7.0, 1.0, 0.2) for rank in range(2)),
        timing(2, 4, 27.3, 3.0, 0.5),  # attached: begins 0.3 later than the ring
    ]
    costs = measure_costs(Run.of(lines))
    assert costs.exchange_s == pytest.approx(1.0 / 3)
    assert costs.alpha_s == pytest.approx(0.1)
    assert costs.trip_s == pytest.approx(0.3)
    assert costs.switch_s == pytest.approx(1.2 - 1.0 / 3)
    assert costs.fence_s == pytest.approx(0.25 + 1.4)
    assert len(LATENCIES) % 2 == 1


def test_a_run_without_steps_together_has_no_exchange_to_measure() -> None:
    with pytest.raises(RecordError, match="no exchange"):
        measure_costs(Run.of([Line("run", {"kind": "run", "world_size": 2}), timing(0, 1, 0.0, 1.0, 0.1)]))
