"""The rehearsal: every policy is judged by being played, so each published interval must come out of the play."""

import math
import pickle
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.estimate import kasync_interval_s, progress, updates_needed
from paceline.decide.rehearse import Conditions, Estimate, OwnStep, estimate
from paceline.policy import catalog
from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.base import Arrive, Cancel, Drop, Release, SyncPolicy, Tick, Wake, Work
from paceline.policy.group import GroupSync
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing, GroupedRing
from paceline.policy.stale import ASP, SSP, KAsync, Zeno

OWN = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8)
SEVERAL = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8)
COMM = st.floats(0.0, 0.2)
NOISE = st.one_of(st.just(0.0), st.floats(0.1, 1e6), st.just(math.inf))
BATCH = 32


def conditions(*own: float, **rest: Any) -> Conditions:
    """Every rank always needs the same time."""
    return Conditions.constant(dict(enumerate(own)), rest.pop("batch_size", BATCH), **rest)


def varying(*own: tuple[float, ...], **rest: Any) -> Conditions:
    """The window of own times of every rank, oldest first."""
    steps = {rank: tuple(OwnStep(s, BATCH) for s in window) for rank, window in enumerate(own)}
    return Conditions(steps, **{"comm_s": 0.0, "noise_scale": 60.0, "batch_size": BATCH, **rest})


def reduction(comm: float, num_members: int, num_ranks: int) -> float:
    """An all-reduce among m of n ranks moves 2 (m - 1) / m of a gradient, where that of all moves 2 (n - 1) / n."""
    return comm * ((num_members - 1) / num_members) / ((num_ranks - 1) / num_ranks)


# Policies that wait for all


@given(OWN, COMM, NOISE)
def test_bsp_takes_the_slowest_own_time_and_the_exchange(own, comm, noise):
    got = estimate(BSP(), conditions(*own, comm_s=comm, noise_scale=noise))
    wanted = max(own) + (comm if len(own) > 1 else 0.0)  # a rank alone exchanges with nobody
    assert got.interval_s == pytest.approx(wanted)
    assert got.batch_samples == BATCH * len(own)
    assert got.mean_staleness == 0.0
    assert got.time_to_accuracy_s == pytest.approx(wanted * updates_needed(BATCH * len(own), noise))


@given(SEVERAL, st.floats(1.0, 10.0), COMM, NOISE)
def test_bsp_costs_more_the_slower_its_slowest_rank(own, slower, comm, noise):
    slowest = max(own)
    now = estimate(BSP(), conditions(*own, comm_s=comm, noise_scale=noise))
    later = estimate(BSP(), conditions(*own[:-1], slowest * slower, comm_s=comm, noise_scale=noise))
    assert later.time_to_accuracy_s == pytest.approx(
        now.time_to_accuracy_s * (slowest * slower + comm) / (slowest + comm)
    )


def test_own_times_that_vary_are_played_row_by_row():
    # Each row's slowest counts: the mean of maxima, which the maximum of the means (0.1) misses by far.
    window = varying((0.05, 0.05, 0.2), (0.05, 0.2, 0.05), (0.2, 0.05, 0.05))
    assert window.own_times_s == pytest.approx(dict.fromkeys(range(3), 0.1))
    assert estimate(BSP(), window, num_rounds=3).interval_s == pytest.approx(0.2)


@given(st.lists(st.tuples(*[st.floats(0.01, 1.0)] * 4), min_size=1, max_size=8), st.integers(1, 4))
def test_backup_workers_wait_for_the_kth_of_every_row(rows, k):
    # The others give up at once, so that everybody begins every row together; no exchange.
    window = varying(*zip(*rows, strict=True))
    # Gradients that arrive at the same instant as the k-th may still be counted, so count arrivals by k.
    got = estimate(KSync(k, "cancel"), window, num_rounds=k * len(rows))  # 4 k rows arrivals: rows are played 4 times
    assert got.interval_s == pytest.approx(fmean(sorted(row)[k - 1] for row in rows))


