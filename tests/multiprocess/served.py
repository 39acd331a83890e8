"""A job with parameter servers whose processes can be killed, stopped, resumed and started anew, one by one."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when built: seconds, better spent once here than in every child
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline.report.charts  # noqa: F401 - likewise
from paceline.act.parameter_server import parameter_server
from paceline.decide.ledger import Ledger

NUM_SAMPLES, BATCH = 240, 8
Plant = Callable[[], None]


@dataclass(frozen=True)
class Training:
    """What every rank of a test job does."""

    mode: Any = "bsp"
    num_workers: int = 3
    num_servers: int = 2
    num_epochs: int = 2
    optimizer: str = "sgd"
    step_s: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)  # extra seconds per step, by rank
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class End:
    """How a rank ended: its trained samples and final parameters, or an error."""

    num_samples: int = 0
    params: tuple[Any, ...] = ()
    error: str | None = None
    error_type: str | None = None
    seconds: float = 0.0


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 5))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def build_optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=0.005)


def train(rank: int, job: Training) -> End:
    """The user's script."""
    net = (job.build or build_model)()
    optimizer = build_optimizer(job.optimizer, net)
    options = {"bucket_mb": 0.004, "peer_timeout_s": 1.5, **job.options}
    pace: Any = parameter_server(net, optimizer, job.mode, num_servers=job.num_servers, **options)
    loader = pace.data(dataset(), batch_size=BATCH, seed=0)
    num_samples = 0
    for _epoch in range(job.num_epochs):
        for number, (inputs, labels) in enumerate(loader, start=1):
            if number % job.accumulate == 1 or job.accumulate == 1:
                optimizer.zero_grad()
            time.sleep(job.step_s + job.slow.get(rank, 0.0))
            accumulates = number % job.accumulate != 0
            with pace.no_sync() if accumulates else contextlib.nullcontext():
                (F.cross_entropy(net(inputs), labels) / job.accumulate).backward()
            if not accumulates:
                optimizer.step()
            num_samples += len(labels)
    pace.close()
    return End(num_samples, tuple(p.detach().numpy().copy() for p in net.parameters()))


class Job:
    """Processes of one training, forked from here; the store has a process of its own, so that any of them may die."""

    def __init__(self, training: Training, run_dir: Path) -> None:
        self.training = training
        self.run_dir = run_dir
        self.world_size = training.num_workers + training.num_servers
        self._pipes: dict[int, Connection] = {}
        self._context = multiprocessing.get_context("fork")
        told, tell = self._context.Pipe(duplex=False)
        # Not a thread of this process: what it holds when ranks are forked they would hold for ever.
        self._processes = {-1: self._context.Process(target=_host_store, args=(tell,))}
        self._processes[-1].start()
        self._port = told.recv()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()

    def start(self, *ranks: int, plant: dict[int, Plant] | None = None) -> None:
        """Start these ranks, all of them by default; what is planted runs first in its rank."""
        torch.set_num_threads(1)
        for rank in ranks or range(self.world_size):
            self._pipes[rank], end = self._context.Pipe(duplex=False)
            process = self._context.Process(target=self._run, args=(rank, end, (plant or {}).get(rank)))
            process.start()
            end.close()
            self._processes[rank] = process

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[rank].pid, number)

    def when(self, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "what the test waits for did not come"
            time.sleep(0.005)

    def is_gone(self, rank: int) -> bool:
        return not self._processes[rank].is_alive()

    def is_stopped(self, rank: int) -> bool:
        return Path(f"/proc/{self._processes[rank].pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def end(self, *ranks: int, timeout_s: float = 45.0) -> dict[int, End]:
        """How these ranks ended, all by default; a rank that did not has an error that says so."""
        deadline = time.monotonic() + timeout_s
        ends = {}
        for rank in ranks or range(self.world_size):
            pipe = self._pipes[rank]
            try:
                ends[rank] = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else End(error="hangs")
            except EOFError:
                ends[rank] = End(error="ended without a word")
        return ends

    def _run(self, rank: int, pipe: Connection, plant: Plant | None) -> None:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(self.world_size), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._port), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        logging.getLogger("paceline").setLevel(logging.CRITICAL)
        begin = time.monotonic()
        if plant is not None:
            plant()
        training = self.training
        training.options.setdefault("run_dir", self.run_dir)
        try:
            end = train(rank, training)
        except BaseException as error:
            seconds = time.monotonic() - begin
            end = End(error=traceback.format_exc(), error_type=type(error).__name__, seconds=seconds)
        pipe.send(end)
        pipe.close()
        os._exit(0)


def _host_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def run(training: Training, run_dir: Path) -> dict[int, End]:
    """All ranks from beginning to end, without faults."""
    return run_planted(training, run_dir, {})


def run_planted(training: Training, run_dir: Path, plant: dict[int, Plant]) -> dict[int, End]:
    """Likewise, with something planted in some ranks that is no fault."""
    with Job(training, run_dir) as job:
        job.start(plant=plant)
        ends = job.end()
    errors = [end.error for end in ends.values() if end.error]
    assert not errors, "\n".join(errors)
    return ends


def trained_alone(training: Training) -> list[Any]:
    """The same training in one process: every update is the large batch of all workers."""
    net = (training.build or build_model)()
    optimizer = build_optimizer(training.optimizer, net)
    inputs, labels = dataset().tensors
    order = [
        index
        for epoch in range(training.num_epochs)
        for index in torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    ]
    ledger = Ledger(NUM_SAMPLES, BATCH)
    while True:
        batch: list[int] = []
        for rank in range(training.num_workers):
            for _ in range(training.accumulate):
                ledger, lease = ledger.take(rank, BATCH)
                if lease is not None and lease.epoch < training.num_epochs:
                    batch += [order[lease.epoch * NUM_SAMPLES + position] for position in lease.positions]
            ledger = ledger.settle(rank, trained=True)
        if not batch:
            return [p.detach().numpy() for p in net.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        optimizer.step()
