"""What can be attached: turns a wrong request into an error that says what to change, before anything starts."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.decide.estimate import LrRule
from paceline.errors import ConfigError

MODES = ("observe", "suggest", "auto")


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside `torch.compile`'s wrapper; any other as it is."""
    inner = getattr(module, "_orig_mod", module)
    assert isinstance(inner, torch.nn.Module)
    return inner


def check_request(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, mode: str, lr_rule: str | None, scaler: Any
) -> None:
    """Check what can be checked without a process group.

    Raises:
        ConfigError: an unknown mode or rule, wrong types, no parameters, an optimizer over other parameters.
    """
    if mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if lr_rule is not None and lr_rule not in get_args(LrRule):
        raise ConfigError(f"lr_rule must be one of {', '.join(get_args(LrRule))}; got {lr_rule!r}")
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"wanted a DistributedDataParallel module, got {type(module).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"wanted a torch optimizer, got {type(optimizer).__name__}")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    params = [p for p in module.parameters() if p.requires_grad]
    if not params:
        raise ConfigError("the model has no parameters that require a gradient: there is nothing to train")
    known = {id(p) for p in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} of the optimizer's parameters are not in the model (shapes "
            f"{[tuple(p.shape) for p in foreign[:3]]} ...); build the optimizer from this model's parameters()"
        )


def check_ddp(ddp: torch.nn.Module) -> DistributedDataParallel:
    """Check that the module is a DDP that can be attached to, and return it.

    Raises:
        ConfigError: not a DDP, a hook is already there, or a combination of flags that torch itself breaks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"with more than one rank the module must be a DistributedDataParallel, got {type(ddp).__name__}; "
            "wrap the model: ddp = DistributedDataParallel(model)"
        )
    if ddp._use_python_reducer:
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" bypasses gradient hooks; '
            'drop it (use "ddp_optimizer" or False) before building the DDP'
        )
    if ddp._comm_hooks:
        hook = ddp._comm_hooks[0][0]
        name = getattr(hook, "__qualname__", repr(hook))
        what = (
            "this DDP is already attached: attach once and keep the returned object"
            if getattr(hook, "__module__", "").startswith("paceline")
            else f"this DDP already has the communication hook {name}, and torch allows one: drop that hook"
        )
        raise ConfigError(what)
    check_no_sync(ddp)
    return ddp


def check_no_sync(ddp: DistributedDataParallel) -> None:
    """Refuse `static_graph=True` together with `no_sync()`, which torch itself gets wrong.

    Raises:
        ConfigError: both are in use.
    """
    if ddp.static_graph and not ddp.require_backward_grad_sync:
        raise ConfigError(
            "static_graph=True and no_sync() do not work together in torch: the graph recorded without "
            "synchronisation is taken for the one with it; drop static_graph=True (or accumulate without no_sync())"
        )


def is_distributed() -> bool:
    """Whether there is a process group with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
