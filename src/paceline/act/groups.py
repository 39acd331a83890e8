"""Process groups made on the fly: turns a store prefix and a position into a group of chosen members only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def make_group(
    store: dist.Store, prefix: str, position: int, size: int, timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """Build a process group without asking the ranks outside it.

    `dist.new_group` is a collective over the world (or counts past calls, which differ between roles); this is the
    rendezvous it wraps. Members block until all of them call it with the same prefix.

    Args:
        store: The job's store.
        prefix: Unique for this group among all that ever live on the store.
        position: This process's rank in the group, 0..size-1.
        size: Number of members, >= 1.
        timeout: The group's own operation timeout; a group that ran into it is dead for good.
        device: `cpu` makes a Gloo group; `cuda` an NCCL group (written, not yet run).

    Returns:
        A group usable by DDP's reducer and by its own methods (`allreduce`, `broadcast`, `send`, `recv`).
    """
    scoped = dist.PrefixStore(prefix, store)
    group = dist.ProcessGroup(scoped, position, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend: Any = dist.ProcessGroupNCCL(scoped, position, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(scoped, position, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    group._set_group_name(prefix)  # type: ignore[arg-type]  # a NewType of str in newer versions
    return group


def own_connection(store: dist.Store) -> dist.Store:
    """A connection for one thread, so that its calls do not queue behind those of others that block."""
    clone = getattr(store, "clone", None)  # not in every torch that we allow
    try:
        return clone() if clone is not None else store
    except RuntimeError:  # not for every kind of store
        return store
