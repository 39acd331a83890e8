"""Agreement on a plan: turns what every rank has answered into park, propose, commit or reject. Runs on rank 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from paceline.decide.plan import Plan
from paceline.types import Rank

Stage = Literal["idle", "park", "arm", "commit"]
_MAX_TRIES = 5
_MARGIN_S = 0.35  # how far ahead a proposal's fence lies: a few ticks of every rank's coordinator
_PARK_S = 30.0  # an attached rank that has not parked by then is stopped, or in a very long step


class Negotiator:
    """Carries one plan at a time to all ranks, so that all switch at the same step or none does.

    park: attached ranks stand still. arm: every rank either arms the plan's fence or refuses, being past it; a refusal
    moves the fence further ahead. commit: all have armed, so nobody can pass the fence without the decision.
    """

    def __init__(self) -> None:
        self.stage: Stage = "idle"
        self._plan: Plan | None = None
        self._attempt = 0  # never reused: a rejected plan's epoch is
        self._tries = 0
        self._since_s = 0.0
        self._decision: dict[str, Any] | None = None

    def start(self, plan: Plan, now_s: float) -> None:
        """Begin with a plan; there must be none under way."""
        assert self.stage == "idle", f"plan {self._plan} is still under way"
        self._plan, self.stage, self._tries, self._since_s = plan, "park", 0, now_s

    def board(self, attached: Collection[Rank]) -> dict[str, Any]:
        """What every rank must know of it."""
        plan = self._plan
        under_way = plan is not None and self.stage != "idle"
        return {
            "prepare": plan.epoch if plan is not None and under_way and attached else 0,
            "proposal": {"key": self._key(), "plan": plan.to_json()}
            if plan is not None and self.stage in ("arm", "commit")
            else None,
            "decision": self._decision,
        }

    def tick(
        self, statuses: Sequence[dict[str, Any]], attached: Collection[Rank], pace_s: float, now_s: float
    ) -> tuple[Literal["adopted", "rejected"], Plan] | None:
        """Take in everybody's answers; the end of the negotiation, or None while it goes on.

        Args:
            statuses: By rank.
            attached: Ranks attached at present.
            pace_s: Seconds per step of the ring.
            now_s: Rank 0's clock.
        """
        plan = self._plan
        if plan is None:
            return None
        ring = [status for rank, status in enumerate(statuses) if rank not in attached]
        match self.stage:
            case "park":
                if all(statuses[rank]["parked"] == plan.epoch for rank in attached):
                    self._propose(plan, ring, pace_s)
                elif now_s - self._since_s > _PARK_S:
                    return self._end("rejected")
            case "arm" if any(status["refused"] == self._key() for status in statuses):
                self._decision = {"key": self._key(), "commit": False}
                if self._tries >= _MAX_TRIES:
                    return self._end("rejected")
                self._propose(plan, ring, pace_s)
            case "arm" if all(status["armed"] == self._key() for status in statuses):
                self._decision = {"key": self._key(), "commit": True}
                self.stage = "commit"
            case "commit" if all(status["adopted"] == plan.epoch for status in statuses):
                return self._end("adopted")
        return None

    def abandon(self) -> None:
        """Give up what is not committed yet: nobody may wait at a fence for a decision that will not come."""
        if self.stage in ("park", "arm"):
            self._decision = {"key": self._key(), "commit": False}
            self._end("rejected")

    def _propose(self, plan: Plan, ring: Sequence[dict[str, Any]], pace_s: float) -> None:
        ahead = max(2, math.ceil(_MARGIN_S / max(pace_s, 1e-3)))
        step = max(status["next"] for status in ring) + ahead
        self._plan, self.stage = replace(plan, effective_step=step), "arm"
        self._attempt += 1
        self._tries += 1

    def _key(self) -> list[int]:
        return [self._plan.epoch if self._plan else 0, self._attempt]

    def _end(self, how: Literal["adopted", "rejected"]) -> tuple[Literal["adopted", "rejected"], Plan]:
        assert self._plan is not None
        plan, self._plan, self.stage = self._plan, None, "idle"
        return how, plan