@given(SEVERAL, COMM, st.data())
def test_backup_workers_that_cancel(own, comm, data):
    k = data.draw(st.integers(1, len(own)))
    order = sorted(own)
    got = estimate(KSync(k, "cancel"), conditions(*own))
    assert got.interval_s == pytest.approx(order[k - 1])
    assert got.batch_samples == k * BATCH
    assert got.mean_staleness == 0.0
    # With an exchange the k in the update go on when it is done; who gave up fetches the parameters a bit later.
    some = estimate(KSync(k, "cancel"), conditions(*own, comm_s=comm))
    shared = reduction(comm, k, len(own))
    unit = comm / (2 * (len(own) - 1) / len(own))
    assert order[k - 1] + shared <= some.interval_s * (1 + 1e-9)
    assert some.interval_s <= (order[k - 1] + shared + unit) * (1 + 1e-9)


def test_a_gradient_that_was_cancelled_never_arrives():
    # Rank 2's gradient would arrive 1 ms after the update; if it did, it would count towards the next one.
    got = estimate(KSync(2, "cancel"), conditions(0.05, 0.05, 0.051, comm_s=0.06, arch="ps"))
    assert got.batch_samples == 2 * BATCH
    assert got.mean_staleness == 0.0
    # Two pushes of 10 ms in turn, of which the first may overlap with the last pull of the round before.
    assert 0.07 <= got.interval_s <= 0.05 + 0.06


def test_a_late_gradient_that_is_dropped_costs_its_rank_the_round():
    # Rank 2 needs 2.5 rounds: every third round it is back in time and no sooner.
    got = estimate(KSync(2, "drop"), conditions(0.1, 0.1, 0.25), num_rounds=300)
    assert got.interval_s == pytest.approx(0.1)
    assert got.batch_samples == 2 * BATCH
    assert got.mean_staleness == 0.0


def test_a_late_gradient_may_join_the_next_update():
    got = estimate(KSync(2, "join_next"), conditions(0.1, 0.1, 0.15), num_rounds=300)
    assert got.interval_s == pytest.approx(0.1)
    assert got.batch_samples == pytest.approx(2.5 * BATCH, rel=0.01)  # 0.15 s is one update late: every other one
    assert got.mean_staleness == pytest.approx(1 / 5, rel=0.01)


@pytest.mark.parametrize(("after_s", "interval", "batch"), [(0.02, 0.07, 96), (1.0, 0.25, 128)])
def test_a_deadline_counts_from_the_first_gradient(after_s, interval, batch):
    got = estimate(Deadline(after_s, "cancel"), conditions(0.05, 0.06, 0.065, 0.25))
    assert got.interval_s == pytest.approx(interval)
    assert got.batch_samples == batch


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_local_steps_share_one_exchange(steps):
    given = conditions(0.05, 0.1, comm_s=0.02)
    got = estimate(LocalSGD(steps), given)
    assert got.interval_s == pytest.approx(0.1 * steps + 0.02)
    # as many steps of progress as BSP makes in so many updates
    bsp = estimate(BSP(), given)
    assert got.time_to_accuracy_s == pytest.approx(bsp.time_to_accuracy_s * got.interval_s / (steps * bsp.interval_s))


@pytest.mark.parametrize(
    ("limit", "interval", "of_the_slow"),
    [
        (0.06, 0.1, 1),  # a quarter of its 0.4 s: it stops after the first micro-batch
        (0.15, 0.2, 2),
        (0.35, 0.4, 4),
        (9.0, 0.4, 4),
    ],
)
def test_a_limit_on_computing_leaves_out_whole_micro_batches(limit, interval, of_the_slow):
    got = estimate(DropCompute(limit), conditions(0.05, 0.05, 0.4))
    assert got.interval_s == pytest.approx(interval)
    assert got.batch_samples == (2 + of_the_slow / 4) * BATCH


# Rings with attached ranks

# STAR, section c of our specification: ResNet-56 tables at epoch 0, batch 1024.
TIMES_MS = (100, 105, 110, 115, 120, 150, 200, 400)
STAR_NOISE, STAR_BATCH = 1389.5845, 128


def test_golden_all_reduce_is_what_we_estimate_when_attached_ranks_do_not_count():
    given = conditions(*TIMES_MS, batch_size=STAR_BATCH, noise_scale=STAR_NOISE, lr_rule="adascale")
    for x in range(1, 8):
        ring = AttachedRing(tuple(range(x)), dict.fromkeys(range(x, 8), 0), max_staleness=0)
        wanted = TIMES_MS[x - 1] * updates_needed(x * STAR_BATCH, STAR_NOISE)
        assert estimate(ring, given).time_to_accuracy_s == pytest.approx(wanted)
    assert estimate(BSP(), given).time_to_accuracy_s == pytest.approx(942.8, abs=0.06)


