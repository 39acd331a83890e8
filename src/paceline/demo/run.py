"""The demo's runs: turns options into three trainings per seed, and their results into one summary and one table."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.act.local import Outcome, run_local
from paceline.demo.task import NUM_TRAIN, TaskConfig, TaskResult, train
from paceline.errors import ConfigError, PacelineError
from paceline.record import RunLog
from paceline.report.summary import write_reports
from paceline.types import Fault, FaultKind, FaultPlan

CAUSES = ("compute", "data", "gc", "outside")
TARGET_ACCURACY = 0.96
TASK_KIND = "task"  # of the line in a demo run's log that says what was trained
SYSTEMS = ("clean", "ddp", "auto")  # no slow rank, slow rank under plain DDP, slow rank under auto


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to demonstrate.

    Args:
        num_ranks: Processes, 2..16.
        slow_rank: Which of them is slow.
        slowdown: Its own time over everybody else's, ratio, > 1.
        cause: What makes it slow, one of `CAUSES`.
        num_seeds: Repetitions with other initial parameters and orders, >= 1.
        out: Directory for logs and reports.

    Raises:
        ConfigError: a value out of range.
    """

    num_ranks: int = 4
    slow_rank: int = 2
    slowdown: float = 5.0
    cause: str = "compute"
    num_seeds: int = 1
    out: Path = Path("demo_run")

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 16:
            raise ConfigError(f"--ranks must be 2..16 (they share this machine's cores), got {self.num_ranks}")
        if not 0 <= self.slow_rank < self.num_ranks:
            raise ConfigError(
                f"--slow-rank must be one of the {self.num_ranks} ranks 0..{self.num_ranks - 1}, got {self.slow_rank}"
            )
        if not 1 < self.slowdown <= 50:
            raise ConfigError(f"--slowdown must be above 1 and at most 50, got {self.slowdown}")
        if self.cause not in CAUSES:
            raise ConfigError(f"--cause must be one of {', '.join(CAUSES)}; got {self.cause!r}")
        if self.num_seeds < 1:
            raise ConfigError(f"--seeds must be >= 1, got {self.num_seeds}")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out must be a directory, got the file {self.out}")

    def config(self, system: str, seed: int) -> TaskConfig:
        """The training run of one system and seed."""
        task = TaskConfig(
            system="auto" if system == "auto" else "ddp",
            run_dir=self.run_dir(system, seed),
            seed=seed,
            recorder=1 if self.slow_rank == 0 else 0,
        )
        if system == "clean":
            return task
        extra_s = (self.slowdown - 1.0) * STEP_S
        return replace(task, faults=FaultPlan((Fault(self.slow_rank, FaultKind(self.cause), extra_s),)))

    def run_dir(self, system: str, seed: int) -> Path:
        """Where that run's log goes."""
        return self.out / (system if seed == 0 else f"{system}-seed{seed}")


STEP_S = 0.05  # what a paced step comes to: 40 ms paced, the rest computed


def time_to_accuracy(result: TaskResult, target: float = TARGET_ACCURACY) -> float | None:
    """Seconds until the test accuracy first reached the target; None if it never did.

    Example:
        >>> time_to_accuracy(TaskResult((1.0, 2.0), (0.5, 0.97), 64, 0.97))
        2.0
    """
    pairs = zip(result.times_s, result.accuracies, strict=True)
    return next((t for t, accuracy in pairs if accuracy >= target), None)


