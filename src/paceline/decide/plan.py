"""What a decider says and hears: plans, their measured gains, and the observations they rest on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paceline.decide.estimate import LrRule
from paceline.policy import catalog
from paceline.policy.base import SyncPolicy
from paceline.types import NoiseScale, StepTiming, Update, Verdict

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision to change the synchronisation mode.

    Args:
        epoch: Number of the plan, from 1; nobody acts on an older one.
        effective_step: Every rank switches before it computes this gradient exchange, none before, none after.
        policy: The mode.
        batch_sizes: Samples per rank and gradient, by rank, each > 0; None leaves them as they were at the start.
        lr_scale: Expected factor on the learning rate while it lasts; each update's own factor is in the log.
        predicted_gain: Time to accuracy of staying over that of the plan, ratio.
        reason: One sentence, shown as it is.
    """

    epoch: int
    effective_step: int
    policy: SyncPolicy[Any]
    lr_scale: float
    predicted_gain: float
    reason: str
    batch_sizes: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON-ready object; `plan_from_json` turns it back."""
        return {
            "epoch": self.epoch,
            "effective_step": self.effective_step,
            "policy": catalog.to_json(self.policy),
            "lr_scale": self.lr_scale,
            "predicted_gain": self.predicted_gain,
            "reason": self.reason,
            "batch_sizes": self.batch_sizes and list(self.batch_sizes),
        }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan behind `Plan.to_json`'s object."""
    batch_sizes = data.get("batch_sizes")
    return Plan(
        **{
            **data,
            "policy": catalog.from_json(data["policy"]),
            "batch_sizes": tuple(batch_sizes) if batch_sizes else None,
        }
    )


@dataclass(frozen=True, slots=True)
class Adopted:
    """Every rank switched to this plan at this step."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Rejected:
    """The plan could not be agreed on (some rank was already past its step)."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Gain:
    """What an adopted plan brought, measured against the steps before it.

    Args:
        epoch: The plan.
        predicted: Its promise, ratio.
        measured: Time per unit of progress before over after, ratio.
        interval_before_s, interval_after_s: Median time between updates, seconds.
        batch_before, batch_after: Mean samples per update.
    """

    epoch: int
    predicted: float
    measured: float
    interval_before_s: float
    interval_after_s: float
    batch_before: float
    batch_after: float


Observation = StepTiming | NoiseScale | Update | Adopted | Rejected
Decision = Verdict | Plan | Gain


class Decider(Protocol[S]):
    """Turns observations into decisions: our controller, and every published one beside it. State is a value."""

    @property
    def initial(self) -> SyncPolicy[Any]:
        """The policy that training starts with."""
        ...

    @property
    def lr_rule(self) -> LrRule:
        """How the learning rate follows the batch of an update."""
        ...

    def init(self) -> S:
        """Return the state before the first step."""
        ...

    def step(self, state: S, seen: Observation) -> tuple[S, tuple[Decision, ...]]:
        """Take in one observation; return the new state and what follows from it, in order."""
        ...
