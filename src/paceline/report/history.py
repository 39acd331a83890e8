"""The run as a whole: turns log lines into timings by rank, decisions with their gains, and who was attached when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.record import Line
from paceline.types import NoiseScale, Rank, StepTiming, Update, Verdict


@dataclass(frozen=True, slots=True)
class Attachment:
    """Rank `rank` is attached to `parent` in steps `from_step <= step < until_step`; None for until the end."""

    rank: Rank
    parent: Rank
    from_step: int
    until_step: int | None

    def holds(self, step: int) -> bool:
        """Whether it is in force in this step."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)


@dataclass(frozen=True, slots=True)
class Decision:
    """One plan and what became of it.

    Args:
        data: The plan as last written, with its `status`.
        gain: The measured gain, where there is one.
    """

    data: Mapping[str, Any]
    gain: Mapping[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """Number of the plan."""
        return int(self.data["epoch"])

    @property
    def is_adopted(self) -> bool:
        """Whether every rank switched to it."""
        return bool(self.data["status"] == "adopted")


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a report shows, in the order of the log. Build it with `of`.

    Args:
        lines: The lines of the last run in the log.
        timings: Steps by rank; every rank of the run has an entry.
        decisions: Plans, oldest first.
        attachments: Who was attached to whom and when, by adopted plans.
    """

    lines: tuple[Line, ...]
    timings: Mapping[Rank, tuple[StepTiming, ...]]
    decisions: tuple[Decision, ...]
    attachments: tuple[Attachment, ...]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Run:
        """Sort the lines of a log.

        A log that was continued (the run directory was used twice) holds several runs: the last one counts, since
        steps and clocks begin anew with each.

        Args:
            lines: What `record.read` returned.

        Example:
            >>> plan = {"epoch": 1, "effective_step": 5, "policy": {"name": "AttachedRing", "parent_of": {"2": 0}}}
            >>> lines = [Line("run", {"world_size": 3}), Line("plan", {"status": "adopted", **plan})]
            >>> Run.of(lines).attachments
            (Attachment(rank=2, parent=0, from_step=5, until_step=None),)
        """
        starts = [i for i, line in enumerate(lines) if line.kind == "run"]
        lines = tuple(lines[starts[-1] :] if starts else lines)
        by_rank: dict[Rank, list[StepTiming]] = defaultdict(list)
        for line in lines:
            if isinstance(line.value, StepTiming):
                by_rank[line.value.rank].append(line.value)
        world_size = int(lines[0].data.get("world_size", 0)) if starts else 0
        num_ranks = max([world_size, *(rank + 1 for rank in by_rank)])
        decisions = _join_decisions(lines)
        timings = {rank: tuple(by_rank[rank]) for rank in range(num_ranks)}
        return cls(lines, timings, decisions, _attachments(decisions))

    @property
    def header(self) -> Mapping[str, Any]:
        """The first line; empty where it is missing."""
        return self.lines[0].data if self.lines and self.lines[0].kind == "run" else {}

    @property
    def hosts(self) -> list[str]:
        """Host name by rank."""
        named = [str(host) for host in self.header.get("hosts", [])]
        return [named[rank] if rank < len(named) else "?" for rank in self.timings]

    @property
    def verdicts(self) -> list[tuple[float | None, Verdict]]:
        """Verdicts with the time of their lines."""
        return [(line.data.get("time_s"), line.value) for line in self.lines if isinstance(line.value, Verdict)]

    @property
    def updates(self) -> list[Update]:
        """Updates applied while ranks were attached."""
        return [line.value for line in self.lines if isinstance(line.value, Update)]

    @property
    def noise(self) -> list[tuple[float, NoiseScale]]:
        """Noise scale over time, seconds on rank 0's clock."""
        return [(float(x.data.get("time_s") or 0.0), x.value) for x in self.lines if isinstance(x.value, NoiseScale)]

    @property
    def adopted(self) -> list[Decision]:
        """The plans that were carried out."""
        return [decision for decision in self.decisions if decision.is_adopted]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The raw lines of one kind."""
        return [line.data for line in self.lines if line.kind == kind]

    def is_attached(self, rank: Rank, step: int) -> bool:
        """Whether `rank` was attached in `step`."""
        return any(a.rank == rank and a.holds(step) for a in self.attachments)

    def ring_rows(self) -> dict[int, dict[Rank, StepTiming]]:
        """Timings by step and rank, of those ranks that the step waited for; the rows may lack ranks."""
        rows: dict[int, dict[Rank, StepTiming]] = defaultdict(dict)
        for rank, timings in self.timings.items():
            spans = [a for a in self.attachments if a.rank == rank]
            for timing in timings:
                if not any(a.holds(timing.step) for a in spans):
                    rows[timing.step].setdefault(rank, timing)
        return dict(sorted(rows.items()))


def _join_decisions(lines: Sequence[Line]) -> tuple[Decision, ...]:
    """One entry per plan. A rejected plan's epoch is used again, so epochs alone do not tell plans apart."""
    decisions: list[Decision] = []
    for line in lines:
        if line.kind == "plan":
            same = _last(decisions, line.data["epoch"], ("proposed",))
            if same is None or line.data["status"] in ("proposed", "advised"):
                decisions.append(Decision(line.data))
            else:
                decisions[same] = Decision(line.data)
        elif line.kind == "gain":
            same = _last(decisions, line.data["epoch"], ("adopted",))
            if same is not None:
                decisions[same] = Decision(decisions[same].data, line.data)
    return tuple(decisions)


def _last(decisions: list[Decision], epoch: int, statuses: tuple[str, ...]) -> int | None:
    matches = [i for i, d in enumerate(decisions) if d.epoch == epoch and d.data["status"] in statuses]
    return matches[-1] if matches else None


def _attachments(decisions: Sequence[Decision]) -> tuple[Attachment, ...]:
    adopted = [decision for decision in decisions if decision.is_adopted]
    ends: list[int | None] = [int(decision.data["effective_step"]) for decision in adopted[1:]]
    return tuple(
        Attachment(int(child), int(parent), int(decision.data["effective_step"]), until_step)
        for decision, until_step in zip(adopted, [*ends, None], strict=False)
        for child, parent in sorted(decision.data["policy"].get("parent_of", {}).items())
    )
