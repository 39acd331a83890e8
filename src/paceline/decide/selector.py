"""The choice of mode: turns recent steps into the mode with the lowest predicted time to accuracy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.decide.candidates import LIVE, Family, Mode
from paceline.decide.rehearse import Conditions, Estimate, estimate
from paceline.policy.barrier import BSP
from paceline.policy.base import SyncPolicy
from paceline.policy.ring import AttachedRing

_EVEN = Mode(BSP())


@dataclass(frozen=True, slots=True)
class Choice:
    """What the selector picked; `mode` equals the current one when staying is best.

    Args:
        mode: The pick.
        gain: Predicted time to accuracy of staying over that of the pick, ratio; 1.0 when staying.
        reason: One sentence.
        estimate: The pick's estimate.
        staying: The current mode's.
    """

    mode: Mode
    gain: float
    reason: str
    estimate: Estimate
    staying: Estimate


@dataclass(frozen=True, slots=True)
class Selector:
    """True argmin over BSP and all modes of some families, with hysteresis.

    Args:
        min_gain: A change must promise at least this ratio of time to accuracy, >= 1.
        keep_gain: A mode other than BSP is kept while it promises this ratio over BSP, in [1, min_gain].
        max_staleness: Bound given to attached ranks, versions, >= 0.
        families: The kinds of modes to choose among.

    Raises:
        ValueError: not 1 <= keep_gain <= min_gain.

    Source:
        STAR's heuristics; ours differs: argmin instead of the first local minimum, every mode judged by rehearsal
        instead of a formula each, staleness and contributions of attached ranks in the estimate, hysteresis.

    Example:
        >>> given = Conditions.constant({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05})
        >>> choice = Selector().choose(Mode(BSP()), given)
        >>> choice.mode.policy.ring, dict(choice.mode.policy.parent_of)
        ((0, 1, 3), {2: 0})
        >>> Selector().choose(Mode(BSP()), Conditions.constant({0: 0.05, 1: 0.051})).mode.policy
        BSP()
    """

    min_gain: float = 1.1
    keep_gain: float = 1.03
    max_staleness: int = 16
    families: tuple[Family, ...] = LIVE

    def __post_init__(self) -> None:
        if not 1 <= self.keep_gain <= self.min_gain:
            raise ValueError(f"wanted 1 <= keep_gain <= min_gain, got {self.keep_gain} and {self.min_gain}")

    def candidates(self, current: Mode, given: Conditions) -> Iterator[Mode]:
        """BSP with even batches, and every mode of the families."""
        yield _EVEN
        for family in self.families:
            yield from family(current.policy, given, self.max_staleness)

    def choose(self, current: Mode, given: Conditions) -> Choice:
        """Pick the mode with the lowest predicted time to accuracy, or stay.

        Args:
            current: The mode in force.
            given: Recent steps of every rank, and the noise scale.

        Returns:
            The choice with its reason.
        """
        even = (round(given.batch_size),) * len(given.own_steps)
        judged = [
            (estimate(mode.policy, given, mode.batch_sizes or even), mode) for mode in self.candidates(current, given)
        ]
        staying = next((made for made, mode in judged if mode == current), None) or estimate(
            current.policy, given, current.batch_sizes or even
        )
        best_estimate, best = min(judged, key=lambda pair: pair[0].time_to_accuracy_s)
        bsp_estimate = judged[0][0]
        gain = staying.time_to_accuracy_s / best_estimate.time_to_accuracy_s
        if current != _EVEN:
            over_bsp = bsp_estimate.time_to_accuracy_s / staying.time_to_accuracy_s
            if over_bsp < self.keep_gain and gain < self.min_gain:
                reason = (
                    f"{_name(current.policy)} is now worth only {over_bsp:.2f}x BSP "
                    f"(below {self.keep_gain}): everybody back into one update"
                )
                return Choice(_EVEN, 1.0 / over_bsp, reason, bsp_estimate, staying)
        if best == current or gain < self.min_gain:
            reason = f"the best alternative promises {gain:.2f}x, below {self.min_gain}: stay"
            return Choice(current, 1.0, reason, staying, staying)
        return Choice(best, gain, _reason(best, given, best_estimate, staying, gain), best_estimate, staying)


def _reason(mode: Mode, given: Conditions, new: Estimate, old: Estimate, gain: float) -> str:
    updates = (
        f"updates of {new.batch_samples:.0f} samples every {new.interval_s * 1e3:.0f} ms instead of "
        f"{old.batch_samples:.0f} every {old.interval_s * 1e3:.0f} ms, predicted {gain:.2f}x faster to accuracy"
    )
    if mode == _EVEN:
        return f"all ranks are alike again: {updates}"
    if mode.batch_sizes is not None:
        sizes = ", ".join(str(size) for size in mode.batch_sizes)
        return f"{_name(mode.policy)} with batches of {sizes} samples: {updates}"
    if isinstance(mode.policy, AttachedRing):
        times = given.own_times_s
        slow = ", ".join(
            f"rank {child} ({times[child] * 1e3:.0f} ms) to rank {parent}"
            for child, parent in sorted(mode.policy.parent_of.items())
        )
        return f"attach {slow}; ring of {len(mode.policy.ring)}: {updates}"
    return f"{_name(mode.policy)}: {updates}"


def _name(policy: SyncPolicy[Any]) -> str:
    return "the attached ring" if isinstance(policy, AttachedRing) else str(policy)
