"""Promise one: with Paceline observing, or acting with everybody in the ring, training is bit for bit plain DDP's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net, accumulating_step, train_fixed
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.act.local import run_local

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.beside]


def joined_train(rank: int, mode: str | None, run_dir: Path) -> Any:
    """Ranks with 3 and 5 batches, under torch's Join."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    pace = paceline.attach(ddp, optimizer, mode=mode, run_dir=run_dir) if mode else None
    generator = torch.Generator().manual_seed(rank)
    with Join([ddp]):
        for _ in range(3 + 2 * (rank % 2)):
            optimizer.zero_grad()
            ddp(torch.randn(4, 8, generator=generator)).square().sum().backward()
            optimizer.step()
    if pace is not None:
        pace.close()
    return [p.detach().sum().item() for p in ddp.parameters()]


def scaled_step(scaler: torch.amp.GradScaler, ddp: Any, optimizer: Any, x: Tensor, y: Tensor, step: int) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y) * (float("inf") if step == 4 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # skips step 4 on every rank
    scaler.update()


def scaled_train(rank: int, mode: str | None, run_dir: Path) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return train_fixed(rank, mode, run_dir, Net, partial(scaled_step, scaler)), scaler.get_scale()


CASES: dict[str, Callable[[int, str | None, Path], Any]] = {
    "plain": partial(train_fixed, build=Net),
    "batch_norm": partial(train_fixed, build=partial(Net, batch_norm=True)),
    "unused_parameters": partial(
        train_fixed, build=partial(Net, unused=True), ddp_args={"find_unused_parameters": True}
    ),
    "several_dtypes": partial(train_fixed, build=partial(Net, double=True)),
    "bucket_view": partial(train_fixed, build=Net, ddp_args={"gradient_as_bucket_view": True}),
    "static_graph": partial(train_fixed, build=Net, ddp_args={"static_graph": True}),
    "no_sync": partial(train_fixed, build=Net, step_fn=accumulating_step),
    "adam": partial(train_fixed, build=Net, optimizer_fn=lambda p: torch.optim.Adam(p, lr=0.01)),
    "compiled": partial(train_fixed, build=Net, wrap=lambda m: torch.compile(m, backend="eager")),
    "join": joined_train,
    "grad_scaler": scaled_train,
}


@pytest.mark.parametrize("mode", ["observe", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_ddp(case: str, mode: str, tmp_path: Path) -> None:
    # Three ranks: a third is not a power of two, so the order of scaling and summing shows in the bits.
    plain = run_local(CASES[case], 3, None, tmp_path / "plain")
    paced = run_local(CASES[case], 3, mode, tmp_path / mode)
    assert [o.error for o in plain + paced] == [None] * 6
    assert [o.value for o in paced] == [o.value for o in plain]


def leased_train(_rank: int, run_dir: Path) -> list[tuple[int, ...]]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with paceline.attach(ddp, optimizer, mode="auto", run_dir=run_dir) as pace:
        loader = pace.data(TensorDataset(torch.arange(47.0).unsqueeze(1)), batch_size=4, seed=5)
        seen = []
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
                seen.append(tuple(int(v) for v in x.flatten()))
    return seen


def test_leases_are_the_distributed_samplers_batches_without_its_repeats(tmp_path: Path) -> None:
    outcomes = run_local(leased_train, 3, tmp_path)
    assert [o.error for o in outcomes] == [None] * 3
    for epoch in range(2):
        order = torch.randperm(47, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        per_epoch = len(outcomes[0].value) // 2
        batches = [o.value[epoch * per_epoch : (epoch + 1) * per_epoch] for o in outcomes]
        assert [batches[r][0] for r in range(3)] == [tuple(order[r:12:3]) for r in range(3)]
        assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(47))
