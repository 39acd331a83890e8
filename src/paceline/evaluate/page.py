"""The pages: turns a table and its rows into one self-contained HTML file each, for an evaluation and a what-if."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from paceline.evaluate.claims import ARCH_WORDS, claims
from paceline.evaluate.grid import SITUATIONS, TASKS
from paceline.evaluate.run import LIMIT, Row
from paceline.evaluate.table import PENALTY, SLOW
from paceline.report import words
from paceline.report.page import NO_CHARTS

Table = Mapping[str, Any]
_NUM_PANELS: Final = 9  # situations whose curves are drawn, per architecture
_DRAWN_FIRST: Final = ("throttled-10x", "rotating-5x", "constant-10x", "calm", "constant-4x", "episodes")


def render_evaluation(table: Table, rows: Sequence[Row]) -> str:
    """Render the page of an evaluation. It needs no network and no script.

    Args:
        table: What `table.tabulate` made, with its "setup".
        rows: What it was made of.

    Returns:
        HTML text; without matplotlib it says how to get charts.
    """
    made = claims(table["summary"])
    archs = [arch for arch in table["setup"]["archs"] if any(row["arch"] == arch for row in table["rows"])]

    def draw() -> dict[str, str | None]:
        from paceline.evaluate import charts

        curves = {
            f"curves_{arch}": charts.accuracy_grid(panels) for arch in archs if (panels := _panels(table, rows, arch))
        }
        return {"reductions": charts.reductions(table["summary"]), **curves}

    drawn, note = _drawn(draw)
    num_held = sum(claim.holds is True for claim in made)
    num_known = sum(claim.holds is not None for claim in made)
    return (
        _environment()
        .get_template("evaluation.html.j2")
        .render(
            t=table,
            setup=table["setup"],
            claims=made,
            num_held=num_held,
            num_known=num_known,
            tone="good" if num_held == num_known else "slow",
            cards=_cards(table["summary"], archs),
            archs=archs,
            comparisons={arch: [c for c in table["comparisons"] if c["arch"] == arch] for arch in archs},
            matrices={arch: _matrix(table, arch) for arch in archs},
            charts=drawn,
            chart_note=note,
            penalty=PENALTY,
            slow=SLOW,
            num_runs=len(rows),
        )
    )


def render_simulation(table: Table, rows: Sequence[Row], draw_slowness: Callable[[], str]) -> str:
    """Render the page of a what-if.

    Args:
        table: What `simulation.simulate_modes` made.
        rows: What it was made of.
        draw_slowness: Draws the trace.

    Returns:
        HTML text.
    """

    def draw() -> dict[str, str | None]:
        from paceline.evaluate import charts

        drawn = {row["mode"]: [r for r in rows if r.job.method == row["mode"]] for row in table["rows"]}
        return {
            "accuracy": charts.accuracy(table["trace"], drawn, table["target_accuracy"]) if drawn else None,
            "slowness": draw_slowness(),
        }

    drawn, note = _drawn(draw)
    return (
        _environment()
        .get_template("simulation.html.j2")
        .render(t=table, charts=drawn, chart_note=note, penalty=PENALTY)
    )


def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("paceline.evaluate", ""), PackageLoader("paceline.report", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        arch=lambda arch: ARCH_WORDS[arch],
        seconds=seconds,
        ratio=words.ratio,
        near=lambda value: "-" if value is None else f"{value:.2f}x",
        share=lambda value: "-" if value is None else f"{100.0 * value:.1f} %",
        points=lambda value: "-" if value is None else f"{value:+.2f}",
        count=words.count,
    )
    return environment


def seconds(value: float | None) -> str:
    """Format virtual seconds.

    Example:
        >>> seconds(12.34), seconds(1234.5), seconds(None)
        ('12.3', '1,234', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _drawn(draw: Callable[[], dict[str, str | None]]) -> tuple[dict[str, str | None], str | None]:
    try:
        return draw(), None
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        return {}, NO_CHARTS


def _cards(summary: Mapping[str, Any], archs: Sequence[str]) -> list[tuple[str, str, str]]:
    """Label, figure and a line below, for what is known."""
    cards = []
    for arch in archs:
        saved, best = summary[arch]["reduction"].get("ssgd"), summary[arch]["vs_best_published"]["median"]
        if saved is not None:
            cards.append(
                (f"saved, {ARCH_WORDS[arch]}", f"{100.0 * saved:.0f} %", "of SSGD's time, slow traces, median")
            )
        if best is not None:
            cards.append((f"against the best paper, {ARCH_WORDS[arch]}", f"{best:.2f}x", "of its time, median"))
    regret, gap = summary["selector_regret"]["median"], summary["accuracy_gap_points"]
    if regret is not None:
        cards.append(("regret", f"{regret:.2f}x", "the best fixed mode's time, held out, median"))
    if gap is not None:
        cards.append(("final accuracy", f"{gap:+.2f}", "points against SSGD, mean"))
    return cards


def _panels(table: Table, rows: Sequence[Row], arch: str) -> list[tuple[str, dict[str, list[Row]], float]]:
    """Curves of ours, SSGD, ASGD and the best published method in the most telling situations."""
    compared = [c for c in table["comparisons"] if c["arch"] == arch]
    order = {name: i for i, name in enumerate(dict.fromkeys((*_DRAWN_FIRST, *SITUATIONS)))}
    compared.sort(key=lambda c: order[c["trace"]])
    panels = []
    for c in compared[:_NUM_PANELS]:
        names = dict.fromkeys(("auto", "ssgd", "asgd", c["best_published"]))
        curves = {
            name: [
                row
                for row in rows
                if row.error is None
                and (row.job.arch, row.job.trace, row.job.task, row.job.method) == (arch, c["trace"], c["task"], name)
            ]
            for name in names
        }
        target = TASKS[c["task"]].target_accuracy
        panels.append((f"{c['trace']}, {c['task']}", {name: found for name, found in curves.items() if found}, target))
    return panels


def _matrix(table: Table, arch: str) -> dict[str, Any]:
    """Every method's time in every situation: names of the columns, then lines of (situation, fields)."""
    cells = [row for row in table["rows"] if row["arch"] == arch]
    methods = list(dict.fromkeys(row["method"] for row in cells if row["method"] != LIMIT))
    found = {(row["trace"], row["task"], row["method"]): row for row in cells}
    lines = []
    for trace, task in dict.fromkeys((row["trace"], row["task"]) for row in cells):
        line = [found.get((trace, task, method)) for method in methods]
        best = min(row["tta_s"] for row in line if row is not None)
        lines.append((f"{trace}, {task}", [(row, row is not None and row["tta_s"] == best) for row in line]))
    return {"methods": methods, "lines": lines}
