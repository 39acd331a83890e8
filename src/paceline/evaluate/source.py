"""What to simulate: turns the TRACE of the command line (a family, a file or a run directory) into traces by seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.record import LOG_NAME, read
from paceline.report.history import Run
from paceline.sim.families import FAMILIES
from paceline.sim.operations import from_operations, read_operations
from paceline.sim.parse import PAI_MINI_BATCH, from_csv, from_pai, from_timings
from paceline.sim.trace import Table, Trace

DEFAULT_RANKS = 8


@dataclass(frozen=True, slots=True)
class Source:
    """Where traces come from.

    Args:
        name: For tables.
        num_ranks: Ranks to simulate.
        family, options: One of `FAMILIES` and its fields, where the stragglers are synthetic.
        table: What was measured otherwise: then all seeds see the same.
    """

    name: str
    num_ranks: int
    family: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    table: Table | None = None

    @property
    def reference_s(self) -> float | None:
        """What a step takes where nobody is slow, seconds; None where the source does not say."""
        return None if self.table is None else self.table.reference_s

    def trace(self, seed: int) -> Trace:
        """The trace of one seed.

        Raises:
            ValueError: an option out of its range.
        """
        if self.table is not None:
            return self.table
        assert self.family is not None
        return FAMILIES[self.family](num_ranks=self.num_ranks, seed=seed, **dict(self.options))


def find_source(text: str, num_ranks: int | None = None) -> Source:
    """Return what a TRACE stands for.

    Args:
        text: `FAMILY` or `FAMILY:FIELD=VALUE,...` (several numbers for a field are parted by dashes); a CSV file
            with the columns step, rank and seconds, or those of Alibaba's mini-batch files; a Parquet file of
            operations; or a run directory.
        num_ranks: How many ranks; None for eight, or as many as were measured.

    Raises:
        ConfigError: none of these, an unknown field, a value that does not fit, or more ranks than were measured.
        TraceError, RecordError: a file that cannot be read as what it seems to be.

    Example:
        >>> find_source("constant:rank=2,slow_factor=4").trace(seed=0).name
        'constant-4x'
    """
    if num_ranks is not None and num_ranks < 2:
        raise ConfigError(f"--ranks must be >= 2, got {num_ranks}")
    family, _, given = text.partition(":")
    if family in FAMILIES:
        return _synthetic(family, given, num_ranks or DEFAULT_RANKS)
    path = Path(text)
    if not path.exists():
        raise ConfigError(
            f"TRACE {text!r} is no file or run directory, and no family of stragglers; families are "
            f"{', '.join(FAMILIES)}"
        )
    table = _measured(path)
    if num_ranks is not None and num_ranks > table.num_ranks:
        raise ConfigError(f"--ranks is {num_ranks}, and {path} has {table.num_ranks} ranks")
    if table.num_ranks < 2:
        raise ConfigError(f"{path} has one rank only: there is nobody to wait for")
    return Source(path.name, num_ranks or table.num_ranks, table=table)


def _measured(path: Path) -> Table:
    if path.is_dir():
        if not (path / LOG_NAME).is_file():
            raise ConfigError(f"{path} is no run directory: it holds no {LOG_NAME}")
        run = Run.of(read(path))
        return from_timings((timing for timings in run.timings.values() for timing in timings), str(path))
    if path.suffix == ".parquet":
        return from_operations(read_operations(path.read_bytes(), str(path)))
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        header = {cell.strip() for cell in file.readline().split(",")}
        file.seek(0)
        return (from_pai if set(PAI_MINI_BATCH) <= header else from_csv)(file, str(path))


def _synthetic(family: str, given: str, num_ranks: int) -> Source:
    known = {field.name: field for field in fields(FAMILIES[family]) if field.name not in ("num_ranks", "seed")}
    options: dict[str, Any] = {}
    for option in filter(None, given.split(",")):
        name, equals, value = option.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"{family} has no option {option!r}; wanted NAME=VALUE with one of {', '.join(known)}")
        options[name] = _value(known, name, value)
    source = Source(family, num_ranks, family, tuple(options.items()))
    try:
        return Source(source.trace(0).name, num_ranks, family, source.options)
    except ValueError as error:
        raise ConfigError(f"{family} cannot be so: {error}") from error


def _value(known: Mapping[str, Field[Any]], name: str, text: str) -> Any:
    """The value as the field's default is: a whole number, a number, or several."""
    default = known[name].default
    annotation = str(known[name].type)
    try:
        if text.lower() == "none" and "None" in annotation:
            return None
        if "tuple" in annotation or isinstance(default, tuple):
            return tuple(float(part) for part in text.split("-"))
        return int(text) if annotation.partition(" ")[0] in ("int", "Rank") else float(text)
    except ValueError:
        raise ConfigError(f"option {name} cannot be {text!r}; its default is {default}") from None
