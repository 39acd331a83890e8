"""Sentences: turns a summary into the words that a busy engineer reads, on the terminal and on the page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.types import OWN_PHASES

Summary = Mapping[str, Any]

_WHY = {
    "compute": "longer computing in {phase}",
    "data": "a late data loader",
    "gc": "garbage collection",
    "outside": "work outside the training step",
    "cpu_contention": "no free core to run on",
    "uneven_work": "more samples per step",
}
_NEXT = {
    "compute": "check clocks, temperature and co-located jobs on {host}",
    "data": "give its loader more workers or prefetch (num_workers, prefetch_factor), or faster storage on {host}",
    "gc": "call gc.freeze() after setup, make fewer objects per step, or collect on all ranks at the same step",
    "outside": "move the work out of the loop, or wrap it in paceline.expected_slow(...) where it is meant",
    "cpu_contention": "pin CPUs, check OMP_NUM_THREADS and look for co-located jobs on {host}",
    "uneven_work": "balance the batches, so that every rank trains as many samples (or tokens) per step",
}
_MAX_NAMED = 4  # attached ranks named with their parents
_MAX_TEXT_ROWS = 16  # ranks in the table on the terminal
_ON_PAR = 1.1  # the detector's minimum effect
_TOO_FEW_STEPS = 8  # the detector ignores three rows and wants five


def duration(seconds: float | None, signed: bool = False) -> str:
    """Format a duration in the unit that suits it.

    Example:
        >>> duration(0.2071), duration(0.2071, signed=True), duration(75.0), duration(None)
        ('207 ms', '+207 ms', '75.0 s', '-')
    """
    if seconds is None:
        return "-"
    sign = "+" if signed else ""
    if abs(seconds) >= 9.9995:
        return f"{seconds:{sign}.1f} s"
    if abs(seconds) >= 0.9995:
        return f"{seconds:{sign}.2f} s"
    digits = 0 if abs(seconds) >= 0.00995 else 1
    return f"{seconds * 1e3:{sign}.{digits}f} ms"


def ratio(value: float | None) -> str:
    """Format a ratio such as a slowdown or a gain.

    Example:
        >>> ratio(4.1), ratio(1.034), ratio(None)
        ('4.1x', '1.03x', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Format a share.

    Example:
        >>> percent(0.49), percent(0.0042), percent(0.0), percent(None)
        ('49 %', '0.4 %', '0 %', '-')
    """
    if value is None:
        return "-"
    return f"{value * 100:.0f} %" if value >= 0.0995 or value == 0 else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """Format a number of things, or of samples.

    Example:
        >>> count(24000), count(61.24), count(3_031_040), count(None)
        ('24,000', '61', '3.03 M', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.2f} M"


def why(verdict: Mapping[str, Any]) -> str:
    """The cause of slowness in words.

    Example:
        >>> why({"cause": "compute", "phase": "backward"})
        'longer computing in backward'
    """
    return _WHY.get(verdict["cause"], str(verdict["cause"])).replace("{phase}", verdict["phase"])


def advice(cause: str, host: str, mode: str | None) -> str:
    """What to do about a slow rank, in one sentence.

    Args:
        cause: Of the verdict.
        host: Where the rank runs.
        mode: Of the run: outside "auto" there is one more thing to try.

    Example:
        >>> advice("compute", "node0", "observe")
        'check clocks, temperature and co-located jobs on node0; or mode="auto" trains around it'
    """
    first = _NEXT.get(cause, "look at {host}").replace("{host}", host)
    return first if mode == "auto" else f'{first}; or mode="auto" trains around it'


def policy_words(policy: Mapping[str, Any]) -> str:
    """A mode in words.

    Example:
        >>> policy_words({"name": "BSP"})
        'all ranks in the ring (BSP)'
        >>> policy_words({"name": "AttachedRing", "ring": [0, 1, 3], "parent_of": {"2": 0}, "max_staleness": 16})
        'rank 2 attached to rank 0; ring of 0, 1, 3'
    """
    if policy.get("name") == "BSP":
        return "all ranks in the ring (BSP)"
    ring = policy.get("ring", [])
    if not ring:
        return str(policy.get("name"))
    parents = sorted((int(child), parent) for child, parent in policy.get("parent_of", {}).items())
    if len(parents) > _MAX_NAMED:
        attached = f"ranks {', '.join(str(child) for child, _ in parents)} attached"
    else:
        attached = ", ".join(f"rank {child} attached to rank {parent}" for child, parent in parents)
    members = ", ".join(map(str, ring)) if len(ring) <= 2 * _MAX_NAMED else f"{len(ring)} ranks"
    return f"{attached or 'nobody attached'}; ring of {members}"


def main_decision(summary: Summary) -> Mapping[str, Any] | None:
    """The decision that mattered most: the adopted one with the best gain; else the last advice; else None."""
    decisions: Sequence[Mapping[str, Any]] = summary["decisions"]
    adopted = [d for d in decisions if d["status"] == "adopted" and d["policy"]["name"] != "BSP"]
    if adopted:
        return max(adopted, key=lambda d: (d["measured_gain"] or 0.0, d["predicted_gain"] or 0.0))
    return next((d for d in reversed(decisions) if d["status"] in ("advised", "proposed")), None)


def has_recovered(summary: Summary, rank: int) -> bool:
    """Whether a rank that was named is on par in the last steps."""
    lately = summary["per_rank"][rank]["slowdown_lately"]
    return lately is not None and lately < _ON_PAR


def headline(summary: Summary) -> str:
    """The one sentence to read: the failure, who is slow and why, or that nobody is."""
    failure, culprit = summary["failure"], summary["culprit"]
    if failure:
        return f"The run failed: rank {failure['rank']} on {failure['host']}: {failure['reason']}"
    if culprit:
        slow = "was slow for a while" if has_recovered(summary, culprit["rank"]) else "is slow"
        return f"Rank {culprit['rank']} on {culprit['host']} {slow}: {why(culprit)}"
    return "No rank is slow"


def no_rank_is_slow(summary: Summary) -> str:
    """Why nobody was named."""
    known = [entry for entry in summary["per_rank"] if entry["own_s_median"]]
    steps = max((entry["steps"] for entry in known), default=0)
    if steps < _TOO_FEW_STEPS:
        return f"no rank is slow: but {steps} steps are too few to tell"
    slowest = max(known, key=lambda entry: entry["own_s_median"])
    fastest = min(known, key=lambda entry: entry["own_s_median"])
    more = slowest["own_s_median"] / fastest["own_s_median"] - 1.0
    return (
        f"no rank is slow: over {steps} steps the slowest, {slowest['host']}:{slowest['rank']}, typically needs "
        f"{duration(slowest['own_s_median'])} of its own per step, {percent(more)} more than the fastest"
    )


def done(summary: Summary) -> str:
    """What Paceline did about it."""
    decision = main_decision(summary)
    if decision is None:
        return f"nothing was changed (mode {summary['mode']})"
    plan, policy = f"plan {decision['epoch']}", policy_words(decision["policy"])
    match decision["status"]:
        case "adopted":
            return _adopted_words(summary["decisions"], decision, f"{plan}: {policy}")
        case "advised":
            return f"nothing was changed (mode {summary['mode']}); advice: {policy}"
    return f"{plan} was {decision['status']}: {policy}"


def _adopted_words(decisions: Sequence[Mapping[str, Any]], decision: Mapping[str, Any], what: str) -> str:
    adopted = [d for d in decisions if d["status"] == "adopted"]
    later = adopted[adopted.index(decision) + 1 :]
    children = sorted(map(int, decision["policy"].get("parent_of", {})))
    whom = f"rank {children[0]}" if len(children) == 1 else f"{len(children)} ranks"
    if not later:
        return f"from step {decision['effective_step']} on nobody waits for {whom} ({what})"
    then = "all ranks were back in the ring" if later[0]["policy"]["name"] == "BSP" else "came another plan"
    last = later[0]["effective_step"] - 1
    return f"in steps {decision['effective_step']} to {last} nobody waited for {whom} ({what}); then {then}"


def brought(summary: Summary) -> str | None:
    """What it gained; None where nothing was decided."""
    decision = main_decision(summary)
    if decision is None:
        return None
    predicted, measured = ratio(decision["predicted_gain"]), decision["measured_gain"]
    if measured is None:
        why_not = "too few steps followed" if decision["status"] == "adopted" else "it was not carried out"
        return f"{predicted} faster to accuracy predicted; not measured: {why_not}"
    faster = "faster to accuracy" if measured >= 1 else "of the former pace to accuracy"
    return (
        f"{ratio(measured)} {faster} measured, {predicted} predicted: an update of "
        f"{count(decision['batch_after'])} samples every {duration(decision['interval_after_s'])}, before it "
        f"{count(decision['batch_before'])} every {duration(decision['interval_before_s'])}"
    )


def shown_ranks(summary: Summary, limit: int) -> list[Mapping[str, Any]]:
    """Entries of at most `limit` ranks, in order: named ranks first, then by slowdown."""
    named = {verdict["rank"] for verdict in summary["verdicts"]}
    if summary["failure"]:
        named.add(summary["failure"]["rank"])
    by_interest = sorted(summary["per_rank"], key=lambda e: (e["rank"] not in named, -(e["slowdown"] or 0.0)))
    return sorted(by_interest[:limit], key=lambda entry: int(entry["rank"]))


def samples_words(summary: Summary) -> str:
    """How many samples were trained and dropped."""
    samples = summary["samples"]
    if samples is None:
        return "samples: not counted (only batches from pace.data are)"
    dropped = samples["dropped"] or 0
    total = (samples["trained"] or 0) + dropped
    return f"samples: {count(samples['trained'])} trained, {count(dropped)} dropped ({percent(dropped / total)})"


def main_phase(entry: Mapping[str, Any]) -> str:
    """The phase of its own work on which a rank spends most; "-" without steps."""
    phases = entry["phases"]
    best = max((phase.value for phase in OWN_PHASES), key=lambda phase: phases[phase])
    return best if phases[best] > 0 else "-"


def text(summary: Summary) -> str:
    """Say it on a terminal: verdict first, then what was done, then the numbers.

    Args:
        summary: What `summarise` returned.

    Returns:
        Plain text of several lines, without a line break at the end.
    """
    parts = [*_alarms(summary), *_verdict_lines(summary), "", _run_line(summary), *_table(summary)]
    if summary["decisions"]:
        parts += ["", "decisions:", *(f"  {_decision_line(decision)}" for decision in summary["decisions"])]
    parts += ["", samples_words(summary)]
    if summary["staleness"]:
        parts.append(f"staleness: mean {summary['staleness']['mean']:.1f}, max {summary['staleness']['max']} versions")
    if summary["noise_scale"] is not None:
        parts.append(f"gradient noise scale: {count(summary['noise_scale'])} samples")
    parts += [f"{name}: {'-' if value is None else format(value, '.4g')}" for name, value in summary["metrics"].items()]
    return "\n".join(parts)


def _alarms(summary: Summary) -> list[str]:
    alarms = []
    failure = summary["failure"]
    covered = f"{summary['steps']} steps, {duration(summary['duration_s'])}"
    if failure:
        who = f"rank {failure['rank']} on host {failure['host']}"
        alarms.append(f"FAILED: {who}: {failure['reason']} (after {covered})")
    elif summary["partial"]:
        alarms.append(f"PARTIAL: the log has no end: the run was killed or still goes on. This covers {covered}.")
    if summary["identical_parameters"] is False:
        alarms.append("WARNING: the ranks ended with different parameters; do not trust this model")
    return alarms


def _verdict_lines(summary: Summary) -> list[str]:
    culprit = summary["culprit"]
    if culprit is None:
        return [no_rank_is_slow(summary)]
    lines = []
    worst = {v["rank"]: v for v in sorted(summary["verdicts"], key=lambda v: v["lost_ratio"])}
    for verdict in sorted(worst.values(), key=lambda v: -v["lost_ratio"]):
        slow = "was slow for a while" if has_recovered(summary, verdict["rank"]) else "is slow"
        lines += [
            f"{verdict['host']}:{verdict['rank']} {slow}: {duration(verdict['excess_s'], signed=True)}/step "
            f"({ratio(verdict['slowdown'])}), phase {verdict['phase']}, cause {verdict['cause']}; "
            f"lost {percent(verdict['lost_ratio'])} of the job",
            f"  why:  {verdict['evidence']} (since step {verdict['since_step']})",
            f"  next: {advice(verdict['cause'], verdict['host'], summary['mode'])}",
        ]
    lines.append(f"done:   {done(summary)}")
    gained = brought(summary)
    return [*lines, f"gain:   {gained}"] if gained else lines


def _run_line(summary: Summary) -> str:
    hosts = list(dict.fromkeys(summary["hosts"]))
    where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts"
    return (
        f"{summary['world_size']} ranks on {where}, mode {summary['mode']}: "
        f"{summary['steps']} steps in {duration(summary['duration_s'])}"
    )


def _table(summary: Summary) -> list[str]:
    rows = [("rank", "host", "steps", "own", "wait", "slowdown", "lost", "main phase")]
    rows += [
        (
            str(entry["rank"]),
            entry["host"],
            str(entry["steps"]),
            duration(entry["own_s_median"]),
            duration(entry["wait_s_median"]),
            ratio(entry["slowdown"]),
            percent(entry["lost_ratio"]),
            main_phase(entry),
        )
        for entry in shown_ranks(summary, _MAX_TEXT_ROWS)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"  {'  '.join(_aligned(row, widths))}".rstrip() for row in rows]
    hidden = summary["world_size"] - _MAX_TEXT_ROWS
    return [*table, f"  ... and {hidden} faster ranks"] if hidden > 0 else table


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Pad a row's cells: host and phase to the left, numbers to the right."""
    padded = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if i in (1, 7) else cell.rjust(width) for i, (cell, width) in padded]


def _decision_line(decision: Mapping[str, Any]) -> str:
    gains = f"predicted {ratio(decision['predicted_gain'])}"
    if decision["measured_gain"] is not None:
        gains += f", measured {ratio(decision['measured_gain'])}"
    return (
        f"plan {decision['epoch']} {decision['status']}, step {decision['effective_step']}: "
        f"{policy_words(decision['policy'])}; {gains}; {decision['reason']}"
    )
