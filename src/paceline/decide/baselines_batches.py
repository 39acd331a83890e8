"""LB-BSP, which resizes batches at barriers: turns the ranks' speeds into uneven batches of an unchanged sum. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from paceline.decide.baselines_course import Course, check_setup, is_usable
from paceline.decide.batches import balanced_batches, slowest_s
from paceline.decide.estimate import LrRule
from paceline.decide.plan import Adopted, Decision, Observation
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.predict.forecast import Ewma, Forecaster
from paceline.types import Rank, StepTiming


@dataclass(frozen=True, slots=True)
class LbBspState:
    """The course, the forecasts of every rank's time per sample, and who has reported since the last look at them."""

    course: Course
    forecasts: Any
    reported: frozenset[Rank] = frozenset()


@dataclass(frozen=True, slots=True)
class LbBsp:
    """LB-BSP on CPUs: at every barrier, batches in proportion to the ranks' predicted speeds.

    min max_i b_i / v_i with sum b_i = N b, solved exactly (`balanced_batches`); v_i = 1 / forecast time per sample.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient at the start.
        least: Smallest batch of a rank, samples, 1..batch_size.
        most: Largest one, e.g. what memory allows, >= batch_size; None for no bound.
        min_gain: A new allocation must promise at least this ratio of step time, >= 1; 1 for the source's rule.
        forecaster: Predicts the time per sample.
        lr_rule: The global batch does not change, so linear and square root rule both leave the learning rate alone.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        LB-BSP (arXiv 1806.02508, SoCC'20): time proportional to the batch, batches proportional to speed, averaging
        weighted by batch. Ours differs: speeds come from the same moving average as our own decisions use, not from
        NARX, a recurrent network over speed, CPU and memory; the allocation is the exact minimum; `min_gain` keeps
        noise from changing batches at every barrier; and a change takes effect two barriers later.

    Example:
        >>> decider = LbBsp(num_ranks=4, batch_size=32)
        >>> state, decisions = decider.init(), ()
        >>> for rank in range(4):
        ...     own = 0.5 if rank == 2 else 0.05
        ...     state, decisions = decider.step(state, StepTiming(rank, 1, 0.0, backward_s=own, samples=32))
        >>> decisions[0].batch_sizes, round(decisions[0].predicted_gain, 1)
        ((42, 41, 4, 41), 7.6)
    """

    num_ranks: int
    batch_size: int
    least: int = 1
    most: int | None = None
    min_gain: float = 1.05
    forecaster: Forecaster[Any] = field(default_factory=Ewma)
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        check_batch_bounds(self.batch_size, self.least, self.most)
        if not self.min_gain >= 1:
            raise ValueError(f"min_gain must be >= 1, got {self.min_gain}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """Everybody in step, with even batches."""
        return BSP()

    def init(self) -> LbBspState:
        """Return the state before the first step."""
        course = Course.begin(BSP(), self.num_ranks, self.batch_size)
        return LbBspState(course, self.forecaster.init(frozenset(range(self.num_ranks))))

    def step(self, state: LbBspState, seen: Observation) -> tuple[LbBspState, tuple[Decision, ...]]:
        """Look at the speeds whenever every rank has reported, that is at every barrier."""
        course = state.course.take_in(seen, keep=1)
        state = replace(state, course=course)
        if isinstance(seen, Adopted):
            return replace(state, reported=frozenset()), ()
        if not isinstance(seen, StepTiming) or not is_usable(seen, self.num_ranks):
            return state, ()
        # The forecaster predicts times per step; a step of one sample makes that the time per sample.
        per_sample = StepTiming(seen.rank, seen.step, seen.started_s, other_s=seen.own_s / samples_of(seen, course))
        forecasts = self.forecaster.observe(state.forecasts, per_sample)
        state = replace(state, forecasts=forecasts, reported=state.reported | {seen.rank})
        if course.pending is not None or len(state.reported) < self.num_ranks:
            return state, ()
        return self._at_barrier(replace(state, reported=frozenset()))

    def _at_barrier(self, state: LbBspState) -> tuple[LbBspState, tuple[Decision, ...]]:
        course = state.course
        times = [self.forecaster.forecast(state.forecasts, rank) for rank in range(self.num_ranks)]
        speeds = [1.0 / time.mean_s for time in times if time is not None]
        assert len(speeds) == self.num_ranks, "every rank has reported"
        batches = balanced_batches(speeds, course.reference_samples, self.least, self.most)
        gain = slowest_s(course.batch_sizes, speeds) / slowest_s(batches, speeds)
        if batches == course.batch_sizes or gain < self.min_gain:
            return state, ()
        reason = f"batches of {min(batches)} to {max(batches)} in proportion to speed: predicted {gain:.2f}x per step"
        course, plans = course.propose(BSP(), reason, gain=gain, batch_sizes=batches)
        return replace(state, course=course), plans


@dataclass(frozen=True, slots=True)
class LbBspGpuState:
    """The course, how much to move next and after how many steps, and the last move (from, to)."""

    course: Course
    delta: int
    window_steps: int
    last: tuple[Rank, Rank] | None = None


@dataclass(frozen=True, slots=True)
class LbBspGpu:
    """LB-BSP on GPUs, where time is not proportional to the batch: move samples from the slowest to the fastest rank.

    Every window: delta samples go from the rank with the largest mean own time to the one with the smallest that has
    room for them. Where that undoes the last move (oscillation), delta is halved and the window doubled first.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient at the start.
        delta: Samples moved at first, >= 1; None for an eighth of the batch.
        window_steps: Steps looked at between moves at first, >= 1.
        most_window_steps: The window grows no further, >= window_steps.
        least: Smallest batch of a rank, samples, 1..batch_size.
        most: Largest one, e.g. what memory allows, >= batch_size; None for no bound.
        min_ratio: Nothing moves while slowest over fastest is below this, >= 1; 1 for the source's rule.
        lr_rule: The global batch does not change, so the linear rule leaves the learning rate alone.

    Raises:
        ValueError: a parameter out of its range.

    Source:
        LB-BSP (arXiv 1806.02508, SoCC'20), GPU part. Ours differs: its delta and window were not at hand, so these
        are ours, and so is `min_ratio`, which keeps noise from moving samples to and fro.

    Example:
        >>> decider = LbBspGpu(num_ranks=2, batch_size=32, window_steps=1)
        >>> state, decisions = decider.init(), ()
        >>> for rank, own in ((0, 0.05), (1, 0.1)):
        ...     state, decisions = decider.step(state, StepTiming(rank, 1, 0.0, backward_s=own, samples=32))
        >>> decisions[0].batch_sizes, decisions[0].reason
        ((36, 28), '4 samples from rank 1 (100 ms per step) to rank 0 (50 ms)')
    """

    num_ranks: int
    batch_size: int
    delta: int | None = None
    window_steps: int = 10
    most_window_steps: int = 80
    least: int = 1
    most: int | None = None
    min_ratio: float = 1.05
    lr_rule: LrRule = "linear"

    def __post_init__(self) -> None:
        check_setup(self.num_ranks, self.batch_size)
        check_batch_bounds(self.batch_size, self.least, self.most)
        if self.delta is not None and self.delta < 1:
            raise ValueError(f"delta must be >= 1, got {self.delta}")
        if not 1 <= self.window_steps <= self.most_window_steps:
            raise ValueError(
                f"wanted 1 <= window_steps <= most_window_steps, got {self.window_steps} and {self.most_window_steps}"
            )
        if not self.min_ratio >= 1:
            raise ValueError(f"min_ratio must be >= 1, got {self.min_ratio}")

    @property
    def initial(self) -> SyncPolicy[Any]:
        """Everybody in step, with even batches."""
        return BSP()

    def init(self) -> LbBspGpuState:
        """Return the state before the first step."""
        delta = max(1, self.batch_size // 8) if self.delta is None else self.delta
        return LbBspGpuState(Course.begin(BSP(), self.num_ranks, self.batch_size), delta, self.window_steps)

    def step(self, state: LbBspGpuState, seen: Observation) -> tuple[LbBspGpuState, tuple[Decision, ...]]:
        """Move samples whenever a window with the present batches is full."""
        course = state.course.take_in(seen, self.most_window_steps)
        state = replace(state, course=course)
        means = course.mean_own_s(state.window_steps) if isinstance(seen, StepTiming) else None
        if means is None or course.pending is not None:
            return state, ()
        slowest = max(range(self.num_ranks), key=lambda rank: (means[rank], -rank))
        room = [r for r in range(self.num_ranks) if self.most is None or course.batch_sizes[r] < self.most]
        fastest = min(room, key=lambda rank: (means[rank], rank), default=slowest)
        if means[slowest] < self.min_ratio * means[fastest] or slowest == fastest:
            return state, ()
        if state.last == (fastest, slowest):
            window = min(2 * state.window_steps, self.most_window_steps)
            state = replace(state, delta=max(1, state.delta // 2), window_steps=window, last=None)
            return state, ()  # whether the imbalance is real shows after the longer window
        return self._move(state, slowest, fastest, means)

    def _move(
        self, state: LbBspGpuState, slowest: Rank, fastest: Rank, means: tuple[float, ...]
    ) -> tuple[LbBspGpuState, tuple[Decision, ...]]:
        sizes = list(state.course.batch_sizes)
        room = state.delta if self.most is None else self.most - sizes[fastest]
        moved = min(state.delta, sizes[slowest] - self.least, room)
        if moved < 1:
            return state, ()
        sizes[slowest] -= moved
        sizes[fastest] += moved
        reason = (
            f"{moved} {'sample' if moved == 1 else 'samples'} from rank {slowest} "
            f"({means[slowest] * 1e3:.0f} ms per step) to rank {fastest} ({means[fastest] * 1e3:.0f} ms)"
        )
        course, plans = state.course.propose(BSP(), reason, batch_sizes=tuple(sizes))
        return replace(state, course=course, last=(slowest, fastest)), plans


def samples_of(timing: StepTiming, course: Course) -> int:
    """Samples trained in the step; where the timing does not know, what the rank's batch is."""
    return timing.samples if timing.samples > 0 else course.batch_sizes[timing.rank]


def check_batch_bounds(batch_size: int, least: int, most: int | None) -> None:
    """Refuse bounds that the batches at the start do not meet.

    Raises:
        ValueError: not 1 <= least <= batch_size <= most.
    """
    if not 1 <= least <= batch_size or (most is not None and most < batch_size):
        raise ValueError(f"wanted 1 <= least <= batch_size <= most, got {least}, {batch_size} and {most}")
