"""What one rank's run consists of: the model, clocks, counters and threads, for whoever acts on them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.act.comm import CommThread
from paceline.act.layout import FlatLayout
from paceline.act.peers import Peers
from paceline.decide.estimate import LrRule
from paceline.decide.ledger import Ledger
from paceline.measure.timers import StepClock

if TYPE_CHECKING:
    from paceline.act.coordinator import Coordinator
    from paceline.act.skew import SkewedExchange


@dataclass
class Session:
    """One rank's run. The training thread owns the counters; `model_lock` guards the model against link threads.

    Attributes:
        version: Gradient exchanges this rank's parameters have seen; the next one computed is `version + 1`.
        samples: Samples drawn since the last exchange.
        micro_steps: Batches drawn since the last exchange (gradient accumulation makes it more than one).
        accumulation: The same for the last exchange.
        ledger: Sample leases; None when the loop brings its own loader.
        epoch: Epoch of this rank's loop; an attached rank's may lag behind the ledger's.
        skew: All-reduces around a late rank while everybody is in the ring; None for the backend's own, always.
    """

    rank: int
    world_size: int
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scaler: Any
    lr_rule: LrRule
    store: dist.Store
    prefix: str
    timeout: timedelta
    clock: StepClock
    peers: Peers
    comm: CommThread
    coordinator: Coordinator = field(init=False)
    ledger: Ledger | None = None
    version: int = 0
    samples: int = 0
    micro_steps: int = 0
    accumulation: int = 1
    epoch: int = -1
    skew: SkewedExchange | None = None

    def __post_init__(self) -> None:
        self.params: list[Tensor] = [p for p in self.ddp.module.parameters() if p.requires_grad]
        self.buffers: list[Tensor] = list(self.ddp.module.buffers())
        self.param_index = {id(p): i for i, p in enumerate(self.params)}
        self.gradient_layout = FlatLayout(self.params)
        self.model_layout = FlatLayout([*self.params, *self.buffers])
        self.world_group: dist.ProcessGroup = self.ddp.process_group
        self.device = self.params[0].device
        self.model_lock = threading.Lock()

    @property
    def model_tensors(self) -> list[Tensor]:
        """Parameters and buffers, in the order of `model_layout`."""
        return [*self.params, *self.buffers]

    @property
    def reference_samples(self) -> int:
        """Batch that the learning rate was tuned for: everybody's, per exchange."""
        return self.lease_samples * self.world_size

    @property
    def lease_samples(self) -> int:
        """Samples one rank trains per exchange; 1 where the loop brings its own loader and nobody knows."""
        return self.ledger.batch_size * max(self.accumulation, self.micro_steps) if self.ledger else 1

    def scale(self) -> float:
        """The present loss scale; 1.0 without a GradScaler."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0
