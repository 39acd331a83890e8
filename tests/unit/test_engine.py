"""The virtual clock, and what shares a host's CPU and NICs in it."""

from fractions import Fraction
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError, SimulationError
from paceline.sim.cores import Cores
from paceline.sim.engine import Engine
from paceline.sim.network import Network, max_min_rates

# ---- the clock -------------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_then_of_scheduling():
    engine, said = Engine(), []
    for time_s, what in ((2.0, "d"), (1.0, "a"), (1.0, "b"), (1.5, "c")):
        engine.schedule(time_s, said.append, what)
    engine.run()
    assert said == ["a", "b", "c", "d"]
    assert (engine.now_s, engine.num_events) == (2.0, 4)


def test_an_event_may_schedule_others_at_its_own_time():
    engine, said = Engine(), []
    engine.schedule(1.0, lambda _: engine.schedule(1.0, said.append, "after"))
    engine.schedule(1.0, said.append, "before")
    engine.run()
    assert said == ["before", "after"]


def test_a_cancelled_event_does_not_happen_and_takes_no_time():
    engine, said = Engine(), []
    late = engine.schedule(9.0, said.append, "late")
    first = engine.schedule(1.0, said.append, "first")
    engine.cancel(late)
    engine.cancel(late)
    engine.run()
    engine.cancel(first)  # it has happened
    assert (said, engine.now_s, engine.num_events) == (["first"], 1.0, 1)


def test_a_run_ends_at_its_time_and_can_go_on():
    engine, said = Engine(), []
    for time_s in (1.0, 2.0, 3.0):
        engine.schedule(time_s, said.append, time_s)
    engine.run(until_s=2.5)
    assert (said, engine.now_s) == ([1.0, 2.0], 2.5)
    engine.run()
    assert said == [1.0, 2.0, 3.0]


def test_stop_ends_a_run_after_the_present_event():
    engine, said = Engine(), []
    engine.schedule(1.0, lambda _: (said.append("stop"), engine.stop()))
    engine.schedule(1.0, said.append, "too late")
    engine.run()
    assert said == ["stop"]


def test_the_bound_on_events_is_an_error_that_says_so():
    engine = Engine(max_events=10)

    def again(_):
        engine.schedule(engine.now_s + 1.0, again)

    engine.schedule(0.0, again)
    with pytest.raises(SimulationError, match="10 events happened by 9 virtual seconds"):
        engine.run()
    assert issubclass(SimulationError, PacelineError)


@pytest.mark.parametrize("time_s", [0.5, float("nan")])
def test_the_past_cannot_be_scheduled(time_s):
    engine = Engine()
    engine.schedule(1.0, lambda _: engine.schedule(time_s, print))
    with pytest.raises(ValueError, match="cannot schedule"):
        engine.run()


def test_a_bound_of_no_events_is_refused():
    with pytest.raises(ValueError, match="max_events"):
        Engine(max_events=0)


# ---- cores -----------------------------------------------------------------------------------------------------------


def finish_times(num_cores, tasks, loads=()):
    """When each of these (begin, work, demand) ends on a host; loads are (time, cores)."""
    engine = Engine()
    cores, ended = Cores(engine, num_cores), {}
    for time_s, change in loads:
        engine.schedule(time_s, cores.load, change)

    def begin(i):
        cores.run(*tasks[i][1:], lambda j: ended.update({j: engine.now_s}), i)

    for i, task in enumerate(tasks):
        engine.schedule(task[0], begin, i)
    engine.run()
    return [ended[i] for i in range(len(tasks))]


def fluid_finish_times(num_cores, tasks):
    """The same from scratch: everything looked at again at every event, in exact numbers."""
    left = [Fraction(work) for _, work, _ in tasks]
    ended = [None] * len(tasks)
    now = Fraction(0)
    while None in ended:
        running = [i for i, (begin, _, _) in enumerate(tasks) if begin <= now and ended[i] is None]
        demand = sum((Fraction(tasks[i][2]) for i in running), Fraction(0))
        speed = min(Fraction(1), Fraction(num_cores) / demand) if demand else Fraction(1)
        nexts = [now + left[i] / speed for i in running] + [Fraction(begin) for begin, _, _ in tasks if begin > now]
        step, now = min(nexts) - now, min(nexts)
        for i in running:
            left[i] -= step * speed
            ended[i] = now if left[i] == 0 else None
    return [float(end) for end in ended]


