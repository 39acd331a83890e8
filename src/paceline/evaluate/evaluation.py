"""The evaluation: turns a choice of situations and methods into rows on disk, one table, and one page. Resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

import paceline
from paceline.decide.rehearse import Arch
from paceline.errors import ConfigError
from paceline.evaluate.grid import ARCHS, NUM_RANKS, SITUATIONS, STEP_S, TASKS, methods
from paceline.evaluate.pool import each_done
from paceline.evaluate.run import LIMIT, Job, Row, read_rows, run_job, to_line
from paceline.evaluate.table import FIXED, tabulate

ROWS_NAME, TABLE_NAME, PAGE_NAME = "rows.jsonl", "evaluation.json", "evaluation.html"
Progress = Callable[[int, int], None]
"""Told how many runs are done, of how many."""

QUICK_TRACES: Final = ("calm", "constant-10x", "throttled-10x", "rotating-5x")
_QUICK_WITHOUT = "zeno++"  # scoring every gradient takes it as long as all others together
_MAKES_ROWS = ("types.py", "policy", "predict", "decide", "sim", "evaluate/grid.py", "evaluate/run.py")


@dataclass(frozen=True, slots=True)
class Options:
    """What to evaluate.

    Args:
        archs, traces, tasks: Names from the grid.
        methods: Names or patterns such as "fixed:*"; empty for ours, all published ones and, in situations that were
            not calibrated on, the fixed modes. The limit always comes along.
        without: Methods to leave out.
        num_seeds: Repetitions with other models, orders and draws of the stragglers, >= 1.
        out: Directory for rows, table and page.

    Raises:
        ConfigError: an unknown name, or no seeds.

    Example:
        >>> options = Options(archs=("ps",), traces=("calm",), tasks=("digits",), methods=("auto", "ssgd"), num_seeds=2)
        >>> [(job.method, job.seed) for job in options.jobs()]
        [('auto', 0), ('auto', 1), ('ssgd', 0), ('ssgd', 1), ('limit', 0), ('limit', 1)]
    """

    archs: tuple[Arch, ...] = ARCHS
    traces: tuple[str, ...] = tuple(SITUATIONS)
    tasks: tuple[str, ...] = tuple(TASKS)
    methods: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    num_seeds: int = 5
    out: Path = Path("evaluation")

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("--arch", self.archs, ARCHS),
            ("--traces", self.traces, SITUATIONS),
            ("--tasks", self.tasks, TASKS),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise ConfigError(f"{flag} must name some of {', '.join(known)}; got {', '.join(given) or 'nothing'}")
        if self.num_seeds < 1:
            raise ConfigError(f"--seeds must be >= 1, got {self.num_seeds}")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out must be a directory, got the file {self.out}")
        names = {name for arch in self.archs for trace in self.traces for name in methods(SITUATIONS[trace], arch)}
        for pattern in self.methods:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"--methods: {pattern!r} matches none of {', '.join(sorted(names))}")

    @classmethod
    def quick(cls) -> Self:
        """Two seeds of the smallest task in four situations: minutes, for a first look; no figure to claim."""
        return cls(traces=QUICK_TRACES, tasks=("digits",), without=(_QUICK_WITHOUT,), num_seeds=2)

    def jobs(self) -> list[Job]:
        """Everything there is to run."""
        return [
            Job(arch, trace, task, method, seed)
            for task in self.tasks
            for arch in self.archs
            for trace in self.traces
            for method in (*self._methods(trace, arch), LIMIT)
            for seed in range(self.num_seeds)
        ]

    def _methods(self, trace: str, arch: Arch) -> list[str]:
        situation = SITUATIONS[trace]
        known = [name for name in methods(situation, arch) if name not in self.without]
        if self.methods:
            return [name for name in known if any(fnmatchcase(name, pattern) for pattern in self.methods)]
        return [name for name in known if situation.split == "test" or not name.startswith(FIXED)]


def evaluate(options: Options, on_progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """Run what is not there yet, and write the table and the page into `options.out`.

    Args:
        options: What to evaluate.
        on_progress: Told how many runs are done.
        processes: How many at a time; None for one per core.

    Returns:
        The table: see `table.tabulate`; with a "setup".

    Raises:
        ConfigError: a task whose data needs a package that is missing.
        PacelineError: a process died.
    """
    from paceline.evaluate.page import render_evaluation

    for name in options.tasks:
        TASKS[name].load()  # once, before the forks
    rows = run_all(options.jobs(), options.out / ROWS_NAME, on_progress, processes)
    table = {"setup": _setup(options), **tabulate(rows)}
    (options.out / TABLE_NAME).write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (options.out / PAGE_NAME).write_text(render_evaluation(table, rows), encoding="utf-8")
    return table


def run_all(jobs: Sequence[Job], path: Path, on_progress: Progress, processes: int | None = None) -> list[Row]:
    """Run what is not in the file yet, keep every row as soon as it is there, and return all in the order of `jobs`.

    Rows with errors, and rows that other code has made, are run again.

    Args:
        jobs: What to run.
        path: JSON lines, one per row; appended to.
        on_progress: Told how many rows are there.
        processes: How many at a time; None for one per core.
    """
    code = fingerprint()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {row.job: row for row in read_rows(path, code)}
    todo = [job for job in jobs if job not in known]
    num_done = len(jobs) - len(todo)
    on_progress(num_done, len(jobs))
    with path.open("a+b") as file:
        _drop_unfinished_line(file)
        for row in each_done(run_job, todo, processes):
            num_done += 1
            file.write(to_line(row, code).encode())
            file.flush()
            known[row.job] = row
            on_progress(num_done, len(jobs))
    return [known[job] for job in jobs]


def _drop_unfinished_line(file: Any) -> None:
    """Cut off what a killed run left behind its last line."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


def fingerprint() -> str:
    """Return a short hash of all code that a row depends on: rows of different code must not be mixed."""
    root = Path(paceline.__file__).parent
    digest = hashlib.sha256()
    for path in _sources(root, _MAKES_ROWS):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _sources(root: Path, parts: Iterable[str]) -> list[Path]:
    return sorted(
        path for part in parts for path in ([root / part] if part.endswith(".py") else (root / part).glob("*.py"))
    )


def _setup(options: Options) -> dict[str, Any]:
    return {
        "code": fingerprint(),
        "num_ranks": NUM_RANKS,
        "step_s": STEP_S,
        "num_seeds": options.num_seeds,
        "archs": list(options.archs),
        "traces": list(options.traces),
        "tasks": {
            name: {
                "target_accuracy": TASKS[name].target_accuracy,
                "batch_size": TASKS[name].batch_size,
                "budget_samples": TASKS[name].budget_samples,
            }
            for name in options.tasks
        },
        "without": list(options.without),
    }
