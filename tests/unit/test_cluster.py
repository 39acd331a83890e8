"""What a gradient costs on a cluster, in closed form where there is one, and who travels how."""

import pytest

from paceline.decide.baselines import Fixed
from paceline.policy.barrier import BSP, KSync
from paceline.policy.local import DropCompute
from paceline.policy.ring import AttachedRing, GroupedRing
from paceline.policy.stale import ASP, KAsync
from paceline.sim.cluster import Cluster, Host, Job, Stop, Workload
from paceline.sim.exchange import parents
from paceline.sim.trace import Table
from paceline.sim.world import simulate
from paceline.types import StepTiming

MODEL = 1e8  # bytes
NIC = Host(in_bytes_per_s=1e9, out_bytes_per_s=1e9)


def even(num_ranks, *slow):
    """All alike but for these (rank, factor)."""
    ratios = [1.0] * num_ranks
    for rank, factor in slow:
        ratios[rank] = factor
    return Table("even", ratios=tuple((ratio,) for ratio in ratios))


def step_s(cluster, policy=None, updates=10, trace=None, workload=None):
    """Virtual seconds per update."""
    workload = workload or Workload(step_s=0.1, batch_size=1, model_bytes=MODEL)
    trace = trace or even(cluster.num_ranks)
    per_update = len(policy.ring) if isinstance(policy, AttachedRing) else cluster.num_ranks
    result = simulate(cluster, workload, trace, Fixed(policy or BSP()), Stop(samples=updates * per_update))
    return result.virtual_s / result.num_updates


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_a_ring_step_is_compute_and_the_closed_form(num_ranks):
    cluster = Cluster.uniform("ring", num_ranks, NIC, alpha_s=0.001)
    ring_s = 2 * (num_ranks - 1) * (0.001 + MODEL / num_ranks / 1e9)
    assert step_s(cluster) == pytest.approx(0.1 + ring_s)


def test_the_slowest_nic_and_the_latest_message_set_the_pace_of_a_ring():
    slow = Host(in_bytes_per_s=1e9, out_bytes_per_s=2.5e8, extra_latency_s=0.01)
    cluster = Cluster("ring", (NIC, slow, NIC, NIC), (0, 1, 2, 3), alpha_s=0.001)
    assert step_s(cluster) == pytest.approx(0.1 + 6 * (0.001 + 0.01 + MODEL / 4 / 2.5e8))


def test_a_ring_within_a_host_uses_no_nic():
    cluster = Cluster("ring", (NIC,), (0, 0, 0, 0), alpha_s=0.001)
    assert step_s(cluster) == pytest.approx(0.1 + 6 * 0.001)


def test_ranks_of_one_host_pass_a_ring_on_once():
    cluster = Cluster.uniform("ring", 4, NIC, ranks_per_host=2)
    assert step_s(cluster) == pytest.approx(0.1 + 2 * 3 / 4 * MODEL / 1e9)


def test_a_ring_of_one_costs_nothing():
    assert step_s(Cluster.uniform("ring", 1, NIC, alpha_s=0.001)) == pytest.approx(0.1)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_step_is_compute_transfers_and_the_servers_work(num_servers):
    cluster = Cluster.uniform("ps", 4, NIC, num_servers=num_servers, alpha_s=0.001, round_trips=3)
    part = MODEL / num_servers
    # All push at once into each server's NIC; the first sum begins when all have landed; one copy serves all pulls.
    work_s = (4 * 0.25e-9 + 1e-9 + 0.25e-9) * part
    steps = 0.1 + 2 * (3 * 0.001 + 4 * part / 1e9) + work_s
    first = 0.1 + 0.003 + 4 * part / 1e9 + (4 * 0.25e-9 + 1e-9) * part  # the run ends when the last version exists
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(4), Fixed(BSP()), Stop(samples=40), evaluate_every=40)
    assert result.virtual_s == pytest.approx(9 * steps + first)


def test_a_server_on_a_ranks_own_host_is_reached_without_a_nic():
    cluster = Cluster("ps", (NIC,), (0,), (0,), alpha_s=1.0)
    work_s = (0.25e-9 + 1e-9 + 0.25e-9) * MODEL
    assert step_s(cluster, updates=1000) == pytest.approx(0.1 + work_s, rel=1e-3)


