"""Failure of others: turns a lost or silent rank into one `PeerError` that every blocked thread here receives.

Nothing in Paceline blocks without going through a `Ticket`: whoever waits for one is woken either by its result or
by the news that a peer failed. Gloo itself cannot be cancelled, so a thread inside it may stay there; it is a daemon
and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from paceline.errors import PeerError, PeerTimeout

logger = logging.getLogger("paceline")
T = TypeVar("T")
_POLL_S = 0.05
_LOOK_UP_EVERY = timedelta(seconds=0.5)


class Ticket(Generic[T]):
    """A result that arrives once, from whichever thread comes first: the work, or the news of a failure.

    `future` is the same result as a torch future, which is what DDP's reducer waits for.
    """

    def __init__(self, on_fail: Callable[[BaseException], None] = lambda _: None) -> None:
        self._on_fail = on_fail
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.error: BaseException | None = None
        self._value: T | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    def resolve(self, value: T) -> None:
        """Deliver the result; ignored when the ticket has already failed."""
        with self._lock:
            if not self._done.is_set():
                self._value = value
                self._done.set()
                self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Deliver a failure; ignored when a result is already there."""
        with self._lock:
            if not self._done.is_set():
                self.error = error
                self._on_fail(error)
                self._done.set()
                self.future.set_exception(error)

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the result is there.

        Raises:
            TimeoutError: not within `timeout_s`.
            BaseException: whatever the ticket failed with.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._done.wait(_POLL_S):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no result within {timeout_s} s")
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Peers:
    """What this rank knows of the failure of others, and who must be told.

    Args:
        rank: This rank.
        hosts: Host name by rank.
        limit_s: How long to look for who is behind a broken connection, seconds, > 0.
        silence_s: Longest silence of a peer before it counts as failed, seconds; `inf` to wait as plain DDP would.
    """

    def __init__(self, rank: int, hosts: tuple[str, ...], limit_s: float, silence_s: float) -> None:
        self.rank = rank
        self.hosts = hosts
        self.limit_s = limit_s
        self.silence_s = silence_s
        self.failure: PeerError | None = None
        self.suspicion: str | None = None  # a broken connection whose culprit is not known yet
        self.delivered = False  # the training thread has seen the failure
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._open: WeakSet[Ticket[Any]] = WeakSet()
        self.broken: BaseException | None = None  # the last error that a ticket ended with

    def ticket(self) -> Ticket[Any]:
        """Open a ticket that fails when a peer does."""
        ticket: Ticket[Any] = Ticket(self._note_broken)
        with self._lock:
            self._open.add(ticket)
        if self.failure is not None:
            ticket.fail(self.failure)
        return ticket

    def wait(self, ticket: Ticket[T]) -> T:
        """Wait for a ticket on the training thread; a broken connection is raised as the failure behind it."""
        try:
            return ticket.wait()
        except Exception as error:
            explained = self.explain(error)
            self.delivered = True
            raise explained from error

    def wait_for_work(self, work: dist.Work, interruptible: bool) -> None:
        """Wait for a collective on the training thread.

        Args:
            work: The collective.
            interruptible: Whether to look up for the failure of a peer while waiting; on NCCL, where waiting only
                orders streams, there is nothing to interrupt.

        Raises:
            PeerError: a peer failed meanwhile.
            RuntimeError: the transport's own error.
        """
        if not interruptible:
            work.wait()
            return
        while True:
            self.check()
            with contextlib.suppress(RuntimeError):  # a collective goes on when a timed wait ends (a send would not)
                work.wait(_LOOK_UP_EVERY)
                return
            if work.is_completed():
                break
        try:
            work.wait()  # it may have succeeded just after the timed wait ended
        except RuntimeError as error:
            self.broken = error
            raise

    def _note_broken(self, error: BaseException) -> None:
        self.broken = error

    def fail(self, failure: PeerError) -> None:
        """Take note of a peer's failure (the first counts) and wake everybody who waits."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            waiting = list(self._open)
        self._known.set()
        for ticket in waiting:
            ticket.fail(failure)

    def lost(self, rank: int, reason: str) -> None:
        """Take note that `rank` failed."""
        self.fail(PeerError(rank, self.hosts[rank], reason))

    def silent(self, rank: int, reason: str) -> None:
        """Take note that `rank` gave no sign of life for too long."""
        self.fail(PeerTimeout(rank, self.hosts[rank], reason))

    def suspect(self, rank: int, reason: str) -> None:
        """Note a broken connection to `rank`: it failed, unless word of another's failure, behind it, comes soon."""
        if not self._known.wait(1.5):
            self.lost(rank, reason)

    def check(self) -> None:
        """Raise the failure, if there is one. For the training thread."""
        if self.failure is not None:
            self.delivered = True
            raise self.failure

    def check_quietly(self) -> None:
        """Raise the failure, if there is one, on a thread that nobody watches."""
        if self.failure is not None:
            raise self.failure

    def explain(self, error: BaseException) -> BaseException:
        """Turn a broken connection into the failure behind it, waiting for the news if need be.

        Gloo says "connection closed by peer" and not by whom; who failed is found by heartbeat and told by rank 0.

        Args:
            error: What the transport raised.

        Returns:
            The `PeerError`, or `error` itself when nobody turns out to have failed.
        """
        if isinstance(error, PeerError):
            return error
        self.suspicion = f"{type(error).__name__}: {error}"
        self._known.wait(self.limit_s + 2.0)
        self.suspicion = None
        return self.failure or error


