"""The chief's part among parameter servers: turns what workers do into commands that all servers carry out alike.

A gradient has arrived when every server holds its part, so what the chief commands can be done at once, by everybody,
in the order of the commands. It feeds the policy and does what that says, as `sim/world.py` does in virtual time:

**Change of mode.** A plan takes effect when update `effective_step - 1` has been applied, before anybody begins the
next gradient; all servers acknowledge it. With b the new policy's staleness bound: a gradient that is held arrives anew
at the new policy if it is at most b versions old; one on its way goes on likewise; every other is given up and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.decide.estimate import LrRule, lr_scale
from paceline.decide.ledger import Lease, Ledger
from paceline.decide.plan import Adopted, Observation, Plan, Rejected
from paceline.policy.barrier import BSP
from paceline.policy.base import (
    Action,
    Apply,
    Arrive,
    Cancel,
    Drop,
    Event,
    Join,
    Leave,
    Release,
    SyncPolicy,
    Tick,
    Wake,
)
from paceline.types import Rank, Update

Doing = Literal["connecting", "computing", "held", "waiting", "done", "gone"]
Command = list[Any]
"""One of these, with a name first; JSON-ready. Whoever is meant is named by the link's number.

apply: link and weight of every gradient in the update (perhaps none: none was finite), factor on the learning rate,
samples, whether norms are wanted.
release: send the present parameters. cancel: tell the worker to give up. gone: forget the link. tree: who, from the
next release on, sends through whom. again: send the present parameters once more. cut: tell a parent of a lost child.
switch: number of the plan. snapshot: keep the present version. final: everybody gets the last parameters.
"""

NORMS_EVERY = 5  # updates between two samples of the gradient norms


@dataclass
class Guest:
    """A worker process, as its link shows it; one that comes back is a new guest of the same rank."""

    link: int
    rank: Rank
    doing: Doing = "connecting"
    num_connected: int = 0
    num_pushed: int = 0
    base: int = 0
    is_finite: bool = True
    is_doomed: bool = False  # what it computes will be thrown away
    is_owed: bool = False  # and when it comes, the worker is released at once
    is_cut: bool = False  # its parent is gone, and its gradient with it
    parent: int | None = None  # in the tree, this turn
    lease: Lease | None = None  # goes out with its next release


class Chief:
    """Feeds the policy; keeps the samples' ledger, the plan and who is there.

    Args:
        num_workers, num_servers: How many there are when all are well.
        policy: In force at first.
        ledger: The data set's samples.
        lr_rule: How the learning rate follows the batch of an update.
        observe: Told all that a controller must know.
        version: Updates applied so far, where training is resumed.

    Example:
        >>> from paceline.policy.barrier import BSP
        >>> chief = Chief(1, 1, BSP(), Ledger(8, 4), "linear", lambda seen: None)
        >>> chief.connected(link=1, rank=0, now_s=0.0)
        >>> chief.take_commands(), chief.guests[1].lease.positions
        ([['release', 1]], (0, 1, 2, 3))
        >>> chief.pushed(1, is_finite=True, now_s=0.1)
        >>> chief.take_commands()
        [['apply', [[1, 1.0]], 1.0, 4, False], ['release', 1]]
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        policy: SyncPolicy[Any],
        ledger: Ledger,
        lr_rule: LrRule,
        observe: Callable[[Observation], None],
        version: int = 0,
        snapshot_every: int | None = None,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.version = version
        self.guests: dict[int, Guest] = {}
        self.has_started = False
        self.is_over = False
        self.noise: float | None = None  # the gradient noise scale, samples, for the rule that needs it
        self.norm_samples: dict[int, dict[int, int]] = {}  # by version whose norms are wanted: samples by link
        self.tree: dict[int, int] = {}  # parent by child, links, for what is released next
        self.wanted_tree: dict[Rank, Rank] = {}  # parent by child, from the next update on
        self.snapshots: dict[int, dict[str, Any]] = {}  # by version to be saved: what was so when it was made
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._lr_rule = lr_rule
        self._observe = observe
        self._snapshot_every = snapshot_every
        self._sizes = (ledger.batch_size,) * num_workers
        self._accumulation = 1
        self._state: Any = None
        self._present: dict[Rank, Guest] = {}
        self._commands: list[Command] = []
        self._pending: Plan | None = None
        self._epoch = 0  # modes so far: wakes of an earlier one are void
        self._wakes: list[tuple[float, int, int]] = []
        self._dropped: dict[Rank, int] = {}  # since the last update
        self._staleness: dict[Rank, int] = {}
        self._now_s = 0.0
        self._num_epochs = 0  # of the longest loop

    @property
    def reference_samples(self) -> int:
        """The batch that the learning rate was tuned for."""
        return self.ledger.batch_size * self._num_workers * self._accumulation

    @property
    def present(self) -> Mapping[Rank, Guest]:
        """Workers that take part."""
        return self._present

    def take_commands(self) -> list[Command]:
        """What all servers must do now, in order."""
        commands, self._commands = self._commands, []
        return commands

    def next_wake_s(self) -> float | None:
        """When `wake` must be called next, on the caller's clock."""
        return self._wakes[0][0] if self._wakes else None

    # ---- what happens --------------------------------------------------------------------------------------------

    def connected(self, link: int, rank: Rank, now_s: float) -> None:
        """One more server is connected with this worker."""
        self._now_s = now_s
        guest = self.guests.setdefault(link, Guest(link, rank))
        guest.num_connected += 1
        if guest.num_connected < self._num_servers or guest.doing != "connecting":
            return
        if rank in self._present:  # it was restarted before its end was noticed
            self._leave(self._present[rank])
        guest.doing = "waiting"
        self._present[rank] = guest
        if self.has_started:
            self._feed(Join(rank))
        elif len(self._present) == self._num_workers:
            self._start()

    def _start(self) -> None:
        self.has_started = True
        self._state = self.policy.init(frozenset(self._present))
        for rank in sorted(self._present):
            self._release(rank)

    def pushed(self, link: int, is_finite: bool, now_s: float) -> None:
        """One more server holds its part of this worker's gradient, or has thrown a doomed one away."""
        self._now_s = now_s
        guest = self.guests[link]
        guest.num_pushed += 1
        guest.is_finite &= is_finite
        if guest.num_pushed < self._num_servers or guest.doing != "computing":
            return
        guest.num_pushed = 0
        self._accumulation = max(self._accumulation, self._num_batches(guest))
        if guest.is_doomed:
            guest.is_doomed, guest.doing = False, "waiting"
            if guest.is_owed:
                guest.is_owed = False
                self._release(guest.rank)
            return
        guest.doing = "held"
        self._feed(Arrive(guest.rank))

    def lost(self, link: int, now_s: float) -> None:
        """This worker is gone, or silent for too long: what it holds goes back to the ledger."""
        self._now_s = now_s
        guest = self.guests.get(link)
        if guest is None or guest.doing in ("done", "gone"):
            return
        self._leave(guest)
        self._end_if_alone()

    def done(self, link: int, num_epochs: int, now_s: float) -> None:
        """This worker has left its loop, after so many epochs, and waits for the final parameters."""
        self._now_s = now_s
        self._num_epochs = max(self._num_epochs, num_epochs)
        guest = self.guests[link]
        if guest.doing == "gone":
            return
        self._uproot(guest, has_sent=False)
        guest.doing = "done"
        self._withdraw(guest)
        self._end_if_alone()

    def more(self, link: int, epoch: int) -> Lease | None:
        """One more batch for the gradient that this worker, in this epoch of its loop, is at; None: it has no more."""
        guest = self.guests[link]
        held = self.ledger.leases.get(guest.rank)
        if held is not None and held.epoch < epoch:  # its loop went on without sending what it had accumulated
            self._settle(guest, trained=False)
        self.ledger, lease = self.ledger.take(guest.rank, self._sizes[guest.rank])
        return lease

    def wake(self, now_s: float) -> None:
        """Tell the policy of every wake that is due."""
        self._now_s = now_s
        while self._wakes and self._wakes[0][0] <= now_s:
            _, epoch, token = heapq.heappop(self._wakes)
            if epoch == self._epoch:
                self._feed(Tick(token))

    def plan(self, plan: Plan, now_s: float) -> None:
        """The controller wants another mode."""
        self._now_s = now_s
        refused = plan if plan.effective_step <= self.version or self._pending is not None else None
        if refused is not None:
            self._observe(Rejected(refused))
            return
        self._pending = plan
        self._check_border()

    # ---- what the policy says ------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        self._state, actions = self.policy.step(self._state, event)
        for action in actions:
            self._do(action)
        self._check_border()

    def _do(self, action: Action) -> None:
        match action:
            case Apply():
                self._apply(action)
            case Release(rank):
                self._release(rank)
            case Drop(rank, staleness):
                self._drop(self._present[rank], staleness)
            case Cancel(rank):
                self._give_up(self._present[rank])
            case Wake(after_s, token):
                heapq.heappush(self._wakes, (self._now_s + after_s, self._epoch, token))

    def _apply(self, action: Apply) -> None:
        """Make the next version, of those gradients that are finite."""
        factors = dict(zip(action.ranks, action.weights or (1.0,) * len(action.ranks), strict=True))
        guests = [self._present[rank] for rank in action.ranks]
        sound = {guest.link for guest in guests if guest.is_finite and not guest.is_cut}
        # What went into a parent's sum is as good as that.
        useful = [guest for guest in guests if {guest.link, guest.parent or guest.link} <= sound]
        for guest in guests:
            if guest not in useful:
                self._drop(guest, self.version - guest.base)
        guests = useful
        samples = {guest.rank: self._settle(guest, trained=True) for guest in guests}
        total = sum(samples.values())
        self.version += 1
        # By whole batches: the short ones at the end of an epoch do not lower the rate, as they would not elsewhere.
        nominal = sum(self._sizes[guest.rank] for guest in guests) * self._accumulation
        scale = lr_scale(self._lr_rule, nominal, self.reference_samples, self.noise) if total else 1.0
        staleness = {guest.rank: self.version - 1 - guest.base for guest in guests}
        shares = [[guest.link, factors[guest.rank] * samples[guest.rank] / total] for guest in guests]
        wants_norms = (
            len(guests) > 1 and len(set(staleness.values())) == 1 and self.version % NORMS_EVERY == 0 and not self.tree
        )
        if wants_norms:
            self.norm_samples[self.version] = {guest.link: samples[guest.rank] for guest in guests}
        self._commands.append(["apply", shares, scale, total, wants_norms])
        for guest in guests:
            guest.doing = "waiting"
        self._observe(
            Update(self.version, samples, self._dropped, {**staleness, **self._staleness}, scale, round(self._now_s, 4))
        )
        self._dropped, self._staleness = {}, {}
        self._replant()
        if self._snapshot_every and self.version % self._snapshot_every == 0:
            self.snapshots[self.version] = {
                "version": self.version,
                "ledger": asdict(self.ledger),
            }
            self._commands.append(["snapshot", self.version])

    def _release(self, rank: Rank) -> None:
        guest = self._present[rank]
        guest.base = self.version
        if guest.is_doomed:
            guest.is_owed = True
            return
        guest.doing, guest.is_finite, guest.is_cut = "computing", True, False
        guest.parent = self.tree.get(guest.link)
        if rank in self.ledger.leases:  # batches of a gradient that was never sent
            self._settle(guest, trained=False)
        self.ledger, guest.lease = self.ledger.take(rank, self._sizes[rank])
        self._commands.append(["release", guest.link])

    def _drop(self, guest: Guest, staleness: int) -> None:
        """Count a gradient as dropped; its worker waits then."""
        samples = self._settle(guest, trained=False)
        self._dropped[guest.rank] = self._dropped.get(guest.rank, 0) + samples
        self._staleness[guest.rank] = staleness
        guest.doing = "waiting"

    def _give_up(self, guest: Guest) -> None:
        """Whatever this worker computes, or has sent, counts as dropped."""
        if guest.doing == "computing" and not guest.is_doomed:
            guest.is_doomed = True
            self._commands.append(["cancel", guest.link])
            self._drop(guest, self.version - guest.base)
            guest.doing = "computing"
        elif guest.doing == "held":
            self._drop(guest, self.version - guest.base)

    def _num_batches(self, guest: Guest) -> int:
        lease = self.ledger.leases.get(guest.rank)
        return -(-len(lease) // self._sizes[guest.rank]) if lease else 1

    def _settle(self, guest: Guest, trained: bool) -> int:
        lease = self.ledger.leases.get(guest.rank)
        self.ledger = self.ledger.settle(guest.rank, trained)
        return len(lease) if lease else 0

    def _replant(self) -> None:
        """Between two updates: the wanted tree comes to be, unless a change of mode is near or somebody is missing."""
        links = {rank: guest.link for rank, guest in self._present.items()}
        named = {*self.wanted_tree, *self.wanted_tree.values()}
        is_fit = isinstance(self.policy, BSP) and self._pending is None and named <= links.keys()
        tree = {links[child]: links[parent] for child, parent in self.wanted_tree.items()} if is_fit else {}
        if tree != self.tree:
            self.tree = tree
            self._commands.append(["tree", self.version, [[child, parent] for child, parent in tree.items()]])

    def _uproot(self, gone: Guest, has_sent: bool) -> None:
        """A worker goes: no parent waits for it, what its children have sent through it is lost, and what it may have
        put into its parent's sum cannot be taken out again."""
        self.wanted_tree = {}
        busy = [guest for guest in self._present.values() if guest.doing in ("computing", "held") and guest is not gone]
        for guest in busy:
            if guest.parent == gone.link or (has_sent and guest.link == gone.parent):
                guest.is_cut = True
            if guest.parent == gone.link and guest.doing == "computing":
                self._commands.append(["again", guest.link])
        if gone.parent is not None and gone.doing in ("computing", "held"):
            self._commands.append(["cut", gone.parent, gone.link])

    def _leave(self, guest: Guest) -> None:
        self._uproot(guest, has_sent=True)
        guest.doing = "gone"
        self._commands.append(["gone", guest.link])
        self._withdraw(guest)

    def _withdraw(self, guest: Guest) -> None:
        """This worker takes no part any more; its samples are as if never leased, unless a doomed gradient had them."""
        if self._present.get(guest.rank) is not guest:
            return
        self.ledger = self.ledger.reclaim(guest.rank)
        if self.has_started:
            # First, while the policy still knows it as present: what it held is no part of any update.
            self._state, actions = self.policy.step(self._state, Leave(guest.rank))
            del self._present[guest.rank]
            for action in actions:
                self._do(action)
            self._check_border()
        else:
            del self._present[guest.rank]

    def _end_if_alone(self) -> None:
        if not self._present and not self.is_over and any(guest.doing == "done" for guest in self.guests.values()):
            self.is_over = True
            self._commands.append(["final"])

    # ---- the fence -----------------------------------------------------------------------------------------------

    def _check_border(self) -> None:
        in_tree = any(g.parent is not None and g.doing in ("computing", "held") for g in self._present.values())
        if self._pending is not None and self.version >= self._pending.effective_step - 1 and not in_tree:
            plan, self._pending = self._pending, None
            self._switch(plan)

    def _switch(self, plan: Plan) -> None:
        """Change the mode; the module's docstring says what becomes of gradients under way."""
        self._epoch += 1
        self._wakes.clear()
        self.policy = plan.policy
        self._state = self.policy.init(frozenset(self._present))
        self._sizes = plan.batch_sizes or self._sizes
        self._replant()
        self._commands.append(["switch", plan.epoch])
        bound = self.policy.staleness_bound
        arrived: list[Rank] = []
        for rank in sorted(self._present):
            guest = self._present[rank]
            if bound is not None and self.version - guest.base > bound:
                self._give_up(guest)
            if guest.doing == "held":
                arrived.append(rank)
            elif guest.doing == "waiting" or guest.is_doomed:
                self._release(rank)
        self._observe(Adopted(plan))
        epoch = self._epoch
        for rank in arrived:
            held = self._present.get(rank)
            # Another change of mode, or what the policy said to the arrival before, may have seen to it already.
            if self._epoch == epoch and held is not None and held.doing == "held":
                self._feed(Arrive(rank))

    def sample_counts(self) -> dict[str, int]:
        """Samples of all epochs that the loops went through: trained, and all others, which count as dropped."""
        trained = self.ledger.total_trained + self.ledger.trained
        epochs = self._num_epochs
        return {"trained": trained, "dropped": epochs * self.ledger.num_samples - trained, "epochs": epochs}
