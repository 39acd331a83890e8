"""The summary: turns a run log into one JSON-ready object and a verdict in words, and writes both with the page."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.record import Line, read
from paceline.report.history import Decision, Run
from paceline.report.words import text
from paceline.types import Phase, Rank, StepTiming

__all__ = ["PAGE_NAME", "SUMMARY_NAME", "SUMMARY_SCHEMA", "summarise", "text", "write_reports"]

SUMMARY_SCHEMA = 1
SUMMARY_NAME = "summary.json"
PAGE_NAME = "report.html"
_WARMUP_STEPS = 3  # as the detector: allocation, bucket rebuild and caches make the first steps slow on all ranks
_LAST_STEPS = 30  # tell whether a rank is still slow
_CULPRIT_FIELDS = ("rank", "host", "phase", "cause", "slowdown", "excess_s", "lost_ratio", "evidence", "since_step")

logger = logging.getLogger("paceline")


def write_reports(run_dir: Path) -> dict[str, Any]:
    """Read a run's log and write `summary.json` and `report.html` beside it.

    The summary comes first. An error while drawing costs the charts, an error on the page costs the page; both are
    logged as warnings. Existing reports are overwritten.

    Args:
        run_dir: The run directory; holds `run.jsonl`.

    Returns:
        The summary, as `summarise` returns it.

    Raises:
        RecordError: there is no log, or it cannot be understood.
        OSError: `summary.json` cannot be written.
    """
    from paceline.report import page  # templates are for whoever writes a page, not for every training process

    lines = read(run_dir)
    summary = summarise(lines)
    _replace(run_dir / SUMMARY_NAME, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    for with_charts in (True, False):
        try:
            _replace(run_dir / PAGE_NAME, page.render(lines, summary, with_charts=with_charts))
            break
        except Exception as error:  # whatever goes wrong here, the run and its summary must not suffer
            what = "without charts" if with_charts else "not at all; summary.json has everything"
            logger.warning("%s is written %s: %s: %s", run_dir / PAGE_NAME, what, type(error).__name__, error)
    return summary


def _replace(path: Path, content: str) -> None:
    """Write a file so that no reader ever sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(content, encoding="utf-8")
    draft.replace(path)


def summarise(lines: Sequence[Line]) -> dict[str, Any]:
    """Condense a run log. Pure: the same lines give the same summary.

    Numbers that are not finite become None, so that the result is strict JSON.

    Args:
        lines: A log as `record.read` returns it; also one without an end. Of several runs in it the last counts.

    Returns:
        An object with "schema": 1 and these keys.

        - `world_size`, `hosts` (by rank), `mode`, `backend`, `torch`, `script`, `started_at_s`, `steps`, `duration_s`
        - `per_rank`: steps; medians of own time and wait, s; `slowdown`: own median over the median of the other
          ranks' own medians; `slowdown_lately`: the same by means over the last 30 steps; what waiting for the rank
          cost over the whole run (`lost_s`, `lost_ratio`); mean seconds by phase; samples
        - `culprit`: the verdict with the largest lost ratio, or None; `verdicts`: all of them
        - `decisions`: plans with status, predicted and measured gain
        - `noise_scale` and `noise_interval`, samples; `metrics`: last values by name
        - `samples`: trained, dropped, epochs; None where the loop brings its own loader, which nobody counts
        - `staleness`: mean and max of attached ranks' gradients, versions; None without any
        - `failure`; `identical_parameters`; `partial`: whether the log lacks its end

    Example:
        >>> steps = [StepTiming(rank, step, 0.0, forward_s=0.1) for step in range(9) for rank in range(2)]
        >>> summary = summarise([Line("run", {"world_size": 2}), *(Line("step", {}, step) for step in steps)])
        >>> summary["culprit"], summary["per_rank"][1]["own_s_median"], summary["partial"]
        (None, 0.1, True)
    """
    run = Run.of(lines)
    hosts = run.hosts
    verdicts = [{**_fields(verdict), "time_s": time_s} for time_s, verdict in run.verdicts]
    # At equal cost the earlier one.
    worst = max(verdicts, key=lambda v: v["lost_ratio"], default=None)
    ends, failures = run.of_kind("end"), run.of_kind("failure")
    staleness = [versions for update in run.updates for versions in update.staleness.values()]
    steps = [timing.step for timings in run.timings.values() for timing in timings]
    noise = run.noise[-1][1] if run.noise else None
    end: Mapping[str, Any] = ends[-1] if ends else {}
    summary = {
        "schema": SUMMARY_SCHEMA,
        "world_size": len(run.timings),
        "hosts": hosts,
        **{key: run.header.get(key) for key in ("mode", "backend", "torch", "script", "started_at_s")},
        "steps": max([*steps, *(update.version for update in run.updates)], default=0),
        "duration_s": _duration_s(run, end),
        "per_rank": _per_rank(run, hosts),
        "culprit": None if worst is None else {key: worst[key] for key in _CULPRIT_FIELDS},
        "verdicts": verdicts,
        "decisions": [_decision(decision) for decision in run.decisions],
        "noise_scale": end.get("noise_scale") if noise is None else noise.value,
        "noise_interval": None if noise is None else [noise.low, noise.high],
        "samples": _samples(run, end),
        "staleness": {"mean": fmean(staleness), "max": max(staleness)} if staleness else None,
        "metrics": {str(metric["name"]): metric["value"] for metric in run.of_kind("metric")},
        "failure": {k: failures[-1].get(k) for k in ("rank", "host", "reason", "time_s")} if failures else None,
        "identical_parameters": end.get("identical_parameters"),
        "partial": not ends,
    }
    strict: dict[str, Any] = _strict(summary)
    return strict


