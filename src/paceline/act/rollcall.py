"""The roll call after a broken exchange: turns what the wire of one rank says into the rank that everybody blames.

Gloo says "connection closed" or "timed out" and at best knows the direct neighbour, which may only have passed on the
trouble. So whoever fails answers in the store, with the neighbour it was waiting for, and then closes its own
connections, which makes the next ones fail within milliseconds. The culprit is who does not answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from paceline.errors import PeerError, PeerTimeout

_POLL_S = 0.02
_STORE_HOST = 0  # position; as everywhere in Paceline, who initialises the job hosts its store


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank that could not go on knows.

    Args:
        suspect: Position of the peer that it was waiting for; None when it failed by itself.
        is_closed: The connection was closed, which a peer that is merely slow would not do.
        own: Its own error, when it was no peer's fault.
    """

    suspect: int | None
    is_closed: bool = False
    own: str | None = None


class RollCall:
    """One group's way to find out who broke an exchange.

    Args:
        store: The job's store.
        prefix: Unique for the group.
        position: Of this rank in the group.
        ranks: Global rank by position.
        hosts: Host name by position.
        margin_s: How long ranks that are alive may take to answer, seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        position: int,
        ranks: Sequence[int],
        hosts: Sequence[str],
        margin_s: float = 3.0,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._position = position
        self._ranks = ranks
        self._hosts = hosts
        self._margin_s = margin_s

    def announce(self, answer: Answer) -> None:
        """Tell the others, before closing the connections that makes them ask."""
        try:
            self._store.set(self._key(self._position), json.dumps(asdict(answer)))
        except RuntimeError:
            pass  # a store that is gone is found out by `verdict`

    def verdict(self) -> PeerError:
        """Wait for the others' answers, at most `margin_s`, and return whom to blame."""
        try:
            answers = self._collect()
        except RuntimeError as error:
            return self._error(_STORE_HOST, f"it hosts the store, which is gone too ({type(error).__name__})", False)
        failed = {position: a.own for position, a in answers.items() if a.own is not None}
        if failed:
            culprit, own = min(failed.items())
            return self._error(culprit, f"it raised {own} in the middle of an all-reduce", False)
        missing = [position for position in range(len(self._ranks)) if position not in answers]
        closed = {a.suspect for a in answers.values() if a.is_closed}
        blamed = {a.suspect for a in answers.values()}
        # Gloo's own all-reduce does not say whose connection closed; but the first to run into a limit says so.
        all_closed = all(a.is_closed for a in answers.values())
        # A rank may be missing just because it is not in the call yet; who was waited for goes first.
        for candidates in (closed & set(missing), blamed & set(missing), missing):
            if candidates:
                culprit = min(candidate for candidate in candidates if candidate is not None)
                if culprit in closed or all_closed:
                    return self._error(culprit, "its connection closed in the middle of an all-reduce", False)
                return self._error(culprit, "it was silent in an all-reduce until the time was over", True)
        suspects = [a.suspect for _, a in sorted(answers.items()) if a.suspect is not None and not a.is_closed]
        reason = "all ranks live, but an all-reduce was not over in time; it was waited for first"
        return self._error(suspects[0] if suspects else self._position, reason, True)

    def _collect(self) -> dict[int, Answer]:
        deadline = time.monotonic() + self._margin_s
        everyone = range(len(self._ranks))
        answers: dict[int, Answer] = {}
        while True:
            for position in everyone:
                if position not in answers and self._store.check([self._key(position)]):
                    answers[position] = Answer(**json.loads(self._store.get(self._key(position))))
            if len(answers) >= len(self._ranks) - 1 or time.monotonic() > deadline:
                return answers
            time.sleep(_POLL_S)

    def _key(self, position: int) -> str:
        return f"{self._prefix}/rollcall/{position}"

    def _error(self, position: int, reason: str, is_timeout: bool) -> PeerError:
        kind = PeerTimeout if is_timeout else PeerError
        return kind(self._ranks[position], self._hosts[position], reason)
