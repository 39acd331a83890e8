"""What ranks do between a release and an arrival: turns work into gradients of so many samples at their time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from paceline.policy.base import Work
from paceline.sim.cluster import Cluster, Workload
from paceline.sim.cores import Cores
from paceline.sim.engine import Engine
from paceline.sim.trace import Trace
from paceline.sim.training import Contribution, Draw
from paceline.types import Rank, StepTiming

DrawSamples = Callable[[Rank, int], Draw]


class Doing(Enum):
    """What a rank does."""

    FETCHING = "fetching"
    COMPUTING = "computing"
    SENDING = "sending"
    WAITING = "waiting"
    GONE = "gone"


COMPUTES = (Doing.FETCHING, Doing.COMPUTING, Doing.SENDING)
"""What counts as computing for a policy."""


class Turn:
    """What one rank does from a release to the next: one gradient, or the change of its model by some local steps.

    Args:
        version: Of the parameters that it began with.
        work: What it was asked to do.

    Besides these it has the local steps begun so far, their samples and draws (where a learner gives them), when the
    latest began and of how many samples it is, what the finished ones were like, and how long the rank waited after
    the last, seconds.
    """

    __slots__ = ("begun_s", "draws", "num_samples", "num_steps", "samples", "steps", "version", "wait_s", "work")

    def __init__(self, version: int, work: Work) -> None:
        self.version = version
        self.work = work
        self.num_steps = 0
        self.num_samples = 0
        self.draws: tuple[Draw, ...] = ()
        self.begun_s = 0.0
        self.samples = 0
        self.steps: list[tuple[float, float, int]] = []  # begun_s, own_s, samples
        self.wait_s = 0.0

    def contribution(self, rank: Rank, weight: float = 1.0) -> Contribution:
        """What it brings to an update."""
        return Contribution(rank, self.version, self.draws, weight)

    def timings(self, rank: Rank) -> list[StepTiming]:
        """Its local steps as a rank reports them; the wait is the last one's."""
        waits_s = [0.0] * (len(self.steps) - 1) + [self.wait_s]
        return [
            StepTiming(rank, self.version + 1, begun_s, backward_s=own_s, wait_s=wait_s, samples=samples)
            for (begun_s, own_s, samples), wait_s in zip(self.steps, waits_s, strict=True)
        ]


class Worker:
    """One rank: what it does, since when, and what it has done."""

    __slots__ = (
        "batch_size",
        "clock",
        "doing",
        "is_last",
        "last_s",
        "own_s",
        "pause_s",
        "task",
        "turn",
        "wait_s",
        "waits_since_s",
        "wake",
    )

    def __init__(self, batch_size: int) -> None:
        self.doing = Doing.WAITING
        self.batch_size = batch_size
        self.clock = 0  # local steps begun
        self.turn: Turn | None = None  # the latest, until the next begins
        self.is_last = True  # whether the local step being computed ends the turn
        self.task = 0
        self.last_s = 0.0  # own time of the last local step
        self.pause_s = 0.0  # before it begins its next turn
        self.wake = 0  # the end of that pause
        self.waits_since_s = 0.0
        self.own_s = 0.0
        self.wait_s = 0.0