def run_demo(options: DemoOptions, on_progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Run everything, write `summary.json` and `report.html` into `options.out`, and return the summary.

    Args:
        options: What to run.
        on_progress: Told the present run's name, its steps so far and its expected steps.

    Raises:
        PacelineError: a rank failed.
    """
    import paceline.report.charts  # noqa: F401 - once here, before the forks, instead of in every child

    results: dict[str, list[TaskResult]] = {system: [] for system in SYSTEMS}
    samples = {system: {"trained": 0, "dropped": 0} for system in SYSTEMS}
    auto: list[dict[str, Any]] = []
    for seed in range(options.num_seeds):
        for system in SYSTEMS:
            outcomes = _run_one(options, system, seed, on_progress)
            recorded = outcomes[options.config(system, seed).recorder].value
            results[system].append(recorded)
            if system == "auto":
                auto.append(record_task(options.config(system, seed), recorded, plain=results["ddp"][-1]))
                counted = auto[-1]["samples"]
            else:
                counted = {"trained": sum(outcome.value.num_samples for outcome in outcomes), "dropped": 0}
            for key in samples[system]:
                samples[system][key] += counted[key]
    summary = _summarise(options, results, samples, auto[0])
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(options.run_dir("auto", 0) / "report.html", options.out / "report.html")
    return summary


def _run_one(
    options: DemoOptions, system: str, seed: int, on_progress: Callable[[str, int, int], None]
) -> list[Outcome]:
    config = options.config(system, seed)
    shutil.rmtree(options.run_dir(system, seed), ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    progress = multiprocessing.get_context("fork").Value("i", 0)
    per_step = config.batch_size * (options.num_ranks - (system == "auto"))
    steps = config.num_epochs * -(-NUM_TRAIN // per_step)
    name = f"{system}, seed {seed}" if options.num_seeds > 1 else system

    def tick() -> None:
        on_progress(name, min(progress.value, steps), steps)

    logging.getLogger("paceline").setLevel(logging.ERROR)  # the table at the end says it better
    outcomes = run_local(train, options.num_ranks, config, progress, timeout_s=300.0, on_tick=tick)
    on_progress(name, steps, steps)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise PacelineError(f"the {name} run failed on rank {failed[0].rank}:\n{failed[0].error}")
    return outcomes


def record_task(
    config: TaskConfig, result: TaskResult, plain: TaskResult | None = None, target: float = TARGET_ACCURACY
) -> dict[str, Any]:
    """Append to a run's log what was trained and how good it was when, and redo the report; return its summary.

    The accuracy was computed after the run so as not to disturb it.

    Args:
        config: The run; one of Paceline's.
        result: What its recorder brought home.
        plain: Likewise of the same training under plain DDP, which writes no log.
        target: What time to accuracy is measured to, 0..1.
    """
    assert config.run_dir is not None
    with RunLog(config.run_dir) as log:
        log.write(
            TASK_KIND,
            name="demo",
            seed=config.seed,
            num_epochs=config.num_epochs,
            batch_size=config.batch_size,
            lr=config.lr,
            target_accuracy=target,
            plain=plain and {"times_s": plain.times_s, "accuracies": plain.accuracies},
        )
        for step, (time_s, accuracy) in enumerate(zip(result.times_s, result.accuracies, strict=True), start=1):
            log.write("metric", time_s=round(time_s, 4), step=step, name="accuracy", value=round(accuracy, 5))
    return write_reports(config.run_dir)


def _summarise(
    options: DemoOptions,
    results: dict[str, list[TaskResult]],
    samples: dict[str, dict[str, int]],
    auto: dict[str, Any],
) -> dict[str, Any]:
    times = {system: [time_to_accuracy(r) for r in runs] for system, runs in results.items()}
    ratios = [a / d for a, d in zip(times["auto"], times["ddp"], strict=True) if a is not None and d is not None]
    culprit = auto["culprit"]
    return {
        "schema": 1,
        "planted": {"rank": options.slow_rank, "cause": options.cause, "slowdown": options.slowdown},
        "culprit": None if culprit is None else {k: culprit[k] for k in ("rank", "host", "phase", "cause")},
        "target_accuracy": TARGET_ACCURACY,
        "tta_s": times,
        "tta_ratio": fmean(ratios) if len(ratios) == options.num_seeds else None,
        "tta_ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "accuracy": {system: fmean(r.final_accuracy for r in runs) for system, runs in results.items()},
        "samples": samples,
        "decisions": auto["decisions"],
        "num_seeds": options.num_seeds,
    }