RING = AttachedRing((0, 1, 3), {2: 0})


def test_the_interval_is_that_of_the_slowest_ring_member():
    got = estimate(AttachedRing((0, 1), {2: 0, 3: 1}), conditions(0.05, 0.08, 0.25, 0.5, comm_s=0.012))
    assert got.interval_s == pytest.approx(0.08 + reduction(0.012, 2, 4))


@pytest.mark.parametrize("comm", [0.0, 0.012, 0.06])
@pytest.mark.parametrize("slow", [0.02, 0.06, 0.12, 0.23, 0.47])
def test_an_attached_rank_joins_the_first_update_after_its_gradient_arrives(slow, comm):
    got = estimate(RING, conditions(0.05, 0.05, slow, 0.05, comm_s=comm), num_rounds=400)
    unit = comm / 1.5  # a gradient's bytes once: to the parent, and the parameters back
    interval = 0.05 + reduction(comm, 3, 4)
    every = math.ceil((slow + reduction(comm, 3, 4) + 2 * unit) / interval)
    share = 3 + 1 / every
    # Of 1,600 gradients, the attached rank's first, which finds the ring at the same start, and its last are special.
    assert got.interval_s == pytest.approx(interval)
    assert got.batch_samples == pytest.approx(BATCH * share, rel=0.01)
    assert got.mean_staleness == pytest.approx((every - 1) / every / share, rel=0.02, abs=0.001)


@pytest.mark.parametrize("slow", [0.05, 0.12, 0.25, 0.26, 0.4])
def test_an_attached_rank_joins_every_kth_update_on_average(slow):
    """k = t / interval + 1/2 in the mean, between t / interval and the closed form's t / interval + 1.

    From update to update an attached rank needs its own time and then waits for the next one: k is t / interval,
    rounded up. With constant times that jumps at whole ratios, so own times here are spread evenly over one interval
    around t: then the rounding adds half an update in the mean. The window's 21 values leave the phase uneven by
    1/21 of an interval, and the first and last gradients are cut off: together under 0.1 updates.
    """
    window = tuple(slow + 0.05 * ((8 * i) % 21 - 10) / 21 for i in range(21))
    fast = (0.05,) * 21
    got = estimate(RING, varying(fast, fast, window, fast), num_rounds=21 * 20)
    ratio = slow / 0.05
    every = 1 / (got.batch_samples / BATCH - 3)
    assert got.interval_s == pytest.approx(0.05)
    assert every == pytest.approx(ratio + 0.5, abs=0.1)
    assert ratio < every < ratio + 1
    assert got.mean_staleness == pytest.approx((every - 1) / every / (3 + 1 / every), rel=0.02)


def test_a_gradient_beyond_the_bound_does_not_count():
    given = conditions(0.05, 0.05, 0.26, 0.05)  # five updates pass while rank 2 computes, and a bit
    within = estimate(AttachedRing((0, 1, 3), {2: 0}, max_staleness=5), given, num_rounds=400)
    beyond = estimate(AttachedRing((0, 1, 3), {2: 0}, max_staleness=4), given, num_rounds=400)
    assert within.batch_samples == pytest.approx(BATCH * (3 + 1 / 6), rel=0.01)
    assert (beyond.batch_samples, beyond.mean_staleness) == (3 * BATCH, 0.0)


def test_a_cluster_joins_when_all_of_it_has_arrived():
    given = conditions(0.05, 0.05, 0.11, 0.26)
    alone = estimate(AttachedRing((0, 1), {2: 0, 3: 1}), given, num_rounds=400)
    together = estimate(GroupedRing((0, 1), ((2, 3),), {2: 0}), given, num_rounds=400)
    assert alone.batch_samples == pytest.approx(BATCH * (2 + 1 / 3 + 1 / 6), rel=0.01)
    assert together.batch_samples == pytest.approx(BATCH * (2 + 2 / 6), rel=0.01)


@pytest.mark.parametrize("wrapped", [LocalSGD(1, RING), DropCompute(9.0, RING), LocalSGD(1, DropCompute(9.0, RING))])
def test_a_wrapped_ring_is_still_a_ring(wrapped):
    given = conditions(0.05, 0.05, 0.23, 0.05, comm_s=0.02)
    assert estimate(wrapped, given) == estimate(RING, given)