class Workers:
    """All ranks of a run, as far as computing goes.

    A turn is `work.local_steps` local steps. A local step takes

        step_s * slowdown(rank, local step, now) * (fixed + (1 - fixed) * samples / reference batch)

    where nothing else wants the host's cores. Under a limit, a batch is computed in micro-batches; the turn ends with
    the micro-batch in which the limit passes, counted from the begin of the turn. Where it will pass is judged when a
    local step begins, by the speed that its host's CPU has then; only the samples up to there are drawn, so that
    those left out stay for others.

    Args:
        engine: The clock.
        cluster, workload, trace: Where ranks run, what a gradient costs, and who is slow.
        cores: CPU of every host.
        draw: Takes samples for a rank; None in a timing-only run.
        computed: Called with a rank that has finished its turn's computing.
    """

    def __init__(
        self,
        engine: Engine,
        cluster: Cluster,
        workload: Workload,
        trace: Trace,
        cores: Sequence[Cores],
        draw: DrawSamples | None,
        computed: Callable[[Rank], None],
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._slowdown = trace.slowdown
        self._cores = [cores[host] for host in cluster.rank_hosts]
        self._demand = cluster.rank_cores
        self._draw = draw
        self._computed = computed
        self.all = [Worker(workload.batch_size) for _ in range(cluster.num_ranks)]
        self.samples_drawn = 0

    def begin(self, rank: Rank, turn: Turn) -> Turn | None:
        """Let a rank begin a turn; return the one that ends with that, if it finished computing."""
        worker = self.all[rank]
        wait_s, before = self._note_wait(worker), worker.turn
        if before is not None:
            before.wait_s = wait_s
        worker.turn = turn
        worker.doing = Doing.COMPUTING
        self._step(rank, worker, turn)
        return before

    def arrive(self, rank: Rank) -> Turn:
        """A rank's gradient has arrived: it waits from now on; return what it did."""
        worker = self.all[rank]
        worker.doing = Doing.WAITING
        assert worker.turn is not None
        return worker.turn

    def abort(self, rank: Rank) -> Turn | None:
        """Take a rank from whatever it fetches, computes or sends, to wait; return the turn that is lost, if any."""
        worker = self.all[rank]
        lost = worker.turn if worker.doing in (Doing.COMPUTING, Doing.SENDING) else None
        if worker.doing is Doing.COMPUTING:
            assert worker.turn is not None
            self._cores[rank].cancel(worker.task)
            worker.own_s += self._engine.now_s - worker.turn.begun_s
            worker.waits_since_s = self._engine.now_s
            worker.turn = None  # a measure cut short says nothing of the rank
        self._engine.cancel(worker.wake)
        worker.doing = Doing.WAITING
        return lost

    def pause(self, rank: Rank, begin: Callable[[Rank], None]) -> None:
        """Let a rank that could begin its next turn wait for its pause first."""
        worker = self.all[rank]
        worker.wake = self._engine.schedule(self._engine.now_s + worker.pause_s, begin, rank)
        worker.pause_s = 0.0

    def join(self, rank: Rank) -> None:
        """A rank comes (back): it waits, and has no step to tell of."""
        worker = self.all[rank]
        worker.doing = Doing.WAITING
        worker.turn = None
        worker.waits_since_s = self._engine.now_s

    def present(self) -> list[Rank]:
        """The ranks that are there."""
        return [rank for rank, worker in enumerate(self.all) if worker.doing is not Doing.GONE]

    def by_speed(self) -> list[Rank]:
        """The ranks that are there by the time of their last local step; before it, by the trace."""

        def last_s(rank: Rank) -> float:
            known = self.all[rank].last_s
            return known or self._workload.step_s * self._slowdown(rank, 0, self._engine.now_s)

        return sorted(self.present(), key=lambda rank: (last_s(rank), rank))

    def in_flight(self) -> int:
        """Samples being computed or sent."""
        return sum(w.turn.num_samples for w in self.all if w.turn and w.doing in (Doing.COMPUTING, Doing.SENDING))

    def close(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Own and wait seconds by rank up to now."""
        for worker in self.all:
            if worker.doing is Doing.COMPUTING and worker.turn is not None:
                worker.own_s += self._engine.now_s - worker.turn.begun_s
            elif worker.doing is not Doing.GONE:
                self._note_wait(worker)
        return tuple(worker.own_s for worker in self.all), tuple(worker.wait_s for worker in self.all)

    def _note_wait(self, worker: Worker) -> float:
        wait_s = self._engine.now_s - worker.waits_since_s
        worker.wait_s += wait_s
        worker.waits_since_s = self._engine.now_s
        return wait_s

    def _step(self, rank: Rank, worker: Worker, turn: Turn) -> None:
        """Begin a local step."""
        now_s = self._engine.now_s
        slowdown = self._slowdown(rank, worker.clock, now_s)
        worker.clock += 1  # one that is cancelled counts as well: the next meets new luck
        num_samples = worker.batch_size
        turn.num_steps += 1
        worker.is_last = turn.num_steps >= turn.work.local_steps
        if turn.work.limit_s is not None:
            spent_s = now_s - turn.steps[0][0] if turn.steps else 0.0
            num_samples, passes = self._up_to(
                turn.work.limit_s - spent_s, num_samples, slowdown / self._cores[rank].speed
            )
            worker.is_last = worker.is_last or passes
        if self._draw is not None:
            turn.draws += (self._draw(rank, num_samples),)
        self.samples_drawn += num_samples
        turn.num_samples += num_samples
        turn.samples = num_samples
        turn.begun_s = now_s
        work_s = slowdown * self._workload.compute_s(num_samples)
        worker.task = self._cores[rank].run(work_s, self._demand, self._end_step, rank)

    def _up_to(self, left_s: float, batch_size: int, slowdown: float) -> tuple[int, bool]:
        """Samples up to the micro-batch in which the time left passes, and whether it does."""
        pieces = min(self._workload.num_micro_batches, batch_size)
        for piece in range(1, pieces + 1):
            num_samples = batch_size * piece // pieces
            if slowdown * self._workload.compute_s(num_samples) > left_s:
                return num_samples, True
        return batch_size, False

    def _end_step(self, rank: Rank) -> None:
        worker, now_s = self.all[rank], self._engine.now_s
        turn = worker.turn
        assert turn is not None
        own_s = now_s - turn.begun_s
        turn.steps.append((turn.begun_s, own_s, turn.samples))
        worker.last_s = own_s
        worker.own_s += own_s
        if worker.is_last:
            worker.waits_since_s = now_s
            worker.doing = Doing.SENDING
            self._computed(rank)
        else:
            self._step(rank, worker, turn)


def cores_of(engine: Engine, cluster: Cluster) -> list[Cores]:
    """The CPU of every host of a cluster, with the highest demand that can come together there."""
    most = [cluster.server_cores] * len(cluster.hosts)
    for host in cluster.rank_hosts:
        most[host] += cluster.rank_cores
    for job in cluster.jobs:
        most[job.host] += job.cores
    return [Cores(engine, host.cores, demand) for host, demand in zip(cluster.hosts, most, strict=True)]
