"""Role changes: turns an agreed plan into new groups, moved state and a verified start, all ranks at once."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.layout import fingerprint
from paceline.act.roles import AttachedRole, PlainRole, RingRole, Role
from paceline.act.session import Session
from paceline.decide.ledger import Lease, Ledger
from paceline.decide.plan import Plan
from paceline.errors import DivergenceError
from paceline.policy.ring import AttachedRing
from paceline.types import Phase


class RoleKeeper:
    """Holds the role of this rank and changes it at a fence.

    A rank that was attached gets parameters, buffers, optimizer state, loss scale and the ledger from the ring;
    then every rank's hash of all of that must agree before anybody trains on.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.role: Role = PlainRole(session, self.change)

    def change(self, plan: Plan) -> Role:
        """Carry out `plan`; called by all ranks before they compute exchange `plan.effective_step`."""
        session = self._session
        session.clock.enter(Phase.WAIT)
        session.coordinator.note_fence(plan.epoch)
        old = self.role
        if not isinstance(old, PlainRole):
            self._end_attachments(old)
        if session.skew is not None:
            session.skew.forget()
        prefix = f"{session.prefix}/plan{plan.epoch}"
        if isinstance(plan.policy, AttachedRing):
            self.role = self._attach(plan, plan.policy, prefix)
        else:
            session.ddp._update_process_group(session.world_group)
            self.role = PlainRole(session, self.change)
        session.coordinator.note_adopted(plan)
        session.clock.enter(Phase.OTHER)
        return self.role

    def close(self) -> None:
        """Settle with attached ranks or the parent, and give the DDP its own group back."""
        self.role.close()
        if not isinstance(self.role, PlainRole):
            self._session.ddp._update_process_group(self._session.world_group)

    @property
    def can_train_on(self) -> bool:
        """Whether plain DDP may follow once we have closed: every rank holds the same optimizer state."""
        return isinstance(self.role, PlainRole)

    def _attach(self, plan: Plan, policy: AttachedRing, prefix: str) -> Role:
        session = self._session
        assert session.ledger is not None
        for child in sorted(policy.parent_of):
            session.ledger = session.ledger.grant(child, session.lease_samples, len(policy.ring))
        if session.rank in policy.ring:
            return RingRole(session, plan, prefix, self.change)
        role = AttachedRole(session, prefix, self.change)
        role.lease = session.ledger.leases.get(session.rank)
        return role

    def _end_attachments(self, old: Role) -> None:
        session = self._session
        assert session.ledger is not None
        if isinstance(old, AttachedRole):
            old.leave()
        elif isinstance(old, RingRole):
            for link in old.links:
                session.peers.wait(link.ended)
        holds_lease = isinstance(old, AttachedRole) and old.lease is not None
        rows = self._gather([int(isinstance(old, RingRole)), int(holds_lease)])
        root = next(rank for rank, (in_ring, _) in enumerate(rows) if in_ring)
        if isinstance(old, RingRole):
            for rank, (in_ring, unused) in enumerate(rows):
                if not in_ring:
                    # A gradient sent but in no update yet is lost here and counted; an unused lease goes back.
                    ledger = session.ledger
                    session.ledger = ledger.reclaim(rank) if unused else ledger.settle(rank, trained=False)
        payload = self._broadcast(_pack(session) if session.rank == root else b"", root)
        _unpack(session, payload, buffers_only=isinstance(old, RingRole))
        hashes = [row[0] for row in self._gather([_state_hash(session)])]
        wrong = [rank for rank, value in enumerate(hashes) if value != hashes[root]]
        if wrong:
            raise DivergenceError(
                f"after the role change ranks {wrong} hold other parameters than rank {root} "
                f"(hosts {[session.peers.hosts[rank] for rank in wrong]}); training on would be wrong. "
                "If the model has state outside parameters and buffers, train in mode='observe'."
            )

    def _gather(self, values: list[int]) -> list[list[int]]:
        session = self._session

        def job() -> list[list[int]]:
            mine = torch.tensor(values, dtype=torch.int64, device=session.device)
            rows = [torch.empty_like(mine) for _ in range(session.world_size)]
            dist.all_gather(rows, mine, group=session.world_group)
            return [row.tolist() for row in rows]

        return session.peers.wait(session.comm.submit(job))

    def _broadcast(self, payload: bytes, root: int) -> bytes:
        session = self._session

        def job() -> bytes:
            size = torch.tensor([len(payload)], dtype=torch.int64, device=session.device)
            dist.broadcast(size, root, group=session.world_group)
            data = torch.empty(int(size.item()), dtype=torch.uint8, device=session.device)
            if session.rank == root:
                data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            dist.broadcast(data, root, group=session.world_group)
            return bytes(data.cpu().numpy())

        return session.peers.wait(session.comm.submit(job))


def _pack(session: Session) -> bytes:
    assert session.ledger is not None
    buffer = io.BytesIO()
    state: dict[str, Any] = {
        "params": [p.detach().cpu() for p in session.params],
        "buffers": [b.detach().cpu() for b in session.buffers],
        "optimizer": session.optimizer.state_dict(),
        "scaler": session.scaler.state_dict() if session.scaler is not None else {},
        "ledger": asdict(session.ledger),
        "version": session.version,
        "accumulation": session.accumulation,
    }
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpack(session: Session, payload: bytes, buffers_only: bool) -> None:
    state = torch.load(io.BytesIO(payload), map_location=session.device, weights_only=True)
    with torch.no_grad():
        for tensor, value in zip(session.buffers, state["buffers"], strict=True):
            tensor.copy_(value)  # also within the ring: BatchNorm's differ there until the next forward
        if buffers_only:
            return
        for tensor, value in zip(session.params, state["params"], strict=True):
            tensor.copy_(value)
    leases = {rank: Lease(**lease) for rank, lease in state["ledger"].pop("leases").items()}
    session.ledger = Ledger(**state["ledger"], leases=leases)
    own_groups = [{k: v for k, v in group.items() if k != "params"} for group in session.optimizer.param_groups]
    session.optimizer.load_state_dict(state["optimizer"])
    if session.epoch < session.ledger.epoch:
        # This loop has yet to end epochs that the ring has ended: its schedule will make those steps itself.
        for group, own in zip(session.optimizer.param_groups, own_groups, strict=True):
            group.update(own)
    if session.scaler is not None and state["scaler"]:
        session.scaler.load_state_dict(state["scaler"])
    session.version = state["version"]
    session.accumulation = state["accumulation"]


def _state_hash(session: Session) -> int:
    tensors: list[Tensor] = list(session.model_tensors)
    for param in session.params:
        state = session.optimizer.state.get(param, {})
        for key in sorted(state, key=str):
            value = state[key]
            tensors.append(value if isinstance(value, Tensor) else torch.tensor(float(value or 0.0)))
    tensors.append(torch.tensor(session.scale(), dtype=torch.float64))
    return fingerprint(tensors)
