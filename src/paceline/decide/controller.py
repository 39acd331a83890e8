"""The decision loop: turns observations into verdicts, plans and measured gains. Pure: joins all of `decide`.

The same object runs live (fed by the coordinator on rank 0), in replay (fed from a run log) and in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from paceline.decide.candidates import Mode
from paceline.decide.estimate import LrRule, lr_scale, progress
from paceline.decide.plan import Adopted, Decision, Gain, Observation, Plan, Rejected
from paceline.decide.rehearse import Arch, Conditions, OwnStep, estimate
from paceline.decide.selector import Selector
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.predict.attribution import verdict
from paceline.predict.detector import Detector, DetectorState
from paceline.predict.forecast import Ewma, Forecaster
from paceline.types import NoiseScale, Rank, StepTiming, Update

_MAX_ROWS = 32  # rows, and steps of every rank, that are kept: enough for the dwell time and for a rehearsal
_MAX_HISTORY = 64  # steps of every rank that its history goes back
_NEWS_RATIO = 0.15  # conditions that differ by less than this from those judged last are no news
_TYPICAL_ROWS = 4  # rows from which a rank's median time is taken for typical


@dataclass(frozen=True, slots=True)
class Pace:
    """How updates went under one mode: what the gain of a plan is measured by."""

    interval_s: float
    batch_samples: float


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Everything the controller remembers; a value.

    Args:
        detector, forecasts: State of the parts.
        mode: In force.
        noise: The gradient noise scale, samples; None while unknown.
        comm_s: Exchange among all ranks without waiting, seconds; None while unknown.
        step: Number of the latest exchange.
        since_step: First exchange under the present mode.
        num_plans: Plans made and not rejected.
        pending: A plan on its way.
        adopted, before: A plan whose gain is still to be measured, and the pace before it.
        recent: The latest timings by step and rank.
        own_steps: The latest own times of every rank since its last jump.
        history: The same, jumps or not.
        updates: Time and samples of the latest updates under the present mode.
        num_timings: Steps of single ranks seen.
        judged: Conditions of the latest choice, and how many steps of single ranks had been seen.
        named: The slow ranks that verdicts were given on.
    """

    detector: DetectorState
    forecasts: Any
    mode: Mode = field(default_factory=lambda: Mode(BSP()))
    noise: float | None = None
    comm_s: float | None = None
    step: int = 0
    since_step: int = 0
    num_plans: int = 0
    pending: Plan | None = None
    adopted: Plan | None = None
    before: Pace | None = None
    recent: Mapping[int, Mapping[Rank, StepTiming]] = field(default_factory=dict)
    own_steps: Mapping[Rank, tuple[OwnStep, ...]] = field(default_factory=dict)
    history: Mapping[Rank, tuple[OwnStep, ...]] = field(default_factory=dict)
    updates: tuple[tuple[float, int], ...] = ()
    num_timings: int = 0
    judged: tuple[int, tuple[float, ...]] = (0, ())
    named: frozenset[Rank] = frozenset()

    @property
    def policy(self) -> SyncPolicy[Any]:
        """The policy in force."""
        return self.mode.policy