def test_a_ring_of_all_is_bsp():
    given = conditions(0.05, 0.07, 0.25, comm_s=0.02)
    assert estimate(AttachedRing((0, 1, 2)), given) == estimate(BSP(), given)


# Policies that hardly wait


@pytest.mark.parametrize("x", range(1, 9))
def test_golden_static_x_order(x):
    # Played for long it is the published interval, up to how ties are broken: within half a per cent ...
    given = conditions(*TIMES_MS, batch_size=STAR_BATCH)
    wanted = kasync_interval_s(TIMES_MS, x)
    long = estimate(KAsync(x), given, num_rounds=1000)
    assert long.interval_s == pytest.approx(wanted, rel=0.005)
    assert long.batch_samples == x * STAR_BATCH
    # ... and as short as it usually is, within 3 %: the first gradients of the slow ranks take as long to come.
    assert estimate(KAsync(x), given).interval_s == pytest.approx(wanted, rel=0.03)


@given(SEVERAL)
def test_asynchronous_updates_come_at_the_sum_of_the_rates(own):
    got = estimate(ASP(), conditions(*own), num_rounds=400)
    # Each of the n ranks has at most one gradient under way at the end, of 400 n: well under 2 % even where one
    # rank's rate is a hundredth of the others'.
    assert got.interval_s == pytest.approx(1 / sum(1 / t for t in own), rel=0.02)
    assert got.batch_samples == BATCH
    assert estimate(KAsync(1), conditions(*own), num_rounds=400) == got


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_equal_ranks_that_never_wait_are_stale_by_all_the_others(num_ranks):
    cost = 0.3
    got = estimate(ASP(), conditions(*[0.1] * num_ranks, staleness_cost=cost), num_rounds=1000)
    assert got.interval_s == pytest.approx(0.1 / num_ranks)
    assert got.mean_staleness == pytest.approx(num_ranks - 1, rel=0.001)
    # All make as many samples as BSP's; what they lose is what the parameters moved meanwhile, in full updates.
    bsp = estimate(BSP(), conditions(*[0.1] * num_ranks))
    moved = (num_ranks - 1) / num_ranks
    assert got.time_to_accuracy_s == pytest.approx(bsp.time_to_accuracy_s * (1 + cost * moved), rel=0.001)


def test_a_bound_on_staleness_drops_what_is_older():
    given = conditions(0.01, 0.01, 0.1)
    bounded, free = (estimate(ASP(bound), given, num_rounds=200) for bound in (4, None))
    # Rank 2 is stale by some 20 updates and never counts; its gradients take no update's place.
    assert bounded.interval_s == pytest.approx(0.005, rel=0.01)
    assert free.interval_s == pytest.approx(1 / 210, rel=0.01)
    assert bounded.mean_staleness == pytest.approx(1.0, rel=0.01)


def test_a_bound_on_clocks_holds_the_fast_back():
    given = conditions(0.05, 0.05, 0.25)
    # Everybody makes as many gradients as the slowest: three every 0.25 s; unbounded, many more.
    assert estimate(SSP(2), given, num_rounds=400).interval_s == pytest.approx(0.25 / 3, rel=0.02)
    assert estimate(SSP(100_000), given) == estimate(ASP(), given)


def test_who_asks_for_scores_gets_good_ones():
    given = conditions(0.05, 0.05, 0.07)
    assert estimate(Zeno(max_staleness=10), given) == estimate(ASP(max_staleness=10), given)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), NOISE)
def test_groups_update_on_their_own(own, noise):
    groups = GroupSync(((0, 1), (2, 3)))
    got = estimate(groups, conditions(*own, noise_scale=noise, staleness_cost=0.0), num_rounds=400)
    rate = 1 / max(own[:2]) + 1 / max(own[2:])
    assert got.interval_s == pytest.approx(1 / rate, rel=0.02)
    assert got.batch_samples == 2 * BATCH


# The exchange


@pytest.mark.parametrize("policy", [ASP(), SSP(50), Zeno(max_staleness=None)])
@pytest.mark.parametrize("own", [0.001, 0.01, 1.0])
def test_a_parameter_server_passes_one_gradient_after_the_other(policy, own):
    given = conditions(*[own] * 8, comm_s=0.16, arch="ps")
    port = 0.16 / (2 * 8)
    # Eight ranks' turns are own + push + pull each, if the port keeps up; else it is what there is to wait for.
    wanted = max(port, (own + 2 * port) / 8)
    assert estimate(policy, given, num_rounds=200).interval_s == pytest.approx(wanted, rel=0.02)


