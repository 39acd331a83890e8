"""Many runs at once: turns a function and its inputs into results as they come, one process per core."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from paceline.errors import PacelineError

T = TypeVar("T")
R = TypeVar("R")


def each_done(function: Callable[[T], R], inputs: Sequence[T], processes: int | None = None) -> Iterator[R]:
    """Call the function on every input, and yield the results as they come.

    Args:
        function: Can be pickled, as can its inputs and results; runs in forked processes.
        inputs: What to call it with.
        processes: How many at a time; None for one per core that this process may use. With 1 nothing is forked.

    Yields:
        Results, in no order.

    Raises:
        PacelineError: a process died without a word.
        Exception: whatever the function raises.

    Example:
        >>> sorted(each_done(abs, [-1, 2, -3], processes=1))
        [1, 2, 3]
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(inputs))
    if processes <= 1:
        yield from map(function, inputs)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_begin)
    try:
        for future in as_completed([pool.submit(function, value) for value in inputs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise PacelineError(
            "a process died without a word, most likely because the system ran out of memory; close something, or "
            "run fewer at a time"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """One core per process: numpy's own threads would get in each other's way. The parent alone hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ModuleNotFoundError):  # comes with scikit-learn
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)
