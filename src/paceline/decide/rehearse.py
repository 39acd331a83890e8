"""The rehearsal: turns a policy and the ranks' recent own times into its time to accuracy, by playing it. Pure.

The policy itself is fed with arrivals at the times that the last steps suggest, and what it says is carried out on a
small model of the exchange. So every policy is judged by the same rule, and a new one needs no formula.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import fmean
from typing import Any, Literal

from paceline.decide.estimate import LrRule, progress, updates_needed
from paceline.policy.base import Apply, Arrive, Cancel, Drop, Event, Release, Score, SyncPolicy, Tick, Wake
from paceline.types import Rank

Arch = Literal["ring", "ps"]
_PIECES = 4  # micro-batches that a batch is taken to be computed in
_NEUTRAL = Score(1.0, 1.0, 1.0, 1.0)  # every gradient is taken to be as good as a trusted one


@dataclass(frozen=True, slots=True)
class OwnStep:
    """Own time of one gradient, seconds > 0, and the samples behind it, > 0."""

    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """What an estimate rests on.

    Args:
        own_steps: The last steps of every rank, oldest first, one at least.
        comm_s: Time of the exchange among all ranks, without waiting for anybody, seconds, >= 0.
        batch_size: Samples per rank and gradient that the learning rate was tuned for, > 0.
        noise_scale: Samples, >= 0.
        staleness_cost: Extra updates per unit of staleness, as a ratio, >= 0. The unit is an update of the full
            batch: a version counts by its factor on the learning rate.
        staleness_limit: Mean staleness, in that unit, above which a mode is not to be taken, whatever it promises.
        lr_rule: How the learning rate follows the batch.
        arch: How gradients travel.
        fixed_ratio: Part of a gradient's time that does not shrink with its batch, 0..1.
        batch_sizes: Samples per gradient by rank at present; None for `batch_size` each.
        history: Older steps of every rank together with the last ones, likewise: what may come back.
        history_weight: How much of an estimate rests on the history instead of the last steps, 0..1.

    Raises:
        ValueError: a rank without steps.
    """

    own_steps: Mapping[Rank, tuple[OwnStep, ...]]
    comm_s: float
    batch_size: float
    noise_scale: float
    staleness_cost: float = 0.1
    lr_rule: LrRule = "linear"
    arch: Arch = "ring"
    fixed_ratio: float = 0.2
    batch_sizes: tuple[int, ...] | None = None
    history: Mapping[Rank, tuple[OwnStep, ...]] = field(default_factory=dict)
    history_weight: float = 0.0
    staleness_limit: float = math.inf

    def __post_init__(self) -> None:
        told = (self.own_steps, self.history) if self.history_weight else (self.own_steps,)
        unknown = sorted(rank for rank in self.own_steps if not all(steps.get(rank) for steps in told))
        if unknown or not self.own_steps:
            raise ValueError(f"an estimate needs a step of every rank, got none of {unknown or 'any'}")

    @classmethod
    def constant(cls, own_times_s: Mapping[Rank, float], batch_size: int = 32, **rest: Any) -> Conditions:
        """Conditions in which every rank always needs the same time, seconds; `rest` as above."""
        steps = {rank: (OwnStep(own_s, batch_size),) for rank, own_s in own_times_s.items()}
        return cls(steps, **{"comm_s": 0.0, "noise_scale": 60.0, **rest}, batch_size=batch_size)

    @property
    def ranks(self) -> frozenset[Rank]:
        """Everybody."""
        return frozenset(self.own_steps)

    @property
    def own_times_s(self) -> dict[Rank, float]:
        """Mean own time per gradient by rank, seconds."""
        return {rank: fmean(step.seconds for step in steps) for rank, steps in self.own_steps.items()}

    def own_s(self, step: OwnStep, samples: float) -> float:
        """How long that step would have taken with another batch, seconds."""
        return step.seconds * (self.fixed_ratio + (1.0 - self.fixed_ratio) * samples / step.samples)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted cost of one mode.

    Args:
        interval_s: Time between updates, seconds.
        batch_samples: Mean samples per update.
        mean_staleness: Versions, mean over samples.
        time_to_accuracy_s: Seconds per unit of progress; lower is better.
    """

    interval_s: float
    batch_samples: float
    mean_staleness: float
    time_to_accuracy_s: float


