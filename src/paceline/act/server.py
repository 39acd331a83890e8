"""The parameter server's shell: turns messages of workers into events for the chief, and its commands into tensors.

Every server keeps a shard of the parameters and the optimizer state that goes with it. Server 0 is the chief: it feeds
the policy and tells the others what to do. One thread does all of it, in order; links receive and send on their own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.adviser import Adviser
from paceline.act.channel import Channel, header
from paceline.act.chief import Chief, Command
from paceline.act.comm import CommThread
from paceline.act.groups import own_connection
from paceline.act.guest import Event, GuestLink
from paceline.act.keeper import Keeper
from paceline.act.messages import Buffers, Down, Spot, answer_tensors, timing_of
from paceline.act.peers import Peers
from paceline.act.pulse import Pulse, tell_failure
from paceline.act.shards import Shards
from paceline.act.snapshot import Snapshots
from paceline.decide.plan import Rejected
from paceline.decide.tree import Gardener, Growth, Round
from paceline.errors import PacelineError, PeerError
from paceline.policy.barrier import BSP
from paceline.types import NormSample, Rank

logger = logging.getLogger("paceline")
_DOOR_S = 0.03  # between two looks for workers who wish to come in
_LONGEST_WAIT_S = 0.25
_START_S = 300.0  # for all workers to come for the first time
_GRACE_S = 2.0  # for threads to end
_LAST_WORD = "end"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in a job with parameter servers; workers come first, then servers.

    Args:
        rank: Its own.
        num_workers, num_servers: How many there are.
        store: Prefixed for this run.
        peers: Where failures are noted.
        silence_s: Silence after which a worker has left and a server has failed, seconds.
    """

    rank: Rank
    num_workers: int
    num_servers: int
    store: dist.Store
    peers: Peers
    silence_s: float

    @property
    def server(self) -> int:
        """Which server this is, from 0; negative for workers."""
        return self.rank - self.num_workers


