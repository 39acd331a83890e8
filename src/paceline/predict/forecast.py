"""What comes next: turns a rank's past own times into a forecast of its next ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Protocol, TypeVar

from paceline.types import Forecast, Rank, StepTiming

S = TypeVar("S")


class Forecaster(Protocol[S]):
    """Predicts a rank's own time per step. State is a value: `observe` returns a new one."""

    def init(self, ranks: frozenset[Rank]) -> S:
        """Return the state before the first step."""
        ...

    def observe(self, state: S, timing: StepTiming) -> S:
        """Take in one step of one rank."""
        ...

    def forecast(self, state: S, rank: Rank) -> Forecast | None:
        """Return the forecast, or None while nothing is known about the rank."""
        ...


@dataclass(frozen=True, slots=True)
class LastValue:
    """The next own time is like the last ones: mean of a short window.

    Args:
        num_steps: Window length, steps, >= 1.

    Example:
        >>> forecaster = LastValue(num_steps=2)
        >>> state = forecaster.init(frozenset({0}))
        >>> for own in (0.5, 0.1, 0.3):
        ...     state = forecaster.observe(state, StepTiming(0, 1, 0.0, backward_s=own))
        >>> forecaster.forecast(state, 0).mean_s
        0.2
    """

    num_steps: int = 3

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be >= 1, got {self.num_steps}")

    def init(self, ranks: frozenset[Rank]) -> Mapping[Rank, tuple[float, ...]]:
        """Return the state before the first step."""
        return dict.fromkeys(ranks, ())

    def observe(self, state: Mapping[Rank, tuple[float, ...]], timing: StepTiming) -> Mapping[Rank, tuple[float, ...]]:
        """Take in one step of one rank."""
        return {**state, timing.rank: (*state.get(timing.rank, ()), timing.own_s)[-self.num_steps :]}

    def forecast(self, state: Mapping[Rank, tuple[float, ...]], rank: Rank) -> Forecast | None:
        """Return mean and spread of the window, or None while it is empty."""
        window = state.get(rank, ())
        return Forecast(fmean(window), pstdev(window), len(window)) if window else None


@dataclass(frozen=True, slots=True)
class Ewma:
    """Exponentially weighted mean and variance, restarted when the level jumps.

    A jump is `num_jump` steps in a row on the same side of the mean before them by more than `jump_ratio`: the old
    level says nothing about the new one, so the mean restarts there instead of creeping.

    Args:
        decay: Weight of the past per step, 0 <= decay < 1.
        jump_ratio: Relative distance from the mean that counts as off, > 0.
        num_jump: Steps in a row that make a jump, >= 1.

    Source:
        Ours; STAR's own finding that iteration times fluctuate and cluster is why the restart is there.

    Example:
        >>> forecaster = Ewma()
        >>> state = forecaster.init(frozenset({0}))
        >>> for own in [0.05] * 9 + [0.25] * 3:
        ...     state = forecaster.observe(state, StepTiming(0, 1, 0.0, backward_s=own))
        >>> round(forecaster.forecast(state, 0).mean_s, 3)
        0.25
    """

    decay: float = 0.8
    jump_ratio: float = 0.5
    num_jump: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")
        if self.jump_ratio <= 0 or self.num_jump < 1:
            raise ValueError(f"wanted jump_ratio > 0 and num_jump >= 1, got {self.jump_ratio} and {self.num_jump}")

    def init(self, ranks: frozenset[Rank]) -> Mapping[Rank, EwmaState]:
        """Return the state before the first step."""
        return {rank: EwmaState() for rank in ranks}

    def observe(self, state: Mapping[Rank, EwmaState], timing: StepTiming) -> Mapping[Rank, EwmaState]:
        """Take in one step of one rank."""
        old = state.get(timing.rank, EwmaState())
        return {**state, timing.rank: self._next(old, timing.own_s)}

    def forecast(self, state: Mapping[Rank, EwmaState], rank: Rank) -> Forecast | None:
        """Return mean and spread, or None while the rank is unknown."""
        seen = state.get(rank)
        if seen is None or seen.num_samples == 0:
            return None
        return Forecast(seen.mean_s, math.sqrt(max(0.0, seen.variance)), seen.num_samples)

    def _next(self, old: EwmaState, own_s: float) -> EwmaState:
        if old.num_samples == 0:
            return EwmaState(own_s, 0.0, 1)
        # Steps that may be a jump are held against the level before them: they themselves move the mean.
        level = old.level_s if old.off else old.mean_s
        is_off = abs(own_s - level) > self.jump_ratio * level
        same_side = all((t > level) == (own_s > level) for t in old.off)
        off = ((*old.off, own_s) if same_side else (own_s,)) if is_off else ()
        if len(off) >= self.num_jump:
            return EwmaState(fmean(off), pstdev(off) ** 2, len(off))
        delta = own_s - old.mean_s
        fresh = max(1.0 - self.decay, 1.0 / (old.num_samples + 1))  # a plain mean until the window is full
        mean = old.mean_s + fresh * delta
        variance = (1.0 - fresh) * (old.variance + fresh * delta * delta)
        return EwmaState(mean, variance, old.num_samples + 1, off, level)


@dataclass(frozen=True, slots=True)
class EwmaState:
    """Running mean (seconds), variance (seconds^2), number of steps, the latest steps that were off, and off what."""

    mean_s: float = 0.0
    variance: float = 0.0
    num_samples: int = 0
    off: tuple[float, ...] = ()
    level_s: float = 0.0  # the mean before the first step in `off`
