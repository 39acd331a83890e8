"""Around a late rank: turns the buckets of a step into all-reduces that do not wait for it, and waits into choices.

Every rank tells the others how long it was in the last exchange, beside the training and in one small all-reduce of
the job's own group. All get the same numbers, so all choose the same for the next step without asking anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.executor import MIN_RANKS, Call, CollectivePlan, Executor
from paceline.act.peers import Ticket
from paceline.collective.late import around_one
from paceline.decide.skew import Network, Reduction, SkewChooser
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.act.session import Session

Collective = Literal["native", "auto"] | Reduction
_SMALL_BYTES, _LARGE_BYTES = 1024, 4 * 1024 * 1024  # of the all-reduces that alpha and beta are fitted to
_FIT_CALLS = 5
_LOOK_EVERY = 16  # steps between two looks at the link, at first
_CONFIRMED = 1.5  # a link is slow if a measurement finds it so many times slower than the one before


def check_collective(collective: Collective) -> None:
    """Raise `ConfigError` unless gradients can be reduced so."""
    if isinstance(collective, Reduction):
        if collective.late is None or (collective.late >= 0 and collective.num_chunks >= 1):
            return
        raise ConfigError(
            f"a pinned reduction needs a late rank >= 0 and chunks, got rank {collective.late} and "
            f"{collective.num_chunks} chunks"
        )
    if collective not in ("native", "auto"):
        raise ConfigError(f'collective must be "native", "auto" or a Reduction, got {collective!r}')


@dataclass(slots=True)
class _Step:
    """The exchange under way: what is left to send around the late rank, and what was begun."""

    left_bytes: int
    entered_s: float = 0.0
    calls: tuple[Ticket[Call], ...] = ()


class SkewedExchange:
    """One rank's gradient exchanges where somebody is late. Training thread only.

    Args:
        session: This rank's run.
        store: The job's store, prefixed for this run.
        collective: "auto", or a choice that is kept: with it, results do not depend on who was late when.
        tell: Told about every choice, and about slow links, in words and numbers.

    Raises:
        ConfigError: the late rank of a pinned choice is none of ours.
    """

    def __init__(
        self,
        session: Session,
        store: dist.Store,
        collective: Literal["auto"] | Reduction,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._rank = session.rank
        self._num_ranks = session.world_size
        self._group = session.world_group
        self._comm = session.comm
        self._peers = session.peers
        self._device = session.device
        self._nbytes = sum(p.numel() * p.element_size() for p in session.params)
        self._tell = tell
        # Of all ranks, and used on the communication thread only.
        self._executor = Executor(
            store,
            session.rank,
            range(session.world_size),
            prefix="collective",
            timeout_s=session.timeout.total_seconds(),
            device=session.device,
            hosts=session.peers.hosts,
        )
        self._chooser: SkewChooser | None = None
        self.chosen = Reduction()
        self._step: _Step | None = None
        self._told: tuple[dist.Work, Tensor] | None = None
        self._look_every = self._steps_to_look = _LOOK_EVERY
        if isinstance(collective, Reduction):
            self._take(collective)
        else:
            self._begin_choosing()

    def reduce(self, buffer: Tensor) -> Callable[[], None]:
        """Begin to sum a bucket over all ranks, in place; return what waits for the result on the training thread."""
        if self._step is None:
            self._settle()
            self._step = _Step(self.chosen.late_bytes)
        step, size = self._step, buffer.element_size()
        numel = min(buffer.numel(), step.left_bytes // size)
        if numel:
            step.left_bytes -= numel * size
            call = self._comm.submit(lambda: self._executor.begin(buffer[:numel]))
            step.calls = (*step.calls, call)
        rest = buffer[numel:]
        step.entered_s = time.monotonic()
        if step.calls:  # beside them the rest would take the ports from messages that others wait for
            return lambda: self._complete(step, rest)
        work = self._group.allreduce([rest])
        return lambda: self._wait(work)

    def end_step(self) -> None:
        """All buckets of the step have been waited for: tell the others how long this rank was in it."""
        if self._step is None:
            return
        waited_s = time.monotonic() - self._step.entered_s
        self._step = None
        if self._chooser is not None:
            waits = torch.zeros(self._num_ranks, dtype=torch.float64)
            waits[self._rank] = waited_s
            waits = waits.to(self._device)
            self._told = (self._group.allreduce([waits]), waits)

    def forget(self) -> None:
        """Others take part from now on, or fewer: what was seen says nothing about what comes."""
        self._step = self._told = None
        if self._chooser is not None:
            self._state = self._chooser.init()
            if not self.chosen.is_native:
                self._take(Reduction(reason="the roles of ranks change"))

    def close(self) -> None:
        """All ranks have made their last step: take in what was told, and give the executor's connections up."""
        if self._told is not None:
            self._wait(self._told[0])
        self._peers.wait(self._comm.submit(self._executor.close))

    def _complete(self, step: _Step, rest: Tensor) -> None:
        """Complete all calls of the step in the order in which they were begun, then sum what is left of a bucket."""
        calls, step.calls = step.calls, ()
        if calls:
            self._peers.wait(self._comm.submit(lambda: _complete_all(calls)))
        if rest.numel():
            self._wait(self._group.allreduce([rest]))

    def _wait(self, work: dist.Work) -> None:
        self._peers.wait_for_work(work, interruptible=self._device.type == "cpu")

    # ---- choosing ------------------------------------------------------------------------------------------------

    def _begin_choosing(self) -> None:
        self._chooser = SkewChooser(self._peers.wait(self._comm.submit(self._measured)))
        self._state = self._chooser.init()
        net = self._chooser.network
        self._tell("network", {"alpha_s": net.alpha_s, "beta_s_per_byte": net.beta_s_per_byte, "nbytes": net.nbytes})

    def _measured(self) -> Network:
        """Alpha and beta, from timed all-reduces of the backend; the same on all ranks."""
        times = []
        for nbytes in (_SMALL_BYTES, _LARGE_BYTES):
            tensor = torch.zeros(nbytes // 4, device=self._device)
            taken = []
            for _ in range(_FIT_CALLS):
                began = time.monotonic()
                self._executor.all_reduce(tensor, "max")  # which always goes through the backend
                taken.append(time.monotonic() - began)
            times.append(min(taken))  # what disturbs a call only ever makes it longer
        agreed = torch.tensor(times, dtype=torch.float64, device=self._device)
        self._executor.all_reduce(agreed, "max")
        small_s, large_s = agreed.tolist()
        network = Network.fit(self._num_ranks, self._nbytes, (_SMALL_BYTES, small_s), (_LARGE_BYTES, large_s))
        return replace(network, num_lanes=CollectivePlan().num_lanes)

    def _settle(self) -> None:
        """Take in what the ranks have told about the last exchange."""
        if self._told is None or self._chooser is None:
            return
        work, waits = self._told
        self._told = None
        self._wait(work)
        self._state, choice = self._chooser.step(self._state, waits.tolist())
        if choice is not None:
            self._take(choice)
        self._steps_to_look -= 1
        slow_ratio = self._chooser.slow_link(self._state)
        if slow_ratio is not None and self._steps_to_look <= 0:
            self._look_at_link(slow_ratio)

    def _look_at_link(self, slow_ratio: float) -> None:
        """Exchanges are slow though nobody is late: measure again, and ever more rarely where that confirms nothing."""
        assert self._chooser is not None
        old, network = self._chooser.network, self._peers.wait(self._comm.submit(self._measured))
        if network.ring_s < _CONFIRMED * old.ring_s:
            self._look_every *= 2
            self._steps_to_look = self._look_every
            return
        self._chooser = replace(self._chooser, network=network)
        self._state = self._chooser.init()
        self._tell(
            "slow_link",
            {"ratio": slow_ratio, "alpha_s": network.alpha_s, "beta_s_per_byte": network.beta_s_per_byte},
        )

    def _take(self, choice: Reduction) -> None:
        plan = CollectivePlan()
        if choice.late is not None:
            if choice.late >= self._num_ranks:
                raise ConfigError(f"the late rank must be in 0..{self._num_ranks - 1}, got {choice.late}")
            plan = CollectivePlan(around_one(self._num_ranks, choice.late, choice.num_chunks))
        self._peers.wait(self._comm.submit(lambda: self._executor.use(plan)))
        self.chosen = choice
        self._tell(
            "collective",
            {
                "late": choice.late,
                "late_bytes": choice.late_bytes,
                "num_chunks": choice.num_chunks,
                "gap_s": choice.gap_s,
                "gain_s": choice.gain_s,
                "reason": choice.reason,
            },
        )


def _complete_all(calls: tuple[Ticket[Call], ...]) -> None:
    for call in calls:  # on the communication thread, where all of them have been begun
        call.wait().complete()


def can_skew(num_ranks: int) -> bool:
    """Whether there are enough ranks for an all-reduce around one to gain anything.

    Example:
        >>> can_skew(3), can_skew(4)
        (False, True)
    """
    return num_ranks >= MIN_RANKS
