"""Rank 0's part: turns observations into log lines, verdicts and agreed plans, on its coordinator thread."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.act.coordinator import Board, Status
from paceline.act.health import Health, Member
from paceline.act.negotiation import Negotiator
from paceline.decide.candidates import PARAMETER_SERVER
from paceline.decide.controller import Controller
from paceline.decide.estimate import LrRule, staleness_cost, staleness_limit
from paceline.decide.plan import Adopted, Gain, Observation, Plan, Rejected
from paceline.decide.rehearse import Arch
from paceline.decide.selector import Selector
from paceline.errors import PeerError
from paceline.policy.ring import AttachedRing
from paceline.predict.noise import NoiseEstimator
from paceline.record import RunLog, decode
from paceline.types import NormSample, Rank, Verdict

logger = logging.getLogger("paceline")
_BREATH_S = 1e-4  # slept now and then: a burst of observations must not keep the interpreter from the training thread
_PER_BREATH = 4  # observations between two breaths


def live_controller(
    hosts: tuple[str, ...],
    lr_rule: LrRule,
    max_staleness: int,
    arch: Arch = "ring",
    batch_size: int = 1,
    momentum: float = 0.9,
) -> Controller:
    """What decides in a live run; the run log's header has all of it, so that a replay has the same one."""
    if arch == "ring":
        return Controller(hosts, batch_size, lr_rule=lr_rule, selector=Selector(max_staleness=max_staleness))
    # The chief server changes the mode by itself, at once, and back as easily: so one step in which a rank takes more
    # than twice what the others do is a reason.
    return Controller(
        hosts,
        batch_size,
        lr_rule=lr_rule,
        selector=Selector(max_staleness=max_staleness, families=PARAMETER_SERVER),
        arch="ps",
        fence_s=0.0,
        waste_ratio=0.3,
        sure_rows=0.55,
        staleness_cost=staleness_cost(momentum),
        # Measured with SGD. Adam, whose steps shrink where gradients disagree, bears more; how much is not known.
        staleness_limit=staleness_limit(momentum) if lr_rule == "linear" else math.inf,
    )


class Leader:
    """Feeds the controller, writes the run log, watches the ranks' health and carries plans through.

    Args:
        controller: Decides.
        log: The run log.
        members: Where every rank runs.
        health: Judges signs of life.
        advises: Whether plans that are not carried out are logged as advice.
    """

    def __init__(
        self, controller: Controller, log: RunLog, members: Sequence[Member], health: Health, advises: bool
    ) -> None:
        self.log = log
        self.acts = False  # until the loop takes leased batches
        self._advises = advises
        self._controller = controller
        self._state = controller.init()
        self._health = health
        self._members = members
        self._start = time.monotonic()
        self._noise = NoiseEstimator()
        self._norms: dict[int, list[NormSample]] = defaultdict(list)
        self._read = [0] * len(members)
        self._negotiator = Negotiator()
        self._advised_for: frozenset[Rank] | None = None
        self._beat = 0
        self._board: Board = {"read": self._read}
        self._ended = False
        self._broken = False  # an error of our own: what was measured so far stands, the report is partial
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

    def __call__(self, statuses: list[Status], observations: Sequence[Sequence[str]]) -> Board:
        """One tick: take in what is new, return the next board."""
        self._beat += 1
        if self._ended:  # only the last word goes on being told
            return {**self._board, "beat": self._beat, "all_closed": all(s["closed"] for s in statuses)}
        try:
            self._take_in_news(statuses, observations)
        except Exception:  # measuring and deciding must never be what ends a training
            logger.exception("paceline stops observing after an error of its own; the training goes on")
            self._broken = True
            self._negotiator.abandon()
        ring = [status for rank, status in enumerate(statuses) if rank not in self.attached]
        loss = self._health.judge(statuses, self.attached)
        self._board = {
            "beat": self._beat,
            "read": self._read,
            **self._negotiator.board(self.attached),
            "over": max(status["over"] for status in ring) if self.attached else -1,
            "fence": max(status["fence"] for status in ring),
            "failure": None if loss is None else asdict(loss),
            "all_closed": all(status["closed"] for status in statuses),
        }
        return self._board

    def _take_in_news(self, statuses: list[Status], observations: Sequence[Sequence[str]]) -> None:
        for rank, (status, lines) in enumerate(zip(statuses, observations, strict=True)):
            for line in lines[self._read[rank] - status["first"] :]:
                self._read[rank] += 1  # first: it is read, whatever comes of it
                if not self._broken:
                    self._take_in(line)
                if sum(self._read) % _PER_BREATH == 0:
                    time.sleep(_BREATH_S)
        if self._broken and self._negotiator.stage != "commit":
            return
        self._note_silent()
        self._withdraw_advice()
        ended = self._negotiator.tick(statuses, self.attached, self._pace_s(), self.now_s)
        if ended is not None:
            how, plan = ended
            self._write_plan(plan, how)
            self._observe(Adopted(plan) if how == "adopted" else Rejected(plan))
        if self.now_s - self._last_flush > 1.0:
            self._last_flush = self.now_s
            self.log.flush()

    def _pace_s(self) -> float:
        given = self._controller.conditions(self._state)
        return max(given.own_times_s[rank] for rank in self._ring_ranks()) if given else 0.1

    def _take_in(self, line: str) -> None:
        value = decode(json.loads(line))
        if isinstance(value, NormSample):
            self._take_in_norms(value)
            return
        self.log.write_encoded(line, round(self.now_s, 4))
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
                self.log.write_value(estimate, time_s=round(self.now_s, 4))
                self._observe(estimate)

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
            if self._advises:
                self._write_plan(plan, "advised")
                logger.info("advice: %s", plan.reason)
            return
        self._write_plan(plan, "proposed")
        logger.info("plan %d: %s", plan.epoch, plan.reason)
        self._negotiator.start(plan, self.now_s)

    def _withdraw_advice(self) -> None:
        """Advice holds for the slow ranks it was given for; when they change, advise anew."""
        if self._advised_for is not None and self._state.named != self._advised_for:
            self._advised_for = None
            if self._state.pending is not None:
                self.log.write("withdrawn", time_s=round(self.now_s, 4), epoch=self._state.pending.epoch)
                self._observe(Rejected(self._state.pending))

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
        self.log.write("leases", time_s=round(self.now_s, 4), batch_size=batch_size)
        self._controller = replace(self._controller, batch_size=batch_size)
        self.acts = acts

    def metric(self, name: str, value: float) -> None:
        """Log a number of the user's."""
        self.log.write("metric", time_s=round(self.now_s, 4), step=self._state.step, name=name, value=value)

    def note(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        """Log what all ranks decided alike for the step to come."""
        self.log.write(kind, time_s=round(self.now_s, 4), step=step, **numbers)
        if "reason" in numbers:
            self.event(f"all-reduce from step {step} on: {numbers['reason']}")  # which the report shows

    def end(self, statuses: list[Status]) -> None:
        """Write the last line: samples, and whether all ranks hold the same parameters."""
        hashes = [s.get("hash") for s in statuses]
        counts = statuses[min(self._ring_ranks())].get("samples") if statuses else None
        self.log.write(
            "end",
            time_s=round(self.now_s, 4),
            samples=counts,
            noise_scale=self._state.noise,
            observed_to_the_end=not self._broken,
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
