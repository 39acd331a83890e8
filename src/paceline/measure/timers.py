"""Own time and wait: turns phase changes of the training thread into one `StepTiming` per step.

The clock holds one current phase; entering another charges the elapsed time to the one that ends. So the phases add
up to the step by construction, and a stamp that never comes (a skipped optimizer step, an uninstrumented loader)
only makes the split coarser, never wrong in sum.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from paceline.measure.resources import ThreadUsage, thread_usage
from paceline.types import Phase, Rank, StepTiming

_NOTHING_SPENT = dict.fromkeys(Phase, 0.0)


class StepClock:
    """Charges time to phases; `close_step` turns what was charged into a `StepTiming`.

    Not thread-safe on purpose: only the training thread calls it. Garbage collection is charged through `gc_pause`,
    which may come from any thread, since a collection stops them all.

    Args:
        rank: The rank this clock belongs to.
        now: A monotonic clock, seconds.
        usage: Returns the CPU use of the calling thread so far.

    Source:
        Stamps before the reduction, at forward entry after buffer sync and at step borders; ours differs from
        section timers in that nothing is left out: unclaimed time is `other`.

    Example:
        >>> t = iter([0.0, 1.0, 3.0, 3.5])
        >>> clock = StepClock(rank=0, now=lambda: next(t), usage=lambda: None)
        >>> clock.enter(Phase.FORWARD); clock.enter(Phase.WAIT)
        >>> timing = clock.close_step(step=1, samples=32)
        >>> timing.other_s, timing.forward_s, timing.wait_s
        (1.0, 2.0, 0.5)
    """

    def __init__(
        self,
        rank: Rank,
        now: Callable[[], float] = time.perf_counter,
        usage: Callable[[], ThreadUsage | None] = thread_usage,
    ) -> None:
        self._rank = rank
        self._now = now
        self._usage = usage
        self._origin = self._last = self._step_start = now()
        self._spent = _NOTHING_SPENT.copy()
        self._gc_pending = 0.0
        self._expected_depth = 0
        self._usage_start = usage()
        self.phase = Phase.OTHER

    def enter(self, phase: Phase) -> None:
        """Charge the time since the last change to the phase that ends, and begin `phase`."""
        if self._expected_depth == 0:
            self._charge()
            self.phase = phase

    def idle_s(self) -> float:
        """Seconds since the last phase change; for a watching thread."""
        return self._now() - self._last

    def waiting_s(self) -> float:
        """Seconds the training thread has been waiting for others without a break; for a watching thread."""
        return self.idle_s() if self.phase is Phase.WAIT else 0.0

    def gc_pause(self, seconds: float) -> None:
        """Charge a garbage collection that just ended to `gc` instead of the phase it interrupted."""
        if self.phase not in (Phase.WAIT, Phase.EXPECTED):  # in a wait it delayed nobody
            self._gc_pending += seconds

    def begin_expected(self) -> None:
        """Begin a stretch that must not count as slowness; stretches nest."""
        self._charge()
        if self._expected_depth == 0:
            self._phase_before = self.phase
            self.phase = Phase.EXPECTED
        self._expected_depth += 1

    def end_expected(self) -> None:
        """End the stretch and go back to the phase before it."""
        self._charge()
        self._expected_depth -= 1
        if self._expected_depth == 0:
            self.phase = self._phase_before

    def close_step(self, step: int, samples: int) -> StepTiming:
        """End the step here and begin the next one.

        Args:
            step: The step's number.
            samples: Samples trained in it.

        Returns:
            The timing of the step that ended.
        """
        self._charge()
        usage, before, spent = self._usage(), self._usage_start, self._spent
        timing = StepTiming(
            rank=self._rank,
            step=step,
            started_s=self._step_start - self._origin,
            data_s=spent[Phase.DATA],
            forward_s=spent[Phase.FORWARD],
            backward_s=spent[Phase.BACKWARD],
            optimizer_s=spent[Phase.OPTIMIZER],
            gc_s=spent[Phase.GC],
            other_s=spent[Phase.OTHER],
            wait_s=spent[Phase.WAIT],
            expected_s=spent[Phase.EXPECTED],
            samples=samples,
            cpu_s=None if usage is None or before is None else usage.cpu_s - before.cpu_s,
            runqueue_s=None if usage is None or before is None else usage.runqueue_s - before.runqueue_s,
        )
        self._reset(usage)
        return timing

    def discard_step(self) -> None:
        """Forget what was charged since the last border: for the stretch before the first step."""
        self._charge()
        self._reset(self._usage())

    def _reset(self, usage: ThreadUsage | None) -> None:
        self._spent = _NOTHING_SPENT.copy()
        self._step_start = self._last
        self._usage_start = usage

    def _charge(self) -> None:
        now = self._now()
        elapsed, self._last = now - self._last, now
        in_gc = min(self._gc_pending, elapsed)
        self._gc_pending = 0.0
        self._spent[Phase.GC] += in_gc
        self._spent[self.phase] += elapsed - in_gc


class GcTimer:
    """Times garbage collections through `gc.callbacks` and reports each pause, in seconds.

    Example:
        >>> pauses = []
        >>> timer = GcTimer(pauses.append)
        >>> _ = gc.collect(); timer.close()
        >>> len(pauses) >= 1
        True
    """

    def __init__(self, report: Callable[[float], None], now: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._now = now
        self._start = now()
        gc.callbacks.append(self._callback)

    def _callback(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._start = self._now()
        else:
            self._report(self._now() - self._start)

    def close(self) -> None:
        """Stop timing; harmless when repeated."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
