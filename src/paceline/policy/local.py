"""Wrappers that change what a rank does between releases, not who waits for whom: LocalSGD and DropCompute. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from paceline.policy.barrier import BSP
from paceline.policy.base import Action, Event, SyncPolicy, Work
from paceline.types import Rank


class _Around:
    """A policy that decides as another one does."""

    __slots__ = ()
    inner: SyncPolicy[Any]

    @property
    def wants_scores(self) -> bool:
        """As the inner policy."""
        return self.inner.wants_scores

    @property
    def staleness_bound(self) -> int | None:
        """As the inner policy."""
        return self.inner.staleness_bound

    def init(self, ranks: frozenset[Rank]) -> Any:
        """As the inner policy."""
        return self.inner.init(ranks)

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Action, ...]]:
        """As the inner policy."""
        return self.inner.step(state, event)


@dataclass(frozen=True, slots=True)
class LocalSGD(_Around):
    """Every rank makes some optimizer steps of its own, then contributes the change of its model.

    Args:
        local_steps: Steps between two contributions, >= 1.
        inner: Decides about the contributions; it must not take local steps itself.

    Raises:
        ValueError: less than one step, or an inner policy with local steps.

    Source:
        Stich 2019 (arXiv 1805.09767); post-local SGD, Lin et al. 2020 (arXiv 1808.07217), is a plan that switches to
        this from BSP. Ours differs: the inner policy may be any, not only a barrier of all.

    Example:
        >>> LocalSGD(8).work
        Work(local_steps=8, limit_s=None)
        >>> LocalSGD(8, DropCompute(0.2)).work
        Work(local_steps=8, limit_s=0.2)
    """

    local_steps: int
    inner: SyncPolicy[Any] = field(default_factory=BSP)

    def __post_init__(self) -> None:
        if self.inner.work.local_steps != 1:
            raise ValueError(f"local steps inside local steps: {self.inner} makes {self.inner.work.local_steps}")
        Work(local_steps=self.local_steps)  # raises where that cannot be

    @property
    def work(self) -> Work:
        """So many local steps, otherwise as the inner policy says."""
        return replace(self.inner.work, local_steps=self.local_steps)


@dataclass(frozen=True, slots=True)
class DropCompute(_Around):
    """Every rank stops after the micro-batch in which a time has passed, and contributes what it has.

    Args:
        limit_s: From its release on, seconds, > 0. With one micro-batch per gradient there is nothing to leave out.
        inner: Decides about the contributions; it must not set a limit itself.

    Raises:
        ValueError: a limit that is not positive, or an inner policy with a limit.

    Source:
        Giladi et al., NeurIPS 2023 (arXiv 2306.10598). Ours differs: the mean is over the samples that were really
        used, where the public code divides by the planned number, which shrinks gradients as more is dropped.

    Example:
        >>> DropCompute(0.2).work
        Work(local_steps=1, limit_s=0.2)
    """

    limit_s: float
    inner: SyncPolicy[Any] = field(default_factory=BSP)

    def __post_init__(self) -> None:
        if self.inner.work.limit_s is not None:
            raise ValueError(f"a limit inside a limit: {self.inner} stops after {self.inner.work.limit_s} s")
        Work(limit_s=self.limit_s)  # raises where that cannot be

    @property
    def work(self) -> Work:
        """Up to the limit, otherwise as the inner policy says."""
        return replace(self.inner.work, limit_s=self.limit_s)
