"""Replay: a recorded live run, told again to the same controller, is decided the same."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import paceline
from paceline.act.local import run_local
from paceline.cli import app
from paceline.errors import RecordError
from paceline.evaluate.replay import replay
from paceline.record import Line, RunLog, read
from paceline.types import StepTiming


def train(rank: int, run_dir: Path, mode: Any, slow_until: float) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(640, 8, generator=generator), torch.randint(0, 3, (640,), generator=generator))
    start = time.monotonic()
    with paceline.attach(ddp, optimizer, mode=mode, run_dir=run_dir, max_staleness=9) as pace:
        loader = pace.data(data, batch_size=4)
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                time.sleep(0.08 if rank == 2 and time.monotonic() - start < slow_until else 0.01)
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()


def recorded(mode: str, run_dir: Path, slow_until: float = 2.5) -> list[Line]:
    outcomes = run_local(train, 4, run_dir, mode, slow_until)
    assert [o.error for o in outcomes] == [None] * 4
    return read(run_dir)


@pytest.fixture(scope="module")
def auto_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("auto")
    recorded("auto", run_dir)
    return run_dir


def test_a_live_run_is_decided_the_same(auto_run: Path) -> None:
    lines = read(auto_run)
    result = replay(lines)
    statuses = [line.data["status"] for line in lines if line.kind == "plan"]
    assert statuses.count("adopted") >= 2, "attached, and back in the ring: else there is little to replay"
    assert result.num_plans == (statuses.count("proposed"),) * 2
    assert result.num_verdicts[1] >= 1
    assert result.num_gains[1] >= 1
    assert result.is_equal
    assert result.plans[0].live is not None
    assert result.plans[0].live.policy.max_staleness == 9


def test_the_command_says_so(auto_run: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(auto_run)])
    assert done.exit_code == 0, done.output
    assert "the controller decides the same" in done.output


def test_another_controller_is_noticed(auto_run: Path, tmp_path: Path) -> None:
    header, *rest = read(auto_run)
    changed = [Line("run", {**header.data, "max_staleness": 3}), *rest]
    result = replay(changed)
    assert not result.is_equal
    assert not result.plans[0].is_equal
    with RunLog(tmp_path) as log:
        for line in changed:
            log.write(**line.data)
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 1
    assert "decides otherwise" in done.output


def test_other_timings_are_noticed(auto_run: Path) -> None:
    def faster(line: Line) -> Line:
        is_slow = isinstance(line.value, StepTiming) and line.value.rank == 2
        own = replace(line.value, forward_s=0.0, backward_s=0.0, other_s=0.01, data_s=0.0) if is_slow else line.value
        return Line(line.kind, line.data, own)

    result = replay([faster(line) for line in read(auto_run)])
    assert result.plans
    assert result.num_plans[0] == 0


def test_advice_is_the_same_and_so_is_its_end(tmp_path: Path) -> None:
    lines = recorded("suggest", tmp_path, slow_until=1.2)
    assert [line.data["status"] for line in lines if line.kind == "plan"].count("advised") >= 1
    assert [line.kind for line in lines].count("withdrawn") >= 1, "the rank recovered, so its advice ended"
    assert replay(lines).is_equal


def test_a_run_that_observes_shows_what_would_have_been_advised(tmp_path: Path) -> None:
    result = replay(recorded("observe", tmp_path, slow_until=1.2))
    assert result.is_equal
    assert result.plans
    assert result.plans[0].live is None
    assert "would have advised" in result.text()


def test_a_log_of_an_older_version_says_what_it_lacks(auto_run: Path) -> None:
    header, *rest = read(auto_run)
    old = {name: value for name, value in header.data.items() if name != "lr_rule"}
    with pytest.raises(RecordError, match="lr_rule"):
        replay([Line("run", old), *rest])
