"""A schedule in words: turns its facts, as `collective.explain` collects them, into a table and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

_MAX_ROUNDS = 40  # shown


def table(facts: dict[str, Any]) -> Table:
    """Return a row for every round: its number, from the late ranks' arrival on, and its messages."""
    early, steps = len(facts["early_steps"]), facts["early_steps"] + facts["steps"]
    late = f", late: {', '.join(map(str, facts['late']))}" if facts["late"] else ""
    shown = Table(title=f"{facts['algorithm']}, {facts['num_ranks']} ranks, {facts['num_chunks']} chunks{late}")
    shown.add_column("round", justify="right")
    shown.add_column("messages: c a chunk, s several; ⇄ both send and add", overflow="fold")
    for index, step in enumerate(steps[:_MAX_ROUNDS]):
        shown.add_row(str(index - early), messages_text(step, facts["num_chunks"]), end_section=index == early - 1)
    if len(steps) > _MAX_ROUNDS:
        shown.add_row("...", f"{len(steps) - _MAX_ROUNDS} more; --json and --draw have all")
    return shown


def text(facts: dict[str, Any]) -> str:
    """Return whether it verifies, how many rounds it takes against the bound, and what it costs."""
    verdict = "Verified" if facts["verified"] else f"WRONG, {facts['violation']}"
    after = f" after the arrival, {len(facts['early_steps'])} before it" if facts["late"] else ""
    lines = [f"{verdict}: {facts['rounds']} rounds{after}; no less than {facts['lower_bound_rounds']}."]
    cost_s, ring_s, delay_s = facts["cost_s"], facts["ring_s"], facts["critical_delay_s"]
    cost = f"Cost{' after the arrival' if facts['late'] else ''}: {1e3 * cost_s:.3g} ms"
    if facts["algorithm"] != "ring" and cost_s > 0:
        cost += f"; the ring takes {1e3 * ring_s:.3g} ms, {ring_s / cost_s:.2f}x of that"
    lines.append(cost + ".")
    if delay_s is not None:
        lines.append(f"It pays from {1e3 * max(0.0, delay_s):.3g} ms of lateness on.")
    return "\n".join(lines)


def messages_text(step: Sequence[dict[str, Any]], num_chunks: int) -> str:
    """Return one round in a line: `a→b:c`, and `a⇄b:c` for a swap; `s` is a whole block of chunks.

    Example:
        >>> swap = [dict(source=0, target=4, chunk=0, adds=True), dict(source=4, target=0, chunk=0, adds=True)]
        >>> messages_text([*swap, dict(source=1, target=2, chunk=9, adds=True)], num_chunks=8)
        '0⇄4:c0  1→2:s1'
    """
    pairs = {(t["source"], t["target"], t["chunk"]) for t in step}
    words = []
    for t in sorted(step, key=lambda t: (t["source"], t["target"])):
        source, target, chunk = t["source"], t["target"], t["chunk"]
        name = f"c{chunk}" if chunk < num_chunks else f"s{chunk - num_chunks}"
        is_swap = (target, source, chunk) in pairs
        if not is_swap or source < target:  # a swap is one word for two messages
            words.append(f"{source}{'⇄' if is_swap else '→'}{target}:{name}")
    return "  ".join(words)
