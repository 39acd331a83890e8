"""Thousands of all-reduces with random delays, sizes, types, splits and late ranks: no mismatch, no hang, flat memory.

Every result is compared with the exact sum of integer-valued data on every rank, which includes that all ranks hold
the same. Prints JSON; leaves with exit code 1 when something is wrong:

    python bench/executor_soak.py --calls 10000
"""

from __future__ import annotations

import json
import random
import time
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track

from paceline.act.executor import DTYPES, CollectivePlan, Executor
from paceline.act.local import run_local
from paceline.collective.late import around_one

MAX_NUMEL = 40_000
WARMUP_SHARE = 0.1  # the buffers of all types have their full size by then


def soak(rank: int, num_ranks: int, num_calls: int, seed: int) -> dict[str, Any]:
    """Run all calls on one rank; stop at the first wrong result."""
    executor = Executor(dist.distributed_c10d._get_default_store(), rank, range(num_ranks), timeout_s=60.0)
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    process = psutil.Process()
    memory_mb: list[float] = []
    longest_s = 0.0
    for number in track(range(num_calls), "calls", console=Console(stderr=True), disable=rank != 0):
        late = shared.randrange(num_ranks)
        num_chunks = shared.choice([num_ranks - 1, 2 * (num_ranks - 1), 7, 16])
        max_numel = shared.choice([None, None, shared.randrange(MAX_NUMEL)])
        numel = shared.choice([0, 1, num_ranks - 1, shared.randrange(100), shared.randrange(MAX_NUMEL)])
        dtype, op = shared.choice(DTYPES), shared.choice(["sum", "avg"])
        executor.use(CollectivePlan(around_one(num_ranks, late, num_chunks), max_numel, shared.choice([1, 2, 3])))
        base = torch.arange(numel) % 5 - 2
        tensor = (base * (rank + 1)).to(dtype)
        expected = (base * (num_ranks * (num_ranks + 1) // 2)).to(dtype)
        if op == "avg":
            expected /= num_ranks
        who = late if own.random() < 0.7 else own.randrange(num_ranks)  # mostly the predicted one comes last
        time.sleep(own.choice([0.0, 0.0, 0.002, 0.01]) if who == rank else 0.0)
        start = time.monotonic()
        executor.all_reduce(tensor, op)
        longest_s = max(longest_s, time.monotonic() - start)
        if not torch.equal(tensor, expected):
            raise AssertionError(f"call {number} gave a wrong result on rank {rank}")
        if number % max(1, num_calls // 50) == 0:
            memory_mb.append(process.memory_info().rss / 2**20)
    settled = memory_mb[int(len(memory_mb) * WARMUP_SHARE) :]
    return {"memory_mb": (settled[0], settled[len(settled) // 2], settled[-1]), "longest_s": longest_s}


def main(
    calls: Annotated[int, typer.Option(help="All-reduces.")] = 10_000,
    ranks: Annotated[int, typer.Option(help="Processes, >= 4.")] = 4,
    seed: Annotated[int, typer.Option(help="Of sizes, ranks and delays.")] = 0,
    limit_mb: Annotated[float, typer.Option(help="Growth of a rank's memory that counts as flat.")] = 10.0,
    timeout_s: Annotated[float, typer.Option(help="Longer counts as a hang.")] = 1800.0,
) -> None:
    """Soak and print."""
    start = time.monotonic()
    outcomes = run_local(soak, ranks, ranks, calls, seed, timeout_s=timeout_s)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    memory = [[round(mb, 1) for mb in outcome.value["memory_mb"]] for outcome in outcomes if outcome.value]
    growth = [round(last - first, 1) for first, _, last in memory]
    result = {
        "calls": calls,
        "ranks": ranks,
        "seconds": round(time.monotonic() - start, 1),
        "failed_ranks": len(failed),
        "memory_mb_after_warmup_half_way_at_end": memory,
        "memory_growth_mb": growth,
        "longest_call_s": max(
            (round(outcome.value["longest_s"], 3) for outcome in outcomes if outcome.value), default=None
        ),
    }
    print(json.dumps(result, indent=2))
    if failed:
        raise SystemExit(failed[0])
    if max(growth) > limit_mb:
        raise SystemExit(f"memory grew by {max(growth)} MB, more than {limit_mb} MB")


if __name__ == "__main__":
    typer.run(main)
