"""The canvas: turns a matplotlib figure into a small, deterministic SVG that can stand inside a page.

Only the chart modules import this one: matplotlib is optional.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_IN = 10.0  # of every chart, inches; the page scales them

_STYLE = {
    "svg.hashsalt": "paceline",  # element ids are the same in every run
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "text.parse_math": False,  # a dollar sign in a host name is no formula
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.3,
}


@contextmanager
def clean_style() -> Iterator[None]:
    """Draw in our style whatever the training script has set, and without its warnings; restores both."""
    with warnings.catch_warnings(), style.context(["default", _STYLE]):
        warnings.simplefilter("ignore")  # such as a glyph that no installed font has
        yield


def new_figure(height_in: float) -> Figure:
    """An empty figure of the page's width; free of pyplot's global state."""
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Render a figure as an `<svg>` element.

    Args:
        figure: The figure.
        name: Prefix of its element ids, so that several charts can share a page.
        description: What there is to see, for readers who cannot.

    Returns:
        The element, without declaration, date or size; equal figures give equal text.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", svg)
    # Six decimals of a point are five more than anybody sees.
    svg = re.sub(r'\sd="[^"]*"', lambda match: re.sub(r"(\.\d{2})\d+", r"\1", match.group()), svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    head = f'<svg class="chart" role="img" aria-label="{escape(description)}" {view_box.group()}>'
    return head + svg[svg.index(">") + 1 :]


def mark_plan(axes: Axes, x: float, epoch: int, labelled: bool = True) -> None:
    """Draw a vertical line across the axes where a plan took effect, with its number on top."""
    axes.axvline(x, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=4)
    if labelled:
        label_plan(axes, x, 1.0, epoch)


def label_plan(axes: Axes, x: float, y: float, epoch: int) -> None:
    """Put a plan's number into a black disc; `y` is a share of the axes' height."""
    axes.text(
        x,
        y,
        str(epoch),
        transform=axes.get_xaxis_transform(),
        color="white",
        fontsize=7.5,
        fontweight="bold",
        ha="center",
        va="center",
        zorder=6,
        bbox={"boxstyle": "circle,pad=0.25", "facecolor": "black", "edgecolor": "none"},
    )


def sparse(positions: list[float], span: float) -> list[bool]:
    """Which of the sorted positions have room for a label: those not too close to the last labelled one.

    Example:
        >>> sparse([0.0, 1.0, 50.0], span=100.0)
        [True, False, True]
    """
    keep: list[bool] = []
    last = float("-inf")
    for position in positions:
        keep.append(position - last >= 0.03 * span)
        last = position if keep[-1] else last
    return keep
