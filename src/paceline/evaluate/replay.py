"""The replay: turns a recorded run into what the same controller decides when it is told the same again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from paceline.act.leader import live_controller
from paceline.decide.controller import Controller
from paceline.decide.plan import Adopted, Decision, Gain, Observation, Plan, Rejected, plan_from_json
from paceline.errors import RecordError
from paceline.record import Line, decode, encode
from paceline.report.history import Run
from paceline.types import NoiseScale, StepTiming, Update, Verdict

_PLAN_FIELDS = tuple(field.name for field in fields(Plan))
_DECIDED = ("proposed", "advised")  # how a plan is logged when it is made; what comes later is what became of it
_ROUNDING = 1e-9  # another machine's arithmetic may differ in the last digits


@dataclass(frozen=True, slots=True)
class Pair:
    """A plan of the live run and the one that the replay made in its place; None where there is none."""

    live: Plan | None
    replayed: Plan | None

    @property
    def is_equal(self) -> bool:
        """Whether they are the same plan, up to the last digits of its two ratios."""
        if self.live is None or self.replayed is None:
            return False
        pairs = (
            (self.live.lr_scale, self.replayed.lr_scale),
            (self.live.predicted_gain, self.replayed.predicted_gain),
        )
        same_ratios = all(math.isclose(one, other, rel_tol=_ROUNDING) for one, other in pairs)
        return same_ratios and _without_ratios(self.live) == _without_ratios(self.replayed)


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay.

    Args:
        mode: Of the live run. The log of one that only observes holds no plans; those of the replay are then what
            "suggest" would have advised.
        num_observations: What the controller was told.
        plans: In the order in which they were made.
        num_verdicts, num_gains: How many verdicts and measured gains are the same, and how many there are in either.
    """

    mode: str
    num_observations: int
    plans: tuple[Pair, ...]
    num_verdicts: tuple[int, int]
    num_gains: tuple[int, int]

    @property
    def num_plans(self) -> tuple[int, int]:
        """How many plans are the same, and how many there are in either."""
        return sum(pair.is_equal for pair in self.plans), len(self.plans)

    @property
    def is_equal(self) -> bool:
        """Whether the replay decided all that the live run did, and nothing else."""
        counts = [self.num_verdicts, *([] if self.mode == "observe" else [self.num_plans, self.num_gains])]
        return all(same == of for same, of in counts)

    def text(self) -> str:
        """The result in one or two sentences."""
        said = [f"{same} of {of} {what}" for (same, of), what in self._counted()]
        text = f"Told the same {self.num_observations:,} things again, the controller decides "
        text += "the same" if self.is_equal else "otherwise"
        text += f": {', '.join(said)} are equal."
        if self.mode == "observe":
            text += ' The run only observed: its log holds no plans; those here are what "suggest" would have advised.'
        return text

    def _counted(self) -> Iterable[tuple[tuple[int, int], str]]:
        if self.mode != "observe":
            yield self.num_plans, "plans"
        yield self.num_verdicts, "verdicts"
        if self.mode != "observe":
            yield self.num_gains, "measured gains"

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON-ready object."""
        return {
            "mode": self.mode,
            "is_equal": self.is_equal,
            "num_observations": self.num_observations,
            "plans": [
                {
                    "live": pair.live and pair.live.to_json(),
                    "replayed": pair.replayed and pair.replayed.to_json(),
                    "is_equal": pair.is_equal,
                }
                for pair in self.plans
            ],
            "verdicts": list(self.num_verdicts),
            "gains": list(self.num_gains),
        }


def replay(lines: Sequence[Line]) -> Replay:
    """Feed the last run of a log through the controller that its header describes.

    The controller is told what the log says that the live one was told, in the same order: timings, noise scales and
    updates; and of each plan, where it stands, that it was adopted, rejected or withdrawn. Since deciding is pure,
    the same decisions must follow; a difference means that the code has changed since, or that something which
    decides is not in the log.

    Args:
        lines: What `record.read` returned.

    Returns:
        What the controller decided, beside what the live one did.

    Raises:
        RecordError: the log was written by a version that did not record what the controller needs.
    """
    run = Run.of(lines)
    controller = controller_of(run.header)
    state = controller.init()
    decided: list[Decision] = []
    num_observations = 0
    for line in run.lines:
        if line.kind == "leases":
            controller = replace(controller, batch_size=line.data["batch_size"])
        seen = Rejected(state.pending) if line.kind == "withdrawn" and state.pending else _observation(line)
        if seen is not None:
            state, decisions = controller.step(state, seen)
            decided += decisions
            num_observations += 1
    live_plans = [_plan(line.data) for line in run.lines if line.kind == "plan" and line.data["status"] in _DECIDED]
    plans = [decision for decision in decided if isinstance(decision, Plan)]
    gains = [asdict(decision) for decision in decided if isinstance(decision, Gain)]
    verdicts = [decode(encode(decision)) for decision in decided if isinstance(decision, Verdict)]  # rounded alike
    return Replay(
        str(run.header["mode"]),
        num_observations,
        tuple(Pair(live, replayed) for live, replayed in zip_longest(live_plans, plans)),
        _num_same([line.value for line in run.lines if isinstance(line.value, Verdict)], verdicts),
        _num_same([_gain(line.data) for line in run.lines if line.kind == "gain"], gains),
    )


def controller_of(header: Mapping[str, Any]) -> Controller:
    """Return the controller of the live run with this log header.

    Raises:
        RecordError: the log was written by a version that did not record what it needs.
    """
    missing = [name for name in ("hosts", "mode", "lr_rule", "max_staleness") if name not in header]
    if missing:
        raise RecordError(
            f"this log cannot be replayed: its first line lacks {', '.join(missing)}, as those of older versions do; "
            "record the run again"
        )
    arch, momentum = header.get("arch", "ring"), header.get("momentum", 0.9)
    hosts = tuple(header["hosts"])
    return live_controller(hosts, header["lr_rule"], header["max_staleness"], arch, momentum=momentum)


def _observation(line: Line) -> Observation | None:
    """What the live controller was told by what this line records; None where it was told nothing."""
    if isinstance(line.value, StepTiming | NoiseScale | Update):
        return line.value
    if line.kind == "plan" and line.data["status"] in ("adopted", "rejected"):
        plan = _plan(line.data)
        return Adopted(plan) if line.data["status"] == "adopted" else Rejected(plan)
    return None


def _plan(data: Mapping[str, Any]) -> Plan:
    return plan_from_json({name: data[name] for name in _PLAN_FIELDS if name in data})


def _gain(data: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: data.get(field.name) for field in fields(Gain)}


def _num_same(live: Sequence[Any], replayed: Sequence[Any]) -> tuple[int, int]:
    pairs = list(zip_longest(live, replayed))
    return sum(one == other for one, other in pairs), len(pairs)


def _without_ratios(plan: Plan) -> Plan:
    return replace(plan, lr_scale=1.0, predicted_gain=1.0)
