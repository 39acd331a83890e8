"""Published methods that do not wait for everybody: turn own times into a quorum. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.decide.baselines_course import Course, Rows, check_setup, comm_s
from paceline.decide.estimate import LrRule, lr_scale, updates_needed
from paceline.decide.plan import Decision, Observation
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.types import NoiseScale, StepTiming, Update

_LEAST_ROWS = 5  # steps of every rank before a choice rests on them


def quorum_rates(rows: Rows, comm: float = 0.0) -> tuple[float, ...]:
    """Return the gradients per second of K-sync for K = 1..N: K / (mean K-th smallest own time + reduction).

    Args:
        rows: Own times, seconds, > 0; at least one row.
        comm: Time of the reduction, seconds, >= 0.

    Source:
        Dutta et al. 2018 (arXiv 1803.01113): E[T] is the mean K-th order statistic. Ours takes it from what was
        observed instead of from a fitted distribution.

    Example:
        >>> [round(rate, 1) for rate in quorum_rates([[0.1, 0.1, 0.2, 1.0]])]
        [10.0, 20.0, 15.0, 4.0]
    """
    in_order = np.sort(np.asarray(rows, dtype=float), axis=1).mean(axis=0)
    return tuple(k / (float(time_s) + comm) for k, time_s in enumerate(in_order, start=1))


def late_join_costs(
    rows: Rows, comm: float, batch_size: int, noise_scale: float, staleness_cost: float
) -> tuple[float, ...]:
    """Return the time per unit of progress of LGC for K = 1..N; lower is better.

    T(K) = t_K * n(batch per update) * (1 + lambda * mean staleness), where t_K is the mean K-th smallest own time plus
    the reduction. A rank that needs t > t_K for its gradient is in every ceil(t / t_K)-th update and as stale.

    Args:
        rows: Own times, seconds, > 0; at least one row.
        comm: Time of the reduction, seconds, >= 0.
        batch_size: Samples per rank and gradient, > 0.
        noise_scale: Samples, >= 0.
        staleness_cost: lambda, extra updates per version of mean staleness, ratio, >= 0.

    Source:
        LGC balances time against error by its choice of K; its bound was not at hand, so the criterion is the one of
        our own selector.

    Example:
        >>> costs = late_join_costs([[0.1, 0.1, 0.1, 1.0]], 0.0, batch_size=8, noise_scale=32.0, staleness_cost=0.1)
        >>> [round(cost, 2) for cost in costs]
        [0.24, 0.24, 0.24, 2.0]
    """
    own = np.asarray(rows, dtype=float)
    intervals = np.sort(own, axis=1).mean(axis=0) + comm
    # By K, step and rank: in every how many-th update this gradient is. Rounding must not make it late.
    every = np.maximum(1.0, np.ceil((own + comm) / intervals[:, None, None] - 1e-9))
    share = (1.0 / every).sum(axis=2).mean(axis=1)
    stale = (1.0 - 1.0 / every).sum(axis=2).mean(axis=1)
    return tuple(
        float(interval * updates_needed(batch_size * s, noise_scale) * (1.0 + staleness_cost * late / s))
        for interval, s, late in zip(intervals, share, stale, strict=True)
    )


@dataclass(frozen=True, slots=True)
class LgcState:
    """The course, and the noise scale in samples once it is known."""

    course: Course
    noise: float | None = None


@dataclass(frozen=True, slots=True)
class Lgc:
    """LGC, live gradient compensation: an update is the K fastest gradients and the late ones of before.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        k: K, 1..num_ranks; None to search: everybody in step at first, then the K with the least `late_join_costs` on
            the newest own times, chosen anew as these change.
        num_steps: Newest steps of every rank that the search looks at, >= 5.
        min_gain: Another K must promise at least this ratio, >= 1.
        keep_gain: A K below N is given up for BSP when it is worth less than this over BSP, in [1, min_gain].
        staleness_cost: lambda in the search, >= 0; 0 for time and batch alone.
        lr_rule: Linear makes the update eta / N times the sum of fast and late gradients, as published.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        LGC (Xu et al., INFOCOM 2021). Ours differs: the search for K (see `late_join_costs`) goes on during the run;
        late gradients join the first update after they arrive, however late, as batches are not cut into blocks.

    Example:
        >>> decider = Lgc(num_ranks=4, batch_size=8)
        >>> state = decider.init()
        >>> for step in range(1, 6):
        ...     for rank in range(4):
        ...         timing = StepTiming(rank, step, 0.0, backward_s=1.0 if rank == 2 else 0.1)
        ...         state, _ = decider.step(state, timing)
        >>> seen = Update(5, contributions=dict.fromkeys(range(4), 8), dropped={}, staleness={}, lr_scale=1.0)
        >>> plans = decider.step(state, seen)[1]
        >>> plans[0].policy, plans[0].reason
        (KSync(k=3, late='join_next'), 'waiting for 3 of 4, late gradients join the next update: predicted 8.49x')
    """

    num_ranks: int
    batch_size: int
    k: int | None = None
    num_steps: int = 20
    min_gain: float = 1.05
    keep_gain: float = 1.02
    staleness_cost: float = 0.1
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        _check_search(self.k, self.num_ranks, self.num_steps, self.min_gain)
        if not 1 <= self.keep_gain <= self.min_gain:
            raise ValueError(f"wanted 1 <= keep_gain <= min_gain, got {self.keep_gain} and {self.min_gain}")
        if not self.staleness_cost >= 0:
            raise ValueError(f"staleness_cost must be >= 0, got {self.staleness_cost}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """BSP while K is searched for."""
        return _late_join(self.num_ranks if self.k is None else self.k, self.num_ranks)

    def init(self) -> LgcState:
        """Return the state before the first step."""
        return LgcState(Course.begin(self.initial, self.num_ranks, self.batch_size))

    def step(self, state: LgcState, seen: Observation) -> tuple[LgcState, tuple[Decision, ...]]:
        """Choose K again at every update, on what the ranks have shown since the last plan."""
        course = state.course.take_in(seen, self.num_steps)
        noise = seen.value if isinstance(seen, NoiseScale) and seen.value >= 0 else state.noise
        state = LgcState(course, noise)
        if self.k is not None or course.pending is not None or not isinstance(seen, Update):
            return state, ()
        timings = course.rows(_LEAST_ROWS)
        if not timings:
            return state, ()
        rows = [[t.own_s for t in row] for row in timings]
        # Before the noise scale is known, assume it equals the batch: half way between the two extremes.
        noise_scale = float(course.reference_samples) if noise is None else noise
        costs = late_join_costs(rows, comm_s(timings), self.batch_size, noise_scale, self.staleness_cost)
        best = min(range(1, self.num_ranks + 1), key=lambda k: (costs[k - 1], -k))
        now = course.policy.k if isinstance(course.policy, KSync) else self.num_ranks
        gain = costs[now - 1] / costs[best - 1]
        worth = costs[-1] / costs[now - 1]
        if best != now and gain >= self.min_gain:
            waiting = f"waiting for {best} of {self.num_ranks}, late gradients join the next update"
            reason = f"{waiting}: predicted {gain:.2f}x"
        elif now < self.num_ranks and worth < self.keep_gain:
            best, gain = self.num_ranks, 1.0 / worth
            reason = f"not waiting for all is worth only {worth:.2f}x: everybody in step again"
        else:
            return state, ()
        scale = lr_scale(self.lr_rule, self.batch_size * best, course.reference_samples)  # without the late ones
        course, plans = course.propose(_late_join(best, self.num_ranks), reason, scale, gain)
        return replace(state, course=course), plans


def _late_join(k: int, num_ranks: int) -> SyncPolicy[Any]:
    return BSP() if k == num_ranks else KSync(k, late="join_next")


@dataclass(frozen=True, slots=True)
class KSyncCancel:
    """K-sync: an update is the K fastest gradients, the others give theirs up. K gets the most samples per second.

    The search needs own times of all ranks, and a rank that always gives up has none. So it begins in BSP, and every
    `probe_every` updates late gradients are let finish and dropped until every rank has shown its time again.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        k: K, 1..num_ranks; None to search.
        num_steps: Newest steps of every rank that the search looks at, >= 5.
        probe_every: Updates from one search to the next while somebody is left out, >= 1; None to search only once.
        min_gain: Leaving anybody out must promise at least this ratio of samples per second, >= 1.
        lr_rule: Linear: eta K / N.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        Dutta et al. 2018 (arXiv 1803.01113). Ours differs: K by observed throughput (`quorum_rates`), searched anew
        during the run; theirs is fixed, and AdaSync's raises it as the loss falls.

    Example:
        >>> decider = KSyncCancel(num_ranks=4, batch_size=8)
        >>> state = decider.init()
        >>> for step in range(1, 6):
        ...     for rank in range(4):
        ...         timing = StepTiming(rank, step, 0.0, backward_s=1.0 if rank == 2 else 0.1)
        ...         state, _ = decider.step(state, timing)
        >>> seen = Update(5, contributions=dict.fromkeys(range(4), 8), dropped={}, staleness={}, lr_scale=1.0)
        >>> plans = decider.step(state, seen)[1]
        >>> plans[0].policy, plans[0].lr_scale, plans[0].reason
        (KSync(k=3, late='cancel'), 0.75, 'the fastest 3 of 4 get 7.50x the samples per second of all')
    """

    num_ranks: int
    batch_size: int
    k: int | None = None
    num_steps: int = 20
    probe_every: int | None = 200
    min_gain: float = 1.05
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        _check_search(self.k, self.num_ranks, self.num_steps, self.min_gain)
        if self.probe_every is not None and self.probe_every < 1:
            raise ValueError(f"probe_every must be >= 1 or None, got {self.probe_every}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """BSP while K is searched for."""
        return BSP() if self.k in (None, self.num_ranks) else KSync(self.k, late="cancel")

    def init(self) -> Course:
        """Return the state before the first step."""
        return Course.begin(self.initial, self.num_ranks, self.batch_size)

    def step(self, state: Course, seen: Observation) -> tuple[Course, tuple[Decision, ...]]:
        """Search while everybody can be seen; while somebody gives up, look again now and then."""
        state = state.take_in(seen, self.num_steps)
        if self.k is not None or state.pending is not None or not isinstance(seen, Update):
            return state, ()
        match state.policy:
            case KSync(k, late="cancel"):
                return self._look_again(state, k)
        timings = state.rows(_LEAST_ROWS)
        return self._search(state, timings) if timings else (state, ())

    def _look_again(self, state: Course, k: int) -> tuple[Course, tuple[Decision, ...]]:
        if self.probe_every is None or state.version < state.since_version + self.probe_every:
            return state, ()
        reason = "late gradients may finish for a while, to see whether their ranks are still slow"
        return state.propose(KSync(k, late="drop"), reason, self._lr_scale(k))

    def _search(self, state: Course, timings: list[tuple[StepTiming, ...]]) -> tuple[Course, tuple[Decision, ...]]:
        rates = quorum_rates([[t.own_s for t in row] for row in timings], comm_s(timings))
        best = max(range(1, self.num_ranks + 1), key=lambda k: (rates[k - 1], k))
        gain = rates[best - 1] / rates[-1]
        if best == self.num_ranks or gain < self.min_gain:
            if isinstance(state.policy, BSP):
                return state, ()
            return state.propose(BSP(), "nobody is worth leaving out any more: everybody in step again")
        reason = f"the fastest {best} of {self.num_ranks} get {gain:.2f}x the samples per second of all"
        return state.propose(KSync(best, late="cancel"), reason, self._lr_scale(best), gain)

    def _lr_scale(self, k: int) -> float:
        return lr_scale(self.lr_rule, self.batch_size * k, self.batch_size * self.num_ranks)


def _check_search(k: int | None, num_ranks: int, num_steps: int, min_gain: float) -> None:
    if k is not None and not 1 <= k <= num_ranks:
        raise ValueError(f"k must be in 1..{num_ranks} or None, got {k}")
    if num_steps < _LEAST_ROWS:
        raise ValueError(f"num_steps must be >= {_LEAST_ROWS}, got {num_steps}")
    if not min_gain >= 1:
        raise ValueError(f"min_gain must be >= 1, got {min_gain}")
