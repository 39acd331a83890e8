"""The shaped-network lab: turns root on one Linux machine into N ports of a given rate, one network namespace each.

Every rank lives in a namespace of its own, joined to the others by a bridge. A token bucket shapes what it sends
(inside its namespace) and another what it receives (on the bridge's side), so that each port is full duplex at the
rate asked for, as on a switch. Loopback is limited by the CPU and says nothing about an algorithm; this does, up to
8 ranks at 400 Mbit/s on two cores.

Processes enter by `setns` right after a fork, which costs nothing: give `Lab.enter` to `run_local`. Run as a script,
it measures what its ports carry:

    python bench/netlab.py --ranks 4 --rate-mbit 400
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer

from paceline.act.local import run_local

INTERFACE, BRIDGE = "eth0", "br0"
_PREFIX = "pl-lab-"  # then the owner's process id, then the rank or "sw" for the switch
_NETNS_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_PORT = 29_600


class LabUnavailableError(RuntimeError):
    """This machine cannot hold the lab; the message says what is missing."""


class Lab:
    """N namespaces on one switch. Use it as a context manager: it removes everything again, also after an error.

    Args:
        num_ranks: How many ports, 1..200.
        rate_mbit: Rate of every port in each direction, Mbit/s (10^6), >= 1. TCP carries 95 % of it as payload.

    Raises:
        LabUnavailableError: on entering, when tools or permissions are missing.
    """

    def __init__(self, num_ranks: int, rate_mbit: float) -> None:
        if not 1 <= num_ranks <= 200 or rate_mbit < 1:
            raise ValueError(f"1..200 ranks at >= 1 Mbit/s can be built, got {num_ranks} at {rate_mbit}")
        self.num_ranks = num_ranks
        self.rate_mbit = rate_mbit
        self._files = tempfile.TemporaryDirectory(prefix="paceline-lab-")
        self._undo = contextlib.ExitStack()
        self._num_stores = 0

    def __enter__(self) -> Lab:
        check_available()
        remove_leftovers()
        with contextlib.ExitStack() as undo:  # what was built is removed when building the rest fails
            undo.enter_context(_termination_raises())
            undo.callback(self._files.cleanup)
            undo.callback(_remove, f"{_PREFIX}{os.getpid()}-")
            self._build()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def namespace(self, rank: int | str) -> str:
        """Name of a rank's namespace (`sw`: the switch), for `ip netns exec`."""
        return f"{_PREFIX}{os.getpid()}-{rank}"

    def address(self, rank: int) -> str:
        """Address of a rank's port."""
        return f"10.77.0.{rank + 1}"

    def set_rate(self, rank: int, rate_mbit: float) -> None:
        """Change the rate of one port, both ways; acts on live connections within milliseconds."""
        bucket = f"tbf rate {rate_mbit:g}mbit burst {_burst_bytes(rate_mbit)} latency 50ms".split()
        _run("tc", "-n", self.namespace(rank), "qdisc", "replace", "dev", INTERFACE, "root", *bucket)
        _run("tc", "-n", self.namespace("sw"), "qdisc", "replace", "dev", f"v{rank}", "root", *bucket)

    def entrance(self) -> Callable[[int], dist.Store]:
        """Return what a forked child of this process calls first: it moves into its namespace and opens a new store.

        The store is a file, since namespaces share files but not the parent's sockets.
        """
        self._num_stores += 1
        directory, num_ranks = Path(self._files.name), self.num_ranks
        names = [self.namespace(rank) for rank in range(num_ranks)]  # the child's process id is another
        path = str(directory / f"store{self._num_stores}")

        def enter(rank: int) -> dist.Store:
            _set_namespace(names[rank])
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            store = dist.FileStore(path, num_ranks)
            store.set_timeout(timedelta(seconds=60))
            return store

        return enter

    def _build(self) -> None:
        switch = self.namespace("sw")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
        for rank in range(self.num_ranks):
            own = self.namespace(rank)
            _run("ip", "netns", "add", own)
            veth = f"link add {INTERFACE} type veth peer name v{rank} netns {switch}"
            _run("ip", "-n", own, *veth.split())
            _run("ip", "-n", own, "addr", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _run("ip", "-n", switch, "link", "set", f"v{rank}", "master", BRIDGE, "up")
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", own, "link", "set", interface, "up")
            _run("ip", "netns", "exec", own, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion_control()}")
            self.set_rate(rank, self.rate_mbit)


def check_available() -> None:
    """Check that this machine can hold the lab.

    Raises:
        LabUnavailableError: a tool or a permission is missing; the message says which.
    """
    if not hasattr(os, "fork") or not Path("/proc/self/ns/net").exists():
        raise LabUnavailableError("the lab needs Linux network namespaces")
    missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        raise LabUnavailableError(f"the lab needs {', '.join(missing)}; install iproute2 and procps")
    if os.geteuid() != 0:
        raise LabUnavailableError("the lab needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) to make network namespaces")
    probe = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, *f"link add {INTERFACE} type veth peer name v0".split())
        _run("tc", "-n", probe, *f"qdisc add dev {INTERFACE} root tbf rate 1mbit burst 131072 latency 50ms".split())
        _run("ip", "-n", probe, "link", "add", BRIDGE, "type", "bridge")
    finally:
        _remove(probe)


