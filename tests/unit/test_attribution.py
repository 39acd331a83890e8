"""Why a rank is slow: every cause, and a verdict that speaks of the episode alone."""

import random

import pytest

from paceline.predict.attribution import CAUSES, attribute, verdict
from paceline.predict.detector import Row, rows_beside
from paceline.types import OWN_PHASES, Phase, StepTiming

USUAL = {"data_s": 0.005, "forward_s": 0.015, "backward_s": 0.03, "optimizer_s": 0.002, "other_s": 0.001}
USUAL_S = sum(USUAL.values())


def beside(step: StepTiming, other: StepTiming) -> Row:
    """A rank's step beside the other one's."""
    return rows_beside({step.rank: step}, {other.rank: other})[step.rank]


def row(step: int = 1, more: dict[str, float] | None = None, samples: int = 32, queued: float | None = 0.0) -> Row:
    """A rank that needs `more` seconds in some phases than the usual step."""
    own = {**USUAL, **{phase: USUAL.get(phase, 0.0) + seconds for phase, seconds in (more or {}).items()}}
    slow = StepTiming(2, step, 0.0, **own, samples=samples, runqueue_s=queued)
    return beside(slow, StepTiming(-1, step, 0.0, **USUAL, samples=32, wait_s=0.2, runqueue_s=0.001))


@pytest.mark.parametrize(
    ("more", "phase", "cause"),
    [
        ({"data_s": 0.2}, Phase.DATA, "data"),
        ({"forward_s": 0.2}, Phase.FORWARD, "compute"),
        ({"backward_s": 0.2}, Phase.BACKWARD, "compute"),
        ({"optimizer_s": 0.2}, Phase.OPTIMIZER, "compute"),
        ({"gc_s": 0.2}, Phase.GC, "gc"),
        ({"other_s": 0.2}, Phase.OTHER, "outside"),
        ({"data_s": 0.2, "backward_s": 0.1}, Phase.DATA, "data"),
        ({"data_s": 0.1, "backward_s": 0.2}, Phase.BACKWARD, "compute"),
    ],
)
def test_the_phase_with_the_largest_excess_is_the_cause(more, phase, cause):
    assert attribute([row(step, more) for step in range(5)]) == (phase, cause)


def test_a_long_phase_that_is_as_long_elsewhere_is_not_the_cause():
    assert attribute([row(more={"data_s": 0.02})]) == (Phase.DATA, "data")


@pytest.mark.parametrize(("queued", "cause"), [(0.12, "cpu_contention"), (0.09, "compute"), (None, "compute")])
def test_time_on_the_run_queue_for_half_of_the_excess_is_contention(queued, cause):
    assert attribute([row(more={"backward_s": 0.2}, queued=queued)]) == (Phase.BACKWARD, cause)


def test_contention_also_explains_late_data_and_outside_work():
    assert attribute([row(more={"data_s": 0.2}, queued=0.15)])[1] == "cpu_contention"
    assert attribute([row(more={"other_s": 0.2}, queued=0.15)])[1] == "cpu_contention"


def test_a_collection_stays_a_collection_on_a_busy_host():
    assert attribute([row(more={"gc_s": 0.2}, queued=0.15)]) == (Phase.GC, "gc")


def test_no_excess_is_no_contention():
    assert attribute([row(more={"backward_s": -0.02}, queued=None)])[1] != "cpu_contention"


@pytest.mark.parametrize(
    ("samples", "cause"),
    [
        (96, "uneven_work"),  # three times the samples, three times the time
        (72, "uneven_work"),  # 2.25 times: explains most of it
        (64, "compute"),  # twice the samples do not make it three times slower
        (32, "compute"),
        (0, "compute"),  # unknown
    ],
)
def test_more_samples_that_explain_the_slowness_are_uneven_work(samples, cause):
    more = {"forward_s": 2 * 0.015 + 0.01, "backward_s": 2 * 0.03 + 0.006}
    assert attribute([row(more=more, samples=samples)]) == (Phase.BACKWARD, cause)


def test_unknown_samples_elsewhere_prove_nothing():
    slow = StepTiming(2, 1, 0.0, backward_s=0.3, samples=96)
    assert attribute([beside(slow, StepTiming(-1, 1, 0.0, backward_s=0.1, samples=0))])[1] == "compute"


