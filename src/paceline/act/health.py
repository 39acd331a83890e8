"""Signs of life: turns the beats of all ranks into who has failed, and how. Runs on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that failed; `silent` when all that is known is that it gives no sign of life."""

    rank: Rank
    reason: str
    silent: bool


@dataclass(frozen=True, slots=True)
class Member:
    """Where a rank runs."""

    host: str
    pid: int


class Health:
    """Judges beats by the local clock only: how long ago a rank's beat last *changed* here.

    Args:
        members: By rank.
        silence_s: Silence after which a rank counts as failed, seconds; `inf` to wait for ever.
        patience_s: How long a rank may wait for one that has left its loop, seconds.
        now: A monotonic clock.
    """

    def __init__(
        self,
        members: Sequence[Member],
        silence_s: float,
        patience_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._now = now
        self._last_call = now()
        self._seen = [(-1, self._last_call)] * len(members)
        self._ring_steps = (-1, self._last_call)
        self.silent: set[Rank] = set()

    def judge(self, statuses: Sequence[dict[str, Any]], attached: Collection[Rank]) -> Loss | None:
        """Return the first rank that has failed, or None.

        An attached rank that is merely silent (stopped, swapping, frozen) is only a very slow rank: it goes into
        `silent` and the ring trains on, unless the ring stands still (for it, in a collective of the user's) or has
        finished.

        Args:
            statuses: Every rank's latest status.
            attached: Ranks attached to a ring at present.
        """
        now = self._now()
        if now - self._last_call > 2.0:  # this process was asleep: the silence of others proves nothing
            self._seen = [(beat, now) for beat, _ in self._seen]
            self._ring_steps = (self._ring_steps[0], now)
        self._last_call = now
        suspected = any(status["suspicion"] for status in statuses)
        finished = all(status["closing"] for rank, status in enumerate(statuses) if rank not in attached)
        steps = sum(status["next"] for rank, status in enumerate(statuses) if rank not in attached)
        if steps != self._ring_steps[0]:
            self._ring_steps = (steps, now)
        ring_stands = now - self._ring_steps[1] > self._silence_s
        longest_wait_s = max(status["waiting_s"] for status in statuses)
        for rank, status in enumerate(statuses):
            if status["failure"]:
                return Loss(rank, status["failure"], silent=False)
            if (status["closing"] or status["closed"]) and rank not in attached and longest_wait_s > self._patience_s:
                reason = "it has left the training loop (ended early, or an exception was swallowed?) and others wait"
                return Loss(rank, reason, silent=False)
            if status["closed"]:
                continue
            if status["beat"] != self._seen[rank][0]:
                self._seen[rank] = (status["beat"], now)
                self.silent.discard(rank)
                continue
            silence = now - self._seen[rank][1]
            state = self._process_state(rank) if silence > 0.5 else None
            if state == "gone":
                return Loss(rank, "its process is gone (killed?)", silent=False)
            limit = min(self._silence_s, 3.0) if suspected and state is None else self._silence_s
            if silence > limit:
                if rank in attached and not finished and not ring_stands:
                    self.silent.add(rank)
                    continue
                what = "its process is stopped" if state == "stopped" else "killed, stopped or cut off"
                return Loss(rank, f"no sign of life for {silence:.0f} s ({what})", silent=True)
        return None

    def _process_state(self, rank: Rank) -> str | None:
        """gone, stopped, alive; None for another host, where only silence tells."""
        if self._members[rank].host != self._members[0].host:
            return None
        try:
            status = psutil.Process(self._members[rank].pid).status()
        except psutil.NoSuchProcess:
            return "gone"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status == psutil.STATUS_STOPPED else "alive"
