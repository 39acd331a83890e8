"""Paceline: straggler-tolerant distributed training for PyTorch.

    import paceline
    pace = paceline.attach(ddp, optimizer, mode="observe")   # or "suggest", "auto"

Measures every rank's own time, names the slow one and the cause, and in "auto" changes the synchronisation mode when
that brings the accuracy sooner. See `attach` (all-reduce, under DDP) and `parameter_server`.
"""

from paceline.act.attach import Pace, attach
from paceline.act.parameter_server import parameter_server
from paceline.errors import (
    ConfigError,
    DivergenceError,
    PacelineError,
    PeerError,
    PeerTimeout,
    RecordError,
    SimulationError,
    TraceError,
)
from paceline.measure.taps import expected_slow

__all__ = [
    "ConfigError",
    "DivergenceError",
    "Pace",
    "PacelineError",
    "PeerError",
    "PeerTimeout",
    "RecordError",
    "SimulationError",
    "TraceError",
    "attach",
    "expected_slow",
    "parameter_server",
]
