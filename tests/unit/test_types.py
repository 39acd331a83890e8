"""The vocabulary and the errors: what they refuse, and that they survive pickling."""

import pickle

import pytest

from paceline.errors import ConfigError, DivergenceError, PacelineError, PeerError, PeerTimeout, RecordError
from paceline.types import OWN_PHASES, Fault, FaultKind, FaultPlan, Forecast, Phase, StepTiming


def test_a_step_is_its_own_work_plus_wait_plus_what_was_expected():
    seconds = {f"{phase.value}_s": float(2**i) for i, phase in enumerate(Phase)}
    timing = StepTiming(rank=0, step=1, started_s=0.0, **seconds)
    assert [timing.of(phase) for phase in Phase] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert timing.own_s == 63
    assert timing.wall_s == 255
    assert set(OWN_PHASES) == set(Phase) - {Phase.WAIT, Phase.EXPECTED}


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        Forecast(0.1, 0.0, 1).mean_s = 0.2  # type: ignore[misc]


@pytest.mark.parametrize("seconds", [-0.1, -1e-9, float("nan")])
def test_a_fault_takes_no_negative_time(seconds):
    with pytest.raises(ValueError, match="seconds must be >= 0"):
        Fault(0, FaultKind.COMPUTE, seconds=seconds)


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (5, 4), (0, 0)])
def test_a_fault_ends_after_it_begins(start, stop):
    with pytest.raises(ValueError, match="must end after it begins"):
        Fault(0, FaultKind.DATA, from_step=start, until_step=stop)


@pytest.mark.parametrize(("until", "active"), [(None, [2, 3, 4, 5]), (4, [2, 3]), (3, [2])])
def test_a_fault_acts_from_its_first_step_until_before_its_last(until, active):
    fault = Fault(1, FaultKind.GC, seconds=0.1, from_step=2, until_step=until)
    assert [step for step in range(6) if fault.active(step)] == active


def test_a_plan_finds_the_faults_of_a_rank_and_step():
    slow = Fault(1, FaultKind.COMPUTE, 0.2, from_step=1)
    pause = Fault(1, FaultKind.GC, 0.3, from_step=3, until_step=4)
    other = Fault(2, FaultKind.KILL)
    plan = FaultPlan((slow, pause, other))
    assert [plan.at(1, step) for step in (0, 1, 3, 4)] == [(), (slow,), (slow, pause), (slow,)]
    assert plan.at(2, 0) == (other,)
    assert plan.at(0, 3) == ()


@pytest.mark.parametrize("cls", [PeerError, PeerTimeout])
def test_a_peers_error_names_it_and_crosses_processes(cls):
    error = pickle.loads(pickle.dumps(cls(2, "node1", "killed")))
    assert type(error) is cls
    assert (error.rank, error.host, error.reason) == (2, "node1", "killed")
    assert str(error) == "rank 2 on host node1: killed"


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (ConfigError, ValueError),
        (RecordError, ValueError),
        (PeerTimeout, TimeoutError),
        (PeerTimeout, PeerError),
        (PeerError, PacelineError),
        (DivergenceError, PacelineError),
        (ConfigError, PacelineError),
        (RecordError, PacelineError),
    ],
)
def test_errors_form_the_tree_they_are_drawn_as(cls, base):
    assert issubclass(cls, base)
