"""CPU evidence: turns the kernel's accounts of the calling thread into numbers a verdict can rest on."""

from __future__ import annotations

import os
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
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
    try:
        _on_core, waiting, _slices = os.read(fd, 128).split()
    finally:
        os.close(fd)
    return ThreadUsage(cpu_s=time.thread_time(), runqueue_s=int(waiting) * 1e-9)
