"""Who gets how much of the network: turns transfers that share ports into rates and finish times. Pure.

A port is one direction of one host's NIC. A flow goes through some ports and gets the max-min fair rate: no flow can
have more without taking from one that has no more than it. Rates hold until a flow begins or ends, then the flows
that share ports with it, directly or through others, are looked at again, once for all changes of an instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from paceline.sim.engine import Call, Engine


def max_min_rates(routes: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every flow.

    Water-filling: the port with the least capacity per flow fixes the rate of its flows; take both away; repeat.

    Args:
        routes: Ports of every flow, as indices into `capacities`, none twice.
        capacities: What a port carries, bytes/s, > 0.

    Returns:
        Rates in the order of `routes`, bytes/s; `inf` for a flow without ports.

    Source:
        Bertsekas and Gallager, Data Networks, section 6.5.2. Ours keeps the ports in a heap by their share, which
        only ever grows while others are filled.

    Example:
        >>> max_min_rates([(0, 1), (0, 2), (2,)], [10.0, 3.0, 30.0])
        [3.0, 7.0, 23.0]
    """
    rates = [inf] * len(routes)
    flows_of: dict[int, list[int]] = {}
    for flow, route in enumerate(routes):
        for port in route:
            flows_of.setdefault(port, []).append(flow)
    left = {port: capacities[port] for port in flows_of}
    count = {port: len(flows) for port, flows in flows_of.items()}
    shares = [(left[port] / count[port], port) for port in flows_of]
    heapify(shares)
    least = 0.0
    while shares:
        share, port = heappop(shares)
        if not count[port]:
            continue
        now = left[port] / count[port]
        if now > share:
            heappush(shares, (now, port))
            continue
        least = max(least, now)  # rounding must not take a flow's last bit of rate away
        for flow in flows_of[port]:
            if rates[flow] != inf:
                continue
            rates[flow] = least
            for other in routes[flow]:
                left[other] -= least
                count[other] -= 1
    return rates


class Flow:
    """A transfer under way: what is left of it, how fast it goes, and what happens at its end."""

    __slots__ = ("argument", "done", "finish_s", "group", "number", "ports", "rate", "remaining", "updated_s")

    def __init__(self, number: int, ports: tuple[int, ...], num_bytes: float, done: Call, argument: Any) -> None:
        self.number = number
        self.ports = ports
        self.remaining = num_bytes
        self.done = done
        self.argument = argument
        self.rate = 0.0
        self.updated_s = 0.0
        self.finish_s = inf
        self.group: _Group | None = None


class _Group:
    """Flows that share ports, directly or through others, and the event of the first of them to end."""

    __slots__ = ("event", "flows", "num_left")

    def __init__(self, flows: list[Flow]) -> None:
        self.flows = flows
        self.num_left = len(flows)
        self.event = 0


