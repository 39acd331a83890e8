"""The what-if: turns a trace and a list of modes into simulated trainings, a table and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.decide.baselines import BASELINES, Fixed
from paceline.decide.placement import choose_parents
from paceline.decide.plan import Decider
from paceline.decide.rehearse import Arch
from paceline.errors import ConfigError
from paceline.evaluate.claims import ARCH_WORDS
from paceline.evaluate.grid import ARCHS, HOST, LR_RULE, MODEL_BYTES, NUM_RANKS, STEP_S, TASKS, auto
from paceline.evaluate.pool import each_done
from paceline.evaluate.run import Job, Row, guarded, train
from paceline.evaluate.source import Source
from paceline.evaluate.table import Cell, cells
from paceline.policy import catalog
from paceline.sim.cluster import Cluster, Workload
from paceline.sim.tasks import Task
from paceline.sim.trace import Trace
from paceline.types import Rank

TABLE_NAME, PAGE_NAME = "simulation.json", "simulation.html"
_SLOW = 1.5  # a rank that is this many times slower than the fastest is attached in "all"
_NUM_LOOKS = 100  # steps that this is judged by
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to simulate.

    Args:
        source: Who is slow when.
        arch: How gradients travel.
        modes: "auto", names of published methods, policies as `policy.catalog.parse` reads them; or "all" for a
            selection of each.
        task: What is trained. Its batch is shared by all ranks, so that the rate it was tuned at stays right.
        num_seeds: Repetitions, >= 1.
        out: Directory for table and page.

    Raises:
        ConfigError: an unknown or repeated mode, an unknown task or architecture, no seeds, or more ranks than
            samples in a batch.
    """

    source: Source
    arch: Arch = "ps"
    modes: tuple[str, ...] = ("all",)
    task: str = "digits"
    num_seeds: int = 3
    out: Path = Path("simulation")

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ConfigError(f"--arch must be one of {', '.join(ARCHS)}; got {self.arch!r}")
        if self.task not in TASKS:
            raise ConfigError(f"--task must be one of {', '.join(TASKS)}; got {self.task!r}")
        if self.num_seeds < 1:
            raise ConfigError(f"--seeds must be >= 1, got {self.num_seeds}")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out must be a directory, got the file {self.out}")
        samples = TASKS[self.task].batch_size * NUM_RANKS
        if self.source.num_ranks > samples:
            raise ConfigError(
                f"{self.source.num_ranks} ranks cannot share the {samples} samples of an update of {self.task}; "
                f"take --ranks {samples} or fewer"
            )
        if not self.modes or len(set(self.modes)) < len(self.modes):
            raise ConfigError(f"--modes must name different modes, got {', '.join(self.modes) or 'none'}")
        for mode in self.mode_names():
            decider(mode, self.fitted_task(), self.arch, self.source.num_ranks)

    def mode_names(self) -> list[str]:
        """The modes by name, "all" replaced by what it stands for."""
        names: dict[str, None] = {}
        for mode in self.modes:
            names |= dict.fromkeys(all_modes(self) if mode == "all" else (mode,))
        return list(names)

    def fitted_task(self) -> Task:
        """The task with the batch of an update shared by as many ranks as there are."""
        task = TASKS[self.task]
        return replace(task, batch_size=max(1, round(task.batch_size * NUM_RANKS / self.source.num_ranks)))