def test_latency_hits_both_ends_and_every_round_trip():
    far = Host(extra_latency_s=0.03)
    cluster = Cluster("ps", (Host(), far, Host()), (0, 1), (2,), alpha_s=0.001, round_trips=5)
    assert cluster.latency_s(1, 2) == pytest.approx(5 * 0.031)
    assert cluster.latency_s(2, 2) == 0.0
    assert step_s(cluster, updates=1000, workload=Workload(0.1, 1)) == pytest.approx(0.1 + 10 * 0.031, rel=1e-3)


def test_the_batch_shortens_only_part_of_a_step():
    workload = Workload(step_s=0.1, batch_size=10, fixed_ratio=0.3)
    assert [round(workload.compute_s(n), 6) for n in (0, 5, 10, 20)] == [0.03, 0.065, 0.1, 0.17]


# ---- what shares a host ----------------------------------------------------------------------------------------------


def test_too_few_cores_stretch_the_step():
    assert step_s(Cluster("ring", (Host(cores=2.0),), (0, 0, 0, 0))) == pytest.approx(0.2)


def test_a_job_takes_cores_while_it_runs():
    job = Job(host=0, cores=3.0, from_s=0.25, until_s=0.65)  # rank 0 at a quarter for 0.4 s: 0.3 s lost
    cluster = Cluster("ring", (Host(cores=1.0), Host()), (0, 1), jobs=(job,))
    result = simulate(cluster, Workload(0.1, 1), even(2), Fixed(BSP()), Stop(samples=20))
    assert result.virtual_s == pytest.approx(1.0 + 0.3)
    assert result.own_s == pytest.approx([1.3, 1.0])


def test_a_job_takes_its_fair_share_of_a_nic_and_no_more_than_it_wants():
    def ring_s(wanted):
        job = Job(host=0, out_bytes_per_s=wanted)
        return step_s(Cluster("ring", (NIC, NIC), (0, 1), jobs=(job,))) - 0.1

    assert ring_s(2.5e8) == pytest.approx(MODEL / 7.5e8)
    assert ring_s(8e8) == pytest.approx(MODEL / 5e8)  # it gets half, not 80 %


def test_what_joins_and_leaves_a_nic_counts_from_then_on():
    job = Job(host=1, in_bytes_per_s=1e9, from_s=0.15, until_s=0.2)
    cluster = Cluster("ring", (NIC, NIC), (0, 1), jobs=(job,))
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(2), Fixed(BSP()), Stop(samples=2))
    assert result.virtual_s == pytest.approx(0.1 + 0.1 + 0.025)  # half speed for 0.05 s


def test_asp_loads_a_server_more_than_bsp_and_that_makes_stragglers():
    def own_step_s(policy, rank):
        hosts = (Host(cores=1.0),) * 8
        cluster = Cluster("ps", hosts, tuple(range(8)), (7,))  # rank 7 lives with the server
        result = simulate(cluster, Workload(0.1, 1, 4e6), even(8), Fixed(policy), Stop(samples=1600), keeps_seen=True)
        steps = [x.value for x in result.seen if isinstance(x.value, StepTiming) and x.value.rank == rank]
        return sum(step.own_s for step in steps) / len(steps)

    assert own_step_s(BSP(), 7) == pytest.approx(0.1)  # the server works while ranks wait
    assert own_step_s(ASP(), 1) == pytest.approx(0.1)
    assert own_step_s(ASP(), 7) > 0.12  # though the trace says that it is like rank 1


# ---- who travels how in a ring ---------------------------------------------------------------------------------------


def test_an_attached_rank_never_holds_the_ring_up_but_its_flows_share_the_nics():
    cluster = Cluster.uniform("ring", 4, NIC)
    ring = AttachedRing((0, 1, 3), {2: 0})
    ring_s = 2 * 2 / 3 * MODEL / 1e9
    alone = step_s(cluster, ring, updates=300, trace=even(4, (2, 1000.0)))
    assert alone == pytest.approx(0.1 + ring_s, rel=0.01)
    # As fast as the others, it pushes while they reduce: both share rank 0's NIC.
    assert step_s(cluster, ring, updates=300) > 1.03 * alone


def test_parents_are_seen_through_wrappers_and_clusters():
    ring = AttachedRing((0, 1), {2: 1})
    assert parents(DropCompute(0.1, ring)) == {2: 1}
    assert parents(AttachedRing((0, 1))) == {}
    assert parents(GroupedRing((0, 1), ((2, 3), (4,)), {2: 0, 4: 1})) == {2: 0, 3: 2, 4: 1}
    assert parents(DropCompute(0.1, BSP())) is None


