"""The page: turns a run log and its summary into one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from paceline.record import Line
from paceline.report import words
from paceline.report.history import Run
from paceline.report.palette import PHASE_COLORS, PHASE_ORDER
from paceline.types import OWN_PHASES, Phase

NO_CHARTS = "pip install 'paceline[report]' draws the charts."
_MAX_RANKS = 32  # rows of the rank table, as many as the timeline has lanes
_MAX_ROWS = 200  # of events and decisions; the log has them all


def render(lines: Sequence[Line], summary: Mapping[str, Any], *, with_charts: bool = True) -> str:
    """Render the page. It needs no network and no script, and everything from the log is escaped.

    Args:
        lines: The log as `record.read` returned it.
        summary: What `summarise` made of it.
        with_charts: Whether to draw; without matplotlib the page says how to get charts.

    Returns:
        HTML text.

    Raises:
        Exception: whatever matplotlib raises while drawing.
    """
    run = Run.of(lines)
    charts, note = _draw(run, summary) if with_charts else ({}, "The charts could not be drawn: see the run's output.")
    environment = Environment(
        loader=PackageLoader("paceline.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=words.duration, ratio=words.ratio, percent=words.percent, count=words.count, policy=words.policy_words
    )
    culprit = summary["culprit"]
    return environment.get_template("page.html.j2").render(
        s=summary,
        headline=words.headline(summary),
        tone="bad" if summary["failure"] or summary["identical_parameters"] is False else "slow" if culprit else "good",
        lead=_lead(summary),
        facts=_facts(summary),
        cards=_cards(summary),
        ranks=[_rank_row(entry, summary) for entry in words.shown_ranks(summary, _MAX_RANKS)],
        num_hidden=max(0, summary["world_size"] - _MAX_RANKS),
        charts={**dict.fromkeys(("timeline", "steps", "metrics", "noise")), **charts},
        chart_note=note,
        phases=[(phase.value, PHASE_COLORS[phase]) for phase in PHASE_ORDER],
        decisions=summary["decisions"][-_MAX_ROWS:],
        events=run.of_kind("event")[-_MAX_ROWS:],
        advice={cause: words.advice(cause, "its host", summary["mode"]) for cause in _causes(summary)},
    )


def _draw(run: Run, summary: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    try:
        from paceline.report.charts import draw_all
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        return {}, NO_CHARTS
    return draw_all(run, tuple(dict.fromkeys(v["rank"] for v in summary["verdicts"]))), None


def _causes(summary: Mapping[str, Any]) -> list[str]:
    return sorted({verdict["cause"] for verdict in summary["verdicts"]})


def _lead(summary: Mapping[str, Any]) -> str:
    culprit = summary["culprit"]
    if culprit is None:
        sentence = words.no_rank_is_slow(summary)
        return f"{sentence[0].upper()}{sentence[1:]}."
    recovered = words.has_recovered(summary, culprit["rank"])
    who = f"Rank {culprit['rank']} on {culprit['host']}" if summary["failure"] else "It"
    needs = "needed" if recovered else "needs"
    more = f"{needs} {words.duration(culprit['excess_s'])} more per step than the other ranks"
    where = f"mostly in the {culprit['phase']} phase, from step {culprit['since_step']} on"
    lately = words.ratio(summary["per_rank"][culprit["rank"]]["slowdown_lately"])
    end = f"; in its last steps it was on par ({lately})." if recovered else "."
    return f"{who} {more} ({words.ratio(culprit['slowdown'])}), {where}{end}"


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader in a hurry wants to know, label by label."""
    culprit = summary["culprit"]
    if culprit is None:
        return []
    facts = [
        ("Cost", f"{words.percent(culprit['lost_ratio'])} of the job's time while everybody waited for it"),
        ("Done", words.done(summary)),
    ]
    gained = words.brought(summary)
    if gained:
        facts.append(("Gain", gained))
    return [*facts, ("Next", words.advice(culprit["cause"], culprit["host"], summary["mode"]))]


def _cards(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, figure and a line below, for what is known."""
    cards: list[tuple[str, str, str]] = []
    culprit, decision, samples = summary["culprit"], words.main_decision(summary), summary["samples"]
    if culprit:
        who = f"{culprit['host']}:{culprit['rank']} against the other ranks"
        cards.append(("slowdown", words.ratio(culprit["slowdown"]), who))
        whole = summary["per_rank"][culprit["rank"]]["lost_ratio"]
        cards.append(("time lost", words.percent(culprit["lost_ratio"]), f"{words.percent(whole)} over the whole run"))
    if decision:
        measured, predicted = decision["measured_gain"], words.ratio(decision["predicted_gain"])
        if measured is None:
            cards.append(("predicted gain", predicted, "time to accuracy; not measured"))
        else:
            cards.append(("measured gain", words.ratio(measured), f"time to accuracy; {predicted} was predicted"))
    if samples:
        dropped = samples["dropped"] or 0
        share = words.percent(dropped / max(1, (samples["trained"] or 0) + dropped))
        cards.append(("samples trained", words.count(samples["trained"]), f"{words.count(dropped)} dropped ({share})"))
    if summary["noise_scale"] is not None:
        low, high = summary["noise_interval"] or (None, None)
        below = "samples" if high is None else f"samples; {words.count(low)} to {words.count(high)}"
        cards.append(("noise scale", words.count(summary["noise_scale"]), below))
    if summary["staleness"]:
        mean, most = summary["staleness"]["mean"], summary["staleness"]["max"]
        cards.append(("staleness", f"{mean:.1f}", f"versions on average; {most} at most"))
    last_values = list(summary["metrics"].items())[:3]
    return cards + [(name, "-" if v is None else f"{v:.4g}", "last value") for name, v in last_values]


def _rank_row(entry: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the rank table: the entry, whether the rank was named, and its bar of phases in percent."""
    total = sum(entry["phases"].values())
    longest = max((sum(e["phases"].values()) for e in summary["per_rank"]), default=0.0)
    own = sum(entry["phases"][phase.value] for phase in OWN_PHASES)
    return {
        **entry,
        "failed": bool(summary["failure"]) and summary["failure"]["rank"] == entry["rank"],
        "slow": any(verdict["rank"] == entry["rank"] for verdict in summary["verdicts"]),
        "main_phase": words.main_phase(entry),
        "own_share": own / total if total > 0 else None,
        "bar": [
            (phase.value, PHASE_COLORS[phase], 100.0 * entry["phases"][phase.value] / longest, phase is Phase.WAIT)
            for phase in PHASE_ORDER
            if longest > 0 and entry["phases"][phase.value] > 0.002 * longest
        ],
    }
