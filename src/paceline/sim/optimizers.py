"""Optimizers on flat vectors: turns parameters, their moments and a gradient into the next ones. Pure.

Nothing is changed in place: a state is a value, so that whoever holds an old version keeps it for the price of a
reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.sim.models import Vector


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A model in training.

    Args:
        parameters: Shape (num_parameters,).
        moments: What the optimizer remembers, each of the same shape.
        num_steps: Steps behind it.
    """

    parameters: Vector
    moments: tuple[Vector, ...]
    num_steps: int = 0


class Optimizer(Protocol):
    """Makes the next state from a gradient. A frozen dataclass is its own configuration."""

    def init(self, parameters: Vector) -> State:
        """Return the state before the first step."""
        ...

    def step(self, state: State, gradient: Vector, lr: float) -> State:
        """Return the state after one step at this learning rate."""
        ...


@dataclass(frozen=True, slots=True)
class SGD:
    """m <- momentum m + g;  p <- p - lr m.

    Args:
        momentum: 0 <= momentum < 1.

    Raises:
        ValueError: a momentum out of range.

    Source:
        torch.optim.SGD without dampening; like there, a change of the rate acts on the whole of m at once.

    Example:
        >>> sgd = SGD(momentum=0.5)
        >>> state = sgd.init(np.zeros(1, np.float32))
        >>> for _ in range(2):
        ...     state = sgd.step(state, np.ones(1, np.float32), lr=1.0)
        >>> float(state.parameters[0])
        -2.5
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")

    def init(self, parameters: Vector) -> State:
        """Return the state with a moment of zero."""
        return State(parameters, (np.zeros_like(parameters),))

    def step(self, state: State, gradient: Vector, lr: float) -> State:
        """Return the state after one step."""
        moment = state.moments[0] * np.float32(self.momentum)
        moment += gradient
        return State(state.parameters - np.float32(lr) * moment, (moment,), state.num_steps + 1)


@dataclass(frozen=True, slots=True)
class Adam:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr m' / (sqrt(v') + eps), ' = bias corrected.

    Args:
        beta1, beta2: Memory of the first and second moment, each in [0, 1).
        eps: Added to the root, > 0.

    Raises:
        ValueError: a value out of range.

    Source:
        Kingma & Ba 2015, as in torch.optim.Adam.

    Example:
        >>> adam = Adam()
        >>> state = adam.step(adam.init(np.zeros(1, np.float32)), np.full(1, 3, np.float32), lr=0.1)
        >>> round(float(state.parameters[0]), 4)
        -0.1
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0):
            raise ValueError(f"betas must be in [0, 1) and eps > 0, got {self}")

    def init(self, parameters: Vector) -> State:
        """Return the state with both moments zero."""
        return State(parameters, (np.zeros_like(parameters), np.zeros_like(parameters)))

    def step(self, state: State, gradient: Vector, lr: float) -> State:
        """Return the state after one step."""
        num_steps = state.num_steps + 1
        first = state.moments[0] * np.float32(self.beta1)
        first += np.float32(1 - self.beta1) * gradient
        second = state.moments[1] * np.float32(self.beta2)
        second += np.float32(1 - self.beta2) * (gradient * gradient)
        scale = np.sqrt(second)
        scale *= np.float32(1.0 / math.sqrt(1 - self.beta2**num_steps))
        scale += np.float32(self.eps)
        np.divide(first, scale, out=scale)
        scale *= np.float32(lr / (1 - self.beta1**num_steps))
        return State(state.parameters - scale, (first, second), num_steps)


def average_moments(states: Sequence[State], shares: Sequence[float]) -> tuple[Vector, ...]:
    """Return the mean of the states' moments, weighted by `shares`, which add up to 1."""
    return tuple(
        np.add.reduce([np.float32(share) * moment for share, moment in zip(shares, moments, strict=True)])
        for moments in zip(*(state.moments for state in states), strict=True)
    )
