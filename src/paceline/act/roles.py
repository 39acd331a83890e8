"""What a rank does with its gradients: turns a plan into one of three roles, all with the same five methods.

`PlainRole` is DDP as it is (everybody in the ring). `RingRole` is a member of a smaller ring, perhaps a parent.
`AttachedRole` works at its own pace for a parent. The switch between them is in `switch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.groups import make_group
from paceline.act.link import FOREVER, GRADIENT, REQUEST, Answer, ChildLink, Message, ParentLink
from paceline.act.peers import Ticket
from paceline.act.session import Session
from paceline.decide.estimate import lr_scale
from paceline.decide.ledger import Lease
from paceline.decide.plan import Plan
from paceline.policy.ring import AttachedRing
from paceline.types import Phase, Update

FutureTensor = torch.futures.Future[Tensor]


class Role(Protocol):
    """What the loop asks of a role; called on the training thread, in this order every step."""

    @property
    def averaged_samples(self) -> int:
        """Samples behind the last averaged gradient; 0 where this rank has none."""
        ...

    def next_lease(self) -> Lease | None:
        """The next batch's samples, or None when this rank's epoch is over. Roles may change in here."""
        ...

    def reduce(self, bucket: dist.GradBucket) -> FutureTensor:
        """Take a bucket of gradients; the future holds what DDP puts into `.grad`."""
        ...

    def finish_exchange(self) -> None:
        """The last bucket of this exchange has been taken; may wait for others."""
        ...

    def before_optimizer(self) -> None:
        """The optimizer is about to step."""
        ...

    def after_optimizer(self) -> None:
        """It has."""
        ...

    def after_update(self) -> None:
        """A step with a gradient exchange has ended."""
        ...

    def begin_epoch(self) -> None:
        """The loop begins an epoch."""
        ...

    def close(self) -> None:
        """The training is over."""
        ...


def completed(value: Tensor) -> FutureTensor:
    """A future that is already there."""
    future: FutureTensor = torch.futures.Future()
    future.set_result(value)
    return future


class PlainRole:
    """Everybody in the ring: bit for bit what DDP does without a hook."""

    def __init__(self, session: Session, change_role: Callable[[Plan], Role]) -> None:
        self._session = session
        self._change_role = change_role
        self._lease_sizes: dict[int, int] = {}
        self._under_way: list[tuple[Callable[[], None], Tensor, FutureTensor]] = []

    @property
    def averaged_samples(self) -> int:
        return sum(self._lease_sizes.values()) or self._session.world_size

    def next_lease(self) -> Lease | None:
        session = self._session
        assert session.ledger is not None
        if session.epoch < session.ledger.epoch:
            return None  # just back from an attachment that lagged: let the loop catch up
        if session.ledger.can_draw(session.world_size) and session.micro_steps == 0:
            plan = session.coordinator.fence(session.version + 1)
            if plan is not None:
                return self._change_role(plan).next_lease()
        session.ledger, leases = session.ledger.draw(tuple(range(session.world_size)))
        if session.micro_steps == 0:
            self._lease_sizes = {}
        for rank, lease in leases.items():
            self._lease_sizes[rank] = self._lease_sizes.get(rank, 0) + len(lease)
        return leases.get(session.rank)

    def reduce(self, bucket: dist.GradBucket) -> FutureTensor:
        # DDP multiplies by 1/W while copying into the bucket; with a hook that is the hook's part, same arithmetic.
        buffer = bucket.buffer().mul_(self._weight())
        future: FutureTensor = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._under_way.append((self._begin(buffer), buffer, future))
        return future

    def _begin(self, buffer: Tensor) -> Callable[[], None]:
        """Begin to sum a bucket over all ranks; return what waits for the result."""
        session = self._session
        if session.skew is not None:
            return session.skew.reduce(buffer)
        work = session.world_group.allreduce([buffer])
        return lambda: session.peers.wait_for_work(work, interruptible=not buffer.is_cuda)

    def finish_exchange(self) -> None:
        # DDP looks at no future before the last bucket is under way, and then waits for all. Waiting here instead
        # costs no overlap, can be interrupted by the news of a failure, and saves a thread switch per bucket.
        under_way, self._under_way = self._under_way, []
        for wait, buffer, future in under_way:
            wait()
            future.set_result(buffer)
        if self._session.skew is not None:
            self._session.skew.end_step()

    def _weight(self) -> float:
        sizes = self._lease_sizes
        if len(set(sizes.values())) <= 1:
            return 1.0 / self._session.world_size
        return sizes[self._session.rank] / sum(sizes.values())

    def before_optimizer(self) -> None: ...

    def after_optimizer(self) -> None: ...

    def after_update(self) -> None:
        self._session.version += 1

    def begin_epoch(self) -> None:
        session = self._session
        if session.ledger is not None and session.ledger.epoch < session.epoch:
            session.ledger = session.ledger.next_epoch()

    def close(self) -> None: ...


@dataclass
class Exchange:
    """One update of the ring, from its first bucket on: what this rank puts in, and what everybody put in."""

    reference: float
    folded: list[tuple[ParentLink, float]] = field(default_factory=list)
    control: Tensor = field(default_factory=lambda: torch.empty(0))
    slots: list[list[int]] = field(default_factory=list)  # by child, after the exchange: see RingRole._begin
    total: int = 0


class RingRole:
    """A member of the ring: reduces with the ring, and folds in what its own children have fully sent.

    What every member must know about an update rides on its first bucket: per child, the samples folded in, the
    samples refused, whether it waits for a lease, and its staleness. So all members divide by the same number of
    samples, scale the learning rate alike and keep equal ledgers, without a collective more.
    """

    def __init__(self, session: Session, plan: Plan, prefix: str, change_role: Callable[[Plan], Role]) -> None:
        assert isinstance(plan.policy, AttachedRing)
        self._session = session
        self._policy = plan.policy
        self._change_role = change_role
        self._children = sorted(plan.policy.parent_of)
        self._exchange: Exchange | None = None
        self._done: Exchange | None = None
        self._lr_before: list[float | Tensor] = []
        self._own_samples: dict[int, int] = {}
        self._over_epoch: int | None = None
        self.ring = plan.policy.ring
        self.links = [
            ParentLink(session, child, f"{prefix}/link{child}", lambda: self._over_epoch)
            for child in plan.policy.children_of(session.rank)
        ]
        position, size = plan.policy.ring.index(session.rank), len(plan.policy.ring)
        # One group for the gradients (comm thread) and one for DDP's own collectives (training thread): a group
        # belongs to one thread, or its operations could be matched in different orders.
        self._group = make_group(session.store, f"{prefix}/ring", position, size, session.timeout, session.device)
        session.ddp._update_process_group(
            make_group(session.store, f"{prefix}/ddp", position, size, session.timeout, session.device)
        )
        for link in self.links:
            session.peers.wait(link.connected)

    @property
    def averaged_samples(self) -> int:
        return self._done.total if self._done else 0

    def next_lease(self) -> Lease | None:
        session, ring = self._session, self._policy.ring
        assert session.ledger is not None
        if session.epoch < session.ledger.epoch:
            return None  # just back from an attachment that lagged: let the loop catch up
        if session.ledger.can_draw(len(ring)) and session.micro_steps == 0:
            plan = session.coordinator.fence(session.version + 1)
            if plan is not None:
                return self._change_role(plan).next_lease()
        session.ledger, leases = session.ledger.draw(ring)
        if session.micro_steps == 0:
            self._own_samples = {}
        for rank, lease in leases.items():
            self._own_samples[rank] = self._own_samples.get(rank, 0) + len(lease)
        if not leases:
            self._rest(session.ledger.epoch)
        return leases.get(session.rank)

    def _rest(self, over_epoch: int) -> None:
        """No update will come until the loop goes on: children are answered at once from now on."""
        self._over_epoch = over_epoch
        self._session.coordinator.note_epoch_over(over_epoch)
        for link in self.links:
            link.answer_if_over()

    def reduce(self, bucket: dist.GradBucket) -> FutureTensor:
        session = self._session
        first = self._exchange is None
        exchange = self._exchange = self._exchange or self._begin(bucket.buffer().dtype)
        buffer = bucket.buffer().mul_(session.samples / exchange.reference)
        for link, weight in exchange.folded:
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                flat = session.gradient_layout.view(link.gradient, session.param_index[id(param)])
                gradient.add_(flat.to(gradient.device), alpha=weight)
        ready = torch.cuda.current_stream().record_event() if buffer.is_cuda else None
        return session.comm.submit(lambda: self._all_reduce(buffer, exchange, first, ready)).future

    def finish_exchange(self) -> None: ...

    def _begin(self, dtype: torch.dtype) -> Exchange:
        session = self._session
        exchange = Exchange(reference=float(max(1, sum(self._own_samples.values()))))
        slots = [[0, 0, 0, 0] for _ in self._children]
        for link in self.links:
            message, asks = link.take()
            slot = slots[self._children.index(link.child)]
            slot[2] = int(asks)
            if message is None:
                continue
            slot[3] = session.version - message.base
            if self._policy.admits(slot[3]) and link.finite:
                slot[0] = message.samples
                rescale = session.scale() / message.scale
                exchange.folded.append((link, rescale * message.samples / exchange.reference))
            else:
                slot[1] = message.samples
        exchange.control = encode_integers([value for slot in slots for value in slot], dtype)
        return exchange

    def _all_reduce(self, buffer: Tensor, exchange: Exchange, first: bool, ready: torch.cuda.Event | None) -> Tensor:
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        if first:
            size = exchange.control.numel()
            joined = torch.cat([buffer, exchange.control.to(buffer.device)])
            self._group.allreduce([joined]).wait()
            buffer.copy_(joined[: buffer.numel()])
            values = decode_integers(joined[joined.numel() - size :])
            exchange.slots = [values[i : i + 4] for i in range(0, len(values), 4)]
            exchange.total = sum(self._own_samples.values()) + sum(slot[0] for slot in exchange.slots)
        else:
            self._group.allreduce([buffer]).wait()
        buffer.mul_(exchange.reference / exchange.total)
        if ready is not None:
            torch.cuda.current_stream().synchronize()
        return buffer

    def before_optimizer(self) -> None:
        session = self._session
        session.model_lock.acquire()
        if self._exchange is None:
            return
        scale = self._lr_scale(self._exchange)
        self._lr_before = [group["lr"] for group in session.optimizer.param_groups]
        for group in session.optimizer.param_groups:
            group["lr"] = group["lr"] * scale

    def after_optimizer(self) -> None:
        # Undone at once: a learning rate schedule never sees the scale.
        for group, lr in zip(self._session.optimizer.param_groups, self._lr_before, strict=False):
            group["lr"] = lr
        self._lr_before = []
        self._session.model_lock.release()

    def _lr_scale(self, exchange: Exchange) -> float:
        session = self._session
        return lr_scale(session.lr_rule, exchange.total, session.reference_samples)

    def after_update(self) -> None:
        session = self._session
        exchange = self._exchange
        assert exchange is not None
        assert session.ledger is not None
        self._done, self._exchange = exchange, None
        with session.model_lock:
            session.version += 1
        per_child = session.lease_samples
        for child, (folded, refused, asks, _) in zip(self._children, exchange.slots, strict=True):
            if folded or refused:
                session.ledger = session.ledger.settle(child, trained=folded > 0)
            if asks:
                session.ledger = session.ledger.settle(child, trained=False)  # asked anew without using the last
                session.ledger = session.ledger.grant(child, per_child, len(self._policy.ring))
        for link in self.links:
            lease = session.ledger.leases.get(link.child)
            asked = exchange.slots[self._children.index(link.child)][2]
            if asked and lease is not None:
                link.answer(lease)
        if session.rank == self._policy.ring[0]:
            session.coordinator.publish(self._describe(exchange))

    def _describe(self, exchange: Exchange) -> Update:
        by_child = list(zip(self._children, exchange.slots, strict=True))
        return Update(
            version=self._session.version,
            contributions={**self._own_samples, **{c: s[0] for c, s in by_child if s[0]}},
            dropped={c: s[1] for c, s in by_child if s[1]},
            staleness={c: s[3] for c, s in by_child if s[0] or s[1]},
            lr_scale=self._lr_scale(exchange),
            at_s=time.monotonic(),
        )

    def begin_epoch(self) -> None:
        session = self._session
        assert session.ledger is not None
        if session.ledger.epoch < session.epoch:
            session.ledger = session.ledger.next_epoch()
        self._over_epoch = None

    def close(self) -> None:
        self._rest(FOREVER)
        for link in self.links:
            self._session.peers.wait(link.ended)


class AttachedRole:
    """Works at its own pace: sends its gradient to the parent, applies nothing itself, gets parameters back."""

    def __init__(self, session: Session, prefix: str, change_role: Callable[[Plan], Role]) -> None:
        self._session = session
        self._change_role = change_role
        self._gradient = session.gradient_layout.empty()
        self._exchange: Ticket[Answer] | None = None
        self._stashed: list[Tensor | None] = []
        self._over_epoch = -1
        self._micro: list[Lease] = []
        self.lease: Lease | None = None
        session.ddp._update_process_group(
            make_group(session.store, f"{prefix}/solo{session.rank}", 0, 1, session.timeout, session.device)
        )
        self._link = ChildLink(session, f"{prefix}/link{session.rank}")
        session.peers.wait(self._link.connected)

    @property
    def averaged_samples(self) -> int:
        return 0

    def next_lease(self) -> Lease | None:
        session = self._session
        while True:
            if self._micro:
                return self._micro.pop(0)
            if self._over_epoch >= session.epoch:
                return None
            if session.micro_steps == 0 and session.coordinator.should_park():
                plan = self._park()
                if plan is not None:
                    return self._change_role(plan).next_lease()
                if self._over_epoch >= session.epoch:
                    return None
            if self.lease is not None:
                if self.lease.epoch > session.epoch:
                    return None  # the ring is epochs ahead: let the loop catch up
                self._micro, self.lease = self._split(self.lease), None
                continue
            self._ask(Message(REQUEST, session.version, epoch=session.epoch))
            self._receive()

    def _split(self, lease: Lease) -> list[Lease]:
        """With gradient accumulation a lease is several batches, one exchange."""
        assert self._session.ledger is not None
        size = self._session.ledger.batch_size
        return [Lease(lease.epoch, lease.positions[i : i + size]) for i in range(0, len(lease), size)]

    def _park(self) -> Plan | None:
        """Stand still until the ring reaches the plan's fence, or its epoch is over first."""
        session = self._session
        session.clock.enter(Phase.WAIT)
        try:
            while session.coordinator.should_park():
                session.peers.check()
                plan = session.coordinator.park()
                if plan is not None:
                    return plan
                if session.coordinator.epoch_over() >= session.epoch:
                    self._over_epoch = session.epoch
                    return None
                time.sleep(0.01)
            return None
        finally:
            session.coordinator.unpark()
            session.clock.enter(Phase.OTHER)

    def reduce(self, bucket: dist.GradBucket) -> FutureTensor:
        session = self._session
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            session.gradient_layout.view(self._gradient, session.param_index[id(param)]).copy_(gradient)
        if bucket.is_last():
            message = Message(GRADIENT, session.version, session.samples, session.epoch, session.scale())
            self._ask(message)
        return completed(bucket.buffer())

    def finish_exchange(self) -> None: ...

    def _ask(self, message: Message) -> None:
        gradient = self._gradient if message.kind == GRADIENT else ()
        self._exchange = self._link.exchange(message, gradient)

    def _receive(self) -> None:
        """Wait for the parent's answer and take it over."""
        if self._exchange is None:
            return
        session = self._session
        session.clock.enter(Phase.WAIT)
        answer = session.peers.wait(self._exchange)
        self._exchange = None
        session.clock.enter(Phase.OTHER)
        self._link.apply()
        session.version, self.lease = answer.version, answer.lease
        self._over_epoch = max(self._over_epoch, answer.over_epoch)

    def before_optimizer(self) -> None:
        # Optimizers skip parameters without a gradient: nothing of this rank's own is applied.
        self._stashed = [p.grad for p in self._session.params]
        for p in self._session.params:
            p.grad = None

    def after_optimizer(self) -> None:
        for p, gradient in zip(self._session.params, self._stashed, strict=True):
            p.grad = gradient
        self._stashed = []

    def after_update(self) -> None:
        self._receive()

    def begin_epoch(self) -> None: ...

    def leave(self) -> None:
        """End the link: the parent is told."""
        self._session.peers.wait(self._link.bye())

    def close(self) -> None:
        # A loop that was left early may hold old parameters: one more answer brings the final ones.
        if self._over_epoch < FOREVER:
            self._receive()
            self._ask(Message(REQUEST, self._session.version, epoch=FOREVER))
            self._receive()
        self.leave()


_DIGITS, _BASE = 3, 128


def encode_integers(values: list[int], dtype: torch.dtype) -> Tensor:
    """Write integers in 0..2_097_151 as base-128 digits, exact in every float dtype down to bfloat16.

    Each slot is non-zero on one rank only, so a sum over ranks returns it unharmed.

    Example:
        >>> decode_integers(encode_integers([0, 5, 300_000], torch.bfloat16))
        [0, 5, 300000]
    """
    digits = [value // _BASE**place % _BASE for value in values for place in range(_DIGITS)]
    return torch.tensor(digits, dtype=dtype)


def decode_integers(digits: Tensor) -> list[int]:
    """The integers behind `encode_integers`."""
    numbers = [round(d) for d in digits.tolist()]
    return [
        sum(number * _BASE**place for place, number in enumerate(numbers[i : i + _DIGITS]))
        for i in range(0, len(numbers), _DIGITS)
    ]
