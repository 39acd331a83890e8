"""How fast the simulator is: policy events per second, a thousand ranks, and how the cost grows. Prints JSON.

python bench/sim.py

Timing only, and no two transfers share a NIC. A policy event is an arrival that a policy is fed.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.decide.baselines import Fixed
from paceline.decide.rehearse import Arch
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.stale import ASP, SSP
from paceline.sim.cluster import Cluster, Host, Stop, Workload
from paceline.sim.world import simulate
from paceline.types import Rank

NIC = Host(in_bytes_per_s=1.25e9, out_bytes_per_s=1.25e9)


@dataclass(frozen=True)
class Cheap:
    """Every rank's every step takes up to half as long again, at next to no cost: what is timed is the simulator."""

    num_ranks: int
    name: str = "cheap"
    has_stragglers: bool = False

    def slowdown(self, rank: Rank, step: int, now_s: float) -> float:  # noqa: ARG002 - by rank and step alone
        """A factor in 1..1.5."""
        return 1.0 + (rank * 7919 + step * 104729) % 1000 / 2000


def run(
    arch: Arch, policy: SyncPolicy[Any], num_ranks: int, num_steps: int, host: Host | None = None
) -> dict[str, Any]:
    """Simulate so many steps of all ranks; what that cost in CPU time."""
    cluster = Cluster.uniform(arch, num_ranks, host)
    workload = Workload(step_s=0.1, batch_size=1, model_bytes=1e8 if host else 0.0)
    begun = time.process_time()
    result = simulate(cluster, workload, Cheap(num_ranks), Fixed(policy), Stop(samples=num_ranks * num_steps))
    cpu_s = time.process_time() - begun
    events = result.num_gradients + result.samples_dropped
    return {
        "arch": arch,
        "policy": repr(policy),
        "num_ranks": num_ranks,
        "num_steps": num_steps,
        "cpu_s": round(cpu_s, 2),
        "policy_events": events,
        "policy_events_per_s": round(events / cpu_s),
        "virtual_s": round(result.virtual_s, 3),
    }


def main(
    steps: Annotated[int, typer.Option(help="Steps of the run of 1,024 ranks.")] = 1000,
    growth_arrivals: Annotated[int, typer.Option(help="Arrivals of each run of the growth.")] = 200_000,
) -> None:
    """Run all of it."""
    rates = [
        run("ring", BSP(), 64, 2000),
        run("ring", KSync(48), 64, 2000),
        run("ps", ASP(), 64, 2000),
        run("ps", SSP(4), 64, 2000),
    ]
    growth = [run("ring", BSP(), n, growth_arrivals // n, NIC) for n in (256, 512, 1024, 2048, 4096)]
    first, last = (row["cpu_s"] / row["policy_events"] for row in (growth[0], growth[-1]))
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "rates": rates,
                "a_thousand_ranks": run("ring", BSP(), 1024, steps, NIC),
                "growth": growth,
                "cost_per_event_4096_over_256": round(last / first, 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    typer.run(main)
