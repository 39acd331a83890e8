"""How gradients and parameters travel: turns finished gradients into arrivals, and releases into starts. Pure.

In the parameter-server architecture every gradient goes to the servers, and parameters come from there. A push
reaches all servers and is added up by each, one after the other, before it arrives; an update is applied by each,
and a version is made ready to be sent once, then sent to whoever was released with it. All that takes the servers'
CPU and NICs, so a policy that updates and releases more often loads them more, by itself.

In the ring architecture one rule, the same for every policy, says who travels how:

1. Where the policy attaches ranks to parents (`parent_of`), an attached rank's gradient goes to its parent's host and
   its parameters come from there, as to and from a server of its own. (In a cluster of attached ranks, `clusters`,
   the first is the parent of the others.) All other ranks are *ring members*.
2. Otherwise, where the policy applies no stale gradients (`staleness_bound` 0: BSP, KSync that drops or cancels, and
   so on), everybody is a ring member.
3. Otherwise gradients of one update belong to different versions, and no ring can be formed in time: everybody is in
   a *star* around the fastest rank, whose host serves like a parameter server.

A ring member's gradient stays where it is until it joins an update; then the members in that update all-reduce, and
those of them that are released start when that is done. A ring member that is released without having been in the
latest update (it was late, cancelled, or has just joined) fetches the parameters from the fastest rank's host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from paceline.policy.base import SyncPolicy
from paceline.sim.cluster import Cluster, Job, Workload
from paceline.sim.cores import Cores
from paceline.sim.engine import Call, Engine
from paceline.sim.network import Flow, Network
from paceline.types import Rank


def parents(policy: SyncPolicy[Any]) -> dict[Rank, Rank] | None:
    """Whom every attached rank of a policy, or of the one that it wraps, sends to; None where there is no ring.

    Example:
        >>> from paceline.policy.barrier import BSP
        >>> from paceline.policy.ring import AttachedRing, GroupedRing
        >>> parents(AttachedRing((0, 1), {2: 1})), parents(BSP())
        ({2: 1}, None)
        >>> parents(GroupedRing((0,), clusters=((1, 2, 3),), parent_of={1: 0}))
        {1: 0, 2: 1, 3: 1}
    """
    inner: Any = policy
    while inner is not None:
        if hasattr(inner, "parent_of"):
            clusters = getattr(inner, "clusters", ())
            return {**inner.parent_of, **{rank: cluster[0] for cluster in clusters for rank in cluster[1:]}}
        inner = getattr(inner, "inner", None)
    return None


class Server:
    """Takes in, adds up, applies and copies, one thing after the other, on the cores of its host.

    Args:
        cores: Of its host.
        demand: CPU demand while it works, cores.
    """

    __slots__ = ("_cores", "_demand", "_queue", "busy_s", "copied")

    def __init__(self, cores: Cores, demand: float) -> None:
        self._cores = cores
        self._demand = demand
        self._queue: deque[tuple[float, Call, Any]] = deque()
        self.copied = -1  # the version that is ready to be sent
        self.busy_s = 0.0  # work done, seconds undisturbed

    def do(self, work_s: float, done: Call, argument: Any = None) -> None:
        """Have a piece of work done after all that was asked for before; then `done(argument)`."""
        if not self._queue and work_s == 0.0:
            done(argument)
            return
        self._queue.append((work_s, done, argument))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        self.busy_s += self._queue[0][0]
        self._cores.run(self._queue[0][0], self._demand, self._end)

    def _end(self, _: None) -> None:
        finished = self._queue.popleft()
        if self._queue:
            self._begin()
        finished[1](finished[2])


@dataclass(slots=True)
class _Reduction:
    """An all-reduce under way or to come, and what waits for its end."""

    members: tuple[Rank, ...]
    starts: list[Rank] = field(default_factory=list)
    fetches: list[Rank] = field(default_factory=list)
    calls: list[tuple[Call, Any]] = field(default_factory=list)


_Trip = tuple[Rank, int, int, bool]  # whose, which of its turns, the hub's host, whether it is a push


class Exchange:
    """The data plane of a cluster in virtual time.

    Args:
        engine: The clock.
        cluster, workload: What there is, and what a gradient costs.
        cores: CPU of every host.
        arrived: Called with a rank whose gradient has reached where updates are made.
        started: Called with ranks that have the parameters they were released with.
    """

    def __init__(
        self,
        engine: Engine,
        cluster: Cluster,
        workload: Workload,
        cores: Sequence[Cores],
        arrived: Callable[[Rank], None],
        started: Callable[[Sequence[Rank]], None],
    ) -> None:
        self._engine = engine
        self._cluster = cluster
        self._model_bytes = workload.model_bytes
        self._cores = cores
        self._arrived = arrived
        self._started = started
        self.network = Network(
            engine, [end for host in cluster.hosts for end in (host.out_bytes_per_s, host.in_bytes_per_s)]
        )
        self._servers: dict[int, Server] = {}
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}
        num_ranks = cluster.num_ranks
        self._hubs: list[tuple[int, ...]] = [cluster.server_hosts] * num_ranks  # where each one's gradient goes
        self._look_at_costs()
        self._source: tuple[int, ...] = cluster.server_hosts  # where a ring member without parameters gets them
        self._applies = cluster.server_hosts  # hosts whose servers apply updates
        self._turns = [0] * num_ranks  # a trip of an earlier turn was called off
        self._missing = [0] * num_ranks
        self._flows: list[list[Flow]] = [[] for _ in range(num_ranks)]
        self._version = 0
        self._in_update: frozenset[Rank] = frozenset()  # ring members in the latest update
        self._reductions: deque[_Reduction] = deque()
        for job in cluster.jobs:
            engine.schedule(job.from_s, self._begin_job, job)

    def server(self, host: int) -> Server:
        """Whatever serves others on a host."""
        if host not in self._servers:
            self._servers[host] = Server(self._cores[host], self._cluster.server_cores)
        return self._servers[host]

    def adopt(self, policy: SyncPolicy[Any], by_speed: Sequence[Rank]) -> None:
        """From now on gradients travel as this policy needs it; trips under way end as they began.

        Args:
            policy: In force from now on.
            by_speed: The ranks that take part, fastest first, at least one.
        """
        if self._cluster.arch == "ps":
            return
        hosts = self._cluster.rank_hosts
        attached = parents(policy)
        is_star = attached is None and policy.staleness_bound != 0
        attached = attached or {}
        self._source = (hosts[next((rank for rank in by_speed if rank not in attached), by_speed[0])],)
        self._applies = self._source if is_star else ()
        self._hubs = [self._applies] * len(hosts)
        for child, parent in attached.items():
            self._hubs[child] = (hosts[parent],)
        self._look_at_costs()

    def send(self, rank: Rank) -> None:
        """This rank has finished a gradient."""
        if self._is_free[rank]:
            self._arrived(rank)
        else:
            self._travel(rank, self._hubs[rank], is_push=True)

    def apply(self, ranks: Sequence[Rank]) -> None:
        """Make the next version of these ranks' gradients, which have arrived."""
        self._version += 1
        for host in self._applies:
            self.server(host).do(self._cluster.apply_s_per_byte * self._part(host), _nothing)
        if self._cluster.arch == "ps":
            return
        members = tuple(rank for rank in ranks if not self._hubs[rank])
        self._in_update = frozenset(members)
        if len(members) > 1:
            self._reductions.append(_Reduction(members))
            if len(self._reductions) == 1:
                self._reduce()

    def fetch(self, ranks: Sequence[Rank]) -> None:
        """Bring the newest parameters to these ranks, which were released."""
        if self._cluster.arch == "ps":
            self._pull(ranks)
            return
        has_it = [rank for rank in ranks if rank in self._in_update]
        others = [rank for rank in ranks if rank not in self._in_update]
        if self._reductions:
            self._reductions[-1].starts += has_it
            self._reductions[-1].fetches += others
            return
        if has_it:
            self._started(has_it)
        self._pull(others)

    def when_made(self, call: Call, argument: Any = None) -> None:
        """Have `call(argument)` happen when the newest version exists."""
        if self._reductions:
            self._reductions[-1].calls.append((call, argument))
        elif self._applies:
            self.server(self._applies[0]).do(0.0, call, argument)
        else:
            call(argument)

    def abort(self, rank: Rank) -> None:
        """Call off whatever is on its way from or to this rank."""
        self._turns[rank] += 1
        for flow in self._flows[rank]:
            self.network.cancel(flow)
        self._flows[rank].clear()
        for reduction in self._reductions:
            for waiting in (reduction.starts, reduction.fetches):
                if rank in waiting:
                    waiting.remove(rank)

    def _begin_job(self, job: Job) -> None:
        """Let a co-located job load its host: like a flow that wants no more than it would send undisturbed."""
        self._cores[job.host].load(job.cores)
        flows = []
        for port, rate in ((2 * job.host, job.out_bytes_per_s), (2 * job.host + 1, job.in_bytes_per_s)):
            route = self.network.route((port,))
            if route and rate:
                flows.append(self.network.send((*route, self.network.add_port(rate)), inf, _nothing))
        if job.until_s is not None:
            self._engine.schedule(job.until_s, self._end_job, (job, flows))

    def _end_job(self, ending: tuple[Job, list[Flow]]) -> None:
        job, flows = ending
        self._cores[job.host].load(-job.cores)
        for flow in flows:
            self.network.cancel(flow)

    # ---- trips between a rank and its hubs -----------------------------------------------------------------------

    def _pull(self, ranks: Sequence[Rank]) -> None:
        if self._all_free:
            self._started(ranks)
            return
        at_once = [rank for rank in ranks if self._is_free[rank] and self._hubs[rank]]
        others = [rank for rank in ranks if not (self._is_free[rank] and self._hubs[rank])]
        if at_once:
            self._started(at_once)
        for rank in others:
            self._travel(rank, self._hubs[rank] or self._source, is_push=False)

    def _look_at_costs(self) -> None:
        """See whose gradients arrive, and parameters come, in no time: there is no need to make these trips."""
        is_free = {}
        for place in set(zip(self._cluster.rank_hosts, self._hubs, strict=True)):
            home, hubs = place
            latency_s = max((self._cluster.latency_s(home, hub) for hub in hubs), default=0.0)
            is_free[place] = not hubs or (self._model_bytes == 0 and latency_s == 0)
        self._is_free = [is_free[place] for place in zip(self._cluster.rank_hosts, self._hubs, strict=True)]
        self._all_free = all(self._is_free) and all(self._hubs)

    def _travel(self, rank: Rank, hubs: tuple[int, ...], is_push: bool) -> None:
        self._turns[rank] += 1
        self._missing[rank] = len(hubs)
        self._flows[rank].clear()
        for hub in hubs:
            trip = (rank, self._turns[rank], hub, is_push)
            if is_push:
                self._leave(trip)
            else:
                server = self.server(hub)
                cost_s = 0.0 if server.copied == self._version else self._cluster.copy_s_per_byte * self._part(hub)
                server.copied = self._version
                server.do(cost_s, self._leave, trip)

    def _part(self, hub: int) -> float:
        """Bytes of the model that one of the hubs holds."""
        return self._model_bytes / len(self._applies) if hub in self._applies else self._model_bytes

    def _leave(self, trip: _Trip) -> None:
        rank, _, hub, _ = trip
        latency_s = self._cluster.latency_s(self._cluster.rank_hosts[rank], hub)
        if latency_s > 0:
            self._engine.schedule(self._engine.now_s + latency_s, self._flow, trip)
        else:
            self._flow(trip)

    def _flow(self, trip: _Trip) -> None:
        rank, turn, hub, is_push = trip
        if turn != self._turns[rank]:
            return
        home = self._cluster.rank_hosts[rank]
        route = self._route(home, hub) if is_push else self._route(hub, home)
        if route and self._model_bytes:
            self._flows[rank].append(self.network.send(route, self._part(hub), self._landed, trip))
        else:
            self._landed(trip)

    def _route(self, source: int, target: int) -> tuple[int, ...]:
        """The ports between two hosts; none within a host."""
        route = self._routes.get((source, target))
        if route is None:
            ports = () if source == target else (2 * source, 2 * target + 1)
            route = self._routes[source, target] = self.network.route(ports)
        return route

    def _landed(self, trip: _Trip) -> None:
        rank, turn, hub, is_push = trip
        if turn != self._turns[rank]:
            return
        if is_push:
            self.server(hub).do(self._cluster.sum_s_per_byte * self._part(hub), self._summed, trip)
        else:
            self._missing[rank] -= 1
            if not self._missing[rank]:
                self._started((rank,))

    def _summed(self, trip: _Trip) -> None:
        rank, turn, _, _ = trip
        if turn != self._turns[rank]:
            return
        self._missing[rank] -= 1
        if not self._missing[rank]:
            self._arrived(rank)

    # ---- the ring ------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Begin the next all-reduce: its latency, then one flow through all members' NICs at once."""
        latency_s = self._cluster.ring_latency_s(self._reductions[0].members)
        self._engine.schedule(self._engine.now_s + latency_s, self._reduce_bytes)

    def _reduce_bytes(self, _: None) -> None:
        members = self._reductions[0].members
        hosts = dict.fromkeys(self._cluster.rank_hosts[rank] for rank in members)
        ports = [port for host in hosts for port in (2 * host, 2 * host + 1)] if len(hosts) > 1 else []
        route = self.network.route(ports)
        if route and self._model_bytes:
            self.network.send(route, self._cluster.ring_bytes(len(members), self._model_bytes), self._reduced)
        else:
            self._reduced(None)

    def _reduced(self, _: None) -> None:
        reduction = self._reductions.popleft()
        if self._reductions:
            self._reduce()
        for call, argument in reduction.calls:
            call(argument)
        if reduction.starts:
            self._started(reduction.starts)
        self._pull(reduction.fetches)


def _nothing(_: None) -> None:
    """What follows from an applied update: the next thing in the server's queue."""
