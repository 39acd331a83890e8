"""The gradient transmission tree: turns measured ports and rounds into who sends through whom. Pure.

Where a server's port is the bottleneck, some workers become parents: they sum their children's gradients into their own
before they send, and pass parameters on. All must be in the same update, so a tree serves BSP only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from paceline.types import Rank

Tree = Mapping[Rank, Rank]
"""Parent by child; empty where everybody sends straight to the servers."""


@dataclass(frozen=True, slots=True)
class Ports:
    """What a model's gradient is, and what carries it.

    Args:
        num_bytes: Of one gradient, > 0.
        num_servers: Servers that share it, >= 1.
        server_bytes_per_s: What a server's port takes in, > 0.
        worker_bytes_per_s: What each worker's takes in, > 0.
    """

    num_bytes: float
    num_servers: int
    server_bytes_per_s: float
    worker_bytes_per_s: Mapping[Rank, float]


def exchange_s(tree: Tree, ports: Ports) -> float:
    """Return how long gradients need to the servers: what the busiest port needs, since pieces are passed on at once.

    The way back, parameters, takes as long.

    Example:
        >>> ports = Ports(50e6, 1, 50e6, dict.fromkeys(range(8), 50e6))
        >>> exchange_s({}, ports), exchange_s({3: 0, 4: 0, 5: 1, 6: 1, 7: 2}, ports)
        (8.0, 3.0)
    """
    workers = ports.worker_bytes_per_s
    part = ports.num_bytes / ports.num_servers
    num_direct = len(workers) - len(tree)
    times = [num_direct * part / ports.server_bytes_per_s, *(ports.num_bytes / rate for rate in workers.values())]
    for parent in set(tree.values()):
        num_children = sum(other == parent for other in tree.values())
        times.append(num_children * ports.num_bytes / workers[parent])
    return max(times)


def choose_tree(ports: Ports) -> dict[Rank, Rank]:
    """Return the tree with the shortest exchange; no tree where none is shorter.

    For every number of parents: the workers with the widest ports, children one by one to the parent that is done
    first. Of equals the one with fewest children per parent.

    Source:
        STAR's tree is given by hand when training starts, in two levels. Ours is built from measured rates.

    Example:
        >>> choose_tree(Ports(50e6, 1, 50e6, dict.fromkeys(range(8), 50e6)))
        {3: 0, 4: 1, 5: 2, 6: 0, 7: 1}
        >>> choose_tree(Ports(50e6, 8, 50e6, dict.fromkeys(range(8), 50e6)))
        {}
    """
    order = sorted(ports.worker_bytes_per_s, key=lambda rank: (-ports.worker_bytes_per_s[rank], rank))
    best: dict[Rank, Rank] = {}
    best_key = exchange_s(best, ports), 0
    for num_parents in range(1, len(order)):
        parents, tree = order[:num_parents], dict[Rank, Rank]()
        load = dict.fromkeys(parents, 0)
        for child in sorted(order[num_parents:]):
            parent = min(parents, key=lambda rank: ((load[rank] + 1) / ports.worker_bytes_per_s[rank], rank))
            load[parent] += 1
            tree[child] = parent
        key = exchange_s(tree, ports), max(load.values())
        if key < best_key:
            best, best_key = tree, key
    return best


@dataclass(frozen=True, slots=True)
class Round:
    """One BSP update as the servers saw it.

    Args:
        interval_s: Since the update before, seconds, > 0.
        span_s: From the first byte of its gradients to the last one, seconds, > 0.
        num_bytes: What one server took in meanwhile.
    """

    interval_s: float
    span_s: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Growth:
    """What the gardener remembers; a value.

    Args:
        tree: In force.
        rounds: The latest rounds under it.
        before_s: Interval of updates before it; None where there is nothing to compare with.
        port_bytes_per_s: The most that a server's port has taken in.
        rest: Rounds until the next tree may be tried.
        promised: Gain that the tree in force promised, ratio.
        measured: Gain that the last tree was measured to have, ratio; None before.
    """

    tree: Tree = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    before_s: float | None = None
    port_bytes_per_s: float = 0.0
    rest: int = 0
    promised: float = 1.0
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class Gardener:
    """Grows a tree where it promises enough, keeps it while it holds that, and tries again when things have changed.

    A port is taken for as wide as the busiest has been; that workers' ports are as wide as the servers' is a guess, so
    every tree is measured against what was before, and given up where it does not gain.

    Args:
        num_bytes, num_servers: See `Ports`.
        min_gain: What a tree must promise and hold, ratio of intervals, > 1.
        num_rounds: Rounds that a judgement rests on, >= 1.
        num_rest: Rounds after a tree that was given up before another is tried, >= 0.

    Example:
        >>> gardener, growth = Gardener(num_bytes=50e6, num_servers=1), Growth()
        >>> for _ in range(4):
        ...     growth = gardener.step(growth, Round(interval_s=16.4, span_s=8.2, num_bytes=400e6), range(8))
        >>> len(growth.tree), round(growth.promised, 1)
        (5, 2.7)
    """

    num_bytes: float
    num_servers: int
    min_gain: float = 1.1
    num_rounds: int = 4
    num_rest: int = 200

    def step(self, growth: Growth, made: Round, ranks: Sequence[Rank]) -> Growth:
        """Take in one round of these ranks, all of whom were in it; the tree of the answer is for the next round."""
        growth = replace(
            growth,
            rounds=(*growth.rounds, made)[-2 * self.num_rounds :],
            port_bytes_per_s=max(growth.port_bytes_per_s, made.num_bytes / made.span_s),
            rest=max(0, growth.rest - 1),
        )
        if not set(growth.tree) | set(growth.tree.values()) <= set(ranks):
            return replace(growth, tree={}, rounds=(), before_s=None)
        if len(growth.rounds) < self.num_rounds:
            return growth
        interval_s = median(made.interval_s for made in growth.rounds[-self.num_rounds :])
        if growth.tree:
            measured = growth.before_s / interval_s if growth.before_s is not None else None
            if measured is not None and measured < self.min_gain:
                return Growth(port_bytes_per_s=growth.port_bytes_per_s, rest=self.num_rest, measured=measured)
            return replace(growth, measured=measured)
        return growth if growth.rest else self._grown(growth, interval_s, ranks)

    def _grown(self, growth: Growth, interval_s: float, ranks: Sequence[Rank]) -> Growth:
        ports = Ports(
            self.num_bytes, self.num_servers, growth.port_bytes_per_s, dict.fromkeys(ranks, growth.port_bytes_per_s)
        )
        tree = choose_tree(ports)
        saved_s = 2.0 * (exchange_s({}, ports) - exchange_s(tree, ports))
        promised = interval_s / max(interval_s - saved_s, 0.05 * interval_s)
        if promised < self.min_gain:
            return growth
        return replace(growth, tree=tree, rounds=(), before_s=interval_s, promised=promised)
