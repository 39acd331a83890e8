"""Parameter servers without faults: in every mode they train what they should, and every sample is counted."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from served import BATCH, NUM_SAMPLES, Job, Training, build_model, build_optimizer, dataset, run, train, trained_alone
from torch import nn

from paceline.act import chief, parameter_server
from paceline.decide.plan import Plan
from paceline.errors import ConfigError
from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.group import GroupSync
from paceline.policy.local import LocalSGD
from paceline.policy.stale import ASP, SSP, KAsync, Zeno
from paceline.record import read
from paceline.types import Update

pytestmark = [pytest.mark.beside, pytest.mark.servers]
MODES = (
    "auto", KSync(2), KSync(2, "cancel"), KSync(2, "join_next"), Deadline(0.02), SSP(1), ASP(), ASP(1), KAsync(2),
    GroupSync(((0, 1), (2,))),
)  # fmt: skip


def counted(run_dir: Path) -> dict[str, int]:
    last = read(run_dir)[-1]
    assert last.kind == "end"
    return dict(last.data["samples"])


def deviation(ends: Any, expected: list[Any]) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(ends[0].params, expected, strict=True))


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(optimizer="adam"),
        Training(accumulate=2),
        Training(num_workers=2, num_servers=3, optimizer="adam"),
        Training(num_workers=1, num_servers=1),
    ],
    ids=["sgd", "adam", "accumulated", "three servers", "alone"],
)
def test_bsp_is_training_with_the_large_batch(tmp_path: Path, training: Training) -> None:
    ends = run(training, tmp_path)
    assert deviation(ends, trained_alone(training)) < 1e-6
    assert counted(tmp_path) == {"trained": 2 * NUM_SAMPLES, "dropped": 0, "epochs": 2}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_trains_every_sample_or_counts_it(tmp_path: Path, mode: Any) -> None:
    ends = run(Training(mode=mode, slow={1: 0.03}), tmp_path)
    samples = counted(tmp_path)
    assert samples["trained"] + samples["dropped"] == 2 * NUM_SAMPLES
    drops = isinstance(mode, KSync | Deadline) or mode == ASP(1) or mode == "auto"
    assert samples["dropped"] == 0 or drops
    updates = [line.value for line in read(tmp_path) if isinstance(line.value, Update)]
    assert sum(sum(update.contributions.values()) for update in updates) == samples["trained"]
    told = sum(sum(update.dropped.values()) for update in updates)
    assert told <= samples["dropped"] <= told + 3 * BATCH, "but for those after the last update"
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    assert all((a == b).all() for a, b in zip(ends[0].params, ends[1].params, strict=True)), "all end with the same"


def test_what_is_resumed_is_what_was_never_interrupted_bit_for_bit(tmp_path: Path) -> None:
    options = {"snapshot_dir": tmp_path / "snapshots", "snapshot_every": 4}
    training = Training(num_epochs=3, optimizer="adam")
    whole = run(training, tmp_path / "whole")
    with Job(replace(training, step_s=0.02, options=options), tmp_path / "first") as job:
        job.start()
        job.when(lambda: any((tmp_path / "snapshots").glob("v1[26]/chief.json")))
        for rank in range(job.world_size):
            job.send(rank, signal.SIGKILL)
    again = run(replace(training, options=options), tmp_path / "again")
    assert deviation(again, list(whole[0].params)) == 0.0
    assert counted(tmp_path / "again") == {"trained": 3 * NUM_SAMPLES, "dropped": 0, "epochs": 3}


def test_half_the_bytes_on_the_wire_keep_whole_precision_in_the_state(tmp_path: Path) -> None:
    training = Training(options={"wire_dtype": "bfloat16"})
    assert 0.0 < deviation(run(training, tmp_path), trained_alone(training)) < 0.02


def test_a_schedule_steps_by_samples(tmp_path: Path) -> None:
    def halving(rank: int, _job: Training) -> Any:
        net = build_model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        pace = parameter_server.parameter_server(
            net, optimizer, "asp", num_servers=2, scheduler=schedule, scheduler_samples=NUM_SAMPLES, run_dir=tmp_path
        )
        loader = pace.data(dataset(), batch_size=BATCH)
        for _ in range(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
        pace.close()
        return optimizer.param_groups[0]["lr"] if rank > 2 else None

    outcomes = run_local_with_store(halving, 5)
    assert outcomes[3:] == [0.025, 0.025]


def run_local_with_store(function: Any, num_ranks: int) -> list[Any]:
    from paceline.act.local import run_local

    outcomes = run_local(function, num_ranks, Training(), timeout_s=80.0)
    assert [outcome.error for outcome in outcomes] == [None] * num_ranks
    return [outcome.value for outcome in outcomes]


def test_batch_statistics_are_those_of_all_workers(tmp_path: Path) -> None:
    def normalised() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def statistics(rank: int, job: Training) -> Any:
        net = normalised()
        end = train(rank, replace(job, build=lambda: net, options={"run_dir": tmp_path}))
        assert end.num_samples or rank > 2
        return net[1].running_mean.numpy().copy(), int(net[1].num_batches_tracked)  # type: ignore[union-attr, operator]

    values = run_local_with_store(statistics, 5)[:3]
    assert all((mean == values[0][0]).all() and count == 2 * NUM_SAMPLES // (3 * BATCH) for mean, count in values)
    assert np.abs(values[0][0]).max() > 0


def test_a_gradient_that_is_not_finite_is_dropped_and_counted(tmp_path: Path) -> None:
    def sometimes_infinite(rank: int, job: Training) -> Any:
        def build() -> nn.Module:
            net = build_model()
            calls = [0]

            def poison(grad: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                return grad * float("nan") if rank == 1 and calls[0] == 3 else grad

            next(net.parameters()).register_hook(poison)
            return net

        return train(rank, replace(job, build=build, options={"run_dir": tmp_path})).params[0]

    values = run_local_with_store(sometimes_infinite, 5)
    assert all(np.isfinite(value).all() for value in values)
    assert counted(tmp_path) == {"trained": 2 * NUM_SAMPLES - BATCH, "dropped": BATCH, "epochs": 2}


def test_a_scaled_loss_trains_the_same(tmp_path: Path) -> None:
    def scaled(_rank: int, _job: Training) -> Any:
        net = build_model()
        optimizer = build_optimizer("sgd", net)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        pace = parameter_server.parameter_server(
            net, optimizer, "bsp", num_servers=2, scaler=scaler, run_dir=tmp_path, bucket_mb=0.004
        )
        for inputs, labels in pace.data(dataset(), batch_size=BATCH):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        pace.close()
        return [p.detach().numpy().copy() for p in net.parameters()]

    values = run_local_with_store(scaled, 5)
    alone = trained_alone(Training(num_epochs=1))
    assert max(float(abs(a - b).max()) for a, b in zip(values[0], alone, strict=True)) < 1e-6


def test_parameters_without_a_gradient_and_frozen_ones_stay(tmp_path: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused, self.frozen = nn.Linear(20, 5), nn.Linear(20, 5), nn.Linear(20, 5)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + self.frozen(x)

    def partly(rank: int, job: Training) -> Any:
        net = Partly()
        before = net.unused.weight.detach().clone(), net.frozen.weight.detach().clone()
        train(rank, replace(job, build=lambda: net, options={"run_dir": tmp_path}))
        return bool((net.unused.weight == before[0]).all() and (net.frozen.weight == before[1]).all())

    assert run_local_with_store(partly, 5)[:3] == [True] * 3


@dataclass(frozen=True)
class Flipper:
    """Decides on another mode after every few updates, whatever it sees."""

    lr_rule: str = "linear"

    def init(self) -> int:
        return 0

    def step(self, state: int, seen: Any) -> tuple[int, tuple[Any, ...]]:
        if not isinstance(seen, Update) or seen.version % 2:
            return state, ()
        policy = (ASP(), BSP(), KSync(2, "cancel"), KAsync(2), GroupSync(((0, 2), (1,))))[state % 5]
        return state + 1, (Plan(state + 1, seen.version + 2, policy, 1.0, 1.0, "because it is a test"),)


def test_a_hundred_changes_of_mode_leak_nothing(tmp_path: Path) -> None:
    def flipping(rank: int, job: Training) -> Any:
        parameter_server.live_controller = lambda *_: Flipper()  # type: ignore[assignment]
        sizes: list[int] = []
        original = chief.Chief._switch

        def switch(self: chief.Chief, plan: Plan) -> None:
            original(self, plan)
            sizes.append(psutil.Process().memory_info().rss)

        chief.Chief._switch = switch  # type: ignore[method-assign]
        before = threading.active_count()
        train(rank, replace(job, mode="auto", num_epochs=30, options={"run_dir": tmp_path}))
        time.sleep(0.5)
        return sizes, threading.active_count() - before

    values = run_local_with_store(flipping, 5)
    sizes, _ = values[3]
    assert len(sizes) >= 100
    assert sizes[-1] - sizes[len(sizes) // 4] < 4 * 2**20
    samples = counted(tmp_path)
    assert samples["trained"] + samples["dropped"] == 30 * NUM_SAMPLES
    adopted = [line for line in read(tmp_path) if line.kind == "plan" and line.data["status"] == "adopted"]
    assert len(adopted) == len(sizes)
    assert all(threads <= 2 for _, threads in values[:3]), "links end with the training"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sometimes"}, "unknown policy"),
        ({"mode": LocalSGD(4)}, "cannot be carried out"),
        ({"mode": Zeno()}, "cannot be carried out"),
        ({"num_servers": 0}, "num_servers must be >= 1"),
        ({"num_servers": 2}, "must leave a worker"),
        ({"wire_dtype": "float8"}, "wire_dtype"),
        ({"snapshot_every": 0}, "snapshot_every"),
        ({"bucket_mb": 0.0}, "bucket_mb"),
        ({"lr_rule": "cubic"}, "lr_rule"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_anything_starts(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_server, "_rendezvous", lambda: (None, 0, 2))
    net = build_model()
    with pytest.raises(ConfigError, match=message):
        parameter_server.parameter_server(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
