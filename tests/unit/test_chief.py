"""The chief of parameter servers: what it commands, and that its ledger adds up, without a single process."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.act.chief import Chief
from paceline.decide.ledger import Ledger
from paceline.decide.plan import Adopted, Observation, Plan, Rejected
from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.group import GroupSync
from paceline.policy.stale import ASP, SSP, KAsync
from paceline.types import Update

SAMPLES, BATCH = 60, 4
POLICIES = (
    BSP(), KSync(2), KSync(2, "cancel"), KSync(2, "join_next"), KSync(2, "carry"), Deadline(0.5),
    Deadline(0.5, "cancel"), SSP(1), ASP(), ASP(1), KAsync(2), GroupSync(((0, 1), (2,))),
)  # fmt: skip


class Play:
    """Three workers and two servers on paper: carries commands out, and moves whoever computes."""

    def __init__(self, policy: Any, seed: int = 0) -> None:
        self.seen: list[Observation] = []
        self.chief = Chief(3, 2, policy, Ledger(SAMPLES, BATCH), "linear", self.seen.append)
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.computing: set[int] = set()
        self.held: set[int] = set()
        self.commands: list[Any] = []
        self.num_links = 0
        for rank in range(3):
            self.join(rank)

    def join(self, rank: int) -> int:
        self.num_links += 1
        for _server in range(2):
            self.chief.connected(self.num_links, rank, self.now_s)
        self.carry_out()
        return self.num_links

    def carry_out(self) -> None:
        for command in self.chief.take_commands():
            self.commands.append(command)
            match command:
                case ["apply", shares, *_]:
                    applied = [link for link, _ in shares]
                    assert set(applied) <= self.held, "only what all servers hold"
                    self.held -= set(applied)
                    assert sum(weight for _, weight in shares) == pytest.approx(1.0) if shares else True
                case ["release", link]:
                    assert link not in self.computing, "only who waits"
                    self.held.discard(link)
                    self.computing.add(link)

    def move(self) -> None:
        """Somebody who computes arrives, at one server after the other."""
        self.now_s += 0.1
        self.chief.wake(self.now_s)
        self.carry_out()
        if self.computing:
            self.arrive(self.random.choice(sorted(self.computing)))

    def arrive(self, link: int, is_finite: bool = True) -> None:
        self.chief.pushed(link, is_finite, self.now_s)
        self.carry_out()
        self.computing.discard(link)
        self.held.add(link)
        self.chief.pushed(link, True, self.now_s)
        self.carry_out()

    def lose(self, link: int) -> None:
        self.computing.discard(link)
        self.held.discard(link)
        self.chief.lost(link, self.now_s)
        self.carry_out()

    def check_ledger(self) -> None:
        ledger = self.chief.ledger
        leased = sum(len(lease) for lease in ledger.leases.values() if lease.epoch == ledger.epoch)
        assert ledger.trained + ledger.dropped + leased + ledger.num_free == SAMPLES
        assert ledger.leases.keys() <= self.chief.present.keys(), "who left holds nothing"
        updates = [seen for seen in self.seen if isinstance(seen, Update)]
        trained = ledger.total_trained + ledger.trained
        assert sum(sum(update.contributions.values()) for update in updates) == trained
        assert [update.version for update in updates] == list(range(1, self.chief.version + 1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_goes_on_and_every_sample_is_somewhere(policy: Any) -> None:
    play = Play(policy)
    for _ in range(300):
        play.move()
        play.check_ledger()
    assert play.chief.version > 50, "it makes updates"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_leaves_and_comes_back_the_others_go_on(policy: Any, seed: int) -> None:
    play = Play(policy, seed)
    for _ in range(40):
        for _ in range(play.random.randrange(1, 8)):
            play.move()
        lost = play.random.choice(list(play.chief.present.values()))
        play.lose(lost.link)
        for _ in range(play.random.randrange(1, 8)):
            play.move()
        play.check_ledger()
        play.join(lost.rank)
        play.check_ledger()
    before = play.chief.version
    for _ in range(60):
        play.move()
    assert play.chief.version > before + 5


@pytest.mark.parametrize("seed", range(5))
def test_modes_change_at_any_moment_and_nothing_is_lost(seed: int) -> None:
    play = Play(BSP(), seed)
    for epoch in range(1, 80):
        for _ in range(play.random.randrange(1, 9)):
            play.move()
        policy = play.random.choice(POLICIES)
        play.chief.plan(Plan(epoch, play.chief.version + 1, policy, 1.0, 1.0, "a test"), play.now_s)
        play.carry_out()
        play.check_ledger()
        assert play.chief.policy == policy, "at once: the border is here"
    assert sum(isinstance(seen, Adopted) for seen in play.seen) == 79
    before = play.chief.version
    for _ in range(60):
        play.move()
    assert play.chief.version > before + 5


def test_a_plan_whose_step_is_over_is_rejected() -> None:
    play = Play(BSP())
    for _ in range(9):
        play.move()
    plan = Plan(1, play.chief.version, ASP(), 1.0, 1.0, "late")
    play.chief.plan(plan, play.now_s)
    assert play.seen[-1] == Rejected(plan)
    assert play.chief.policy == BSP()


def test_a_gradient_counts_only_when_every_server_holds_it() -> None:
    play = Play(ASP())
    play.chief.pushed(1, True, 0.1)
    assert play.chief.take_commands() == []
    play.chief.pushed(1, True, 0.2)
    assert play.chief.take_commands()[0][0] == "apply"


def test_what_is_not_finite_on_one_server_is_dropped_on_all() -> None:
    play = Play(BSP())
    for link in (1, 2, 3):
        play.chief.pushed(link, True, 0.1)
        play.chief.pushed(link, link != 2, 0.1)
    apply, *_ = play.chief.take_commands()
    assert [link for link, _ in apply[1]] == [1, 3]
    update = play.seen[-1]
    assert isinstance(update, Update)
    assert update.dropped == {1: BATCH}


def test_a_short_batch_weighs_less_and_leaves_the_rate_alone() -> None:
    chief = Chief(2, 1, BSP(), Ledger(7, 4), "linear", lambda _: None)
    for rank in range(2):
        chief.connected(rank + 1, rank, 0.0)
    chief.take_commands()
    for link in (1, 2):
        chief.pushed(link, True, 0.1)
    name, shares, scale, total, _ = chief.take_commands()[0]
    assert (name, shares, scale, total) == ("apply", [[1, 4 / 7], [2, 3 / 7]], 1.0, 7)


def test_a_restarted_worker_takes_the_place_of_its_former_self() -> None:
    play = Play(BSP())
    link = play.join(1)
    assert ["gone", 2] in play.commands
    assert play.chief.present[1].link == link


def test_a_tree_lasts_from_one_update_to_the_change_of_mode() -> None:
    play = Play(BSP())
    play.chief.wanted_tree = {2: 0}
    for _ in range(3):
        play.move()
    assert ["tree", 1, [[3, 1]]] in play.commands
    assert play.chief.guests[3].parent == 1
    play.chief.plan(Plan(1, play.chief.version + 1, ASP(), 1.0, 1.0, "a test"), play.now_s)
    assert play.chief.policy == BSP(), "sums are on their way"
    for _ in range(3):
        play.move()
    assert play.chief.policy == ASP()
    assert play.chief.tree == {}
    play.check_ledger()


def test_what_went_through_a_lost_parent_is_dropped() -> None:
    play = Play(BSP())
    play.chief.wanted_tree = {2: 0}
    for _ in range(3):
        play.move()
    play.arrive(3)
    play.lose(1)
    play.arrive(2)
    update = play.seen[-1]
    assert isinstance(update, Update)
    assert (set(update.contributions), update.dropped) == ({1}, {2: BATCH})


def test_of_gradients_that_wait_for_a_change_of_mode_each_counts_once() -> None:
    play = Play(BSP())
    play.arrive(1)
    play.arrive(2)
    play.chief.plan(Plan(1, 1, KSync(1, "cancel"), 1.0, 1.0, "a test"), play.now_s)
    play.carry_out()
    play.check_ledger()
    released = [command[1] for command in play.commands if command[0] == "release"]
    assert sorted(released) == [1, 1, 2, 2, 3], "the third is still at its first gradient, which is doomed"


def test_what_went_into_a_bad_sum_is_as_bad() -> None:
    play = Play(BSP())
    play.chief.wanted_tree = {2: 0}
    for _ in range(3):
        play.move()
    play.arrive(3)
    play.arrive(2)
    play.arrive(1, is_finite=False)
    update = play.seen[-1]
    assert isinstance(update, Update)
    assert (set(update.contributions), set(update.dropped)) == ({1}, {0, 2})


def test_a_change_of_mode_waits_for_sums_on_their_way() -> None:
    play = Play(BSP())
    play.chief.wanted_tree = {2: 0}
    for _ in range(3):
        play.move()
    play.arrive(3)
    play.chief.plan(Plan(1, play.chief.version + 1, ASP(), 1.0, 1.0, "a test"), play.now_s)
    assert play.chief.policy == BSP(), "the child is held, and its parent still computes the sum"


@pytest.mark.parametrize("rank", [0, 2])
def test_leaving_the_loop_while_in_a_tree_leaves_nobody_waiting(rank: int) -> None:
    play = Play(BSP())
    play.chief.wanted_tree = {2: 0}
    for _ in range(3):
        play.move()
    link = play.chief.present[rank].link
    play.computing.discard(link)
    play.chief.done(link, 1, play.now_s)
    play.carry_out()
    assert (["again", 3] if rank == 0 else ["cut", 1, 3]) in play.commands
    before = play.chief.version
    for _ in range(10):
        play.move()
    assert play.chief.version >= before + 4
    play.check_ledger()
