"""The picture of a collective: turns its facts into a grid of who receives what from whom in which round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from paceline.report.canvas import clean_style
from paceline.report.palette import SLOW_COLORS

_MAX_CELLS_WITH_TEXT = 700  # more cannot be read
_CELL_IN = 0.42  # inches
_MAX_IN = 24.0  # of either side, inches
_COLORS = colormaps["viridis"]


def draw_rounds(facts: dict[str, Any], path: Path) -> None:
    """Draw a schedule: a column for every round, a row for every rank, a cell for every message received.

    A cell's colour is the chunk's, its number the chunk's too, with the sender below. A thick edge: the receiver adds;
    otherwise it takes over. Late ranks are in red, and grey until they arrive.

    Args:
        facts: What `collective.explain.facts` returns.
        path: Where to write; the suffix says what: .svg, .png or .pdf.

    Raises:
        ValueError: a suffix that stands for no kind of picture.
    """
    num_ranks, early = facts["num_ranks"], facts["early_steps"]
    steps = early + facts["steps"]
    has_text = num_ranks * len(steps) <= _MAX_CELLS_WITH_TEXT
    cell = _CELL_IN if has_text else max(_CELL_IN / 6, 0.02)
    with clean_style():
        width = min(_MAX_IN, max(6.0, cell * len(steps) + 1.4))
        figure = Figure(figsize=(width, min(_MAX_IN, max(2.2, cell * num_ranks + 1.2))), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False)
        if has_text:
            for column, step in enumerate(steps):
                for message in step:
                    _cell(axes, column, message, facts)
        else:
            axes.imshow(_pixels(steps, facts), aspect="auto", interpolation="nearest")
        _frame(axes, facts, len(early), len(steps), has_text)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _color(chunk: int, facts: dict[str, Any]) -> tuple[float, float, float, float]:
    first = facts["blocks"][chunk - facts["num_chunks"]][0] if chunk >= facts["num_chunks"] else chunk
    red, green, blue, alpha = _COLORS(0.12 + 0.85 * first / max(1, facts["num_chunks"] - 1))
    return red, green, blue, alpha


def _pixels(steps: list[list[dict[str, Any]]], facts: dict[str, Any]) -> NDArray[np.float64]:
    """Colours: shape [ranks, rounds, 4]; nothing where nothing is received."""
    pixels = np.zeros((facts["num_ranks"], len(steps), 4))
    for column, step in enumerate(steps):
        for message in step:
            pixels[message["target"], column] = _color(message["chunk"], facts)
    return pixels


def _cell(axes: Axes, column: int, message: dict[str, Any], facts: dict[str, Any]) -> None:
    chunk, row, num_chunks = message["chunk"], message["target"], facts["num_chunks"]
    red, green, blue, _ = color = _color(chunk, facts)
    axes.add_patch(
        Rectangle(
            (column - 0.44, row - 0.44), 0.88, 0.88,
            facecolor=color, edgecolor="black", linewidth=1.8 if message["adds"] else 0.0,
        )
    )  # fmt: skip
    ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "white"
    name = f"s{chunk - num_chunks}" if chunk >= num_chunks else str(chunk)
    axes.text(column, row - 0.12, name, ha="center", va="center", fontsize=8.5, fontweight="bold", color=ink)
    axes.text(column, row + 0.27, f"← {message['source']}", ha="center", va="center", fontsize=6, color=ink)


def _frame(axes: Axes, facts: dict[str, Any], num_early: int, num_columns: int, has_text: bool) -> None:
    num_ranks, late = facts["num_ranks"], facts["late"]
    for rank in late:
        axes.add_patch(Rectangle((-0.5, rank - 0.5), num_early, 1, facecolor="#E2E2E2", edgecolor="none", zorder=0))
    if late and num_early:
        axes.axvline(num_early - 0.5, color=SLOW_COLORS[0], linewidth=1.4)
        who = f"rank {late[0]} arrives" if len(late) == 1 else f"ranks {', '.join(map(str, late))} arrive"
        axes.text(num_early - 0.4, -0.55, who, color=SLOW_COLORS[0], fontsize=8, va="bottom")
    every = 1 if has_text else max(1, num_ranks // 12)
    near_late = {rank + d for rank in late for d in range(1 - every, every)}  # no room for two labels
    shown = sorted({rank for rank in range(0, num_ranks, every) if rank not in near_late} | set(late))
    axes.set_yticks(shown, [f"rank {rank}{' (late)' if rank in late else ''}" for rank in shown])
    for tick, rank in zip(axes.get_yticklabels(), shown, strict=True):
        if rank in late:
            tick.set(color=SLOW_COLORS[0], fontweight="bold")
    spacing = 1 if has_text else max(1, num_columns // 20)
    columns = [*range(num_early - spacing, -1, -spacing), *range(num_early, num_columns, spacing)]
    axes.set_xticks(columns, [str(column - num_early) for column in columns])
    axes.set(xlim=(-0.5, num_columns - 0.5), ylim=(num_ranks - 0.5, -0.5 - (0.05 * num_ranks if late else 0)))
    axes.tick_params(length=0)
    bound = facts["lower_bound_rounds"]
    rounds = f"{facts['rounds']} rounds" + (" after the arrival" if late else "")
    axes.set_title(
        f"{facts['algorithm']}: {num_ranks} ranks, {facts['num_chunks']} chunks, {rounds} (no less than {bound})",
        loc="left", fontsize=10,
    )  # fmt: skip
    cell = "cell: chunk, sender below; thick edge: added" if has_text else "colour: the chunk received"
    axes.set_xlabel(f"round    ({cell})")
