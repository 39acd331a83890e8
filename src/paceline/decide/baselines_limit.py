"""DropCompute, which bounds the computing of a step: turns own times into a limit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.decide.baselines_course import Course, Rows, check_setup, comm_s
from paceline.decide.estimate import LrRule, lr_scale
from paceline.decide.plan import Decision, Observation
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.policy.local import DropCompute
from paceline.types import StepTiming


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on computing and what it brings.

    Args:
        limit_s: Seconds from a rank's release on.
        gain: Samples per second with it over those without, ratio.
        kept_ratio: Share of the samples still computed, 0..1.
    """

    limit_s: float
    gain: float
    kept_ratio: float


def compute_limit(rows: Rows, comm: float, num_micro: int, num_values: int = 200) -> Limit:
    """Return the limit on computing that gets most samples per second.

    A rank stops after the micro-batch in which the limit passes: of M equal ones with d seconds each it computes
    min(M, floor(limit / d) + 1). The limit maximises mean over steps of kept share * (time without / time with), a
    step's time being its slowest rank's plus the reduction.

    Args:
        rows: Own times without a limit, seconds, > 0; at least one row.
        comm: Time of the reduction, seconds, >= 0.
        num_micro: M, >= 1.
        num_values: Limits tried, evenly spread between the shortest time of half the micro-batches and the longest
            step, >= 2.

    Returns:
        The best of the limits tried; a gain of 1 or less says that none at all is better.

    Source:
        DropCompute (arXiv 2306.10598): 200 values, reduction included, from 6 of its 12 micro-batches on. Ours
        differs: micro-batches are taken for equal parts of the step, not timed one by one.

    Example:
        >>> best = compute_limit([[0.4, 0.4, 0.4, 4.0]], comm=0.0, num_micro=4)
        >>> round(best.limit_s, 2), best.gain, best.kept_ratio
        (0.31, 3.25, 0.8125)
    """
    own = np.asarray(rows, dtype=float)
    micro = own / num_micro
    half = max(1, num_micro // 2)
    limits = np.linspace(float(micro.min()) * half, float(own.max()), num_values)
    computed = np.minimum(num_micro, np.floor(limits[:, None, None] / micro) + 1)
    kept = computed.mean(axis=2) / num_micro
    with_limit = (computed * micro).max(axis=2) + comm
    without = own.max(axis=1) + comm
    gains = (kept * without / with_limit).mean(axis=1)
    best = int(gains.argmax())
    return Limit(float(limits[best]), float(gains[best]), float(kept[best].mean()))


@dataclass(frozen=True, slots=True)
class DropComputeTuned:
    """DropCompute: in every step a rank stops computing when a limit has passed, and contributes what it has.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        num_micro: Micro-batches per gradient, >= 1, as in the training; with 1 there is nothing to leave out.
        num_steps: Steps that the choice of the limit rests on, >= 1.
        min_gain: A limit must promise at least this ratio of samples per second, >= 1; 1 for the source's rule.
        retunes: Whether the limit is chosen again after every `num_steps` steps; False keeps the first, as published.
        lr_rule: Linear divides by the planned number of samples, so that updates shrink with what is dropped, as the
            public code does; "none" divides by the number of samples used.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        DropCompute (Giladi et al., NeurIPS 2023, arXiv 2306.10598), choice of the limit as in its public code: about
        50 steps, 200 values, M = 12. Ours differs: M as in our simulated trainings, `min_gain`, and `retunes`, which
        favours the method where slowness comes and goes; see also `compute_limit`.

    Example:
        >>> decider = DropComputeTuned(num_ranks=4, batch_size=8, num_steps=1)
        >>> state, decisions = decider.init(), ()
        >>> for rank in range(4):
        ...     timing = StepTiming(rank, 1, 0.0, backward_s=4.0 if rank == 2 else 0.4)
        ...     state, decisions = decider.step(state, timing)
        >>> decisions[0].reason
        'ranks stop computing after 315 ms: predicted 3.25x the samples per second'
    """

    num_ranks: int
    batch_size: int
    num_micro: int = 4
    num_steps: int = 50
    min_gain: float = 1.05
    retunes: bool = True
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        if self.num_micro < 1 or self.num_steps < 1:
            raise ValueError(f"num_micro and num_steps must be >= 1, got {self.num_micro} and {self.num_steps}")
        if not self.min_gain >= 1:
            raise ValueError(f"min_gain must be >= 1, got {self.min_gain}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """BSP without a limit."""
        return BSP()

    def init(self) -> Course:
        """Return the state before the first step."""
        return Course.begin(BSP(), self.num_ranks, self.batch_size)

    def step(self, state: Course, seen: Observation) -> tuple[Course, tuple[Decision, ...]]:
        """Choose the limit when every rank has shown enough steps since the last choice."""
        state = state.take_in(seen, self.num_steps)
        if not isinstance(seen, StepTiming) or state.pending is not None:
            return state, ()
        timings = state.rows(self.num_steps)
        if not timings or (isinstance(state.policy, DropCompute) and not self.retunes):
            return state, ()
        state = replace(state, recent={})
        whole = [[t.own_s * self._part_left_out(t) for t in row] for row in timings]
        best = compute_limit(whole, comm_s(timings), self.num_micro)
        if best.gain < self.min_gain:
            if isinstance(state.policy, BSP):
                return state, ()
            return state.propose(BSP(), "no limit on computing pays any more: everybody computes everything")
        reason = (
            f"ranks stop computing after {best.limit_s * 1e3:.0f} ms: predicted {best.gain:.2f}x the samples per second"
        )
        scale = lr_scale(self.lr_rule, best.kept_ratio, 1.0)
        return state.propose(DropCompute(best.limit_s, inner=BSP()), reason, scale, best.gain)

    def _part_left_out(self, timing: StepTiming) -> float:
        """How much longer the step would have taken without a limit, ratio >= 1."""
        return max(1.0, self.batch_size / timing.samples) if timing.samples > 0 else 1.0
