"""All-reduce around a late rank, in the shaped-network lab: time from its arrival to the last completion.

Native Gloo, our ring over point-to-point messages, the late schedule for the whole buffer, and the split mode, on the
same processes in interleaved rounds of changing order. One host has one clock, so the ranks' times may be compared.
The ratios to native are medians of per-round ratios; the port limit is bytes · 8 / rate for the late schedule. Needs
root; says "skipped" without.


    python bench/allreduce.py --ranks 8 --size-mb 64 --delay-ratio 1.3
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track

from netlab import Lab, skip_or
from paceline.act.executor import CollectivePlan, Executor
from paceline.act.local import run_local
from paceline.collective.classic import ring
from paceline.collective.late import around_one
from paceline.collective.schedule import ListedSchedule

ALGORITHMS = ("native", "ring", "late", "split")
# K per lane that came out best at 64 MB and 400 Mbit/s; time changes little around it.
CHUNKS = {4: 72, 5: 96, 6: 120, 7: 144, 8: 168}
GOODPUT = 0.956  # of the port's rate, for TCP; measured by netlab.py
LEAD_S = 0.15


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured in one row, for all algorithms.

    Args:
        size_mb: Buffer, 10^6 bytes.
        delay_ratio: How long after the others the late rank comes, in T_RS, the early reduce-scatter's time; >= 0.
        wrong_rank: Whether another rank than the predicted one is late; with a delay of 0, nobody is.
        predicted_ratio: The gap that the split mode expects, in T_RS.
        num_chunks: K, of each lane.
        num_lanes: Parts of the buffer that go through the schedule side by side.
    """

    size_mb: float
    delay_ratio: float
    wrong_rank: bool
    predicted_ratio: float
    num_chunks: int
    num_lanes: int


def chunks_for(num_ranks: int, size_mb: float) -> int:
    """K by the rule sqrt(bytes), from what came out best at 64 MB; a multiple of n - 1."""
    best = CHUNKS.get(num_ranks, 24 * (num_ranks - 1))
    return max(1, round(best * (size_mb / 64) ** 0.5 / (num_ranks - 1))) * (num_ranks - 1)


def early_time_s(num_ranks: int, size_mb: float, rate_mbit: float) -> float:
    """T_RS by the port model: (n-2)/(n-1) of the bytes at the rate that TCP gets."""
    return (num_ranks - 2) / (num_ranks - 1) * size_mb * 8 / (rate_mbit * GOODPUT)


def plans(num_ranks: int, setting: Setting, predicted: int) -> dict[str, CollectivePlan]:
    """The plan behind every algorithm."""
    numel = int(setting.size_mb * 1e6 / 4)
    late = around_one(num_ranks, predicted, setting.num_chunks)
    plain = ring(num_ranks)
    ours = ListedSchedule("our ring", num_ranks, plain.num_chunks, plain.num_shards, plain.steps)
    # Only as many bytes as have an early reduce-scatter that fills the predicted gap, in as large chunks as before.
    part = min(1.0, setting.predicted_ratio)
    blocks = max(1, round(setting.num_chunks * part / (num_ranks - 1)))
    split = around_one(num_ranks, predicted, blocks * (num_ranks - 1))
    return {
        "native": CollectivePlan(),
        "ring": CollectivePlan(ours, num_lanes=1),
        "late": CollectivePlan(late, num_lanes=setting.num_lanes),
        "split": CollectivePlan(split, int(numel * part), setting.num_lanes),
    }


def rank_main(
    rank: int, num_ranks: int, rate_mbit: float, settings: list[Setting], rounds: int, algorithms: list[str]
) -> list[dict[str, Any]]:
    """Run all calls on one rank; return one record per call and rank 0 also shows progress."""
    executor = Executor(dist.distributed_c10d._get_default_store(), rank, range(num_ranks), timeout_s=120.0)
    console = Console(stderr=True)
    predicted = num_ranks - 1
    calls = [
        (setting, number, algorithms[(number + position) % len(algorithms)])
        for setting in settings
        for number in range(rounds)
        for position in range(len(algorithms))
    ]
    records = []
    for setting, number, algorithm in track(calls, "calls", console=console, disable=rank != 0, auto_refresh=False):
        late = 0 if setting.wrong_rank else predicted
        delay_s = setting.delay_ratio * early_time_s(num_ranks, setting.size_mb, rate_mbit)
        executor.use(plans(num_ranks, setting, predicted)[algorithm])
        executor.settle()
        numel = int(setting.size_mb * 1e6 / 4)
        tensor = torch.full((numel,), float(rank))
        start = agreed_start()
        due = start + (delay_s if rank == late else 0.0)
        time.sleep(max(0.0, due - time.monotonic()))
        arrived = time.monotonic()
        executor.all_reduce(tensor)
        done = time.monotonic()
        assert bool((tensor == num_ranks * (num_ranks - 1) / 2).all()), f"wrong sum by {algorithm}"
        stamps = torch.zeros(num_ranks, 2, dtype=torch.float64)
        stamps[rank] = torch.tensor([arrived, done])
        dist.all_reduce(stamps)
        time_s = float(stamps[:, 1].max() - stamps[:, 0].max())
        steal = psutil.cpu_times().steal
        records.append({"setting": setting, "round": number, "algorithm": algorithm, "time_s": time_s, "steal": steal})
    return records


