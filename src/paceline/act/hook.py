"""The one permanent gradient hook: turns a bucket into a future by asking whatever role is behind it.

DDP looks at the signature: the second argument must be named `bucket` and annotated with real classes, so this module
has no `from __future__ import annotations`.
"""

from typing import Protocol

import torch
import torch.distributed as dist


class TakesBuckets(Protocol):
    """What stands behind the hook."""

    def on_bucket(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """A bucket of gradients is ready."""


def gradient_hook(state: TakesBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket over. Registered once per DDP and never replaced: torch allows no second hook."""
    return state.on_bucket(bucket)
