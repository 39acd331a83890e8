"""Who is lost when: every kind of fault, of a worker and of a server, at every moment, and what becomes of the job.

A lost worker's samples go to the others, which go on. A lost server ends the job on all ranks, by name; started anew it
goes on from its snapshot.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served import NUM_SAMPLES, Job, Training

from paceline.act import guest, keeper, parameter_server, server, upstream
from paceline.decide.plan import Plan
from paceline.policy.barrier import BSP, KSync
from paceline.policy.stale import ASP
from paceline.record import read
from paceline.types import Update

pytestmark = [pytest.mark.timeout(60), pytest.mark.beside, pytest.mark.servers]
VICTIM, SERVER, CHIEF = 1, 4, 3  # of three workers and two servers
WORKER_MOMENTS = ("push", "pull", "compute")
SERVER_MOMENTS = ("push", "pull", "apply", "switch")


def strike(number: signal.Signals, moment: str, count: int = 6) -> Callable[[], None]:
    """A plant: when this moment has come for the `count`-th time, this process gets the signal."""
    seen = [0]

    def hit(*_: Any, **__: Any) -> None:
        seen[0] += 1
        if seen[0] == count:
            os.kill(os.getpid(), number)

    def before(owner: Any, name: str, applies: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if applies(*args):
                hit()
            return original(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    def plant() -> None:
        match moment:
            case "push" if int(os.environ["RANK"]) < SERVER - 1:
                # Between two buckets: the servers hold a part of the gradient.
                before(upstream.ServerLink, "send", lambda tensors: tensors and tensors[0].dtype.itemsize == 4)
            case "push":
                before(guest.GuestLink, "_receive")
            case "pull" if int(os.environ["RANK"]) < SERVER - 1:

                class Struck(upstream.Channel):
                    def receive(self, tensors: Any) -> None:
                        tensors = list(tensors)
                        if tensors[0].dtype is torch.float32:  # a piece of the parameters, after the answer
                            hit()
                        super().receive(tensors)

                upstream.Channel = Struck  # type: ignore[misc]
            case "pull":
                before(server.Server, "_release")
            case "apply":
                before(keeper.Keeper, "apply")
            case "switch":
                original_carry_out = server.Server._carry_out

                def carry_out(self: Any, commands: Any) -> Any:
                    if any(command[0] == "switch" for command in commands):
                        seen[0] = count - 1
                        hit()
                    return original_carry_out(self, commands)

                server.Server._carry_out = carry_out  # type: ignore[method-assign]
            case _:
                from torch.nn import functional

                original_loss = functional.cross_entropy

                def loss(*args: Any, **kwargs: Any) -> Any:
                    hit()
                    return original_loss(*args, **kwargs)

                functional.cross_entropy = loss

    return plant


def counted(run_dir: Path) -> dict[str, int]:
    last = read(run_dir)[-1]
    assert last.kind == "end"
    return dict(last.data["samples"])


def events(run_dir: Path) -> list[str]:
    return [line.data["message"] for line in read(run_dir) if line.kind == "event"]


@pytest.mark.parametrize("moment", WORKER_MOMENTS)
def test_a_killed_worker_leaves_and_its_samples_go_to_the_others(tmp_path: Path, moment: str) -> None:
    training = Training(step_s=0.01)
    with Job(training, tmp_path) as job:
        job.start(plant={VICTIM: strike(signal.SIGKILL, moment)})
        ends = job.end()
    assert ends[VICTIM].error == "ended without a word"
    assert [ends[rank].error for rank in (0, 2, 3, 4)] == [None] * 4
    samples = counted(tmp_path)
    assert samples["trained"] + samples["dropped"] == 2 * NUM_SAMPLES
    assert samples["dropped"] <= 8, "but for a batch of an epoch that was over, none is lost"
    assert any(f"worker {VICTIM} has left" in said for said in events(tmp_path))


@pytest.mark.parametrize("moment", WORKER_MOMENTS)
def test_a_stopped_worker_is_slow_then_has_left_and_comes_back(tmp_path: Path, moment: str) -> None:
    training = Training(step_s=0.05, num_epochs=4)
    with Job(training, tmp_path) as job:
        job.start(plant={VICTIM: strike(signal.SIGSTOP, moment)})
        job.when(lambda: any(f"worker {VICTIM} has left" in said for said in _told(tmp_path)))
        job.send(VICTIM, signal.SIGCONT)
        ends = job.end()
    assert [end.error for end in ends.values()] == [None] * 5
    samples = counted(tmp_path)
    assert samples["trained"] + samples["dropped"] == 4 * NUM_SAMPLES
    assert any(f"worker {VICTIM} has come in" in said for said in events(tmp_path))
    assert all((a == b).all() for a, b in zip(ends[0].params, ends[VICTIM].params, strict=True))


def test_a_worker_that_stays_stopped_holds_nobody_up(tmp_path: Path) -> None:
    with Job(Training(step_s=0.01), tmp_path) as job:
        job.start(plant={VICTIM: strike(signal.SIGSTOP, "compute")})
        ends = job.end(0, 2, 3, 4)
    assert [end.error for end in ends.values()] == [None] * 4
    assert sum(counted(tmp_path)[what] for what in ("trained", "dropped")) == 2 * NUM_SAMPLES


def test_a_worker_that_is_started_anew_joins_and_pulls(tmp_path: Path) -> None:
    training = Training(step_s=0.05, num_epochs=4)
    with Job(training, tmp_path) as job:
        job.start(plant={VICTIM: strike(signal.SIGKILL, "compute")})
        job.when(lambda: job.is_gone(VICTIM))
        job.start(VICTIM)
        ends = job.end()
    assert [end.error for end in ends.values()] == [None] * 5
    assert ends[VICTIM].num_samples > 0
    assert all((a == b).all() for a, b in zip(ends[0].params, ends[VICTIM].params, strict=True))


@pytest.mark.parametrize(
    ("rank", "moment"), [*((CHIEF, moment) for moment in SERVER_MOMENTS), (SERVER, "push"), (SERVER, "apply")]
)
def test_a_killed_server_ends_the_job_by_name_and_it_goes_on_from_the_snapshot(
    tmp_path: Path, rank: int, moment: str
) -> None:
    snapshots = {"snapshot_dir": tmp_path / "snapshots", "snapshot_every": 3, "run_dir": tmp_path / "run"}
    mode: Any = "auto" if moment == "switch" else "bsp"
    slow = {0: 0.2} if moment == "switch" else {}
    training = Training(mode=mode, step_s=0.01, slow=slow, num_epochs=3, options=snapshots)
    with Job(training, tmp_path) as job:
        job.start(plant={rank: strike(signal.SIGKILL, moment, count=40 if moment == "push" else 14)})
        ends = job.end()
    for other, end in ends.items():
        if other != rank:
            assert end.error_type == "PeerError", end.error
            assert f"rank {rank} " in str(end.error)
            assert end.seconds < 15
    versions = [int(path.parent.name[1:]) for path in (tmp_path / "snapshots").glob("v*/chief.json")]
    assert versions or moment == "switch", "three updates came before the end"
    with Job(Training(num_epochs=3, options=snapshots), tmp_path) as again:
        again.start()
        ends = again.end()
    assert [end.error for end in ends.values()] == [None] * 5
    samples = counted(tmp_path / "run")
    assert samples["trained"] + samples["dropped"] == 3 * NUM_SAMPLES, "what was lost has been trained again"
    if versions:
        assert any(f"snapshot of version {max(versions)}" in said for said in events(tmp_path / "run"))
        first = next(
            line.value.version for line in read(tmp_path / "run")[_last_run(tmp_path) :] if line.kind == "update"
        )
        assert first == max(versions) + 1


def test_a_worker_may_die_while_modes_change(tmp_path: Path) -> None:
    class Flipper:
        lr_rule = "linear"

        def init(self) -> int:
            return 0

        def step(self, state: int, seen: Any) -> tuple[int, tuple[Any, ...]]:
            if not isinstance(seen, Update):
                return state, ()
            policy = (ASP(), KSync(2, "cancel"), BSP())[state % 3]
            return state + 1, (Plan(state + 1, seen.version + 1, policy, 1.0, 1.0, "because it is a test"),)

    def flip() -> None:
        parameter_server.live_controller = lambda *_: Flipper()  # type: ignore[assignment]

    with Job(Training(mode="auto", step_s=0.01, num_epochs=3), tmp_path) as job:
        job.start(plant={CHIEF: flip, VICTIM: strike(signal.SIGKILL, "push", count=40)})
        ends = job.end(0, 2, 3, 4)
    assert [end.error for end in ends.values()] == [None] * 4
    samples = counted(tmp_path)
    assert samples["trained"] + samples["dropped"] == 3 * NUM_SAMPLES
    adopted = [line for line in read(tmp_path) if line.kind == "plan" and line.data["status"] == "adopted"]
    assert len(adopted) > 10


@pytest.mark.parametrize("rank", [CHIEF, SERVER])
def test_a_stopped_server_ends_the_job_by_name_and_when_it_goes_on_ends_itself(tmp_path: Path, rank: int) -> None:
    with Job(Training(step_s=0.01), tmp_path) as job:
        job.start(plant={rank: strike(signal.SIGSTOP, "apply", count=5)})
        ends = job.end(*(other for other in range(5) if other != rank))
        job.send(rank, signal.SIGCONT)
        late = job.end(rank)[rank]
    assert late.error_type in ("PeerError", "PeerTimeout"), late.error
    for end in ends.values():
        assert end.error_type == "PeerTimeout", end.error
        assert f"rank {rank} " in str(end.error)
        assert end.seconds < 15


def test_without_workers_servers_do_not_wait_for_ever(tmp_path: Path) -> None:
    training = Training(step_s=0.01, options={"peer_timeout_s": 0.5})
    with Job(training, tmp_path) as job:
        job.start(plant={rank: strike(signal.SIGKILL, "compute") for rank in range(3)})
        ends = job.end(3, 4)
    assert all(end.error_type == "PeerError" and "workers [0, 1, 2]" in str(end.error) for end in ends.values())


def _told(run_dir: Path) -> list[str]:
    try:
        text = (run_dir / "run.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [line["message"] for line in lines if line["kind"] == "event"]


def _last_run(tmp_path: Path) -> int:
    return max(i for i, line in enumerate(read(tmp_path / "run")) if line.kind == "run")