def test_a_clusters_gradients_meet_at_its_leader():
    cluster = Cluster.uniform("ring", 4, NIC)
    policy = GroupedRing((0, 1), ((2, 3),), {2: 0})
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(4, (2, 5.0), (3, 5.0)), Fixed(policy), Stop(samples=400))
    assert result.mean_staleness > 0
    assert result.samples_dropped == 0
    assert result.num_gradients < 3 * result.num_updates


def test_who_waits_for_nobody_gathers_around_the_fastest_rank():
    cluster = Cluster.uniform("ring", 4, NIC, sum_s_per_byte=0.0, apply_s_per_byte=0.0, copy_s_per_byte=0.0)
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(4, (0, 2.0), (1, 1.5)), Fixed(ASP()), Stop(samples=4000))
    # Rank 2 is the fastest of the lowest number: it moves nothing, its gradients come every step_s.
    assert result.wait_s[2] == pytest.approx(0.0)
    assert result.own_s[2] == pytest.approx(result.virtual_s)
    assert min(result.wait_s[rank] for rank in (0, 1, 3)) > 0.2 * result.virtual_s / 10


def test_a_quorum_without_late_gradients_reduces_in_a_ring_of_its_own():
    cluster = Cluster.uniform("ring", 4, NIC)
    workload = Workload(0.1, 1, MODEL)
    result = simulate(cluster, workload, even(4, (3, 50.0)), Fixed(KSync(3, "cancel")), Stop(samples=300))
    assert result.virtual_s / result.num_updates == pytest.approx(0.1 + 2 * 2 / 3 * MODEL / 1e9, rel=0.5)
    # The cancelled rank fetches from the fastest rank's host, and counts for nothing.
    assert result.num_gradients == 3 * result.num_updates
    late = simulate(cluster, workload, even(4, (3, 50.0)), Fixed(KAsync(3)), Stop(samples=300))
    assert late.virtual_s / late.num_updates > result.virtual_s / result.num_updates  # three flows into one NIC


def test_of_gradients_that_land_together_the_first_may_cancel_the_others():
    cluster = Cluster.uniform("ps", 4, NIC, sum_s_per_byte=0.0, apply_s_per_byte=0.0, copy_s_per_byte=0.0)
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(4), Fixed(KSync(1, "cancel")), Stop(samples=10))
    assert (result.num_updates, result.num_gradients, result.samples_dropped) == (10, 10, 30)
    assert result.virtual_s == pytest.approx(10 * (0.1 + 0.4) + 9 * 0.4)


def test_a_late_rank_fetches_the_parameters_and_goes_on():
    cluster = Cluster.uniform("ring", 4, NIC)
    result = simulate(cluster, Workload(0.1, 1, MODEL), even(4, (3, 3.3)), Fixed(KSync(3, "drop")), Stop(samples=300))
    dropped = result.samples_dropped
    assert dropped == pytest.approx(result.virtual_s / (0.33 + 0.1), rel=0.2)
    assert result.num_gradients == 3 * result.num_updates


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Host(cores=0.0), "capacities must be positive"),
        (lambda: Host(in_bytes_per_s=-1.0), "capacities must be positive"),
        (lambda: Host(extra_latency_s=float("inf")), "extra_latency_s"),
        (lambda: Job(0, cores=-1.0), "demands must be >= 0"),
        (lambda: Job(0, from_s=2.0, until_s=2.0), "must end after it begins"),
        (lambda: Workload(0.0, 1), "needs a time"),
        (lambda: Workload(1.0, 0), "needs a time"),
        (lambda: Workload(1.0, 1, fixed_ratio=1.5), "fixed_ratio"),
        (lambda: Workload(1.0, 1, num_micro_batches=0), "num_micro_batches"),
        (lambda: Cluster("mesh", (Host(),), (0,)), "arch must be"),
        (lambda: Cluster("ring", (Host(),), ()), "at least one rank"),
        (lambda: Cluster("ring", (Host(),), (0, 1)), r"got the indices \[1\]"),
        (lambda: Cluster("ring", (Host(),), (0,), (0,)), "'ring' has none"),
        (lambda: Cluster("ps", (Host(),), (0,)), "'ps' needs servers"),
        (lambda: Cluster("ps", (Host(),), (0,), (0, 0)), "one server per host"),
        (lambda: Cluster("ring", (Host(),), (0,), alpha_s=-1.0), "must be >= 0"),
        (lambda: Cluster("ring", (Host(),), (0,), round_trips=0), "round_trips >= 1"),
        (lambda: Stop(samples=0), "budget of samples"),
        (lambda: Stop(samples=1, virtual_s=0.0), "budget of samples"),
    ],
)
def test_a_world_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
