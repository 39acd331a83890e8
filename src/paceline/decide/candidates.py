"""What could be done: turns conditions into the modes worth judging. Pure; a family of modes is one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.decide.batches import balanced_batches, lasting_means
from paceline.decide.placement import choose_parents
from paceline.decide.rehearse import Conditions
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.group import GroupSync, groups_by_speed
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, KAsync
from paceline.types import Rank

_GAP_RATIOS = (0.2, 0.5, 1.0)  # how far apart two groups of ranks must be, tried in turn
_ALIKE = 1.2  # a rank that needs less than so many times the ring's median is no straggler (STAR's tolerance)


@dataclass(frozen=True, slots=True)
class Mode:
    """A policy, and the batch sizes that it runs with.

    Args:
        policy: Who updates with whom.
        batch_sizes: Samples per gradient by rank; None for the same for everybody, as at the start.
    """

    policy: SyncPolicy[Any]
    batch_sizes: tuple[int, ...] | None = None


Family = Callable[[SyncPolicy[Any], Conditions, int], Iterator[Mode]]
"""From the policy in force, the conditions and the bound on staleness to the modes of one kind."""


def rings(current: SyncPolicy[Any], given: Conditions, max_staleness: int) -> Iterator[Mode]:
    """The x fastest ranks in a ring, the others attached, for every x; at equal times present members come first.

    Only ranks clearly slower than the ring are attached: to part ranks of like speed gains nothing but jitter.
    The largest ring comes first: of modes that promise the same the selector takes the first.
    """
    times = given.own_times_s
    present = set(current.ring) if isinstance(current, AttachedRing) else set()
    order = sorted(times, key=lambda rank: (times[rank], rank not in present, rank))
    for x in range(len(order) - 1, 0, -1):
        ring, children = sorted(order[:x]), order[x:]
        if times[children[0]] < _ALIKE * median(times[rank] for rank in ring):
            continue
        yield Mode(AttachedRing(tuple(ring), choose_parents(ring, children, times), max_staleness))


def quorums(current: SyncPolicy[Any], given: Conditions, max_staleness: int) -> Iterator[Mode]:  # noqa: ARG001
    """The first k of every round, later gradients dropped, for every k of at least half.

    Not cancelled, which would bring a little more: a rank that never finishes tells nobody that it has recovered.
    """
    num_ranks = len(given.own_steps)
    for k in range(num_ranks - 1, (num_ranks - 1) // 2, -1):
        yield Mode(KSync(k, "drop"))


def orders(current: SyncPolicy[Any], given: Conditions, max_staleness: int) -> Iterator[Mode]:  # noqa: ARG001
    """Any x arrivals make an update, for every x (STAR's static x-order; x = 1 is ASGD)."""
    yield Mode(ASP(max_staleness * len(given.own_steps)))
    for x in range(2, len(given.own_steps)):
        yield Mode(KAsync(x))


def groups(current: SyncPolicy[Any], given: Conditions, max_staleness: int) -> Iterator[Mode]:  # noqa: ARG001
    """Ranks of like speed update together (STAR's dynamic x-order)."""
    seen: set[tuple[tuple[Rank, ...], ...]] = set()
    for ratio in _GAP_RATIOS:
        found = groups_by_speed(given.own_times_s, ratio)
        if len(found) > 1 and found not in seen:
            seen.add(found)
            yield Mode(GroupSync(found))


def balanced(current: SyncPolicy[Any], given: Conditions, max_staleness: int) -> Iterator[Mode]:  # noqa: ARG001
    """Everybody waits for everybody, with batches with which all finish together."""
    whole = lasting_means(
        {rank: [given.own_s(step, given.batch_size) for step in steps] for rank, steps in given.own_steps.items()}
    )
    total = round(given.batch_size) * len(whole)
    # A gradient takes fixed + rest * samples / batch of its whole time: with the fixed part put aside as if it were
    # samples, time is proportional to them, which is what the solver wants.
    aside = round(given.batch_size * given.fixed_ratio / (1.0 - given.fixed_ratio)) if given.fixed_ratio < 1 else 0
    sizes = balanced_batches([1.0 / whole[rank] for rank in sorted(whole)], total + aside * len(whole), least=aside + 1)
    yield Mode(BSP(), tuple(size - aside for size in sizes))


LIVE: tuple[Family, ...] = (rings,)
RING: tuple[Family, ...] = (rings, quorums, orders, balanced)
PARAMETER_SERVER: tuple[Family, ...] = (quorums, orders, groups, balanced)
"""What the shells can carry out: the live ring today; the simulated ring; the parameter server."""