def test_work_runs_at_full_speed_while_cores_suffice():
    assert finish_times(2.0, [(0.0, 1.0, 1.0), (0.0, 3.0, 1.0)]) == [1.0, 3.0]


def test_oversubscription_slows_everybody_in_proportion():
    assert finish_times(2.0, [(0.0, 1.0, 1.0)] * 4) == [2.0] * 4
    assert finish_times(1.0, [(0.0, 2.0, 1.0), (1.0, 0.5, 1.0)]) == [2.5, 2.0]


def test_other_load_slows_for_as_long_as_it_lasts():
    assert finish_times(1.0, [(0.0, 2.0, 1.0)], loads=[(1.0, 3.0), (3.0, -3.0)]) == [3.5]


def test_cancelled_work_frees_its_cores():
    engine, ended = Engine(), []
    cores = Cores(engine, 1.0)
    cores.run(2.0, 1.0, lambda _: ended.append(engine.now_s))
    other = cores.run(2.0, 1.0, lambda _: ended.append("other"))
    engine.schedule(1.0, cores.cancel, other)
    engine.schedule(1.5, cores.cancel, other)  # harmless
    engine.run()
    assert ended == [2.5]
    assert cores.speed == 1.0


def test_a_host_that_cannot_be_overloaded_keeps_no_accounts():
    engine, ended = Engine(), []
    cores = Cores(engine, 4.0, most_demand=4.0)
    assert not cores.is_shared
    for i in range(4):
        cores.run(1.0, 1.0, ended.append, i)
    cores.cancel(cores.run(1.0, 1.0, ended.append, "cancelled"))
    cores.load(1.0)
    engine.run()
    assert (ended, engine.now_s, cores.speed) == ([0, 1, 2, 3], 1.0, 1.0)


def test_a_host_without_cores_is_refused():
    with pytest.raises(ValueError, match="needs cores"):
        Cores(Engine(), 0.0)


quarters = st.integers(1, 12).map(lambda n: n / 4)


@settings(max_examples=60, deadline=None)
@given(
    num_cores=quarters,
    tasks=st.lists(st.tuples(st.integers(0, 8).map(lambda n: n / 4), quarters, quarters), min_size=1, max_size=6),
)
def test_shared_cores_agree_with_a_fluid_model_from_scratch(num_cores, tasks):
    assert finish_times(num_cores, tasks) == pytest.approx(fluid_finish_times(num_cores, tasks))


# ---- the network -----------------------------------------------------------------------------------------------------

