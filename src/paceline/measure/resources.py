"""CPU evidence: turns the kernel's accounts of the calling thread into numbers a verdict can rest on."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """CPU use of one thread since it started: seconds on a core, and seconds ready to run without one."""

    cpu_s: float
    runqueue_s: float


def thread_usage() -> ThreadUsage | None:
    """Read the calling thread's CPU account.

    Returns:
        The account so far, or None where the kernel does not keep one (`/proc/thread-self/schedstat`, Linux).

    Example:
        >>> usage = thread_usage()
        >>> usage is None or usage.cpu_s > 0
        True
    """
    try:
        _on_core, waiting, _slices = os.pread(_account_fd(), 128, 0).split()
    except OSError:
        return None
    return ThreadUsage(cpu_s=time.thread_time(), runqueue_s=int(waiting) * 1e-9)


_open = threading.local()


def _account_fd() -> int:
    """The calling thread's account, opened once: a quarter of the cost of opening it every step."""
    owner = os.getpid()  # after a fork the file would still be the parent's thread
    if getattr(_open, "owner", None) != owner:
        _open.fd, _open.owner = os.open("/proc/thread-self/schedstat", os.O_RDONLY), owner
    return int(_open.fd)
