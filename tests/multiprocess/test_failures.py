"""Promise three: no run hangs. A rank that is killed, stopped or raises is named by the others, in a written report.

`bench/failures.py` measures how long that takes; here only that it happens, for every kind and place.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.act.local import Outcome, run_local
from paceline.demo.faults import Faults
from paceline.predict.detector import Detector
from paceline.record import read
from paceline.types import Fault, FaultKind, FaultPlan

SLOW = 2


def train(rank: int, run_dir: Path, plan: FaultPlan, mode: str, num_epochs: int) -> int:
    faults = Faults(plan, rank)
    slow = any(f.rank == rank and f.kind is FaultKind.COMPUTE for f in plan.faults)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    steps = 0
    with paceline.attach(ddp, optimizer, mode=mode, run_dir=run_dir, peer_timeout_s=2.0) as pace:
        loader = pace.data(TensorDataset(torch.randn(320, 4)), batch_size=4)
        for _ in range(num_epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = ddp(x).square().mean()
                time.sleep(0.08 if slow else 0.01)
                loss.backward()
                optimizer.step()
                faults.next_step()
                steps += 1
    return steps


def run_with(tmp_path: Path, kind: FaultKind, rank: int, at: int, slow: bool, mode: str = "auto") -> list[Outcome]:
    faults = [Fault(rank, kind, from_step=at, until_step=at + 1)]
    if slow:
        faults.append(Fault(SLOW, FaultKind.COMPUTE, 0.07))
    # Long enough that nobody finishes before the fault; whoever goes on needs a few seconds for the rest.
    return run_local(train, 4, tmp_path, FaultPlan(tuple(faults)), mode, 12, timeout_s=45.0)


def report_of(tmp_path: Path) -> dict[str, Any]:
    assert (tmp_path / "report.html").stat().st_size > 1000
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("kind", "rank", "slow"),
    [
        (FaultKind.KILL, 1, False),
        (FaultKind.KILL, 0, False),  # hosts the store and writes the log
        (FaultKind.KILL, SLOW, True),  # attached
        (FaultKind.KILL, 3, True),  # in the ring while another is attached
        (FaultKind.STOP, 1, False),
        (FaultKind.STOP, 0, True),
        (FaultKind.RAISE, SLOW, True),
        (FaultKind.RAISE, 0, False),
    ],
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_the_others_name_the_lost_rank(kind: FaultKind, rank: int, slow: bool, tmp_path: Path) -> None:
    # An attached rank's 18th own step comes well after it was attached; a ring member's 40th as well.
    outcomes = run_with(tmp_path, kind, rank, at=18 if rank == SLOW else 40, slow=slow)
    assert slow == any(line.kind == "update" for line in read(tmp_path)), "attached exactly when one is slow"
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.error_type in ("PeerError", "PeerTimeout"), outcome
            assert f"rank {rank} on host" in str(outcome.error)
    summary = report_of(tmp_path)
    assert summary["failure"]["rank"] == rank
    assert summary["partial"] is True


def test_the_ring_goes_on_without_a_stopped_attached_rank(tmp_path: Path) -> None:
    outcomes = run_with(tmp_path, FaultKind.STOP, SLOW, at=18, slow=True)
    assert [o.error for o in outcomes if o.rank != SLOW] == [None] * 3
    assert all(o.value > 200 for o in outcomes if o.rank != SLOW)
    assert report_of(tmp_path)["failure"]["rank"] == SLOW
    assert any(line.kind == "event" and "goes on without it" in line.data["message"] for line in read(tmp_path))


def test_an_exception_reaches_everybody_in_observe_mode_too(tmp_path: Path) -> None:
    outcomes = run_with(tmp_path, FaultKind.RAISE, 1, at=10, slow=False, mode="observe")
    assert outcomes[1].error_type == "RuntimeError"
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.error_type == "PeerError"
            assert "planted failure" in str(outcome.error)


def train_with_batch_norm(rank: int, run_dir: Path) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    pace = paceline.attach(ddp, optimizer, mode="auto", run_dir=run_dir, peer_timeout_s=2.0)
    for step in range(100):
        if step == 10 and rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        ddp(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    pace.close()


def test_a_thread_stuck_in_the_backend_does_not_hang_the_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The others wait for rank 0's buffers inside DDP's forward, where no Python can reach them.
    outcomes = run_local(train_with_batch_norm, 3, tmp_path, timeout_s=40.0)
    assert [o.exitcode for o in outcomes[1:]] == [1, 1]
    assert "rank 0 on host" in capfd.readouterr().err
    assert report_of(tmp_path)["failure"]["rank"] == 0


def train_with_a_broken_detector(_rank: int, run_dir: Path) -> int:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("planted in the detector")

    Detector.observe = broken  # type: ignore[method-assign]  # in this forked process only
    return train(_rank, run_dir, FaultPlan(), "auto", 1)


def test_an_error_of_our_own_does_not_end_the_training(tmp_path: Path) -> None:
    outcomes = run_local(train_with_a_broken_detector, 2, tmp_path)
    assert [(o.error, o.value) for o in outcomes] == [(None, 40)] * 2
    assert read(tmp_path)[-1].data["observed_to_the_end"] is False


def train_and_leave_early(rank: int, run_dir: Path, mode: str) -> int:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    steps = 0
    with paceline.attach(ddp, optimizer, mode=mode, run_dir=run_dir, peer_timeout_s=2.0):
        for _ in range(5 if rank == 1 else 10):
            ddp(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            steps += 1
    return steps


@pytest.mark.parametrize("mode", ["observe", "auto"])
def test_a_rank_that_leaves_the_loop_early_is_named(mode: str, tmp_path: Path) -> None:
    outcomes = run_local(train_and_leave_early, 3, tmp_path, mode, timeout_s=40.0)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.error_type == "PeerError"
            assert "rank 1 on host" in str(outcome.error)
            assert "left the training loop" in str(outcome.error)
    assert report_of(tmp_path)["failure"]["rank"] == 1
