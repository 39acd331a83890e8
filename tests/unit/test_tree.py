"""The transmission tree: built where it helps, kept while it does, given up where it does not."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.tree import Gardener, Growth, Ports, Round, choose_tree, exchange_s

MB = 1e6


def ports(num_workers: int, num_servers: int = 1, server: float = 50 * MB, worker: float = 50 * MB) -> Ports:
    return Ports(50 * MB, num_servers, server, dict.fromkeys(range(num_workers), worker))


def best_by_trying(given_ports: Ports) -> float:
    """The shortest exchange of any two-level tree."""
    ranks = sorted(given_ports.worker_bytes_per_s)
    best = exchange_s({}, given_ports)
    for parents in product((None, *ranks), repeat=len(ranks)):
        tree = {child: parent for child, parent in zip(ranks, parents, strict=True) if parent is not None}
        if all(parent != child and parent not in tree for child, parent in tree.items()):
            best = min(best, exchange_s(tree, given_ports))
    return best


@given(
    st.lists(st.floats(10 * MB, 100 * MB), min_size=1, max_size=5),
    st.floats(10 * MB, 100 * MB),
    st.integers(1, 3),
)
def test_no_tree_is_shorter(workers: list[float], server: float, num_servers: int) -> None:
    given_ports = Ports(50 * MB, num_servers, server, dict(enumerate(workers)))
    tree = choose_tree(given_ports)
    assert all(parent not in tree for parent in tree.values()), "two levels"
    assert exchange_s(tree, given_ports) == pytest.approx(best_by_trying(given_ports), rel=0.35)
    assert exchange_s(tree, given_ports) <= exchange_s({}, given_ports)


@pytest.mark.parametrize(("num_workers", "expected_s"), [(2, 1.0), (3, 2.0), (4, 2.0), (8, 3.0), (16, 4.0)])
def test_equal_ports_have_the_known_shortest_exchange(num_workers: int, expected_s: float) -> None:
    assert exchange_s(choose_tree(ports(num_workers)), ports(num_workers)) == expected_s


def test_where_servers_are_wide_enough_there_is_no_tree() -> None:
    assert choose_tree(ports(4, num_servers=4)) == {}
    assert choose_tree(ports(4, server=400 * MB)) == {}


def test_parents_are_the_workers_with_the_widest_ports() -> None:
    rates = {0: 10 * MB, 1: 50 * MB, 2: 10 * MB, 3: 50 * MB, 4: 10 * MB, 5: 10 * MB}
    assert set(choose_tree(Ports(10 * MB, 1, 20 * MB, rates)).values()) <= {1, 3}


def rounds(gardener: Gardener, growth: Growth, interval_s: float, count: int, num_direct: int = 8) -> Growth:
    for _ in range(count):
        made = Round(interval_s, interval_s / 2, num_direct * gardener.num_bytes)
        growth = gardener.step(growth, made, range(8))
    return growth


def test_a_tree_grows_when_ports_are_the_bottleneck_and_stays_when_it_gains() -> None:
    gardener = Gardener(50 * MB, 1)
    growth = rounds(gardener, Growth(), 16.0, 3)
    assert not growth.tree, "three rounds are no evidence"
    growth = rounds(gardener, growth, 16.0, 1)
    assert growth.tree
    grown = rounds(gardener, growth, 7.0, 20, num_direct=3)
    assert grown.tree == growth.tree
    assert grown.measured == pytest.approx(16.0 / 7.0)


def test_a_tree_that_does_not_gain_is_given_up_and_not_tried_again_soon() -> None:
    gardener = Gardener(50 * MB, 1, num_rest=10)
    growth = rounds(gardener, rounds(gardener, Growth(), 16.0, 4), 15.5, 4, num_direct=3)
    assert not growth.tree
    assert growth.measured == pytest.approx(16.0 / 15.5)
    assert not rounds(gardener, growth, 16.0, 9).tree
    assert rounds(gardener, growth, 16.0, 11).tree


def test_a_tree_goes_when_one_of_its_workers_does() -> None:
    gardener = Gardener(50 * MB, 1)
    growth = rounds(gardener, Growth(), 16.0, 4)
    gone = next(iter(growth.tree))
    left = [rank for rank in range(8) if rank != gone]
    assert gardener.step(growth, Round(16.0, 8.0, 50 * MB), left).tree == {}


def test_ports_that_are_hardly_used_grow_no_tree() -> None:
    gardener, growth = Gardener(1 * MB, 1), Growth()
    for _ in range(20):
        growth = gardener.step(growth, Round(interval_s=1.0, span_s=0.05, num_bytes=8 * MB), range(8))
    assert not growth.tree
