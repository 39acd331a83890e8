"""The published methods by name: turns a name and the size of a training into a decider. Pure.

Each follows its paper; the names that end in `-star` follow STAR's scripts, whose versions are weaker and are what
STAR's own figures compare with. Every parameter has a default from its source, so that an evaluation can search over
all of them: `BASELINES["ssp"](8, 32, bound=10)`.

    baselines_switch    Sync-Switch, post-local SGD         one mode first, then another
    baselines_batches   LB-BSP, for CPUs and for GPUs       uneven batches
    baselines_quorum    LGC, K-sync                         waiting for less than everybody
    baselines_limit     DropCompute                         computing less than everything
    baselines_star      Sync-Switch, LB-BSP                 as STAR's scripts have them
    here                SSGD, ASGD, SSP, Zeno++, backup workers, LGC as in STAR's scripts: one mode all the way
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.decide.baselines_batches import LbBsp, LbBspGpu
from paceline.decide.baselines_course import check_setup
from paceline.decide.baselines_limit import DropComputeTuned
from paceline.decide.baselines_quorum import KSyncCancel, Lgc
from paceline.decide.baselines_star import LbBspStar, SyncSwitchStar
from paceline.decide.baselines_switch import PostLocalSgd, SyncSwitch
from paceline.decide.estimate import LrRule
from paceline.decide.plan import Decider, Decision, Observation
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.stale import ASP, SSP, Zeno


@dataclass(frozen=True, slots=True)
class Fixed:
    """One policy all the way: sees everything and decides nothing.

    Args:
        initial: The policy.
        lr_rule: How the learning rate follows the batch of an update.

    Example:
        >>> decider = Fixed(BSP())
        >>> decider.step(decider.init(), "anything")
        (None, ())
    """

    initial: SyncPolicy[Any]
    lr_rule: LrRule = "linear"

    def init(self) -> None:
        """There is nothing to remember."""
        return

    def step(self, state: None, seen: Observation) -> tuple[None, tuple[Decision, ...]]:  # noqa: ARG002
        """Nothing follows from anything."""
        return state, ()


def ssgd(num_ranks: int, batch_size: int, lr_rule: LrRule = "linear") -> Fixed:
    """Synchronous SGD: everybody in step, which is what the learning rate is tuned for.

    Source:
        What DistributedDataParallel does.

    Example:
        >>> ssgd(8, 32).initial
        BSP()
    """
    check_setup(num_ranks, batch_size)
    return Fixed(BSP(), lr_rule)


def asgd(num_ranks: int, batch_size: int, max_staleness: int | None = None, lr_rule: LrRule = "linear") -> Fixed:
    """Asynchronous SGD: every gradient is an update, with the learning rate divided by N (the linear rule).

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        max_staleness: Gradients more versions old than this are dropped, >= 0; None for no limit, as published.
        lr_rule: Linear: an update of b samples goes with eta / N, as in Sync-Switch and in STAR's scripts.

    Source:
        Dean et al. 2012 (Downpour SGD).

    Example:
        >>> asgd(8, 32).initial
        ASP(max_staleness=None)
    """
    check_setup(num_ranks, batch_size)
    return Fixed(ASP(max_staleness), lr_rule)


def ssp(num_ranks: int, batch_size: int, bound: int = 3, lr_rule: LrRule = "linear") -> Fixed:
    """Stale synchronous parallel: asynchronous, but nobody gets more than `bound` steps ahead of the slowest.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        bound: Steps, >= 0; 1 to 10 in the literature.
        lr_rule: As for `asgd`.

    Source:
        Ho et al., NeurIPS 2013.

    Example:
        >>> ssp(8, 32).initial
        SSP(bound=3)
    """
    check_setup(num_ranks, batch_size)
    return Fixed(SSP(bound), lr_rule)


def zeno_plus_plus(
    num_ranks: int,
    batch_size: int,
    rho: float = 0.001,
    epsilon: float = 0.0,
    max_staleness: int | None = 10,
    lr_rule: LrRule = "linear",
) -> Fixed:
    """Zeno++: asynchronous, and a gradient that does not agree with a trusted one is refused.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        rho, epsilon, max_staleness: See `Zeno`; the defaults are those of the public demo (10 workers).
        lr_rule: As for `asgd`.

    Source:
        Xie, Koyejo, Gupta, ICML 2020 (arXiv 1903.07020).

    Example:
        >>> zeno_plus_plus(8, 32).initial
        Zeno(rho=0.001, epsilon=0.0, max_staleness=10)
    """
    check_setup(num_ranks, batch_size)
    return Fixed(Zeno(rho, epsilon, max_staleness), lr_rule)


def backup_workers(num_ranks: int, batch_size: int, num_backup: int | None = None, lr_rule: LrRule = "linear") -> Fixed:
    """Backup workers: an update is the first N - b gradients, those after it are dropped.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        num_backup: b, 0..num_ranks - 1; None for 4 % of the ranks, but at least one (none in a world of one).
        lr_rule: Linear: eta (N - b) / N.

    Raises:
        ValueError: a number of backup workers that leaves nobody.

    Source:
        Chen et al. 2016 (arXiv 1604.00981): 4 of 100 there. Ours differs: b is taken from the N ranks, not added to
        them, so that all methods have the same machines.

    Example:
        >>> backup_workers(8, 32).initial, backup_workers(100, 32).initial
        (KSync(k=7, late='drop'), KSync(k=96, late='drop'))
    """
    check_setup(num_ranks, batch_size)
    if num_backup is None:
        num_backup = min(max(1, round(0.04 * num_ranks)), num_ranks - 1)
    if not 0 <= num_backup < num_ranks:
        raise ValueError(f"num_backup must be in 0..{num_ranks - 1}, got {num_backup}")
    return Fixed(KSync(num_ranks - num_backup, late="drop"), lr_rule)


def lgc_star(num_ranks: int, batch_size: int, num_late: int = 2, lr_rule: LrRule = "linear") -> Fixed:
    """LGC as in STAR's scripts: an update after N - 2 gradients; later ones are added with the weight 1 / N.

    Args:
        num_ranks, batch_size: World size; samples per rank and gradient.
        num_late: How many are not waited for, >= 0; somebody always is.
        lr_rule: Linear gives every gradient the weight 1 / N, whichever update it is in.

    Raises:
        ValueError: a negative number.

    Source:
        STAR's released scripts (pcl-projects/Training-Sync-Mode), as facts: N - 2, fixed, no search, no blocks. Ours
        differs: a late gradient joins the next update, where theirs is added to the model when it arrives.

    Example:
        >>> lgc_star(8, 32).initial
        KSync(k=6, late='join_next')
    """
    check_setup(num_ranks, batch_size)
    if num_late < 0:
        raise ValueError(f"num_late must be >= 0, got {num_late}")
    return Fixed(KSync(max(1, num_ranks - num_late), late="join_next"), lr_rule)


BASELINES: Mapping[str, Callable[..., Decider[Any]]] = {
    "ssgd": ssgd,
    "asgd": asgd,
    "ssp": ssp,
    "sync-switch-greedy": partial(SyncSwitch, on_straggler="greedy"),
    "sync-switch-elastic": partial(SyncSwitch, on_straggler="elastic"),
    "lb-bsp": LbBsp,
    "lb-bsp-gpu": LbBspGpu,
    "lgc": Lgc,
    "zeno++": zeno_plus_plus,
    "backup": backup_workers,
    "k-sync": KSyncCancel,
    "dropcompute": DropComputeTuned,
    "post-local": PostLocalSgd,
    "sync-switch-star": SyncSwitchStar,
    "lb-bsp-star": LbBspStar,
    "lgc-star": lgc_star,
}
"""Decider by name; each is called with the world size and the samples per rank and gradient."""
