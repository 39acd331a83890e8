"""Operation traces of pipeline-parallel jobs: turns a Parquet file into arrays, and these into a `Table`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError, TraceError
from paceline.sim.trace import Table, from_samples

COLUMNS: Final = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc")
"""What is read; the files have more."""

COMPUTE: Final = frozenset({"forward-compute", "backward-compute", "optimizer", "gc"})
"""Kinds of operation that a worker does by itself; all others are communication."""


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """A job's operations, the same ones in every step: times by operation, then step.

    Args:
        source: What the trace is called.
        kinds: By operation: what it does, such as "forward-compute".
        workers: By operation: who does it, 0..num_workers - 1.
        sequence: By operation: its number among those of its kind on its worker in a step, from 0.
        start_s: By operation and step: when it began, seconds from the step's start.
        duration_s: By operation and step: how long it took, waiting included, seconds.
        source_ranks: By worker: its rank in the source.
        stages, dp_ranks: By worker: its place in the pipeline and among the replicas, from 0.
    """

    source: str
    kinds: tuple[str, ...]
    workers: NDArray[np.int64]
    sequence: NDArray[np.int64]
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    source_ranks: tuple[int, ...]
    stages: NDArray[np.int64]
    dp_ranks: NDArray[np.int64]


def read_operations(data: bytes, source: str) -> Operations:
    """Read an operation trace as StragglerAnalysis publishes them.

    Args:
        data: Content of the Parquet file.
        source: What to call it.

    Returns:
        The operations.

    Raises:
        ConfigError: pyarrow is not installed.
        TraceError: no Parquet file, a column or a cell is missing, a negative or infinite time, more than one model
            chunk per stage, a rank in two places, or steps that do not all have the same operations. It names the row.

    Source:
        ByteDance-Seed/StragglerAnalysis (artifact of arXiv 2505.05713).
    """
    columns = _columns(data, source)
    for name in ("start_ts", "duration"):
        wrong = np.flatnonzero(~(np.isfinite(columns[name]) & (columns[name] >= 0)))
        if wrong.size:
            raise TraceError(f"{source}, row {wrong[0] + 1}: wanted a {name} >= 0 s, got {columns[name][wrong[0]]}")
    chunked = np.flatnonzero(columns["mc"] > 0)
    if chunked.size:
        raise TraceError(f"{source}, row {chunked[0] + 1}: wanted one model chunk per stage (mc 0 or -1), got more")
    ranks, worker = np.unique(columns["rank"], return_inverse=True)
    places = _places(columns, worker, source)
    steps, step = np.unique(columns["step"], return_inverse=True)
    kinds, kind = np.unique(columns["optype"], return_inverse=True)
    codes, operation = np.unique(np.stack([worker, kind, columns["seq_id"]]), axis=1, return_inverse=True)
    operation = operation.reshape(-1)
    _check_same_in_every_step(operation, step, codes.shape[1], steps, source)
    times = np.empty((2, codes.shape[1], len(steps)))
    times[0, operation, step] = columns["start_ts"]
    times[1, operation, step] = columns["duration"]
    return Operations(
        source=source,
        kinds=tuple(str(kinds[k]) for k in codes[1]),
        workers=codes[0],
        sequence=codes[2],
        start_s=times[0],
        duration_s=times[1],
        source_ranks=tuple(int(rank) for rank in ranks),
        stages=places[0],
        dp_ranks=places[1],
    )


def from_operations(operations: Operations) -> Table:
    """Turn an operation trace into step times: what every worker computes in a step, forward and backward.

    Communication is left out, since it holds waiting. Workers of different stages do different work; as a trace
    each stands for a rank that is as slow as it is.

    Args:
        operations: The trace.

    Returns:
        A table with one rank per worker and one step per step of the trace.

    Raises:
        TraceError: a worker that computes nothing.
    """
    computes = np.isin(operations.kinds, ("forward-compute", "backward-compute"))
    busy_s = np.zeros((len(operations.source_ranks), operations.duration_s.shape[1]))
    np.add.at(busy_s, operations.workers[computes], operations.duration_s[computes])
    idle = np.argwhere(busy_s <= 0)
    if idle.size:
        rank = operations.source_ranks[idle[0][0]]
        raise TraceError(f"{operations.source}, rank {rank}: wanted compute operations in every step, got none")
    samples = [
        (step, rank, float(seconds))
        for row, rank in zip(busy_s, operations.source_ranks, strict=True)
        for step, seconds in enumerate(row)
    ]
    return from_samples(operations.source, samples)


def _columns(data: bytes, source: str) -> dict[str, NDArray[Any]]:
    """The wanted columns as arrays, checked for gaps."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("reading Parquet needs pyarrow; install it with: pip install 'paceline[sim]'") from error
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if missing:
            got = ", ".join(file.schema_arrow.names)
            raise TraceError(f"{source}: wanted columns {', '.join(COLUMNS)}, got {got}")
        table = file.read(columns=list(COLUMNS))
    except (pyarrow.ArrowException, OSError) as error:
        raise TraceError(f"{source}: wanted a Parquet file, got: {error}") from error
    for name in COLUMNS:
        if table[name].null_count:
            row = table[name].is_null().index(True).as_py() + 1
            raise TraceError(f"{source}, row {row}: wanted a value for '{name}', got none")
    if not table.num_rows:
        raise TraceError(f"{source}: no operations; wanted at least one")
    kinds = np.array(table["optype"].to_pylist(), dtype=str)
    times = {name: table[name].to_numpy().astype(np.float64) for name in ("start_ts", "duration")}
    whole = {name: table[name].to_numpy().astype(np.int64) for name in COLUMNS if name not in (*times, "optype")}
    return {**times, **whole, "optype": kinds}


def _places(columns: dict[str, NDArray[Any]], worker: NDArray[np.int64], source: str) -> NDArray[np.int64]:
    """Stage and replica by worker, from its first row; its others must agree."""
    _, first = np.unique(worker, return_index=True)
    place = np.stack([columns["stage"], columns["dp_rank"]])
    elsewhere = np.flatnonzero((place != place[:, first[worker]]).any(axis=0))
    if elsewhere.size:
        row = elsewhere[0]
        raise TraceError(
            f"{source}, row {first[worker[row]] + 1}: wanted one stage and one dp_rank for rank "
            f"{columns['rank'][row]}, got another in row {row + 1}"
        )
    return place[:, first]


def _check_same_in_every_step(
    operation: NDArray[np.int64], step: NDArray[np.int64], num_operations: int, steps: NDArray[np.int64], source: str
) -> None:
    """The replay follows one graph for all steps, so every operation must be there once in each."""
    counts = np.zeros((num_operations, len(steps)), dtype=np.int64)
    np.add.at(counts, (operation, step), 1)
    wrong = np.argwhere(counts != 1)
    if wrong.size:
        of, at = wrong[0]
        raise TraceError(
            f"{source}, step {steps[at]}: wanted the same operations in every step, each once, got "
            f"{counts[of, at]} of one that other steps have"
        )
