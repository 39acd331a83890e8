"""Ranks on this machine: turns a function into forked processes of one process group, and their ends into outcomes.

Forking from a parent that has torch imported starts four ranks in 0.4 s, against 7 s for spawning. The parent must
not have a process group, and sets itself to one thread before the first fork.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
import torch.distributed as dist

Pipes = list[tuple[Connection, Connection]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended.

    Args:
        rank: Who.
        value: What its function returned; None when it failed.
        error: Its traceback, or why there is none; None when it returned.
        error_type: Name of the exception's class, or None.
        seconds: From the start to its end.
        exitcode: Of the process: 0, 1, or minus a signal's number.
    """

    rank: int
    value: Any
    error: str | None
    error_type: str | None
    seconds: float
    exitcode: int | None


def run_local(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    on_tick: Callable[[], None] | None = None,
    on_start: Callable[[list[int]], None] | None = None,
    prepare: Callable[[int], dist.Store] | None = None,
) -> list[Outcome]:
    """Run `function(rank, *args)` on `num_ranks` forked processes of a Gloo process group; block until all have ended.

    Whatever happens, no child outlives the call.

    Args:
        function: What every rank does; need not be picklable, its result must be.
        num_ranks: How many, >= 1.
        *args: Passed on.
        timeout_s: Children still alive then are killed, seconds.
        on_tick: Called about ten times a second meanwhile.
        on_start: Called once with the children's process ids, by rank.
        prepare: Called first in every child with its rank, say to move it into a network namespace; returns the
            store to meet at. None meets at a store on the loopback interface.

    Returns:
        The outcomes, by rank.

    Example:
        >>> [outcome.value for outcome in run_local(lambda rank, x: rank + x, 2, 10)]
        [10, 11]
    """
    import torch._dynamo  # DDP imports it when built: seconds, better spent once here than in every child

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))  # bound before the fork: no race for the port
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    children = [
        context.Process(target=_child, args=(rank, num_ranks, listener, pipes, function, args, prepare))
        for rank in range(num_ranks)
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    start = time.monotonic()
    for child in children:
        child.start()
    listener.close()
    for _, writer in pipes:
        writer.close()
    if on_start is not None:
        on_start([child.pid or 0 for child in children])
    outcomes: list[Outcome | None] = [None] * num_ranks
    try:
        _collect(children, [reader for reader, _ in pipes], outcomes, start, timeout_s, on_tick)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    missing = "killed: it was still running, or stopped, when the others had ended or the time was over"
    return [
        outcome or Outcome(rank, None, missing, None, time.monotonic() - start, children[rank].exitcode)
        for rank, outcome in enumerate(outcomes)
    ]


def _collect(
    children: list[Any],
    readers: list[Connection],
    outcomes: list[Outcome | None],
    start: float,
    timeout_s: float,
    on_tick: Callable[[], None] | None,
) -> None:
    open_readers = {reader: rank for rank, reader in enumerate(readers)}
    results: dict[int, tuple[Any, str | None, str | None]] = {}
    while open_readers and time.monotonic() - start < timeout_s:
        for reader in wait(list(open_readers), timeout=0.1):
            assert isinstance(reader, Connection)
            rank = open_readers.pop(reader)
            try:
                results[rank] = reader.recv()
            except EOFError:
                results[rank] = (None, "the process ended without a word", None)
        for rank in [r for r in results if outcomes[r] is None]:
            children[rank].join(timeout=0.05)
            if not children[rank].is_alive():
                seconds = time.monotonic() - start
                outcomes[rank] = Outcome(rank, *results[rank], seconds, children[rank].exitcode)
        if on_tick is not None:
            on_tick()
        if open_readers and all(_is_stopped(children[rank].pid) for rank in open_readers.values()):
            break  # only stopped processes are left: nothing more will come
    for rank in [r for r in results if outcomes[r] is None]:
        children[rank].join(timeout=max(0.0, timeout_s - (time.monotonic() - start)))
        if not children[rank].is_alive():
            outcomes[rank] = Outcome(rank, *results[rank], time.monotonic() - start, children[rank].exitcode)


def _loopback_store(rank: int, num_ranks: int, listener: socket.socket) -> dist.Store:
    port = listener.getsockname()[1]
    listen_fd = listener.detach() if rank == 0 else None
    if rank != 0:
        listener.close()
    return dist.TCPStore(
        "127.0.0.1", port, num_ranks, is_master=rank == 0, timeout=timedelta(seconds=60), master_listen_fd=listen_fd
    )


def _leave(store: dist.Store, rank: int, num_ranks: int, patience_s: float = 5.0) -> None:
    """The store lives with rank 0, which therefore goes last, but does not wait long for ranks that failed."""
    with contextlib.suppress(RuntimeError):
        store.set(f"left/{rank}", "")
        deadline = time.monotonic() + patience_s
        while rank == 0 and time.monotonic() < deadline:
            if store.check([f"left/{other}" for other in range(num_ranks)]):
                return
            time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _child(
    rank: int,
    num_ranks: int,
    listener: socket.socket,
    pipes: Pipes,
    function: Callable[..., Any],
    args: Any,
    prepare: Callable[[int], dist.Store] | None,
) -> None:
    atexit._clear()  # the parent's exit handlers (temporary directories to delete, say) are not ours to run
    pipe = pipes[rank][1]
    for other, (reader, writer) in enumerate(pipes):  # or nobody would notice when another rank's end closes
        reader.close()
        if other != rank:
            writer.close()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        store = _loopback_store(rank, num_ranks, listener) if prepare is None else prepare(rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        result: tuple[Any, str | None, str | None] = (function(rank, *args), None, None)
        code = 0
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all ranks, and needs no explanation by each
            sys.excepthook(type(error), error, error.__traceback__)
        result = (None, traceback.format_exc(), type(error).__name__)
        code = 1
    pipe.send(result)
    pipe.close()
    if code == 0:
        _leave(store, rank, num_ranks)
    atexit._run_exitfuncs()  # forked children skip them, and users rely on them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
