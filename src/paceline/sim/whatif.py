"""What if nothing had been slow: turns an operation trace into who is to blame for the lost time. Pure.

The recorded operations are replayed as a dependency graph, with the recorded durations and with ideal ones. Where
making some operations ideal wins back what making all of them ideal would, those are to blame.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import TraceError
from paceline.sim.operations import COMPUTE, Operations

Blame = Literal["none", "worker", "stage", "sequences", "unclear"]
Seconds = NDArray[np.float64]

SLOW_SHARE: Final = 0.03
"""The slowest workers are this share of all, rounded up."""

_DATA_PARALLEL = frozenset({"params-all-gather", "grads-reduce-scatter"})
_IN_LINE = COMPUTE | {"optimizer-clip-main-grad"}  # all of these are one stream of a worker


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the lost time is due to some operations.

    Args:
        ideal_s: Mean step time with these ideal and all others as recorded, seconds.
        alone_s: Mean step time with these as recorded and all others ideal, seconds.
        share: Of the time lost to slowness, what making these ideal wins back: (replayed - ideal_s) / (replayed -
            all ideal). May leave 0..1: the mean also slows what was faster.
    """

    ideal_s: float
    alone_s: float
    share: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a replay shows of a job.

    Args:
        recorded_s: Mean step time as recorded, seconds.
        replayed_s: Mean step time of the replay: as recorded, without launch delays.
        ideal_s: Mean step time of the replay with nothing slow.
        dp_slowdowns, stage_slowdowns: By replica, and by stage: step time with its operations as recorded and all
            others ideal, over `ideal_s`.
        slow_ranks: The slowest workers, by their rank in the source.
        worker: What these are to blame for (its share is M_W).
        stage: What the last stage is to blame for (its share is M_S).
        uneven_ratio: How far the micro-batches of a worker's step differ, in what forward and backward have in
            common: the square root of their covariance, both as shares of their mean, >= 0. Sequences of different
            length make both differ alike.
    """

    recorded_s: float
    replayed_s: float
    ideal_s: float
    dp_slowdowns: tuple[float, ...]
    stage_slowdowns: tuple[float, ...]
    slow_ranks: tuple[int, ...]
    worker: Share
    stage: Share
    uneven_ratio: float

    @property
    def slowdown(self) -> float:
        """How many times longer a step takes than with nothing slow."""
        return self.replayed_s / self.ideal_s

    @property
    def blame(self) -> Blame:
        """Who or what has cost at least half of the lost time; "none" below a slowdown of 1.1.

        A slow worker comes first. Uneven sequences come before the last stage, since they make every stage slow and
        a long one look longer.
        """
        if self.slowdown < 1.1:
            return "none"
        if self.worker.share >= 0.5:
            return "worker"
        if self.uneven_ratio >= 0.1:
            return "sequences"
        return "stage" if self.stage.share >= 0.5 and len(self.stage_slowdowns) > 1 else "unclear"


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """In which order operations run.

    Args:
        units: Operations that start together, in an order in which each can be computed from those before: members
            and what must have ended before them.
        groups: Members of the units that communicate.
    """

    units: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    groups: tuple[NDArray[np.int64], ...]

    def replay(self, duration_s: Seconds) -> Seconds:
        """Return how long every step takes with these durations.

        An operation starts when its predecessors, and those of all members of its group, have ended.

        Args:
            duration_s: By operation and step, seconds; for communication the transfer alone.

        Returns:
            By step, seconds.
        """
        end_s = np.zeros_like(duration_s)
        for members, before in self.units:
            start_s = end_s[before].max(axis=0, initial=0.0)
            end_s[members] = start_s + duration_s[members]
        return np.asarray(end_s.max(axis=0))


def what_if(operations: Operations) -> WhatIf:
    """Replay a trace as it was, with nothing slow, and with parts of it slow.

    Args:
        operations: The trace.

    Returns:
        Step times, shares of the lost time, and with them the blame.

    Raises:
        TraceError: its operations wait for each other in a circle.

    Source:
        "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713): ideal is the
        mean of all operations of a kind for compute and the median for transfers; M_W and M_S; a worker's score is
        the lower of its replica's and its stage's slowdown. Ours takes the gradient clipping as one exchange of all
        workers, and measures uneven sequences by covariance; a correlation is as high where hardly anything varies.
    """
    graph = _graph(operations)
    recorded = _transfers(operations, graph)
    ideal = _ideal(operations, recorded)
    replayed_s, ideal_s = _mean(graph, recorded), _mean(graph, ideal)

    def mixed(selected: NDArray[np.bool_], inside: Seconds, outside: Seconds) -> float:
        return _mean(graph, np.where(selected[:, None], inside, outside))

    def share(selected: NDArray[np.bool_]) -> Share:
        without_s = mixed(selected, ideal, recorded)
        lost_s = replayed_s - ideal_s
        won = (replayed_s - without_s) / lost_s if lost_s else 0.0
        return Share(ideal_s=without_s, alone_s=mixed(selected, recorded, ideal), share=won)

    def slowdowns(places: NDArray[np.int64]) -> Seconds:
        of = places[operations.workers]
        return np.array([mixed(of == place, recorded, ideal) / ideal_s for place in range(places.max() + 1)])

    by_dp, by_stage = slowdowns(operations.dp_ranks), slowdowns(operations.stages)
    scores = np.minimum(by_dp[operations.dp_ranks], by_stage[operations.stages])
    slowest = np.argsort(-scores, kind="stable")[: math.ceil(SLOW_SHARE * len(scores))]
    return WhatIf(
        recorded_s=float((operations.start_s + operations.duration_s).max(axis=0).mean()),
        replayed_s=replayed_s,
        ideal_s=ideal_s,
        dp_slowdowns=tuple(by_dp.tolist()),
        stage_slowdowns=tuple(by_stage.tolist()),
        slow_ranks=tuple(operations.source_ranks[worker] for worker in sorted(slowest.tolist())),
        worker=share(np.isin(operations.workers, slowest)),
        stage=share((operations.stages == operations.stages.max())[operations.workers]),
        uneven_ratio=_uneven(operations),
    )


def _mean(graph: Graph, duration_s: Seconds) -> float:
    return float(graph.replay(duration_s).mean())


def _transfers(operations: Operations, graph: Graph) -> Seconds:
    """Durations without waiting: a transfer lasts from the latest start in its group to its own end."""
    seconds = operations.duration_s.copy()
    end_s = operations.start_s + operations.duration_s
    for members in graph.groups:
        seconds[members] = np.maximum(0.0, end_s[members] - operations.start_s[members].max(axis=0))
    return seconds


def _ideal(operations: Operations, recorded: Seconds) -> Seconds:
    """Every duration replaced by the mean of its kind (compute) or the median (transfers)."""
    ideal = recorded.copy()
    kinds = np.array(operations.kinds)
    for kind in set(operations.kinds):
        same = kinds == kind
        ideal[same] = recorded[same].mean() if kind in COMPUTE else np.median(recorded[same])
    return ideal


def _uneven(operations: Operations) -> float:
    """Common spread of forward and backward time over the micro-batches of a worker's step, as a share of the mean."""
    kinds = np.array(operations.kinds)
    covariances = []
    for worker in range(len(operations.source_ranks)):
        mine = operations.workers == worker
        # In order of their number on the worker, so that both kinds line up.
        forward = operations.duration_s[mine & (kinds == "forward-compute")]
        backward = operations.duration_s[mine & (kinds == "backward-compute")]
        if not forward.size or forward.shape != backward.shape or not (forward.all() and backward.all()):
            return 0.0
        together = (forward / forward.mean(axis=0) - 1.0) * (backward / backward.mean(axis=0) - 1.0)
        covariances.append(together.mean())
    return math.sqrt(max(0.0, float(np.mean(covariances))))


