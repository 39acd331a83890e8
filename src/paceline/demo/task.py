"""The demo's training job: turns a configuration into one rank's training of a small CNN on scikit-learn's digits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.act.attach import Pace, attach
from paceline.act.parameter_server import parameter_server
from paceline.demo.faults import Faults, SlowDataset, StandIn
from paceline.types import FaultPlan

NUM_TRAIN, NUM_TEST = 1280, 517
LR_MILESTONES, LR_FACTOR = (10, 12), 0.2  # after so many epochs the rate is a fifth of what it was


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One training run.

    Args:
        system: "ddp", or DDP with Paceline in the mode "observe", "suggest" or "auto"; with servers their mode: "auto"
            or the name of a policy.
        run_dir: Where Paceline's log goes; None for plain DDP.
        faults: What is planted.
        num_epochs: Passes over the 1,280 training samples.
        batch_size: Samples per rank and step.
        lr: Of Adam, tuned once for plain DDP with four ranks; a fifth after 10 and again after 12 epochs.
        seed: Of initial parameters and order.
        step_s: Paced time of a step, seconds: a third in forward, the rest in backward.
        recorder: The rank whose parameters are kept at every step for the accuracy curve.
        num_servers: How many of the ranks, the last ones, are parameter servers.
        milestones: Epochs after which the rate is a fifth of what it was.
    """

    system: str
    run_dir: Path | None = None
    faults: FaultPlan = field(default_factory=FaultPlan)
    num_epochs: int = 14
    batch_size: int = 32
    lr: float = 0.004
    seed: int = 0
    step_s: float = 0.04
    recorder: int = 0
    num_servers: int = 0
    milestones: tuple[int, ...] = LR_MILESTONES


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one rank brings home: when it had which accuracy (recorder only), and how many samples it trained."""

    times_s: tuple[float, ...]
    accuracies: tuple[float, ...]
    num_samples: int
    final_accuracy: float


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training set, and images and labels of the test set; the same split always."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[NUM_TEST:], labels[NUM_TEST:]), images[:NUM_TEST], labels[:NUM_TEST]


def build_model(seed: int, stand_in: nn.Module) -> nn.Module:
    """Return the CNN (38 k parameters), the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        stand_in,
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(rank: int, config: TaskConfig, progress: Synchronized[int] | None = None) -> TaskResult:
    """Train on this rank as `config` says; the process group is up already."""
    faults = Faults(config.faults, rank)
    dataset, test_images, test_labels = digits()
    model = build_model(config.seed, StandIn(faults, config.step_s / 3, config.step_s * 2 / 3))
    net = DistributedDataParallel(model) if not config.num_servers else model
    optimizer = torch.optim.Adam(net.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=list(config.milestones), gamma=LR_FACTOR)
    loader, pace, sampler = _loader(config, net, optimizer, schedule, SlowDataset(dataset, faults))
    times: list[float] = []
    snapshots: list[list[Tensor]] = []
    num_samples = 0
    dist.barrier()
    start = time.perf_counter()

    def record(*_: Any) -> None:
        times.append(time.perf_counter() - start)
        snapshots.append([p.detach().clone() for p in model.parameters()])

    records = rank == config.recorder
    # With servers a step's parameters are there when the next forward pass begins, and not before.
    hook = model.register_forward_pre_hook(record) if records and config.num_servers else None
    for epoch in range(config.num_epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
            num_samples += len(labels)
            if records and hook is None:
                record()
            if records and progress is not None:
                progress.value += 1
            faults.next_step()
        if not config.num_servers:
            schedule.step()
    if pace is not None:
        pace.close()
    if hook is not None:
        hook.remove()
        record()
    final = _accuracy(model, test_images, test_labels)
    accuracies = []
    for snapshot in snapshots:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), snapshot, strict=True):
                parameter.copy_(value)
        accuracies.append(_accuracy(model, test_images, test_labels))
    return TaskResult(tuple(times), tuple(accuracies), num_samples, final)


def _loader(
    config: TaskConfig, net: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, dataset: SlowDataset
) -> tuple[Any, Pace | None, DistributedSampler[Any] | None]:
    if config.num_servers:
        pace = parameter_server(
            net, optimizer, config.system, num_servers=config.num_servers, scheduler=schedule,
            scheduler_samples=NUM_TRAIN, run_dir=config.run_dir,
        )  # fmt: skip
        return pace.data(dataset, batch_size=config.batch_size, seed=config.seed), pace, None
    if config.system == "ddp":
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=config.seed)
        return DataLoader(dataset, batch_size=config.batch_size, sampler=sampler), None, sampler
    pace = attach(net, optimizer, mode=config.system, run_dir=config.run_dir)  # type: ignore[arg-type]
    return pace.data(dataset, batch_size=config.batch_size, seed=config.seed), pace, None


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        hits = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(hits)
