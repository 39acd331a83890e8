"""A live run in virtual time: turns the log of a demo run into the same training, simulated, beside the live one.

Measured in the log are the ranks' own times, what an exchange and a trip to a parent take, how long a plan takes to
reach everybody, and the pause of a role change. All else is the simulator's: who waits for whom, what is decided
when, and how good the model gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, Final

from paceline.decide.baselines import Fixed
from paceline.decide.plan import Adopted, Decider
from paceline.demo.run import TASK_KIND
from paceline.demo.simulated import simulated_task
from paceline.demo.task import TaskConfig
from paceline.errors import RecordError
from paceline.evaluate.replay import controller_of
from paceline.policy.barrier import BSP
from paceline.record import Line
from paceline.report.history import Run
from paceline.sim.cluster import Cluster, Stop, Workload
from paceline.sim.result import Point, Result, time_to_accuracy_s
from paceline.sim.timeline import Timeline
from paceline.sim.training import TaskLearner
from paceline.sim.world import simulate
from paceline.types import Rank, StepTiming

TOLERANCE: Final = 0.15
"""How far a simulated time to accuracy may be from the live one, as a part of it."""

LATENCIES: Final = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Factors on the measured latency, one simulated run each.

When an attached rank's gradient meets which update is chance, and with it the course of the accuracy: time to accuracy
varies by several percent. Small changes of latency draw that anew, and the median of the runs counts.
"""

_TOLD = ("seed", "num_epochs", "batch_size", "lr", "milestones", "num_servers")
_NOISE_EVERY = 5  # updates between two looks at the noise scale, as in a live run
_MOST_TIME = 10.0  # virtual time that a simulated run may take, as a multiple of the live one


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run's log tells of the costs of moving gradients and of changing modes, seconds.

    Args:
        exchange_s: The exchange of those who step together, without waiting for anybody; mean.
        alpha_s: The same per message of a ring, of which an exchange among n has 2 (n - 1); median.
        trip_s: From an update to the moment at which an attached rank computes with its parameters; median.
        switch_s: The pause of a role change; mean.
        fence_s: From what a plan rests on to the moment at which it takes effect; mean.
    """

    exchange_s: float
    alpha_s: float
    trip_s: float
    switch_s: float
    fence_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How updates followed each other under one mode, live and simulated: mean time between two, seconds."""

    mode: str
    live_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        """Simulated over live."""
        return self.simulated_s / self.live_s

    @property
    def is_close(self) -> bool:
        """Whether the simulated time is within `TOLERANCE` of the live one."""
        return abs(self.ratio - 1.0) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of training, live and simulated.

    Args:
        name: "plain DDP", "BSP" (with parameter servers) or "auto".
        live_s: Time to the target accuracy, seconds; None where it was not reached.
        runs_s: The same of the simulated runs, one for each of `LATENCIES`.
        modes: Policies that the run at the measured latency adopted, with the virtual time.
        paces: With parameter servers, by mode; then they say whether the simulation is close, since there the time to
            accuracy of asynchronous modes is chance to a tenth and more.

    Example:
        >>> comparison = Comparison("auto", live_s=8.0, runs_s=(9.0, None, 9.0, 9.2, 8.8))
        >>> comparison.simulated_s, comparison.ratio, comparison.is_close
        (9.0, 1.125, True)
    """

    name: str
    live_s: float | None
    runs_s: tuple[float | None, ...]
    modes: tuple[tuple[float, str], ...] = ()
    paces: tuple[Pace, ...] = ()

    @property
    def simulated_s(self) -> float | None:
        """The median of the simulated times; None where half of the runs or more did not reach the target."""
        time_s = median(inf if time_s is None else time_s for time_s in self.runs_s)
        return time_s if isfinite(time_s) else None

    @property
    def ratio(self) -> float | None:
        """Simulated over live time; None where either does not exist."""
        return self.simulated_s / self.live_s if self.simulated_s is not None and self.live_s is not None else None

    @property
    def is_as_fast(self) -> bool:
        """Whether the simulated time to accuracy is within `TOLERANCE` of the live one."""
        return self.ratio is not None and abs(self.ratio - 1.0) <= TOLERANCE

    @property
    def is_close(self) -> bool:
        """Whether what the simulation promises holds: the paces where there are any, else the time to accuracy."""
        return all(pace.is_close for pace in self.paces) if self.paces else self.is_as_fast

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON-ready object."""
        return {**asdict(self), "simulated_s": self.simulated_s, "ratio": self.ratio, "is_close": self.is_close}


def simulate_run(lines: Sequence[Line]) -> tuple[Comparison, ...]:
    """Train in virtual time what the last run of a demo's log trained, and compare the times to its target accuracy.

    Both times are those of `sim.result.time_to_accuracy_s`: the mean of three evaluations counts, one per update.

    Args:
        lines: What `record.read` returned.

    Returns:
        The comparison of plain DDP, where the log knows how that went, and that of "auto", where that was the mode.

    Raises:
        RecordError: the log is not a demo run's, or lacks what the simulation needs.
    """
    run = Run.of(lines)
    told = next((line.data for line in run.lines if line.kind == TASK_KIND), None)
    if told is None or told.get("name") != "demo":
        raise RecordError(
            "only runs of `paceline demo` can be simulated from their log: the model of others is unknown"
        )
    config = TaskConfig("auto", **{name: told[name] for name in _TOLD if name in told})
    if run.header.get("arch") == "ps":
        from paceline.evaluate.served import simulate_served

        return simulate_served(run, config, float(told["target_accuracy"]), told["plain"])
    costs = measure_costs(run)
    mine = tuple(
        Point(line.data["time_s"], step * config.batch_size, line.data["value"])
        for step, line in enumerate((line for line in run.lines if line.data.get("name") == "accuracy"), start=1)
    )
    plain = told["plain"] and tuple(
        Point(time_s, step * config.batch_size, accuracy)
        for step, (time_s, accuracy) in enumerate(zip(*told["plain"].values(), strict=True), start=1)
    )
    is_auto = run.header["mode"] == "auto"
    curves: dict[str, tuple[Point, ...]] = {"plain DDP": plain if is_auto else mine, "auto": mine if is_auto else ()}
    deciders: dict[str, Decider[Any]] = {
        "plain DDP": Fixed(BSP(), run.header["lr_rule"]),
        "auto": replace(controller_of(run.header), batch_size=config.batch_size, fence_s=costs.fence_s),
    }
    target = float(told["target_accuracy"])
    return tuple(
        _compare(name, curve, [_simulate(run, config, target, costs, deciders[name], x) for x in LATENCIES], target)
        for name, curve in curves.items()
        if curve
    )


