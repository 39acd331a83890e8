"""What every Decider promises: ours and the published ones, on trainings that could be and on any observations at all.

A new decider is one line in `DECIDERS`.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decide.baselines import BASELINES, Fixed
from paceline.decide.controller import Controller
from paceline.decide.plan import Adopted, Decider, Decision, Gain, Observation, Plan, Rejected, plan_from_json
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.group import GroupSync
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP
from paceline.types import NoiseScale, StepTiming, Update, Verdict

N, BATCH = 4, 32
BASE_S = 0.05

DECIDERS: dict[str, Callable[[], Decider[Any]]] = {
    "controller": lambda: Controller(hosts=("a", "a", "b", "b"), batch_size=BATCH),
    **{name: (lambda build=build: build(N, BATCH)) for name, build in BASELINES.items()},
    # The same with parameters under which the runs below reach every branch.
    "sync-switch-greedy-short": lambda: BASELINES["sync-switch-greedy"](
        N, BATCH, budget_gradients=400, bsp_fraction=0.5
    ),
    "sync-switch-elastic-all": lambda: BASELINES["sync-switch-elastic"](N, BATCH, bsp_fraction=1.0, readmits=False),
    "sync-switch-asp": lambda: BASELINES["sync-switch-greedy"](N, BATCH, bsp_fraction=0.0),
    "sync-switch-star-quick": lambda: BASELINES["sync-switch-star"](N, BATCH, poll_s=2.0, returns=True),
    "lb-bsp-gpu-quick": lambda: BASELINES["lb-bsp-gpu"](N, BATCH, window_steps=2, delta=6, most=60),
    "lb-bsp-bounded": lambda: BASELINES["lb-bsp"](N, BATCH, least=8, most=48),
    "k-sync-probing": lambda: BASELINES["k-sync"](N, BATCH, probe_every=10),
    "dropcompute-quick": lambda: BASELINES["dropcompute"](N, BATCH, num_steps=5),
    "post-local-short": lambda: BASELINES["post-local"](N, BATCH, budget_gradients=80),
}
DRIVEN_BY_STRAGGLERS = sorted(set(DECIDERS) - {"sync-switch-greedy-short", "post-local-short"})

every_decider = pytest.mark.parametrize("name", DECIDERS)


@dataclass
class Training:
    """Carries out a decider's plans in a world of rough virtual time, keeps what it said, and notes broken promises.

    Every rank steps at its own pace; updates are made of whoever has arrived when the policy in force would fire.
    """

    decider: Decider[Any]
    own: Callable[[int, int], float]  # (rank, update) -> seconds
    rejects: Callable[[Plan], bool] = lambda _: False
    checks_purity: bool = False
    version: int = 0
    now_s: float = 0.0
    pending: Plan | None = None
    plans: list[Plan] = field(default_factory=list)
    adopted: list[Plan] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.decider.init()
        self.policy = self.decider.initial
        self.batches = [BATCH] * N
        self.done_s = {rank: self._own_s(rank) for rank in range(N)}
        self.begun_s = dict.fromkeys(range(N), 0.0)

    def tell(self, seen: Observation) -> None:
        """Feed one observation, and hold what follows from it against the promises."""
        answer = self._asked_twice(seen) if self.checks_purity else self.decider.step(self.state, seen)
        self.state, decisions = answer
        for decision in decisions:
            if isinstance(decision, Plan):
                self._judge(decision)
                self.plans.append(decision)
                self.pending = decision

    def _asked_twice(self, seen: Observation) -> tuple[Any, tuple[Decision, ...]]:
        state_before, decider_before = pickle.loads(pickle.dumps((self.state, self.decider)))
        answer = self.decider.step(self.state, seen)
        if self.state != state_before or self.decider != decider_before:
            self.broken.append(f"purity: {seen} changed its input")
        if self.decider.step(state_before, seen) != answer:
            self.broken.append(f"purity: {seen} gave two answers")
        if pickle.loads(pickle.dumps(answer)) != answer:
            self.broken.append(f"purity: the answer to {seen} does not survive pickling")
        return answer

    def run(self, num_updates: int) -> Training:
        """Train so many updates."""
        for _ in range(num_updates):
            self._switch()
            self._update()
        return self

    def _own_s(self, rank: int) -> float:
        return self.own(rank, self.version) * self.batches[rank] / BATCH

    def _switch(self) -> None:
        plan = self.pending
        if plan is None or plan.effective_step > self.version + 1:
            return
        self.pending = None
        if self.rejects(plan):
            self.tell(Rejected(plan))
            return
        self.policy = plan.policy
        self.batches = list(plan.batch_sizes or (BATCH,) * N)
        self.adopted.append(plan)
        self.tell(Adopted(plan))

    def _update(self) -> None:
        by_time = sorted(self.done_s, key=lambda rank: (self.done_s[rank], rank))
        match self.policy:
            case AttachedRing(ring):
                fires_s = max(self.done_s[rank] for rank in ring)
            case KSync(k):
                fires_s = self.done_s[by_time[k - 1]]
            case BSP():
                fires_s = self.done_s[by_time[-1]]
            case _:
                fires_s = self.done_s[by_time[0]]
        self.now_s = max(self.now_s, fires_s)
        arrived = [rank for rank in by_time if self.done_s[rank] <= self.now_s]
        self.version += 1
        contributions = {rank: self.batches[rank] for rank in arrived}
        self.tell(Update(self.version, contributions, dropped={}, staleness={}, lr_scale=1.0))
        for rank in arrived:
            own_s = self.done_s[rank] - self.begun_s[rank]
            timing = StepTiming(
                rank,
                self.version,
                self.begun_s[rank],
                data_s=0.1 * own_s,
                backward_s=0.9 * own_s,
                wait_s=self.now_s - self.done_s[rank] + 0.002,
                samples=self.batches[rank],
            )
            self.begun_s[rank] = self.now_s + 0.002
            self.done_s[rank] = self.begun_s[rank] + self._own_s(rank)
            self.tell(timing)

    def _judge(self, plan: Plan) -> None:
        if plan.epoch < 1 or any(plan.epoch <= other.epoch for other in self.adopted):
            self.broken.append(f"epoch: {plan.epoch} after {[other.epoch for other in self.adopted]}")
        if plan.effective_step <= self.version:
            self.broken.append(f"future: step {plan.effective_step} at version {self.version}")
        if self.pending is not None:
            self.broken.append(f"one at a time: plan {plan.epoch} while {self.pending.epoch} is pending")
        self.broken += [f"plan {plan.epoch}: {broken}" for broken in broken_by(plan)]


def broken_by(plan: Plan) -> Iterable[str]:
    """What a plan by itself must be like."""
    if plan.batch_sizes is not None and (len(plan.batch_sizes) != N or min(plan.batch_sizes) < 1):
        yield f"batches: {plan.batch_sizes}"
    if not is_one_sentence(plan.reason):
        yield f"reason: {plan.reason!r}"
    if not (0 < plan.lr_scale < math.inf and 0 < plan.predicted_gain < math.inf):
        yield f"numbers: lr_scale {plan.lr_scale}, predicted gain {plan.predicted_gain}"
    if not covers_all(plan.policy):
        yield f"ranks: {plan.policy} does not speak of all of {N}"
    if plan_from_json(json.loads(json.dumps(plan.to_json()))) != plan:
        yield f"json: {plan} does not come back"


def is_one_sentence(text: str) -> bool:
    """Whether it is one line of one sentence; a decimal point ends none."""
    return bool(text.strip()) and "\n" not in text and not re.search(r"[.!?]\s", text + " ")


def covers_all(policy: SyncPolicy[Any]) -> bool:
    """Whether a policy that names ranks names all of them, and one that counts ranks does not count more."""
    match policy:
        case AttachedRing():
            return policy.ranks == set(range(N))
        case GroupSync(groups):
            return {rank for group in groups for rank in group} == set(range(N))
        case KSync(k):
            return k <= N
    return not hasattr(policy, "inner") or covers_all(policy.inner)


def slow_from(start: int, until: int, factor: float, rank: int = 2) -> Callable[[int, int], float]:
    """One rank is slower for a while, on top of a little noise."""

    def own(who: int, update: int) -> float:
        noise = random.Random(who * 100_003 + update).uniform(0.98, 1.02)
        return BASE_S * noise * (factor if who == rank and start <= update < until else 1.0)

    return own


ALWAYS_SLOW = slow_from(0, 10**9, 6.0)
SLOW_FOR_A_WHILE = slow_from(20, 80, 6.0)
CALM = slow_from(0, 0, 1.0)


@every_decider
@pytest.mark.parametrize("own", [ALWAYS_SLOW, SLOW_FOR_A_WHILE, CALM], ids=["always", "for-a-while", "calm"])
def test_keeps_its_promises_in_a_training(name, own):
    training = Training(DECIDERS[name](), own).run(300)
    assert training.broken == []


@every_decider
def test_keeps_its_promises_when_plans_are_rejected(name):
    training = Training(DECIDERS[name](), ALWAYS_SLOW, rejects=lambda plan: plan.effective_step % 3 > 0).run(150)
    assert training.broken == []


@every_decider
def test_is_pure_and_its_state_pickles(name):
    training = Training(DECIDERS[name](), slow_from(8, 30, 6.0), checks_purity=True).run(60)
    assert training.broken == []


@pytest.mark.parametrize("name", DRIVEN_BY_STRAGGLERS)
@settings(max_examples=5, deadline=None)
@given(noise=st.floats(0.0, 0.02), seed=st.integers(0, 1000))
def test_plans_nothing_where_all_ranks_are_alike(name, noise, seed):
    def own(rank: int, update: int) -> float:
        return BASE_S * random.Random(seed + rank * 100_003 + update).uniform(1 - noise, 1 + noise)

    training = Training(DECIDERS[name](), own).run(130)
    assert training.plans == []


RATIOS = st.sampled_from([0.0, 1e-12, 1e-3, 0.05, 0.051, 0.25, 1.0, 40.0, 1e6, 1e300, math.inf, math.nan])
TIMINGS = st.builds(
    StepTiming,
    rank=st.integers(-1, N),
    step=st.integers(0, 12),
    started_s=st.sampled_from([0.0, 1.0, 24.9, 26.0, 230.0, 1e9]),
    backward_s=RATIOS,
    wait_s=st.sampled_from([0.0, 0.01, 5.0]),
    samples=st.sampled_from([0, 1, 8, BATCH, 1000]),
)
UPDATES = st.builds(
    Update,
    version=st.integers(0, 30),
    contributions=st.dictionaries(st.integers(0, N), st.integers(0, 99), max_size=N),
    dropped=st.just({}),
    staleness=st.just({}),
    lr_scale=st.just(1.0),
)
NOISES = st.builds(
    NoiseScale,
    step=st.integers(0, 9),
    value=st.sampled_from([0.0, 1.0, 500.0, math.inf, math.nan]),
    low=st.just(0.0),
    high=st.just(math.inf),
    num_samples=st.integers(1, 9),
)
NEWS = st.sampled_from(["adopted", "rejected", "adopted late"])  # of the plan that is pending, if any


@every_decider
@settings(max_examples=40, deadline=None)
@given(seen=st.lists(TIMINGS | UPDATES | NOISES | NEWS, max_size=60))
def test_takes_any_observation_in_any_order(name, seen):
    decider = DECIDERS[name]()
    state, pending, epochs = decider.init(), None, [0]
    for value in seen:
        if isinstance(value, str):
            if pending is None:
                continue
            plan = replace(pending, effective_step=pending.effective_step + 3) if value == "adopted late" else pending
            value = Rejected(plan) if value == "rejected" else Adopted(plan)
            epochs += [] if value == Rejected(plan) else [plan.epoch]
            pending = None
        if name == "controller" and not is_credible(value):
            continue  # it is fed by our own measuring, which makes no such thing
        state, decisions = decider.step(state, value)
        for decision in decisions:
            assert isinstance(decision, Verdict | Plan | Gain)
            if isinstance(decision, Plan):
                assert pending is None
                assert decision.epoch > epochs[-1]
                assert list(broken_by(decision)) == []
                pending = decision


def is_credible(value: Observation) -> bool:
    """Whether live measuring could say this of a training with these ranks."""
    match value:
        case StepTiming():
            return 0 <= value.rank < N and value.own_s < 1e7
        case NoiseScale():
            return not math.isnan(value.value)
    return True


@every_decider
@given(num_ranks=st.integers(1, 9), batch_size=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_baselines_can_be_built_for_any_world_that_has_a_rank(name, num_ranks, batch_size):
    if name in BASELINES:
        decider = BASELINES[name](num_ranks, batch_size)
        assert decider.initial.init(frozenset(range(num_ranks))) is not None
        state = decider.init()
        for version in (1, 2):
            state, _ = decider.step(state, Update(version, dict.fromkeys(range(num_ranks), 1), {}, {}, 1.0))


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_world_without_ranks_or_samples_cannot_be_built(name):
    for size in ((0, 8), (4, 0)):
        with pytest.raises(ValueError, match="got"):
            BASELINES[name](*size)


# --- every promise above is seen to be broken by somebody ------------------------------------------------------------


@dataclass
class Broken:
    """A decider with one planted bug: from the fifth observation on it says what it must not."""

    bug: str
    initial: SyncPolicy[Any] = field(default_factory=BSP)
    lr_rule: str = "linear"
    memory: int = 0

    def init(self) -> dict[str, int]:
        return {"seen": 0, "plans": 0}

    def step(self, state: dict[str, Any], seen: Observation) -> tuple[dict[str, Any], tuple[Decision, ...]]:
        state = state if self.bug == "changes its input" else dict(state)
        state["seen"] += 1
        if self.bug == "keeps a secret":
            self.memory += 1
        if self.bug == "does not pickle":
            state["how"] = lambda: None
        if self.bug == "raises" and isinstance(seen, NoiseScale):
            raise RuntimeError("planted")
        if isinstance(seen, Adopted | Rejected):
            return {**state, "pending": False}, ()
        if state["seen"] % 5 or (state.get("pending") and self.bug != "does not wait"):
            return state, ()
        state |= {"plans": state["plans"] + 1, "pending": True}
        plan = Plan(state["plans"], 10**6, ASP(), 1.0, 1.0, "planted")
        changes: dict[str, dict[str, Any]] = {
            "same epoch": {"epoch": 1, "effective_step": seen.version + 2 if isinstance(seen, Update) else 2},
            "epoch zero": {"epoch": 0},
            "past": {"effective_step": 0},
            "forgets a rank": {"policy": AttachedRing((0, 1), {2: 0})},
            "counts too many": {"policy": KSync(N + 1)},
            "batch of zero": {"batch_sizes": (BATCH, BATCH, BATCH, 0)},
            "too few batches": {"batch_sizes": (BATCH, BATCH)},
            "no reason": {"reason": " "},
            "two sentences": {"reason": "This. And that."},
            "no learning rate": {"lr_scale": 0.0},
            "no json": {"batch_sizes": [BATCH] * N},
        }
        return state, (replace(plan, **changes.get(self.bug, {})),)


@pytest.mark.parametrize(
    ("bug", "promise"),
    [
        ("changes its input", "purity"),
        ("keeps a secret", "purity"),
        ("same epoch", "epoch"),
        ("epoch zero", "epoch"),
        ("past", "future"),
        ("does not wait", "one at a time"),
        ("forgets a rank", "ranks"),
        ("counts too many", "ranks"),
        ("batch of zero", "batches"),
        ("too few batches", "batches"),
        ("no reason", "reason"),
        ("two sentences", "reason"),
        ("no learning rate", "numbers"),
        ("no json", "json"),
    ],
)
def test_a_broken_promise_is_seen(bug, promise):
    training = Training(Broken(bug), CALM, checks_purity=True).run(20)
    assert {broken.partition(": plan")[0] for broken in training.broken} != set()
    assert any(promise in broken for broken in training.broken), training.broken


def test_a_state_that_does_not_pickle_is_seen():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Training(Broken("does not pickle"), CALM, checks_purity=True).run(2)


def test_a_decider_that_raises_or_plans_in_calm_is_seen():
    with pytest.raises(RuntimeError, match="planted"):
        Training(Broken("raises"), CALM).tell(NoiseScale(1, 1.0, 0.0, 2.0, 1))
    assert Training(Broken("none"), CALM).run(20).plans != []


def test_a_sound_decider_breaks_nothing():
    training = Training(Broken("none"), CALM, checks_purity=True).run(20)
    assert training.plans
    assert training.broken == []


def test_every_kind_of_decider_is_seen_to_act():
    acts = {name for name in DECIDERS if Training(DECIDERS[name](), ALWAYS_SLOW).run(300).adopted}
    never = {name for name in DECIDERS if isinstance(DECIDERS[name](), Fixed)}
    assert acts == set(DECIDERS) - never - {"sync-switch-star", "post-local", "sync-switch-asp"}  # these take longer
