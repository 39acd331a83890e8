"""Readers of measured step times: turns lines of CSV, or a run's timings, into a `Table`. Pure: lines, not paths."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence

from paceline.errors import TraceError
from paceline.sim.trace import Table, from_samples
from paceline.types import StepTiming

STEP_RANK_SECONDS = ("step", "rank", "seconds")
"""The columns of our own CSV."""

PAI_MINI_BATCH = ("time", "worker", "batch_time_norm")
"""The columns that matter in the mini-batch files of Alibaba's cluster-trace-gpu-v2020."""

PAI_STEPS_PER_SAMPLE = 10
"""Their times count 1, 11, 21, ...: one step in ten was looked at."""


def from_csv(
    lines: Iterable[str],
    source: str,
    columns: tuple[str, str, str] = STEP_RANK_SECONDS,
    in_seconds: bool = True,
    steps_per_sample: int = 1,
) -> Table:
    """Read one sample per line: a step, a rank and a time.

    The first line names the columns; others than those wanted are passed over, and so are empty lines. What becomes
    of several samples for the same step and rank, and of missing ones, says `from_samples`.

    Args:
        lines: The text lines.
        source: What to call the input: the trace's name, and where an error is.
        columns: Names of the columns with the step and the rank, integers >= 0, and the time, a number > 0.
        in_seconds: Whether the time is in seconds; only ratios mean anything otherwise.
        steps_per_sample: Steps that every sample stands for, >= 1.

    Returns:
        The table.

    Raises:
        TraceError: a column is missing, a line has more or fewer cells than the first, a cell is no such number, or
            there is no sample. It names the line.

    Example:
        >>> from_csv(["step,rank,seconds", "1,0,0.05", "1,1,0.2"], "two.csv").ratios
        ((1.0,), (4.0,))
        >>> from_csv(["step,rank,seconds", "1,0,fast"], "two.csv")
        Traceback (most recent call last):
        ...
        paceline.errors.TraceError: two.csv, line 2: wanted a number > 0 for 'seconds', got 'fast'
    """
    return from_samples(source, _samples(lines, source, columns), in_seconds, steps_per_sample)


def from_pai(lines: Iterable[str], source: str) -> Table:
    """Read a mini-batch file of Alibaba's GPU trace: one sample for ten steps, times normalised per file.

    Args:
        lines: The text lines.
        source: What to call the input.

    Returns:
        The table; it holds every sample for ten steps, so that what was slow for long is slow for as many steps.

    Raises:
        TraceError: as `from_csv`.

    Source:
        Alibaba Cluster Trace Program, cluster-trace-gpu-v2020, mini-batch-time.

    Example:
        >>> lines = [",worker,gpu,time,batch_time_norm", "0,0,25,1,400", "1,1,25,1,500"]
        >>> from_pai(lines, "job").ratios
        ((1.0,), (1.25,))
    """
    return from_csv(lines, source, PAI_MINI_BATCH, in_seconds=False, steps_per_sample=PAI_STEPS_PER_SAMPLE)


def from_timings(timings: Iterable[StepTiming], source: str) -> Table:
    """Turn what a run recorded into a trace: the values of the `step` lines in its log.

    The time is the rank's own time, without waiting and without stretches that were announced as slow. A step that an
    attached rank has no timing for, since it is slower than the ring, carries on its last one.

    Args:
        timings: In any order; several runs must not be mixed.
        source: What to call them.

    Returns:
        The table.

    Raises:
        TraceError: an own time that is not positive and finite, or no timing at all.

    Example:
        >>> timings = [StepTiming(0, 1, 0.0, data_s=0.05), StepTiming(1, 1, 0.0, data_s=0.1, wait_s=9.0)]
        >>> from_timings(timings, "run").ratios
        ((1.0,), (2.0,))
    """

    def samples() -> Iterator[tuple[int, int, float]]:
        for t in timings:
            if not (math.isfinite(t.own_s) and t.own_s > 0):
                raise TraceError(f"{source}, rank {t.rank}, step {t.step}: wanted an own time > 0 s, got {t.own_s}")
            yield t.step, t.rank, t.own_s

    return from_samples(source, samples())


def _samples(lines: Iterable[str], source: str, columns: tuple[str, str, str]) -> Iterator[tuple[int, int, float]]:
    """The wanted three cells of every line, checked."""
    rows = _rows(lines, source)
    _, header = next(rows, (1, []))
    missing = [name for name in columns if name not in header]
    if missing:
        raise TraceError(f"{source}, line 1: wanted columns {', '.join(columns)}, got {','.join(header)!r}")
    step, rank, time = (header.index(name) for name in columns)
    for number, cells in rows:
        where = f"{source}, line {number}"
        if len(cells) != len(header):
            raise TraceError(f"{where}: wanted {len(header)} cells, got {len(cells)}: {','.join(cells)[:60]!r}")
        yield (
            _whole(cells[step], columns[0], where),
            _whole(cells[rank], columns[1], where),
            _positive(cells[time], columns[2], where),
        )


def _rows(lines: Iterable[str], source: str) -> Iterator[tuple[int, Sequence[str]]]:
    """The cells of every line that is not empty, with the line's number."""
    reader = csv.reader(lines)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise TraceError(f"{source}, line {reader.line_num}: wanted cells separated by commas, got: {error}") from error


def _whole(cell: str, column: str, where: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and len(cell) < 19):
        raise TraceError(f"{where}: wanted a whole number >= 0 for '{column}', got {cell[:60]!r}")
    return int(cell)


def _positive(cell: str, column: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise TraceError(f"{where}: wanted a number > 0 for '{column}', got {cell[:60]!r}")
    return number
