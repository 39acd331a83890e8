"""The demo's training for the simulator: turns its torch model and data into a task that trains in virtual time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.demo.task import LR_FACTOR, NUM_TRAIN, TaskConfig, build_model, digits
from paceline.sim.datasets import Dataset
from paceline.sim.models import Array, Labels, Shape, Vector
from paceline.sim.optimizers import Adam
from paceline.sim.tasks import Task


@dataclass(frozen=True, slots=True)
class TorchCNN:
    """The demo's CNN as the simulator wants models: torch computes, parameters travel as one flat vector.

    Source:
        `paceline.sim.models.Model`; ours there are plain numpy, since autograd's tape costs several times as much.
        Here it must be the very model that the demo trains, and one run is all that is simulated.

    Example:
        >>> model = TorchCNN()
        >>> start = model.initial(seed=0)
        >>> start.shape, model.logits(start, np.zeros((2, 1, 8, 8), np.float32)).shape
        ((38282,), (2, 10))
    """

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the parameters, in order."""
        return tuple(tuple(p.shape) for p in _network().parameters())

    def initial(self, seed: int) -> Vector:
        """Return the parameters that the demo's ranks begin with."""
        return _flat(list(build_model(seed, nn.Identity()).parameters()))

    def gradient(self, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> Vector:
        """Return the gradient of the mean cross-entropy over the batch, by autograd."""
        net = _loaded(parameters)
        loss = F.cross_entropy(net(torch.from_numpy(inputs)), torch.from_numpy(targets))
        return _flat(torch.autograd.grad(loss, list(net.parameters())))

    def logits(self, parameters: Vector, inputs: NDArray[Any]) -> Array:
        """Return the unnormalised log-probabilities, shape (samples, 10)."""
        with torch.no_grad():
            logits: Array = _loaded(parameters)(torch.from_numpy(inputs)).numpy()
        return logits


def simulated_task(config: TaskConfig, target_accuracy: float) -> Task:
    """Return what a demo run trains: model, data, order of samples, optimizer and schedule are the demo's own.

    Args:
        config: The run.
        target_accuracy: What time to accuracy is measured to, 0..1.

    Returns:
        A task whose batch, like the demo's, is that of one rank.

    Example:
        >>> task = simulated_task(TaskConfig("auto"), 0.96)
        >>> [round(task.lr_at(1280 * epoch), 6) for epoch in (0, 9, 10, 11, 12)]
        [0.004, 0.004, 0.0008, 0.0008, 0.00016]
    """

    def schedule(done: float) -> float:
        epoch = math.floor(done * config.num_epochs + 1e-9)  # a whole epoch must not come out just below
        return LR_FACTOR ** sum(epoch >= milestone for milestone in config.milestones)

    return Task(
        "demo",
        _data,
        TorchCNN(),
        Adam(),
        config.lr,
        config.batch_size,
        NUM_TRAIN * config.num_epochs,
        target_accuracy,
        schedule,
        _order,
    )


def _order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of `LeaseLoader` and of torch's DistributedSampler."""
    order: NDArray[np.int64] = torch.randperm(
        num_samples, generator=torch.Generator().manual_seed(seed + epoch)
    ).numpy()
    return order


@functools.cache
def _data() -> Dataset:
    train, test_images, test_labels = digits()
    images, labels = train.tensors
    return Dataset(images.numpy(), labels.numpy(), test_images.numpy(), test_labels.numpy())


@functools.cache
def _network() -> nn.Module:
    """The one network that all computing happens in; its parameters are whatever was loaded last."""
    return build_model(0, nn.Identity())


def _loaded(parameters: Vector) -> nn.Module:
    net = _network()
    nn.utils.vector_to_parameters(torch.from_numpy(parameters), net.parameters())
    return net


def _flat(tensors: Sequence[Tensor]) -> Vector:
    flat: Vector = nn.utils.parameters_to_vector(tensors).detach().numpy()
    return flat
