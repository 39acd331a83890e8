"""Real training at virtual times: turns contributions of virtual ranks into the next version of a real model. Pure.

A virtual rank computes nothing. It is handed samples when it begins, and says later from which version it began; the
gradient is computed when an update takes it in, at exactly the parameters of that version, stale or not. A gradient
that is thrown away costs nothing, and ranks that began from the same version are computed as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.policy.base import Score
from paceline.predict.noise import NoiseEstimator
from paceline.sim.models import Vector, accuracy
from paceline.sim.optimizers import State, average_moments
from paceline.sim.tasks import Task
from paceline.types import NoiseScale, NormSample, Rank

_NUM_ORDERS = 4  # epochs whose order of samples is kept; others are made again when asked for
_NOISE_DECAY = 0.9  # of the estimate of the noise scale: about the last ten looks
_TRUSTED_SAMPLES = 128  # behind the trusted gradient that scores compare with
_TRUSTED_VERSIONS = 10  # how long one trusted gradient is used


@dataclass(frozen=True, slots=True)
class Draw:
    """Samples leased to one gradient: consecutive places in the endless stream of shuffled epochs.

    Args:
        start: First place, >= 0; place p is the (p mod n)-th sample of epoch p div n of n samples.
        num_samples: How many, >= 1.

    Raises:
        ValueError: no samples, or a negative start.
    """

    start: int
    num_samples: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_samples < 1:
            raise ValueError(f"a draw starts at 0 or later and has samples, got {self}")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brings to an update.

    Args:
        rank: Whose.
        version: Number of updates applied when it began: its parameters' version.
        draws: One: the gradient of the mean loss over them. Several: the change of its model by as many local steps.
        weight: Factor on its share of the sample-weighted mean.

    Raises:
        ValueError: no draws.
    """

    rank: Rank
    version: int
    draws: tuple[Draw, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.draws:
            raise ValueError(f"rank {self.rank} contributes nothing: no draws")

    @property
    def num_samples(self) -> int:
        """Samples in all of its draws."""
        return sum(draw.num_samples for draw in self.draws)


class Learner(Protocol):
    """The model that a simulated run trains. Versions count applied updates; version 0 is the initial model."""

    @property
    def num_samples_trained(self) -> int:
        """Samples in all updates so far."""
        ...

    def draw(self, rank: Rank, num_samples: int) -> Draw:
        """Lease samples to a rank that begins; every sample of an epoch goes out once, over all ranks."""
        ...

    def update(self, contributions: Sequence[Contribution], lr_scale: float) -> None:
        """Make the next version of these contributions, with this factor on the learning rate."""
        ...

    def forget(self, before_version: int) -> None:
        """Free older versions: nobody computes from them any more."""
        ...

    def score(self, contribution: Contribution) -> Score:
        """Compare a contribution's gradient with a trusted one."""
        ...

    def noise(self) -> NoiseScale | None:
        """Return the gradient noise scale; None while nothing is known."""
        ...

    def accuracy(self) -> float:
        """Return the newest version's accuracy on the test data, 0..1."""
        ...


class TaskLearner:
    """Trains a task's model, as its optimizer and its schedule (in samples trained) say.

    *Gradients.* g = sum_i w_i n_i g_i / sum_i n_i over the contributions i with n_i samples and weight w_i; then one
    step of the task's optimizer at rate lr(samples trained) * lr_scale. Nothing corrects momentum for staleness or
    damps stale gradients: that would be a rule of the mode, which says so by its weights and its `lr_scale`.

    *Local steps.* An update in which a contribution has several draws averages models. Every contribution takes one
    step per draw from its version on, with the task's optimizer, from the moments of that version, at the same rate.
    The parameters change by the weighted mean of the changes; the moments become the mean of the contributors'. With
    one draw each and plain momentum this is the update by gradients, up to rounding.

    Args:
        task: Model, data and how to train it.
        seed: Of the initial parameters and the order of samples, >= 0.
        noise_every: Updates between two looks at the noise scale, >= 1. A look costs the gradients of the ranks one
            by one instead of as one batch; it takes the next update with two contributions of one version.

    Raises:
        ValueError: a negative seed or `noise_every` below 1.
        ConfigError: the task's data needs a package that is not installed.

    Source:
        Local steps: Yu et al. 2019, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD", which
        averages parameters and momentum. Ours differs: contributions may be stale and carry weights.

    Example:
        >>> from paceline.sim.tasks import DIGITS
        >>> learner = TaskLearner(DIGITS, seed=1)
        >>> for version in range(20):
        ...     ranks = [Contribution(rank, version, (learner.draw(rank, 16),)) for rank in range(8)]
        ...     learner.update(ranks, lr_scale=1.0)
        ...     learner.forget(before_version=version + 1)
        >>> learner.num_samples_trained, learner.accuracy() > 0.7
        (2560, True)
    """

    def __init__(self, task: Task, seed: int = 0, noise_every: int = 20) -> None:
        if seed < 0 or noise_every < 1:
            raise ValueError(f"wanted seed >= 0 and noise_every >= 1, got {seed} and {noise_every}")
        self.task = task
        self.version = 0
        self._seed = seed
        self._noise_every = noise_every
        self._data = task.load()
        self._num_train = len(self._data.train_inputs)
        self._states: dict[int, State] = {0: task.optimizer.init(task.model.initial(seed))}
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._num_drawn = 0
        self._num_trained = 0
        self._noise = NoiseEstimator(decay=_NOISE_DECAY)
        self._next_look = 0
        self._scored: dict[tuple[int, Draw], Vector] = {}
        self._trusted: tuple[int, Vector] | None = None

    @property
    def num_samples_trained(self) -> int:
        """Samples in all updates so far."""
        return self._num_trained

    @property
    def num_epochs(self) -> float:
        """Samples trained, in epochs."""
        return self._num_trained / self._num_train

    @property
    def num_versions_held(self) -> int:
        """Versions whose parameters are kept."""
        return len(self._states)

    @property
    def lr(self) -> float:
        """The learning rate now, before any `lr_scale`."""
        return self.task.lr_at(self._num_trained)

    def parameters(self, version: int | None = None) -> Vector:
        """Return a version's parameters, read only; the newest by default.

        Raises:
            ValueError: a version that is not held.
        """
        view = self._state(self.version if version is None else version).parameters.view()
        view.flags.writeable = False
        return view

    def draw(self, rank: Rank, num_samples: int) -> Draw:  # noqa: ARG002 - one stream feeds all ranks
        """Lease the next samples of the stream; a draw may end in the next epoch.

        Raises:
            ValueError: less than one sample.
        """
        draw = Draw(self._num_drawn, num_samples)
        self._num_drawn += num_samples
        return draw

    def indices(self, draw: Draw) -> NDArray[np.int64]:
        """Return which training samples a draw stands for, shape (num_samples,)."""
        parts = []
        place, left = draw.start, draw.num_samples
        while left > 0:
            epoch, first = divmod(place, self._num_train)
            parts.append(self._order(epoch)[first : first + left])
            place += len(parts[-1])
            left -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def gradient(self, contribution: Contribution) -> Vector:
        """Return the gradient of the mean loss over the first draw, at the contribution's version.

        Raises:
            ValueError: the version is not held.
        """
        return self._batch_gradient(self._state(contribution.version), contribution.draws[:1])

    def update(self, contributions: Sequence[Contribution], lr_scale: float) -> None:
        """Make the next version.

        Args:
            contributions: At least one; of versions that are held.
            lr_scale: Factor on the learning rate, > 0.

        Raises:
            ValueError: no contributions, a version that was forgotten or is not there yet, or a factor that is not
                positive.
        """
        if not contributions or not lr_scale > 0:
            raise ValueError(f"an update needs contributions and lr_scale > 0, got {contributions} and {lr_scale}")
        rate = self.lr * lr_scale
        if any(len(c.draws) > 1 for c in contributions):
            state = self._average_models(contributions, rate)
        else:
            state = self.task.optimizer.step(self._states[self.version], self._mean_gradient(contributions), rate)
        self._num_trained += sum(c.num_samples for c in contributions)
        self.version += 1
        self._states[self.version] = state

    def forget(self, before_version: int) -> None:
        """Free the versions below `before_version`; the newest always stays."""
        for version in [v for v in self._states if v < min(before_version, self.version)]:
            del self._states[version]
        for key in [key for key in self._scored if key[0] < before_version]:
            del self._scored[key]

    def score(self, contribution: Contribution) -> Score:
        """Compare a contribution's gradient with a trusted one at the newest version.

        The trusted gradient is of samples drawn at random from the training data, and kept for ten versions. The
        contribution's own is kept until it is applied or forgotten, so scoring costs no second gradient.

        Source:
            Zeno++ (Xie et al. 2020): the server has a few samples of its own.
        """
        key = (contribution.version, contribution.draws[0])
        if key not in self._scored:
            self._scored[key] = self.gradient(contribution)
        gradient, trusted = self._scored[key], self._trusted_gradient()
        return Score(
            dot=float(gradient @ trusted),
            norm_sq=float(gradient @ gradient),
            trusted_norm_sq=float(trusted @ trusted),
            learning_rate=self.lr,
        )

    def noise(self) -> NoiseScale | None:
        """Return the gradient noise scale, smoothed over the looks so far; None before the first."""
        return self._noise.estimate() if self._noise.num_samples else None

    def accuracy(self) -> float:
        """Return the newest version's accuracy on the test data, 0..1."""
        state = self._states[self.version]
        return accuracy(self.task.model, state.parameters, self._data.test_inputs, self._data.test_targets)

    def _state(self, version: int) -> State:
        if version not in self._states:
            raise ValueError(f"version {version} is not held; held are {sorted(self._states)}")
        return self._states[version]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The order of an epoch's samples."""
        order = self._orders.get(epoch)
        if order is None:
            order = self.task.order(self._num_train, self._seed, epoch)
            while len(self._orders) >= _NUM_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order
        return order

    def _batch_gradient(self, state: State, draws: Sequence[Draw]) -> Vector:
        """The gradient of the mean loss over all samples of these draws."""
        parts = [self.indices(draw) for draw in draws]
        return self._gradient_of(state, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _gradient_of(self, state: State, samples: NDArray[np.int64]) -> Vector:
        inputs, targets = self._data.train_inputs.take(samples, 0), self._data.train_targets.take(samples, 0)
        return self.task.model.gradient(state.parameters, inputs, targets)

    def _mean_gradient(self, contributions: Sequence[Contribution]) -> Vector:
        """Sum of w_i n_i g_i over sum of n_i; one batch for each version and weight."""
        groups: dict[tuple[int, float], list[Contribution]] = {}
        for c in contributions:
            groups.setdefault((c.version, c.weight), []).append(c)
        num_samples = sum(c.num_samples for c in contributions)
        total: Vector | None = None
        for (version, weight), group in groups.items():
            gradient = self._group_gradient(self._state(version), group)
            share = weight * sum(c.num_samples for c in group) / num_samples
            if share != 1.0:
                gradient = gradient * np.float32(share)
            total = gradient if total is None else total + gradient
        assert total is not None
        return total

    def _group_gradient(self, state: State, group: Sequence[Contribution]) -> Vector:
        """The sample-weighted mean of gradients at one version: one batch, unless single ones are wanted or known."""
        looks = len(group) > 1 and self.version >= self._next_look
        if not looks and not self._scored:
            return self._batch_gradient(state, [c.draws[0] for c in group])
        known = [self._scored.pop((c.version, c.draws[0]), None) for c in group]
        gradients = [self.gradient(c) if g is None else g for c, g in zip(group, known, strict=True)]
        if len(group) == 1:
            return gradients[0]
        num_samples = sum(c.num_samples for c in group)
        mean: Vector = np.add.reduce(
            [g * np.float32(c.num_samples / num_samples) for c, g in zip(group, gradients, strict=True)]
        )
        if looks:
            self._look_at_noise(group, gradients, mean, num_samples)
        return mean

    def _look_at_noise(
        self, group: Sequence[Contribution], gradients: Sequence[Vector], mean: Vector, num_samples: int
    ) -> None:
        mean_sq = float(mean @ mean)
        self._noise = self._noise.observe(
            [
                NormSample(c.rank, self.version, float(g @ g), mean_sq, c.num_samples, num_samples)
                for c, g in zip(group, gradients, strict=True)
            ]
        )
        self._next_look = self.version + self._noise_every

    def _average_models(self, contributions: Sequence[Contribution], rate: float) -> State:
        """The newest parameters plus the weighted mean of the changes that local steps made."""
        now = self._states[self.version]
        num_samples = sum(c.num_samples for c in contributions)
        parameters = now.parameters
        ends: list[State] = []
        for c in contributions:
            begin = end = self._state(c.version)
            for draw in c.draws:
                end = self.task.optimizer.step(end, self._batch_gradient(end, (draw,)), rate)
            share = np.float32(c.weight * c.num_samples / num_samples)
            parameters = parameters + share * (end.parameters - begin.parameters)
            ends.append(end)
        moments = average_moments(ends, [c.num_samples / num_samples for c in contributions])
        return State(parameters, moments, max(now.num_steps, *(end.num_steps for end in ends)))

    def _trusted_gradient(self) -> Vector:
        """The gradient of the server's own samples, a few versions old at most."""
        if self._trusted is None or self.version >= self._trusted[0] + _TRUSTED_VERSIONS:
            rng = np.random.default_rng((self._seed, self.version, 1))
            samples = rng.integers(0, self._num_train, _TRUSTED_SAMPLES)
            self._trusted = (self.version, self._gradient_of(self._states[self.version], samples))
        return self._trusted[1]
