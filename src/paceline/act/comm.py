"""The ordered communication thread: turns jobs into results, one after the other, in the order they were given.

Point-to-point and multi-stage exchanges run here and nowhere else. Issued from `then()` callbacks they would be
matched in different orders on different ranks, silently.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.act.peers import Peers, Ticket

T = TypeVar("T")


class CommThread:
    """Runs jobs in order on one daemon thread.

    Args:
        peers: Fails the tickets of waiting jobs when a peer fails.
        name: Thread name, for stack dumps.
    """

    def __init__(self, peers: Peers, name: str = "paceline-comm") -> None:
        self._peers = peers
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Ticket[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Queue a job.

        Args:
            job: Called on the communication thread; may block inside the backend.

        Returns:
            A ticket with what it returns or raises; fails at once when a peer does.
        """
        ticket: Ticket[T] = self._peers.ticket()
        self._jobs.put((job, ticket))
        return ticket

    def close(self) -> None:
        """Let the thread end after the jobs queued so far; does not wait for it."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, after `close`: one that is inside Gloo when the process ends may abort it."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, ticket = item
            try:
                ticket.resolve(job())
            except BaseException as error:  # delivered to whoever waits, never lost
                ticket.fail(error)
            del job, ticket, item  # hold no tensors while idle
