"""What is promised: turns a summary into claims, each with what was wanted, what was measured and if it holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.evaluate.grid import ARCHS
from paceline.evaluate.table import SLOW, STAR

ARCH_WORDS: Final = {"ps": "parameter server", "ring": "all-reduce", "both": "both"}


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise.

    Args:
        scope: An architecture, or "both".
        what: What it is about.
        unit: "%" for a share of time saved, "x" for a ratio of times, "points" of accuracy.
        bound: What was promised.
        at_least: Whether the bound is a lower one.
        measured: What came out; None where nothing ran.
    """

    scope: str
    what: str
    unit: str
    bound: float
    at_least: bool
    measured: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it came out as promised; None where nothing ran."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"{'at least' if self.at_least else 'at most'} {_in_unit(self.bound, self.unit)}"

    @property
    def got(self) -> str:
        """The measured figure in words."""
        return "-" if self.measured is None else _in_unit(self.measured, self.unit)


def _in_unit(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100.0 * value:.0f} %"
    return f"{value:.2f}x" if unit == "x" else f"{value:+.2f} points"


def claims(summary: Mapping[str, Any]) -> list[Claim]:
    """List all promises with what became of them.

    Args:
        summary: What `table.summarise` made; architectures in which nothing ran are left out.

    Returns:
        First those of every architecture, then those about both.

    Example:
        >>> arch = {"reduction": {"ssgd": 0.7}, "vs_best_published": {"median": 0.9, "worst": 1.0}, "vs_limit": 1.1}
        >>> nothing = {"reduction": {}, "vs_best_published": {"median": None, "worst": None}, "vs_limit": None}
        >>> found = claims({"ps": arch, "ring": nothing, "accuracy_gap_points": 0.1, "no_straggler_ratio": None,
        ...     "selector_regret": {"median": None, "p95": None}})
        >>> [(claim.wanted, claim.got, claim.holds) for claim in found][:2]
        [('at least 60 %', '70 %', True), ('at most 0.85x', '0.90x', False)]
    """
    made: list[Claim] = []
    for arch in ARCHS:
        of_arch = summary[arch]
        reduction, best = of_arch["reduction"], of_arch["vs_best_published"]
        made += [
            Claim(
                arch, f"time saved against {name}, slowdown {SLOW:g} and more, median", "%", 0.6, True, reduction[name]
            )
            for name in ("ssgd", *STAR)
            if name in reduction
        ]
        if best["median"] is not None:
            made.append(Claim(arch, "time over the best paper's, median", "x", 0.85, False, best["median"]))
            made.append(Claim(arch, "time over the best paper's, worst situation", "x", 1.02, False, best["worst"]))
        if of_arch["vs_limit"] is not None:
            made.append(Claim(arch, "time over the limit, median", "x", 1.25, False, of_arch["vs_limit"]))
    regret = summary["selector_regret"]
    return [
        *made,
        Claim("both", "final accuracy against SSGD, mean", "points", -0.3, True, summary["accuracy_gap_points"]),
        Claim("both", "time over SSGD without stragglers, worst", "x", 1.02, False, summary["no_straggler_ratio"]),
        Claim("both", "time over the best fixed mode, held out, median", "x", 1.05, False, regret["median"]),
        Claim("both", "time over the best fixed mode, held out, 95th percentile", "x", 1.25, False, regret["p95"]),
    ]