class Server:
    """One server, from the first worker to the last.

    Args:
        place: Who we are.
        shards: How the model is cut.
        keeper: Our shard.
        buffers: The model's.
        wire_dtype: What gradients and parameters travel in.
        chief: On server 0; None elsewhere.
        adviser: Likewise.
        snapshots: Where to save versions; None for nowhere.
        patience_s: How long all workers may be missing once they have been there, seconds.
        gardener: Of the transmission tree; None for none.
    """

    def __init__(
        self,
        place: Place,
        shards: Shards,
        keeper: Keeper,
        buffers: Buffers,
        wire_dtype: torch.dtype,
        chief: Chief | None,
        adviser: Adviser | None,
        snapshots: Snapshots | None,
        patience_s: float,
        gardener: Gardener | None,
    ) -> None:
        self._place = place
        self._shards = shards
        self._keeper = keeper
        self._buffers = buffers
        self._buffer_values = buffers.gather() if chief else torch.empty(0, dtype=torch.float64)
        self._wire_dtype = wire_dtype
        self._chief = chief
        self._adviser = adviser
        self._snapshots = snapshots
        self._patience_s = patience_s
        self._version = chief.version if chief else 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._links: dict[int, GuestLink] = {}
        self._norms: dict[int, list[dict[str, Any]]] = {}
        self._tree: tuple[int, dict[int, int]] = (0, {})
        self._gardener = gardener
        self._growth = Growth()
        self._last_update_s = time.monotonic()
        self._unsaved: dict[int, tuple[int, dict[str, Any]]] = {}
        self._unacknowledged = 0
        self._is_over = False
        self._last_company_s = time.monotonic()
        self._pulse = Pulse(place.store, f"server{place.server}", place.peers, place.silence_s)
        numbers = range(1, place.num_servers) if chief else [place.server]
        self._colleagues = [_Colleague(self, number) for number in numbers]
        self._to_chief: Callable[[list[Any]], None] = self._report if chief else self._colleagues[0].tell
        threading.Thread(target=self._mind_the_door, name="paceline-door", daemon=True).start()

    def plan(self, plan: Any) -> None:
        """The adviser wants another mode; called on its thread."""
        self._inbox.put(("plan", plan))

    def serve(self) -> None:
        """Serve until the last worker has left and has the final parameters.

        Raises:
            PeerError: another server failed, or all workers did.
        """
        try:
            while not self._is_over:
                with contextlib.suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=self._patience()))
                self._place.peers.check()
                if self._chief is not None:
                    self._chief.noise = self._adviser.noise if self._adviser else None
                    self._chief.wake(self._now_s())
                    self._carry_out(self._chief.take_commands())
                    self._check_company(self._chief)
            self._say_goodbye()
        except BaseException as error:
            self._end_in(error)
            raise
        finally:
            self._pulse.close()

    def put(self, event: Any) -> None:
        """Something happened; for other threads."""
        self._inbox.put(event)

    # ---- what happens --------------------------------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        match event:
            case Event("connected", number, rank):
                self._to_chief(["connected", number, rank])
            case Event("pushed", number, is_finite):
                self._to_chief(["pushed", number, is_finite])
            case Event("lost", number, reason):
                self._pulse.unwatch(f"link{number}")
                self._to_chief(["lost", number, reason])
            case Event(_, number) if number not in self._links:
                pass  # of a worker that has been sent away
            case Event("timing", number, told) if self._adviser:
                self._adviser.observe(timing_of(self._links[number].rank, told))
            case Event("more", number, epoch) if self._chief:
                lease = self._chief.more(number, epoch)
                self._links[number].send(answer_tensors(Down.LEASE, self._version, lease))
            case Event("bye", number, num_epochs):
                self._pulse.unwatch(f"link{number}")
                if self._chief:
                    self._chief.done(number, num_epochs, self._now_s())
            case ("plan", plan) if self._chief:
                # A mode is in force when all servers say so; until then there is no other.
                if self._unacknowledged:
                    self._refuse(plan)
                else:
                    self._chief.plan(plan, self._now_s())
            case ("join", number, rank):
                if self._chief:
                    self._pulse.watch(f"link{number}", lambda s: self.put(Event("lost", number, _silent(s))))
                self._links[number] = GuestLink(
                    self._place.store, number, rank, self._place.server, self._shards, self._buffers.size,
                    self._wire_dtype, self._inbox, self._place.peers,
                )  # fmt: skip
            case ("report", message):
                self._report(message)
            case ("commands", commands):
                self._carry_out(commands)

    def _report(self, message: list[Any]) -> None:
        """What one of the servers tells the chief, itself included."""
        chief, now_s = self._chief, self._now_s()
        assert chief is not None
        match message:
            case ["connected", number, rank]:
                is_late = chief.has_started and rank not in chief.present
                chief.connected(number, rank, now_s)
                if is_late and rank in chief.present:
                    self._tell(f"worker {rank} has come in")
            case ["pushed", number, is_finite]:
                chief.pushed(number, is_finite, now_s)
            case ["lost", number, reason]:
                guest = chief.guests.get(number)
                if guest is not None and chief.present.get(guest.rank) is guest:
                    self._tell(f"worker {guest.rank} has left: {reason}; its samples go to the others")
                chief.lost(number, now_s)
            case ["norms", version, norms, mean_sq]:
                self._gather_norms(version, dict(norms), mean_sq)
            case ["switched", _]:
                self._unacknowledged -= 1
            case ["saved", version]:
                self._count_saved(version)

    def _tell(self, message: str) -> None:
        if self._adviser:
            self._adviser.event(message)

    def _refuse(self, plan: Any) -> None:
        if self._adviser:
            self._adviser.observe(Rejected(plan))

    # ---- what the chief says ---------------------------------------------------------------------------------------

    def _carry_out(self, commands: list[Command]) -> None:
        if not commands:
            return
        if self._chief is not None:
            for colleague in self._colleagues:
                colleague.tell(commands)
        for command in commands:
            match command:
                case ["apply", shares, lr_scale, num_samples, wants_norms]:
                    self._apply(shares, lr_scale, num_samples, wants_norms)
                case ["release", number]:
                    self._release(self._links[number], Down.PARAMETERS)
                case ["cancel", number] if self._chief:
                    self._links[number].send([header(Down.CANCEL)])
                case ["tree", number, tree]:
                    self._tree = number, dict(tree)
                case ["again", number]:
                    self._send_parameters(self._links[number], answer_tensors(Down.AGAIN, self._version))
                case ["cut", parent, child] if self._chief and parent in self._links:
                    self._links[parent].send([header(Down.CUT, child)])
                case ["gone", number]:
                    self._pulse.unwatch(f"link{number}")
                    if number in self._links:
                        self._links.pop(number).expel()
                case ["switch", epoch]:
                    self._unacknowledged += self._place.num_servers if self._chief else 0
                    self._to_chief(["switched", epoch])
                case ["snapshot", version]:
                    self._save(version)
                case ["final"]:
                    self._is_over = True

    def _apply(self, shares: list[list[Any]], lr_scale: float, num_samples: int, wants_norms: bool) -> None:
        links = [self._links[number] for number, _ in shares]
        weights = dict(shares)
        for link in links:
            if link.via is not None:  # it is a part of its parent's
                weights[link.via] += weights[link.number]
        sources = [link for link in links if link.via is None]
        weighed = [(link.gradient, weights[link.number] / link.scale) for link in sources]
        if self._chief is not None:
            for link, (_, weight) in zip(links, shares, strict=True):
                self._buffer_values = self._buffer_values.add(link.buffers, alpha=weight)
        self._keeper.apply(weighed, lr_scale, num_samples)
        self._version += 1
        if self._gardener is not None and self._chief is not None:
            self._tend(self._chief, links, sources)
        if wants_norms:
            own, mean_sq = self._keeper.norms(weighed, [link.scale for link in links])
            by_link = [[number, sq] for (number, _), sq in zip(shares, own, strict=True)]
            self._to_chief(["norms", self._version, by_link, mean_sq])

    def _release(self, link: GuestLink, kind: Down) -> None:
        """Send parameters; to a worker with a parent only word of them, since they come through that."""
        number, tree = self._tree if kind == Down.PARAMETERS else (0, {})
        children = tuple(child for child, parent in tree.items() if parent == link.number)
        spot = Spot(number if tree else 0, tree.get(link.number, -1), children)
        if self._chief is not None:
            guest = self._chief.guests[link.number]
            lease, guest.lease = guest.lease, None
            told = answer_tensors(kind, self._version, lease, spot)
            told.append(self._buffer_values)
        else:
            told = answer_tensors(kind, self._version, spot=spot)
        if spot.parent < 0:
            self._send_parameters(link, told)
        else:
            link.send(told)

    def _send_parameters(self, link: GuestLink, told: list[Tensor]) -> None:
        link.send([*told, *self._shards.messages(self._keeper.parameters(), self._place.server)])

    def _tend(self, chief: Chief, links: list[GuestLink], sources: list[GuestLink]) -> None:
        """Let the gardener know of the round, and the chief of the tree it wants."""
        assert self._gardener is not None
        now_s = time.monotonic()
        interval_s, self._last_update_s = now_s - self._last_update_s, now_s
        ranks = sorted(chief.present)
        if not isinstance(chief.policy, BSP) or len(links) != len(ranks) or not sources:
            self._growth = replace(self._growth, tree={}, rounds=())
            chief.wanted_tree = {}
            return
        if bool(self._growth.tree) != (len(sources) < len(links)):
            return  # a tree comes and goes with the round after the one in which that was decided
        busy_s = _covered_s(link.pushed_s for link in sources)
        num_bytes = len(sources) * sources[0].gradient.nbytes
        before = self._growth
        self._growth = growth = self._gardener.step(before, Round(interval_s, max(busy_s, 1e-6), num_bytes), ranks)
        chief.wanted_tree = dict(growth.tree)
        if growth.tree and not before.tree:
            through = ", ".join(f"{child} through {parent}" for child, parent in sorted(growth.tree.items()))
            self._tell(
                f"the servers' ports are the bottleneck: workers send {through}; predicted {growth.promised:.2f}x"
            )
        elif before.tree and not growth.tree:
            self._tell(f"workers send straight to the servers again: the tree measured {growth.measured or 0:.2f}x")
        elif growth.tree and before.measured is None and growth.measured is not None:
            self._tell(f"the tree measured {growth.measured:.2f}x")

    def _gather_norms(self, version: int, norms: dict[int, float], mean_sq: float) -> None:
        """Add up over all servers, and let the adviser know when the last has told its part."""
        parts = self._norms.setdefault(version, [])
        parts.append({"norms": norms, "mean_sq": mean_sq})
        if len(parts) < self._place.num_servers:
            return
        del self._norms[version]
        assert self._chief is not None
        samples, mean_sq = self._chief.norm_samples.pop(version), sum(part["mean_sq"] for part in parts)
        total, guests = sum(samples.values()), self._chief.guests
        if self._adviser:
            self._adviser.take_norms(
                [
                    NormSample(guests[n].rank, version, sum(p["norms"][n] for p in parts), mean_sq, samples[n], total)
                    for n in samples
                ]
            )

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def _save(self, version: int) -> None:
        assert self._snapshots is not None
        self._snapshots.save(version, self._place.server, self._keeper.state_dict())
        if self._chief is not None:
            chief = {**self._chief.snapshots.pop(version), "buffers": self._buffer_values.tolist()}
            self._unsaved[version] = (self._place.num_servers, chief)
        self._to_chief(["saved", version])

    def _count_saved(self, version: int) -> None:
        missing, chief = self._unsaved[version]
        self._unsaved[version] = (missing - 1, chief)
        if missing == 1:
            del self._unsaved[version]
            assert self._snapshots is not None
            self._snapshots.complete(version, chief)

    def resume(self, version: int) -> None:
        """Go on from the snapshot of this version; before serving."""
        assert self._snapshots is not None
        self._keeper.load_state_dict(self._snapshots.load(version, self._place.server))
        self._version = version
        if self._chief is not None:
            self._buffer_values = torch.tensor(self._snapshots.load_chief(version)["buffers"], dtype=torch.float64)

    # ---- beginnings and ends ---------------------------------------------------------------------------------------

    def _mind_the_door(self) -> None:
        """Let in every worker that knocks, whenever it does."""
        store, seen = own_connection(self._place.store), set[int]()
        with contextlib.suppress(Exception):  # the store is gone: so is everybody who could knock
            while not self._is_over:
                for number in range(1, store.add("joins", 0) + 1):
                    if number not in seen and store.check([f"join/{number}"]):
                        seen.add(number)
                        self.put(("join", number, json.loads(store.get(f"join/{number}"))["rank"]))
                time.sleep(_DOOR_S)

    def _now_s(self) -> float:
        return self._adviser.now_s if self._adviser else time.monotonic()

    def _patience(self) -> float:
        wake_s = self._chief.next_wake_s() if self._chief else None
        return _LONGEST_WAIT_S if wake_s is None else min(_LONGEST_WAIT_S, max(0.0, wake_s - self._now_s()))

    def _check_company(self, chief: Chief) -> None:
        """Without workers a server waits for one to come (back), but not for ever."""
        now = time.monotonic()
        is_complete = len(chief.present) == self._place.num_workers
        if chief.is_over or (chief.present if chief.has_started else is_complete):
            self._last_company_s = now
        patience_s = self._patience_s if chief.has_started else _START_S
        if now - self._last_company_s > patience_s:
            missing = sorted(set(range(self._place.num_workers)) - set(chief.present))
            host = self._place.peers.hosts[missing[0]]
            raise PeerError(missing[0], host, f"workers {missing} have been missing for {patience_s:.0f} s")

    def _say_goodbye(self) -> None:
        """Everybody gets the final parameters; threads end here, since one inside Gloo may abort an ending process."""
        links = [link for link in self._links.values() if link.is_connected and self._knows(link)]
        for link in links:
            self._release(link, Down.FINAL)
            link.close()
        for link in links:
            link.end(_GRACE_S)
        for colleague in self._colleagues:
            colleague.end(_GRACE_S)
        if self._adviser and self._chief:
            self._adviser.close(samples=self._chief.sample_counts(), identical_parameters=None)

    def _knows(self, link: GuestLink) -> bool:
        """Whether the chief has heard of the worker: of one that died at the door it has not."""
        return self._chief is None or link.number in self._chief.guests

    def _end_in(self, error: BaseException) -> None:
        """Let everybody know why, before connections break."""
        place = self._place
        failure = error if isinstance(error, PeerError) else None
        if failure is None:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, PacelineError) else f"raised {error!r}"
            failure = PeerError(place.rank, place.peers.hosts[place.rank], reason)
        with contextlib.suppress(Exception):
            tell_failure(place.store, failure.rank, failure.reason, isinstance(error, TimeoutError))
        if self._adviser:
            with contextlib.suppress(Exception):
                self._adviser.fail(failure.rank, failure.host, failure.reason)