class Network:
    """The ports of a cluster and the flows through them, in virtual time.

    Args:
        engine: The clock.
        capacities: What each port carries, bytes/s, > 0; `inf` for a port that never holds anybody up.

    Example:
        >>> engine, ended = Engine(), []
        >>> network = Network(engine, [100.0, 100.0, 100.0])
        >>> for source in (0, 1):
        ...     _ = network.send((source, 2), 100.0, lambda who: ended.append((who, engine.now_s)), source)
        >>> engine.run(); ended
        [(0, 2.0), (1, 2.0)]
    """

    def __init__(self, engine: Engine, capacities: Sequence[float]) -> None:
        self._engine = engine
        self._capacities = list(capacities)
        self._flows: list[dict[Flow, None]] = [{} for _ in capacities]  # a dict keeps the order of arrival
        self._dirty: list[int] = []
        self._num_flows = 0
        self.num_shared = 0  # how often rates were computed anew

    def add_port(self, capacity: float) -> int:
        """Add a port, such as one that limits a single flow to `capacity` bytes/s; return its number."""
        self._capacities.append(capacity)
        self._flows.append({})
        return len(self._capacities) - 1

    def route(self, ports: Sequence[int]) -> tuple[int, ...]:
        """The ports among these that can hold a flow up."""
        return tuple(port for port in ports if self._capacities[port] < inf)

    def send(self, ports: tuple[int, ...], num_bytes: float, done: Call, argument: Any = None) -> Flow:
        """Begin a flow; `done(argument)` happens when its last byte has passed.

        Args:
            ports: As `route` returns them; without any the flow ends at once.
            num_bytes: How much, > 0; `inf` for a flow that goes on until it is cancelled.
            done, argument: What happens at its end.
        """
        engine = self._engine
        self._num_flows += 1
        flow = Flow(self._num_flows, ports, num_bytes, done, argument)
        flow.updated_s = engine.now_s
        alone, slowest = True, inf
        for port in ports:
            if self._flows[port]:
                alone = False
            self._flows[port][flow] = None
            slowest = min(slowest, self._capacities[port])
        if alone:  # nobody to share with: no need to look at anybody else
            flow.rate = slowest
            self._watch([flow])
        else:
            self._look_again(ports)
        return flow

    def cancel(self, flow: Flow) -> None:
        """End a flow before its time; harmless when it has ended."""
        if flow.group is None and not any(flow in self._flows[port] for port in flow.ports):
            return
        self._take_off(flow)

    def _take_off(self, flow: Flow) -> None:
        shared: list[int] = []
        for port in flow.ports:
            del self._flows[port][flow]
            if self._flows[port]:
                shared.append(port)
        group, flow.group = flow.group, None
        if group is not None:
            group.num_left -= 1
            if not group.num_left:
                self._engine.cancel(group.event)
        if shared:
            self._look_again(shared)

    def _look_again(self, ports: Sequence[int]) -> None:
        """Have rates around these ports looked at once everything else of this instant has happened."""
        if not self._dirty:
            self._engine.schedule(self._engine.now_s, self._settle)
        self._dirty.extend(ports)

    def _settle(self, _: None) -> None:
        dirty, self._dirty = self._dirty, []
        seen: set[int] = set()
        for port in dirty:
            if port not in seen and self._flows[port]:
                self._share(self._connected(port, seen))

    def _connected(self, start: int, seen: set[int]) -> list[Flow]:
        """All flows that share ports with those at `start`, directly or through others."""
        found: dict[Flow, None] = {}
        seen.add(start)
        ports = [start]
        for port in ports:  # grows while we go
            for flow in self._flows[port]:
                if flow in found:
                    continue
                found[flow] = None
                for other in flow.ports:
                    if other not in seen:
                        seen.add(other)
                        ports.append(other)
        return list(found)

    def _share(self, flows: list[Flow]) -> None:
        now_s = self._engine.now_s
        self.num_shared += 1
        for flow in flows:
            flow.remaining -= flow.rate * (now_s - flow.updated_s)
            flow.updated_s = now_s
        for flow, rate in zip(flows, max_min_rates([flow.ports for flow in flows], self._capacities), strict=True):
            flow.rate = rate
        self._watch(flows)

    def _watch(self, flows: list[Flow]) -> None:
        """Wait for the first of these to end; then the others' rates change anyway."""
        engine = self._engine
        group, first_s = _Group(flows), inf
        for flow in flows:
            if flow.group is not None:
                engine.cancel(flow.group.event)
            flow.group = group
            flow.finish_s = engine.now_s + max(0.0, flow.remaining) / flow.rate if flow.rate < inf else engine.now_s
            first_s = min(first_s, flow.finish_s)
        if first_s < inf:
            group.event = engine.schedule(first_s, self._end_first, group)

    def _end_first(self, group: _Group) -> None:
        now_s = self._engine.now_s
        ended = [flow for flow in group.flows if flow.finish_s <= now_s and flow.group is group]
        ended.sort(key=lambda flow: flow.number)  # those that end together end in the order in which they began
        for flow in ended:
            self._take_off(flow)
        for flow in ended:
            flow.done(flow.argument)
