"""The choice of mode: turns forecasts into the policy with the lowest predicted time to accuracy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.decide.estimate import Conditions, Estimate, estimate
from paceline.decide.placement import choose_parents
from paceline.policy.barrier import BSP
from paceline.policy.ring import AttachedRing

Policy = BSP | AttachedRing


@dataclass(frozen=True, slots=True)
class Choice:
    """What the selector picked; `policy` equals the current one when staying is best.

    Args:
        policy: The pick.
        gain: Predicted time to accuracy of staying over that of the pick, ratio; 1.0 when staying.
        reason: One sentence.
        estimate: The pick's estimate.
        staying: The current policy's.
    """

    policy: Policy
    gain: float
    reason: str
    estimate: Estimate
    staying: Estimate


@dataclass(frozen=True, slots=True)
class Selector:
    """True argmin over BSP and AttachedRing(x) for every x, with hysteresis.

    Args:
        min_gain: A change must promise at least this ratio of time to accuracy, >= 1.
        keep_gain: An attached ring is kept while it promises this ratio over BSP, in [1, min_gain].
        max_staleness: Bound given to attached ranks, versions, >= 0.

    Raises:
        ValueError: not 1 <= keep_gain <= min_gain.

    Source:
        STAR's AR heuristic; ours differs: argmin instead of the first local minimum, staleness and contributions
        of attached ranks in the estimate, hysteresis.

    Example:
        >>> given = Conditions({0: 0.05, 1: 0.05, 2: 0.25, 3: 0.05}, 0.0, batch_size=32, noise_scale=60.0)
        >>> choice = Selector().choose(BSP(), given)
        >>> choice.policy.ring, dict(choice.policy.parent_of)
        ((0, 1, 3), {2: 0})
        >>> Selector().choose(BSP(), Conditions({0: 0.05, 1: 0.06}, 0.0, 32, 60.0)).policy
        BSP()
    """

    min_gain: float = 1.1
    keep_gain: float = 1.03
    max_staleness: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.keep_gain <= self.min_gain:
            raise ValueError(f"wanted 1 <= keep_gain <= min_gain, got {self.keep_gain} and {self.min_gain}")

    def candidates(self, current: Policy, given: Conditions) -> list[Policy]:
        """BSP, and for every x the ring of the x fastest; at equal times present ring members come first."""
        times = given.own_times_s
        present = set(current.ring) if isinstance(current, AttachedRing) else set()
        order = sorted(times, key=lambda rank: (times[rank], rank not in present, rank))
        rings: list[Policy] = [BSP()]
        for x in range(1, len(order)):
            ring, children = sorted(order[:x]), order[x:]
            rings.append(AttachedRing(tuple(ring), choose_parents(ring, children, times), self.max_staleness))
        return rings

    def choose(self, current: Policy, given: Conditions) -> Choice:
        """Pick the policy with the lowest predicted time to accuracy, or stay.

        Args:
            current: The policy in force.
            given: Forecasts for every rank, and the noise scale.

        Returns:
            The choice with its reason.
        """
        staying = estimate(current, given)
        judged = [(estimate(policy, given), policy) for policy in self.candidates(current, given)]
        best_estimate, best = min(judged, key=lambda pair: pair[0].time_to_accuracy_s)
        bsp_estimate = judged[0][0]
        gain = staying.time_to_accuracy_s / best_estimate.time_to_accuracy_s
        if isinstance(current, AttachedRing):
            over_bsp = bsp_estimate.time_to_accuracy_s / staying.time_to_accuracy_s
            if over_bsp < self.keep_gain and gain < self.min_gain:
                reason = (
                    f"the attached ring is now worth only {over_bsp:.2f}x BSP "
                    f"(below {self.keep_gain}): everybody back into the ring"
                )
                return Choice(BSP(), 1.0 / over_bsp, reason, bsp_estimate, staying)
        if best == current or gain < self.min_gain:
            reason = f"the best alternative promises {gain:.2f}x, below {self.min_gain}: stay"
            return Choice(current, 1.0, reason, staying, staying)
        return Choice(best, gain, _reason(best, given, best_estimate, staying, gain), best_estimate, staying)


def _reason(policy: Policy, given: Conditions, new: Estimate, old: Estimate, gain: float) -> str:
    updates = (
        f"updates of {new.batch_samples:.0f} samples every {new.interval_s * 1e3:.0f} ms instead of "
        f"{old.batch_samples:.0f} every {old.interval_s * 1e3:.0f} ms, predicted {gain:.2f}x faster to accuracy"
    )
    if isinstance(policy, BSP):
        return f"all ranks are alike again: {updates}"
    slow = ", ".join(
        f"rank {child} ({given.own_times_s[child] * 1e3:.0f} ms) to rank {parent}"
        for child, parent in sorted(policy.parent_of.items())
    )
    return f"attach {slow}; ring of {len(policy.ring)}: {updates}"
