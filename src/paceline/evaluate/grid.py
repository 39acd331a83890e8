"""What is evaluated: turns names of traces, tasks and methods into what a simulated run needs. No clock, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.decide.baselines import BASELINES, Fixed
from paceline.decide.candidates import PARAMETER_SERVER, RING
from paceline.decide.controller import Controller
from paceline.decide.estimate import staleness_cost, staleness_limit
from paceline.decide.placement import choose_parents
from paceline.decide.plan import Decider
from paceline.decide.rehearse import Arch
from paceline.decide.selector import Selector
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, SSP, KAsync
from paceline.sim.cluster import Cluster, Host, Workload
from paceline.sim.families import FAMILIES
from paceline.sim.tasks import CHARS, DIGITS, MNIST1D, Task
from paceline.sim.trace import Trace
from paceline.types import Rank

NUM_RANKS: Final = 8  # as in STAR's evaluation: eight workers, one parameter server
STEP_S: Final = 0.5  # own time of a gradient where nobody is slow, virtual seconds
MODEL_BYTES: Final = 20e6  # on 10 Gbit/s: 28 ms for a ring of eight, 256 ms in and out of one server's port
HOST: Final = Host(cores=4.0, in_bytes_per_s=1.25e9, out_bytes_per_s=1.25e9)
ARCHS: Final[tuple[Arch, ...]] = ("ps", "ring")
TASKS: Final[Mapping[str, Task]] = {task.name: task for task in (DIGITS, MNIST1D, CHARS)}


@dataclass(frozen=True, slots=True)
class Situation:
    """A kind of stragglers.

    Args:
        name: For tables.
        family: One of `FAMILIES`.
        options: Its fields.
        split: "train" where the staleness cost was calibrated, "test" where it was not, "calm" without stragglers.
        slowdown: How much slower the slowest is, ratio; 1 where nobody is.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    split: str
    slowdown: float

    def trace(self, seed: int) -> Trace:
        """This kind of stragglers with one seed."""
        return FAMILIES[self.family](num_ranks=NUM_RANKS, seed=seed, **self.options)


SITUATIONS: Final[Mapping[str, Situation]] = {
    s.name: s
    for s in (
        Situation("calm", "calm", {}, "calm", 1.0),
        Situation("constant-2x", "constant", {"rank": 3, "slow_factor": 2.0}, "train", 2.0),
        Situation("constant-10x", "constant", {"rank": 3, "slow_factor": 10.0}, "train", 10.0),
        Situation("markov-4x", "markov", {"slow_factor": 4.0}, "train", 4.0),
        Situation("exponential", "exponential", {}, "train", 2.0),
        Situation("constant-4x", "constant", {"rank": 5, "slow_factor": 4.0}, "test", 4.0),
        Situation("throttled-10x", "throttled", {"rank": 2}, "test", 10.0),
        Situation("classes", "heterogeneous", {}, "test", 3.0),
        Situation("rotating-5x", "rotating", {"slow_factor": 5.0}, "test", 5.0),
        Situation("drifting-4x", "drifting", {"rank": 1}, "test", 4.0),
        Situation(
            "episodes", "episodes", {"mean_gap_s": 300.0, "mean_length_s": 100.0, "longest_s": 300.0}, "test", 4.0
        ),
        Situation("pareto", "pareto", {}, "test", 4.0),
    )
}


def cluster(arch: Arch) -> Cluster:
    """Eight ranks on a host each; in the parameter-server architecture one more host with the server."""
    return Cluster.uniform(arch, NUM_RANKS, HOST)


def workload(task: Task) -> Workload:
    """What a gradient of the task costs in virtual time."""
    return Workload(STEP_S, task.batch_size, MODEL_BYTES)


def auto(task: Task, arch: Arch, cost: float | None = None) -> Controller:
    """Our controller, with every mode that the architecture can carry out."""
    return Controller(
        hosts=tuple(f"host{rank}" for rank in range(NUM_RANKS)),
        batch_size=task.batch_size,
        lr_rule=LR_RULE,
        selector=Selector(families=PARAMETER_SERVER if arch == "ps" else RING),
        dwell_steps=8,
        fence_s=0.0,
        staleness_cost=staleness_cost_of(task) if cost is None else cost,
        staleness_limit=staleness_limit_of(task),
        arch=arch,
        fixed_ratio=0.2,
        waste_ratio=0.15,
        history_weight=0.5,
        smooths=False,
    )


def staleness_cost_of(task: Task) -> float:
    """The price of staleness under the task's optimizer, which grows with its momentum m as m / (1 - m).

    Example:
        >>> round(staleness_cost_of(DIGITS), 3), round(staleness_cost_of(MNIST1D), 3)
        (0.0, 0.54)
    """
    return staleness_cost(_momentum(task))


def staleness_limit_of(task: Task) -> float:
    """The mean staleness, in updates of the full batch, that leaves the final accuracy as it is: shrinks with momentum.

    Example:
        >>> round(staleness_limit_of(DIGITS), 3), round(staleness_limit_of(MNIST1D), 3)
        (3.0, 0.3)
    """
    return staleness_limit(_momentum(task))


def _momentum(task: Task) -> float:
    return float(getattr(task.optimizer, "momentum", getattr(task.optimizer, "beta1", 0.0)))


LR_RULE: Final = "linear"


def fixed_modes(situation: Situation, arch: Arch) -> dict[str, SyncPolicy[Any]]:
    """The fixed modes whose best is the truth that the selector is measured against."""
    half = NUM_RANKS // 2
    modes: dict[str, SyncPolicy[Any]] = {
        "bsp": BSP(),
        "ksync-7": KSync(NUM_RANKS - 1, "cancel"),
        "ksync-6": KSync(NUM_RANKS - 2, "cancel"),
        f"ksync-{half}": KSync(half, "cancel"),
    }
    if arch == "ps":
        modes |= {f"kasync-{x}": KAsync(x) for x in (half, NUM_RANKS - 2, NUM_RANKS - 1)}
        return {**modes, "asp": ASP(), "ssp-3": SSP(3)}
    trace = situation.trace(seed=0)
    mean: dict[Rank, float] = {
        rank: sum(trace.slowdown(rank, step, 2.0 * step) for step in range(100)) for rank in range(NUM_RANKS)
    }
    order = sorted(mean, key=lambda rank: mean[rank])
    for x in (NUM_RANKS - 1, NUM_RANKS - 2, half):
        modes[f"ring-{x}"] = AttachedRing(tuple(sorted(order[:x])), choose_parents(order[:x], order[x:], mean))
    return modes


Method = Callable[[Task, Arch], Decider[Any]]
_BY_BUDGET = ("sync-switch-greedy", "sync-switch-elastic", "post-local")


def methods(situation: Situation, arch: Arch) -> dict[str, Method]:
    """Everything that is run on a kind of stragglers: ours, the published ones, and the fixed modes."""
    published = {name: _published(name) for name in BASELINES}
    fixed = {f"fixed:{name}": _fixed(policy) for name, policy in fixed_modes(situation, arch).items()}
    return {"auto": auto, **published, **fixed}


def _published(name: str) -> Method:
    def make(task: Task, _arch: Arch) -> Decider[Any]:
        # Those that switch at a part of the budget are told what it is; all else is at its published default.
        budget = {"budget_gradients": task.budget_samples // task.batch_size} if name in _BY_BUDGET else {}
        return BASELINES[name](NUM_RANKS, task.batch_size, **budget)

    return make


def _fixed(policy: SyncPolicy[Any]) -> Method:
    return lambda _task, _arch: Fixed(policy, LR_RULE)