def test_where_no_ring_can_be_formed_in_time_one_ranks_port_passes_everything():
    comm, num_ranks = 0.35, 8
    got = estimate(ASP(), conditions(*[0.001] * num_ranks, comm_s=comm, arch="ring"), num_rounds=200)
    assert got.interval_s == pytest.approx(comm / (2 * (num_ranks - 1) / num_ranks), rel=0.02)


@given(st.integers(2, 12), st.floats(0.01, 0.5), COMM)
def test_a_synchronous_update_through_a_server_takes_about_the_exchange(num_ranks, own, comm):
    # All push and pull in turn, but the first push overlaps with no pull and the last pull with no push.
    got = estimate(BSP(), conditions(*[own] * num_ranks, comm_s=comm, arch="ps"), num_rounds=64)
    assert own + comm / 2 <= got.interval_s * (1 + 1e-9)
    assert got.interval_s <= (own + comm) * (1 + 1e-9)


def test_less_is_exchanged_among_fewer():
    given = conditions(0.05, 0.05, 0.05, 0.4, comm_s=0.03)
    assert estimate(KSync(3, "drop"), given).interval_s == pytest.approx(0.05 + reduction(0.03, 3, 4))
    # 2 (m - 1) / m: nothing for one rank, which has nobody to exchange with
    assert estimate(KSync(1, "drop"), conditions(0.05, 0.4, comm_s=0.03)).interval_s == pytest.approx(0.05)


# What an update is worth

EACH = {
    BSP: BSP(),
    KSync: KSync(3, "join_next"),
    Deadline: Deadline(0.02, "join_next"),
    SSP: SSP(2),
    ASP: ASP(),
    KAsync: KAsync(2),
    Zeno: Zeno(max_staleness=None),
    GroupSync: GroupSync(((0, 1), (2, 3))),
    AttachedRing: RING,
    GroupedRing: GroupedRing((0, 1), ((2, 3),), {2: 0}),
    LocalSGD: LocalSGD(3),
    DropCompute: DropCompute(0.1, KAsync(2)),
}
each_policy = pytest.mark.parametrize("policy", EACH.values(), ids=[kind.__name__ for kind in EACH])
QUICK_SLOW = (0.05, 0.055, 0.17, 0.06)


def test_each_kind_of_policy_is_here():
    assert set(EACH) == set(catalog.POLICIES)
    assert all(type(policy) is kind for kind, policy in EACH.items())


@each_policy
@pytest.mark.parametrize("arch", ["ring", "ps"])
def test_staleness_never_comes_cheaper(policy, arch):
    free, cheap, dear = (
        estimate(policy, conditions(*QUICK_SLOW, comm_s=0.01, staleness_cost=cost, arch=arch))
        for cost in (0.0, 0.1, 1.0)
    )
    for other in (cheap, dear):  # nothing else depends on what it costs
        assert (other.interval_s, other.batch_samples, other.mean_staleness) == (
            free.interval_s,
            free.batch_samples,
            free.mean_staleness,
        )
    if free.mean_staleness == 0.0:
        assert free.time_to_accuracy_s == cheap.time_to_accuracy_s == dear.time_to_accuracy_s
    else:
        assert free.time_to_accuracy_s < cheap.time_to_accuracy_s < dear.time_to_accuracy_s


@each_policy
@pytest.mark.parametrize("rule", ["linear", "sqrt", "none", "adascale"])
@pytest.mark.parametrize("arch", ["ring", "ps"])
def test_every_policy_is_judged_by_finite_numbers(policy, rule, arch):
    for rounds in (1, 16):
        got = estimate(policy, conditions(*QUICK_SLOW, comm_s=0.01, lr_rule=rule, arch=arch), num_rounds=rounds)
        for value in (got.interval_s, got.batch_samples, got.time_to_accuracy_s):
            assert 0 < value < math.inf
        assert got.mean_staleness >= 0
        bound = policy.staleness_bound
        assert bound is None or got.mean_staleness <= bound


@each_policy
@pytest.mark.parametrize("arch", ["ring", "ps"])
def test_a_rehearsal_is_pure_and_says_the_same_again(policy, arch):
    given = varying(*((own, own * 1.1, own * 0.95) for own in QUICK_SLOW), comm_s=0.01, arch=arch)
    kept = pickle.loads(pickle.dumps(given))
    assert estimate(policy, given) == estimate(policy, given)
    assert given == kept


