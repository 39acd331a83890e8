"""All synthetic stragglers in one place: turns a family's name into its class. Pure.

Example:
    >>> trace = FAMILIES["throttled"](num_ranks=8, seed=1)
    >>> trace.name, trace.num_ranks, trace.has_stragglers
    ('throttled-10x', 8, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from paceline.sim.chance import Episodes, Markov, Pareto, ShiftedExponential
from paceline.sim.family import Family
from paceline.sim.planned import Calm, Constant, Drifting, Heterogeneous, Rotating, Throttled

__all__ = [
    "FAMILIES",
    "Calm",
    "Constant",
    "Drifting",
    "Episodes",
    "Family",
    "Heterogeneous",
    "Markov",
    "Pareto",
    "Rotating",
    "ShiftedExponential",
    "Throttled",
]

FAMILIES: Final[Mapping[str, type[Family]]] = MappingProxyType(
    {
        "calm": Calm,
        "constant": Constant,
        "heterogeneous": Heterogeneous,
        "throttled": Throttled,
        "rotating": Rotating,
        "drifting": Drifting,
        "exponential": ShiftedExponential,
        "pareto": Pareto,
        "markov": Markov,
        "episodes": Episodes,
    }
)
"""By name. Every family needs `num_ranks` alone; its other fields have defaults, times among them in seconds."""
