"""The charts: turns a run into curves over steps and time, each one SVG element."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeVar

from matplotlib.axes import Axes

from paceline.report.canvas import clean_style, mark_plan, new_figure, sparse, to_svg
from paceline.report.history import Run
from paceline.report.lanes import timeline
from paceline.report.palette import RANK_COLORS, SLOW_COLORS
from paceline.types import Rank, StepTiming

_MAX_LINE_POINTS = 300  # per curve; longer ones are drawn as medians over bins of steps
_MAX_ALL_POINTS = 3600  # of the curves of all ranks
_MAX_OTHERS = 64  # curves of ranks that are not slow; more would hide each other
_MAX_METRICS = 4
T = TypeVar("T")


def draw_all(run: Run, slow: Sequence[Rank] = ()) -> dict[str, str]:
    """Draw every chart that the run has data for.

    Args:
        run: The run.
        slow: Ranks that were named slow; they stand out.

    Returns:
        `<svg>` elements by name: timeline, steps, metrics, noise; a few hundred kB in total, however long the run.
    """
    charts: dict[str, str] = {}
    if any(run.timings.values()):
        charts["timeline"] = timeline(run, slow)
        charts["steps"] = own_and_wait(run, slow)
    optional = {"metrics": metrics(run), "noise": noise(run)}
    return charts | {name: svg for name, svg in optional.items() if svg is not None}


def own_and_wait(run: Run, slow: Sequence[Rank] = ()) -> str:
    """Draw own time and wait per step of every rank, with the steps at which plans took effect.

    Args:
        run: The run; at least one step.
        slow: Ranks to draw strongly.

    Returns:
        An `<svg>` element. Of many ranks, those that are not slow share one colour.
    """
    with clean_style():
        figure = new_figure(3.9)
        own_axes, wait_axes = figure.subplots(2, 1, sharex=True)
        shown = [*slow, *[rank for rank in run.timings if rank not in slow][:_MAX_OTHERS]]
        most = max(40, min(_MAX_LINE_POINTS, _MAX_ALL_POINTS // len(shown)))
        curves = {rank: _thinned(run.timings[rank], most) for rank in sorted(shown) if run.timings[rank]}
        highest = max(_typical_top(c) for c in curves.values())
        scale, unit = (1e3, "ms") if highest < 2.0 else (1.0, "s")
        for rank, points in curves.items():
            look, label = _look(rank, slow, len(run.timings))
            xs = [step for step, _, _ in points]
            own_axes.plot(xs, [own * scale for _, own, _ in points], label=label, **look)
            wait_axes.plot(xs, [wait * scale for _, _, wait in points], **look)
        steps = [float(d.data["effective_step"]) for d in run.adopted]
        last = max(t.step for timings in run.timings.values() for t in timings)
        for decision, step, has_room in zip(run.adopted, steps, sparse(steps, last), strict=True):
            mark_plan(own_axes, step, decision.epoch, labelled=has_room)
            mark_plan(wait_axes, step, decision.epoch, labelled=False)
        for axes, name in ((own_axes, "own time"), (wait_axes, "wait")):
            axes.set(ylabel=f"{name} per step, {unit}", ylim=(0.0, 1.15 * highest * scale))
        figure.legend(loc="outside upper center", ncols=8)
        wait_axes.set(xlabel="step (version of the model)", xlim=(0, last + 1))
        return to_svg(figure, "steps", "Own time and wait per step, by rank")


def _thinned(timings: Sequence[StepTiming], most: int) -> list[tuple[float, float, float]]:
    """Step, own time and wait; medians over bins where there are more than can be drawn."""
    size = math.ceil(len(timings) / most)
    bins = [timings[i : i + size] for i in range(0, len(timings), size)]
    return [(median(t.step for t in b), median(t.own_s for t in b), median(t.wait_s for t in b)) for b in bins]


def _typical_top(points: Sequence[tuple[float, float, float]]) -> float:
    """The top of a curve without its rare spikes, such as the first step."""
    values = sorted(max(own, wait) for _, own, wait in points)
    return values[math.ceil(0.97 * len(values)) - 1]


def _look(rank: Rank, slow: Sequence[Rank], num_ranks: int) -> tuple[dict[str, Any], str]:
    if rank in slow:
        color = SLOW_COLORS[list(slow).index(rank) % len(SLOW_COLORS)]
        return {"color": color, "linewidth": 2.2, "zorder": 3}, f"rank {rank} (slow)"
    if num_ranks <= len(RANK_COLORS):
        return {"color": RANK_COLORS[rank], "alpha": 0.9}, f"rank {rank}"
    # A label that begins with an underscore stays out of the legend.
    first_other = next(r for r in range(num_ranks) if r not in slow)
    return {"color": "#9A9A9A", "linewidth": 0.7}, "other ranks" if rank == first_other else "_"


def metrics(run: Run) -> str | None:
    """Draw the user's own numbers over time; None where there are none.

    Args:
        run: The run.

    Returns:
        An `<svg>` element with up to four metrics, those logged first.
    """
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for metric in run.of_kind("metric"):
        if math.isfinite(metric["value"]):
            series[str(metric["name"])].append((float(metric["time_s"]), float(metric["value"])))
    names = list(series)[:_MAX_METRICS]
    if not names:
        return None
    with clean_style():
        figure = new_figure(0.5 + 2.0 * len(names))
        for axes, name in zip(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True):
            points = _every(series[name])
            marker = "o" if len(points) <= 60 else None
            axes.plot([x for x, _ in points], [y for _, y in points], color=RANK_COLORS[0], marker=marker, markersize=3)
            axes.set_ylabel(name if len(name) <= 24 else f"{name[:23]}…")
            _mark_plan_times(axes, run, axes is figure.axes[0])
        figure.axes[-1].set_xlabel("seconds since the run began (rank 0's clock)")
        return to_svg(figure, "metrics", f"Over time: {', '.join(names)}")


def noise(run: Run) -> str | None:
    """Draw the gradient noise scale over time with its 95 % interval; None where it was not measured.

    Args:
        run: The run.

    Returns:
        An `<svg>` element.
    """
    points = _every([(time_s, n) for time_s, n in run.noise if math.isfinite(n.value)])
    if not points:
        return None
    with clean_style():
        figure = new_figure(2.4)
        axes = figure.add_subplot()
        times = [time_s for time_s, _ in points]
        settled = [n.value for _, n in points[len(points) // 4 :]]
        # First estimates can be wild; they must not flatten the rest.
        top = max(1.6 * max(settled), min(1.15 * max(n.value for _, n in points), 10.0 * max(settled)))
        highs = [min(n.high, 10 * top) for _, n in points]  # an endless interval ends beyond the picture
        axes.fill_between(
            times, [n.low for _, n in points], highs, color="#56B4E9", alpha=0.3, linewidth=0, label="95 % interval"
        )
        axes.plot(times, [n.value for _, n in points], color=RANK_COLORS[0], label="gradient noise scale")
        axes.set(ylabel="samples", ylim=(0.0, top or 1.0))
        axes.set_xlabel("seconds since the run began (rank 0's clock)")
        _mark_plan_times(axes, run, labelled=True)
        figure.legend(loc="outside upper center", ncols=2)
        return to_svg(figure, "noise", "Gradient noise scale over time with its interval")


def _mark_plan_times(axes: Axes, run: Run, labelled: bool) -> None:
    left, right = axes.get_xlim()
    times = [float(d.data["time_s"]) for d in run.adopted]
    for decision, time_s, has_room in zip(run.adopted, times, sparse(times, right - left), strict=True):
        mark_plan(axes, time_s, decision.epoch, labelled and has_room)


def _every(points: Sequence[T]) -> list[T]:
    """At most `_MAX_LINE_POINTS` of the points, evenly chosen; the last one always."""
    size = math.ceil(len(points) / _MAX_LINE_POINTS) if points else 1
    return list(points[::-size][::-1])
