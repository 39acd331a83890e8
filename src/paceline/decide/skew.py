"""Which all-reduce: turns the ranks' waits in the last exchanges into one around a late rank, or the backend's. Pure.

Every rank sees the same numbers, so every rank decides the same without asking anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean, median

from paceline.collective.cost import gain_s, split_bytes, tuned_num_chunks
from paceline.predict.gaps import GapWindow, gap_s
from paceline.types import Rank

_QUANTILES = (0.25, 0.5, 0.75)  # of a rank's gaps: how large a gap to count on


@dataclass(frozen=True, slots=True)
class Network:
    """What an exchange costs, as far as it was measured.

    Args:
        num_ranks: n, >= 2.
        nbytes: Size of a step's gradients, bytes, > 0.
        alpha_s: Per message, seconds, > 0.
        beta_s_per_byte: Per byte through one port, seconds, > 0.
        num_lanes: Parts of a buffer that take turns around a late rank, >= 1: what one's message costs besides its
            bytes is hidden behind the others'.
    """

    num_ranks: int
    nbytes: int
    alpha_s: float
    beta_s_per_byte: float
    num_lanes: int = 1

    @classmethod
    def fit(cls, num_ranks: int, nbytes: int, small: tuple[int, float], large: tuple[int, float]) -> Network:
        """Fit alpha and beta to two timed all-reduces of the backend, taken to be rings.

        Args:
            num_ranks, nbytes: See above.
            small, large: Bytes and seconds of either.

        Example:
            >>> network = Network.fit(4, 10**6, small=(4, 6e-3), large=(4 * 10**6, 66e-3))
            >>> round(network.alpha_s, 6), round(network.beta_s_per_byte * 1e9, 3)
            (0.001, 10.0)
        """
        (small_bytes, small_s), (large_bytes, large_s) = small, large
        volume = 2.0 * (num_ranks - 1) / num_ranks
        beta = max((large_s - small_s) / (volume * (large_bytes - small_bytes)), 1e-13)
        alpha = max(small_s / (2 * (num_ranks - 1)) - small_bytes * beta / num_ranks, 1e-7)
        return cls(num_ranks, nbytes, alpha, beta)

    @property
    def lane_alpha_s(self) -> float:
        """What is left of a message's cost around a late rank, seconds."""
        return self.alpha_s / self.num_lanes

    @property
    def ring_s(self) -> float:
        """The ring's time for all bytes once everybody is there, seconds."""
        n = self.num_ranks
        return 2 * (n - 1) * (self.alpha_s + self.nbytes * self.beta_s_per_byte / n)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a step's gradients are all-reduced.

    Args:
        late: The rank that the rest is not to wait for; None for the backend's own all-reduce of everything.
        late_bytes: How much goes around it, bytes; the rest goes through the backend's own.
        num_chunks: K, of the schedule.
        gap_s: The gap counted on, seconds.
        gain_s: Expected saving per step, seconds.
        reason: One sentence.

    Example:
        >>> Reduction().is_native
        True
    """

    late: Rank | None = None
    late_bytes: int = 0
    num_chunks: int = 0
    gap_s: float = 0.0
    gain_s: float = 0.0
    reason: str = "nobody is predictably late"

    @property
    def is_native(self) -> bool:
        """Whether everything goes through the backend's own all-reduce."""
        return self.late is None


@dataclass(frozen=True, slots=True)
class SkewState:
    """What the chooser remembers; a value."""

    chosen: Reduction = Reduction()
    window: GapWindow = field(default_factory=GapWindow)
    since: int = 0


