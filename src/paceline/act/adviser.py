"""The adviser: turns what the chief tells it into log lines, verdicts and plans, on a thread of its own.

Judging modes takes milliseconds, and a server must not stand still for that. What the log holds is what the controller
was told, in its order: a replay decides the same.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from paceline.decide.controller import Controller
from paceline.decide.plan import Adopted, Gain, Observation, Plan, Rejected
from paceline.predict.noise import NoiseEstimator
from paceline.record import RunLog, decode, encode
from paceline.types import NormSample, Verdict

logger = logging.getLogger("paceline")
_Told = Observation | tuple[NormSample, ...]


class Adviser:
    """Feeds the controller and writes the run log.

    Args:
        controller: Decides.
        log: The run log; the header is in it.
        acts: Whether plans are carried out; else they are not even made known.
        on_plan: Told of every plan, on the adviser's thread.
    """

    def __init__(self, controller: Controller, log: RunLog, acts: bool, on_plan: Callable[[Plan], None]) -> None:
        self.log = log
        self.noise: float | None = None
        self._controller = controller
        self._state = controller.init()
        self._acts = acts
        self._on_plan = on_plan
        self._estimator = NoiseEstimator()
        self._start = time.monotonic()
        self._told: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="paceline-adviser", daemon=True)
        self._thread.start()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def observe(self, seen: Observation) -> None:
        """Tell it what happened; returns at once."""
        self._told.put(seen)

    def take_norms(self, samples: Sequence[NormSample]) -> None:
        """Tell it the gradient norms of one update's contributors."""
        self._told.put(tuple(samples))

    def event(self, message: str) -> None:
        """Log something worth reading."""
        self.log.write("event", time_s=round(self.now_s, 4), message=message)
        logger.info("%s", message)

    def close(self, **end: Any) -> None:
        """Work off what was told, and write the log's last line."""
        self._told.put(None)
        self._thread.join(timeout=10.0)
        self.log.write(
            "end", time_s=round(self.now_s, 4), noise_scale=self.noise, observed_to_the_end=not self._is_broken, **end
        )
        self.log.close()

    def fail(self, rank: int, host: str, reason: str) -> None:
        """Write the last line of a run that lost a server, or all workers."""
        self._told.put(None)
        self._thread.join(timeout=10.0)
        self.log.write("failure", time_s=round(self.now_s, 4), rank=rank, host=host, reason=reason)
        self.log.close()

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            try:
                if isinstance(told, tuple):
                    self._take_norms(told)
                else:
                    self._take(told)
            except Exception:  # measuring and deciding must never be what ends a training
                logger.exception("paceline stops observing after an error of its own; the training goes on")
                self._is_broken = True
                while self._told.get() is not None:
                    pass
                return

    def _take_norms(self, samples: tuple[NormSample, ...]) -> None:
        for sample in samples:
            self.log.write_value(sample, time_s=round(self.now_s, 4))
        self._estimator = self._estimator.observe(list(samples))
        if self._estimator.num_samples:
            estimate = self._estimator.estimate()
            if math.isfinite(estimate.value):
                self.noise = estimate.value
                self._take(estimate)

    def _take(self, seen: Observation) -> None:
        match seen:
            case Adopted(plan):
                self._write_plan(plan, "adopted")
                logger.info("plan %d: %s", plan.epoch, plan.reason)
            case Rejected(plan):
                self._write_plan(plan, "rejected")
            case _:
                self.log.write_value(seen, time_s=round(self.now_s, 4))
                seen = decode(encode(seen))  # rounded as in the log: a replay must be told the same
        self._state, decisions = self._controller.step(self._state, seen)
        for decision in decisions:
            match decision:
                case Verdict():
                    self.log.write_value(decision, time_s=round(self.now_s, 4))
                    logger.warning("%s:%d is slow (%.1fx): %s; %s", decision.host, decision.rank, decision.slowdown,
                                   decision.cause, decision.evidence)  # fmt: skip
                case Plan():
                    self._write_plan(decision, "proposed" if self._acts else "advised")
                    if self._acts:
                        self._on_plan(decision)
                case Gain():
                    self.log.write("gain", time_s=round(self.now_s, 4), **asdict(decision))

    def _write_plan(self, plan: Plan, status: str) -> None:
        self.log.write("plan", time_s=round(self.now_s, 4), status=status, **plan.to_json())
