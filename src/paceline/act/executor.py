"""The executor: turns a schedule and a tensor on every rank into their sum, or into an error that names who is missing.

One executor runs any schedule. Where the schedule is the plain ring, or none fits, it calls the backend's own
all-reduce: elegance must not cost bandwidth. It owns a process group that nobody else uses, since ranks match its
messages by order alone. Use it from one thread.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.act.groups import make_group
from paceline.act.program import Program, compile_program
from paceline.act.rollcall import Answer, RollCall
from paceline.act.wire import BatchedWire, Buffers, StreamedWire, Wire, WireError
from paceline.collective.schedule import Schedule
from paceline.errors import ConfigError, PeerError, PeerTimeout

logger = logging.getLogger("paceline")
Op = Literal["sum", "avg"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MIN_RANKS = 4  # with fewer, the late schedule gains nothing over the ring
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """How calls are carried out from now on; the same on all ranks.

    Args:
        schedule: None, or one named "ring": the backend's own all-reduce.
        max_numel: At most this many elements of a tensor, from its start, go through the schedule, the rest through
            the backend's own all-reduce ("split mode"); None: all.
        num_lanes: Into how many equal parts that run through the schedule side by side, >= 1. With two, ports stay
            busy while ranks wake up.

    Raises:
        ConfigError: a negative `max_numel`, or no lane.

    Example:
        >>> CollectivePlan().is_native
        True
    """

    schedule: Schedule | None = None
    max_numel: int | None = None
    num_lanes: int = 2

    def __post_init__(self) -> None:
        if self.max_numel is not None and self.max_numel < 0:
            raise ConfigError(f"max_numel must be >= 0 or None, got {self.max_numel}")
        if self.num_lanes < 1:
            raise ConfigError(f"num_lanes must be >= 1, got {self.num_lanes}")

    @property
    def is_native(self) -> bool:
        """Whether everything goes through the backend's own all-reduce."""
        return self.schedule is None or self.schedule.name == "ring"

    def digest(self) -> str:
        """What ranks compare to know that they hold the same plan; covers every message of the schedule."""
        if self.schedule is None or self.is_native:
            return "native"
        return f"{_digest(self.schedule)}/{self.max_numel}/{self.num_lanes}"  # type: ignore[arg-type]  # schedules are hashable


@lru_cache(maxsize=64)
def _digest(schedule: Schedule) -> str:
    layout = schedule.num_ranks, schedule.num_chunks, schedule.num_shards, schedule.blocks, schedule.num_early_rounds
    sha = hashlib.sha256(repr(layout).encode())
    for messages in schedule.rounds():
        sha.update(messages.tobytes())
        sha.update(b"|")
    return sha.hexdigest()


