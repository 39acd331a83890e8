"""The object in the user's loop: turns hooks of DDP, the optimizer and the loader into timings, roles and leases.

Read this file first: everything that happens during training starts at one of the methods below `# ---- hooks`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from paceline.act.checks import check_ddp, check_no_sync, check_request, is_distributed, unwrap
from paceline.act.comm import CommThread
from paceline.act.coordinator import Coordinator
from paceline.act.groups import own_connection
from paceline.act.health import Health, Member
from paceline.act.hook import gradient_hook
from paceline.act.layout import fingerprint
from paceline.act.leader import Leader, live_controller
from paceline.act.loader import LeaseLoader
from paceline.act.peers import Peers, Watchdog
from paceline.act.session import Session
from paceline.act.skew import Collective, SkewedExchange, can_skew, check_collective
from paceline.act.switch import RoleKeeper
from paceline.act.termination import TerminationWatcher
from paceline.decide.estimate import LrRule
from paceline.decide.ledger import Lease, Ledger
from paceline.errors import ConfigError, PacelineError, PeerError
from paceline.measure import taps
from paceline.measure.timers import GcTimer, StepClock
from paceline.record import LOG_NAME, SCHEMA_VERSION, RunLog
from paceline.report.summary import text, write_reports
from paceline.types import NormSample, Phase

logger = logging.getLogger("paceline")
Mode = Literal["observe", "suggest", "auto"]
_num_attached = 0  # part of the store prefix, so that two models in one job do not share keys


def attach(
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mode: Mode = "observe",
    *,
    scaler: torch.amp.GradScaler | None = None,
    run_dir: str | Path | None = None,
    lr_rule: LrRule | None = None,
    max_staleness: int = 16,
    peer_timeout_s: float = 6.0,
    collective: Collective = "native",
) -> Pace:
    """Attach Paceline to a DDP model; call it on every rank, after building the DDP and the optimizer.

    Without a process group, or with a single rank, the returned object does nothing and says so once.

    Args:
        ddp: A `DistributedDataParallel` (or `torch.compile`'s wrapper around one). It is not replaced.
        optimizer: The optimizer that steps this model.
        mode: "observe" measures and reports, and never changes a bit of the training; "suggest" adds advice; "auto"
            acts, if the loop takes its batches from `Pace.data`.
        scaler: The loop's GradScaler, if it has one; "auto" moves its state when roles change.
        run_dir: Where log and reports go; `paceline_runs/<time>` by default. Rank 0 writes.
        lr_rule: How the learning rate follows the batch of an update while ranks are attached: "linear", "sqrt" or
            "none". Default: linear for SGD, square root for everything else.
        max_staleness: Gradients of attached ranks that are older are dropped and counted, versions, >= 0.
        peer_timeout_s: Silence of a rank after which the others stop with `PeerTimeout`, seconds, > 0. In "observe"
            a merely silent rank is waited for as plain DDP would.
        collective: How gradients are summed while everybody is in the ring. "native": by the backend, as without
            Paceline. "auto": around a rank that is predictably late, from four ranks on; results then differ from the
            backend's by float rounding. A `Reduction`: always so, for runs that must repeat to the bit.

    Returns:
        The object to take batches from and to close.

    Raises:
        ConfigError: what was asked for cannot be; the message says what to change.

    Source:
        STAR (arXiv 2512.09685) for what "auto" does; ours differs as described in docs/design.md.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> pace = attach(net, torch.optim.SGD(net.parameters(), lr=0.1))  # one process: a no-op
        >>> [x.shape[0] for x, in pace.data(torch.utils.data.TensorDataset(torch.ones(5, 2)), batch_size=2)]
        [2, 2, 1]
    """
    check_request(ddp, optimizer, mode, lr_rule, scaler)
    if max_staleness < 0:
        raise ConfigError(f"max_staleness must be >= 0, got {max_staleness}")
    if not peer_timeout_s > 0:
        raise ConfigError(f"peer_timeout_s must be > 0, got {peer_timeout_s}")
    check_collective(collective)
    if not is_distributed():
        logger.info("one process only: paceline does nothing (start with torchrun or paceline run to use it)")
        return Pace()
    module = check_ddp(unwrap(ddp))
    if dist.get_world_size(module.process_group) == 1:
        logger.warning("the DDP's process group has one rank, so nothing is synchronised: paceline does nothing")
        return Pace()
    if lr_rule is None:
        lr_rule = "linear" if isinstance(optimizer, torch.optim.SGD) else "sqrt"
    return AttachedPace(module, optimizer, mode, scaler, run_dir, lr_rule, max_staleness, peer_timeout_s, collective)


class Pace:
    """What `attach` returns; in this base form, for a single process, it does nothing.

    Use it as a context manager, call `close` at the end, or let the end of the process do so.
    """

    run_dir: Path | None = None

    def __init__(self) -> None:
        self._ledger: Ledger | None = None

    def data(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> LeaseLoader:
        """Return a loader whose batches are leased, so that a slow rank takes fewer samples.

        Args:
            dataset: A map-style data set, the same on all ranks; at least one sample per rank.
            batch_size: Samples per rank and step, >= 1.
            shuffle: A new order every epoch.
            seed: Of that order; the same on all ranks.
            collate_fn: As DataLoader's.

        Returns:
            An iterable; iterate it once per epoch.

        Raises:
            ConfigError: a batch below 1, or fewer samples than ranks.
        """
        world_size = self._world_size()
        size = len(dataset)  # type: ignore[arg-type]
        if batch_size < 1:
            raise ConfigError(f"batch_size must be >= 1, got {batch_size}")
        if size < world_size:
            raise ConfigError(f"the data set has {size} samples for {world_size} ranks; every rank needs one at least")
        self._begin_leases(Ledger(size, batch_size))
        return LeaseLoader(self, dataset, batch_size, world_size, shuffle, seed, collate_fn)

    def metric(self, name: str, value: float) -> None:
        """Write a number of your own, such as the accuracy, into the run log (rank 0's count)."""

    def close(self) -> None:
        """End the run: settle with attached ranks, write the reports. Harmless when repeated; call it on all ranks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- a LeaseSource for one process ---------------------------------------------------------------------------

    def _world_size(self) -> int:
        return 1

    def _begin_leases(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def begin_epoch(self) -> None:
        assert self._ledger is not None
        self._ledger = self._ledger.next_epoch()

    def next_lease(self) -> Lease | None:
        assert self._ledger is not None
        self._ledger, leases = self._ledger.draw((0,))
        return leases.get(0)

    def before_fetch(self) -> None: ...

    def after_fetch(self) -> None: ...


class AttachedPace(Pace):
    """`Pace` with more than one rank: hooks in, threads up."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        mode: Mode,
        scaler: torch.amp.GradScaler | None,
        run_dir: str | Path | None,
        lr_rule: LrRule,
        max_staleness: int,
        peer_timeout_s: float,
        collective: Collective,
    ) -> None:
        super().__init__()
        global _num_attached
        _num_attached += 1
        rank, world_size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
        prefix = f"paceline/{_num_attached}"
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        members, self.run_dir = _meet(store, rank, world_size, mode, collective, run_dir)
        hosts = tuple(member.host for member in members)
        _log_to_stderr(hosts[rank], rank)
        # In "observe" only a rank that is known to be dead or to have failed ends the run; silence does not.
        self._peers = Peers(
            rank, hosts, limit_s=peer_timeout_s, silence_s=peer_timeout_s if mode == "auto" else float("inf")
        )
        self._leader: Leader | None = None
        if rank == 0:
            log = RunLog(self.run_dir)
            _write_header(log, hosts, mode, lr_rule, max_staleness, peer_timeout_s)
            controller = live_controller(hosts, lr_rule, max_staleness)
            health = Health(members, self._peers.silence_s, self._peers.limit_s)
            self._leader = Leader(controller, log, members, health, advises=mode != "observe")
        self._session = Session(
            rank=rank,
            world_size=world_size,
            ddp=ddp,
            optimizer=optimizer,
            scaler=scaler,
            lr_rule=lr_rule,
            store=store,
            prefix="groups",
            timeout=_group_timeout(ddp.process_group),
            clock=StepClock(rank),
            peers=self._peers,
            comm=CommThread(self._peers),
        )
        self._session.coordinator = Coordinator(
            rank, world_size, own_connection(store), self._peers, self._session.clock.waiting_s, self._leader
        )
        if collective != "native":
            if can_skew(world_size):
                self._session.skew = SkewedExchange(self._session, store, collective, self._tell)
            else:
                logger.info("with %d ranks an all-reduce around a late one gains nothing: native it is", world_size)
        self._roles = RoleKeeper(self._session)
        self._mode = mode
        self._samples_norms = mode != "observe"
        self._started = False
        self._in_backward = False
        self._exchanged = False
        self._local_sq: float | None = None
        self._closed = False
        self._failed = False
        self._install()

    def _install(self) -> None:
        session = self._session
        session.ddp.register_comm_hook(self, gradient_hook)
        self._handles = [
            session.ddp.register_forward_pre_hook(self._before_forward),
            session.ddp.module.register_forward_pre_hook(self._after_buffer_sync),
            session.optimizer.register_step_pre_hook(self._before_optimizer),
            session.optimizer.register_step_post_hook(self._after_optimizer),
        ]
        taps.add_listener(self)
        self._gc_timer = GcTimer(session.clock.gc_pause)
        self._watchdog = Watchdog(
            self._peers,
            last_contact=lambda: session.coordinator.last_contact,
            is_blocked=lambda: session.clock.idle_s() > 2.0,
            on_failure=self._report_failure,
        )
        session.coordinator.start()
        self._watchdog.start()
        self._termination = TerminationWatcher(self._before_termination)
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self.close)

    def _tell(self, kind: str, numbers: dict[str, Any]) -> None:
        """Write a decision that all ranks took alike into the run log (rank 0's)."""
        if self._leader is not None:
            self._leader.note(kind, self._session.version + 1, numbers)

    # ---- hooks: what happens during a step, in order -------------------------------------------------------------

    def begin_epoch(self) -> None:
        """The loop begins an epoch over leased samples."""
        self._session.epoch += 1
        self._roles.role.begin_epoch()

    def next_lease(self) -> Lease | None:
        """The loop asks for a batch; roles may change in here, and nowhere else."""
        self._end_step()
        self._peers.check()
        lease = self._roles.role.next_lease()
        if lease is not None:
            self._session.samples += len(lease)
            self._session.micro_steps += 1
        return lease

    def before_fetch(self) -> None:
        """A batch is about to be read, by our loader or by a DataLoader of the user's."""
        self._end_step()
        self._session.clock.enter(Phase.DATA)

    def after_fetch(self) -> None:
        """The batch is there."""
        self._session.clock.enter(Phase.OTHER)

    def _before_forward(self, _module: torch.nn.Module, _args: Any) -> None:
        """DDP's forward begins: it may wait for others in its buffer broadcast."""
        if not torch.is_grad_enabled():
            return
        if self._session.ddp.static_graph:
            check_no_sync(self._session.ddp)
        self._end_step()
        self._peers.check()
        if not self._started:
            self._started = True
            self._session.clock.discard_step()
        self._session.clock.enter(Phase.WAIT)

    def _after_buffer_sync(self, _module: torch.nn.Module, _args: Any) -> None:
        """The inner module's forward begins: the wait for buffers is over."""
        if self._session.clock.phase is Phase.WAIT:
            self._session.clock.enter(Phase.FORWARD)

    def before_backward(self) -> None:
        """The autograd engine is about to run."""
        self._in_backward = True
        self._session.clock.enter(Phase.BACKWARD)
        if (
            self._samples_norms
            and self._session.version % _NORMS_EVERY == 0
            and self._session.ddp.require_backward_grad_sync
        ):
            self._local_sq = 0.0

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A bucket of gradients is ready, and nobody has been waited for yet."""
        if self._closed and not self._roles.can_train_on:
            raise PacelineError(
                "training goes on after pace.close(), which ended while a rank was attached: that rank has the "
                "parameters but not the optimizer state; close after the last step only"
            )
        if self._local_sq is not None:
            self._local_sq += float(torch.linalg.vector_norm(bucket.buffer())) ** 2
        future = self._roles.role.reduce(bucket)
        if not self._in_backward:  # a rank that has joined (torch's Join) shadows others' steps, bucket by bucket
            if self._session.skew is not None:
                raise ConfigError('collective="auto" does not work with torch\'s Join: use collective="native"')
            self._roles.role.finish_exchange()
        elif bucket.is_last():
            self._session.clock.enter(Phase.WAIT)
            self._exchanged = True
            self._roles.role.finish_exchange()
        return future

    def after_backward(self, error: BaseException | None) -> None:
        """The autograd engine has run, or failed: perhaps because a peer did."""
        self._in_backward = False
        session = self._session
        if error is not None:
            if self._peers.failure is not None or self._peers.broken is not None:
                cause = self._peers.explain(self._peers.broken or error)
                if isinstance(cause, PeerError):
                    self._peers.delivered = True
                    raise cause from None  # torch only says that it cannot cast the news to a tensor
            return
        session.clock.enter(Phase.OTHER)
        if self._exchanged and self._local_sq is not None:
            self._publish_norms(self._local_sq)
            self._local_sq = None

    def _publish_norms(self, local_sq: float) -> None:
        session = self._session
        averaged_samples = self._roles.role.averaged_samples
        if not averaged_samples:
            return
        gradients = [p.grad for p in session.params if p.grad is not None]
        averaged_sq = float(sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients)))
        own = session.samples or 1
        if averaged_samples > own:
            session.coordinator.publish(
                NormSample(session.rank, session.version + 1, local_sq, averaged_sq, own, averaged_samples)
            )

    def _before_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._session.clock.enter(Phase.OPTIMIZER)
        self._roles.role.before_optimizer()

    def _after_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._roles.role.after_optimizer()
        self._session.clock.enter(Phase.OTHER)
        self._end_step()

    def _end_step(self) -> None:
        """The border between two steps, if gradients were exchanged since the last one."""
        if not self._exchanged:
            return
        self._exchanged = False
        session = self._session
        step = session.version + 1
        self._roles.role.after_update()
        session.coordinator.publish(session.clock.close_step(step, session.samples))
        session.accumulation = max(1, session.micro_steps)
        session.samples = session.micro_steps = 0

    def begin_expected(self, name: str) -> None:
        """A stretch begins that must not count (`paceline.expected_slow`)."""
        self._session.clock.begin_expected()
        if self._leader is not None:
            logger.debug("expected to be slow: %s", name)

    def end_expected(self) -> None:
        """The stretch ends."""
        self._session.clock.end_expected()

    # ---- the user's side -----------------------------------------------------------------------------------------

    def _world_size(self) -> int:
        return self._session.world_size

    def _begin_leases(self, ledger: Ledger) -> None:
        session = self._session
        if session.ledger is not None:
            raise ConfigError("pace.data(...) was already called; lease one data set per attached model")
        session.ledger = ledger
        if self._leader is not None:
            self._leader.begin_leases(ledger.batch_size, acts=self._mode == "auto")

    def metric(self, name: str, value: float) -> None:
        """Write a number of your own into the run log (rank 0's count)."""
        if self._leader is not None:
            self._leader.metric(name, value)

    def close(self) -> None:
        """End the run on this rank; see `Pace.close`."""
        if self._closed:
            return
        self._closed = True
        session = self._session
        try:
            if self._peers.failure is None and not self._failed:
                self._end_step()
                session.coordinator.note_closing()
                self._settle()
                info = {"hash": fingerprint(session.params), "samples": self._sample_counts()}
                session.coordinator.close(info, timeout_s=_CLOSE_TIMEOUT_S)
            self._finish()
        finally:
            self._uninstall()

    def _settle(self) -> None:
        """Settle with the ranks attached to this one, or with the parent; the training is complete either way."""
        try:
            if self._session.skew is not None:
                self._session.skew.close()
            self._roles.close()
        except PeerError as error:
            logger.error("at the end of the training: %s", error)

    def _sample_counts(self) -> dict[str, int] | None:
        ledger = self._session.ledger
        if ledger is None:
            return None  # the loop brings its own loader, and nobody knows
        unsettled = sum(len(lease) for lease in ledger.leases.values())
        return {
            "trained": ledger.total_trained + ledger.trained,
            "dropped": ledger.total_dropped + ledger.dropped + ledger.num_free + unsettled,
            "epochs": ledger.epoch + 1,
        }

    def _finish(self) -> None:
        if self._peers.failure is not None:
            self._watchdog.reported.wait(timeout=15.0)  # the watchdog writes the report of a failed run
        elif self._leader is not None and self.run_dir is not None:
            self._leader.end(self._session.coordinator.statuses)
            self._write_reports(logging.INFO)

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        taps.remove_listener(self)
        self._gc_timer.close()
        self._watchdog.close()
        self._termination.close()
        self._session.comm.close()
        self._session.skew = None  # it needs that thread: training that goes on uses the backend's own all-reduce
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._excepthook
        atexit.unregister(self.close)

    # ---- failure -------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        cause = None if exc is None else self._explained(exc)
        if cause is not None:
            self.fail(cause)
        self.close()
        if cause is not exc and cause is not None:
            raise cause from exc

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`; called for every exception that leaves the loop."""
        if isinstance(error, PeerError) or self._failed or self._closed:
            return
        self._failed = True
        last_line = traceback.format_exception_only(error)[-1].strip()
        self._session.coordinator.note_failure(f"raised {last_line}")
        deadline = time.monotonic() + 2.0
        while self._peers.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)  # until the news is out: this process may be about to end

    def _explained(self, error: BaseException) -> BaseException:
        """The failure of a peer behind an error of the transport; any other error as it is."""
        is_transport = isinstance(error, RuntimeError) and "onnection closed by peer" in str(error)
        return self._peers.explain(error) if is_transport else error

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        cause = self._explained(error)
        if cause is not error:
            cause.__cause__ = error
            kind, error, tb = type(cause), cause, None
        self.fail(error)
        self._excepthook(kind, error, tb)

    def _before_termination(self) -> None:
        """The launcher ends this process: most likely because a rank failed, so give that news a moment to come in."""
        deadline = time.monotonic() + 2.0
        while self._peers.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._peers.failure is not None:
            self._watchdog.reported.wait(timeout=15.0)
        elif self._leader is not None and self.run_dir is not None:
            self._leader.event("ended by SIGTERM")
            self._leader.log.flush()
            self._write_reports(logging.ERROR)

    def _report_failure(self) -> None:
        """Write the report of a run that lost a rank: rank 0 does, or the first survivor that shares its disk."""
        failure = self._peers.failure
        assert failure is not None
        assert self.run_dir is not None
        if self._leader is not None:
            self._leader.fail(failure)
        elif failure.rank == 0 and self._session.rank == 1 and (self.run_dir / LOG_NAME).is_file():
            with RunLog(self.run_dir) as log:
                log.write("failure", rank=failure.rank, host=failure.host, reason=failure.reason, time_s=None)
        else:
            return
        self._write_reports(logging.ERROR)

    def _write_reports(self, level: int) -> None:
        """Summary, page and the verdict in words; a failure here is logged and never ends the training."""
        assert self.run_dir is not None
        try:
            summary = write_reports(self.run_dir)
            logger.log(level, "%s\nreport: %s", text(summary), self.run_dir / "report.html")
        except Exception:
            logger.exception("the report could not be written; the log is in %s", self.run_dir)


_NORMS_EVERY = 5  # steps between two samples of the gradient norms: keeps their cost below 1 % of a step
_CLOSE_TIMEOUT_S = 60.0


def _meet(
    store: dist.Store, rank: int, world_size: int, mode: str, collective: Collective, run_dir: str | Path | None
) -> tuple[list[Member], Path]:
    """Exchange who is where, and agree on mode, collective and run directory (rank 0's)."""
    default = Path("paceline_runs") / time.strftime("%Y%m%d-%H%M%S")
    directory = str(Path(run_dir if run_dir is not None else default).absolute())
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "mode": mode,
        "collective": str(collective),
        "run_dir": directory,
    }
    store.set(f"hello/{rank}", json.dumps(mine))
    everybody = [json.loads(store.get(f"hello/{other}")) for other in range(world_size)]
    for what in ("mode", "collective"):
        given = [hello[what] for hello in everybody]
        if len(set(given)) > 1:
            raise ConfigError(f"all ranks must attach with the same {what}, got {dict(enumerate(given))}")
    if rank == 0:
        store.set("board", json.dumps({"beat": 0, "read": [0] * world_size}))
    store.get("board")  # there before anybody asks for it off the training thread
    return [Member(hello["host"], hello["pid"]) for hello in everybody], Path(everybody[0]["run_dir"])


def _write_header(
    log: RunLog, hosts: tuple[str, ...], mode: str, lr_rule: LrRule, max_staleness: int, peer_timeout_s: float
) -> None:
    log.write(
        "run",
        schema=SCHEMA_VERSION,
        world_size=len(hosts),
        hosts=list(hosts),
        mode=mode,
        lr_rule=lr_rule,
        max_staleness=max_staleness,
        backend=dist.get_backend(),
        torch=torch.__version__,
        script=Path(sys.argv[0]).name,
        started_at_s=round(time.time(), 3),
        peer_timeout_s=peer_timeout_s,
    )
    log.flush()


def _log_to_stderr(host: str, rank: int) -> None:
    """Unless the application has set up logging, ours goes to stderr, each line saying whose it is."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{host}:{rank} %(levelname)s %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The user's own timeout, for our groups too."""
    with contextlib.suppress(Exception):
        return group._get_backend(torch.device("cpu")).options._timeout
    return timedelta(minutes=30)
