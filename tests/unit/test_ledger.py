"""Sample leases: every sample of an epoch is trained once, or counted as dropped."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from paceline.decide.ledger import Lease, Ledger


def balance(ledger: Ledger) -> int:
    """What the invariant says is constant."""
    leased = sum(len(lease) for lease in ledger.leases.values() if lease.epoch == ledger.epoch)
    return ledger.trained + ledger.dropped + leased + ledger.num_free


def check_books(ledger: Ledger) -> None:
    """No sample is lost or counted twice, in this epoch and over all of them."""
    begun = ledger.epoch >= 0
    assert balance(ledger) == (ledger.num_samples if begun else 0)
    overdue = sum(len(lease) for lease in ledger.leases.values() if lease.epoch < ledger.epoch)
    assert ledger.total_trained + ledger.total_dropped + overdue == max(0, ledger.epoch) * ledger.num_samples
    assert ledger.num_free == sum(stop - start for start, stop in ledger.free)


RING, ATTACHED = (0, 1, 2), (7, 8)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(1, 3)),
        st.tuples(st.just("grant"), st.sampled_from(ATTACHED), st.integers(1, 12)),
        st.tuples(st.sampled_from(["trained", "dropped", "reclaim"]), st.sampled_from(ATTACHED)),
        st.tuples(st.just("next_epoch")),
    ),
    max_size=60,
)


@given(num_samples=st.integers(1, 90), batch_size=st.integers(1, 5), moves=MOVES)
def test_no_sample_is_lost_or_handed_out_twice(num_samples, batch_size, moves):
    ledger = Ledger(num_samples, batch_size).next_epoch()
    out: set[int] = set()  # positions of this epoch that somebody has been given
    for kind, *arguments in moves:
        match kind:
            case "draw":
                ring = RING[: arguments[0]]
                free = ledger.num_free
                ledger, leases = ledger.draw(ring)
                assert set(leases) == (set(ring) if free >= len(ring) else set())
                assert all(1 <= len(lease) <= batch_size for lease in leases.values())
                assert max(map(len, leases.values()), default=0) - min(map(len, leases.values()), default=0) <= 1
                for lease in leases.values():
                    out = given_out(out, lease, ledger)
            case "grant" if arguments[0] not in ledger.leases:
                rank, wanted = arguments
                free = ledger.num_free
                ledger = ledger.grant(rank, wanted, len(RING))
                if rank in ledger.leases:
                    assert len(ledger.leases[rank]) == wanted
                    assert ledger.num_free >= len(RING) * batch_size  # the ring keeps a full block
                    out = given_out(out, ledger.leases[rank], ledger)
                else:
                    assert free < wanted + len(RING) * (batch_size + 1)
            case "trained" | "dropped":
                ledger = ledger.settle(arguments[0], trained=kind == "trained")
                assert arguments[0] not in ledger.leases
            case "reclaim":
                lease = ledger.leases.get(arguments[0])
                ledger = ledger.reclaim(arguments[0])
                if lease is not None and lease.epoch == ledger.epoch:
                    out -= set(lease.positions)
            case "next_epoch":
                ledger = ledger.next_epoch()
                out = set()
        check_books(ledger)
    # The ring alone finishes the epoch: afterwards every position is out, or dropped and counted.
    dropped_before = ledger.dropped
    while ledger.num_free:
        ledger, leases = ledger.draw(RING)
        for lease in leases.values():
            out = given_out(out, lease, ledger)
    check_books(ledger)
    assert ledger.dropped - dropped_before < len(RING)
    assert ledger.draw(RING)[1] == {}
    for rank in ATTACHED:
        ledger = ledger.settle(rank, trained=True)
    assert ledger.trained + ledger.dropped == num_samples
    last = ledger.next_epoch()
    assert last.total_trained + last.total_dropped == (ledger.epoch + 1) * num_samples


def given_out(out: set[int], lease: Lease, ledger: Ledger) -> set[int]:
    """The positions that are out once this lease is; none was out before."""
    positions = set(lease.positions)
    assert lease.epoch == ledger.epoch
    assert len(positions) == len(lease)
    assert not positions & out
    assert positions <= set(range(ledger.num_samples))
    return out | positions


def drawn(num_samples: int, batch_size: int, world_size: int) -> list[dict[int, Lease]]:
    """All draws of an epoch."""
    ledger, draws = Ledger(num_samples, batch_size).next_epoch(), []
    while True:
        ledger, leases = ledger.draw(tuple(range(world_size)))
        if not leases:
            return draws
        draws.append(leases)


def sampled(num_samples: int, batch_size: int, world_size: int, rank: int) -> list[tuple[int, ...]]:
    """What torch's DistributedSampler gives this rank, in batches."""
    sampler = DistributedSampler(range(num_samples), world_size, rank, shuffle=False, drop_last=False)
    positions = list(sampler)
    return [tuple(positions[i : i + batch_size]) for i in range(0, len(positions), batch_size)]


@given(per_rank=st.integers(1, 40), batch_size=st.integers(1, 6), world_size=st.integers(1, 6))
def test_batches_are_the_distributed_samplers_where_it_repeats_nothing(per_rank, batch_size, world_size):
    assume(batch_size < 3 or per_rank % batch_size != 1)  # the sampler's last batch would be of one
    draws = drawn(per_rank * world_size, batch_size, world_size)
    for rank in range(world_size):
        assert [d[rank].positions for d in draws] == sampled(per_rank * world_size, batch_size, world_size, rank)