@dataclass(frozen=True, slots=True)
class SkewChooser:
    """The late rank and the part of the bytes with the largest expected gain, with hysteresis.

    Args:
        network: What an exchange costs.
        min_calls: Exchanges to see before anything but the backend's own all-reduce is chosen, >= 1.
        min_gain_ratio: Expected saving that a change must promise, as a share of the ring's time, > 0.
        patience: A choice that lost in the mean of so many exchanges is given up, and all that was seen forgotten.
        slow_ratio: An exchange in which everybody was on time, but that took so many times the ring's time, is a slow
            link's doing.

    Source:
        StragglAR (arXiv 2505.23523) fixes one late rank before the run and sends all bytes around it. Choosing by
        expected gain, the split that leaves no critical delay, and the return are ours.

    Example:
        >>> chooser = SkewChooser(Network(num_ranks=8, nbytes=10**7, alpha_s=1e-5, beta_s_per_byte=1e-8))
        >>> state = chooser.init()
        >>> for _ in range(6):
        ...     state, choice = chooser.step(state, [0.30] * 5 + [0.25] + [0.30] * 2)
        >>> state.chosen.late, round(state.chosen.gap_s, 2), 0.035 < state.chosen.gain_s < 0.05 * 7 / 8
        (5, 0.05, True)
    """

    network: Network
    min_calls: int = 4
    min_gain_ratio: float = 0.05
    patience: int = 3
    slow_ratio: float = 2.0

    def init(self) -> SkewState:
        """Return the state before the first exchange: the backend's own all-reduce."""
        return SkewState()

    def step(self, state: SkewState, waits_s: list[float]) -> tuple[SkewState, Reduction | None]:
        """Take in the waits of one exchange, by rank, seconds; return what to do from now on if it is something else.

        The exchange must have been carried out as `state.chosen` says.
        """
        state = replace(state, window=state.window.observe(waits_s), since=state.since + 1)
        best = self._best(state.window) if len(state.window.waits_s) >= self.min_calls else Reduction()
        chosen = state.chosen
        if not chosen.is_native and state.since >= self.patience:
            recent = state.window.waits_s[-self.patience :]
            made = fmean(self.gain_s(chosen, gap_s(waits, chosen.late)) for waits in recent)  # type: ignore[arg-type]
            if made < 0:
                lost = f"rank {chosen.late} was not late as expected: {-made * 1e3:.1f} ms lost per step"
                return SkewState(), Reduction(reason=lost)
        now = self._expected(chosen, state.window)
        if best.gain_s - now < self.min_gain_ratio * self.network.ring_s or best == chosen:
            return state, None
        return replace(state, chosen=best, since=0), best

    def gain_s(self, reduction: Reduction, gap_s: float) -> float:
        """Return what a choice saves against the ring if its late rank comes so long after the others, seconds."""
        if reduction.is_native:
            return 0.0
        net = self.network
        made = gain_s(
            gap_s, net.num_ranks, reduction.num_chunks, reduction.late_bytes, net.lane_alpha_s, net.beta_s_per_byte
        )
        # What is split off costs a ring's messages once more.
        return made - (2 * (net.num_ranks - 1) * net.lane_alpha_s if reduction.late_bytes < net.nbytes else 0.0)

    def reduction(self, late: Rank, expected_gap_s: float) -> Reduction:
        """Return the all-reduce around a rank whose early part just fills the gap it is expected to leave."""
        net = self.network
        late_bytes = split_bytes(expected_gap_s, net.num_ranks, net.nbytes, net.beta_s_per_byte)
        num_chunks = tuned_num_chunks(net.num_ranks, late_bytes, net.lane_alpha_s, net.beta_s_per_byte)
        return Reduction(late, late_bytes, num_chunks, expected_gap_s)

    def slow_link(self, state: SkewState) -> float | None:
        """Return how many times the ring's time exchanges take in which nobody was late, if that is too many.

        Late is who comes after the others; where all are on time and progress is slow, bandwidth is what is short.
        """
        if len(state.window.waits_s) < self.min_calls or not state.chosen.is_native:
            return None
        ratio = median(min(waits) for waits in state.window.waits_s) / self.network.ring_s
        spread = median(max(waits) - min(waits) for waits in state.window.waits_s)
        return ratio if ratio >= self.slow_ratio and spread < self.network.ring_s else None

    def _best(self, window: GapWindow) -> Reduction:
        late = window.last()
        gaps = sorted(window.gaps_s(late))
        best = Reduction()
        for quantile in _QUANTILES:
            expected = gaps[int(quantile * (len(gaps) - 1))]
            if expected <= 0:
                continue
            found = self.reduction(late, expected)
            made = self._expected(found, window)
            if made > best.gain_s:
                net = self.network
                reason = (
                    f"rank {late} comes {expected * 1e3:.1f} ms after the others: {found.late_bytes / 1e6:.1f} of "
                    f"{net.nbytes / 1e6:.1f} MB are reduced around it, {made * 1e3:.1f} ms less per step expected"
                )
                best = replace(found, gain_s=made, reason=reason)
        return best

    def _expected(self, reduction: Reduction, window: GapWindow) -> float:
        if reduction.late is None:
            return 0.0
        return fmean(self.gain_s(reduction, gap) for gap in window.gaps_s(reduction.late))