class Watchdog(threading.Thread):
    """Notices when the coordinator itself is stuck, and ends the process when nothing else can.

    A training thread blocked inside the backend (DDP's own buffer broadcast, say) cannot be woken. When a peer has
    failed and the training thread is still blocked after a grace time, the process ends with the error on stderr, as
    NCCL's watchdog does.

    Args:
        peers: Where failures are noted.
        last_contact: Returns when the coordinator last completed an exchange, on `time.monotonic`.
        is_blocked: Returns whether the training thread waits for others.
        on_failure: Called once, on this thread, when a failure is known; writes the report.
        grace_s: Time for the training thread to raise the failure itself, seconds.
    """

    def __init__(
        self,
        peers: Peers,
        last_contact: Callable[[], float],
        is_blocked: Callable[[], bool],
        on_failure: Callable[[], None],
        grace_s: float = 2.5,
    ) -> None:
        super().__init__(name="paceline-watchdog", daemon=True)
        self._peers = peers
        self._last_contact = last_contact
        self._is_blocked = is_blocked
        self._on_failure = on_failure
        self._grace_s = grace_s
        self._closing = threading.Event()
        self.reported = threading.Event()

    def run(self) -> None:
        """Watch until closed."""
        interval, excused = 0.25, 0.0
        last_tick = time.monotonic()
        while not self._closing.wait(interval):
            now = time.monotonic()
            if now - last_tick > 4 * interval:
                excused = now  # this whole process was asleep: nobody else's silence
            last_tick = now
            if self._peers.failure is None and now - max(self._last_contact(), excused) > self._peers.silence_s:
                self._peers.silent(0, f"it hosts the store, which has not answered for {self._peers.silence_s:.0f} s")
            if self._peers.failure is not None:
                self._end(self._peers.failure)
                return

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()

    def _end(self, failure: PeerError) -> None:
        try:
            self._on_failure()
        except Exception:
            logger.exception("the report of the failed run could not be written")
        self.reported.set()
        self._closing.wait(self._grace_s)
        if not self._peers.delivered and self._is_blocked() and not self._closing.is_set():
            host = self._peers.hosts[self._peers.rank]
            print(
                f"{host}:{self._peers.rank} ERROR paceline: {failure}; this rank is blocked in the backend: ending it",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