class Executor:
    """All-reduces of one group of ranks.

    Args:
        store: The job's store.
        rank: This process's global rank.
        ranks: Global ranks of the members, by position; all of them build an executor at the same time.
        prefix: Unique on the store among all executors ever built.
        timeout_s: Longest wait for a peer inside a call, seconds, > 0; on Gloo also of the group itself.
        device: Of the tensors: `cpu` (Gloo) or a CUDA device (NCCL; **written, never run**).
        hosts: Host name by position, for error messages; None asks the others through the store.
        wire: "streamed" or "batched"; None takes what suits the backend.

    Raises:
        ConfigError: `rank` is not among `ranks`, or the timeout is not positive.
        RuntimeError: the others did not come within the timeout.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        *,
        prefix: str = "paceline/collective",
        timeout_s: float = 1800.0,
        device: torch.device | None = None,
        hosts: Sequence[str] | None = None,
        wire: Literal["streamed", "batched"] | None = None,
    ) -> None:
        if rank not in ranks:
            raise ConfigError(f"rank {rank} is not among the executor's ranks {tuple(ranks)}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be > 0, got {timeout_s}")
        self.ranks = tuple(ranks)
        self.position = self.ranks.index(rank)
        self.plan = CollectivePlan()
        self.failure: PeerError | None = None
        self._store = dist.PrefixStore(prefix, store)
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device or torch.device("cpu")
        self._group: dist.ProcessGroup | None = make_group(
            store, f"{prefix}/group", self.position, len(self.ranks), self._timeout, self._device
        )
        self._hosts = tuple(hosts or ["unknown"] * len(self.ranks))
        if hosts is None:
            hosts = self._exchange("host", socket.gethostname())
        self._hosts = tuple(hosts)
        self._rollcall = RollCall(self._store, "", self.position, self.ranks, hosts)
        batched = wire == "batched" or (wire is None and self._device.type != "cpu")
        self._wire: Wire = BatchedWire(self._group, self._device) if batched else StreamedWire(self._group)
        self._proposal: tuple[int, CollectivePlan] | None = None
        self._num_proposals = self._num_forgotten = 0
        self._pool: dict[torch.dtype, list[Tensor]] = {}
        # Connects everybody; on NCCL, point-to-point between some ranks is undefined before a collective of all.
        self._native(torch.zeros(1, device=self._device), "sum")

    def use(self, plan: CollectivePlan) -> None:
        """Take a plan for the calls to come. Every rank calls this at the same point between calls; does not block.

        The ranks' plans are compared at the next call. Unless all are the same, calls go through the backend's own
        all-reduce until the next `use`.

        Args:
            plan: The schedule must be verified and for as many ranks as the group has.

        Raises:
            ConfigError: the schedule is for another number of ranks.
        """
        if plan.schedule is not None and plan.schedule.num_ranks != len(self.ranks):
            raise ConfigError(f"a schedule for {plan.schedule.num_ranks} ranks cannot run on {len(self.ranks)}")
        self._check_usable()
        self._num_proposals += 1
        self._proposal = (self._num_proposals, plan)
        self._store.set(f"plan/{self._num_proposals}/{self.position}", plan.digest())

    def settle(self) -> None:
        """Compare the ranks' latest plans and take the one to use; `begin` does it if nobody did before.

        They proposed when the last call was over, so this hardly ever waits; it takes a few exchanges with the store.

        Raises:
            PeerTimeout: a rank proposed nothing within `timeout_s`.
        """
        if self._proposal is None:
            return
        number, plan = self._proposal
        digests = self._gather(f"plan/{number}")
        for older in range(self._num_forgotten + 1, number):  # everybody is past these, or would not have come here
            self._store.delete_key(f"plan/{older}/{self.position}")
        self._num_forgotten = number - 1
        self._proposal = None
        if len(set(digests)) == 1:
            self.plan = plan
            return
        self.plan = CollectivePlan()
        logger.warning("ranks hold different all-reduce plans (%s): using the backend's own", " ".join(digests))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Sum or average a tensor over all ranks, in place; every rank ends with the same bits.

        Additions round once each, to the tensor's own dtype (bf16 and fp16 are added in float32 first); "avg" divides
        the finished sum. float32, float64, bf16 and fp16, dense and contiguous, follow the plan; anything else goes
        to the backend.

        Args:
            tensor: Any shape; the same shape and dtype on all ranks.
            op: "sum" or "avg"; other `ReduceOp` names ("max", ...) go to the backend.

        Raises:
            PeerTimeout: a rank was silent for `timeout_s`. The tensor holds its input again, unless the call went to
                the backend as a whole. The executor is of no use any more.
            PeerError: a rank died or failed meanwhile; likewise.
        """
        self.begin(tensor, op).complete()

    def begin(self, tensor: Tensor, op: str = "sum") -> Call:
        """Do the part of an all-reduce that needs no late rank; the returned call's `complete` does the rest.

        Several calls may be begun before the first is completed, and then complete in the order in which they were
        begun; all early ranks must begin and complete in the same order. So the reduce-scatters of later buckets do
        not wait for the rank for which the first one waits.

        Raises:
            PeerTimeout: see `all_reduce`.
            PeerError: see `all_reduce`.
        """
        self._check_usable()
        self.settle()
        return Call(self, tensor, op)

    def close(self) -> None:
        """Give up the group and its connections."""
        self._group = None
        self._wire = _Closed()

    # What calls use.

    def _guard(self, work: Callable[[], None], undo: Callable[[], None]) -> None:
        """Run a part of a call; turn what goes wrong into the peer behind it, and put the input back."""
        self._check_usable()
        try:
            work()
            return
        except WireError as error:
            answer, cause = Answer(error.peer, error.is_closed), str(error)
            traceback.clear_frames(error.__traceback__)  # unfinished messages in there keep connections open
        except _NativeError as error:
            answer, cause = Answer(None, error.is_closed), str(error)
            traceback.clear_frames(error.__traceback__)
        except BaseException as error:
            self._rollcall.announce(Answer(None, own=repr(error)))
            traceback.clear_frames(error.__traceback__)
            self.close()
            undo()
            raise
        self._rollcall.announce(answer)
        self.close()  # first: nothing may arrive any more when the input is put back
        undo()
        self.failure = self._rollcall.verdict()
        self.failure.__cause__ = RuntimeError(cause)
        raise self.failure

    def _native(self, tensor: Tensor, op: str) -> None:
        assert self._group is not None
        options = dist.AllreduceOptions()
        operation: Any = _OPS[op] if op in _OPS else getattr(dist.ReduceOp, op.upper())
        options.reduceOp = operation
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise _NativeError(error) from None

    def _take(self, dtype: torch.dtype, numel: int) -> Tensor:
        """A buffer from the pool, or a new one."""
        free = self._pool.setdefault(dtype, [])
        fitting = [buffer for buffer in free if buffer.numel() >= numel]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            del free[next(i for i, buffer in enumerate(free) if buffer is best)]
            return best
        if free:
            free.pop()  # a call's buffers grow, but do not become more
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _give(self, buffers: Buffers) -> None:
        self._pool[buffers.flat.dtype] += [buffers.kept, *buffers.scratch]

    # Agreement.

    def _exchange(self, key: str, value: str) -> list[str]:
        self._store.set(f"{key}/{self.position}", value)
        return self._gather(key)

    def _gather(self, key: str) -> list[str]:
        keys = [f"{key}/{position}" for position in range(len(self.ranks))]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:
            missing = next((p for p, name in enumerate(keys) if not self._store.check([name])), None)
            if missing is None:
                raise
            reason = f"it did not publish its {key.split('/')[0]} in time"
            self.failure = PeerTimeout(self.ranks[missing], self._hosts[missing], reason)
            self.close()
            raise self.failure from None
        return [raw.decode() for raw in self._store.multi_get(keys)]

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._group is None:
            raise RuntimeError("this executor is closed")


