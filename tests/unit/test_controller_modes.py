"""The decision loop where ranks do not step together: around a parameter server, by updates instead of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.decide.candidates import PARAMETER_SERVER
from paceline.decide.controller import Controller
from paceline.decide.plan import Adopted, Gain, Observation, Plan
from paceline.decide.selector import Selector
from paceline.policy.barrier import BSP
from paceline.policy.base import Apply, Arrive, Release, SyncPolicy
from paceline.policy.stale import ASP, KAsync
from paceline.types import StepTiming, Update

COMM_S, BATCH = 0.002, 32


def timing(rank: int, step: int, own: float, wait: float = 0.0) -> StepTiming:
    """A step that is nothing but computing and waiting."""
    return StepTiming(rank, step, 0.0, backward_s=own, wait_s=wait, samples=BATCH)


@dataclass
class Server:
    """Ranks of fixed paces around a parameter server under KAsync or ASP; tells updates, and timings when they end."""

    controller: Controller
    own: dict[int, float]
    policy: SyncPolicy[Any]
    told_at: bool = True
    decisions: list[tuple[str, Any]] = field(default_factory=list)  # after what they came

    def __post_init__(self) -> None:
        self.state = self.controller.init()
        self.now_s, self.version = 0.0, 0

    def tell(self, seen: Observation) -> None:
        self.state, decisions = self.controller.step(self.state, seen)
        self.decisions += [(type(seen).__name__, decision) for decision in decisions]

    def rows(self, num_steps: int) -> Server:
        """Steps of all together, under BSP."""
        slowest = max(self.own.values())
        for _ in range(num_steps):
            self.now_s += slowest + COMM_S
            self.version += 1
            self.tell(Update(self.version, dict.fromkeys(self.own, BATCH), {}, {}, 1.0, at_s=self.now_s))
            for rank, own in self.own.items():
                self.tell(timing(rank, self.version, own, wait=slowest - own + COMM_S))
        return self

    def adopt(self, policy: SyncPolicy[Any]) -> Server:
        self.policy = policy
        self.tell(Adopted(Plan(1, self.version + 1, policy, 1.0, 2.0, "as told")))
        return self

    def play(self, num_updates: int) -> Server:
        """Updates of the policy in force; a rank's next step number is its own count."""
        policy, state = self.policy, self.policy.init(frozenset(self.own))
        done = {rank: self.now_s + own for rank, own in self.own.items()}
        steps = dict.fromkeys(self.own, self.version)
        until = self.version + num_updates
        while self.version < until:
            rank = min(done, key=lambda rank: done[rank])
            self.now_s = done.pop(rank)
            state, actions = policy.step(state, Arrive(rank))
            for action in actions:
                match action:
                    case Apply(ranks):
                        self.version += 1
                        at_s = self.now_s if self.told_at else 0.0
                        self.tell(Update(self.version, dict.fromkeys(ranks, BATCH), {}, {}, 1.0, at_s=at_s))
                    case Release(other):
                        steps[other] += 1
                        done[other] = self.now_s + self.own[other]
                        self.tell(timing(other, steps[other], self.own[other]))
        return self

    def of(self, kind: type) -> list[Any]:
        return [decision for _, decision in self.decisions if isinstance(decision, kind)]


def server(own: dict[int, float], **rest: Any) -> Server:
    controller = Controller(
        hosts=("a",) * len(own),
        batch_size=BATCH,
        selector=Selector(families=PARAMETER_SERVER),
        arch="ps",
        dwell_steps=8,
        fence_s=0.0,
        **rest,
    )
    return Server(controller, own, BSP())


def test_a_slow_rank_behind_a_server_is_no_longer_waited_for():
    (plan,) = server({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}).rows(20).of(Plan)
    assert not isinstance(plan.policy, BSP)
    assert plan.predicted_gain > 2


def test_where_ranks_do_not_step_together_updates_are_the_occasion():
    # Equal ranks, of which two make an update: stale for nothing. No row is ever complete, as rank 3 tells no timings.
    world = server(dict.fromkeys(range(4), 0.05), staleness_cost=0.5).rows(3).adopt(KAsync(2))
    tell = world.tell
    world.tell = lambda seen: None if getattr(seen, "rank", None) == 3 else tell(seen)  # type: ignore[method-assign]
    begun = world.version + 1
    world.play(40)
    ((told, plan),) = [(after, d) for after, d in world.decisions if isinstance(d, Plan)]
    assert told == "Update"
    assert plan.policy == BSP()
    # Steps are updates then: the dwell time is over when so many have been made, and the plan is for the next one.
    assert plan.effective_step == begun + world.controller.dwell_steps + 1


def test_under_bsp_updates_are_no_occasion():
    world = server({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}).rows(30)
    assert {after for after, decision in world.decisions if isinstance(decision, Plan)} == {"StepTiming"}


def test_where_ranks_do_not_step_together_the_gain_is_measured_by_the_clock_of_updates():
    world = server({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}).rows(12).adopt(ASP()).play(80)
    (gain,) = world.of(Gain)
    assert gain.interval_before_s == pytest.approx(0.252)
    assert (gain.batch_before, gain.batch_after) == (4 * BATCH, BATCH)
    # Three gradients every 50 ms and one every 250: 64 a second. The nine updates within the dwell time fall into
    # three bursts, whose ends weigh: within 40 %.
    assert gain.interval_after_s == pytest.approx(1 / 64, rel=0.4)
    assert gain.measured == pytest.approx(0.252 / gain.interval_after_s / 4)


def test_the_pace_of_a_mode_ends_with_it():
    world = server({0: 0.05, 1: 0.05, 2: 0.05, 3: 0.05}).rows(20).adopt(KAsync(4)).play(20)
    gains = world.of(Gain)
    world.adopt(BSP())
    assert world.state.updates == ()
    assert world.state.before.interval_s == pytest.approx(0.05)
    assert world.state.before.batch_samples == 4 * BATCH
    assert gains[0].interval_after_s == pytest.approx(0.05)


def test_the_exchange_among_all_is_remembered_where_nobody_waits_for_all():
    slow = {0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}
    world = server(slow).rows(20)
    assert world.controller.conditions(world.state).comm_s == pytest.approx(COMM_S)
    world.adopt(ASP()).play(100)
    assert world.controller.conditions(world.state).comm_s == pytest.approx(COMM_S)
