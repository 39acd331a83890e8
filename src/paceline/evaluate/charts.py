"""The pictures: turns rows and tables into accuracy over time, bars of time saved and maps of slowness, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from paceline.evaluate.claims import ARCH_WORDS
from paceline.evaluate.run import Row
from paceline.report.canvas import clean_style, new_figure, to_svg
from paceline.sim.trace import Trace

AUTO_COLOR = "#D55E00"
SSGD_COLOR = "#333333"
OTHER_COLORS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#9A7D0A", "#8E6C8A", "#7F7F7F", "#B2DF8A")
_ARCH_COLORS = {"ps": "#0072B2", "ring": "#E69F00"}
_NUM_TIMES = 200  # points of a mean curve
_NUM_CELLS = 240  # of the map of slowness, along the time
_COLUMNS = 3
_HEAT = LinearSegmentedColormap.from_list("slow", ("#FFFFFF", "#FCE3CC", "#E69F00", "#D55E00", "#7A2E00"))

Curves = Mapping[str, Sequence[Row]]
"""Rows by method, one per seed."""


def reductions(summary: Mapping[str, Any]) -> str | None:
    """Draw the time that ours saves against every baseline, in the median; None where nothing was compared.

    Args:
        summary: What `table.summarise` made.
    """
    archs = [arch for arch in _ARCH_COLORS if summary[arch]["reduction"]]
    names = list(dict.fromkeys(name for arch in archs for name in summary[arch]["reduction"]))
    if not names:
        return None
    names.sort(key=lambda name: max(summary[arch]["reduction"].get(name, -9.0) for arch in archs))
    with clean_style():
        figure = new_figure(0.9 + 0.3 * len(names))
        axes = figure.add_subplot()
        height = 0.8 / len(archs)
        for i, arch in enumerate(archs):
            values = [100.0 * summary[arch]["reduction"].get(name, np.nan) for name in names]
            places = [y + 0.4 - (i + 0.5) * height for y in range(len(names))]
            bars = axes.barh(
                places, np.clip(values, -50.0, 100.0), height, color=_ARCH_COLORS[arch], label=ARCH_WORDS[arch]
            )
            labels = ["" if np.isnan(value) else f"{value:.0f} %" for value in values]
            axes.bar_label(bars, labels, padding=3, fontsize=7.5)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel="time to accuracy saved, median, %")
        axes.axvline(0.0, color="#777777", linewidth=0.8)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08, y=0.01)
        figure.legend(loc="outside upper center", ncols=2)
        return to_svg(figure, "reductions", "Time to accuracy saved against every baseline")


def accuracy_grid(panels: Sequence[tuple[str, Curves, float]]) -> str:
    """Draw accuracy over virtual time for several situations side by side.

    Args:
        panels: A title, the rows to draw and the target accuracy of each, one at least.

    Returns:
        An `<svg>` element; a method has one colour in all panels.
    """
    methods = list(dict.fromkeys(method for _, curves, _ in panels for method in curves))
    num_columns = 2 if len(panels) in (2, 4) else min(_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with clean_style():
        figure = new_figure(0.5 + 2.5 * num_rows)
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, curves, target) in zip(grid.flat, panels, strict=False):
            _draw_curves(axes, curves, methods, target)
            axes.set_title(title, fontsize=9)
        for axes in grid[:, 0]:
            axes.set_ylabel("test accuracy")
        for axes in grid.flat[max(0, len(panels) - num_columns) : len(panels)]:
            axes.set_xlabel("virtual seconds")
        handles = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
        shown = [method for method in methods if method in handles]
        figure.legend([handles[m] for m in shown], shown, loc="outside upper center", ncols=min(8, len(shown)))
        return to_svg(figure, "curves", f"Accuracy over time: {', '.join(title for title, _, _ in panels)}")


def accuracy(title: str, curves: Curves, target: float) -> str:
    """Draw accuracy over virtual time, one line per method: the mean over seeds, the band all of them.

    Args:
        title: Goes into the description.
        curves: What to draw.
        target: Drawn as a dashed line, 0..1.
    """
    with clean_style():
        figure = new_figure(4.2)
        axes = figure.add_subplot()
        _draw_curves(axes, curves, list(curves), target)
        axes.set(xlabel="virtual seconds", ylabel="test accuracy")
        figure.legend(loc="outside right upper")
        return to_svg(figure, "accuracy", f"Accuracy over time, {title}")


def slowness(trace: Trace, num_ranks: int, until_s: float, step_s: float) -> str:
    """Draw how slow every rank is when.

    Args:
        trace: Of what.
        num_ranks: Ranks 0..num_ranks - 1 are drawn.
        until_s: Up to when, virtual seconds, > 0.
        step_s: Own time where nobody is slow, seconds: how fast the steps of a measured trace go by.
    """
    times = np.linspace(0.0, until_s, _NUM_CELLS, endpoint=False)
    factors = [[trace.slowdown(rank, int(t / step_s), float(t)) for t in times] for rank in range(num_ranks)]
    with clean_style():
        figure = new_figure(0.8 + 0.16 * max(4, min(num_ranks, 32)))
        axes = figure.add_subplot()
        top = max(2.0, float(np.percentile(factors, 99.5)))
        extent = (0.0, until_s, num_ranks - 0.5, -0.5)
        image = axes.imshow(
            factors, aspect="auto", cmap=_HEAT, vmin=1.0, vmax=top, extent=extent, interpolation="nearest"
        )
        axes.set(xlabel="virtual seconds", ylabel="rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
        figure.colorbar(image, ax=axes, label="slowdown", pad=0.01)
        return to_svg(figure, "slowness", "How slow every rank is over time")


def _draw_curves(axes: Axes, curves: Curves, methods: Sequence[str], target: float) -> None:
    end_s = _shown_until([row for rows in curves.values() for row in rows])
    times = np.linspace(0.0, end_s, _NUM_TIMES)
    others = [method for method in methods if method not in ("auto", "ssgd")]
    lowest = 1.0
    for method in sorted(curves, key=lambda name: (name == "auto", name == "ssgd")):
        values = np.array([_accuracy_at(times, row) for row in curves[method]])
        color = {"auto": AUTO_COLOR, "ssgd": SSGD_COLOR}.get(method)
        color = color or OTHER_COLORS[others.index(method) % len(OTHER_COLORS)]
        mean = values.mean(axis=0)
        lowest = min(lowest, float(mean[_NUM_TIMES // 4]))
        axes.plot(times, mean, color=color, linewidth=2.2 if method == "auto" else 1.2, label=method)
        axes.fill_between(times, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
    axes.axhline(target, color="#777777", linewidth=0.8, linestyle=(0, (4, 2)), label="_target")
    axes.set(xlim=(0.0, end_s), ylim=(max(0.0, min(lowest, target) - 0.12 * target), min(1.0, 1.06 * target)))


def _shown_until(rows: Sequence[Row]) -> float:
    """A little beyond the latest arrival at the target; where nobody arrives, to the end."""
    return max((1.25 * row.tta_s for row in rows if row.tta_s), default=max(row.virtual_s for row in rows))


def _accuracy_at(times: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """Accuracy at these times; after its end a run stays where it was."""
    return np.interp(times, [t for t, _, _ in row.curve], [a for _, _, a in row.curve])
