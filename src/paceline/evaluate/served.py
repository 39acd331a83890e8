"""A live run with parameter servers in virtual time: turns a demo run's log into the same training, simulated.

What `live.py` does for the all-reduce architecture. Measured in the log are the ranks' own times, by the clock, and
what a push and a pull take; the simulator's are who waits for whom, what is decided when, and how good the model gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from paceline.decide.baselines import Fixed
from paceline.decide.plan import Adopted, Decider, plan_from_json
from paceline.demo.simulated import simulated_task
from paceline.demo.task import TaskConfig
from paceline.errors import RecordError
from paceline.evaluate.live import Comparison, Pace
from paceline.evaluate.replay import controller_of
from paceline.policy.barrier import BSP
from paceline.policy.stale import ASP
from paceline.report.history import Run
from paceline.sim.cluster import Cluster, Stop, Workload
from paceline.sim.result import Point, Result, time_to_accuracy_s
from paceline.sim.timeline import Timeline
from paceline.sim.training import TaskLearner
from paceline.sim.world import simulate
from paceline.types import Rank, StepTiming, Update

LATENCIES = (0.85, 1.0, 1.15)
"""Factors on the measured exchange, one simulated run of "auto" each: as in `live.py`, they draw chance anew."""

_FEWEST = 12  # updates under one mode from which their pace is compared
_LEFT_OUT = 0.1  # of them, at the end, where workers run out of samples one by one
_MOST_TIME = 10.0  # virtual time that a simulated run may take, as a multiple of the live one


def simulate_served(
    run: Run, config: TaskConfig, target: float, plain: Mapping[str, Sequence[float]] | None
) -> tuple[Comparison, ...]:
    """Train in virtual time what a demo run with parameter servers trained, and compare paces and times to accuracy.

    Args:
        run: Of `paceline demo --arch ps`, in the mode "auto".
        config: What it trained.
        target: What time to accuracy is measured to, 0..1.
        plain: When the same training under BSP had which accuracy, one evaluation per update; None if not known.

    Returns:
        The comparison of BSP, where the log knows how that went, and that of "auto".

    Raises:
        RecordError: the log holds no step from which the exchange could be measured.
    """
    curve = tuple(
        Point(line.data["time_s"], step * config.batch_size, line.data["value"])
        for step, line in enumerate((line for line in run.lines if line.data.get("name") == "accuracy"), start=1)
    )
    controller = replace(controller_of(run.header), batch_size=config.batch_size)
    result = []
    if plain:
        times_s = plain["times_s"]
        simulated = _simulate(run, config, target, Fixed(BSP(), run.header["lr_rule"]), exchange_s(run, BSP))
        live_s = (times_s[-2] - times_s[0]) / (len(times_s) - 2)
        points = tuple(
            Point(time_s, step * config.batch_size, accuracy)
            for step, (time_s, accuracy) in enumerate(zip(times_s, plain["accuracies"], strict=True), start=1)
        )
        pace = Pace("BSP()", live_s, _paces(seen.value for seen in simulated.seen)["BSP()"])
        runs_s = (simulated.time_to_accuracy_s(target),)
        result.append(Comparison("BSP", time_to_accuracy_s(points, target), runs_s, (), (pace,)))
    by_latency = [_simulate(run, config, target, controller, x * exchange_s(run, ASP)) for x in LATENCIES]
    measured = by_latency[LATENCIES.index(1.0)]
    live, virtual = _paces(_told(run)), _paces(seen.value for seen in measured.seen)
    result.append(
        Comparison(
            "auto",
            time_to_accuracy_s(curve, target),
            tuple(each.time_to_accuracy_s(target) for each in by_latency),
            tuple(
                (round(said.virtual_s, 3), str(said.what.plan.policy))
                for said in measured.decisions
                if isinstance(said.what, Adopted)
            ),
            tuple(Pace(mode, live[mode], virtual[mode]) for mode in live if mode in virtual),
        )
    )
    return tuple(result)


def exchange_s(run: Run, kind: type[BSP] | type[ASP]) -> float:
    """Return what a push and a pull took under a mode, without waiting for anybody, seconds; mean.

    Under BSP that is what the rank that waited least waited, under ASP what every rank did. Where the run has no such
    steps, those of the other mode count.

    Raises:
        RecordError: there are none of either.
    """
    by_kind: dict[type, list[float]] = {BSP: [], ASP: []}
    rows: dict[int, dict[Rank, StepTiming]] = {}
    switches = [(int(plan.effective_step), plan.policy) for plan in _adopted(run)]
    for timing in (timing for timings in run.timings.values() for timing in timings[1:]):
        policy = next((policy for step, policy in reversed(switches) if step <= timing.step), BSP())
        if isinstance(policy, ASP):
            by_kind[ASP].append(timing.wait_s)
        elif isinstance(policy, BSP):
            rows.setdefault(timing.step, {})[timing.rank] = timing
    by_kind[BSP] = [min(t.wait_s for t in row.values()) for row in rows.values() if len(row) == len(run.timings)]
    found = by_kind[kind] or by_kind[BSP] or by_kind[ASP]
    if not found:
        raise RecordError("the log holds no step that tells what a push and a pull take")
    return fmean(found)


def _simulate(run: Run, config: TaskConfig, target: float, decider: Decider[Any], exchange_s: float) -> Result:
    task, trace = simulated_task(config, target), Timeline.of(run.timings, "live run")
    return simulate(
        # A push and a pull are one message each way here: what they take is measured, whatever it consists of.
        Cluster.uniform("ps", trace.num_ranks, num_servers=config.num_servers, alpha_s=exchange_s / 2.0),
        Workload(trace.reference_s, config.batch_size, fixed_ratio=1.0),
        trace,
        decider,
        Stop(task.budget_samples, None, _MOST_TIME * trace.length_s),
        learner=TaskLearner(task, config.seed, 5),
        evaluate_every=config.batch_size * trace.num_ranks,
        switch_s=0.0,
        noise_every=5,
        keeps_seen=True,
    )


def _adopted(run: Run) -> list[Any]:
    return [plan_from_json({k: v for k, v in decision.data.items() if k in _PLAN}) for decision in run.adopted]


_PLAN = ("epoch", "effective_step", "policy", "lr_scale", "predicted_gain", "reason", "batch_sizes")


def _told(run: Run) -> Iterable[Update | Adopted]:
    """Updates and changes of mode, in the order of the log."""
    for line in run.lines:
        if isinstance(line.value, Update):
            yield line.value
        elif line.kind == "plan" and line.data["status"] == "adopted":
            yield Adopted(plan_from_json({k: v for k, v in line.data.items() if k in _PLAN}))


def _paces(told: Iterable[Any]) -> dict[str, float]:
    """Mean time between updates by mode, seconds; of modes with enough of them."""
    stretches: list[tuple[str, list[float]]] = [(str(BSP()), [])]
    for what in told:
        if isinstance(what, Adopted):
            stretches.append((str(what.plan.policy), []))
        elif isinstance(what, Update):
            stretches[-1][1].append(what.at_s)
    found: dict[str, list[float]] = {}
    for mode, times_s in stretches:
        kept = times_s[: len(times_s) - int(_LEFT_OUT * len(times_s))]
        if len(kept) >= _FEWEST:
            found.setdefault(mode, []).append((kept[-1] - kept[0]) / (len(kept) - 1))
    return {mode: median(times_s) for mode, times_s in found.items()}
