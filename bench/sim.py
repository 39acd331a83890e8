"""How fast the simulator is: policy events and gradients per second, a thousand ranks, growth. Prints JSON.

python bench/sim.py

All in CPU time of one core. Events are timed without gradients, and no two transfers share a NIC; a policy event is an
arrival that a policy is fed. A gradient is one of the digits MLP, of sixteen samples, update by update: eight at one
version as BSP makes them, and one for each as ASP does. Of three runs the fastest counts: others may use the machine.
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
from paceline.policy.base import SyncPolicy
from paceline.policy.catalog import parse
from paceline.sim.cluster import Cluster, Host, Stop, Workload
from paceline.sim.tasks import DIGITS
from paceline.sim.training import Contribution, TaskLearner
from paceline.sim.world import simulate
from paceline.types import Rank

SLOW = ";".join(f"{rank}>{rank - 48}" for rank in range(48, 64))
RATES: tuple[tuple[Arch, str], ...] = (
    ("ring", "bsp"),
    ("ring", "ksync:48"),
    ("ring", f"ring:{'-'.join(map(str, range(48)))};{SLOW}"),
    ("ring", "local:4"),
    ("ps", "ksync:48:join_next"),
    ("ps", "deadline:0.1"),
    ("ps", "asp"),
    ("ps", "ssp:4"),
    ("ps", "kasync:32"),
    ("ps", "zeno"),
)
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


def fastest(arch: Arch, name: str, num_steps: int) -> dict[str, Any]:
    """The best of three runs of 64 ranks under the policy of this name."""
    policy = parse(name, 64)
    return max((run(arch, policy, 64, num_steps) for _ in range(3)), key=lambda row: row["policy_events_per_s"])


def gradients_per_s(per_update: int, num_updates: int) -> int:
    """Gradients of the digits MLP, with the updates that they make; the best of three runs."""
    rates = []
    for _ in range(3):
        learner = TaskLearner(DIGITS, noise_every=num_updates + 1)
        begun = time.process_time()
        for version in range(num_updates):
            draws = [(rank, learner.draw(rank, DIGITS.batch_size)) for rank in range(per_update)]
            learner.update([Contribution(rank, version, (draw,)) for rank, draw in draws], 1.0)
            learner.forget(version + 1)
        rates.append(per_update * num_updates / (time.process_time() - begun))
    return round(max(rates))


def main(
    steps: Annotated[int, typer.Option(help="Steps of the run of 1,024 ranks.")] = 1000,
    rate_steps: Annotated[int, typer.Option(help="Steps of each run of 64 ranks.")] = 1000,
    growth_arrivals: Annotated[int, typer.Option(help="Arrivals of each run of the growth.")] = 200_000,
) -> None:
    """Run all of it."""
    rates = [fastest(arch, name, rate_steps) for arch, name in RATES]
    growth = [run("ring", parse("bsp", n), n, growth_arrivals // n, NIC) for n in (256, 512, 1024, 2048, 4096)]
    first, last = (row["cpu_s"] / row["policy_events"] for row in (growth[0], growth[-1]))
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "rates": rates,
                "gradients_per_s": {"bsp": gradients_per_s(8, 1000), "asp": gradients_per_s(1, 8000)},
                "a_thousand_ranks": run("ring", parse("bsp", 1024), 1024, steps, NIC),
                "growth": growth,
                "cost_per_event_4096_over_256": round(last / first, 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    typer.run(main)