def estimate(
    policy: SyncPolicy[Any], given: Conditions, batch_sizes: tuple[int, ...] | None = None, num_rounds: int = 16
) -> Estimate:
    """Predict the time to accuracy of a policy by rehearsing it.

    T = n(b_ref) * elapsed / sum over updates of progress(b) / (1 + lambda * staleness)

    with n(b) = 1 + phi / b. An update's progress is its factor on the learning rate, less what its staleness costs.

    Args:
        policy: What to judge.
        given: Recent steps, noise scale and costs, for every rank.
        batch_sizes: Samples per gradient by rank under this mode; None leaves them as they are.
        num_rounds: Gradients rehearsed per rank, mean.

    Returns:
        The estimate; `time_to_accuracy_s` compares only with others made from the same `given`, and is infinite for
        a policy that makes no update, or too stale ones.

    Source:
        STAR, heuristic selection, has a closed form per mode, no staleness cost and ignores attached ranks'
        gradients. Ours differs in playing the policy and in charging staleness; without that charge ASGD always
        wins.

    Example:
        >>> from paceline.policy.barrier import BSP
        >>> from paceline.policy.ring import AttachedRing
        >>> given = Conditions.constant({0: 0.05, 1: 0.05, 2: 0.24, 3: 0.05})
        >>> bsp, ring = estimate(BSP(), given), estimate(AttachedRing((0, 1, 3), {2: 0}), given)
        >>> round(bsp.interval_s, 3), bsp.batch_samples, round(bsp.time_to_accuracy_s / ring.time_to_accuracy_s, 1)
        (0.24, 128.0, 3.8)
    """
    sizes, num_gradients = batch_sizes or given.batch_sizes, num_rounds * len(given.own_steps)
    now = _Rehearsal(policy, given, given.own_steps, sizes).run(num_gradients)
    if not given.history_weight:
        return now
    then = _Rehearsal(policy, given, given.history, sizes).run(2 * num_gradients)
    share = given.history_weight
    return replace(now, time_to_accuracy_s=(1.0 - share) * now.time_to_accuracy_s + share * then.time_to_accuracy_s)


class _Rehearsal:
    """One policy's performance under way."""

    def __init__(
        self,
        policy: SyncPolicy[Any],
        given: Conditions,
        own_steps: Mapping[Rank, tuple[OwnStep, ...]],
        batch_sizes: tuple[int, ...] | None,
    ) -> None:
        self._policy = policy
        self._given = given
        self._state: Any = policy.init(given.ranks)
        self._exchange = _Exchange(policy, given)
        ranks = sorted(given.own_steps)
        sizes = batch_sizes or (given.batch_size,) * len(ranks)
        self._samples = dict(zip(ranks, sizes, strict=True))
        self._reference = given.batch_size * len(ranks)
        self._steps: dict[Rank, Iterator[OwnStep]] = {rank: cycle(own_steps[rank]) for rank in ranks}
        self._events: list[tuple[float, int, str, int]] = []  # time, sequence number, what, rank or token
        self._num_events = 0
        self._turn = dict.fromkeys(ranks, 0)  # sequence number of the event that each rank's gradient waits for
        self._begun = dict.fromkeys(ranks, (0, 0.0))  # version and distance at which each rank's gradient began
        self._made = dict.fromkeys(ranks, 0.0)  # samples in each rank's gradient
        self._version, self._distance = 0, 0.0
        self._last_s = self._progress = 0.0
        self._total_samples = self._total_staleness = self._total_distance = 0.0

    def run(self, num_gradients: int) -> Estimate:
        """Play until so many gradients have arrived, or more wakes than gradients show that nothing comes of it."""
        num_ticks = num_gradients
        for rank in self._steps:
            self._begin(rank, 0.0)
        while self._events and num_gradients > 0 and num_ticks >= 0:
            now_s, number, what, whose = heapq.heappop(self._events)
            if what == "tick":
                num_ticks -= 1
                self._feed(Tick(whose), now_s)
            elif self._turn[whose] != number:
                continue  # cancelled
            elif what == "computed":
                arrival_s = self._exchange.push(whose, now_s)
                if arrival_s > now_s:
                    self._turn[whose] = self._plan(arrival_s, "arrive", whose)
                    continue
                what = "arrive"
            if what == "arrive":
                num_gradients -= 1
                self._feed(Arrive(whose, _NEUTRAL if self._policy.wants_scores else None), now_s)
        if self._version == 0 or self._progress == 0.0:
            return Estimate(math.inf, 0.0, 0.0, math.inf)
        too_stale = self._total_distance > self._given.staleness_limit * self._total_samples
        needed = math.inf if too_stale else updates_needed(self._reference, self._given.noise_scale)
        return Estimate(
            self._last_s / self._version,
            self._total_samples / self._version,
            self._total_staleness / self._total_samples,
            needed * self._last_s / self._progress,
        )

    def _plan(self, at_s: float, what: str, whose: int) -> int:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, what, whose))
        return self._num_events

    def _begin(self, rank: Rank, now_s: float) -> None:
        """Compute the next gradient, from the parameters that the rank was released with."""
        work, samples = self._policy.work, self._samples[rank]
        own_s = sum(self._given.own_s(next(self._steps[rank]), samples) for _ in range(work.local_steps))
        if work.limit_s is not None and own_s > work.limit_s:
            pieces = min(_PIECES, int(work.limit_s / own_s * _PIECES) + 1)
            own_s, samples = own_s * pieces / _PIECES, samples * pieces / _PIECES
        self._made[rank] = samples
        self._turn[rank] = self._plan(now_s + own_s, "computed", rank)

    def _feed(self, event: Event, now_s: float) -> None:
        self._state, actions = self._policy.step(self._state, event)
        for action in actions:
            match action:
                case Apply():
                    self._apply(action, now_s)
                case Release(rank):
                    self._begun[rank] = self._version, self._distance
                    self._begin(rank, self._exchange.pull(rank, now_s))
                case Cancel(rank):
                    self._turn[rank] = 0
                case Wake(after_s, token):
                    self._plan(now_s + after_s, "tick", token)
                case Drop():
                    pass

    def _apply(self, action: Apply, now_s: float) -> None:
        self._last_s = self._exchange.reduce(action.ranks, now_s)
        samples = sum(self._made[rank] for rank in action.ranks)
        staleness = sum(self._made[rank] * (self._version - self._begun[rank][0]) for rank in action.ranks)
        distance = sum(self._made[rank] * (self._distance - self._begun[rank][1]) for rank in action.ranks) / samples
        scale = progress(self._given.lr_rule, samples, self._reference, self._given.noise_scale)
        scale *= self._policy.work.local_steps
        self._progress += scale / (1.0 + self._given.staleness_cost * distance)
        self._total_samples += samples
        self._total_staleness += staleness
        self._total_distance += distance * samples
        self._version += 1
        self._distance += scale