@dataclass(frozen=True)
class Counted:
    """A policy that counts how often it is asked, and takes no more than so many questions."""

    inner: SyncPolicy[Any]
    limit: int
    asked: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, state: Any, event: Any) -> Any:
        self.asked.append(event)
        assert len(self.asked) <= self.limit, "the rehearsal does not end"
        return self.inner.step(state, event)


@each_policy
@pytest.mark.parametrize("rounds", [1, 16])
def test_a_rehearsal_is_bounded(policy, rounds):
    counted = Counted(policy, limit=2 * 4 * rounds)
    estimate(counted, conditions(*QUICK_SLOW), num_rounds=rounds)
    arrivals = [event for event in counted.asked if isinstance(event, Arrive)]
    assert len(arrivals) == 4 * rounds  # so many gradients per rank, in the mean


@given(own=SEVERAL, share=st.integers(1, 7), noise=st.floats(0.1, 1e6))
@pytest.mark.parametrize("rule", ["linear", "sqrt", "none", "adascale"])
def test_an_update_is_worth_its_progress(rule, own, share, noise):
    k = min(share, len(own))
    got = estimate(KSync(k, "cancel"), conditions(*own, noise_scale=noise, lr_rule=rule))
    whole = BATCH * len(own)
    wanted = got.interval_s * updates_needed(whole, noise) / progress(rule, k * BATCH, whole, noise)
    assert got.time_to_accuracy_s == pytest.approx(wanted)


def test_large_batches_pay_where_noise_is_large():
    few, many = KSync(1, "cancel"), KSync(4, "cancel")
    own = (0.05, 0.07, 0.08, 0.1)
    quiet, loud = (conditions(*own, noise_scale=noise, lr_rule="adascale") for noise in (1.0, 1e5))
    assert estimate(few, quiet).time_to_accuracy_s < estimate(many, quiet).time_to_accuracy_s
    assert estimate(few, loud).time_to_accuracy_s > estimate(many, loud).time_to_accuracy_s


# Batch sizes


@given(fixed=st.floats(0, 1), sizes=st.lists(st.integers(1, 200), min_size=3, max_size=3))
def test_a_gradient_takes_a_fixed_part_and_one_by_its_samples(fixed, sizes):
    own = (0.05, 0.08, 0.25)
    got = estimate(BSP(), conditions(*own, fixed_ratio=fixed), tuple(sizes))
    times = [t * (fixed + (1 - fixed) * size / BATCH) for t, size in zip(own, sizes, strict=True)]
    assert got.interval_s == pytest.approx(max(times))
    assert got.batch_samples == pytest.approx(sum(sizes))


def test_steps_seen_with_other_batches_are_scaled_from_those():
    # Rank 1 computed half a batch: a whole one would take it 0.2 + 0.8 * 2 = 1.8 times as long.
    steps = {0: (OwnStep(0.1, 32),), 1: (OwnStep(0.1, 16),)}
    given = Conditions(steps, comm_s=0.0, batch_size=32, noise_scale=60.0, fixed_ratio=0.2, batch_sizes=(32, 16))
    assert estimate(BSP(), given).interval_s == pytest.approx(0.1)
    assert estimate(BSP(), given, (32, 32)).interval_s == pytest.approx(0.18)


def test_without_other_orders_batch_sizes_stay_as_they_are():
    given = conditions(0.1, 0.1, batch_sizes=(48, 16))
    assert estimate(BSP(), given) == estimate(BSP(), given, (48, 16))
    assert estimate(BSP(), given).batch_samples == 64
    assert estimate(BSP(), given, (8, 8)).batch_samples == 16
    assert estimate(BSP(), conditions(0.1, 0.1)) == estimate(BSP(), conditions(0.1, 0.1), (32, 32))


def test_batch_sizes_are_the_ranks_in_order():
    steps = {5: (OwnStep(0.1, 32),), 2: (OwnStep(0.3, 32),)}
    given = Conditions(steps, comm_s=0.0, batch_size=32, noise_scale=60.0, fixed_ratio=0.0)
    assert estimate(BSP(), given, (8, 32)).interval_s == pytest.approx(0.1)  # 0.3 s / 4 for rank 2
    with pytest.raises(ValueError):
        estimate(BSP(), given, (8, 32, 1))


# Policies that lead nowhere


