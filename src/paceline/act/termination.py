"""SIGTERM: turns a launcher's request to end into a written report before the end.

torchrun ends all workers as soon as one fails. The training thread may be blocked inside the backend then, where no
Python handler runs, so a thread reads the signal from a pipe (`signal.set_wakeup_fd`) and ends the process itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_EXIT_CODE = 128 + signal.SIGTERM


class TerminationWatcher:
    """Calls `before_end` and then ends the process when SIGTERM comes; leaves a handler of the user's alone.

    Args:
        before_end: Writes what must be written; runs on the watcher's thread.
    """

    def __init__(self, before_end: Callable[[], None]) -> None:
        self._active = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if not self._active:
            return
        self._before_end = before_end
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._writer = writer
        self._old_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _ignore)
        threading.Thread(target=self._run, name="paceline-sigterm", daemon=True).start()

    def close(self) -> None:
        """Give the signal back."""
        if self._active and threading.current_thread() is threading.main_thread():
            self._active = False
            signal.set_wakeup_fd(self._old_wakeup)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._writer)  # ends the thread

    def _run(self) -> None:
        while received := os.read(self._reader, 64):
            if signal.SIGTERM in received:
                try:
                    self._before_end()
                finally:
                    os._exit(_EXIT_CODE)
        os.close(self._reader)


def _ignore(_number: int, _frame: object) -> None:
    """The pipe has told the watcher already; a Python handler is needed for the pipe to be written at all."""
