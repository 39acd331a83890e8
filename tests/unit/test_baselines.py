"""The published methods on small scripted inputs: each does what its source says, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.baselines import BASELINES, Fixed, asgd, backup_workers, lgc_star, ssgd, ssp, zeno_plus_plus
from paceline.decide.baselines_batches import LbBsp, LbBspGpu
from paceline.decide.baselines_course import MARGIN_VERSIONS, Course
from paceline.decide.baselines_limit import DropComputeTuned, compute_limit
from paceline.decide.baselines_quorum import KSyncCancel, Lgc, late_join_costs, quorum_rates
from paceline.decide.baselines_star import LbBspStar, SyncSwitchStar
from paceline.decide.baselines_switch import PostLocalSgd, SyncSwitch, search_switch_point
from paceline.decide.estimate import updates_needed
from paceline.decide.plan import Adopted, Decider, Observation, Plan, Rejected
from paceline.policy.barrier import BSP, KSync
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, SSP, Zeno
from paceline.types import NoiseScale, StepTiming, Update

N, B = 4, 32


@dataclass
class Talk:
    """A conversation with a decider: what is told, what it plans; plans are adopted on demand."""

    decider: Decider[Any]
    version: int = 0
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.decider.init()

    def tell(self, seen: Observation) -> list[Plan]:
        """What follows from one observation."""
        self.state, decisions = self.decider.step(self.state, seen)
        plans = [decision for decision in decisions if isinstance(decision, Plan)]
        assert len(plans) == len(decisions)
        self.plans += plans
        return plans

    def update(self, *ranks: int) -> list[Plan]:
        """One update with these ranks' gradients; of everybody's without any."""
        self.version += 1
        contributions = dict.fromkeys(ranks or range(N), B)
        return self.tell(Update(self.version, contributions, dropped={}, staleness={}, lr_scale=1.0))

    def timing(self, rank: int, own: float, started: float = 0.0, samples: int = B, wait: float = 0.0) -> list[Plan]:
        """One step of one rank."""
        return self.tell(StepTiming(rank, self.version, started, backward_s=own, samples=samples, wait_s=wait))

    def barrier(self, *own: float, times: int = 1, samples: tuple[int, ...] = (B,) * N) -> list[Plan]:
        """So many updates in which every rank takes part, each followed by its timings."""
        plans = []
        for _ in range(times):
            plans += self.update()
            for rank, seconds in enumerate(own):
                plans += self.timing(rank, seconds, samples=samples[rank])
        return plans

    def adopt(self) -> Plan:
        """Every rank switches to the last plan; versions go on from there."""
        plan = self.plans[-1]
        self.version = max(self.version, plan.effective_step - 1)
        assert self.tell(Adopted(plan)) == []
        return plan


EVEN = (0.1, 0.1, 0.1, 0.1)
ONE_SLOW = (0.1, 0.1, 0.6, 0.1)


# --- what all keep track of ------------------------------------------------------------------------------------------


def test_course_counts_versions_and_gradients_and_lets_nothing_go_back():
    course = Course.begin(BSP(), 2, 8)
    for version, ranks, known in [(1, (0, 1), 1), (4, (0,), 4), (4, (0, 1), 4), (2, (1,), 4)]:
        course = course.take_in(Update(version, dict.fromkeys(ranks, 8), {}, {}, 1.0), keep=3)
        assert course.version == known
    assert course.num_gradients == 3


def test_course_keeps_the_newest_steps_and_takes_no_nonsense():
    course = Course.begin(BSP(), 2, 8)
    for rank, own in [(0, 1.0), (0, 2.0), (0, 3.0), (1, 0.0), (1, math.inf), (1, math.nan), (2, 1.0), (-1, 1.0)]:
        course = course.take_in(StepTiming(rank, 1, 0.0, backward_s=own), keep=2)
    assert {rank: [t.own_s for t in steps] for rank, steps in course.recent.items()} == {0: [2.0, 3.0]}
    assert course.rows(1) == []
    assert course.mean_own_s(1) is None
    course = course.take_in(StepTiming(1, 1, 0.0, backward_s=5.0), keep=2)
    assert [[t.own_s for t in row] for row in course.rows(1)] == [[3.0, 5.0]]
    assert course.rows(2) == []
    assert course.mean_own_s(1) == (3.0, 5.0)


def test_course_adopts_only_the_pending_plan():
    course, (plan,) = Course.begin(BSP(), 2, 8).propose(ASP(), "because", batch_sizes=(9, 7))
    assert (plan.epoch, plan.effective_step) == (1, MARGIN_VERSIONS)
    assert course.take_in(Adopted(replace(plan, epoch=7)), 1) == course
    assert course.take_in(Rejected(replace(plan, epoch=7)), 1) == course
    assert course.take_in(Rejected(plan), 1) == replace(course, pending=None)
    adopted = course.take_in(Adopted(replace(plan, effective_step=9)), 1)
    assert (adopted.policy, adopted.batch_sizes, adopted.pending) == (ASP(), (9, 7), None)
    assert (adopted.version, adopted.since_version, adopted.recent) == (8, 8, {})
    assert adopted.take_in(Adopted(plan), 1) == adopted
    again, (second,) = adopted.propose(BSP(), "because")
    assert (second.epoch, second.effective_step) == (2, 8 + MARGIN_VERSIONS)
    assert again.take_in(Adopted(second), 1).batch_sizes == (8, 8)  # None: as they were at the start


def test_a_rejected_plan_is_made_again_with_a_new_number():
    talk = Talk(LbBsp(N, B))
    talk.barrier(*ONE_SLOW)
    assert talk.barrier(*ONE_SLOW) == []  # one is pending
    talk.tell(Rejected(talk.plans[-1]))
    talk.barrier(*ONE_SLOW)
    assert [plan.epoch for plan in talk.plans] == [1, 2]
    assert talk.plans[1].effective_step == talk.version + MARGIN_VERSIONS


# --- one mode all the way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decider", "policy", "rule"),
    [
        (ssgd(8, B), BSP(), "linear"),
        (asgd(8, B), ASP(), "linear"),
        (asgd(8, B, max_staleness=4), ASP(4), "linear"),
        (ssp(8, B), SSP(3), "linear"),
        (ssp(8, B, bound=10, lr_rule="sqrt"), SSP(10), "sqrt"),
        (zeno_plus_plus(8, B), Zeno(0.001, 0.0, 10), "linear"),
        (zeno_plus_plus(8, B, rho=0.1, epsilon=1.0, max_staleness=None), Zeno(0.1, 1.0, None), "linear"),
        (backup_workers(8, B), KSync(7, "drop"), "linear"),
        (backup_workers(50, B), KSync(48, "drop"), "linear"),
        (backup_workers(100, B), KSync(96, "drop"), "linear"),
        (backup_workers(1, B), KSync(1, "drop"), "linear"),
        (backup_workers(8, B, num_backup=0), KSync(8, "drop"), "linear"),
        (lgc_star(8, B), KSync(6, "join_next"), "linear"),
        (lgc_star(2, B), KSync(1, "join_next"), "linear"),
    ],
)
def test_fixed_methods(decider, policy, rule):
    assert decider == Fixed(policy, rule)
    talk = Talk(decider)
    talk.barrier(*ONE_SLOW, times=30)
    assert talk.plans == []


# --- Sync-Switch -----------------------------------------------------------------------------------------------------


def test_sync_switch_is_bsp_for_its_share_then_asp_for_good():
    talk = Talk(SyncSwitch(N, B, bsp_fraction=0.25, budget_gradients=80))
    assert talk.decider.initial == BSP()
    talk.barrier(*EVEN, times=4)
    assert talk.plans == []
    (plan,) = talk.update()  # 20 gradients, a quarter of 80
    assert (plan.policy, plan.lr_scale, plan.effective_step) == (ASP(), 1 / N, 5 + MARGIN_VERSIONS)
    assert plan.reason == "25.0% of the training went in step: asynchronous for the rest"
    talk.adopt()
    talk.barrier(*EVEN, times=10)
    talk.barrier(*ONE_SLOW, times=10)
    assert len(talk.plans) == 1


def test_sync_switch_without_a_share_of_bsp_is_asp():
    assert SyncSwitch(N, B, bsp_fraction=0.0).initial == ASP()


def test_greedy_goes_asynchronous_while_a_straggler_is_there():
    talk = Talk(SyncSwitch(N, B, num_steps=3))
    talk.barrier(*ONE_SLOW, times=2)
    assert talk.plans == []
    (plan,) = talk.barrier(*ONE_SLOW)
    assert (plan.policy, plan.lr_scale) == (ASP(), 1 / N)
    assert plan.reason == "rank 2 slow: asynchronous until that is over"
    talk.adopt()
    talk.barrier(*ONE_SLOW, times=5)
    assert len(talk.plans) == 1
    (back,) = talk.barrier(*EVEN, times=3)
    assert (back.policy, back.lr_scale, back.epoch) == (BSP(), 1.0, 2)


def test_greedy_counts_only_gradients_in_bsp_for_its_share():
    talk = Talk(SyncSwitch(N, B, num_steps=1, bsp_fraction=0.5, budget_gradients=40))
    talk.barrier(*ONE_SLOW)
    talk.adopt()
    talk.barrier(*ONE_SLOW, times=50)  # far beyond the budget
    assert talk.state.bsp_gradients == N
    talk.barrier(*EVEN)
    assert talk.adopt().policy == BSP()
    talk.barrier(*EVEN, times=4)
    assert talk.plans[-1].policy == ASP()
    assert "went in step" in talk.plans[-1].reason


def test_a_straggler_counts_until_it_is_below_the_lower_ratio():
    talk = Talk(SyncSwitch(N, B, num_steps=1, slow_ratio=1.5, clear_ratio=1.2))
    assert talk.barrier(0.1, 0.1, 0.149, 0.1) == []
    talk.barrier(0.1, 0.1, 0.151, 0.1)
    talk.adopt()
    assert talk.barrier(0.1, 0.1, 0.121, 0.1) == []
    assert talk.barrier(0.1, 0.1, 0.119, 0.1)[0].policy == BSP()


def test_of_two_ranks_the_slower_is_the_straggler():
    talk = Talk(SyncSwitch(2, B, num_steps=1))
    talk.barrier(0.1, 0.16)
    assert talk.plans[0].reason.startswith("rank 1 slow")


def test_elastic_evicts_and_brings_back():
    talk = Talk(SyncSwitch(N, B, on_straggler="elastic", num_steps=1))
    (plan,) = talk.barrier(*ONE_SLOW)
    # Nobody waits for rank 2, and whatever it sends is too stale: in step without it.
    assert plan.policy == AttachedRing((0, 1, 3), {2: 0}, max_staleness=0)
    assert (plan.lr_scale, plan.reason) == (3 / 4, "rank 2 slow: evicted, the others stay in step")
    talk.adopt()
    (more,) = talk.barrier(0.5, 0.1, 0.5, 0.1)
    assert more.policy == AttachedRing((1, 3), {0: 1, 2: 1}, max_staleness=0)
    assert more.reason.startswith("ranks 0, 2 slow")
    talk.adopt()
    (back,) = talk.barrier(*EVEN)
    assert back.policy == BSP()


def test_elastic_that_readmits_nobody_keeps_its_ring_but_never_evicts_the_last():
    talk = Talk(SyncSwitch(N, B, "elastic", num_steps=1, readmits=False, bsp_fraction=1.0))
    for own in [ONE_SLOW, (0.6, 0.1, 0.1, 0.1), (0.1, 0.6, 0.1, 0.1)]:
        talk.barrier(*own)
        talk.adopt()
    assert talk.plans[-1].policy == AttachedRing((3,), {0: 3, 1: 3, 2: 3}, max_staleness=0)
    assert talk.barrier(*EVEN) == []
    assert talk.barrier(0.1, 0.1, 0.1, 0.6) == []


@pytest.mark.parametrize("least", [0.0, 0.01, 0.06, 0.2, 0.5, 0.73, 1.0])
@pytest.mark.parametrize("num_halvings", [0, 1, 5, 10])
def test_the_switch_point_is_found_from_above(least, num_halvings):
    tried = []

    def run(share: float) -> float:
        tried.append(share)
        return 0.92 if share >= least else 0.89

    found = search_switch_point(run, num_halvings=num_halvings)
    assert least <= found <= least + 2.0**-num_halvings
    assert len(tried) == (2 if least == 0 else 2 + num_halvings)


def test_accuracy_within_the_tolerance_is_kept_accuracy():
    assert search_switch_point(lambda share: 0.91 + 0.01 * share, tolerance=0.01) == 0.0
    assert search_switch_point(lambda share: 0.91 + 0.02 * share, tolerance=0.01, num_halvings=1) == 0.5


def test_post_local_sgd_switches_once():
    talk = Talk(PostLocalSgd(N, B, local_steps=8, bsp_fraction=0.5, budget_gradients=40))
    talk.barrier(*ONE_SLOW, times=4)
    assert talk.plans == []
    (plan,) = talk.update()
    assert (plan.policy, plan.lr_scale) == (LocalSGD(8, inner=BSP()), 1.0)
    talk.adopt()
    talk.barrier(*ONE_SLOW, times=20)
    assert len(talk.plans) == 1
    assert PostLocalSgd(N, B, bsp_fraction=0.0).initial == LocalSGD(16)


# --- LB-BSP ----------------------------------------------------------------------------------------------------------


def test_lb_bsp_makes_batches_proportional_to_speed():
    talk = Talk(LbBsp(N, B))
    (plan,) = talk.barrier(0.1, 0.1, 0.2, 0.1)
    assert plan.batch_sizes == (37, 37, 18, 36)
    assert plan.policy == BSP()
    assert plan.lr_scale == 1.0
    assert plan.predicted_gain == pytest.approx(0.2 / (0.1 * 37 / 32))
    assert plan.reason == "batches of 18 to 37 in proportion to speed: predicted 1.73x per step"


def test_lb_bsp_is_at_rest_once_all_finish_together():
    talk = Talk(LbBsp(N, B))
    talk.barrier(0.1, 0.1, 0.2, 0.1)
    sizes = talk.adopt().batch_sizes
    own = [0.1 * size / B * (2 if rank == 2 else 1) for rank, size in enumerate(sizes)]
    assert talk.barrier(*own, times=20, samples=sizes) == []


def test_lb_bsp_follows_a_rank_that_recovers():
    talk = Talk(LbBsp(N, B))
    talk.barrier(0.1, 0.1, 0.2, 0.1)
    sizes = talk.adopt().batch_sizes
    for _ in range(30):
        if talk.barrier(*(0.1 * size / B for size in sizes), samples=sizes):
            sizes = talk.adopt().batch_sizes
    assert sum(sizes) == N * B
    assert max(sizes) <= 1.05 * B  # what is left to gain is below the least gain


def test_lb_bsp_trusts_the_plan_where_a_timing_does_not_know_its_samples():
    known, unknown = Talk(LbBsp(N, B)), Talk(LbBsp(N, B))
    assert known.barrier(*ONE_SLOW) == unknown.barrier(*ONE_SLOW, samples=(0,) * N)


def test_lb_bsp_keeps_its_bounds_and_waits_for_a_gain_worth_it():
    assert Talk(LbBsp(N, B, least=10, most=40)).barrier(0.1, 0.1, 5.0, 0.1)[0].batch_sizes == (40, 39, 10, 39)
    assert Talk(LbBsp(N, B, min_gain=1.05)).barrier(0.1, 0.1, 0.104, 0.1) == []
    assert Talk(LbBsp(N, B, min_gain=1.0)).barrier(0.1, 0.1, 0.104, 0.1)[0].batch_sizes == (33, 32, 31, 32)


def test_lb_bsp_on_gpus_moves_samples_once_a_window():
    talk = Talk(LbBspGpu(N, B, window_steps=3))
    assert talk.barrier(0.2, 0.1, 0.3, 0.2, times=2) == []
    (plan,) = talk.barrier(0.2, 0.1, 0.3, 0.2)
    assert plan.batch_sizes == (32, 36, 28, 32)  # an eighth of 32
    assert plan.reason == "4 samples from rank 2 (300 ms per step) to rank 1 (100 ms)"
    talk.adopt()
    assert talk.barrier(0.2, 0.1, 0.3, 0.2, times=2) == []  # a new window for the new batches
    assert talk.barrier(0.2, 0.1, 0.3, 0.2)[0].batch_sizes == (32, 40, 24, 32)


def test_lb_bsp_on_gpus_halves_the_step_and_doubles_the_window_when_it_oscillates():
    talk = Talk(LbBspGpu(2, B, window_steps=2, delta=8))
    talk.barrier(0.1, 0.2, times=2, samples=(B, B))
    assert talk.adopt().batch_sizes == (40, 24)
    assert talk.barrier(0.2, 0.1, times=2) == []  # it would move straight back
    assert (talk.state.delta, talk.state.window_steps) == (4, 4)
    assert talk.barrier(0.2, 0.1) == []
    (plan,) = talk.barrier(0.2, 0.1)
    assert plan.batch_sizes == (36, 28)


def test_lb_bsp_on_gpus_ends_at_one_sample_and_the_longest_window():
    talk = Talk(LbBspGpu(2, B, window_steps=1, delta=2, most_window_steps=3))
    own = (0.1, 0.2)
    for _ in range(12):
        own = own[::-1]
        while not talk.barrier(*own):
            pass
        talk.adopt()
    assert (talk.state.delta, talk.state.window_steps) == (1, 3)


def test_lb_bsp_on_gpus_respects_room_and_rest():
    assert Talk(LbBspGpu(2, B, window_steps=1, most=33)).barrier(0.1, 0.2)[0].batch_sizes == (33, 31)
    assert Talk(LbBspGpu(2, B, window_steps=1, most=32)).barrier(0.1, 0.2) == []
    talk = Talk(LbBspGpu(3, B, window_steps=1, most=33, min_ratio=1.0))
    assert talk.barrier(0.1, 0.2, 0.4)[0].batch_sizes == (33, 32, 31)
    talk.adopt()
    assert talk.barrier(0.1, 0.2, 0.4)[0].batch_sizes == (33, 33, 30)  # the fastest has no room left
    assert Talk(LbBspGpu(2, B, window_steps=1, least=30)).barrier(0.1, 0.2)[0].batch_sizes == (34, 30)
    assert Talk(LbBspGpu(2, B, window_steps=1, least=32)).barrier(0.1, 0.2) == []
    assert Talk(LbBspGpu(2, B, window_steps=1)).barrier(0.1, 0.104) == []
    assert "1 sample from" in Talk(LbBspGpu(2, B, window_steps=1, delta=1)).barrier(0.1, 0.2)[0].reason


# --- quorums and limits ----------------------------------------------------------------------------------------------


def test_k_sync_throughput_peaks_at_three_quarters_for_shifted_exponential_times():
    # E[T_K] = 0.5 + (H_16 - H_{16-K}) / 2: as published, with the relative rates of 16, 15, 14, 12 and 8.
    num_ranks = 16
    mean_s = [0.5 + sum(1 / i for i in range(num_ranks - k + 1, num_ranks + 1)) / 2 for k in range(1, num_ranks + 1)]
    rates = quorum_rates([mean_s])
    relative = [rates[k - 1] / rates[-1] for k in (16, 15, 14, 12, 8)]
    assert relative == pytest.approx([1.0, 1.22, 1.33, 1.43, 1.32], abs=0.01)
    assert max(range(16), key=lambda i: rates[i]) + 1 in (11, 12, 13)


@given(
    rows=st.lists(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), min_size=1, max_size=5),
    comm=st.floats(0, 1),
)
def test_quorum_rates_by_brute_force(rows, comm):
    wanted = [k / (sum(sorted(row)[k - 1] for row in rows) / len(rows) + comm) for k in (1, 2, 3)]
    assert quorum_rates(rows, comm) == pytest.approx(wanted)


def test_late_join_costs_by_hand():
    # Everybody: no staleness. The three fast ones: the slow one is in every third update, two versions late.
    all_of_them, three = late_join_costs([[0.1, 0.1, 0.1, 0.3]], 0.0, 8, 32.0, 0.1)[::-1][:2]
    assert all_of_them == pytest.approx(0.3 * updates_needed(32, 32.0))
    share, stale = 3 + 1 / 3, 2 / 3
    assert three == pytest.approx(0.1 * updates_needed(8 * share, 32.0) * (1 + 0.1 * stale / share))


@given(rows=st.lists(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_waiting_for_all_costs_their_time_and_no_staleness(rows):
    mean_s = sum(max(row) for row in rows) / len(rows)
    if all(max(row) <= mean_s * (1 + 1e-10) for row in rows):  # else the slowest step is late for the mean one
        assert late_join_costs(rows, 0.0, 8, 10.0, 0.5)[-1] == pytest.approx(mean_s * updates_needed(24, 10.0))


def test_lgc_waits_for_the_fast_and_goes_back():
    talk = Talk(Lgc(N, B))
    talk.barrier(*ONE_SLOW, times=5)
    (plan,) = talk.update()
    assert plan.policy == KSync(3, late="join_next")
    assert plan.lr_scale == 3 / 4
    assert plan.predicted_gain > 4
    talk.adopt()
    assert talk.barrier(*ONE_SLOW, times=8) == []
    (back,) = talk.barrier(*EVEN, times=21)
    assert (back.policy, back.lr_scale) == (BSP(), 1.0)
    assert back.reason.startswith("not waiting for all is worth only 1.")
    talk.adopt()
    assert talk.barrier(*EVEN, times=20) == []


def test_lgc_goes_straight_to_another_k():
    talk = Talk(Lgc(N, B))
    talk.barrier(*ONE_SLOW, times=6)
    talk.adopt()
    talk.barrier(0.1, 0.7, 0.6, 0.1, times=6)
    assert talk.plans[-1].policy == KSync(2, late="join_next")


def test_lgc_judges_by_the_noise_scale_it_is_told():
    # At a large one only samples count, so one that is slower by a fifth is waited for; at zero only updates do.
    mild = (0.1, 0.1, 0.12, 0.1)
    for noise, changes in [(0.0, True), (math.inf, False), (math.nan, False)]:
        talk = Talk(Lgc(N, B, min_gain=1.15))
        talk.tell(NoiseScale(1, noise, 0.0, 1.0, 5))
        talk.barrier(*mild, times=6)
        assert bool(talk.plans) == changes, noise


def test_a_given_k_is_kept():
    for decider, policy in [
        (Lgc(N, B, k=3), KSync(3, late="join_next")),
        (Lgc(N, B, k=4), BSP()),
        (KSyncCancel(N, B, k=3), KSync(3, late="cancel")),
        (KSyncCancel(N, B, k=4), BSP()),
    ]:
        talk = Talk(decider)
        assert decider.initial == policy
        talk.barrier(*ONE_SLOW, times=30)
        assert talk.plans == []


def test_k_sync_leaves_out_looks_again_and_goes_back():
    talk = Talk(KSyncCancel(N, B, probe_every=10))
    talk.barrier(*ONE_SLOW, times=5)
    (plan,) = talk.update()
    assert (plan.policy, plan.lr_scale) == (KSync(3, late="cancel"), 3 / 4)
    assert plan.predicted_gain == pytest.approx(3 / 4 * 6)
    talk.adopt()
    for _ in range(9):
        assert talk.update(0, 1, 3) == []
    (probe,) = talk.update(0, 1, 3)
    assert (probe.policy, probe.lr_scale) == (KSync(3, late="drop"), 3 / 4)
    talk.adopt()
    talk.barrier(*ONE_SLOW, times=5)
    assert talk.update()[0].policy == KSync(3, late="cancel")  # still slow
    talk.adopt()
    while not talk.update(0, 1, 3):
        pass
    talk.adopt()
    talk.barrier(*EVEN, times=5)
    (back,) = talk.update()
    assert (back.policy, back.lr_scale) == (BSP(), 1.0)


def test_k_sync_of_even_ranks_is_bsp():
    talk = Talk(KSyncCancel(N, B))
    assert talk.barrier(*EVEN, times=30) == []


def test_k_sync_that_searches_once_never_looks_again():
    talk = Talk(KSyncCancel(N, B, probe_every=None))
    talk.barrier(*ONE_SLOW, times=6)
    talk.adopt()
    for _ in range(1000):
        assert talk.update(0, 1, 3) == []


def test_the_reduction_counts_in_the_choice_of_k():
    # 3 of 4 in 0.1 s instead of 4 in 0.13 s: not worth it, unless the reduction is free.
    assert max(quorum_rates([[0.1, 0.1, 0.1, 0.14]])) == pytest.approx(30)
    rates = quorum_rates([[0.1, 0.1, 0.1, 0.14]], comm=0.1)
    assert rates[3] == max(rates)


@given(
    rows=st.lists(st.tuples(st.floats(0.05, 5.0), st.floats(0.05, 5.0)), min_size=1, max_size=3),
    comm=st.floats(0, 0.5),
    num_micro=st.integers(1, 12),
)
def test_the_best_limit_by_brute_force(rows, comm, num_micro):
    def gain_and_kept(limit_s: float) -> tuple[float, float]:
        gain = kept_in_all = 0.0
        for row in rows:
            computed = [sum(1 for m in range(num_micro) if m * own / num_micro <= limit_s) for own in row]
            with_limit = max(n * own / num_micro for n, own in zip(computed, row, strict=True)) + comm
            kept = sum(computed) / num_micro / len(row)
            gain += kept * (max(row) + comm) / with_limit / len(rows)
            kept_in_all += kept / len(rows)
        return gain, kept_in_all

    def is_on_a_border(limit_s: float) -> bool:  # rounding decides there whether one micro-batch more is computed
        pieces = [limit_s / own * num_micro for row in rows for own in row]
        return any(abs(piece - round(piece)) < 1e-9 * piece for piece in pieces)

    best = compute_limit(rows, comm, num_micro, num_values=50)
    low = min(min(row) for row in rows) / num_micro * max(1, num_micro // 2)
    high = max(max(row) for row in rows)
    assert low <= best.limit_s <= high
    tried = [low + (high - low) * i / 49 for i in range(50)]
    clear = [gain_and_kept(limit_s)[0] for limit_s in tried if not is_on_a_border(limit_s)]
    assert best.gain >= max(clear, default=0.0) * (1 - 1e-9)
    if not is_on_a_border(best.limit_s):
        assert (best.gain, best.kept_ratio) == pytest.approx(gain_and_kept(best.limit_s))


def test_drop_compute_waits_for_its_steps_then_limits_and_gives_up():
    talk = Talk(DropComputeTuned(N, B, num_steps=10))
    assert talk.barrier(*ONE_SLOW, times=9) == []
    (plan,) = talk.barrier(*ONE_SLOW)
    assert isinstance(plan.policy, DropCompute)
    # The slow one computes one of four micro-batches (0.15 s), the fast ones all of theirs.
    assert 0.075 < plan.policy.limit_s < 0.15
    assert plan.predicted_gain == pytest.approx(13 / 16 * 4)
    assert plan.lr_scale == pytest.approx(13 / 16)
    talk.adopt()
    cut = (0.1, 0.1, 0.15, 0.1)
    talk.barrier(*cut, times=10, samples=(B, B, B // 4, B))  # as slow as before: it computes a quarter
    assert talk.plans[-1].policy == plan.policy
    talk.adopt()
    (back,) = talk.barrier(*EVEN, times=10)
    assert (back.policy, back.lr_scale) == (BSP(), 1.0)


def test_drop_compute_looks_at_every_step_once():
    talk = Talk(DropComputeTuned(N, B, num_steps=5))
    talk.barrier(*EVEN, times=5)
    assert talk.barrier(*ONE_SLOW, times=4) == []
    assert len(talk.barrier(*ONE_SLOW)) == 1


def test_drop_compute_as_published_chooses_once():
    talk = Talk(DropComputeTuned(N, B, num_steps=5, retunes=False))
    talk.barrier(*EVEN, times=7)
    talk.barrier(*ONE_SLOW, times=5)
    talk.adopt()
    assert talk.barrier(*EVEN, times=50) == []


def test_drop_compute_leaves_even_ranks_and_single_batches_alone():
    talk = Talk(DropComputeTuned(N, B, num_steps=5))
    assert talk.barrier(*EVEN, times=20) == []
    talk = Talk(DropComputeTuned(N, B, num_steps=5, num_micro=1))
    assert talk.barrier(*ONE_SLOW, times=20) == []


# --- as STAR's scripts have them -------------------------------------------------------------------------------------


def polls(talk: Talk, own: tuple[float, ...], *times_s: float) -> Iterator[list[Plan]]:
    """Every rank reports its own time, rank 0 last and at these times."""
    for time_s in times_s:
        plans = [plan for rank in (1, 2, 3) for plan in talk.timing(rank, own[rank], started=time_s)]
        yield [*plans, *talk.timing(0, own[0], started=time_s)]


def test_sync_switch_star_polls_and_stays_asynchronous():
    talk = Talk(SyncSwitchStar(N, B))
    assert list(polls(talk, ONE_SLOW, 0.0, 100.0, 199.9)) == [[], [], []]
    assert list(polls(talk, EVEN, 201.0)) == [[]]
    assert list(polls(talk, ONE_SLOW, 400.9)) == [[]]  # 200 s after the poll, not before
    ((plan,),) = polls(talk, ONE_SLOW, 401.0)
    assert (plan.policy, plan.lr_scale) == (ASP(), 1 / N)
    assert plan.reason == "rank 2 needs 6.0x the time of the fastest: asynchronous from now on"
    talk.adopt()
    assert list(polls(talk, EVEN, 700.0, 1000.0, 1300.0)) == [[], [], []]


def test_sync_switch_star_takes_exactly_half_more_for_fast_enough():
    talk = Talk(SyncSwitchStar(N, B, poll_s=25.0))
    assert list(polls(talk, (0.25, 0.25, 0.375, 0.25), 25.0)) == [[]]
    assert list(polls(talk, (0.25, 0.25, 0.376, 0.25), 50.0)) != [[]]


def test_sync_switch_star_goes_back_where_it_may():
    talk = Talk(SyncSwitchStar(N, B, poll_s=25.0, returns=True))
    assert list(polls(talk, ONE_SLOW, 25.0)) == [talk.plans]
    assert list(polls(talk, ONE_SLOW, 50.0)) == [[]]  # pending
    talk.adopt()
    assert list(polls(talk, ONE_SLOW, 75.0)) == [[]]
    ((back,),) = polls(talk, EVEN, 100.0)
    assert (back.policy, back.lr_scale) == (BSP(), 1.0)


def test_lb_bsp_star_moves_five_and_conserves_nothing():
    talk = Talk(LbBspStar(N, B))
    (plan,) = talk.barrier(0.1, 0.09, 0.3, 0.1)
    assert plan.batch_sizes == (32, 37, 27, 32)
    assert plan.lr_scale == 1.0
    for _ in range(4):
        talk.adopt()
        talk.barrier(0.1, 0.09, 0.3, 0.1)
    assert talk.plans[-1].batch_sizes == (32, 57, 10, 32)  # floor 10, no ceiling
    assert sum(talk.plans[-1].batch_sizes) > N * B


def test_lb_bsp_star_never_makes_a_small_batch_larger_nor_acts_below_its_ratio():
    talk = Talk(LbBspStar(N, 6))
    assert talk.barrier(0.1, 0.09, 0.3, 0.1)[0].batch_sizes == (6, 11, 6, 6)
    assert Talk(LbBspStar(N, B)).barrier(0.25, 0.25, 0.375, 0.25) == []
    assert Talk(LbBspStar(N, B, lr_rule="linear", floor=32)).barrier(0.1, 0.1, 0.2, 0.1)[0].lr_scale == 133 / 128


def test_lb_bsp_star_looks_at_the_newest_rows_only():
    talk = Talk(LbBspStar(8, B, num_rows=4))
    assert talk.barrier(0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, samples=(B,) * 8)[0].batch_sizes[0] == 27
    talk = Talk(LbBspStar(8, B, num_rows=4))
    for rank in (0, 1, 2):
        assert talk.timing(rank, 0.1) == []
    assert talk.timing(7, 0.3)[0].batch_sizes == (37, B, B, B, B, B, B, 27)
    talk = Talk(LbBspStar(N, B))
    talk.barrier(*ONE_SLOW, times=2)
    talk.barrier(*EVEN)
    talk.tell(Rejected(talk.plans[-1]))
    assert talk.barrier(*EVEN) == []  # what was slow while the plan was pending is forgotten


# --- all of them -----------------------------------------------------------------------------------------------------


def test_adaptive_methods_begin_in_step():
    fixed = {"ssgd", "asgd", "ssp", "zeno++", "backup", "lgc-star"}
    assert {name for name in BASELINES if BASELINES[name](N, B).initial != BSP()} == fixed - {"ssgd"}


@pytest.mark.parametrize("name", BASELINES)
def test_a_world_of_one_rank_has_nothing_to_plan(name):
    talk = Talk(BASELINES[name](1, B))
    for _ in range(60):
        talk.update(0)
        assert talk.timing(0, 0.1) == []


# --- what cannot be built --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("asgd", {"max_staleness": -1}),
        ("ssp", {"bound": -1}),
        ("zeno++", {"rho": -1.0}),
        ("backup", {"num_backup": 4}),
        ("backup", {"num_backup": -1}),
        ("lgc-star", {"num_late": -1}),
        ("sync-switch-greedy", {"bsp_fraction": 1.1}),
        ("sync-switch-greedy", {"bsp_fraction": math.nan}),
        ("sync-switch-greedy", {"budget_gradients": 0}),
        ("sync-switch-greedy", {"on_straggler": "wait"}),
        ("sync-switch-elastic", {"slow_ratio": 1.0, "clear_ratio": 1.0}),
        ("sync-switch-elastic", {"clear_ratio": 1.6}),
        ("sync-switch-elastic", {"clear_ratio": 0.9}),
        ("sync-switch-elastic", {"num_steps": 0}),
        ("post-local", {"bsp_fraction": -0.1}),
        ("post-local", {"local_steps": 0}),
        ("lb-bsp", {"least": 0}),
        ("lb-bsp", {"least": 33}),
        ("lb-bsp", {"most": 31}),
        ("lb-bsp", {"min_gain": 0.9}),
        ("lb-bsp-gpu", {"delta": 0}),
        ("lb-bsp-gpu", {"window_steps": 0}),
        ("lb-bsp-gpu", {"window_steps": 90}),
        ("lb-bsp-gpu", {"min_ratio": 0.5}),
        ("lgc", {"k": 0}),
        ("lgc", {"k": 5}),
        ("lgc", {"num_steps": 4}),
        ("lgc", {"min_gain": math.nan}),
        ("lgc", {"keep_gain": 1.06}),
        ("lgc", {"staleness_cost": -1.0}),
        ("k-sync", {"k": 5}),
        ("k-sync", {"probe_every": 0}),
        ("dropcompute", {"num_micro": 0}),
        ("dropcompute", {"num_steps": 0}),
        ("dropcompute", {"min_gain": 0.0}),
        ("sync-switch-star", {"poll_s": 0.0}),
        ("sync-switch-star", {"slow_ratio": 1.0}),
        ("lb-bsp-star", {"num_rows": 0}),
        ("lb-bsp-star", {"slow_ratio": 1.0}),
        ("lb-bsp-star", {"moved": 0}),
        ("lb-bsp-star", {"floor": 0}),
    ],
)
def test_a_bad_parameter_cannot_be_built(name, wrong):
    BASELINES[name](N, B)
    with pytest.raises(ValueError, match="got"):
        BASELINES[name](N, B, **wrong)
    with pytest.raises(ValueError, match="at least one rank"):
        BASELINES[name](0, B)
