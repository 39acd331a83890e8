"""Signs of life over the store: turns beats of other processes into silence, and the first failure into everybody's.

Connections tell at once when a process dies. Only its beat tells that it was stopped, and only the store tells
everybody who was first to fail, when one failure breaks connection after connection.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from paceline.act.groups import own_connection
from paceline.act.peers import Peers
from paceline.types import Rank

_TICK_S = 0.25
OnSilent = Callable[[float], None]


class Pulse(threading.Thread):
    """Beats under one name, watches others', and listens for failures.

    Args:
        store: Prefixed for this run.
        name: Whose beat this is; unique.
        peers: Where failures are noted.
        silence_s: Silence of another after which it is reported, once, seconds.
    """

    def __init__(self, store: dist.Store, name: str, peers: Peers, silence_s: float) -> None:
        super().__init__(name="paceline-pulse", daemon=True)
        self._store = own_connection(store)
        self._name = name
        self._peers = peers
        self._silence_s = silence_s
        self._watched: dict[str, tuple[OnSilent, bytes, float]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._store.set(f"beat/{name}", "0")
        self.start()

    def watch(self, name: str, on_silent: OnSilent) -> None:
        """Call `on_silent` with the seconds of silence, on this thread, when `name`, which beats, falls silent."""
        with self._lock:
            self._watched[name] = (on_silent, b"", time.monotonic())

    def unwatch(self, name: str) -> None:
        """Stop watching."""
        with self._lock:
            self._watched.pop(name, None)

    def close(self) -> None:
        """Stop beating."""
        self._stopping.set()
        if threading.current_thread() is not self:
            self.join(timeout=1.0)

    def run(self) -> None:
        """Beat until closed, or until the store is gone: then its host's end is noticed by others."""
        beat, last = 0, time.monotonic()
        while not self._stopping.wait(_TICK_S):
            now = time.monotonic()
            if now - last > 1.0 + 4 * _TICK_S:  # this process was asleep: the silence of others proves nothing
                with self._lock:
                    self._watched = {name: (call, seen, now) for name, (call, seen, _) in self._watched.items()}
            last = now
            beat += 1
            try:
                self._store.set(f"beat/{self._name}", str(beat))
                self._look(now)
                if self._store.check(["failure"]):
                    self._learn(json.loads(self._store.get("failure")))
            except Exception:  # the shell's one place: without a store there is no news, and connections tell the rest
                return

    def _look(self, now: float) -> None:
        with self._lock:
            watched = dict(self._watched)
        if not watched:
            return
        watched = {name: seen for name, seen in watched.items() if self._store.check([f"beat/{name}"])}
        beats = self._store.multi_get([f"beat/{name}" for name in watched]) if watched else []
        for (name, (call, seen, since)), beat in zip(watched.items(), beats, strict=True):
            if beat != seen:
                with self._lock:
                    if name in self._watched:
                        self._watched[name] = (call, beat, now)
            elif now - since > self._silence_s:
                self.unwatch(name)
                call(now - since)

    def _learn(self, failure: dict[str, object]) -> None:
        note = self._peers.silent if failure["silent"] else self._peers.lost
        note(int(str(failure["rank"])), str(failure["reason"]))


def tell_failure(store: dist.Store, rank: Rank, reason: str, silent: bool = False) -> None:
    """Let everybody know that `rank` failed; the first to be told of counts."""
    if store.add("failures", 1) == 1:
        store.set("failure", json.dumps({"rank": rank, "reason": reason, "silent": silent}))


def wait_for(store: dist.Store, key: str, peers: Peers) -> bytes:
    """What another process puts into the store, or its failure, whichever comes first.

    Raises:
        PeerError: somebody failed.
    """
    while not store.check([key]):
        if store.check(["failure"]):
            failure = json.loads(store.get("failure"))
            peers.lost(int(failure["rank"]), str(failure["reason"]))
        peers.check()
        time.sleep(0.02)
    return bytes(store.get(key))