NUM_PORTS = 5
routes_of_flows = st.lists(
    st.lists(st.integers(0, NUM_PORTS - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=7
)
port_capacities = st.lists(st.integers(1, 20).map(float), min_size=NUM_PORTS, max_size=NUM_PORTS)


def filled(routes, capacities):
    """Max-min rates by filling everybody alike until a port is full, in exact numbers."""
    rates = [Fraction(0)] * len(routes)
    open_flows = set(range(len(routes)))
    while open_flows:
        room = {}
        for port, capacity in enumerate(capacities):
            here = [flow for flow in open_flows if port in routes[flow]]
            if here:
                used = sum((rates[flow] for flow, route in enumerate(routes) if port in route), Fraction(0))
                room[port] = (Fraction(capacity) - used) / len(here)
        step = min(room.values())
        for flow in open_flows:
            rates[flow] += step
        full = {port for port, left in room.items() if left == step}
        open_flows = {flow for flow in open_flows if not full & set(routes[flow])}
    return [float(rate) for rate in rates]


@settings(max_examples=200, deadline=None)
@given(routes=routes_of_flows, capacities=port_capacities)
def test_rates_are_those_of_filling_everybody_alike(routes, capacities):
    assert max_min_rates(routes, capacities) == pytest.approx(filled(routes, capacities))


@settings(max_examples=200, deadline=None)
@given(routes=routes_of_flows, capacities=port_capacities)
def test_no_port_is_overfull_and_every_flow_is_held_up_somewhere(routes, capacities):
    rates = max_min_rates(routes, capacities)
    loads = [sum(rate for rate, route in zip(rates, routes, strict=True) if p in route) for p in range(NUM_PORTS)]
    assert all(load <= capacity * (1 + 1e-9) for load, capacity in zip(loads, capacities, strict=True))
    for rate, route in zip(rates, routes, strict=True):
        fullest = [p for p in route if loads[p] >= capacities[p] * (1 - 1e-9)]
        assert any(rate >= max(r for r, o in zip(rates, routes, strict=True) if p in o) * (1 - 1e-9) for p in fullest)


def test_a_flow_without_ports_is_held_up_by_nothing():
    assert max_min_rates([(), (0,)], [2.0]) == [inf, 2.0]


def sent(flows, capacities, until=None):
    """When each of these (begin, bytes, ports) ends; `until` cancels flows by number at a time."""
    engine = Engine()
    network, ended, running = Network(engine, capacities), {}, {}

    def begin(i):
        _, num_bytes, ports = flows[i]
        running[i] = network.send(network.route(ports), num_bytes, lambda j: ended.update({j: engine.now_s}), i)

    for i, (begin_s, _, _) in enumerate(flows):
        engine.schedule(begin_s, begin, i)
    for i, time_s in (until or {}).items():
        engine.schedule(time_s, lambda j: network.cancel(running[j]), i)
    engine.run()
    return [ended.get(i) for i in range(len(flows))]


def fluid_sent(flows, capacities):
    """The same from scratch: rates by filling, everything looked at again at every event."""
    left = [Fraction(num_bytes) for _, num_bytes, _ in flows]
    ended = [None] * len(flows)
    now = Fraction(0)
    while None in ended:
        running = [i for i, (begin, _, _) in enumerate(flows) if begin <= now and ended[i] is None]
        rates = {}
        if running:
            routes = [flows[i][2] for i in running]
            rates = {i: Fraction(rate) for i, rate in zip(running, filled(routes, capacities), strict=True)}
        nexts = [now + left[i] / rates[i] for i in running]
        nexts += [Fraction(begin) for begin, _, _ in flows if begin > now]
        step = min(nexts) - now
        now = min(nexts)
        for i in running:
            left[i] -= step * rates[i]
            if left[i] <= Fraction(1, 10**9):
                ended[i] = now
    return [float(end) for end in ended]


def test_flows_share_and_take_what_others_leave():
    # Two flows into port 2: half each; when the short one has ended the other has it all.
    assert sent([(0.0, 50.0, (0, 2)), (0.0, 100.0, (1, 2))], [100.0] * 3) == [1.0, 1.5]


def test_flows_that_share_nothing_do_not_meet():
    assert sent([(0.0, 100.0, (0, 1)), (0.5, 100.0, (2, 3))], [100.0] * 4) == [1.0, 1.5]


def test_equal_flows_of_one_instant_end_together_and_are_looked_at_once():
    engine, ended = Engine(), []
    network = Network(engine, [100.0] * 33)
    for i in range(32):
        network.send((i, 32), 100.0, lambda j: ended.append((j, engine.now_s)), i)
    engine.run()
    assert ended == [(i, 32.0) for i in range(32)]
    assert network.num_shared == 1


def test_a_cancelled_flow_frees_its_ports_and_leaves_nothing_behind():
    assert sent([(0.0, 100.0, (0, 2)), (0.0, 100.0, (1, 2))], [100.0] * 3, until={0: 1.0}) == [None, 1.5]
    engine = Engine()
    network = Network(engine, [1.0, 1.0])
    flows = [network.send((0,), 100.0, print), network.send((0, 1), 100.0, print)]
    engine.schedule(1.0, lambda _: [network.cancel(flow) for flow in flows * 2])
    engine.run()
    assert engine.now_s == 1.0


def test_a_flow_of_its_own_rate_takes_no_more_than_that():
    engine, ended = Engine(), []
    network = Network(engine, [100.0])
    limited = network.send((0, network.add_port(20.0)), inf, print)
    network.send((0,), 80.0, lambda _: (ended.append(engine.now_s), network.cancel(limited)))
    engine.run()
    assert ended == [1.0]


def test_ports_without_limit_hold_nobody_up():
    assert sent([(0.0, 1e9, (0, 1)), (1.0, 10.0, (1, 2))], [inf, inf, 10.0]) == [0.0, 2.0]


@settings(max_examples=100, deadline=None)
@given(
    flows=st.lists(
        st.tuples(
            st.integers(0, 6).map(float),
            st.integers(1, 60).map(float),
            st.lists(st.integers(0, NUM_PORTS - 1), min_size=1, max_size=3, unique=True),
        ),
        min_size=1,
        max_size=6,
    ),
    capacities=port_capacities,
)
def test_flows_agree_with_a_fluid_model_from_scratch(flows, capacities):
    assert sent(flows, capacities) == pytest.approx(fluid_sent(flows, capacities), rel=1e-6, abs=1e-6)