@dataclass(frozen=True, slots=True)
class Controller:
    """Observations in, decisions out.

    Args:
        hosts: Host name by rank; its length is the world size.
        batch_size: Samples per rank and step, > 0.
        lr_rule: How the learning rate follows the batch.
        detector, forecaster, selector: The parts.
        dwell_steps: Steps between two plans, at least.
        rejudge_steps: After so many steps of every rank conditions are judged anew, even if hardly different.
        fence_s: How long a plan takes to reach every rank; sets its `effective_step`, seconds.
        staleness_cost, staleness_limit, arch, fixed_ratio, history_weight: See `Conditions`.
        smooths: Whether modes are judged by the forecast own times instead of the last ones each, so that the jitter of
            a loaded host is no reason to change.
        waste_ratio: While nobody is slow beyond doubt, modes are judged by the ranks' median times, unless the slowest
            rank of a step, whoever it is, costs at least this share of the time on average: then by all recent steps.
            `inf` leaves training as it is until somebody is slow.
        sure_rows: Steps' worth of such waiting that is no accident any more, >= 0.

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
    rejudge_steps: int = 20
    fence_s: float = 0.25
    staleness_cost: float = 0.1
    staleness_limit: float = math.inf
    arch: Arch = "ring"
    fixed_ratio: float = 1.0
    waste_ratio: float = math.inf
    sure_rows: float = 1.4
    history_weight: float = 0.0
    smooths: bool = True

    @property
    def initial(self) -> SyncPolicy[Any]:
        """Everybody in every update."""
        return BSP()

    @property
    def reference_samples(self) -> int:
        """Samples per update that the learning rate was tuned for."""
        return self.batch_size * len(self.hosts)

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
                return self._on_update(state, seen)
            case Adopted(plan):
                return self._on_adopted(state, plan), ()
            case Rejected():
                return replace(state, pending=None, num_plans=state.num_plans - 1, judged=(0, ())), ()

    def conditions(self, state: ControllerState) -> Conditions | None:
        """What the next choice would rest on; None while some rank is unknown."""
        if len(state.own_steps) < len(self.hosts):
            return None
        own_steps = state.own_steps
        if self.smooths:
            own_steps = {rank: (self._forecast(state, rank),) for rank in own_steps}
        return Conditions(
            own_steps,
            self._comm_s(state) or 0.0,
            self.batch_size,
            self._noise(state),
            self.staleness_cost,
            self.lr_rule,
            self.arch,
            self.fixed_ratio,
            state.mode.batch_sizes,
            state.history,
            self.history_weight,
            self.staleness_limit,
        )

    def _forecast(self, state: ControllerState, rank: Rank) -> OwnStep:
        """A rank's next step. Not the mean of those kept: one long pause would count for as long as they are."""
        forecast, last = self.forecaster.forecast(state.forecasts, rank), state.own_steps[rank][-1]
        return replace(last, seconds=forecast.mean_s) if forecast else last

    def _typical(self, state: ControllerState) -> dict[Rank, tuple[OwnStep, ...]]:
        """What every rank's step takes where no accident has a say: the median of the recent rows."""
        rows = self._full_rows(state)
        return {
            rank: (OwnStep(median(row[rank].own_s for row in rows), rows[-1][rank].samples or self.batch_size),)
            for rank in state.own_steps
        }

    def _noise(self, state: ControllerState) -> float:
        # Before the noise scale is known, assume it equals the batch: half way between the two extremes.
        return state.noise if state.noise is not None else float(self.reference_samples)

    def _full_rows(self, state: ControllerState, since: int = 0) -> list[Mapping[Rank, StepTiming]]:
        """The recent rows after step `since` in which every member has reported, oldest first."""
        members = self._members(state.policy)
        return [row for step, row in sorted(state.recent.items()) if step > since and len(row) == len(members)]

    def _members(self, policy: SyncPolicy[Any]) -> frozenset[Rank]:
        """Ranks that step together as far as anybody does: they complete a row."""
        ring: tuple[Rank, ...] | None = getattr(policy, "ring", None)
        return frozenset(range(len(self.hosts)) if ring is None else ring)

    # ---- what is seen --------------------------------------------------------------------------------------------

    def _on_timing(self, state: ControllerState, timing: StepTiming) -> tuple[ControllerState, tuple[Decision, ...]]:
        rank, members = timing.rank, self._members(state.policy)
        detector = self.detector.observe(state.detector, timing)
        forecasts, own_steps, history = state.forecasts, state.own_steps, state.history
        if timing.expected_s == 0.0 and timing.own_s > 0.0:
            forecasts = self.forecaster.observe(forecasts, timing)
            known = self.forecaster.forecast(forecasts, rank)
            keep = min(_MAX_ROWS, known.num_samples) if known else 1
            latest = OwnStep(timing.own_s, timing.samples or self.batch_size)
            own_steps = {**own_steps, rank: (*own_steps.get(rank, ()), latest)[-keep:]}
            if self.history_weight:
                history = {**history, rank: (*history.get(rank, ()), latest)[-_MAX_HISTORY:]}
        recent, step, row_is_complete = state.recent, state.step, True
        if rank in members:  # an attached rank's step is news of its own and completes no row
            row = {**recent.get(timing.step, {}), rank: timing}
            recent = {**recent, timing.step: row}
            if len(recent) > _MAX_ROWS:
                del recent[min(recent)]
            row_is_complete = len(row) == len(members)
            step = max(step, timing.step)
        state = replace(
            state,
            detector=detector,
            forecasts=forecasts,
            own_steps=own_steps,
            history=history,
            recent=recent,
            step=step,
            num_timings=state.num_timings + 1,
        )
        state, verdicts = self._name_slow(state)
        if not row_is_complete:
            return state, verdicts
        state, decisions = self._act(state)
        return state, (*verdicts, *decisions)

    def _on_update(self, state: ControllerState, update: Update) -> tuple[ControllerState, tuple[Decision, ...]]:
        made = (update.at_s, sum(update.contributions.values()))
        state = replace(state, step=max(state.step, update.version), updates=(*state.updates[-200:], made))
        # Where ranks do not step together no row is ever complete: then updates are the occasion.
        return (state, ()) if isinstance(state.policy, BSP) else self._act(state)

    def _on_adopted(self, state: ControllerState, plan: Plan) -> ControllerState:
        return replace(
            state,
            mode=Mode(plan.policy, plan.batch_sizes),
            detector=self.detector.set_members(
                state.detector, self._members(plan.policy) if _steps_together(plan.policy) else frozenset()
            ),
            since_step=plan.effective_step,
            step=max(state.step, plan.effective_step - 1),
            pending=None,
            adopted=plan,
            before=self._pace(state, since=state.since_step),
            recent={},
            updates=(),
            judged=(0, ()),
        )

    # ---- what follows --------------------------------------------------------------------------------------------

    def _name_slow(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        slow = state.detector.slow
        if slow == state.named:
            return state, ()
        fresh = [verdict(rank, self.hosts[rank], state.detector.windows[rank]) for rank in sorted(slow - state.named)]
        return replace(state, named=slow), tuple(fresh)

    def _act(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        state, gains = self._measure_gain(state)
        state, plans = self._decide(state)
        return state, (*gains, *plans)

    def _decide(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        if state.pending is not None:
            return state, ()
        if state.since_step and state.step < state.since_step + self.dwell_steps:
            return state, ()
        is_calm = state.mode == Mode(BSP()) and not state.detector.slow and not self._is_wasteful(state)
        if is_calm and (math.isinf(self.waste_ratio) or len(self._full_rows(state)) < _TYPICAL_ROWS):
            return state, ()  # nobody is slow beyond doubt: training is left as it is
        given = self.conditions(state)
        if given is None:
            return state, ()
        if is_calm:  # judged by what is typical
            given = replace(given, own_steps=self._typical(state), history_weight=0.0)
        if not self._is_news(state, given):
            return state, ()
        state = replace(state, comm_s=given.comm_s, judged=(state.num_timings, _gist(given)))
        choice = self.selector.choose(state.mode, given)
        if choice.mode == state.mode:
            return state, ()
        margin = 1 + math.ceil(self.fence_s / max(choice.staying.interval_s, 1e-3))
        plan = Plan(
            epoch=state.num_plans + 1,
            effective_step=state.step + margin,
            policy=choice.mode.policy,
            lr_scale=self._lr_scale(state, choice.estimate.batch_samples),
            predicted_gain=choice.gain,
            reason=choice.reason,
            batch_sizes=choice.mode.batch_sizes,
        )
        return replace(state, pending=plan, num_plans=plan.epoch), (plan,)

    def _is_news(self, state: ControllerState, given: Conditions) -> bool:
        at, before = state.judged
        fresh = state.num_timings - at
        if not before or fresh >= self.rejudge_steps * len(self.hosts):
            return True
        if fresh < len(self._members(state.policy)):
            return False  # where every gradient is an update conditions are not judged more often than elsewhere
        return any(abs(new - old) > _NEWS_RATIO * old for new, old in zip(_gist(given), before, strict=True))

    def _is_wasteful(self, state: ControllerState) -> bool:
        """Whether the slowest rank of each step, whoever it is, costs enough, and has cost enough to be sure."""
        if math.isinf(self.waste_ratio):
            return False
        rows = [[timing.own_s for timing in row.values()] for row in self._full_rows(state)[-_MAX_ROWS // 2 :]]
        wastes = [(max(own) - median(own)) / max(own) for own in rows]
        return sum(wastes) > max(self.sure_rows, self.waste_ratio * len(wastes))

    def _comm_s(self, state: ControllerState) -> float | None:
        """The exchange among all ranks: what even the rank that all others wait for waits, seconds."""
        # Of a row that is not complete yet, the rank still missing may be the one that all others wait for.
        rows = self._full_rows(state)[-10:] if self.arch == "ring" or isinstance(state.policy, BSP) else []
        return median(min(t.wait_s for t in row.values()) for row in rows) if rows else state.comm_s

    def _lr_scale(self, state: ControllerState, batch_samples: float) -> float:
        return lr_scale(self.lr_rule, batch_samples, self.reference_samples, self._noise(state))

    def _progress(self, state: ControllerState, batch_samples: float) -> float:
        return progress(self.lr_rule, batch_samples, self.reference_samples, self._noise(state))

    def _pace(self, state: ControllerState, since: int) -> Pace | None:
        """How updates have gone from step `since` on."""
        times = [at_s for at_s, _ in state.updates]
        # A pause that was announced is no part of an update's time: only rows can leave it out.
        paused = any(timing.expected_s for row in state.recent.values() for timing in row.values())
        if len(times) > 1 and times[-1] > times[0] and not paused:
            return Pace((times[-1] - times[0]) / (len(times) - 1), fmean(samples for _, samples in state.updates))
        rows = self._full_rows(state, since)
        if not rows:
            return None
        interval = median(max(t.wall_s - t.expected_s for t in row.values()) for row in rows[-self.dwell_steps :])
        if isinstance(state.policy, BSP):
            batch = float(self.reference_samples)
        elif state.updates:
            batch = fmean(samples for _, samples in state.updates)
        else:
            given = self.conditions(state)
            batch = estimate(state.policy, given).batch_samples if given else float(self.batch_size)
        return Pace(interval, batch)

    def _measure_gain(self, state: ControllerState) -> tuple[ControllerState, tuple[Decision, ...]]:
        plan = state.adopted
        if plan is None or state.step < plan.effective_step + self.dwell_steps:
            return state, ()
        after = self._pace(state, since=plan.effective_step)
        before, state = state.before, replace(state, adopted=None)
        if before is None or after is None:
            return state, ()
        faster = before.interval_s / after.interval_s
        made = self._progress(state, after.batch_samples) / self._progress(state, before.batch_samples)
        return state, (
            Gain(
                plan.epoch,
                plan.predicted_gain,
                faster * made,
                before.interval_s,
                after.interval_s,
                before.batch_samples,
                after.batch_samples,
            ),
        )


def _steps_together(policy: SyncPolicy[Any]) -> bool:
    """Whether some ranks make every update together."""
    return isinstance(policy, BSP) or hasattr(policy, "ring")


def _gist(given: Conditions) -> tuple[float, ...]:
    """The numbers that a choice turns on, in order: what has to change for another one."""
    times = given.own_times_s
    return (*(times[rank] for rank in sorted(times)), given.comm_s, min(given.noise_scale, 1e9))
