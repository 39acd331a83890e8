"""The decision loop: turns observations into verdicts, plans and measured gains. Pure: joins all of `decide`.

The same object runs live (fed by the coordinator on rank 0), in replay (fed from a run log) and in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from paceline.decide.estimate import Conditions, LrRule, estimate, lr_scale, updates_needed
from paceline.decide.plan import Adopted, Decision, Gain, Observation, Plan, Rejected
from paceline.decide.selector import Policy, Selector
from paceline.policy.barrier import BSP
from paceline.policy.ring import AttachedRing
from paceline.predict.attribution import verdict
from paceline.predict.detector import Detector, DetectorState
from paceline.predict.forecast import Ewma, Forecaster
from paceline.types import NoiseScale, Rank, StepTiming, Update

_MAX_ROWS = 32  # complete rows kept: enough for the dwell time and the cost of a reduction


@dataclass(frozen=True, slots=True)
class Baseline:
    """How the steps before a plan went: what its gain is measured against."""

    interval_s: float
    batch_samples: float


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Everything the controller remembers; a value."""

    detector: DetectorState
    forecasts: Any
    policy: Policy = field(default_factory=BSP)
    noise: float | None = None
    step: int = 0
    since_step: int = 0
    num_plans: int = 0
    pending: Plan | None = None
    adopted: Plan | None = None
    before: Baseline | None = None
    recent: Mapping[int, Mapping[Rank, StepTiming]] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    named: frozenset[Rank] = frozenset()


