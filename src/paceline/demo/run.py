"""The demo's runs: turns options into several trainings per seed, and their results into one summary and one table."""

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
from paceline.decide.rehearse import Arch
from paceline.demo.task import LR_MILESTONES, NUM_TRAIN, TaskConfig, TaskResult, train
from paceline.errors import ConfigError, PacelineError
from paceline.record import RunLog
from paceline.report.summary import write_reports
from paceline.types import Fault, FaultKind, FaultPlan

CAUSES = ("compute", "data", "gc", "outside")
TARGET_ACCURACY = 0.96
TASK_KIND = "task"  # of the line in a demo run's log that says what was trained
PLAIN = {"ring": "ddp", "ps": "bsp"}  # what training without Paceline comes to: every rank in every update


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an architecture's demo trains: chosen once, so that plain training gets well above its target.

    Args:
        target: Test accuracy to reach, 0..1.
        num_epochs, milestones: How long, and when the learning rate falls.
    """

    target: float
    num_epochs: int
    milestones: tuple[int, ...]


RECIPES = {
    "ring": Recipe(TARGET_ACCURACY, 14, LR_MILESTONES),
    # Two workers more make larger updates, so it takes longer; and where modes part, accuracy is high.
    "ps": Recipe(0.98, 20, (14, 17)),
}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to demonstrate.

    Args:
        num_ranks: Processes that train, 2..16.
        slow_rank: Which of them is slow.
        slowdown: Its own time over everybody else's, ratio, > 1.
        cause: What makes it slow, one of `CAUSES`.
        num_seeds: Repetitions with other initial parameters and orders, >= 1.
        out: Directory for logs and reports.
        arch: "ring" for all-reduce, "ps" for parameter servers.
        num_servers: Processes that serve beside those that train, with "ps" only, 1..4.

    Raises:
        ConfigError: a value out of range.
    """

    num_ranks: int = 4
    slow_rank: int = 2
    slowdown: float = 5.0
    cause: str = "compute"
    num_seeds: int = 1
    out: Path = Path("demo_run")
    arch: Arch = "ring"
    num_servers: int = 2

    def __post_init__(self) -> None:
        if self.arch not in PLAIN:
            raise ConfigError(f"--arch must be ring or ps, got {self.arch!r}")
        if not 1 <= self.num_servers <= 4:
            raise ConfigError(f"--servers must be 1..4 (they share this machine's cores), got {self.num_servers}")
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

    @property
    def plain(self) -> str:
        """The system that `auto` is measured against."""
        return PLAIN[self.arch]

    @property
    def recipe(self) -> Recipe:
        """How it trains."""
        return RECIPES[self.arch]

    @property
    def fixed(self) -> tuple[str, ...]:
        """With servers, modes that somebody could have chosen by hand: the best of them is what `auto` must match."""
        if self.arch == "ring":
            return ()
        fast = "-".join(str(rank) for rank in range(self.num_ranks) if rank != self.slow_rank)
        most = self.num_ranks - 1
        return (f"ksync:{most}", f"kasync:{most}", "asp", f"groups:{fast},{self.slow_rank}")

    @property
    def systems(self) -> tuple[str, ...]:
        """What is trained, in order: without a slow rank, then with it."""
        return ("clean", self.plain, "auto", *self.fixed)

    @property
    def world_size(self) -> int:
        """Processes of a run."""
        return self.num_ranks + (self.num_servers if self.arch == "ps" else 0)

    def config(self, system: str, seed: int) -> TaskConfig:
        """The training run of one system and seed."""
        task = TaskConfig(
            system=self.plain if system == "clean" else system,
            run_dir=self.run_dir(system, seed),
            seed=seed,
            recorder=1 if self.slow_rank == 0 else 0,
            num_epochs=self.recipe.num_epochs,
            milestones=self.recipe.milestones,
            num_servers=self.world_size - self.num_ranks,
        )
        if system == "clean":
            return task
        extra_s = (self.slowdown - 1.0) * STEP_S
        return replace(task, faults=FaultPlan((Fault(self.slow_rank, FaultKind(self.cause), extra_s),)))

    def run_dir(self, system: str, seed: int) -> Path:
        """Where that run's log goes."""
        name = system.replace(":", "-").replace(",", "+")
        return self.out / (name if seed == 0 else f"{name}-seed{seed}")


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

    results: dict[str, list[TaskResult]] = {system: [] for system in options.systems}
    samples = {system: {"trained": 0, "dropped": 0} for system in options.systems}
    auto: list[dict[str, Any]] = []
    for seed in range(options.num_seeds):
        for system in options.systems:
            outcomes = _run_one(options, system, seed, on_progress)
            config = options.config(system, seed)
            recorded = outcomes[config.recorder].value
            results[system].append(recorded)
            if system == "auto":
                plain = results[options.plain][-1]
                auto.append(record_task(config, recorded, plain=plain, target=options.recipe.target))
                counted = auto[-1]["samples"]
            elif config.num_servers:
                counted = write_reports(options.run_dir(system, seed))["samples"]
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
    per_step = config.batch_size * (options.num_ranks - (system in ("auto", *options.fixed)))
    steps = config.num_epochs * -(-NUM_TRAIN // per_step)
    name = f"{system}, seed {seed}" if options.num_seeds > 1 else system

    def tick() -> None:
        on_progress(name, min(progress.value, steps), steps)

    logging.getLogger("paceline").setLevel(logging.ERROR)  # the table at the end says it better
    outcomes = run_local(train, options.world_size, config, progress, timeout_s=300.0, on_tick=tick)
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
            milestones=config.milestones,
            num_servers=config.num_servers,
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
    target = options.recipe.target
    times = {system: [time_to_accuracy(r, target) for r in runs] for system, runs in results.items()}
    ratios = [
        a / p for a, p in zip(times["auto"], times[options.plain], strict=True) if a is not None and p is not None
    ]
    culprit = auto["culprit"]
    return {
        "schema": 1,
        "planted": {"rank": options.slow_rank, "cause": options.cause, "slowdown": options.slowdown},
        "culprit": None if culprit is None else {k: culprit[k] for k in ("rank", "host", "phase", "cause")},
        "arch": options.arch,
        "target_accuracy": target,
        "tta_s": times,
        "tta_ratio": fmean(ratios) if len(ratios) == options.num_seeds else None,
        "tta_ratio_range": [min(ratios), max(ratios)] if ratios else None,
        **_beside_fixed(options, times),
        "accuracy": {system: fmean(r.final_accuracy for r in runs) for system, runs in results.items()},
        "samples": samples,
        "decisions": auto["decisions"],
        "num_seeds": options.num_seeds,
    }


def _beside_fixed(options: DemoOptions, times: dict[str, list[float | None]]) -> dict[str, Any]:
    """How `auto` did beside the fixed mode with the lowest mean time to accuracy; nothing where there are none.

    A mode that missed the target with some seed is not the best.
    """
    if not options.fixed:
        return {}
    means = {system: fmean(known) for system in ("auto", *options.fixed) if (known := _all_known(times[system]))}
    auto = means.pop("auto", None)
    best = min(means, key=lambda system: means[system], default=None)
    ratio = auto / means[best] if auto is not None and best is not None else None
    return {"tta_ratio_vs_best_fixed": ratio, "best_fixed": best}


def _all_known(values: list[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None
