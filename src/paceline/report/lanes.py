"""The timeline: turns every rank's steps into one lane coloured by phase, over that rank's own clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from paceline.report.canvas import clean_style, label_plan, new_figure, sparse, to_svg
from paceline.report.history import Run
from paceline.report.palette import PHASE_COLORS, PHASE_ORDER, SLOW_COLORS
from paceline.types import Phase, Rank, StepTiming

MAX_LANES = 32  # more cannot be told apart on a page
_MAX_STEPS_DRAWN = 400  # per lane; beyond, steps are thinner than a pixel and shares of time are drawn instead
_MAX_BARS = 4000  # in all lanes; bounds the size of the page
_MAX_POINTS = 6000  # bins x phases x lanes: the same bound where shares are drawn
_HALF = 0.28  # of a lane's height
_POINTS_WIDE = 600.0  # of the plot, typographic points

Box = tuple[float, float, float, float]  # left, right, bottom, top


def timeline(run: Run, slow: Sequence[Rank] = ()) -> str:
    """Draw who did what when.

    Steps are drawn one by one while they can be seen, and as shares of time per bin when there are too many. Within
    a step the order of the phases is schematic: the log has their sums.

    Args:
        run: The run.
        slow: Ranks to name as slow.

    Returns:
        An `<svg>` element; at most `MAX_LANES` lanes, those of slow ranks first to be kept.
    """
    ranks = _shown(run, slow)
    ends = {rank: max((t.started_s + t.wall_s for t in run.timings[rank]), default=0.0) for rank in ranks}
    span = max([*ends.values(), 1e-9])
    boxes = {rank: _bars(run.timings[rank], 0.12 * span / _POINTS_WIDE) for rank in ranks}
    fits = sum(len(b) for by_phase in boxes.values() for b in by_phase.values()) <= _MAX_BARS
    fits = fits and max(len(run.timings[rank]) for rank in ranks) <= _MAX_STEPS_DRAWN
    with clean_style():
        figure = new_figure(0.95 + (0.56 if len(ranks) <= 12 else 0.4) * len(ranks))
        axes = figure.add_subplot()
        axes.grid(visible=False)
        for lane, rank in enumerate(ranks):
            if fits:
                _draw_steps(axes, lane, boxes[rank])
            else:
                _draw_shares(axes, lane, run.timings[rank], ends[rank], _MAX_POINTS // (5 * len(ranks)))
            _draw_attachments(axes, lane, run, rank, ends[rank])
        _draw_plans(axes, run, ranks, span)
        axes.set_yticks(range(len(ranks)), [_label(run, rank, slow) for rank in ranks])
        for tick, rank in zip(axes.get_yticklabels(), ranks, strict=True):
            if rank in slow or rank in _failed(run):
                tick.set(color=SLOW_COLORS[0], fontweight="bold")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(0.0, span), ylim=(len(ranks) - 0.45, -0.6))
        axes.set_xlabel("seconds since the rank attached, on its own clock")
        _draw_legend(figure, run, ranks)
        return to_svg(figure, "timeline", f"Timeline of {len(ranks)} ranks: time by phase, waiting in grey")


def _shown(run: Run, slow: Sequence[Rank]) -> list[Rank]:
    by_interest = sorted(run.timings, key=lambda rank: (rank not in slow and rank not in _failed(run), rank))
    return sorted(by_interest[:MAX_LANES])


def _label(run: Run, rank: Rank, slow: Sequence[Rank]) -> str:
    host = run.hosts[rank]
    host = host if len(host) <= 16 else f"{host[:15]}…"
    return f"rank {rank} on {host}{' (failed)' if rank in _failed(run) else ' (slow)' if rank in slow else ''}"


def _failed(run: Run) -> set[Rank]:
    return {failure["rank"] for failure in run.of_kind("failure")}


def _bars(timings: Sequence[StepTiming], narrowest_s: float) -> dict[Phase, list[tuple[float, float]]]:
    """Left and right end of every stretch that is wide enough to be seen, by phase; touching ones are joined."""
    bars: dict[Phase, list[tuple[float, float]]] = {}
    for timing in timings:
        left = timing.started_s
        for phase in PHASE_ORDER:
            right = left + timing.of(phase)
            if right - left > narrowest_s:
                drawn = bars.setdefault(phase, [])
                if drawn and left - drawn[-1][1] < narrowest_s:
                    drawn[-1] = (drawn[-1][0], right)
                else:
                    drawn.append((left, right))
            left = right
    return bars


def _draw_steps(axes: Axes, lane: int, bars: dict[Phase, list[tuple[float, float]]]) -> None:
    """One patch per phase: a path of many rectangles is far smaller than many patches."""
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    top, bottom = lane - _HALF, lane + _HALF
    for phase, stretches in bars.items():
        corners = [
            corner
            for left, right in stretches
            for corner in ((left, bottom), (left, top), (right, top), (right, bottom), (left, bottom))
        ]
        axes.add_artist(PathPatch(Path(corners, codes * len(stretches)), **_fill(phase)))  # the limits are set anyway


def _draw_shares(axes: Axes, lane: int, timings: Sequence[StepTiming], end_s: float, most_bins: int) -> None:
    """Stack the share of each phase in each bin of time."""
    num_bins = max(24, min(200, most_bins))
    width = end_s / num_bins if end_s > 0 else 1.0
    shares = {phase: [0.0] * num_bins for phase in PHASE_ORDER}
    for timing in timings:
        wall, start = timing.wall_s, timing.started_s
        if wall <= 0:
            continue
        for i in range(max(0, int(start / width)), min(num_bins - 1, int((start + wall) / width)) + 1):
            overlap = min(start + wall, (i + 1) * width) - max(start, i * width)
            for phase in PHASE_ORDER:
                shares[phase][i] += timing.of(phase) * overlap / (wall * width)
    # From edge to edge, though a share belongs to the middle of its bin.
    xs = [0.0, *((i + 0.5) * width for i in range(1, num_bins - 1)), end_s]
    low = [lane + _HALF] * num_bins
    for phase in sorted(PHASE_ORDER, key=lambda phase: phase is Phase.WAIT):  # waiting on top of all work
        if max(shares[phase]) < 0.01:
            continue
        high = [y - 2 * _HALF * share for y, share in zip(low, shares[phase], strict=True)]
        axes.fill_between(xs, low, high, **_fill(phase))
        low = high


def _fill(phase: Phase) -> dict[str, Any]:
    if phase is Phase.WAIT:
        return {"facecolor": PHASE_COLORS[phase], "edgecolor": "#B0B0B0", "hatch": "////", "linewidth": 0.0}
    return {"facecolor": PHASE_COLORS[phase], "edgecolor": "none", "linewidth": 0.0}


def _draw_attachments(axes: Axes, lane: int, run: Run, rank: Rank, end_s: float) -> None:
    for attachment in run.attachments:
        if attachment.rank != rank:
            continue
        left = _start_of(run.timings[rank], attachment.from_step)
        if left is None:
            continue
        until = attachment.until_step
        right = _start_of(run.timings[rank], until) if until is not None else None
        right = end_s if right is None else right
        axes.plot([left, right], [lane + _HALF + 0.06] * 2, color="black", linewidth=1.8, solid_capstyle="butt")
        axes.annotate(
            f"attached to rank {attachment.parent}",
            (left, lane + _HALF + 0.1),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7.5,
            va="top",
        )


def _draw_plans(axes: Axes, run: Run, ranks: Sequence[Rank], span: float) -> None:
    """A plan takes effect at a step, which every rank reaches at its own time: one mark per lane."""
    tops: list[tuple[float, int]] = []
    for decision in run.adopted:
        step = int(decision.data["effective_step"])
        marks = [(lane, _start_of(run.timings[rank], step)) for lane, rank in enumerate(ranks)]
        seen = [(lane, x) for lane, x in marks if x is not None]
        if seen:
            ys = [y for lane, _ in seen for y in (lane - 0.5, lane + 0.5)]
            xs = [x for _, x in seen for _ in range(2)]
            axes.plot(xs, ys, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=4)
            tops.append((xs[0], decision.epoch))
    for (x, epoch), has_room in zip(tops, sparse([x for x, _ in tops], span), strict=True):
        if has_room:
            label_plan(axes, x, 1.0, epoch)


def _start_of(timings: Sequence[StepTiming], step: int) -> float | None:
    return next((t.started_s for t in timings if t.step >= step), None)


def _draw_legend(figure: Figure, run: Run, ranks: Sequence[Rank]) -> None:
    total = {phase: sum(t.of(phase) for rank in ranks for t in run.timings[rank]) for phase in PHASE_ORDER}
    shown = [p for p in PHASE_ORDER if total[p] > 0.002 * sum(total.values())]
    handles = [Patch(label=phase.value, **_fill(phase)) for phase in shown]
    figure.legend(handles=handles, loc="outside upper center", ncols=8, handlelength=1.4)
