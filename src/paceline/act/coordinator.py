"""The control plane: turns what this rank has seen into store keys, and rank 0's decisions into fences.

Two kinds of keys, all overwritten in place, so the store does not grow:

    status/RANK   what the rank wants known: a beat, its next exchange, what it has armed, a failure; after that, a
                  line each, the observations that rank 0 is not known to have read yet
    board         what rank 0 tells everybody: a beat, how many observations of each rank it has read, the proposal,
                  the decision, the ring's epoch, a failure

A plan takes effect by a two-phase commit: rank 0 proposes an exchange far enough ahead; each rank arms it unless it is
already there; rank 0 commits when all have, and an armed rank does not pass the fence before it knows the decision. A
rank attached to another parks first.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.act.peers import Peers
from paceline.decide.plan import Plan, plan_from_json
from paceline.record import encode

Board = dict[str, Any]
Status = dict[str, Any]
Lead = Callable[[list[Status], list[list[str]]], Board]  # all statuses, and the observations behind each, encoded
TICK_S = 0.2  # between two exchanges with the store; an eighth of it while a plan is under way


class Coordinator(threading.Thread):
    """One rank's end of the control plane.

    Args:
        rank, world_size: Who.
        store: A connection of this thread's own, prefixed for this run.
        peers: Where failures are noted.
        waiting_s: Returns how long the training thread has been waiting for others.
        lead: On rank 0: turns all statuses and observations into the next board; None elsewhere.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store,
        peers: Peers,
        waiting_s: Callable[[], float],
        lead: Lead | None,
    ) -> None:
        super().__init__(name="paceline-coordinator", daemon=True)
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._peers = peers
        self._waiting_s = waiting_s
        self._lead = lead
        self._outbox: deque[Any] = deque()
        self._unread: deque[str] = deque()  # encoded observations; the first is number `_status["first"]`
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._board: Board = {}
        self._board_seen = time.monotonic()
        self._armed: Plan | None = None
        self._answered = (0, 0)
        self._status: Status = {
            "beat": 0,
            "next": 1,
            "first": 0,
            "armed": [0, 0],
            "refused": [0, 0],
            "parked": 0,
            "over": -1,
            "fence": 0,
            "adopted": 0,
            "waiting_s": 0.0,
            "closing": False,
            "closed": False,
            "failure": None,
            "suspicion": None,
        }
        self.statuses: list[Status] = []  # everybody's, on rank 0
        self.last_contact = time.monotonic()
        self._resumed = self.last_contact
        store.set(f"status/{rank}", json.dumps(self._status))

    # ---- called by the training thread -------------------------------------------------------------------------

    def publish(self, value: Any) -> None:
        """Hand an observation (a value of `types.py`) to rank 0; never blocks."""
        self._outbox.append(value)

    def fence(self, next_exchange: int) -> Plan | None:
        """Pass the border before `next_exchange`: the plan to carry out here, or None to go on as before.

        Blocks only when a proposal for exactly this border is armed and not decided yet.
        """
        with self._lock:
            self._status["next"] = next_exchange
            plan = self._armed
        if plan is None or plan.effective_step != next_exchange:
            return None
        key = list(self._answered)
        while True:
            self._peers.check()
            decision = self._board.get("decision")
            if decision and decision["key"] == key:
                with self._lock:
                    self._armed = None
                return plan if decision["commit"] else None
            self._wake.set()
            time.sleep(0.005)

    def should_park(self) -> bool:
        """Whether a plan is coming that needs this attached rank to stand still."""
        return bool(self._board.get("prepare", 0) > self._status["adopted"])

    def park(self) -> Plan | None:
        """Stand still for the plan in preparation; the plan, once the ring has reached its fence."""
        prepare = self._board.get("prepare", 0)
        with self._lock:
            self._status["parked"] = prepare
            plan = self._armed
        if plan is not None and self._board.get("fence") == plan.epoch:
            with self._lock:
                self._armed = None
            return plan
        return None

    def unpark(self) -> None:
        """Move again."""
        with self._lock:
            self._status["parked"] = 0

    def epoch_over(self) -> int:
        """Last epoch that the ring has finished, as far as the board tells."""
        return int(self._board.get("over", -1))

    def note_epoch_over(self, epoch: int) -> None:
        """The ring has used up the samples of `epoch`."""
        with self._lock:
            self._status["over"] = epoch

    def note_fence(self, plan_epoch: int) -> None:
        """This rank stands at the fence of a plan."""
        with self._lock:
            self._status["fence"] = plan_epoch
        self._wake.set()

    def note_adopted(self, plan: Plan) -> None:
        """This rank has carried a plan out."""
        with self._lock:
            self._status["adopted"] = plan.epoch

    def note_failure(self, reason: str) -> None:
        """This rank fails and says why; told to everybody at once if the store still answers."""
        with self._lock:
            self._status["failure"] = reason
        self._wake.set()

    def note_closing(self) -> None:
        """This rank has left its loop for good and waits for those attached to it."""
        with self._lock:
            self._status["closing"] = True

    def close(self, info: dict[str, Any], timeout_s: float) -> None:
        """Send what is left, say that this rank is done, and stop. Rank 0 waits for the others, bounded."""
        with self._lock:
            self._status.update(closed=True, **info)
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and self._peers.failure is None and time.monotonic() < deadline:
            self._wake.set()
            if self._board.get("all_closed"):
                break
            time.sleep(0.02)
        self._stopping.set()
        self._wake.set()
        self.join(timeout=2.0)

    # ---- the coordinator's own thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Exchange with the store every `TICK_S` until stopped or a peer is lost."""
        while True:
            stopping = self._stopping.is_set()
            try:
                self._tick()
            except Exception as error:  # the shell's one place: a store that fails is news about its host
                if not stopping:
                    if self._lead is not None and not isinstance(error, dist.DistError):
                        raise
                    self._peers.lost(0, f"it hosts the store, and the connection to it broke ({error})")
                return
            if stopping:
                return
            in_flight = self._board.get("prepare") or self._board.get("proposal")
            self._wake.wait(TICK_S / 8 if in_flight else TICK_S)
            self._wake.clear()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.last_contact > 1.0 + 4 * TICK_S:
            self._resumed = now  # this process was asleep: the silence of others before that proves nothing
        while self._outbox:
            self._unread.append(json.dumps(encode(self._outbox.popleft())))
        with self._lock:
            self._status["beat"] += 1
            self._status["suspicion"] = self._peers.suspicion
            self._status["waiting_s"] = round(self._waiting_s(), 2)
            status = json.dumps(self._status)
        self._store.set(f"status/{self._rank}", "\n".join((status, *self._unread)))
        if self._lead is not None:
            raw = self._store.multi_get([f"status/{rank}" for rank in range(self._world_size)])
            told = [text.decode().split("\n") for text in raw]
            self.statuses = [json.loads(lines[0]) for lines in told]
            board = self._lead(self.statuses, [lines[1:] for lines in told])
            self._store.set("board", json.dumps(board))
        else:
            board = json.loads(self._store.get("board"))
        self._take_in(board)
        self.last_contact = time.monotonic()

    def _take_in(self, board: Board) -> None:
        now = time.monotonic()
        if board["beat"] != self._board.get("beat"):
            self._board_seen = now
        elif now - max(self._board_seen, self._resumed) > self._peers.silence_s:
            self._peers.silent(0, f"no sign of life for {self._peers.silence_s:.0f} s (killed or stopped)")
        while self._status["first"] < board["read"][self._rank]:
            self._unread.popleft()
            self._status["first"] += 1
        proposal = board.get("proposal")
        if proposal and tuple(proposal["key"]) != self._answered:
            self._answer(plan_from_json(proposal["plan"]), tuple(proposal["key"]))
        self._board = board
        failure = board.get("failure")
        if failure:
            note = self._peers.silent if failure["silent"] else self._peers.lost
            note(failure["rank"], failure["reason"])

    def _answer(self, plan: Plan, key: tuple[int, int]) -> None:
        with self._lock:
            self._answered = key
            if self._status["parked"] == plan.epoch or self._status["next"] < plan.effective_step:
                self._armed = plan
                self._status["armed"] = list(key)
            else:
                self._armed = None
                self._status["refused"] = list(key)
        self._wake.set()