def _graph(operations: Operations) -> Graph:
    """Join the operations that communicate with each other, and sort: whoever waits comes after what it waits for."""
    unit_of: dict[Hashable, int] = {}
    units = [unit_of.setdefault(_group(operations, i), len(unit_of)) for i in range(len(operations.kinds))]
    members: list[list[int]] = [[] for _ in unit_of]
    for operation, unit in enumerate(units):
        members[unit].append(operation)
    before: list[set[int]] = [set() for _ in unit_of]
    for first, then in _dependencies(operations):
        before[units[then]].add(first)
    waits = {unit: {units[operation] for operation in earlier} for unit, earlier in enumerate(before)}
    try:
        order = list(TopologicalSorter(waits).static_order())
    except ValueError as error:  # CycleError is one
        raise TraceError(f"{operations.source}: wanted operations in order, got some that wait in a circle") from error
    communicates = [operations.kinds[of[0]] not in COMPUTE for of in members]
    return Graph(
        units=tuple((np.array(members[unit]), np.array(sorted(before[unit]), dtype=np.int64)) for unit in order),
        groups=tuple(np.array(of) for unit, of in enumerate(members) if communicates[unit]),
    )


def _group(operations: Operations, operation: int) -> Hashable:
    """With whom an operation communicates, as a key that all of its group share; its own where with nobody."""
    kind, number = operations.kinds[operation], int(operations.sequence[operation])
    worker = operations.workers[operation]
    stage, replica = int(operations.stages[worker]), int(operations.dp_ranks[worker])
    match kind:
        case "forward-send":
            return "forward", replica, stage, number
        case "forward-recv":
            return "forward", replica, stage - 1, number
        case "backward-send":
            return "backward", replica, stage, number
        case "backward-recv":
            return "backward", replica, stage + 1, number
        case "embedding-grads-all-reduce":
            return kind, replica, number
        case "optimizer-clip-main-grad":
            return kind, number
        case _ if kind in _DATA_PARALLEL:
            return kind, stage, number
        case _:
            return operation


