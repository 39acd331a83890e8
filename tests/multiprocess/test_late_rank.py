"""Gradients summed around a late rank, under DDP: the same training, and the late rank found without clocks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.act.layout import fingerprint
from paceline.act.local import run_local
from paceline.decide.skew import Reduction
from paceline.errors import ConfigError
from paceline.record import read

RANKS, STEPS, WIDTH = 4, 60, 256
ALL_BYTES = 4 * (3 * WIDTH * WIDTH + 3 * WIDTH)


def model() -> nn.Sequential:
    """Three layers, one bucket each at a cap of 0.2 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def train(rank: int, run_dir: Path, collective: Any, late: dict[int, int], delay_s: float = 0.03) -> Any:
    """Train; `late` tells from which step on which rank is late (-1 for nobody)."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    pace = None if collective is None else paceline.attach(ddp, optimizer, run_dir=run_dir, collective=collective)
    now_late, losses = -1, []
    for step in range(STEPS):
        now_late = late.get(step, now_late)
        inputs = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        if rank == now_late:
            time.sleep(delay_s)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if pace is not None:
        pace.close()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return fingerprint(list(ddp.parameters())), flat.numpy(), losses  # a tensor would travel by file descriptor


def run(run_dir: Path, collective: Any, late: dict[int, int]) -> list[Any]:
    outcomes = run_local(train, RANKS, run_dir, collective, late, timeout_s=60.0)
    assert [o.error for o in outcomes] == [None] * RANKS
    return [o.value for o in outcomes]


def test_the_late_rank_is_found_and_left_and_training_stays_within_rounding(tmp_path: Path) -> None:
    late = {0: 2, 25: -1}
    plain, ours = run(tmp_path / "plain", None, {}), run(tmp_path / "ours", "auto", late)
    assert len({fingerprint for fingerprint, _, _ in ours}) == 1
    np.testing.assert_allclose(ours[0][1], plain[0][1], rtol=1e-4, atol=1e-6)
    lines = read(tmp_path / "ours")
    chosen = [line.data for line in lines if line.kind == "collective"]
    assert chosen[0]["late"] == 2
    assert chosen[0]["late_bytes"] > 0
    assert "rank 2 comes" in chosen[0]["reason"]
    assert any("rank 2 was not late" in c["reason"] for c in chosen[1:]), "given up once it is on time"
    assert "rank 2 comes" in (tmp_path / "ours" / "report.html").read_text(), "the report says why"
    assert all(line.kind != "slow_link" for line in lines), "late is not slow"
    assert [line.kind for line in lines].index("network") < [line.kind for line in lines].index("collective")


@pytest.mark.parametrize("late_bytes", [ALL_BYTES, ALL_BYTES // 2 + 3])
def test_a_pinned_choice_gives_the_same_bits_whoever_is_late(tmp_path: Path, late_bytes: int) -> None:
    pinned = Reduction(late=1, late_bytes=late_bytes, num_chunks=6, reason="pinned")
    first, second = run(tmp_path / "a", pinned, {0: 1}), run(tmp_path / "b", pinned, {0: 3, 10: 0, 20: -1})
    assert {fingerprint for fingerprint, _, _ in first} == {fingerprint for fingerprint, _, _ in second}
    assert [losses for _, _, losses in first] == [losses for _, _, losses in second]
    chosen = [line.data for line in read(tmp_path / "a") if line.kind == "collective"]
    assert [(c["late"], c["late_bytes"]) for c in chosen] == [(1, late_bytes)]


def test_native_is_plain_ddp_to_the_bit(tmp_path: Path) -> None:
    plain, ours = run(tmp_path / "plain", None, {}), run(tmp_path / "ours", "native", {0: 1})
    assert plain[0][0] == ours[0][0]


def train_on_after_close(_rank: int, run_dir: Path, collective: Any) -> str:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    pace = paceline.attach(ddp, optimizer, run_dir=run_dir, collective=collective)
    for step in range(8):
        if step == 4:
            pace.close()
        optimizer.zero_grad()
        ddp(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    return fingerprint(list(ddp.parameters()))


@pytest.mark.parametrize("collective", ["auto", Reduction(late=1, late_bytes=ALL_BYTES, num_chunks=6)])
def test_training_may_go_on_after_the_end_of_ours(tmp_path: Path, collective: Any) -> None:
    outcomes = run_local(train_on_after_close, RANKS, tmp_path, collective, timeout_s=60.0)
    assert [o.error for o in outcomes] == [None] * RANKS
    assert len({o.value for o in outcomes}) == 1


def lose_a_rank(rank: int, run_dir: Path, lost: int, how: int) -> None:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    pinned = Reduction(late=1, late_bytes=ALL_BYTES, num_chunks=6)
    with paceline.attach(ddp, optimizer, mode="auto", run_dir=run_dir, collective=pinned):
        for step in range(2000):
            optimizer.zero_grad()
            loss = ddp(torch.randn(8, WIDTH)).square().mean()
            if rank == lost and step == 10:
                os.kill(os.getpid(), how)
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [1, 2], ids=["the late one", "an early one"])
def test_a_lost_rank_is_named_by_the_others(tmp_path: Path, lost: int, how: int) -> None:
    outcomes = run_local(lose_a_rank, RANKS, tmp_path, lost, how, timeout_s=30.0)
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            assert outcome.error is not None
            assert f"rank {lost}" in outcome.error, f"rank {rank} says {outcome.error}"
    assert read(tmp_path)[-1].data["rank"] == lost


@pytest.mark.parametrize("wrong", ["fast", Reduction(late=-1), Reduction(late=1, num_chunks=0)])
def test_a_wrong_request_is_refused(wrong: Any) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"collective|pinned"):
        paceline.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), collective=wrong)
