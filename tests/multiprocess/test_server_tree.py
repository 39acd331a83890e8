"""Workers that sum for each other: the same training as without, whoever is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import BATCH, NUM_SAMPLES, Job, Training, run_planted, trained_alone

from paceline.act import parameter_server, relay, upstream, worker
from paceline.decide.tree import Growth, Round
from paceline.record import read

pytestmark = [pytest.mark.timeout(60), pytest.mark.beside, pytest.mark.servers]
PARENT, CHILD = 0, 2
TREE = {CHILD: PARENT}
TRAINING = Training(num_epochs=3, options={"tree": True})


@dataclass(frozen=True)
class Stubborn:
    """A gardener who wants one tree from the first round on, as long as all of it are there."""

    def step(self, growth: Growth, _made: Round, ranks: Any) -> Growth:
        return replace(growth, tree=TREE if {PARENT, CHILD} <= set(ranks) else {})


def planted(then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def plant() -> None:
        parameter_server.Gardener = lambda *_: Stubborn()  # type: ignore[assignment, misc]
        then()

    return plant


def strike(number: signal.Signals, owner: Any, name: str, count: int) -> Callable[[], None]:
    """This process gets the signal at the `count`-th call."""

    def plant() -> None:
        original, seen = getattr(owner, name), [0]

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == count:
                os.kill(os.getpid(), number)
            return original(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    return plant


def counted(run_dir: Path) -> int:
    last = read(run_dir)[-1]
    assert last.kind == "end"
    return sum(last.data["samples"][what] for what in ("trained", "dropped"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sums_on_the_way_are_the_same_training(tmp_path: Path, accumulate: int) -> None:
    training = replace(TRAINING, accumulate=accumulate)
    sums = tmp_path / "sums"
    sums.mkdir()

    def count() -> None:
        original = relay.Relay._send_sum

        def counting(self: Any, *args: Any) -> None:
            (sums / os.environ["RANK"]).touch()
            original(self, *args)

        relay.Relay._send_sum = counting  # type: ignore[method-assign]

    ends = run_planted(training, tmp_path, dict.fromkeys(range(5), planted(count)))
    alone = trained_alone(training)
    assert max(float(abs(a - b).max()) for a, b in zip(ends[0].params, alone, strict=True)) < 1e-6
    assert [path.name for path in sums.iterdir()] == [str(PARENT)], "the parent sums, and nobody else"
    assert all((a == b).all() for a, b in zip(ends[0].params, ends[CHILD].params, strict=True))


@pytest.mark.parametrize("rank", [PARENT, CHILD], ids=["parent", "child"])
def test_a_loop_that_ends_early_leaves_nobody_waiting(tmp_path: Path, rank: int) -> None:
    def leave() -> None:
        original, seen = worker.WorkerPace.next_lease, [0]

        def next_lease(self: Any) -> Any:
            seen[0] += 1
            return original(self) if seen[0] < 8 else None

        worker.WorkerPace.next_lease = next_lease  # type: ignore[method-assign]

    plants = dict.fromkeys(range(5), planted())
    plants[rank] = planted(leave)
    run_planted(TRAINING, tmp_path, plants)
    assert counted(tmp_path) == 3 * NUM_SAMPLES


def test_a_gradient_that_is_not_finite_spoils_its_sum_only(tmp_path: Path) -> None:
    def spoil() -> None:
        original, seen = relay.Relay.send, [0]

        def send(self: Any, flat: torch.Tensor, bucket: int) -> None:
            seen[0] += bucket == 0
            if seen[0] == 5:
                flat.fill_(float("nan"))
            original(self, flat, bucket)

        relay.Relay.send = send  # type: ignore[method-assign]

    plants = dict.fromkeys(range(5), planted())
    plants[CHILD] = planted(spoil)
    ends = run_planted(TRAINING, tmp_path, plants)
    assert counted(tmp_path) == 3 * NUM_SAMPLES
    assert read(tmp_path)[-1].data["samples"]["dropped"] == 2 * BATCH
    assert all(bool((abs(p) < 1e3).all()) for p in ends[0].params)


MOMENTS = {
    "summing": (relay.Relay, "_send_sum", 12),
    "passing on": (relay.Relay, "pass_on", 12),
    "pulling": (upstream.ServerLink, "have_parameters", 9),
}


@pytest.mark.parametrize(
    ("moment", "number"),
    [*((moment, signal.SIGKILL) for moment in MOMENTS), ("summing", signal.SIGSTOP), ("passing on", signal.SIGSTOP)],
    ids=str,
)
def test_a_lost_parent_takes_nobody_with_it(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    plants = dict.fromkeys(range(5), planted())
    plants[PARENT] = planted(strike(number, *MOMENTS[moment]))
    with Job(TRAINING, tmp_path) as job:
        job.start(plant=plants)
        ends = job.end(1, CHILD, 3, 4)
    assert [end.error for end in ends.values()] == [None] * 4
    assert counted(tmp_path) == 3 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("owner", "name", "count", "number"),
    [
        (relay.Relay, "send", 20, signal.SIGKILL),
        (relay.Relay, "send", 20, signal.SIGSTOP),
        (relay.ParentPort, "_receive", 12, signal.SIGKILL),
    ],
    ids=["pushing, killed", "pushing, stopped", "pulling, killed"],
)
def test_a_lost_child_holds_nobody_up(
    tmp_path: Path, owner: Any, name: str, count: int, number: signal.Signals
) -> None:
    plants = dict.fromkeys(range(5), planted())
    plants[CHILD] = planted(strike(number, owner, name, count))
    with Job(TRAINING, tmp_path) as job:
        job.start(plant=plants)
        ends = job.end(0, 1, 3, 4)
    assert [end.error for end in ends.values()] == [None] * 4
    assert counted(tmp_path) == 3 * NUM_SAMPLES
    trained = read(tmp_path)[-1].data["samples"]["trained"]
    assert trained >= 3 * NUM_SAMPLES - 2 * BATCH, (
        "the parent's sum is lost, and perhaps a batch of an epoch that is over"
    )