def test_a_few_more_samples_are_not_uneven_work():
    assert attribute([row(more={"backward_s": 0.005}, samples=34)])[1] == "compute"


def test_more_samples_do_not_explain_late_data():
    assert attribute([row(more={"data_s": 0.1}, samples=96)])[1] == "data"


def test_without_rows_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="no rows"):
        attribute([])


def test_every_cause_can_be_found_and_has_words():
    found = {
        attribute([row(more={f"{phase.value}_s": 0.2}, samples=samples, queued=queued)])[1]
        for phase in OWN_PHASES
        for samples, queued in ((32, 0.0), (200, 0.0), (32, 0.15))
    }
    assert found == set(CAUSES)


def noisy(num_rows: int, onset: int, more: dict[str, float], period: int = 1, noise: float = 0.1) -> list[Row]:
    """Rows with noise, slower from `onset` on, every `period`-th step."""
    rng = random.Random(7)
    return [
        row(
            step,
            {
                "backward_s": USUAL_S * rng.gauss(0, noise),
                **{p: s for p, s in more.items() if step >= onset and (step - onset) % period == 0},
            },
        )
        for step in range(1, num_rows + 1)
    ]


@pytest.mark.parametrize("distance", [5, 20, 50])
def test_a_hiccup_before_is_not_the_beginning(distance):
    rows = [
        row(step, {"other_s": 1.0} if step == 56 - distance else {"data_s": 0.2} if step > 55 else {})
        for step in range(1, 61)
    ]
    found = verdict(2, "node1", rows)
    assert (found.since_step, found.cause) == (56, "data")


@pytest.mark.parametrize("num_slow", [5, 10, 40])
def test_a_verdict_speaks_of_the_episode_not_of_the_noise_before(num_slow):
    rows = noisy(50 + num_slow, 51, {"data_s": 4 * USUAL_S})
    found = verdict(2, "node1", rows)
    assert (found.rank, found.host, found.step, found.since_step) == (2, "node1", 50 + num_slow, 51)
    assert (found.phase, found.cause) == ("data", "data")
    assert found.slowdown == pytest.approx(5, rel=0.1)
    assert found.excess_s == pytest.approx(4 * USUAL_S, rel=0.1)
    assert found.lost_ratio == pytest.approx(0.8, rel=0.1)
    assert f"over {num_slow} steps" in found.evidence


def test_pauses_now_and_then_are_one_episode():
    found = verdict(2, "node1", noisy(60, 15, {"gc_s": 0.3}, period=10, noise=0.02))
    assert (found.since_step, found.cause) == (15, "gc")
    assert found.excess_s == pytest.approx(5 * 0.3 / 46, rel=0.1)
    assert found.lost_ratio == pytest.approx(5 * 0.3 / (46 * USUAL_S + 5 * 0.3), rel=0.15)


def test_a_worse_episode_begins_where_it_gets_worse():
    rows = [row(step, {"data_s": 0.2 if step > 35 else 0.02}) for step in range(1, 41)]
    assert verdict(2, "n", rows).since_step == 36


def test_less_than_the_least_effect_begins_no_episode():
    rows = [row(step, {"data_s": 0.01 if step > 5 else 0.0}) for step in range(1, 11)]
    assert verdict(2, "n", rows, min_effect_s=0.005).since_step == 6
    assert verdict(2, "n", rows, min_effect_s=0.05).since_step == 1


def test_without_any_excess_the_verdict_rests_on_all_rows():
    found = verdict(2, "n", [row(step, {"data_s": -0.004}) for step in range(1, 11)])
    assert (found.since_step, found.lost_ratio) == (1, 0.0)
    assert found.slowdown < 1


def test_the_evidence_is_one_sentence_with_the_numbers():
    found = verdict(2, "node1", [row(step, {"data_s": 0.2}) for step in range(5)])
    assert found.evidence == (
        "own time 253 ms against 53 ms elsewhere over 5 steps; data 205 ms against 5 ms: the data loader is late"
    )


def test_a_reference_of_nothing_is_infinitely_faster():
    found = verdict(1, "n", [beside(StepTiming(1, 1, 0.0, data_s=0.2), StepTiming(-1, 1, 0.0))])
    assert found.slowdown == float("inf")
    assert found.lost_ratio == 1.0
    idle = verdict(1, "n", [beside(StepTiming(1, 1, 0.0), StepTiming(-1, 1, 0.0))])
    assert idle.lost_ratio == 0.0
