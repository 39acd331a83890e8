"""What parameter servers make of the network: the step of BSP beside the ports' limit and a hand-written loop.

In the shaped-network lab, every rank behind a port of its own. A step is push and pull of the whole model by every
worker, with next to no computing, under BSP. Three ways, interleaved: `paceline`, `loop` (send and receive of the same
bytes, written out with torch.distributed), and `tree` (workers sum for each other before a server's port). The limit is
the bytes that the busiest port must pass one way and back, at the port's rate; TCP carries 95.5 % of that. Prints JSON:

    python bench/servers.py --workers 4 --servers 2 --size-mb 16            # throughput
    python bench/servers.py --workers 8 --servers 1 --size-mb 16 --tree     # a server's port is the bottleneck
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from netlab import Lab, skip_or
from paceline.act.local import run_local
from paceline.act.parameter_server import parameter_server
from paceline.record import read
from paceline.types import Update

LAYERS, WIDTH = 8, 16
WARMUP_STEPS = 3


class Wide(nn.Module):
    """Layers of so many parameters in all, side by side, that cost next to nothing to compute."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        size = num_elements // LAYERS // WIDTH
        self.layers = nn.ModuleList(nn.Linear(WIDTH, size, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


def served(_rank: int, servers: int, num_elements: int, steps: int, run_dir: Path, tree: bool, settle: int) -> None:
    """Train under BSP; times are in the run log."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    workers = dist.get_world_size() - servers
    net = Wide(num_elements)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    pace = parameter_server(
        net, optimizer, "bsp", num_servers=servers, run_dir=run_dir, bucket_mb=1.0, tree=tree, peer_timeout_s=30.0
    )
    for (x,) in pace.data(TensorDataset(torch.randn((settle + steps) * workers, WIDTH)), batch_size=1):
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()
    pace.close()


def looped(rank: int, servers: int, num_elements: int, steps: int) -> list[float]:
    """The same bytes in plain sends and receives; the durations of the steps, on a server."""
    workers = dist.get_world_size() - servers
    shard = num_elements // servers
    durations: list[float] = []
    if rank < workers:
        parts = [torch.zeros(shard) for _ in range(servers)]
        for _ in range(WARMUP_STEPS + steps):
            for direction in (dist.isend, dist.irecv):
                works = [direction(part, workers + server) for server, part in enumerate(parts)]
                for work in works:
                    work.wait()
        return []
    gradients = [torch.zeros(shard) for _ in range(workers)]
    parameters = torch.zeros(shard)
    for _ in range(WARMUP_STEPS + steps):
        began = time.monotonic()
        for work in [dist.irecv(gradient, worker) for worker, gradient in enumerate(gradients)]:
            work.wait()
        for gradient in gradients:
            parameters.add_(gradient, alpha=-1e-3 / workers)
        for work in [dist.isend(parameters, worker) for worker in range(workers)]:
            work.wait()
        durations.append(time.monotonic() - began)
    return durations[WARMUP_STEPS:]


def step_s(run_dir: Path, steps: int) -> float:
    """Median time between the last updates of a run."""
    at_s = [line.value.at_s for line in read(run_dir) if isinstance(line.value, Update)][-steps:]
    return median(b - a for a, b in pairwise(at_s))


def main(
    workers: Annotated[int, typer.Option(help="Processes that train.")] = 4,
    servers: Annotated[int, typer.Option(help="Processes that serve.")] = 2,
    size_mb: Annotated[float, typer.Option(help="Parameters, 10^6 bytes.")] = 16.0,
    rate_mbit: Annotated[float, typer.Option(help="Port rate, Mbit/s.")] = 400.0,
    steps: Annotated[int, typer.Option(help="Steps measured per block.")] = 8,
    rounds: Annotated[int, typer.Option(help="Alternations.")] = 3,
    tree: Annotated[bool, typer.Option(help="Compare with the tree as well.")] = False,
) -> None:
    """Measure and print JSON."""
    num_elements = round(size_mb * 1e6 / 4)
    nbytes_per_s = rate_mbit * 1e6 / 8
    limit_s = 2 * max(workers / servers, 1.0) * size_mb * 1e6 / nbytes_per_s

    def run() -> None:
        times: dict[str, list[float]] = {"paceline": [], "loop": [], **({"tree": []} if tree else {})}
        for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
            for system, values in times.items():
                with tempfile.TemporaryDirectory() as directory, Lab(workers + servers, rate_mbit) as lab:
                    if system == "loop":
                        arguments: Any = (looped, workers + servers, servers, num_elements, steps)
                    else:
                        settle = 12 if system == "tree" else WARMUP_STEPS
                        how = "auto" if system == "tree" else None
                        arguments = (
                            served,
                            workers + servers,
                            servers,
                            num_elements,
                            steps,
                            Path(directory),
                            how,
                            settle,
                        )
                    outcomes = run_local(*arguments, prepare=lab.entrance(), timeout_s=280.0)
                    failed = [o.error for o in outcomes if o.error]
                    if failed:
                        raise SystemExit(f"a rank failed: {failed[0]}")
                    values.append(
                        median(outcomes[workers].value) if system == "loop" else step_s(Path(directory), steps)
                    )
        medians = {system: median(values) for system, values in times.items()}
        print(
            json.dumps(
                {
                    "workers": workers,
                    "servers": servers,
                    "size_mb": size_mb,
                    "rate_mbit": rate_mbit,
                    "port_limit_s": round(limit_s, 4),
                    "step_s": {system: [round(s, 4) for s in values] for system, values in times.items()},
                    "share_of_port_limit": {system: round(limit_s / s, 3) for system, s in medians.items()},
                    "ratio_to_loop": {s: round(m / medians["loop"], 3) for s, m in medians.items() if s != "loop"},
                    "tree_ratio": round(medians["tree"] / medians["paceline"], 3) if tree else None,
                },
                indent=2,
            )
        )

    skip_or(run)


if __name__ == "__main__":
    typer.run(main)
