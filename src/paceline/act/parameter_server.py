"""Parameter servers in a user's script: turns one call, the same on every rank, into a worker's or a server's part."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.act.adviser import Adviser
from paceline.act.attach import Pace
from paceline.act.checks import check_request, unwrap
from paceline.act.chief import Chief
from paceline.act.keeper import Keeper
from paceline.act.leader import live_controller
from paceline.act.messages import Buffers
from paceline.act.peers import Peers
from paceline.act.pulse import tell_failure, wait_for
from paceline.act.server import Place, Server
from paceline.act.shards import ELEMENTWISE, Shards
from paceline.act.snapshot import Snapshots
from paceline.act.worker import WorkerPace
from paceline.decide.estimate import LrRule
from paceline.decide.ledger import Lease, Ledger
from paceline.decide.plan import Adopted, Plan
from paceline.decide.tree import Gardener
from paceline.errors import ConfigError
from paceline.policy import catalog
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy, Work
from paceline.record import SCHEMA_VERSION, RunLog
from paceline.report.summary import text, write_reports

logger = logging.getLogger("paceline")
WireDtype = Literal["float32", "bfloat16"]
_num_served = 0  # part of the store prefix, so that two models in one job do not share keys


def parameter_server(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mode: str | SyncPolicy[Any] = "auto",
    *,
    num_servers: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    scheduler_samples: int | None = None,
    wire_dtype: WireDtype = "float32",
    bucket_mb: float = 4.0,
    lr_rule: LrRule | None = None,
    max_staleness: int = 16,
    run_dir: str | Path | None = None,
    snapshot_dir: str | Path | None = None,
    snapshot_every: int = 100,
    tree: bool | None = None,
    peer_timeout_s: float = 6.0,
) -> Pace:
    """Train with parameter servers; call it on every rank, in place of wrapping the model in DDP.

    The last `num_servers` ranks keep the parameters and the optimizer's state, each a part. The others are workers:
    they push gradients and pull parameters, and `optimizer.step()` does nothing there. The loop is the same on all
    ranks; on a server it has no batches, and its first epoch lasts until the last worker has left. No process group is
    needed, only torchrun's environment, or the store of a group that is there.

    Args:
        module: The model, not wrapped; with the same parameters in the same order on all ranks. Training begins with
            the servers' values.
        optimizer: Any torch optimizer over it that has not stepped yet. Those in `shards.ELEMENTWISE` are cut evenly
            among servers, others by whole tensors.
        mode: "auto" lets the controller choose among BSP, KSync, KAsync, ASP and GroupSync. A `SyncPolicy`, or its
            name ("bsp", "ksync:3", "ssp:2", "kasync:4", ...; see `policy.catalog.parse`), is kept as it is.
        num_servers: How many of the ranks are servers, >= 1 and fewer than all.
        scaler: The loop's GradScaler; a gradient that is not finite is dropped and counted.
        scheduler: Of the learning rate, over `optimizer`; the servers step it, as the number of samples says. Stepping
            it in the loop as well has no effect.
        scheduler_samples: Samples between two of its steps; by default those of one update of all workers, which is
            what stepping it after every `optimizer.step()` comes to.
        wire_dtype: What gradients and parameters travel in; state is always kept in 32 bits (64 for float64 models).
        bucket_mb: A gradient leaves in pieces of about this size, MB, > 0.
        lr_rule: How the learning rate follows the batch of an update: "linear", "sqrt", "adascale" or "none". Default:
            linear for SGD, square root for everything else.
        max_staleness: Bound that "auto" gives to asynchronous modes, updates of all workers, >= 0.
        run_dir: Where the first server puts log and report; `paceline_runs/<time>` by default.
        snapshot_dir: A directory that all servers share. If it holds a snapshot, training goes on from the newest.
        snapshot_every: Updates between two snapshots, >= 1: what a lost server costs at most.
        tree: Whether, under BSP, workers sum for each other where a server's port is the bottleneck; results then
            differ by float rounding from one run to the next. By default with "auto" only.
        peer_timeout_s: Silence after which a worker has left and a server has failed, seconds, > 0. With all workers
            gone servers wait five times as long for one to come back.

    Returns:
        The object to take batches from and to close. Closing a worker waits for the others and brings the final
        parameters.

    Raises:
        ConfigError: what was asked for cannot be; the message says what to change.

    Source:
        STAR (arXiv 2512.09685), parameter-server architecture; ours differs as described in docs/servers.md.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> pace = parameter_server(net, torch.optim.SGD(net.parameters(), lr=0.1))  # one process: a no-op
        >>> [x.shape[0] for x, in pace.data(torch.utils.data.TensorDataset(torch.ones(5, 2)), batch_size=2)]
        [2, 2, 1]
    """
    module = unwrap(module)
    check_request(module, optimizer, "auto", lr_rule, scaler)
    _check_numbers(num_servers, bucket_mb, max_staleness, snapshot_every, peer_timeout_s, wire_dtype)
    found = _rendezvous()
    if found is None or found[2] == 1:
        logger.info("one process only: paceline does nothing (start with torchrun or paceline run to use it)")
        return Pace()
    store, rank, world_size = found
    if num_servers >= world_size:
        raise ConfigError(f"num_servers must leave a worker among {world_size} ranks, got {num_servers}")
    num_workers = world_size - num_servers
    policy = _policy_of(mode, num_workers)
    global _num_served
    _num_served += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"paceline/ps{_num_served}/{restart}", store)
    dtype = torch.bfloat16 if wire_dtype == "bfloat16" else None
    params = [p for p in module.parameters() if p.requires_grad]
    splits = type(optimizer).__name__ in ELEMENTWISE
    shards = Shards(params, num_servers, int(bucket_mb * 2**20), splits)
    hosts = _meet(store, rank, num_workers, num_servers, {"mode": str(policy or mode), "wire_dtype": wire_dtype,
        "bucket_mb": bucket_mb, "shapes": [list(shape) for shape in shards.shapes]})  # fmt: skip
    peers = Peers(rank, hosts, limit_s=peer_timeout_s, silence_s=peer_timeout_s)
    place = Place(rank, num_workers, num_servers, store, peers, peer_timeout_s)
    if rank < num_workers:
        return WorkerPace(place, module, optimizer, scaler, shards, dtype or shards.dtype)
    if lr_rule is None:
        lr_rule = "linear" if isinstance(optimizer, torch.optim.SGD) else "sqrt"
    return ServerPace(
        place, module, optimizer, policy, shards, dtype or shards.dtype, lr_rule, max_staleness, scheduler,
        scheduler_samples, run_dir, snapshot_dir, snapshot_every, policy is None if tree is None else tree, hosts,
    )  # fmt: skip


class ServerPace(Pace):
    """`Pace` of a server: its loop has no batches, and serves instead."""

    def __init__(
        self,
        place: Place,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: SyncPolicy[Any] | None,
        shards: Shards,
        wire_dtype: torch.dtype,
        lr_rule: LrRule,
        max_staleness: int,
        scheduler: Any,
        scheduler_samples: int | None,
        run_dir: str | Path | None,
        snapshot_dir: str | Path | None,
        snapshot_every: int,
        tree: bool,
        hosts: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._place = place
        self._module = module
        self._optimizer = optimizer
        self._policy = policy
        self._shards = shards
        self._wire_dtype = wire_dtype
        self._lr_rule: LrRule = lr_rule
        known = optimizer.defaults
        self._momentum = float(known.get("momentum", known.get("betas", (0.0,))[0]))
        self._max_staleness = max_staleness
        self._scheduler = scheduler
        self._scheduler_samples = scheduler_samples
        self._snapshots = Snapshots(snapshot_dir) if snapshot_dir is not None else None
        self._snapshot_every = snapshot_every if snapshot_dir is not None else None
        num_bytes = shards.num_elements * wire_dtype.itemsize
        self._gardener = Gardener(num_bytes, place.num_servers) if tree else None
        self._hosts = hosts
        self._server: Server | None = None
        self._has_served = False
        if place.server == 0:
            default = Path("paceline_runs") / time.strftime("%Y%m%d-%H%M%S")
            self.run_dir = Path(run_dir if run_dir is not None else default).absolute()

    # ---- a LeaseSource that serves -----------------------------------------------------------------------------------

    def _world_size(self) -> int:
        return self._place.num_workers

    def _begin_leases(self, ledger: Ledger) -> None:
        if self._ledger is not None:
            raise ConfigError("pace.data(...) was already called; lease one data set per served model")
        self._ledger = ledger
        try:
            self._server = self._build(ledger)
        except Exception as error:  # workers wait for this server
            place = self._place
            tell_failure(place.store, place.rank, f"it could not begin ({error})")
            raise
        if self._place.server == 0:
            self._place.store.set("data", json.dumps([ledger.num_samples, ledger.batch_size]))

    def begin_epoch(self) -> None:
        """The loop begins: serve until the last worker has left. Later epochs are over at once."""
        if self._has_served:
            return
        self._has_served = True
        assert self._server is not None
        try:
            self._server.serve()
        finally:
            self._report()

    def next_lease(self) -> Lease | None:
        """A server trains no samples itself."""
        return None

    def _build(self, ledger: Ledger) -> Server:
        place, params = self._place, [p for p in self._module.parameters() if p.requires_grad]
        samples = self._scheduler_samples or ledger.batch_size * place.num_workers
        keeper = Keeper(self._shards, place.server, params, self._optimizer, self._scheduler, samples, self._wire_dtype)
        chief, adviser, version = None, None, self._agreed_version()
        plans: list[Any] = []  # the server comes to be after the adviser, which speaks to it
        if place.server == 0:
            adviser = self._adviser(ledger, lambda plan: plans[0](plan))
            state = self._snapshots.load_chief(version) if self._snapshots and version is not None else None
            chief = Chief(
                place.num_workers, place.num_servers, self._policy or BSP(), _resumed(ledger, state), self._lr_rule,
                adviser.observe, version or 0, self._snapshot_every,
            )  # fmt: skip
        server = Server(
            place, self._shards, keeper, Buffers(list(self._module.buffers())), self._wire_dtype, chief, adviser,
            self._snapshots, 5 * place.silence_s, self._gardener,
        )  # fmt: skip
        plans.append(server.plan)
        if version is not None:
            server.resume(version)
            if adviser:
                adviser.event(f"training goes on from the snapshot of version {version}")
        return server

    def _agreed_version(self) -> int | None:
        """The snapshot to go on from: the newest that the chief finds."""
        store = self._place.store
        if self._place.server == 0:
            newest = self._snapshots.newest() if self._snapshots else None
            store.set("resume", json.dumps(newest))
        version: int | None = json.loads(wait_for(store, "resume", self._place.peers))
        if version is not None and self._snapshots is None:
            raise ConfigError("the chief server goes on from a snapshot: give all servers the same snapshot_dir")
        return version

    def _adviser(self, ledger: Ledger, on_plan: Any) -> Adviser:
        assert self.run_dir is not None
        log = RunLog(self.run_dir)
        workers = self._hosts[: self._place.num_workers]
        log.write(
            "run",
            schema=SCHEMA_VERSION,
            world_size=len(workers),
            hosts=list(workers),
            mode="auto" if self._policy is None else "suggest",
            arch="ps",
            num_servers=self._place.num_servers,
            lr_rule=self._lr_rule,
            max_staleness=self._max_staleness,
            momentum=self._momentum,
            backend="gloo",
            torch=torch.__version__,
            script=Path(sys.argv[0]).name,
            started_at_s=round(time.time(), 3),
            peer_timeout_s=self._place.silence_s,
        )
        log.write("leases", time_s=0.0, batch_size=ledger.batch_size)
        log.flush()
        controller = live_controller(
            tuple(workers), self._lr_rule, self._max_staleness, "ps", ledger.batch_size, self._momentum
        )
        adviser = Adviser(controller, log, self._policy is None, on_plan)
        if self._policy is not None and self._policy != BSP():
            adviser.observe(Adopted(Plan(0, 1, self._policy, 1.0, 1.0, "the mode that the user asked for")))
        return adviser

    def _report(self) -> None:
        if self.run_dir is not None:
            try:
                logger.info("%s\nreport: %s", text(write_reports(self.run_dir)), self.run_dir / "report.html")
            except Exception:
                logger.exception("the report could not be written; the log is in %s", self.run_dir)


def _resumed(ledger: Ledger, state: dict[str, Any] | None) -> Ledger:
    """The ledger as it was, with what was leased then free again."""
    if state is None:
        return ledger
    told = dict(state["ledger"])
    leases = {int(rank): Lease(lease["epoch"], tuple(lease["positions"])) for rank, lease in told.pop("leases").items()}
    if (told["num_samples"], told["batch_size"]) != (ledger.num_samples, ledger.batch_size):
        raise ConfigError(
            f"the snapshot was made with {told['num_samples']} samples in batches of {told['batch_size']}, "
            f"this run has {ledger.num_samples} in batches of {ledger.batch_size}"
        )
    told["free"] = tuple((start, stop) for start, stop in told["free"])
    resumed = Ledger(**told, leases=leases)
    for rank in sorted(leases):
        resumed = resumed.reclaim(rank)
    return resumed


def _check_numbers(
    num_servers: int,
    bucket_mb: float,
    max_staleness: int,
    snapshot_every: int,
    peer_timeout_s: float,
    wire_dtype: str,
) -> None:
    for name, value, least in (
        ("num_servers", num_servers, 1),
        ("max_staleness", max_staleness, 0),
        ("snapshot_every", snapshot_every, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}")
    for name, seconds in (("bucket_mb", bucket_mb), ("peer_timeout_s", peer_timeout_s)):
        if not seconds > 0:
            raise ConfigError(f"{name} must be > 0, got {seconds}")
    if wire_dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"wire_dtype must be float32 or bfloat16, got {wire_dtype!r}")


def _policy_of(mode: str | SyncPolicy[Any], num_workers: int) -> SyncPolicy[Any] | None:
    """The fixed policy; None for "auto"."""
    if mode == "auto":
        return None
    try:
        policy = catalog.parse(mode, num_workers) if isinstance(mode, str) else mode
    except ValueError as error:
        raise ConfigError(f'mode must be "auto", a policy or the name of one: {error}') from None
    if policy.wants_scores or policy.work != Work() or hasattr(policy, "parent_of"):
        raise ConfigError(
            f"{policy} cannot be carried out by live parameter servers; see docs/servers.md for those that can"
        )
    return policy


def _rendezvous() -> tuple[dist.Store, int, int] | None:
    """The job's store, this rank and the number of ranks; None where there is one process only."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    store, rank, world_size = next(dist.rendezvous("env://"))
    return store, rank, world_size


def _meet(
    store: dist.Store, rank: int, num_workers: int, num_servers: int, settings: dict[str, Any]
) -> tuple[str, ...]:
    """Agree on the settings (the chief's), and learn the hosts: a server all, a worker the servers'."""
    store.set(f"hello/{rank}", socket.gethostname())
    mine = {"num_servers": num_servers, **settings}
    if rank == num_workers:
        store.set("settings", json.dumps(mine))
    chiefs = json.loads(store.get("settings"))
    differing = [name for name, value in json.loads(json.dumps(mine)).items() if chiefs.get(name) != value]
    if differing:
        raise ConfigError(
            f"all ranks must ask for the same: rank {rank} has other values of {', '.join(differing)} than rank "
            f"{num_workers}, the first server"
        )
    return tuple(
        store.get(f"hello/{other}").decode() if rank >= num_workers or other >= num_workers or other == rank else "?"
        for other in range(num_workers + num_servers)
    )
