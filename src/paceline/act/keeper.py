"""What one server keeps: turns gradients of its shard into the next version of its parameters, on its own optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.act.shards import Shards
from paceline.errors import ConfigError

Shares = Sequence[tuple[Tensor, float]]
"""Gradients of the shard, in the dtype they came in, and the factor of each in the update."""


class Keeper:
    """A shard of the parameters, and an optimizer of the user's kind with the state of just that shard.

    Args:
        shards: How the model is cut.
        server: Which part is ours.
        params: The whole model's parameters; their values are where training begins.
        optimizer: The user's. It never steps: ours is built like it, and takes its rates from it before every update.
        scheduler: Of the learning rate, over the user's optimizer; None for a constant one.
        scheduler_samples: The scheduler steps each time so many samples have been trained, > 0.
        wire_dtype: What parameters are sent in.

    Raises:
        ConfigError: the optimizer already has state, or cannot be built again.

    Example:
        >>> net = nn.Linear(2, 1, bias=False); _ = nn.init.ones_(net.weight)
        >>> shards = Shards(list(net.parameters()), 1, 1 << 20, splits=True)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> keeper = Keeper(shards, 0, list(net.parameters()), sgd, None, 8, torch.float32)
        >>> keeper.apply([(torch.tensor([1.0, 2.0]), 1.0)], lr_scale=1.0, num_samples=4)
        >>> keeper.parameters()
        tensor([0.5000, 0.0000])
    """

    def __init__(
        self,
        shards: Shards,
        server: int,
        params: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scheduler_samples: int,
        wire_dtype: torch.dtype,
    ) -> None:
        if optimizer.state:
            raise ConfigError(
                "the optimizer has already stepped: its state would be lost, since servers keep their own; "
                "resume from a snapshot instead (snapshot_dir=...)"
            )
        self._user_optimizer = optimizer
        self._scheduler = scheduler
        self._scheduler_samples = scheduler_samples
        self._num_ticks = 0
        self._num_trained = 0
        self._wire_dtype = wire_dtype
        self._vector = torch.empty(shards.sizes[server], dtype=shards.dtype)
        self._mean = torch.zeros_like(self._vector)
        self._sent: Tensor | None = None  # the present version as it is sent, made when first asked for
        self._parts: list[nn.Parameter] = []
        by_param: dict[int, list[nn.Parameter]] = {}
        for piece in shards.pieces(server):
            count = piece.stop - piece.start
            is_whole = count == params[piece.param].numel()
            shape = params[piece.param].shape if is_whole else torch.Size([count])
            place = slice(piece.offset, piece.offset + count)
            self._vector[place].copy_(params[piece.param].detach().reshape(-1)[piece.start : piece.stop])
            part = nn.Parameter(self._vector[place].view(shape))
            part.grad = self._mean[place].view(shape)
            self._parts.append(part)
            by_param.setdefault(piece.param, []).append(part)
        self._groups = _groups_of(optimizer, params, by_param)
        self._optimizer = _built_like(optimizer, [parts for _, parts in self._groups])

    def apply(self, shares: Shares, lr_scale: float, num_samples: int) -> None:
        """Make the next version.

        Args:
            shares: The update is the sum of gradient times factor; none leave everything as it is.
            lr_scale: Factor on the learning rate, for this update only.
            num_samples: Samples in the update, over all servers the same: what the scheduler counts.
        """
        self._mean.zero_()
        for gradient, weight in shares:
            self._mean.add_(gradient, alpha=weight)
        if self._optimizer is not None and shares:
            for ours, (theirs, _) in zip(self._optimizer.param_groups, self._groups, strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})
                ours["lr"] = theirs["lr"] * lr_scale
            self._optimizer.step()
        self._sent = None
        self._num_trained += num_samples
        self._tick()

    def norms(self, shares: Shares, scales: Sequence[float]) -> tuple[list[float], float]:
        """Squared 2-norms, on this shard, of each gradient over its loss scale, and of the last update's mean."""
        pairs = zip(shares, scales, strict=True)
        own = [float(torch.linalg.vector_norm(g.float())) ** 2 / scale**2 for (g, _), scale in pairs]
        return own, float(torch.linalg.vector_norm(self._mean)) ** 2

    def parameters(self) -> Tensor:
        """The present version in the dtype it is sent in; never changed later, so it may be sent at leisure."""
        if self._sent is None:
            self._sent = self._vector.to(self._wire_dtype, copy=True)
        return self._sent

    def _tick(self) -> None:
        """Step the scheduler for the samples trained since it stepped last."""
        while self._scheduler is not None and self._num_trained >= (self._num_ticks + 1) * self._scheduler_samples:
            self._num_ticks += 1
            with warnings.catch_warnings():
                # It rightly finds that the user's optimizer never steps.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
                self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here: tensors, numbers and plain containers."""
        return {
            "vector": self._vector.clone(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "rates": [{k: v for k, v in group.items() if k != "params"} for group in self._user_optimizer.param_groups],
            "num_ticks": self._num_ticks,
            "num_trained": self._num_trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: the state is that of another shard or model.
        """
        if state["vector"].shape != self._vector.shape:
            raise ConfigError(
                f"the snapshot holds {state['vector'].numel()} parameters for this server, wanted "
                f"{self._vector.numel()}: it is of another model, or was made with another number of servers"
            )
        self._vector.copy_(state["vector"])
        if self._optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler and state["scheduler"]:
            self._scheduler.load_state_dict(state["scheduler"])
        for group, rates in zip(self._user_optimizer.param_groups, state["rates"], strict=True):
            group.update(rates)
        self._num_ticks, self._num_trained, self._sent = state["num_ticks"], state["num_trained"], None


def _groups_of(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], parts: dict[int, list[nn.Parameter]]
) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
    """The user's parameter groups of which something is here, each with our parts of it."""
    index = {id(p): i for i, p in enumerate(params)}
    found = []
    for group in optimizer.param_groups:
        ours = [part for p in group["params"] for part in parts.get(index.get(id(p), -1), [])]
        if ours:
            found.append((group, ours))
    return found


def _built_like(optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer | None:
    """An optimizer of the same kind and arguments over these groups; None where there is nothing to keep."""
    if not groups:
        return None
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        return kind([{"params": parts} for parts in groups], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"servers need an optimizer of their own, and {kind.__name__} cannot be built from parameter groups and "
            f"its defaults {sorted(arguments)}: {error}"
        ) from error