@dataclass(frozen=True, slots=True)
class Controller:
    """Observations in, decisions out.

    Args:
        hosts: Host name by rank; its length is the world size.
        batch_size: Samples per rank and step, > 0.
        lr_rule: How the learning rate follows the batch.
        detector, forecaster, selector: The parts.
        dwell_steps: Steps between two plans, at least.
        fence_s: How long a plan takes to reach every rank; sets its `effective_step`, seconds.
        staleness_cost: See `Conditions`.

    Example:
        >>> controller = Controller(hosts=("a",) * 4, batch_size=32)
        >>> state, plans = controller.init(), []
        >>> for step in range(1, 12):
        ...     for rank in range(4):
        ...         own = 0.25 if rank == 2 else 0.05
        ...         timing = StepTiming(rank, step, 0.0, backward_s=own, wait_s=0.25 - own)
        ...         state, decisions = controller.step(state, timing)
        ...         plans += [d for d in decisions if isinstance(d, Plan)]
        >>> plans[0].policy.parent_of, plans[0].predicted_gain > 3
        ({2: 0}, True)
    """

    hosts: tuple[str, ...]
    batch_size: int = 1
    lr_rule: LrRule = "linear"
    detector: Detector = field(default_factory=Detector)
    forecaster: Forecaster[Any] = field(default_factory=Ewma)
    selector: Selector = field(default_factory=Selector)
    dwell_steps: int = 20
    fence_s: float = 0.3
    staleness_cost: float = 0.1

    @property
    def initial(self) -> Policy:
        """Everybody in the ring."""
        return BSP()

    def init(self) -> ControllerState:
        """Return the state before the first step: everybody in the ring."""
        ranks = frozenset(range(len(self.hosts)))
        return ControllerState(self.detector.init(ranks), self.forecaster.init(ranks))

    def step(self, state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Decision, ...]]:
        """Take in one observation; return the new state and what follows from it, in order."""
        match seen:
            case StepTiming():
                return self._on_timing(state, seen)
            case NoiseScale():
                return replace(state, noise=seen.value), ()
            case Update():
                return replace(state, batches=(*state.batches, sum(seen.contributions.values()))[-200:]), ()
            case Adopted(plan):
                return self._on_adopted(state, plan), ()
            case Rejected():
                return replace(state, pending=None, num_plans=state.num_plans - 1), ()

    def conditions(self, state: ControllerState) -> Conditions | None:
        """What the next choice would rest on; None while some rank is unknown."""
        times: dict[Rank, float] = {}
        for rank in range(len(self.hosts)):
            forecast = self.forecaster.forecast(state.forecasts, rank)
            if forecast is None or forecast.mean_s <= 0:
                return None
            times[rank] = forecast.mean_s
        # Of a row that is not complete yet, the rank still missing may be the one that all others wait for.
        rows = self._full_rows(state)[-10:]
        comm = median(min(t.wait_s for t in row.values()) for row in rows) if rows else 0.0
        # Before the noise scale is known, assume it equals the batch: half way between the two extremes.
        noise = state.noise if state.noise is not None else float(self.batch_size * len(self.hosts))
        return Conditions(times, comm, self.batch_size, noise, self.staleness_cost)

    def _full_rows(self, state: ControllerState, since: int = 0) -> list[Mapping[Rank, StepTiming]]:
        """The recent rows after step `since` in which every member has reported, oldest first."""
        members = self._members(state.policy)
        return [row for step, row in sorted(state.recent.items()) if step > since and len(row) == len(members)]

    def _members(self, policy: Policy) -> frozenset[Rank]:
        return frozenset(policy.ring) if isinstance(policy, AttachedRing) else frozenset(range(len(self.hosts)))

    def _on_timing(self, state: ControllerState, timing: StepTiming) -> tuple[ControllerState, tuple[Decision, ...]]:
        members = self._members(state.policy)
        detector = self.detector.observe(state.detector, timing)
        forecasts, recent, row_is_complete = state.forecasts, state.recent, True
        if timing.expected_s == 0.0:
            forecasts = self.forecaster.observe(forecasts, timing)
        if timing.rank in members:  # an attached rank's step is news of its own and completes no row
            row = {**recent.get(timing.step, {}), timing.rank: timing}
            recent = {**recent, timing.step: row}
            if len(recent) > _MAX_ROWS:
                del recent[min(recent)]
            row_is_complete = len(row) == len(members)
        step = max(state.step, timing.step) if timing.rank in members else state.step
        state = replace(state, detector=detector, forecasts=forecasts, recent=recent, step=step)
        state, verdicts = self._name_slow(state)
        if not row_is_complete:
            return state, verdicts
        state, gains = self._measure_gain(state)
        state, plans = self._decide(state)
        return state, (*verdicts, *gains, *plans)

    def _name_slow(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        slow = state.detector.slow
        if slow == state.named:
            return state, ()
        fresh = [verdict(rank, self.hosts[rank], state.detector.windows[rank]) for rank in sorted(slow - state.named)]
        return replace(state, named=slow), tuple(fresh)

    def _decide(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        if state.pending is not None:
            return state, ()
        in_ring = isinstance(state.policy, BSP)
        if in_ring and not state.detector.slow:
            return state, ()  # nobody is slow beyond doubt: leave training as it is
        if state.since_step and state.step < state.since_step + self.dwell_steps:
            return state, ()
        given = self.conditions(state)
        if given is None:
            return state, ()
        choice = self.selector.choose(state.policy, given)
        if choice.policy == state.policy:
            return state, ()
        margin = max(2, math.ceil(self.fence_s / max(choice.staying.interval_s, 1e-3)))
        scale = lr_scale(self.lr_rule, choice.estimate.batch_samples, self.batch_size * len(self.hosts))
        plan = Plan(
            epoch=state.num_plans + 1,
            effective_step=state.step + margin,
            policy=choice.policy,
            lr_scale=scale,
            predicted_gain=choice.gain,
            reason=choice.reason,
        )
        return replace(state, pending=plan, num_plans=plan.epoch), (plan,)

    def _on_adopted(self, state: ControllerState, plan: Plan) -> ControllerState:
        return replace(
            state,
            policy=plan.policy,
            detector=self.detector.set_members(state.detector, self._members(plan.policy)),
            since_step=plan.effective_step,
            step=max(state.step, plan.effective_step - 1),
            pending=None,
            adopted=plan,
            before=self._progress(state, since=state.since_step),
            recent={},
            batches=(),
        )

    def _progress(self, state: ControllerState, since: int) -> Baseline | None:
        """Median interval and mean batch of the recent full rows from step `since` on."""
        rows = self._full_rows(state, since)
        if not rows:
            return None
        interval = median(max(t.wall_s - t.expected_s for t in row.values()) for row in rows[-self.dwell_steps :])
        if isinstance(state.policy, BSP):
            batch = float(self.batch_size * len(self.hosts))
        elif state.batches:
            batch = fmean(state.batches)
        else:
            given = self.conditions(state)
            batch = estimate(state.policy, given).batch_samples if given else float(self.batch_size)
        return Baseline(interval, batch)

    def _measure_gain(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        plan = state.adopted
        if plan is None or state.step < plan.effective_step + self.dwell_steps:
            return state, ()
        after = self._progress(state, since=plan.effective_step)
        state = replace(state, adopted=None)
        if state.before is None or after is None:
            return state, ()
        noise = state.noise if state.noise is not None else float(self.batch_size * len(self.hosts))

        def cost(b: Baseline) -> float:
            return b.interval_s * updates_needed(b.batch_samples, noise)

        return state, (
            Gain(
                plan.epoch,
                plan.predicted_gain,
                cost(state.before) / cost(after),
                state.before.interval_s,
                after.interval_s,
                state.before.batch_samples,
                after.batch_samples,
            ),
        )
