"""Rank 0's part: turns observations into log lines, verdicts and agreed plans, on its coordinator thread."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.act.coordinator import Board, ReadBatch, Status
from paceline.act.health import Health, Member
from paceline.decide.controller import Adopted, Controller, Gain, Observation, Plan, Rejected
from paceline.errors import PeerError
from paceline.measure.noise import NoiseEstimator
from paceline.policy.ring import AttachedRing
from paceline.record import RunLog, decode
from paceline.types import NormSample, Rank, Verdict

logger = logging.getLogger("paceline")
_MAX_ATTEMPTS = 5
_MARGIN_S = 0.35  # how far ahead a proposal's fence lies: a few ticks of every rank's coordinator


@dataclass(frozen=True, slots=True)
class Negotiation:
    """A plan on its way to every rank: `stage` is park, arm or commit."""

    plan: Plan
    stage: str
    attempt: int = 0

    @property
    def key(self) -> list[int]:
        """Identifies this attempt; never reused, since a rejected plan's epoch is used again."""
        return [self.plan.epoch, self.attempt]


class Leader:
    """Feeds the controller, writes the run log, watches the ranks' health and carries plans through.

    Args:
        controller: Decides.
        log: The run log.
        members: Where every rank runs.
        limit_s: Silence after which a rank counts as failed, seconds.
        acts: Whether plans are carried out; otherwise they are advice.
    """

    def __init__(
        self, controller: Controller, log: RunLog, members: Sequence[Member], limit_s: float, acts: bool
    ) -> None:
        self.log = log
        self.acts = acts
        self._controller = controller
        self._state = controller.init()
        self._health = Health(members, limit_s, time.monotonic)
        self._members = members
        self._start = time.monotonic()
        self._noise = NoiseEstimator()
        self._norms: dict[int, list[NormSample]] = defaultdict(list)
        self._read = [0] * len(members)
        self._negotiation: Negotiation | None = None
        self._attempts = 0
        self._advised_for: frozenset[Rank] | None = None
        self._decision: dict[str, Any] | None = None
        self._prepare = 0
        self._beat = 0
        self._board: Board = {}
        self._ended = False
        self._silent: set[Rank] = set()
        self._last_flush = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since the run began, on rank 0's clock."""
        return time.monotonic() - self._start

    @property
    def attached(self) -> frozenset[Rank]:
        """Ranks attached at present."""
        policy = self._state.policy
        return frozenset(policy.parent_of) if isinstance(policy, AttachedRing) else frozenset()

    def __call__(self, statuses: list[Status], read_batch: ReadBatch) -> Board:
        """One tick: take in what is new, return the next board."""
        self._beat += 1
        if self._ended:  # only the last word goes on being told
            return {**self._board, "beat": self._beat, "all_closed": all(s["closed"] for s in statuses)}
        for rank, status in enumerate(statuses):
            for number in range(self._read[rank], status["batches"]):
                for data in read_batch(rank, number):
                    self._take_in(decode(data))
            self._read[rank] = status["batches"]
        loss = self._health.judge(statuses, self.attached)
        self._note_silent()
        self._negotiate(statuses)
        if self.now_s - self._last_flush > 1.0:
            self._last_flush = self.now_s
            self.log.flush()
        ring = [s for rank, s in enumerate(statuses) if rank not in self.attached]
        negotiation = self._negotiation
        self._board = {
            "beat": self._beat,
            "prepare": self._prepare,
            "proposal": None
            if negotiation is None or negotiation.stage == "park"
            else {"key": negotiation.key, "plan": negotiation.plan.to_json()},
            "decision": self._decision,
            "over": max(s["over"] for s in ring) if self.attached else -1,
            "fence": max(s["fence"] for s in ring),
            "failure": None if loss is None else asdict(loss),
            "all_closed": all(s["closed"] for s in statuses),
        }
        return self._board

    def _take_in(self, value: Any) -> None:
        if isinstance(value, NormSample):
            self._take_in_norms(value)
            return
        self.log.write_value(value, time_s=round(self.now_s, 4))
        self._observe(value)

    def _take_in_norms(self, sample: NormSample) -> None:
        samples = self._norms[sample.step]
        samples.append(sample)
        if len(samples) < len(self._members) - len(self.attached):
            return
        for step in [s for s in self._norms if s <= sample.step]:
            del self._norms[step]
        self._noise = self._noise.observe(samples)
        if self._noise.num_samples:
            estimate = self._noise.estimate()
            if math.isfinite(estimate.value):
                self._take_in(estimate)

    def _observe(self, seen: Observation) -> None:
        self._state, decisions = self._controller.step(self._state, seen)
        for decision in decisions:
            match decision:
                case Verdict():
                    self.log.write_value(decision, time_s=round(self.now_s, 4))
                    logger.warning(
                        "%s:%d is slow (%.1fx, %+.0f ms per step, %.0f %% of the job's time lost): %s; %s",
                        decision.host, decision.rank, decision.slowdown, decision.excess_s * 1e3,
                        decision.lost_ratio * 100, decision.cause, decision.evidence,
                    )  # fmt: skip
                case Plan():
                    self._start_negotiation(decision)
                case Gain():
                    self.log.write("gain", time_s=round(self.now_s, 4), **asdict(decision))
                    logger.info(
                        "plan %d: predicted %.2fx, measured %.2fx",
                        decision.epoch,
                        decision.predicted,
                        decision.measured,
                    )

    def _write_plan(self, plan: Plan, status: str) -> None:
        self.log.write("plan", time_s=round(self.now_s, 4), status=status, **plan.to_json())

    def _start_negotiation(self, plan: Plan) -> None:
        if not self.acts:
            self._advised_for = self._state.named
            self._write_plan(plan, "advised")
            logger.info("advice: %s", plan.reason)
            return
        self._write_plan(plan, "proposed")
        logger.info("plan %d: %s", plan.epoch, plan.reason)
        self._negotiation = Negotiation(plan, "park")
        self._prepare = plan.epoch if self.attached else 0

    def _negotiate(self, statuses: list[Status]) -> None:
        negotiation = self._negotiation
        if negotiation is None:
            if self._advised_for is not None and self._state.named != self._advised_for:
                self._advised_for = None  # the situation has changed: advise anew
                if self._state.pending is not None:
                    self._observe(Rejected(self._state.pending))
            return
        match negotiation.stage:
            case "park":
                if all(statuses[rank]["parked"] == negotiation.plan.epoch for rank in self.attached):
                    self._propose(negotiation.plan, statuses)
            case "arm":
                answers = [(s["armed"], s["refused"]) for s in statuses]
                if any(refused == negotiation.key for _, refused in answers):
                    self._decision = {"key": negotiation.key, "commit": False}
                    self._retry(negotiation.plan, statuses)
                elif all(armed == negotiation.key for armed, _ in answers):
                    self._decision = {"key": negotiation.key, "commit": True}
                    self._negotiation = replace(negotiation, stage="commit")
            case "commit":
                if all(s["adopted"] == negotiation.plan.epoch for s in statuses):
                    self._negotiation, self._prepare = None, 0
                    self._write_plan(negotiation.plan, "adopted")
                    self._observe(Adopted(negotiation.plan))

    def _propose(self, plan: Plan, statuses: list[Status]) -> None:
        self._attempts += 1
        given = self._controller.conditions(self._state)
        pace_s = max(given.own_times_s[rank] for rank in self._ring_ranks()) if given else 0.1
        ahead = max(2, math.ceil(_MARGIN_S / pace_s))
        step = max(statuses[rank]["next"] for rank in self._ring_ranks()) + ahead
        self._negotiation = Negotiation(replace(plan, effective_step=step), "arm", self._attempts)

    def _retry(self, plan: Plan, statuses: list[Status]) -> None:
        if self._attempts % _MAX_ATTEMPTS:
            self._propose(plan, statuses)
            return
        self._attempts += 1
        self._negotiation, self._prepare = None, 0
        self._write_plan(plan, "rejected")
        logger.warning("plan %d could not be agreed on in %d attempts; staying as we are", plan.epoch, _MAX_ATTEMPTS)
        self._observe(Rejected(plan))

    def _ring_ranks(self) -> list[Rank]:
        return [rank for rank in range(len(self._members)) if rank not in self.attached]

    def _note_silent(self) -> None:
        for rank in self._health.silent - self._silent:
            self.event(
                f"rank {rank} on host {self._members[rank].host} gives no sign of life; the ring goes on without it"
            )
        for rank in self._silent - self._health.silent:
            self.event(f"rank {rank} on host {self._members[rank].host} is back")
        self._silent = set(self._health.silent)

    def begin_leases(self, batch_size: int, acts: bool) -> None:
        """The loop takes leased batches: from now on plans can be carried out."""
        self._controller = replace(self._controller, batch_size=batch_size)
        self.acts = acts

    def metric(self, name: str, value: float) -> None:
        """Log a number of the user's."""
        self.log.write("metric", time_s=round(self.now_s, 4), step=self._state.step, name=name, value=value)

    def end(self, statuses: list[Status]) -> None:
        """Write the last line: samples, and whether all ranks hold the same parameters."""
        hashes = [s.get("hash") for s in statuses]
        counts = statuses[min(self._ring_ranks())].get("samples") if statuses else None
        self.log.write(
            "end",
            time_s=round(self.now_s, 4),
            samples=counts,
            noise_scale=self._state.noise,
            identical_parameters=None if None in hashes or not hashes else len(set(hashes)) == 1,
        )
        self._end_log()

    def fail(self, failure: PeerError) -> None:
        """Write the last line of a run that lost a rank."""
        self.log.write(
            "failure", time_s=round(self.now_s, 4), rank=failure.rank, host=failure.host, reason=failure.reason
        )
        self._end_log()

    def _end_log(self) -> None:
        self._ended = True
        self.log.close()

    def event(self, message: str) -> None:
        """Log something worth reading."""
        self.log.write("event", time_s=round(self.now_s, 4), message=message)
        logger.info("%s", message)