def _simulate(
    run: Run, config: TaskConfig, target: float, costs: Costs, decider: Decider[Any], latency: float
) -> Result:
    task, trace = simulated_task(config, target), Timeline.of(run.timings, "live run")
    return simulate(
        Cluster.uniform(
            "ring",
            trace.num_ranks,
            alpha_s=latency * costs.alpha_s,
            round_trips=max(1, round(costs.trip_s / costs.alpha_s)) if costs.alpha_s > 0 else 1,
        ),
        # What a gradient takes is measured whole, and most of it does not depend on the batch: see `live_controller`.
        Workload(trace.reference_s, config.batch_size, fixed_ratio=1.0),
        trace,
        decider,
        Stop(task.budget_samples, target, _MOST_TIME * trace.length_s),
        learner=TaskLearner(task, config.seed, _NOISE_EVERY),
        evaluate_every=1,
        switch_s=costs.switch_s,
        noise_every=_NOISE_EVERY,
    )


def _compare(name: str, live: tuple[Point, ...], simulated: Sequence[Result], target: float) -> Comparison:
    decisions = simulated[LATENCIES.index(1.0)].decisions
    adopted = ((said.virtual_s, said.what.plan) for said in decisions if isinstance(said.what, Adopted))
    return Comparison(
        name,
        time_to_accuracy_s(live, target),
        tuple(result.time_to_accuracy_s(target) for result in simulated),
        tuple((round(virtual_s, 3), str(plan.policy)) for virtual_s, plan in adopted),
    )


def measure_costs(run: Run) -> Costs:
    """Read from a run's log what exchanges and role changes took.

    The exchange of a step is what the rank that waited least waited. The first step under a new plan also holds the
    role change, and is looked at for that alone. (A rank's clock is set to 0 at its first step, as in `Timeline`.)

    Args:
        run: At least one step in which ranks stepped together.

    Raises:
        RecordError: no such step.
    """
    rows = _rows(run)
    switches = {int(decision.data["effective_step"]) for decision in run.adopted}
    calm = [row for step, row in rows.items() if step not in switches]
    if not calm:
        raise RecordError("the log holds no step of ranks that step together: there is no exchange to measure")
    waits_s = [min(t.wait_s for t in row.values()) for row in calm]
    exchange_s = fmean(waits_s)
    pauses_s = [min(t.wait_s for t in rows[step].values()) - exchange_s for step in switches if step in rows]
    return Costs(
        exchange_s,
        median(wait_s / (2 * (len(row) - 1)) for wait_s, row in zip(waits_s, calm, strict=True)),
        _trip_s(run, rows),
        max(0.0, fmean(pauses_s)) if pauses_s else 0.0,
        _fence_s(run, rows),
    )


def _rows(run: Run) -> dict[int, dict[Rank, StepTiming]]:
    """By step, the timings of all who stepped together in it: two at least."""
    rows: dict[int, dict[Rank, StepTiming]] = {}
    for rank, timings in run.timings.items():
        for timing in timings:
            if not run.is_attached(rank, timing.step):
                rows.setdefault(timing.step, {})[rank] = timing
    members = {step: sum(not run.is_attached(rank, step) for rank in run.timings) for step in rows}
    return {step: row for step, row in rows.items() if len(row) == members[step] > 1}


def _begun_s(run: Run, row: Mapping[Rank, StepTiming]) -> float:
    """When the first of these steps began, seconds since its rank's first step."""
    return min(timing.started_s - run.timings[rank][0].started_s for rank, timing in row.items())


def _trip_s(run: Run, rows: Mapping[int, Mapping[Rank, StepTiming]]) -> float:
    """How much later than the ring an attached rank begins the step that it begins beside it; 0 where there is none."""
    lags_s = [
        _begun_s(run, {rank: timing}) - _begun_s(run, rows[timing.step])
        for rank, timings in run.timings.items()
        for timing in timings
        if timing.step in rows and rank not in rows[timing.step]
    ]
    return max(0.0, median(lags_s)) if lags_s else 0.0


def _fence_s(run: Run, rows: Mapping[int, Mapping[Rank, StepTiming]]) -> float:
    """The controller's own margin, and what the agreement of all ranks put on top of it; mean."""
    wanted = {data["epoch"]: data["effective_step"] for data in run.of_kind("plan") if data["status"] == "proposed"}
    extra_s = []
    for decision in run.adopted:
        first, then = wanted[decision.epoch], int(decision.data["effective_step"])
        if first in rows and then in rows:
            extra_s.append(_begun_s(run, rows[then]) - _begun_s(run, rows[first]))
    return controller_of(run.header).fence_s + (fmean(extra_s) if extra_s else 0.0)
