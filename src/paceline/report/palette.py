"""Colours: turns phases into one colour each, the same in every chart and table; safe for colour-blind readers."""

from __future__ import annotations

from paceline.types import Phase

# Okabe and Ito 2008, "Color Universal Design". Waiting is no work, so it gets no hue.
PHASE_COLORS = {
    Phase.EXPECTED: "#F0E442",
    Phase.OTHER: "#CC79A7",
    Phase.GC: "#D55E00",
    Phase.DATA: "#E69F00",
    Phase.FORWARD: "#56B4E9",
    Phase.BACKWARD: "#0072B2",
    Phase.WAIT: "#E2E2E2",
    Phase.OPTIMIZER: "#009E73",
}
# The order in which a step goes through its phases, as far as sums by phase tell.
PHASE_ORDER = tuple(PHASE_COLORS)

SLOW_COLORS = ("#D55E00", "#E69F00", "#CC79A7")
RANK_COLORS = ("#0072B2", "#009E73", "#56B4E9", "#333333", "#9A7D0A", "#8E6C8A", "#7F7F7F", "#B2DF8A")
