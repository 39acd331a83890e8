"""Published methods that change mode once or twice: turn progress and stragglers into a switch of policy. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Literal

from paceline.decide.baselines_course import Course, check_setup
from paceline.decide.estimate import LrRule, lr_scale
from paceline.decide.plan import Decision, Observation
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.policy.local import LocalSGD
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP
from paceline.types import Rank, StepTiming, Update

BUDGET_GRADIENTS = 64_000
"""Length of a training in gradients where the caller names none: that of Sync-Switch's and of STAR's runs."""


def search_switch_point(run: Callable[[float], float], tolerance: float = 0.01, num_halvings: int = 5) -> float:
    """Return the least share of BSP that keeps BSP's accuracy, by binary search.

    Args:
        run: Trains with this share of the budget in BSP, 0..1, and returns the accuracy it converged to, 0..1. Noisy:
            let it average over several seeds.
        tolerance: How much below BSP's accuracy still keeps it, >= 0.
        num_halvings: Trainings after those with 1 and 0, >= 0; the answer is exact to 2^-num_halvings.

    Returns:
        A share in 0..1; 1.0 where only BSP does.

    Source:
        Sync-Switch (arXiv 2104.08364, ICDCS'21): offline, for jobs that come back; its answers were 6.25 %, 12.5 %
        and 50 %. The tolerance is ours (the paper's was not at hand), and so is trying plain ASP first.

    Example:
        >>> search_switch_point(lambda share: 0.92 if share >= 0.2 else 0.90)
        0.21875
    """
    wanted = run(1.0) - tolerance
    if run(0.0) >= wanted:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(num_halvings):
        middle = (low + high) / 2
        if run(middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class SyncSwitchState:
    """The course, the gradients applied in BSP, and who is taken for a straggler."""

    course: Course
    bsp_gradients: int = 0
    slow: frozenset[Rank] = frozenset()


@dataclass(frozen=True, slots=True)
class SyncSwitch:
    """Sync-Switch: BSP for a share of the training, ASP for the rest, and a rule for stragglers during BSP.

    greedy: ASP while a straggler is there, BSP again when none is; only gradients applied in BSP count for its share.
    elastic: the straggler is evicted and the others stay in BSP. An eviction is a ring without that rank, to which it
    is attached with a staleness bound of 0: nobody waits for it, and what it finishes late is dropped. Samples are
    leased when a gradient is begun, so the others train those that it does not come to take; the few in its hands are
    dropped and counted.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        on_straggler: Which rule.
        bsp_fraction: Share of the budget in BSP, 0..1; `search_switch_point` finds it.
        budget_gradients: Length of the training, gradients, >= 1.
        slow_ratio: A rank is a straggler from this multiple of the median rank's own time on, > 1.
        clear_ratio: ... and until it is below this one, in [1, slow_ratio].
        num_steps: Own times are means over so many steps, >= 1.
        readmits: Whether an evicted rank may come back before the switch.
        lr_rule: In BSP a batch N b goes with N eta, in ASP a batch b with eta: the linear rule.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        Sync-Switch (arXiv 2104.08364, ICDCS'21) and its repository: BSP first, greedy and elastic policies, batch and
        learning rate of both phases; 6.25 % is the answer of its search for ResNet-32 on CIFAR-10 with 8 workers.
        Ours differs: the detection rule (the paper's was not at hand), `readmits` (the paper brings evicted workers
        back in the ASP phase only; True favours the method), and switching in the process instead of by a checkpoint
        and a restart.

    Example:
        >>> decider = SyncSwitch(num_ranks=4, batch_size=32)
        >>> state = decider.init()
        >>> for step in range(1, 6):
        ...     for rank in range(4):
        ...         timing = StepTiming(rank, step, 0.0, backward_s=0.25 if rank == 2 else 0.05)
        ...         state, decisions = decider.step(state, timing)
        ...         for plan in decisions:
        ...             print(plan.policy, plan.lr_scale, plan.reason)
        ASP(max_staleness=None) 0.25 rank 2 slow: asynchronous until that is over
    """

    num_ranks: int
    batch_size: int
    on_straggler: Literal["greedy", "elastic"] = "greedy"
    bsp_fraction: float = 0.0625
    budget_gradients: int = BUDGET_GRADIENTS
    slow_ratio: float = 1.5
    clear_ratio: float = 1.2
    num_steps: int = 5
    readmits: bool = True
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        _check_share(self.bsp_fraction, self.budget_gradients)
        if self.on_straggler not in ("greedy", "elastic"):
            raise ValueError(f"on_straggler must be 'greedy' or 'elastic', got {self.on_straggler!r}")
        if not (1 <= self.clear_ratio <= self.slow_ratio and self.slow_ratio > 1):
            raise ValueError(f"wanted 1 <= clear_ratio <= slow_ratio > 1, got {self.clear_ratio}, {self.slow_ratio}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be >= 1, got {self.num_steps}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """BSP, unless its share is nothing."""
        return BSP() if self.bsp_fraction > 0 else ASP()

    def init(self) -> SyncSwitchState:
        """Return the state before the first step."""
        return SyncSwitchState(Course.begin(self.initial, self.num_ranks, self.batch_size))

    def step(self, state: SyncSwitchState, seen: Observation) -> tuple[SyncSwitchState, tuple[Decision, ...]]:
        """Switch for good when BSP's share is over; until then as the stragglers want it."""
        before, course = state.course, state.course.take_in(seen, self.num_steps)
        fresh = course.num_gradients - before.num_gradients
        counted = state.bsp_gradients + (0 if isinstance(before.policy, ASP) else fresh)
        state = SyncSwitchState(course, counted, state.slow)
        if isinstance(seen, StepTiming):
            state = replace(state, slow=self._stragglers(state))
        if course.pending is not None or not isinstance(seen, StepTiming | Update):
            return state, ()
        policy, reason = self._wanted(state)
        if policy == course.policy:
            return state, ()
        num_samples = (
            self.batch_size * len(policy.ring) if isinstance(policy, AttachedRing) else course.reference_samples
        )
        if isinstance(policy, ASP):
            num_samples = self.batch_size
        course, plans = course.propose(policy, reason, lr_scale(self.lr_rule, num_samples, course.reference_samples))
        return replace(state, course=course), plans

    def _wanted(self, state: SyncSwitchState) -> tuple[SyncPolicy[Any], str]:
        if state.bsp_gradients >= self.bsp_fraction * self.budget_gradients:
            return ASP(), f"{self.bsp_fraction:.1%} of the training went in step: asynchronous for the rest"
        if not state.slow:
            return BSP(), "no straggler is left: everybody in step again"
        slow = f"{'ranks' if len(state.slow) > 1 else 'rank'} {', '.join(map(str, sorted(state.slow)))} slow"
        if self.on_straggler == "greedy":
            return ASP(), f"{slow}: asynchronous until that is over"
        ring = tuple(rank for rank in range(self.num_ranks) if rank not in state.slow)
        parent_of = dict.fromkeys(sorted(state.slow), ring[0])
        return AttachedRing(ring, parent_of, max_staleness=0), f"{slow}: evicted, the others stay in step"

    def _stragglers(self, state: SyncSwitchState) -> frozenset[Rank]:
        means = state.course.mean_own_s(self.num_steps)
        if means is None:
            return state.slow
        reference = median_low(means)  # of two ranks the faster one
        slow = {
            rank
            for rank, mean in enumerate(means)
            if mean > reference * (self.clear_ratio if rank in state.slow else self.slow_ratio)
        }
        if self.on_straggler == "elastic" and not self.readmits:
            slow |= state.slow
        return frozenset(slow) if len(slow) < self.num_ranks else state.slow


@dataclass(frozen=True, slots=True)
class PostLocalSgd:
    """Post-local SGD: BSP for a share of the training, then models averaged every H steps.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        local_steps: H, >= 1.
        bsp_fraction: Share of the budget in BSP, 0..1.
        budget_gradients: Length of the training, gradients, >= 1.
        lr_rule: None: the source keeps the learning rate at the switch.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        Lin et al., Don't Use Large Mini-Batches, Use Local SGD (arXiv 1808.07217): switch at the first decay of the
        learning rate, here half the budget; H = 16 there with 16 workers. Ours differs: the switch is a share of the
        budget, whatever the learning rate does.

    Example:
        >>> decider = PostLocalSgd(num_ranks=2, batch_size=8, budget_gradients=8)
        >>> state, plans = decider.init(), []
        >>> for version in (1, 2):
        ...     seen = Update(version, contributions={0: 8, 1: 8}, dropped={}, staleness={}, lr_scale=1.0)
        ...     state, plans = decider.step(state, seen)
        >>> plans[0].reason
        '50.0% of the training went in step: from now on models are averaged every 16 steps'
    """

    num_ranks: int
    batch_size: int
    local_steps: int = 16
    bsp_fraction: float = 0.5
    budget_gradients: int = BUDGET_GRADIENTS
    lr_rule: LrRule = "none"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        _check_share(self.bsp_fraction, self.budget_gradients)
        if self.local_steps < 1:
            raise ValueError(f"local_steps must be >= 1, got {self.local_steps}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """BSP, unless its share is nothing."""
        return BSP() if self.bsp_fraction > 0 else self._local

    @property
    def _local(self) -> LocalSGD:
        return LocalSGD(self.local_steps, inner=BSP())

    def init(self) -> Course:
        """Return the state before the first step."""
        return Course.begin(self.initial, self.num_ranks, self.batch_size)

    def step(self, state: Course, seen: Observation) -> tuple[Course, tuple[Decision, ...]]:
        """Switch once, when BSP's share is over."""
        state = state.take_in(seen, keep=1)
        if not isinstance(seen, Update) or state.pending is not None or state.policy == self._local:
            return state, ()
        if state.num_gradients < self.bsp_fraction * self.budget_gradients:
            return state, ()
        reason = (
            f"{self.bsp_fraction:.1%} of the training went in step: "
            f"from now on models are averaged every {self.local_steps} steps"
        )
        return state.propose(self._local, reason)


def _check_share(bsp_fraction: float, budget_gradients: int) -> None:
    if not 0 <= bsp_fraction <= 1:
        raise ValueError(f"bsp_fraction must be in 0..1, got {bsp_fraction}")
    if budget_gradients < 1:
        raise ValueError(f"budget_gradients must be >= 1, got {budget_gradients}")
