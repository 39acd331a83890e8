"""The virtual world: turns a cluster, a trace, a decider and a model into a training in virtual time. Pure.

It contains no policy: it feeds the policies and deciders that run live, and carries out what they say.

A rank's turn: it has parameters; it computes (`workers.py`); its gradient travels and arrives at the policy
(`exchange.py`); it waits until the policy releases it; it fetches the parameters it was released with. All that is not
computing is wait, as it is in the live system.

**Change of mode.** A plan takes effect at the border before exchange `effective_step`, which is when update
`effective_step - 1` has been applied; one whose exchange has been applied already is rejected, and so is one that is
not in effect yet when a newer one comes. At the border, with b the new policy's staleness bound:

- a gradient that has arrived and is in no update yet arrives anew at the new policy if it is at most b versions old;
- one being computed or sent goes on if it is at most b versions old, and is its rank's first under the new policy;
- every other gradient is given up, its samples count as dropped, and its rank starts anew.

Every rank pauses `switch_s` before it begins its next turn. The new policy counts from here and takes a gradient that
goes on for a fresh one, so in the log its staleness can exceed the bound by up to b, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from paceline.decide.baselines import Fixed
from paceline.decide.estimate import lr_scale
from paceline.decide.plan import Adopted, Decider, Decision, Observation, Plan, Rejected
from paceline.errors import ConfigError, SimulationError
from paceline.policy.base import Apply, Arrive, Cancel, Drop, Event, Join, Leave, Release, Score, SyncPolicy, Tick, Wake
from paceline.sim.cluster import Cluster, Membership, Stop, Workload
from paceline.sim.engine import Engine
from paceline.sim.exchange import Exchange
from paceline.sim.result import Decided, Point, Result, Seen, Tally, reached
from paceline.sim.trace import Trace
from paceline.sim.training import Learner
from paceline.sim.workers import COMPUTES, Doing, Turn, Workers, cores_of
from paceline.types import NoiseScale, Rank, Update

_Made = tuple[int, list[tuple[Rank, Turn]], float]  # a version's number, the turns in it, its factor on the rate
_NEUTRAL = Score(1.0, 1.0, 1.0, 1.0)  # in a timing-only run every gradient is as good as a trusted one


def simulate(
    cluster: Cluster,
    workload: Workload,
    trace: Trace,
    decider: Decider[Any],
    stop: Stop,
    *,
    learner: Learner | None = None,
    evaluate_every: int | None = None,
    membership: Sequence[Membership] = (),
    switch_s: float = 0.1,
    noise_scale: float | None = None,
    noise_every: int = 10,
    keeps_seen: bool = False,
) -> Result:
    """Train in virtual time.

    The learning rate of an update is scaled by `lr_scale(rule, samples per optimizer step in it, reference batch of
    all ranks)`; with local steps that is the mean batch of one of them over all ranks.

    Args:
        cluster, workload: What there is, and what a gradient costs.
        trace: Who is slow when; speaks of at least the cluster's ranks.
        decider: Chooses the modes.
        stop: When it ends.
        learner: Makes gradients real; None for timing only.
        evaluate_every: Samples between two evaluations, > 0; None for one in a hundred of the budget.
        membership: Who leaves and joins when.
        switch_s: Pause of every rank at a change of mode, virtual seconds, >= 0.
        noise_scale: Told to the decider at the start, samples; None for nothing.
        noise_every: Updates between two of the learner's own estimates, > 0.
        keeps_seen: Whether the result holds all that the decider was told.

    Returns:
        What the run was like.

    Raises:
        ConfigError: the trace knows too few ranks, or membership speaks of ranks that do not exist.
        SimulationError: the bound on events is reached, or all ranks wait for ever.

    Example:
        >>> from paceline.policy.barrier import BSP
        >>> from paceline.sim.trace import Table
        >>> cluster, workload = Cluster.uniform("ring", 2), Workload(step_s=0.1, batch_size=8)
        >>> trace = Table("two", ratios=((1.0,), (3.0,)))
        >>> result = simulate(cluster, workload, trace, Fixed(BSP()), Stop(samples=160))
        >>> result.num_updates, round(result.virtual_s, 6), [round(s, 6) for s in result.wait_s]
        (10, 3.0, [2.0, 0.0])
    """
    if trace.num_ranks < cluster.num_ranks:
        raise ConfigError(f"trace {trace.name} has {trace.num_ranks} ranks, the cluster {cluster.num_ranks}")
    strangers = sorted({line.rank for line in membership if not 0 <= line.rank < cluster.num_ranks})
    if strangers:
        raise ConfigError(f"the cluster has {cluster.num_ranks} ranks, membership speaks of {strangers}")
    every = evaluate_every or max(1, stop.samples // 100)
    world = _World(cluster, workload, trace, decider, stop, learner, every, switch_s, noise_every, keeps_seen)
    return world.run(sorted(membership, key=lambda line: line.time_s), noise_scale)


class _World:
    """A run under way: the shell around policy and decider."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        trace: Trace,
        decider: Decider[Any],
        stop: Stop,
        learner: Learner | None,
        evaluate_every: int,
        switch_s: float,
        noise_every: int,
        keeps_seen: bool,
    ) -> None:
        self.engine = Engine(stop.max_events)
        cores = cores_of(self.engine, cluster)
        draw = learner.draw if learner is not None else None
        self.exchange = Exchange(self.engine, cluster, workload, cores, self._arrived, self._started)
        self.workers = Workers(self.engine, cluster, workload, trace, cores, draw, self.exchange.send)
        self.decider = decider
        self.decider_state = decider.init()
        self.policy: SyncPolicy[Any] = decider.initial
        self.policy_state: Any = None
        self.stop = stop
        self.learner = learner
        self.evaluate_every = evaluate_every
        self.switch_s = switch_s
        self.noise_every = noise_every
        self.noise: float | None = None  # the latest estimate of the noise scale, samples
        self.keeps_seen = keeps_seen
        self.listens = keeps_seen or not isinstance(decider, Fixed)
        self.times_only = learner is None and not self.listens  # nobody looks at what is in an update
        self.batch_sizes = (workload.batch_size,) * cluster.num_ranks
        self.reference_samples = workload.batch_size * cluster.num_ranks
        self.arrivals = [Arrive(rank) for rank in range(cluster.num_ranks)]  # without a score they are all alike
        self.held: dict[Rank, Turn] = {}  # arrived, and in no update yet
        self.base = [0] * cluster.num_ranks  # version of the parameters that a rank was released with
        self.released: list[Rank] = []  # and not on their way to those parameters yet
        self.epoch = 0  # modes so far: wakes of an earlier one are void
        self.pending: Plan | None = None
        self.is_busy = False  # carrying out actions: no change of mode in their midst
        self.is_over = False
        self.tally = Tally()

    @property
    def version(self) -> int:
        return self.tally.num_updates  # updates applied so far

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self, membership: Sequence[Membership], noise_scale: float | None) -> Result:
        """From the first gradient to the end."""
        for line in membership:
            self.engine.schedule(line.time_s, self._change_membership, line)
        first = {line.rank: line.change for line in reversed(membership)}
        for rank, worker in enumerate(self.workers.all):
            worker.doing = Doing.GONE if first.get(rank) == "join" else Doing.FETCHING
        ranks = self.workers.present()
        self.policy_state = self.policy.init(frozenset(ranks))
        if ranks:
            self.exchange.adopt(self.policy, self.workers.by_speed())
        if self.learner is not None:
            self.tally.curve.append(Point(0.0, 0, self.learner.accuracy()))
        if noise_scale is not None:
            self.noise = noise_scale
            self._observe(NoiseScale(0, noise_scale, noise_scale, noise_scale, 1))
        self._started(ranks)
        self.engine.run(self.stop.virtual_s)
        if self.workers.present() and not self.is_over and self.engine.now_s < self.stop.virtual_s:
            when, who = f"at {self.engine.now_s:.6g} virtual seconds", self.workers.present()
            raise SimulationError(f"{when} ranks {who} all wait, and {self.policy} lets nobody go on")
        if self.learner is not None and not self.is_over:
            self.tally.curve.append(Point(self.engine.now_s, self.tally.samples_trained, self.learner.accuracy()))
        held = sum(turn.num_samples for turn in self.held.values())
        counts = self.workers.samples_drawn, self.workers.in_flight() + held
        return self.tally.result(self.engine.now_s, self.engine.num_events, *counts, *self.workers.close())

    # ---- what happens to ranks -----------------------------------------------------------------------------------

    def _started(self, ranks: Sequence[Rank]) -> None:
        """These ranks have the parameters they were released with."""
        for rank in ranks:
            if self.workers.all[rank].pause_s:
                self.workers.pause(rank, self._begin)
            else:
                self._begin(rank)
        self._check_border()

    def _begin(self, rank: Rank) -> None:
        before = self.workers.begin(rank, Turn(self.base[rank], self.policy.work))
        if before is not None and self.listens:
            for timing in before.timings(rank):
                self._observe(timing)

    def _arrived(self, rank: Rank) -> None:
        """A gradient is where updates are made."""
        assert rank not in self.held, f"rank {rank} went on before its last gradient was applied or dropped"
        self.held[rank] = self.workers.arrive(rank)
        self._feed(self._arrival(rank))

    def _arrival(self, rank: Rank) -> Arrive:
        if not self.policy.wants_scores:
            return self.arrivals[rank]
        if self.learner is None:
            return Arrive(rank, _NEUTRAL)
        return Arrive(rank, self.learner.score(self.held[rank].contribution(rank)))

    def _tick(self, wake: tuple[int, int]) -> None:
        if wake[0] == self.epoch:
            self._feed(Tick(wake[1]))

    def _change_membership(self, line: Membership) -> None:
        rank, worker = line.rank, self.workers.all[line.rank]
        if (worker.doing is Doing.GONE) == (line.change == "leave"):
            return
        if line.change == "leave":
            self._give_up(rank)
            worker.doing = Doing.GONE
        else:
            self.workers.join(rank)
        if self.workers.present():
            self.exchange.adopt(self.policy, self.workers.by_speed())
        self._feed(Leave(rank) if line.change == "leave" else Join(rank))

    # ---- what the policy says ------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        """Let the policy know, and carry out what it says."""
        self.policy_state, actions = self.policy.step(self.policy_state, event)
        if not actions:
            return
        self.is_busy = True
        made: list[_Made] = []
        for action in actions:
            match action:
                case Apply():
                    made.append(self._apply(action))
                case Release(rank):
                    self._release(rank)
                case Drop(rank, _):
                    self._drop(rank, self.held.pop(rank))
                case Cancel(rank):
                    self._give_up(rank)
                case Wake(after_s, token):
                    self.engine.schedule(self.engine.now_s + after_s, self._tick, (self.epoch, token))
        if made and not self.times_only:
            self._tell_updates(made)
        self.is_busy = False
        self._check_border()  # before anybody begins the next exchange
        self._let_go()

    def _release(self, rank: Rank) -> None:
        self.base[rank] = self.version
        self.workers.all[rank].doing = Doing.FETCHING
        self.released.append(rank)

    def _let_go(self) -> None:
        """Send those who were released on their way."""
        ranks, self.released = self.released, []
        if ranks:
            self.is_busy = True
            self.exchange.fetch(ranks)
            self.is_busy = False
            self._check_border()

    def _drop(self, rank: Rank, turn: Turn) -> None:
        self.tally.drop(rank, turn.num_samples, self.version - turn.version)

    def _give_up(self, rank: Rank) -> None:
        """Take a rank from whatever it is at; it waits then."""
        self.exchange.abort(rank)
        if rank in self.released:
            self.released.remove(rank)
        lost = self.workers.abort(rank)
        if lost is not None:
            self._drop(rank, lost)
        if rank in self.held:
            self._drop(rank, self.held.pop(rank))

    def _apply(self, action: Apply) -> _Made:
        """Make the next version; return its number, whose samples are in it, and its factor on the learning rate."""
        tally, version = self.tally, self.version
        before = tally.samples_trained
        turns = [(rank, self.held.pop(rank)) for rank in action.ranks]
        for rank, turn in turns:
            tally.train(rank, turn.num_samples, version - turn.version)
        scale = 1.0 if self.times_only else self._train(turns, action.weights)
        tally.num_updates += 1
        self.exchange.apply(action.ranks)
        self._look_at_progress(before)
        return version + 1, turns, scale

    def _train(self, turns: list[tuple[Rank, Turn]], weights: tuple[float, ...] | None) -> float:
        """Let the model learn, if there is one; return the factor on the learning rate."""
        batch = sum(turn.num_samples / turn.num_steps for _, turn in turns)  # of one optimizer step
        scale = lr_scale(self.decider.lr_rule, batch, self.reference_samples, self.noise)
        if self.learner is not None:
            weights = weights or (1.0,) * len(turns)
            parts = [turn.contribution(rank, w) for (rank, turn), w in zip(turns, weights, strict=True)]
            self.learner.update(parts, scale)
        return scale

    def _tell_updates(self, made: list[_Made]) -> None:
        """Tell the decider; what was dropped since the update before is in the last one."""
        dropped, stale = self.tally.take_since_update()
        if self.listens:
            for version, turns, scale in made:
                contributions = {rank: turn.num_samples for rank, turn in turns}
                lost = (dropped, stale) if version == self.version else ({}, {})
                self._observe(Update(version, contributions, *lost, scale, self.engine.now_s))
        if self.learner is None:
            return
        bases = (self.base[rank] for rank, w in enumerate(self.workers.all) if w.doing in COMPUTES)
        self.learner.forget(min((self.version, *bases, *(turn.version for turn in self.held.values()))))
        if self.version % self.noise_every == 0:
            noise = self.learner.noise()
            if noise is not None and isfinite(noise.value):
                self.noise = noise.value
                self._observe(noise)

    def _look_at_progress(self, before: int) -> None:
        """Evaluate where it is time to, and end where the budget is used up."""
        trained = self.tally.samples_trained
        ends = trained >= self.stop.samples
        if self.is_over or not (ends or trained // self.evaluate_every > before // self.evaluate_every):
            return
        self.is_over = ends
        accuracy = self.learner.accuracy() if self.learner is not None else None
        self.exchange.when_made(self._made, (trained, accuracy))

    def _made(self, point: tuple[int, float | None]) -> None:
        """An evaluated version exists."""
        num_samples, accuracy = point
        if accuracy is not None:
            self.tally.curve.append(Point(self.engine.now_s, num_samples, accuracy))
            if self.stop.accuracy is not None and reached(self.tally.curve, self.stop.accuracy):
                self.is_over = True
        if self.is_over:
            self.engine.stop()

    # ---- what the decider says -----------------------------------------------------------------------------------

    def _observe(self, seen: Observation) -> None:
        """Tell the decider, and note what it says."""
        if self.keeps_seen:
            self.tally.seen.append(Seen(self.engine.now_s, seen))
        self.decider_state, decisions = self.decider.step(self.decider_state, seen)
        for decision in decisions:
            self._note(decision)
            if isinstance(decision, Plan):
                self._take_plan(decision)

    def _note(self, what: Decision | Adopted | Rejected) -> None:
        self.tally.decisions.append(Decided(self.engine.now_s, self.version, what))

    def _take_plan(self, plan: Plan) -> None:
        refused = plan if plan.effective_step <= self.version else self.pending
        if refused is not plan:
            self.pending = plan
        if refused is not None:
            # As an event of its own: a decider that plans the same again and again runs into the bound on events.
            self.engine.schedule(self.engine.now_s, self._reject, refused)

    def _reject(self, plan: Plan) -> None:
        self._note(Rejected(plan))
        self._observe(Rejected(plan))
        self._check_border()

    def _check_border(self) -> None:
        if self.pending is not None and not self.is_busy and self.version >= self.pending.effective_step - 1:
            self._switch(self.pending)

    def _switch(self, plan: Plan) -> None:
        """Change the mode; the module's docstring says what becomes of gradients under way."""
        self.is_busy = True
        self.pending = None
        self.epoch += 1
        self.policy = plan.policy
        present = self.workers.present()
        self.policy_state = self.policy.init(frozenset(present))
        self.exchange.adopt(self.policy, self.workers.by_speed())
        sizes = plan.batch_sizes or self.batch_sizes
        arrived: list[Rank] = []
        for rank in present:
            worker = self.workers.all[rank]
            worker.batch_size, worker.pause_s = sizes[rank], self.switch_s
            bound = self.policy.staleness_bound
            if bound is not None and self.version - self.base[rank] > bound:
                self._give_up(rank)
            if rank in self.held:
                arrived.append(rank)
            elif worker.doing is Doing.WAITING:
                self._release(rank)
        self._note(Adopted(plan))
        self._observe(Adopted(plan))
        self.is_busy = False
        epoch = self.epoch
        self._let_go()
        for rank in arrived:
            if self.epoch == epoch:  # else the change of mode after this one has seen to them
                self._feed(self._arrival(rank))