@given(num_samples=st.integers(1, 200), batch_size=st.integers(1, 6), world_size=st.integers(1, 6))
def test_only_the_tail_differs_where_the_sampler_repeats_samples(num_samples, batch_size, world_size):
    draws = drawn(num_samples, batch_size, world_size)
    for rank in range(world_size):
        torchs = sampled(num_samples, batch_size, world_size, rank)
        assert [d[rank].positions for d in draws[:-2]] == torchs[: max(0, len(draws) - 2)]
        assert len(draws) in (len(torchs), len(torchs) - 1)
    everything = sorted(p for d in draws for lease in d.values() for p in lease.positions)
    assert everything == list(range(len(everything)))
    if batch_size > 1 and num_samples >= world_size:
        assert len(everything) == num_samples  # nothing dropped
    if batch_size > 3 and num_samples >= 2 * world_size:
        assert min(len(lease) for d in draws for lease in d.values()) > 1  # BatchNorm fails on a batch of one


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "sizes"),
    [
        (16, 2, [[2, 2, 2, 2], [2, 2, 2, 2]]),  # nothing left over
        (26, 4, [[4, 4, 4, 4], [3, 3, 2, 2]]),  # a short rest is spread over the ring
        (34, 4, [[4, 4, 4, 4], [3, 3, 2, 2], [2, 2, 2, 2]]),  # too short a rest shortens the block before it
        (17, 3, [[3, 2, 2, 2], [2, 2, 2, 2]]),
        (14, 3, [[3, 3, 2, 2], [1, 1, 1, 1]]),  # no two for each without dropping some
        (22, 2, [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 1, 1]]),
        (9, 1, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (3, 2, []),  # fewer samples than members
        (5, 2, [[2, 1, 1, 1]]),  # no two for each in the whole data set
        (7, 4, [[2, 2, 2, 1]]),
    ],
)
def test_tail_rule(num_samples, batch_size, sizes):
    draws = drawn(num_samples, batch_size, 4)
    assert [[len(d[rank]) for rank in range(4)] for d in draws] == sizes


def test_what_no_ring_member_could_get_is_dropped_and_counted():
    ledger = Ledger(num_samples=6, batch_size=1).next_epoch()
    for _ in range(2):
        ledger, _ = ledger.draw((0, 1, 2, 3))
    assert (ledger.trained, ledger.dropped, ledger.num_free) == (4, 2, 0)


def test_the_ring_draws_from_the_front_and_attached_ranks_from_the_back():
    ledger = Ledger(num_samples=40, batch_size=2).next_epoch().grant(9, 3, num_members=2)
    assert ledger.leases[9] == Lease(0, (37, 38, 39))
    ledger, leases = ledger.draw((4, 1))
    assert leases == {4: Lease(0, (0, 2)), 1: Lease(0, (1, 3))}
    assert ledger.free == ((4, 37),)


def test_a_grant_leaves_the_ring_its_block_and_one_each():
    ledger = Ledger(num_samples=10, batch_size=2).next_epoch()
    assert 9 in ledger.grant(9, 4, num_members=2).leases
    assert ledger.grant(9, 5, num_members=2) == ledger


def test_a_second_lease_is_our_mistake():
    ledger = Ledger(num_samples=40, batch_size=2).next_epoch().grant(9, 3, num_members=2)
    with pytest.raises(AssertionError, match="already holds"):
        ledger.grant(9, 3, num_members=2)


@pytest.mark.parametrize(("trained", "booked"), [(True, (3, 0)), (False, (0, 3))])
def test_a_settled_lease_is_booked_where_it_belongs(trained, booked):
    ledger = Ledger(num_samples=40, batch_size=2).next_epoch().grant(9, 3, num_members=2)
    now = ledger.settle(9, trained)
    assert (now.trained, now.dropped) == booked
    assert now.settle(9, trained) == now  # without a lease nothing changes
    late = ledger.next_epoch().settle(9, trained)  # the epoch's other 37 samples were never handed out
    assert (late.trained, late.dropped) == (0, 0)
    assert (late.total_trained, late.total_dropped) == (booked[0], booked[1] + 37)


def test_a_reclaimed_lease_is_handed_out_again():
    ledger = Ledger(num_samples=20, batch_size=2).next_epoch().grant(8, 4, num_members=2).grant(9, 3, num_members=2)
    back = ledger.reclaim(8).reclaim(9)
    assert back.num_free == 20
    assert back.reclaim(9) == back
    again = back.grant(8, 7, num_members=2)
    assert set(again.leases[8].positions) == set(range(13, 20))


def test_a_reclaimed_lease_of_an_earlier_epoch_is_dropped():
    ledger = Ledger(num_samples=20, batch_size=2).next_epoch().grant(8, 4, num_members=2).next_epoch()
    back = ledger.reclaim(8)
    assert (back.num_free, back.total_dropped, back.leases) == (20, 20, {})


def test_before_the_first_epoch_there_is_nothing_to_draw():
    ledger, leases = Ledger(num_samples=20, batch_size=2).draw((0, 1))
    assert (leases, ledger.dropped) == ({}, 0)


@pytest.mark.parametrize(("num_samples", "batch_size"), [(0, 1), (5, 0), (-1, 2)])
def test_an_empty_data_set_or_batch_cannot_be_built(num_samples, batch_size):
    with pytest.raises(ValueError, match="at least one sample"):
        Ledger(num_samples, batch_size)