class _Colleague(threading.Thread):
    """One end of the channel between the chief and another server: sends in order, receives on a thread of its own."""

    def __init__(self, server: Server, number: int) -> None:
        place = server._place
        super().__init__(name=f"paceline-servers-{number}", daemon=True)
        self._server = server
        self._number = number
        self._is_chief = place.server == 0
        self._rank = place.num_workers + (number if self._is_chief else 0)  # the other's
        self._sender = CommThread(place.peers, name=f"paceline-to-servers-{number}")
        self._ready = threading.Event()
        self.start()

    def tell(self, message: list[Any]) -> None:
        """Commands of the chief's, or a report to it; after all before them."""

        def job() -> None:
            self._ready.wait()
            self._channel.send_json(message)

        self._sender.submit(job)

    def end(self, timeout_s: float) -> None:
        """Say that nothing will follow, and wait for the same of the other."""
        self.tell([_LAST_WORD])
        self._sender.close()
        self._sender.join(timeout_s)
        self.join(timeout_s)

    def run(self) -> None:
        """Put what the other says into the server's inbox."""
        place, other = self._server._place, f"server{self._number if self._is_chief else 0}"
        kind = "report" if self._is_chief else "commands"
        try:
            store = own_connection(place.store)
            self._channel = Channel(store, f"servers/{self._number}", position=0 if self._is_chief else 1)
            self._ready.set()
            self._server._pulse.watch(other, lambda s: place.peers.silent(self._rank, _silent(s)))
            while (message := self._channel.receive_json()) != [_LAST_WORD]:
                self._server.put((kind, message))
        except Exception as error:  # the shell's one place: a broken channel is news about the other server
            if not self._server._is_over:
                place.peers.lost(self._rank, f"its connection to another server broke ({error})")


def _silent(seconds: float) -> str:
    return f"no sign of life for {seconds:.0f} s (stopped, or cut off)"


def _covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these stretches of time lasted."""
    total_s, until_s = 0.0, float("-inf")
    for began_s, ended_s in sorted(stretches):
        total_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return total_s
