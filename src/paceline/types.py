"""The vocabulary: the frozen values that travel from measuring to deciding to acting to explaining.

Everything here is plain data: it pickles, compares by value and turns into JSON by field name (see `record.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Rank = int  # a global rank, as in torch.distributed


class Phase(StrEnum):
    """What a rank is doing. The first six are its own work; `WAIT` is inherited, `EXPECTED` was announced.

    Example:
        >>> Phase("data") is Phase.DATA
        True
    """

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    GC = "gc"
    OTHER = "other"
    WAIT = "wait"
    EXPECTED = "expected"


OWN_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.GC, Phase.OTHER)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How one rank spent one step: durations in seconds, all from this rank's own monotonic clock.

    The phases add up to the step: `wall_s == own_s + wait_s + expected_s`. A step runs from one optimizer step to
    the next (from one gradient exchange to the next where the optimizer skips, as GradScaler makes it do).

    Args:
        rank: Who.
        step: Number of the gradient exchange that this step ended with, from 1. An attached rank's is one more than
            the version its parameters had: the ring's step that it ran beside at first.
        started_s: When the step began, seconds since this rank attached. Never compare between hosts.
        data_s, forward_s, backward_s, optimizer_s, gc_s, other_s: Own work, seconds, >= 0.
        wait_s: Waiting for other ranks (gradient reduction, buffer broadcast at forward entry), seconds, >= 0.
        expected_s: Inside `paceline.expected_slow(...)`, seconds, >= 0.
        samples: Samples this rank trained in the step, >= 0; 0 when unknown.
        cpu_s: CPU time of the training thread, seconds; None where the system does not tell.
        runqueue_s: Time the training thread was ready to run but had no core, seconds; None where unknown.

    Example:
        >>> t = StepTiming(rank=0, step=3, started_s=1.0, data_s=0.01, backward_s=0.04, wait_s=0.15)
        >>> round(t.own_s, 3), round(t.wall_s, 3)
        (0.05, 0.2)
    """

    rank: Rank
    step: int
    started_s: float
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    gc_s: float = 0.0
    other_s: float = 0.0
    wait_s: float = 0.0
    expected_s: float = 0.0
    samples: int = 0
    cpu_s: float | None = None
    runqueue_s: float | None = None

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work in the step."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.gc_s + self.other_s

    @property
    def wall_s(self) -> float:
        """Seconds the step took on this rank's clock."""
        return self.own_s + self.wait_s + self.expected_s

    def of(self, phase: Phase) -> float:
        """Seconds spent in one phase."""
        return float(getattr(self, f"{phase.value}_s"))


@dataclass(frozen=True, slots=True)
class NormSample:
    """Squared gradient norms of one step, as one rank saw them: what the noise scale is computed from.

    Args:
        rank: Who measured.
        step: The gradient exchange.
        local_sq: Squared 2-norm of this rank's own mean gradient, >= 0.
        averaged_sq: Squared 2-norm of the averaged gradient, >= 0; the same on every rank in the exchange.
        local_samples: Batch behind the first, samples, > 0.
        averaged_samples: Batch behind the second, samples, > `local_samples`.
    """

    rank: Rank
    step: int
    local_sq: float
    averaged_sq: float
    local_samples: int
    averaged_samples: int


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The gradient noise scale with its uncertainty, in samples (`inf` when the signal drowns in noise).

    Args:
        step: Up to which step it was estimated.
        value: Best estimate, samples, >= 0.
        low: Lower end of a 95 % interval, samples.
        high: Upper end, samples.
        num_samples: How many steps it rests on.
    """

    step: int
    value: float
    low: float
    high: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a rank's own time per step will be: mean and standard deviation, seconds.

    Example:
        >>> Forecast(mean_s=0.05, std_s=0.001, num_samples=8).mean_s
        0.05
    """

    mean_s: float
    std_s: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is slow, where and why, with the evidence.

    Args:
        step: The step at which the evidence was enough.
        rank: The culprit.
        host: Its host name.
        phase: Where the time goes.
        cause: One of `attribution.CAUSES`.
        slowdown: Own time over the median of the other ranks, ratio, > 1.
        excess_s: Own time above that median, seconds per step.
        lost_ratio: Share of the job's time that waiting for this rank costs, 0..1.
        since_step: First step of the episode, as far as the window shows.
        evidence: One sentence with the numbers.
    """

    step: int
    rank: Rank
    host: str
    phase: str
    cause: str
    slowdown: float
    excess_s: float
    lost_ratio: float
    since_step: int
    evidence: str


@dataclass(frozen=True, slots=True)
class Update:
    """One applied update while ranks are attached: whose gradients are in it.

    Args:
        version: Number of the update, from 1.
        contributions: Samples by rank whose gradient is in the update.
        dropped: Samples by rank whose gradient was refused, as too stale or not finite.
        staleness: By attached rank in either of them: versions between its parameters and this update.
        lr_scale: Factor on the learning rate for this update.
        at_s: When, on the clock of whoever tells, seconds; only differences mean anything. 0 where nobody knows.
    """

    version: int
    contributions: dict[Rank, int]
    dropped: dict[Rank, int]
    staleness: dict[Rank, int]
    lr_scale: float
    at_s: float = 0.0


class FaultKind(StrEnum):
    """What to plant. The first five are slowness (their phase), the last three are failures."""

    COMPUTE = "compute"
    DATA = "data"
    GC = "gc"
    OUTSIDE = "outside"
    FORWARD = "forward"
    KILL = "kill"
    STOP = "stop"
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: rank `rank` gets `kind` in steps `from_step <= step < until_step`.

    Args:
        rank: Whom it hits.
        kind: What happens.
        seconds: Extra seconds per step (slowness only), >= 0.
        from_step: First local step, counted from 0.
        until_step: First local step without it; None for until the end.

    Raises:
        ValueError: a negative time or an empty range of steps.

    Example:
        >>> Fault(rank=2, kind=FaultKind.DATA, seconds=0.2, from_step=5).active(4)
        False
    """

    rank: Rank
    kind: FaultKind
    seconds: float = 0.0
    from_step: int = 0
    until_step: int | None = None

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"a fault's seconds must be >= 0, got {self.seconds}")
        if self.until_step is not None and self.until_step <= self.from_step:
            raise ValueError(f"a fault must end after it begins, got steps {self.from_step}..{self.until_step}")

    def active(self, step: int) -> bool:
        """Whether the fault acts in this local step."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of a run: drives live tests and the simulator alike.

    Example:
        >>> plan = FaultPlan((Fault(rank=1, kind=FaultKind.COMPUTE, seconds=0.2),))
        >>> [f.kind.value for f in plan.at(rank=1, step=7)], plan.at(rank=0, step=7)
        (['compute'], ())
    """

    faults: tuple[Fault, ...] = field(default=())

    def at(self, rank: Rank, step: int) -> tuple[Fault, ...]:
        """The faults that hit `rank` in local step `step`."""
        return tuple(f for f in self.faults if f.rank == rank and f.active(step))
