"""What a simulated run was like: turns its curve into a time to accuracy, and keeps every count. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from paceline.decide.plan import Adopted, Decision, Observation, Rejected
from paceline.types import Rank

_WINDOW = 3  # evaluations in a mean


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of the newest model.

    Args:
        virtual_s: When this version existed, seconds.
        samples: Samples trained by then.
        accuracy: On the test data, 0..1.
    """

    virtual_s: float
    samples: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Decided:
    """Something that the decider said, or what became of one of its plans.

    Args:
        virtual_s: When, seconds.
        version: Updates applied by then.
        what: The decision; `Adopted` and `Rejected` for plans that were carried out, or were not.
    """

    virtual_s: float
    version: int
    what: Decision | Adopted | Rejected


@dataclass(frozen=True, slots=True)
class Seen:
    """Something that the decider was told, with the time, seconds."""

    virtual_s: float
    value: Observation


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated run.

    Samples add up: drawn = trained + dropped + in flight.

    Args:
        virtual_s: When it ended, seconds.
        curve: Evaluations, in order; empty without a learner.
        num_updates: Updates applied.
        num_gradients: Gradients in them.
        samples_drawn: Samples that ranks began to work on.
        samples_trained: Those in updates.
        samples_dropped: Those thrown away: late, refused, cancelled, lost with a rank or at a change of mode.
        samples_in_flight: Those being computed, sent or held when the run ended.
        mean_staleness: Versions between the parameters of a gradient and the update it is in, mean over gradients.
        own_s: By rank, seconds of its own computing.
        wait_s: By rank, seconds of sending, waiting and fetching.
        decisions: What the decider said, in order.
        num_events: Events of the virtual clock.
        seen: What the decider was told, in order; empty unless asked for.
    """

    virtual_s: float
    curve: tuple[Point, ...]
    num_updates: int
    num_gradients: int
    samples_drawn: int
    samples_trained: int
    samples_dropped: int
    samples_in_flight: int
    mean_staleness: float
    own_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    decisions: tuple[Decided, ...]
    num_events: int
    seen: tuple[Seen, ...] = ()

    def time_to_accuracy_s(self, target: float) -> float | None:
        """Return when the model was this good; None if it never was. See `time_to_accuracy_s`."""
        return time_to_accuracy_s(self.curve, target)


def time_to_accuracy_s(curve: tuple[Point, ...] | list[Point], target: float) -> float | None:
    """Return the first time at which the mean of three evaluations reaches a target.

    An evaluation is averaged with the one before and the one after it, so that one lucky evaluation decides nothing
    and the mean lags behind nothing. Between two of these means time is interpolated linearly.

    Args:
        curve: Evaluations, in order of time.
        target: Accuracy, 0..1.

    Returns:
        Virtual seconds; None if no mean reaches the target, or there are fewer than three evaluations.

    Example:
        >>> curve = [Point(float(t), t, a) for t, a in enumerate((0.0, 0.3, 0.6, 0.9, 0.9))]
        >>> round(time_to_accuracy_s(curve, 0.5), 3), time_to_accuracy_s(curve, 0.95)
        (1.667, None)
    """
    before: tuple[float, float] | None = None
    for left, middle, right in zip(curve, curve[1:], curve[2:], strict=False):
        mean = fmean((left.accuracy, middle.accuracy, right.accuracy))
        if mean >= target:
            if before is None or mean <= before[1]:
                return middle.virtual_s
            share = (target - before[1]) / (mean - before[1])
            return before[0] + share * (middle.virtual_s - before[0])
        before = (middle.virtual_s, mean)
    return None


def reached(curve: list[Point], target: float) -> bool:
    """Whether the newest mean of three evaluations reaches the target: ask after every evaluation."""
    return time_to_accuracy_s(curve[-_WINDOW:], target) is not None


@dataclass(slots=True)
class Tally:
    """What is counted while a run is under way.

    Args:
        dropped, stale: By rank since the latest update: samples thrown away, and staleness of gradients where there
            is any.
    """

    curve: list[Point] = field(default_factory=list)
    num_updates: int = 0
    num_gradients: int = 0
    sum_staleness: int = 0
    samples_trained: int = 0
    samples_dropped: int = 0
    dropped: dict[Rank, int] = field(default_factory=dict)
    stale: dict[Rank, int] = field(default_factory=dict)
    decisions: list[Decided] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def drop(self, rank: Rank, num_samples: int, staleness: int) -> None:
        """Count a gradient that nobody will use."""
        self.samples_dropped += num_samples
        self.dropped[rank] = self.dropped.get(rank, 0) + num_samples
        if staleness:
            self.stale[rank] = staleness

    def train(self, rank: Rank, num_samples: int, staleness: int) -> None:
        """Count a gradient that is in an update."""
        self.num_gradients += 1
        self.samples_trained += num_samples
        if staleness:
            self.sum_staleness += staleness
            self.stale[rank] = staleness

    def take_since_update(self) -> tuple[dict[Rank, int], dict[Rank, int]]:
        """Dropped samples and staleness since the latest update; from now on for the next."""
        taken = self.dropped, self.stale
        self.dropped, self.stale = {}, {}
        return taken

    def result(
        self,
        virtual_s: float,
        num_events: int,
        samples_drawn: int,
        samples_in_flight: int,
        own_s: tuple[float, ...],
        wait_s: tuple[float, ...],
    ) -> Result:
        """The run as a whole."""
        return Result(
            virtual_s=virtual_s,
            curve=tuple(self.curve),
            num_updates=self.num_updates,
            num_gradients=self.num_gradients,
            samples_drawn=samples_drawn,
            samples_trained=self.samples_trained,
            samples_dropped=self.samples_dropped,
            samples_in_flight=samples_in_flight,
            mean_staleness=self.sum_staleness / self.num_gradients if self.num_gradients else 0.0,
            own_s=own_s,
            wait_s=wait_s,
            decisions=tuple(self.decisions),
            num_events=num_events,
            seen=tuple(self.seen),
        )