def _duration_s(run: Run, end: Mapping[str, Any]) -> float:
    """By the end line, after which metrics may have been added; else by the last line that has a time."""
    times = [end.get("time_s")] if end else [line.data.get("time_s") for line in run.lines]
    return max([float(time_s) for time_s in times if time_s is not None], default=0.0)


def _fields(value: Any) -> dict[str, Any]:
    """A slotted dataclass as a dict, in the order of its fields."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _strict(value: Any) -> Any:
    """Round to a microsecond and replace what JSON has no number for."""
    match value:
        case float():
            return round(value, 6) if math.isfinite(value) else None
        case dict():
            return {key: _strict(item) for key, item in value.items()}
        case list() | tuple():
            return [_strict(item) for item in value]
    return value


def _per_rank(run: Run, hosts: Sequence[str]) -> list[dict[str, Any]]:
    medians = {r: median(t.own_s for t in timings) for r, timings in run.timings.items() if timings}
    # Means, because a rank that is slow in every fifth step still is.
    lately = {r: fmean(t.own_s for t in timings[-_LAST_STEPS:]) for r, timings in run.timings.items() if timings}
    rows = run.ring_rows()
    lost_s, total_s = _lost(rows)
    entries = []
    for rank, timings in run.timings.items():
        steady = timings[_WARMUP_STEPS:] if len(timings) > 2 * _WARMUP_STEPS else timings
        entries.append(
            {
                "rank": rank,
                "host": hosts[rank],
                "steps": len(timings),
                "steps_attached": sum(run.is_attached(rank, timing.step) for timing in timings),
                "own_s_median": medians.get(rank),
                "wait_s_median": median(t.wait_s for t in timings) if timings else None,
                "slowdown": _slowdown(medians, rank),
                "slowdown_lately": _slowdown(lately, rank),
                "lost_s": lost_s.get(rank, 0.0),
                "lost_ratio": lost_s.get(rank, 0.0) / total_s if total_s > 0 else 0.0,
                "phases": {p.value: fmean(t.of(p) for t in steady) if steady else 0.0 for p in Phase},
                "samples": sum(timing.samples for timing in timings),
            }
        )
    return entries


def _slowdown(own_s: Mapping[Rank, float], rank: Rank) -> float | None:
    others = [own for other, own in own_s.items() if other != rank]
    reference = median(others) if others else 0.0
    return own_s[rank] / reference if rank in own_s and reference > 0 else None


def _lost(rows: Mapping[int, Mapping[Rank, StepTiming]]) -> tuple[dict[Rank, float], float]:
    """What waiting for each rank cost while it was in the ring, and the job's time, seconds.

    As for a verdict, a rank costs its own time above the median of the others, in steps in which it is more than
    10 % and 5 ms above: every step has a last rank, and that alone is not a loss. A handful of steps says nothing.
    """
    if len(rows) < 2 * _WARMUP_STEPS:
        return {}, 0.0
    lost: dict[Rank, float] = {}
    total = 0.0
    for row in list(rows.values())[_WARMUP_STEPS:]:
        total += max(timing.wall_s for timing in row.values())
        for rank, timing in row.items():
            others = [t.own_s for r, t in row.items() if r != rank]
            if not others or timing.expected_s > 0.0:
                continue
            excess = timing.own_s - median(others)
            if excess > max(0.005, 0.1 * median(others)):
                lost[rank] = lost.get(rank, 0.0) + excess
    return lost, total


def _decision(decision: Decision) -> dict[str, Any]:
    plan, gain = decision.data, decision.gain or {}
    return {
        "epoch": decision.epoch,
        **{key: plan.get(key) for key in ("status", "effective_step", "policy", "lr_scale", "reason")},
        "predicted_gain": plan.get("predicted_gain"),
        "measured_gain": gain.get("measured"),
        **{key: gain.get(key) for key in ("interval_before_s", "interval_after_s", "batch_before", "batch_after")},
        "time_s": plan.get("time_s"),
    }


def _samples(run: Run, end: Mapping[str, Any]) -> dict[str, Any] | None:
    """Samples by the end line; else counted from updates and, where everybody was in the ring, from steps."""
    counts = end.get("samples")
    if counts is None:
        updates = {update.version: update for update in run.updates}
        in_ring = sum(t.samples for step, row in run.ring_rows().items() if step not in updates for t in row.values())
        counts = {
            "trained": in_ring + sum(sum(update.contributions.values()) for update in updates.values()),
            "dropped": sum(sum(update.dropped.values()) for update in updates.values()),
            "epochs": None,
        }
    # Without leased batches nobody knows how many samples a step trains; zero would be a lie.
    return dict(counts) if counts["trained"] or counts["dropped"] else None