def agreed_start() -> float:
    """An instant a little ahead that all ranks take for the same, seconds on CLOCK_MONOTONIC."""
    now = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(now, op=dist.ReduceOp.MAX)
    return float(now) + LEAD_S


def rows_of(records: list[dict[str, Any]], num_ranks: int, rate_mbit: float) -> list[dict[str, Any]]:
    """One row per setting and algorithm."""
    times: dict[Setting, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        times[record["setting"]][record["algorithm"]].append(record["time_s"])
    rows = []
    for setting, by_algorithm in times.items():
        limit_s = setting.size_mb * 8 / rate_mbit
        for algorithm, values in by_algorithm.items():
            middle = median(values)
            native = by_algorithm.get("native")
            ratios = [ours / theirs for ours, theirs in zip(values, native, strict=True)] if native else []
            rows.append(
                {
                    "algorithm": algorithm,
                    "ranks": num_ranks,
                    "size_mb": setting.size_mb,
                    "delay_ratio": setting.delay_ratio,
                    "time_s": round(middle, 4),
                    "spread": round((max(values) - min(values)) / middle, 4),
                    "ratio_to_native": round(median(ratios), 4) if ratios else None,
                    "ratio_to_port_limit": round(middle / limit_s, 4),
                    "rate_mbit": rate_mbit,
                    "wrong_rank": setting.wrong_rank,
                    "predicted_ratio": setting.predicted_ratio if algorithm == "split" else None,
                    "num_chunks": setting.num_chunks if algorithm in ("late", "split") else None,
                    "num_lanes": setting.num_lanes if algorithm in ("late", "split") else None,
                    "rounds": len(values),
                    "ratio_low_high": [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None,
                }
            )
    return rows


def measure(
    num_ranks: int, rate_mbit: float, settings: list[Setting], rounds: int, algorithms: list[str], timeout_s: float
) -> list[dict[str, Any]]:
    """Measure the settings on fresh processes in a fresh lab."""
    with Lab(num_ranks, rate_mbit) as lab:
        outcomes = run_local(
            rank_main,
            num_ranks,
            num_ranks,
            rate_mbit,
            settings,
            rounds,
            algorithms,
            prepare=lab.entrance(),
            timeout_s=timeout_s,
        )
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise SystemExit(f"a rank failed: {failed[0]}")
    return rows_of(outcomes[0].value, num_ranks, rate_mbit)


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(item) for item in text.split(",")]


def main(
    ranks: Annotated[str, typer.Option(help="World sizes, comma-separated.")] = "8",
    size_mb: Annotated[str, typer.Option(help="Buffer sizes, 10^6 bytes, comma-separated.")] = "64",
    rate_mbit: Annotated[str, typer.Option(help="Port rates, Mbit/s, comma-separated.")] = "400",
    delay_ratio: Annotated[str, typer.Option(help="Delays of the late rank, in T_RS, comma-separated.")] = "1.3",
    wrong_rank: Annotated[bool, typer.Option(help="Another rank than the predicted one is late.")] = False,
    predicted_ratio: Annotated[float, typer.Option(help="The gap that split mode expects, in T_RS.")] = 0.5,
    chunks: Annotated[int, typer.Option(help="K of a lane; 0 takes what suits the size.")] = 0,
    lanes: Annotated[int, typer.Option(help="Parts of the buffer side by side.")] = 2,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 5,
    algorithms: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ALGORITHMS),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Per world size and rate.")] = 1800.0,
) -> None:
    """Measure and print."""

    def run() -> None:
        rows: list[dict[str, Any]] = []
        for n in (int(n) for n in ranks.split(",")):
            for rate in numbers(rate_mbit):
                settings = [
                    Setting(size, delay, wrong_rank, predicted_ratio, chunks or chunks_for(n, size), lanes)
                    for size in numbers(size_mb)
                    for delay in numbers(delay_ratio)
                ]
                rows += measure(n, rate, settings, rounds, algorithms.split(","), timeout_s)
        if not as_json:
            for row in rows:
                print(
                    f"{row['algorithm']:7s} n={row['ranks']} {row['size_mb']:g} MB delay {row['delay_ratio']:g}: "
                    f"{row['time_s']:.3f} s, {row['ratio_to_native']} of native, spread {row['spread']:.1%}"
                )
        else:
            print(json.dumps({"rows": rows}, indent=2))

    skip_or(run)


if __name__ == "__main__":
    typer.run(main)