@dataclass(frozen=True)
class Answers:
    """Answers every event with the same kind of action, or with none."""

    answer: Any

    work: ClassVar[Work] = Work()
    wants_scores: ClassVar[bool] = False
    staleness_bound: ClassVar[int | None] = 0

    def init(self, _ranks: frozenset[int]) -> None:
        return None

    def step(self, state: None, event: Any) -> Any:
        return state, self.answer(event)


def drops(event: Any) -> Any:
    return (Drop(event.rank, 1), Release(event.rank))


def keeps(_event: Any) -> Any:
    return ()


def gives_up(event: Any) -> Any:
    return (*map(Cancel, {0, 1} - {event.rank}), Release(event.rank))


def only_sleeps(event: Any) -> Any:
    return (Wake(0.1, 1),) if isinstance(event, Tick) or event.rank == 0 else ()


@pytest.mark.parametrize("answer", [drops, keeps, gives_up, only_sleeps])
def test_a_policy_that_never_updates_never_gets_there(answer):
    got = estimate(Answers(answer), conditions(0.05, 0.07))
    assert got == Estimate(math.inf, 0.0, 0.0, math.inf)


# What may come back

FINE, HARD = (OwnStep(0.1, BATCH),), (OwnStep(0.1, BATCH), OwnStep(0.4, BATCH))


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_part_of_an_estimate_may_rest_on_older_steps(weight):
    given = Conditions({0: FINE, 1: FINE}, 0.0, BATCH, 60.0, history={0: FINE, 1: HARD}, history_weight=weight)
    now, then = (
        estimate(BSP(), Conditions({0: FINE, 1: steps}, 0.0, BATCH, 60.0)).time_to_accuracy_s for steps in (FINE, HARD)
    )
    got = estimate(BSP(), given)
    assert got.time_to_accuracy_s == pytest.approx((1 - weight) * now + weight * then)
    assert then == pytest.approx(2.5 * now)
    assert got.interval_s == pytest.approx(0.1)  # what is expected next, not what may come back


def test_older_steps_count_for_nothing_without_a_weight():
    assert estimate(BSP(), Conditions({0: FINE}, 0.0, BATCH, 60.0, history={0: HARD})) == estimate(
        BSP(), Conditions({0: FINE}, 0.0, BATCH, 60.0)
    )


def test_where_older_steps_count_there_must_be_some_of_every_rank():
    with pytest.raises(ValueError, match=r"got none of \[0, 2\]"):
        Conditions(dict.fromkeys(range(3), FINE), 0.0, 32, 60.0, history={1: FINE, 2: ()}, history_weight=0.5)


def test_no_time_no_update():
    assert estimate(BSP(), conditions(0.05, 0.07), num_rounds=0).time_to_accuracy_s == math.inf


# Conditions


def test_conditions_need_a_step_of_every_rank():
    step = (OwnStep(0.1, 32),)
    with pytest.raises(ValueError, match=r"got none of \[1, 3\]"):
        Conditions({0: step, 3: (), 1: ()}, 0.0, 32, 60.0)
    with pytest.raises(ValueError, match="got none of any"):
        Conditions({}, 0.0, 32, 60.0)


def test_conditions_tell_mean_own_times_and_who_there_is():
    given = varying((0.1, 0.3), (0.2,))
    assert given.own_times_s == pytest.approx({0: 0.2, 1: 0.2})
    assert given.ranks == {0, 1}


def test_constant_conditions_are_one_step_each():
    given = Conditions.constant({0: 0.1, 4: 0.2}, 16, comm_s=0.01, arch="ps")
    assert given.own_steps == {0: (OwnStep(0.1, 16),), 4: (OwnStep(0.2, 16),)}
    assert (given.batch_size, given.comm_s, given.arch, given.noise_scale) == (16, 0.01, "ps", 60.0)


def test_a_mode_that_is_too_stale_is_not_to_be_taken():
    given = conditions(*[0.1] * 8)
    asp = estimate(ASP(), given)
    distance = asp.mean_staleness / 8  # its versions are an eighth of a full update each
    for limit, wanted in ((distance * 1.01, asp.time_to_accuracy_s), (distance * 0.99, math.inf)):
        assert estimate(ASP(), replace(given, staleness_limit=limit)).time_to_accuracy_s == wanted
    assert estimate(BSP(), replace(given, staleness_limit=0.0)).time_to_accuracy_s < math.inf
