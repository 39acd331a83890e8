"""Every error Paceline raises on purpose.

PacelineError
├── ConfigError (ValueError)      what was asked for cannot be; raised before anything starts
│   └── ScheduleError                 a collective that cannot be built, or that is no all-reduce
├── PeerError                     another rank failed; names host and rank
│   └── PeerTimeout (TimeoutError)    another rank fell silent
├── DivergenceError               ranks that must hold the same parameters do not
├── RecordError (ValueError)      a run log that cannot be read
├── TraceError (ValueError)       a straggler trace that cannot be read or used
└── SimulationError               a simulated run that cannot go on
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """The request cannot be carried out as it stands; the message says what to change."""


class ScheduleError(ConfigError):
    """A collective that cannot be built as asked, or a schedule that is no all-reduce; the message says where."""


class PeerError(PacelineError):
    """Another rank failed, so this one cannot go on.

    Args:
        rank: The rank that failed.
        host: Its host name.
        reason: What happened to it.

    Example:
        >>> str(PeerError(2, "node1", "killed"))
        'rank 2 on host node1: killed'
    """

    def __init__(self, rank: int, host: str, reason: str) -> None:
        super().__init__(f"rank {rank} on host {host}: {reason}")
        self.rank = rank
        self.host = host
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerError], tuple[int, str, str]]:
        return type(self), (self.rank, self.host, self.reason)


class PeerTimeout(PeerError, TimeoutError):  # noqa: N818 - a timeout is an error and says so by its base
    """Another rank gave no sign of life for longer than the limit."""


class DivergenceError(PacelineError):
    """Ranks that must hold identical parameters do not; training on would be wrong."""


class RecordError(PacelineError, ValueError):
    """A run log has a line that cannot be understood; the message names file and line."""


class TraceError(PacelineError, ValueError):
    """A straggler trace that cannot be read or used; the message names file, line, what was got and what was wanted."""


class SimulationError(PacelineError):
    """A simulation cannot go on: it ran past its bound on events, or nobody in it may move."""
