"""One simulated training: turns a job into a row, whatever happens in it, and rows into JSON lines and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from paceline.decide.baselines import Fixed
from paceline.decide.plan import Adopted, Decider
from paceline.decide.rehearse import Arch
from paceline.errors import RecordError
from paceline.evaluate.grid import NUM_RANKS, SITUATIONS, TASKS, cluster, methods, workload
from paceline.policy.stale import ASP
from paceline.sim.cluster import Cluster, Stop, Workload
from paceline.sim.result import Result
from paceline.sim.tasks import Task
from paceline.sim.trace import Trace
from paceline.sim.training import TaskLearner
from paceline.sim.world import simulate
from paceline.types import Update

LIMIT: Final = "limit"
"""Not a method: all ranks compute without a break and nothing is ever sent. No method trains samples faster."""

NUM_EVALUATIONS: Final = 100  # of the test accuracy in the budget of samples
_MOST_TIME: Final = 20.0  # virtual time that a run may take, as a multiple of what its budget takes undisturbed
_MOST_EVENTS: Final = 1000  # per gradient of the budget
_LIMIT_POINTS: Final = 200


@dataclass(frozen=True, slots=True)
class Job:
    """Names only, so that it travels between processes and into a file."""

    arch: Arch
    trace: str
    task: str
    method: str
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a job.

    Args:
        job: Which.
        error: Why there is nothing else; None where it went well.
        tta_s: Virtual seconds to the task's target accuracy; None if it was not reached.
        accuracy: Mean of the last five evaluations, 0..1; None for the limit.
        virtual_s: Virtual seconds to the end of the budget.
        samples_dropped, num_updates, mean_staleness: As in `sim.result.Result`.
        modes: Policies adopted, with the virtual time.
        curve: (virtual seconds, samples, accuracy); of the limit, without accuracy.
        cpu_s: What it took to compute, seconds; all else is the same every time.
    """

    job: Job
    error: str | None = None
    tta_s: float | None = None
    accuracy: float | None = None
    virtual_s: float = 0.0
    samples_dropped: int = 0
    num_updates: int = 0
    mean_staleness: float = 0.0
    modes: tuple[tuple[float, str], ...] = ()
    curve: tuple[tuple[float, int, float], ...] = ()
    cpu_s: float = 0.0


def run_job(job: Job) -> Row:
    """Simulate one training of the evaluation's grid; an error becomes a row."""
    return guarded(job, lambda: _run(job))


def guarded(job: Job, run: Callable[[], Row]) -> Row:
    """What `run` returns, or a row with its error: one failure must not end an evaluation of hours."""
    try:
        return run()
    except Exception as error:
        return Row(job, error=f"{type(error).__name__}: {error}")


def _run(job: Job) -> Row:
    task, situation = TASKS[job.task], SITUATIONS[job.trace]
    trace = situation.trace(job.seed)
    if job.method == LIMIT:
        return limit(job, task, trace, workload(task).step_s, NUM_RANKS)
    decider = methods(situation, job.arch)[job.method](task, job.arch)
    return train(job, task, cluster(job.arch), workload(task), trace, decider)


def train(job: Job, task: Task, cluster: Cluster, workload: Workload, trace: Trace, decider: Decider[Any]) -> Row:
    """Train a task's model until its budget of samples is used up, or too much virtual time has gone by.

    Args:
        job: Goes into the row; its seed is that of the model and of the order of samples.
        task: What is trained.
        cluster, workload: What there is, and what a gradient costs.
        trace: Who is slow when.
        decider: Chooses the modes.

    Raises:
        SimulationError: the run cannot go on.
    """
    begun = time.process_time()
    result = simulate(
        cluster,
        workload,
        trace,
        decider,
        _stop(task, workload, cluster.num_ranks),
        learner=TaskLearner(task, seed=job.seed),
        evaluate_every=max(1, task.budget_samples // NUM_EVALUATIONS),
    )
    last = [point.accuracy for point in result.curve[-5:]]
    return Row(
        job,
        tta_s=result.time_to_accuracy_s(task.target_accuracy),
        accuracy=sum(last) / len(last),
        virtual_s=result.virtual_s,
        samples_dropped=result.samples_dropped,
        num_updates=result.num_updates,
        mean_staleness=result.mean_staleness,
        modes=_modes(result),
        curve=tuple((round(p.virtual_s, 3), p.samples, round(p.accuracy, 5)) for p in result.curve),
        cpu_s=time.process_time() - begun,
    )


def limit(job: Job, task: Task, trace: Trace, step_s: float, num_ranks: int) -> Row:
    """How samples add up at the summed rate of all ranks: nobody waits, nothing is sent, nothing is learned."""
    begun = time.process_time()
    workload = Workload(step_s, task.batch_size)
    result = simulate(
        Cluster.uniform("ps", num_ranks),
        workload,
        trace,
        Fixed(ASP()),
        _stop(task, workload, num_ranks),
        keeps_seen=True,
    )
    samples, curve = 0, [(0.0, 0, 0.0)]
    for seen in result.seen:
        if isinstance(seen.value, Update):
            samples += sum(seen.value.contributions.values())
            curve.append((round(seen.virtual_s, 3), samples, 0.0))
    every = max(1, len(curve) // _LIMIT_POINTS)
    return Row(
        job,
        virtual_s=result.virtual_s,
        num_updates=result.num_updates,
        mean_staleness=result.mean_staleness,
        curve=tuple(curve[::-every][::-1]),
        cpu_s=time.process_time() - begun,
    )


def _stop(task: Task, workload: Workload, num_ranks: int) -> Stop:
    num_gradients = task.budget_samples / workload.batch_size
    return Stop(
        samples=task.budget_samples,
        virtual_s=_MOST_TIME * workload.step_s * num_gradients / num_ranks,
        max_events=int(_MOST_EVENTS * num_gradients) + 10_000,
    )


def _modes(result: Result) -> tuple[tuple[float, str], ...]:
    return tuple(
        (round(said.virtual_s, 3), str(said.what.plan.policy))
        for said in result.decisions
        if isinstance(said.what, Adopted)
    )


def to_line(row: Row, code: str) -> str:
    """A row as one line of JSON, with a fingerprint of the code that made it."""
    return json.dumps({"code": code, **asdict(row)}, allow_nan=False) + "\n"


def read_rows(path: Path, code: str) -> Iterator[Row]:
    """The rows in a file that this code made and that hold a result; none where there is no file.

    A last line that was cut off is left out.

    Raises:
        RecordError: any other line that cannot be understood.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            data = json.loads(line)
            if data.pop("code") != code or data["error"] is not None:
                continue
            job = Job(**data.pop("job"))
            curve = tuple((t, n, a) for t, n, a in data.pop("curve"))
            modes = tuple((t, name) for t, name in data.pop("modes"))
            yield Row(job=job, curve=curve, modes=modes, **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(f"{path}, line {number}: wanted a row of an evaluation, got {line[:60]!r}") from error
