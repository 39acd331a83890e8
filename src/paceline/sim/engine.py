"""The clock of the virtual world: turns calls scheduled at virtual times into one order of events. Pure.

Two calls at the same time run in the order in which they were scheduled, so the same inputs give the same run, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from paceline.errors import SimulationError

Call = Callable[[Any], None]


class Engine:
    """A heap of (time, sequence number, call, argument), and the virtual time.

    Args:
        max_events: Bound on the calls of a run, > 0; reaching it is an error, never an endless loop.

    Raises:
        ValueError: a bound that is not positive.

    Source:
        SimPy's queue; ours differs in having no processes: an event is a call with one argument.

    Example:
        >>> engine, said = Engine(), []
        >>> late = engine.schedule(2.0, said.append, "late")
        >>> _ = engine.schedule(1.0, said.append, "first")
        >>> _ = engine.schedule(1.0, said.append, "second")
        >>> engine.cancel(late)
        >>> engine.run(); said, engine.now_s, engine.num_events
        (['first', 'second'], 1.0, 2)
    """

    __slots__ = ("_alive", "_heap", "_sequence", "max_events", "now_s", "num_events", "stopped")

    def __init__(self, max_events: int = 100_000_000) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be >= 1, got {max_events}")
        self.max_events = max_events
        self.now_s = 0.0
        self.num_events = 0
        self.stopped = False
        self._sequence = 0
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._alive: set[int] = set()

    def schedule(self, time_s: float, call: Call, argument: Any = None) -> int:
        """Have `call(argument)` happen at a virtual time.

        Args:
            time_s: When, seconds, not before now and not NaN.
            call: What happens.
            argument: Its argument.

        Returns:
            The sequence number, for `cancel`.

        Raises:
            ValueError: a time in the past.
        """
        if not time_s >= self.now_s:
            raise ValueError(f"cannot schedule an event at {time_s} s: it is {self.now_s} s already")
        number = self._sequence = self._sequence + 1
        heappush(self._heap, (time_s, number, call, argument))
        self._alive.add(number)
        return number

    def cancel(self, number: int) -> None:
        """Call an event off; harmless when it has happened or was called off before."""
        self._alive.discard(number)

    def stop(self) -> None:
        """Let `run` return after the present event."""
        self.stopped = True

    def run(self, until_s: float = float("inf")) -> None:
        """Let events happen until none is left, `stop` is called, or the next one lies beyond `until_s`.

        In the last case the time is `until_s` afterwards.

        Raises:
            SimulationError: the bound on events is reached.
        """
        heap, alive = self._heap, self._alive
        while heap and not self.stopped:
            time_s, number, call, argument = heap[0]
            if number not in alive:
                heappop(heap)
                continue
            if time_s > until_s:
                self.now_s = until_s
                return
            if self.num_events >= self.max_events:
                raise SimulationError(
                    f"{self.max_events} events happened by {self.now_s:.6g} virtual seconds and the run has not "
                    "ended; raise max_events, or lower the budget of samples"
                )
            heappop(heap)
            alive.remove(number)
            self.num_events += 1
            self.now_s = time_s
            call(argument)