def _dependencies(operations: Operations) -> Iterable[tuple[int, int]]:
    """Pairs of operations on one worker: which must end before which begins."""
    at = {
        (int(worker), kind, int(number)): i
        for i, (worker, kind, number) in enumerate(
            zip(operations.workers, operations.kinds, operations.sequence, strict=True)
        )
    }
    started = np.median(operations.start_s, axis=1)
    for stream in _streams(operations).values():
        line = sorted(stream, key=lambda operation: (started[operation], operation))
        yield from pairwise(line)
    for (worker, kind, number), operation in at.items():
        before = {
            "forward-send": ("forward-compute", number),
            "backward-send": ("backward-compute", number),
            "forward-compute": ("forward-recv", number),
            "backward-compute": ("backward-recv", number),
            "optimizer-clip-main-grad": ("grads-reduce-scatter", number),
        }.get(kind)
        if before is not None and (worker, *before) in at:
            yield at[(worker, *before)], operation
        if kind == "params-all-gather" and (worker, "forward-compute", 0) in at:
            yield operation, at[(worker, "forward-compute", 0)]
        if kind.endswith("-all-reduce") or kind == "grads-reduce-scatter":
            last = max((n for w, k, n in at if w == worker and k == "backward-compute"), default=None)
            if last is not None:
                yield at[(worker, "backward-compute", last)], operation


def _streams(operations: Operations) -> dict[tuple[int, str], list[int]]:
    """What a worker does one after the other: compute, data-parallel exchanges, and each kind of send and receive."""
    streams: dict[tuple[int, str], list[int]] = {}
    for operation, (worker, kind) in enumerate(zip(operations.workers, operations.kinds, strict=True)):
        by_itself = kind if kind.endswith(("-send", "-recv")) else "data-parallel"
        stream = "compute" if kind in _IN_LINE else by_itself
        streams.setdefault((int(worker), stream), []).append(operation)
    return streams