class _Exchange:
    """How long gradients and parameters travel, as far as the measured exchange among all ranks tells.

    A parameter server's port, and in a ring the port of whoever collects what cannot be all-reduced, passes one
    gradient after the other in either direction; an all-reduce among m ranks moves 2 (m - 1) / m of one.
    """

    def __init__(self, policy: SyncPolicy[Any], given: Conditions) -> None:
        num_ranks = len(given.own_steps)
        volume = 2.0 * (num_ranks - 1) / num_ranks
        self._unit_s = given.comm_s / volume if num_ranks > 1 else 0.0  # a ring's time for one gradient's bytes
        self._port_s = given.comm_s / (2 * num_ranks) if given.arch == "ps" else self._unit_s
        attached = _attached(policy)
        self._attached = attached or frozenset()
        self._has_hub = given.arch == "ps" or (attached is None and policy.staleness_bound != 0)
        self._in_free_s = self._out_free_s = self._ready_s = 0.0
        self._members: frozenset[Rank] = frozenset()

    def push(self, rank: Rank, now_s: float) -> float:
        """When a gradient that is finished now arrives."""
        if self._has_hub:
            self._in_free_s = max(self._in_free_s, now_s) + self._port_s
            return self._in_free_s
        return now_s + self._port_s if rank in self._attached else now_s

    def reduce(self, ranks: tuple[Rank, ...], now_s: float) -> float:
        """When an update of these ranks' gradients, which have arrived, is made."""
        if self._has_hub:
            return now_s
        self._members = frozenset(ranks) - self._attached
        m = max(1, len(self._members))
        self._ready_s = max(self._ready_s, now_s) + self._unit_s * 2.0 * (m - 1) / m
        return self._ready_s

    def pull(self, rank: Rank, now_s: float) -> float:
        """When a rank that is released now has the parameters."""
        if self._has_hub:
            self._out_free_s = max(self._out_free_s, now_s) + self._port_s
            return self._out_free_s
        ready_s = max(self._ready_s, now_s)
        return ready_s if rank in self._members else ready_s + self._port_s


def _attached(policy: SyncPolicy[Any]) -> frozenset[Rank] | None:
    """Ranks that a policy, or the one that it wraps, attaches to parents, with their clusters; None without a ring."""
    parent_of = getattr(policy, "parent_of", None)
    if parent_of is None:
        return _attached(policy.inner) if hasattr(policy, "inner") else None
    return frozenset(parent_of).union(*getattr(policy, "clusters", ()))