class Call:
    """One all-reduce that has been begun; see `Executor.begin`."""

    def __init__(self, executor: Executor, tensor: Tensor, op: str) -> None:
        self._executor = executor
        self._tensor = tensor
        self._op = op
        self._program: Program | None = None
        self._buffers: Buffers | None = None
        plan, n = executor.plan, len(executor.ranks)
        fits = op in _OPS and tensor.dtype in DTYPES and tensor.layout == torch.strided and tensor.is_contiguous()
        if plan.schedule is None or plan.is_native or n < MIN_RANKS or not fits:
            return
        flat = tensor.detach().view(-1)
        numel = flat.numel() if plan.max_numel is None else min(plan.max_numel, flat.numel())
        self._split = numel
        if numel == 0:
            return
        self._program = program = _compiled(plan.schedule, executor.position, numel, plan.num_lanes)  # type: ignore[arg-type]
        scratch = (executor._take(flat.dtype, program.scratch_numel), executor._take(flat.dtype, program.scratch_numel))
        kept = executor._take(flat.dtype, flat.numel())
        self._buffers = buffers = Buffers(flat, kept, scratch, n if op == "avg" else None)
        pieces = max(1, len(program.completion))
        edges = [numel + (flat.numel() - numel) * i // pieces for i in range(pieces + 1)]
        buffers.later = [(start, stop) for start, stop in pairwise(edges) if start < stop]
        executor._guard(lambda: executor._wire.run(program.early, buffers), buffers.restore)

    def complete(self) -> None:
        """Do what is left; returns when this rank has the result and has passed on what others need of it.

        Raises:
            PeerTimeout: see `Executor.all_reduce`.
            PeerError: see `Executor.all_reduce`.
        """
        executor, program, buffers = self._executor, self._program, self._buffers
        if program is None or buffers is None:
            executor._guard(lambda: executor._native(self._tensor, self._op), lambda: None)
            return
        executor._guard(lambda: executor._wire.run(program.completion, buffers), buffers.restore)
        buffers.save(buffers.later)
        rest = buffers.flat[self._split :]
        if rest.numel() > 0:
            executor._guard(lambda: executor._native(rest, self._op), buffers.restore)
        executor._give(buffers)
        self._buffers = None


@lru_cache(maxsize=256)
def _compiled(schedule: Schedule, position: int, numel: int, num_lanes: int) -> Program:
    return compile_program(schedule, position, numel, num_lanes)


class _NativeError(RuntimeError):
    """The backend's own all-reduce failed; it does not say because of whom."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the backend's all-reduce failed: {cause}")
        self.is_closed = "imed out" not in str(cause) and "timeout" not in str(cause)


class _Closed:
    """Stands in for the wire of a closed executor."""

    def run(self, exchanges: object, buffers: object) -> None:
        del exchanges, buffers
        raise RuntimeError("this executor is closed")
