"""Who gets how much of a host's CPU: turns work that shares cores into finish times. Pure.

As long as the demands on a host add up to no more than its cores, everybody runs at full speed. Beyond that all run
slower in proportion: speed = cores / demand.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Any

from paceline.sim.engine import Call, Engine


class Cores:
    """The CPU of one host in virtual time.

    All work on it slows down alike, so a single clock tells how far everybody is: it runs at the common speed, and
    a piece of work is done when that clock has advanced by as much as the work takes undisturbed. A change of demand
    costs one event, however much work there is.

    Args:
        engine: The virtual time.
        num_cores: How many, > 0; `inf` for a host that nobody can overload.
        most_demand: The highest demand that can ever come together, cores. Where the cores suffice for it, work is
            scheduled without any accounts.

    Raises:
        ValueError: no cores.

    Source:
        Processor sharing by virtual time, as in fair queueing (Parekh and Gallager 1993).

    Example:
        >>> engine, ended = Engine(), []
        >>> cores = Cores(engine, num_cores=1.0)
        >>> _ = cores.run(1.0, 1.0, lambda who: ended.append((who, engine.now_s)), "a")
        >>> _ = cores.run(2.0, 1.0, lambda who: ended.append((who, engine.now_s)), "b")
        >>> engine.run(); ended  # shared until a has had its second of work, then b has the core to itself
        [('a', 2.0), ('b', 3.0)]
    """

    def __init__(self, engine: Engine, num_cores: float, most_demand: float = inf) -> None:
        if not num_cores > 0:
            raise ValueError(f"a host needs cores, got {num_cores}")
        self._engine = engine
        self._num_cores = num_cores
        self.is_shared = num_cores < most_demand
        self._demand = 0.0
        self._clock_s = 0.0  # how far work has come that has run all the time
        self._updated_s = 0.0
        self._queue: list[tuple[float, int]] = []
        self._work: dict[int, tuple[float, Call, Any]] = {}  # by number: demand, what happens at its end
        self._number = 0
        self._event = 0

    @property
    def speed(self) -> float:
        """Share of full speed at which work runs now, 0..1."""
        return 1.0 if self._demand <= self._num_cores else self._num_cores / self._demand

    def run(self, work_s: float, demand: float, done: Call, argument: Any = None) -> int:
        """Begin a piece of work.

        Args:
            work_s: How long it takes undisturbed, seconds, >= 0.
            demand: Cores it keeps busy, >= 0.
            done: `done(argument)` happens at its end.
            argument: See there.

        Returns:
            A number for `cancel`.
        """
        if not self.is_shared:
            return self._engine.schedule(self._engine.now_s + work_s, done, argument)
        self._advance()
        self._number += 1
        self._work[self._number] = (demand, done, argument)
        heappush(self._queue, (self._clock_s + work_s, self._number))
        self._demand += demand
        self._watch()
        return self._number

    def cancel(self, number: int) -> None:
        """Give a piece of work up; harmless when it has ended."""
        if not self.is_shared:
            self._engine.cancel(number)
        elif number in self._work:
            self._advance()
            self._demand -= self._work.pop(number)[0]
            self._watch()

    def load(self, cores: float) -> None:
        """Change the demand of what else runs here by so many cores, up or down."""
        if self.is_shared:
            self._advance()
            self._demand += cores
            self._watch()

    def _advance(self) -> None:
        now_s = self._engine.now_s
        self._clock_s += (now_s - self._updated_s) * self.speed
        self._updated_s = now_s

    def _watch(self) -> None:
        """Wait for the end of what ends first."""
        self._engine.cancel(self._event)
        while self._queue and self._queue[0][1] not in self._work:
            heappop(self._queue)
        if self._queue:
            left_s = max(0.0, self._queue[0][0] - self._clock_s)
            self._event = self._engine.schedule(self._engine.now_s + left_s / self.speed, self._end)

    def _end(self, _: None) -> None:
        now_s = self._engine.now_s
        self._clock_s = max(self._clock_s, self._queue[0][0])  # exactly there, whatever rounding says
        self._updated_s = now_s
        ended = []
        while self._queue and self._queue[0][0] <= self._clock_s:
            work = self._work.pop(heappop(self._queue)[1], None)
            if work is not None:
                self._demand -= work[0]
                ended.append(work)
        if not self._work and abs(self._demand) < 1e-9:
            self._demand = 0.0  # nothing of rounding is left behind
        self._watch()
        for work in ended:
            work[1](work[2])