def all_modes(options: Options) -> list[str]:
    """Our controller, plain training, and a selection of policies and published methods for the architecture."""
    n = options.source.num_ranks
    quorums = [f"ksync:{k}:cancel" for k in dict.fromkeys((n - 1, n // 2)) if 0 < k < n]
    if options.arch == "ps":
        partly = [f"kasync:{n // 2}"] if n > 3 else []
        return ["auto", "ssgd", "asgd", "ssp", *quorums, *partly, "lb-bsp", "sync-switch-greedy", "lgc", "local:8"]
    ring = _ring(options.source.trace(0), n)
    rings = [] if ring is None else [ring]
    return ["auto", "ssgd", *quorums, *rings, "lb-bsp", "sync-switch-greedy", "lgc", "dropcompute", "local:8"]


def _ring(trace: Trace, num_ranks: int) -> str | None:
    """The name of the ring of all fast ranks with the slow ones attached; None where all are fast."""
    mean: dict[Rank, float] = {
        rank: fmean(trace.slowdown(rank, step, step * STEP_S) for step in range(_NUM_LOOKS))
        for rank in range(num_ranks)
    }
    slow = [rank for rank in range(num_ranks) if mean[rank] > _SLOW * min(mean.values())]
    if not slow:
        return None
    members = [rank for rank in range(num_ranks) if rank not in slow]
    parents = choose_parents(members, slow, mean)
    return f"ring:{'-'.join(map(str, members))};" + ";".join(f"{rank}>{parents[rank]}" for rank in slow)


def decider(mode: str, task: Task, arch: Arch, num_ranks: int) -> Decider[Any]:
    """Return what decides in a mode.

    Raises:
        ConfigError: a name that is none of a mode, or that does not fit so many ranks.

    Example:
        >>> decider("ksync:6", TASKS["digits"], "ps", num_ranks=8).initial
        KSync(k=6, late='drop')
    """
    if mode == "auto":
        return replace(auto(task, arch), hosts=tuple(f"host{rank}" for rank in range(num_ranks)))
    if mode in BASELINES:
        return BASELINES[mode](num_ranks, task.batch_size)
    try:
        return Fixed(catalog.parse(mode, num_ranks), LR_RULE)
    except ValueError as error:
        raise ConfigError(f"--modes: {error}; or all, auto, {', '.join(BASELINES)}") from error


def simulate_modes(options: Options, on_progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """Train in every mode and with every seed, and write the table and the page into `options.out`.

    Args:
        options: What to simulate.
        on_progress: Told how many runs are done, of how many.
        processes: How many at a time; None for one per core.

    Returns:
        The table: a row per mode in order of time to accuracy, those that never reached the target last.

    Raises:
        ConfigError: a task whose data needs a package that is missing.
        PacelineError: a process died.
    """
    from paceline.evaluate.page import render_simulation

    TASKS[options.task].load()  # once, before the forks
    modes = options.mode_names()
    jobs = [
        Job(options.arch, options.source.name, options.task, mode, seed)
        for mode in modes
        for seed in range(options.num_seeds)
    ]
    done: dict[Job, Row] = {}
    on_progress(0, len(jobs))
    for row in each_done(partial(_run, options), jobs, processes):
        done[row.job] = row
        on_progress(len(done), len(jobs))
    rows = [done[job] for job in jobs]
    table = _tabulate(options, rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / TABLE_NAME).write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (options.out / PAGE_NAME).write_text(
        render_simulation(table, rows, partial(_draw_slowness, options, table)), encoding="utf-8"
    )
    return table


def _run(options: Options, job: Job) -> Row:
    task, num_ranks, step_s = options.fitted_task(), options.source.num_ranks, step_of(options.source)
    return guarded(
        job,
        lambda: train(
            job,
            task,
            Cluster.uniform(options.arch, num_ranks, HOST),
            # As much to send, in relation to what is computed, as in the evaluation: no trace says how much it was.
            Workload(step_s, task.batch_size, MODEL_BYTES * step_s / STEP_S),
            options.source.trace(job.seed),
            decider(job.method, task, options.arch, num_ranks),
        ),
    )


def step_of(source: Source) -> float:
    """What a gradient takes where nobody is slow, seconds; the evaluation's where the trace gives no unit."""
    return source.reference_s or STEP_S


def _draw_slowness(options: Options, table: Mapping[str, Any]) -> str:
    from paceline.evaluate.charts import slowness

    reached = [row["tta_s"] for row in table["rows"] if row["num_reached"]]
    step_s = step_of(options.source)
    return slowness(options.source.trace(0), options.source.num_ranks, max(reached, default=100.0 * step_s), step_s)


def _tabulate(options: Options, rows: Sequence[Row]) -> dict[str, Any]:
    """The table: what was asked for, a row per mode, and the result in words."""
    ordered = sorted(cells(rows), key=lambda cell: (cell.num_reached == 0, cell.tta_s))
    best = ordered[0] if ordered and ordered[0].num_reached else None
    return {
        "trace": options.source.name,
        "num_ranks": options.source.num_ranks,
        "arch": options.arch,
        "arch_words": ARCH_WORDS[options.arch],
        "task": options.task,
        "target_accuracy": TASKS[options.task].target_accuracy,
        "batch_size": options.fitted_task().batch_size,
        "step_s": step_of(options.source),
        "num_seeds": options.num_seeds,
        "best": best and best.method,
        **_in_words(ordered, best),
        "rows": [
            _row_json(cell, [r for r in rows if r.job.method == cell.method and r.error is None], best)
            for cell in ordered
        ],
        "auto_modes": next((r.modes for r in rows if r.job.method == "auto" and r.job.seed == 0), ()),
        "errors": [{"mode": r.job.method, "seed": r.job.seed, "error": r.error} for r in rows if r.error],
    }


def _row_json(cell: Cell, rows: Sequence[Row], best: Cell | None) -> dict[str, Any]:
    trained = [row.curve[-1][1] for row in rows]
    return {
        "mode": cell.method,
        "tta_s": cell.tta_s,
        "tta_s_low": cell.low_s,
        "tta_s_high": cell.high_s,
        "num_seeds": cell.num_seeds,
        "num_reached": cell.num_reached,
        "over_best": None if best is None else cell.tta_s / best.tta_s,
        "accuracy": cell.accuracy,
        "num_updates": fmean(row.num_updates for row in rows),
        "mean_staleness": fmean(row.mean_staleness for row in rows),
        "dropped_ratio": sum(row.samples_dropped for row in rows) / max(1, sum(trained)),
    }


def _in_words(ordered: Sequence[Cell], best: Cell | None) -> dict[str, str]:
    """A headline and a sentence."""
    if best is None:
        return {"headline": "No mode reaches the target", "lead": "More samples, more time or another task would help."}
    by_mode = {cell.method: cell for cell in ordered}
    parts = []
    for name, called in (("ssgd", "plain synchronous training"), ("auto", "auto")):
        cell = by_mode.get(name)
        if cell is not None and cell is not best:
            over = f"needs {cell.tta_s / best.tta_s:.2f}x that" if cell.num_reached else "never gets there"
            parts.append(f"{called} {over}")
    lead = f"It takes {best.tta_s:.1f} virtual seconds to the target accuracy"
    return {"headline": f"{best.method} is fastest", "lead": "; ".join((lead, *parts)) + "."}
