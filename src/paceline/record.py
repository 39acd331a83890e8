"""The run log: turns what happened into JSON lines, and JSON lines back into values.

A run directory holds `run.jsonl` (this log), `summary.json` and `report.html`. Every line is one object whose `kind`
names it; the first line is the run itself. Reports, dashboards and replay read nothing else.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from paceline.errors import RecordError
from paceline.types import NoiseScale, NormSample, StepTiming, Update, Verdict

SCHEMA_VERSION = 1
LOG_NAME = "run.jsonl"

# Values with a `kind` of their own. Everything else in the log is a plain object written with `RunLog.write`.
_KINDS: dict[str, type[Any]] = {
    "step": StepTiming,
    "norms": NormSample,
    "noise": NoiseScale,
    "verdict": Verdict,
    "update": Update,
}
_FIELDS = {kind: tuple(f.name for f in fields(cls)) for kind, cls in _KINDS.items()}
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}


def _fields_among(names: set[str]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(name for name in own if name in names) for kind, own in _FIELDS.items()}


_UNBOUNDED = _fields_among({"value", "high", "slowdown"})  # the numbers of ours that may be infinite
_INT_KEYED = _fields_among({"contributions", "dropped", "staleness"})  # JSON makes their keys text; we undo it


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a run log: `kind`, the raw `data`, and `value` where the kind is one of ours (else None)."""

    kind: str
    data: Mapping[str, Any]
    value: Any = None


def encode(value: Any) -> dict[str, Any]:
    """Turn one of the logged values into a JSON-ready object.

    Example:
        >>> encode(NoiseScale(step=3, value=60.0, low=40.0, high=90.0, num_samples=4))["kind"]
        'noise'
    """
    kind = _KIND_OF.get(type(value))
    if kind is None:
        raise TypeError(f"cannot log a {type(value).__name__}; loggable: {sorted(_KINDS)}")
    # Not `asdict`: our values are flat, and it copies deeply at ten times the cost, on every step of every rank.
    data: dict[str, Any] = {"kind": kind}
    for name in _FIELDS[kind]:
        content = getattr(value, name)
        # Times to 0.1 microseconds: half the size, and finer than any clock that made them.
        data[name] = round(content, 7) if type(content) is float and name.endswith("_s") else content
    return data


def decode(data: Mapping[str, Any]) -> Any:
    """Turn an object from the log back into its value; None where `kind` is not one of ours.

    Example:
        >>> decode(encode(StepTiming(rank=1, step=2, started_s=0.5, data_s=0.25))).data_s
        0.25
    """
    values = dict(data)
    kind = str(values.pop("kind", None))
    cls = _KINDS.get(kind)
    if cls is None:
        return None
    values.pop("time_s", None)
    for key in _INT_KEYED[kind]:
        if key in values:
            values[key] = {int(k): v for k, v in values[key].items()}
    for key in _UNBOUNDED[kind]:
        if key in values and values[key] is None:
            values[key] = math.inf
    return cls(**values)


def _strict(value: Any) -> Any:
    """JSON knows no infinity: written as null, and read back as infinity where a field must be a number."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a killed writer left behind its last line, so that what follows begins a line of its own."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class RunLog:
    """Appends lines to `run.jsonl` in a run directory; use as a context manager or call `close`.

    Args:
        directory: The run directory; made if missing. An existing log in it is continued, never overwritten.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as d:
        ...     with RunLog(Path(d)) as log:
        ...         log.write("run", schema=SCHEMA_VERSION, world_size=4)
        ...     [line.kind for line in read(Path(d))]
        ['run']
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lock = threading.Lock()
        _drop_unfinished_line(directory / LOG_NAME)
        self._file: IO[str] = (directory / LOG_NAME).open("a", encoding="utf-8")

    def write(self, kind: str, **data: Any) -> None:
        """Append one plain object."""
        self._append({"kind": kind, **data})

    def write_value(self, value: Any, **extra: Any) -> None:
        """Append one of the values of `types.py`."""
        self._append({**encode(value), **extra})

    def _append(self, data: dict[str, Any]) -> None:
        try:
            text = json.dumps(data, allow_nan=False) + "\n"
        except ValueError:
            text = json.dumps(_strict(data), allow_nan=False) + "\n"
        self._write(text)

    def write_encoded(self, line: str, time_s: float) -> None:
        """Append a value that another rank has turned into JSON, as it came, and when it came."""
        if "NaN" in line or "Infinity" in line:  # Python's own, not JSON's
            self._append({**json.loads(line), "time_s": time_s})
        else:
            self._write(f'{line[:-1]}, "time_s": {time_s}}}\n')

    def _write(self, text: str) -> None:
        with self._lock:  # the training thread writes metrics, the coordinator's the rest
            self._file.write(text)

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; harmless when repeated."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def parse(lines: Iterable[str], source: str = "run log") -> Iterator[Line]:
    """Turn lines of JSON into `Line`s; an unfinished last line (the writer was killed) is left out.

    Args:
        lines: The text lines.
        source: What to call the input in an error.

    Raises:
        RecordError: a line is not an object with a `kind`, or the log's schema is newer than this version reads.
    """
    broken: str | None = None
    for number, text in enumerate(lines, start=1):
        if broken is not None:
            raise RecordError(broken)
        if not text.strip():
            continue
        where = f"{source}, line {number}"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            broken = f"{where}: not JSON ({error.msg}): {text[:60]!r}"
            continue
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
            raise RecordError(f"{where}: wanted an object with a text field 'kind', got {text[:60]!r}")
        try:
            is_newer = data["kind"] == "run" and data.get("schema", 0) > SCHEMA_VERSION
            line = Line(data["kind"], data, decode(data))
        except (TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{where}: a '{data['kind']}' line has the wrong fields: {error}") from error
        if is_newer:
            raise RecordError(
                f"{where}: schema {data['schema']} is newer than {SCHEMA_VERSION}, which this version reads; "
                "update paceline"
            )
        yield line


def read(directory: Path) -> list[Line]:
    """Read the whole log of a run directory.

    Raises:
        RecordError: no log there, or a line that cannot be understood.
    """
    path = directory / LOG_NAME
    if not path.is_file():
        raise RecordError(f"no run log at {path}; wanted a run directory, which holds {LOG_NAME}")
    with path.open(encoding="utf-8") as file:
        lines = list(parse(file, str(path)))
    if not lines or lines[0].kind != "run":
        raise RecordError(f"{path}: the first line must have kind 'run', got {lines[0].kind if lines else 'nothing'}")
    return lines