def congestion_control() -> str:
    """What TCP uses in the lab: bbr, a common default, wobbles behind a token bucket; cubic and reno do not.

    A namespace may choose among those that the host allows to everybody; reno always is.
    """
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def remove_leftovers() -> None:
    """Remove the namespaces of labs whose process is gone (killed, say)."""
    for path in _NETNS_DIR.glob(f"{_PREFIX}*-*"):
        owner = path.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(path.name)


def skip_or(main: Callable[[], None]) -> None:
    """Run `main`; where the lab is impossible, say why and leave with exit code 0."""
    try:
        main()
    except LabUnavailableError as error:
        print(f"skipped: {error}")


def _remove(prefix: str) -> None:
    """Delete the namespaces with this prefix; deleting one deletes its interfaces and their peers."""
    for path in _NETNS_DIR.glob(f"{prefix}*"):
        subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack like SIGINT does, so that the lab is removed."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _burst_bytes(rate_mbit: float) -> int:
    """Two segments of 64 KiB, or 2 ms of the rate: smaller buckets cannot keep up with the kernel's batching."""
    return max(131_072, int(rate_mbit * 1e6 / 8 * 0.002))


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabUnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _set_namespace(name: str) -> None:
    """Move the calling thread, and threads it starts later, into a network namespace (`os.setns` needs Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NETNS_DIR / name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter namespace {name}: {os.strerror(number)}")


def _socket_mbit(rank: int, lab: Lab, seconds: float) -> float:
    """Every rank sends to the next over a plain socket, all at once; payload received, Mbit/s."""
    server = socket.create_server((lab.address(rank), _PORT))
    dist.barrier()
    out = socket.create_connection((lab.address((rank + 1) % lab.num_ranks), _PORT))
    back, _ = server.accept()
    block, received = bytes(65_536), 0
    out.setblocking(False)
    back.setblocking(False)
    start = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        with contextlib.suppress(BlockingIOError):
            out.send(block)
        with contextlib.suppress(BlockingIOError):
            received += len(back.recv(262_144))
        time.sleep(0.0005)
    dist.barrier()
    return received * 8e-6 / (now - start)


def _native_ratio(_: int, lab: Lab, num_bytes: int, rounds: int) -> float:
    """Time of Gloo's all-reduce over the port model's 2(n-1)/n · bytes / rate."""
    tensor = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(tensor)
        times.append(time.monotonic() - start)
    n = lab.num_ranks
    return median(times) / (2 * (n - 1) / n * num_bytes * 8 / (lab.rate_mbit * 1e6))


def measure(lab: Lab, num_bytes: int = 16_000_000, rounds: int = 3, seconds: float = 2.0) -> dict[str, Any]:
    """Measure what the lab's ports carry: payload over plain sockets, and Gloo's all-reduce against the port model."""
    goodput = run_local(_socket_mbit, lab.num_ranks, lab, seconds, prepare=lab.entrance())
    ratio = run_local(_native_ratio, lab.num_ranks, lab, num_bytes, rounds, prepare=lab.entrance())
    failed = [outcome.error for outcome in (*goodput, *ratio) if outcome.error]
    if failed:
        raise RuntimeError(failed[0])
    return {
        "ranks": lab.num_ranks,
        "rate_mbit": lab.rate_mbit,
        "congestion_control": congestion_control(),
        "socket_mbit": [round(outcome.value, 1) for outcome in goodput],
        "gloo_over_port_model": round(max(outcome.value for outcome in ratio), 3),
    }


def main(
    ranks: Annotated[int, typer.Option(help="Ports.")] = 4,
    rate_mbit: Annotated[float, typer.Option(help="Rate of every port, Mbit/s.")] = 400.0,
) -> None:
    """Build the lab, measure its ports, remove it."""

    def run() -> None:
        start = time.monotonic()
        with Lab(ranks, rate_mbit) as lab:
            built = time.monotonic() - start
            print(json.dumps({"build_s": round(built, 2), **measure(lab)}, indent=2))

    skip_or(run)


if __name__ == "__main__":
    typer.run(main)
