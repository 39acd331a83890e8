"""What the virtual world is made of: hosts, who runs where, and what a gradient costs. Frozen descriptions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from paceline.decide.rehearse import Arch
from paceline.types import Rank


@dataclass(frozen=True, slots=True)
class Host:
    """One machine.

    Args:
        cores: CPU capacity, cores, > 0; `inf` for one that nobody can overload.
        in_bytes_per_s, out_bytes_per_s: Capacity of its NIC in either direction, > 0; `inf` for no limit.
        extra_latency_s: What it adds to every round trip of which it is one end, seconds, >= 0.

    Raises:
        ValueError: a capacity that is not positive or a negative latency.
    """

    cores: float = inf
    in_bytes_per_s: float = inf
    out_bytes_per_s: float = inf
    extra_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.cores > 0 and self.in_bytes_per_s > 0 and self.out_bytes_per_s > 0):
            raise ValueError(f"a host's capacities must be positive, got {self}")
        if not 0 <= self.extra_latency_s < inf:
            raise ValueError(f"extra_latency_s must be >= 0 and finite, got {self.extra_latency_s}")


@dataclass(frozen=True, slots=True)
class Job:
    """Another job's process on one of the hosts: it takes CPU and network while it runs.

    Args:
        host: Where, as an index into the cluster's hosts.
        cores: CPU demand, cores, >= 0.
        in_bytes_per_s, out_bytes_per_s: What it would send and receive undisturbed, >= 0; on a full NIC it gets its
            max-min fair share like everybody.
        from_s, until_s: When it runs, virtual seconds; None for until the end.

    Raises:
        ValueError: a negative demand or a time range that is empty.
    """

    host: int
    cores: float = 0.0
    in_bytes_per_s: float = 0.0
    out_bytes_per_s: float = 0.0
    from_s: float = 0.0
    until_s: float | None = None

    def __post_init__(self) -> None:
        if not all(0 <= demand < inf for demand in (self.cores, self.in_bytes_per_s, self.out_bytes_per_s)):
            raise ValueError(f"a job's demands must be >= 0 and finite, got {self}")
        if not 0 <= self.from_s < (inf if self.until_s is None else self.until_s):
            raise ValueError(f"a job must end after it begins, got {self.from_s}..{self.until_s} s")


@dataclass(frozen=True, slots=True)
class Workload:
    """What one gradient of the training costs, on a rank that nothing slows down.

    Args:
        step_s: Own compute time of a gradient of the reference batch, seconds, > 0; the trace slows it down.
        batch_size: The reference batch: samples per rank and gradient that `step_s` is for, > 0.
        model_bytes: Size of a gradient, and of the parameters, bytes, >= 0.
        fixed_ratio: Part of `step_s` that does not shrink with the batch (optimizer, kernel launches), 0..1.
        num_micro_batches: Pieces that a batch is computed in, where a rank can stop early, >= 1.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> round(Workload(step_s=0.1, batch_size=32).compute_s(16), 3)
        0.06
    """

    step_s: float
    batch_size: int
    model_bytes: float = 0.0
    fixed_ratio: float = 0.2
    num_micro_batches: int = 4

    def __post_init__(self) -> None:
        if not (0 < self.step_s < inf and self.batch_size >= 1 and 0 <= self.model_bytes < inf):
            raise ValueError(f"a workload needs a time, a batch and a size, got {self}")
        if not 0 <= self.fixed_ratio <= 1:
            raise ValueError(f"fixed_ratio must be in 0..1, got {self.fixed_ratio}")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches must be >= 1, got {self.num_micro_batches}")

    def compute_s(self, num_samples: float) -> float:
        """Seconds for a gradient of so many samples: step * (fixed + (1 - fixed) * samples / reference batch)."""
        return self.step_s * (self.fixed_ratio + (1.0 - self.fixed_ratio) * num_samples / self.batch_size)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, and who runs on them.

    Args:
        arch: "ps": gradients go to parameter servers and parameters come from there; "ring": ranks all-reduce.
        hosts: The machines.
        rank_hosts: Host of every rank, as an index into `hosts`.
        server_hosts: Hosts of the parameter servers ("ps" only); the model is cut evenly between them.
        rank_cores: CPU demand of a computing rank, cores. It has none while it waits.
        server_cores: CPU demand of a server, or of a rank that serves others, while it works, cores.
        jobs: What else runs here.
        alpha_s: Latency of a message between two hosts, seconds.
        round_trips: How many messages, each waiting for the one before, one push or one pull takes: latency hits a
            transfer so often. Frameworks that move a model variable by variable have many.
        sum_s_per_byte: CPU time to take in and add up a received gradient.
        apply_s_per_byte: CPU time to apply an update at the server. (In a ring every rank applies it as part of its
            step.)
        copy_s_per_byte: CPU time to make a version ready to be sent; once per version and server.

    The three default costs are ours: 4, 1 and 4 GB/s, what one core does with memory-bound vector work.

    Raises:
        ValueError: a place that does not exist, servers where there can be none, or a negative cost.

    Example:
        >>> cluster = Cluster.uniform("ps", num_ranks=4, host=Host(in_bytes_per_s=1e9, out_bytes_per_s=1e9))
        >>> cluster.num_ranks, len(cluster.hosts), cluster.server_hosts
        (4, 5, (4,))
    """

    arch: Arch
    hosts: tuple[Host, ...]
    rank_hosts: tuple[int, ...]
    server_hosts: tuple[int, ...] = ()
    rank_cores: float = 1.0
    server_cores: float = 1.0
    jobs: tuple[Job, ...] = ()
    alpha_s: float = 0.0
    round_trips: int = 1
    sum_s_per_byte: float = 0.25e-9
    apply_s_per_byte: float = 1e-9
    copy_s_per_byte: float = 0.25e-9

    def __post_init__(self) -> None:
        if self.arch not in ("ps", "ring"):
            raise ValueError(f"arch must be 'ps' or 'ring', got {self.arch!r}")
        if not self.rank_hosts:
            raise ValueError("a cluster needs at least one rank")
        places = (*self.rank_hosts, *self.server_hosts, *(job.host for job in self.jobs))
        wrong = sorted({place for place in places if not 0 <= place < len(self.hosts)})
        if wrong:
            raise ValueError(f"there are {len(self.hosts)} hosts, got the indices {wrong}")
        if (self.arch == "ps") != bool(self.server_hosts):
            raise ValueError(f"'ps' needs servers and 'ring' has none, got {self.arch!r} and {self.server_hosts}")
        if len(set(self.server_hosts)) < len(self.server_hosts):
            raise ValueError(f"one server per host, got {self.server_hosts}")
        costs = (self.rank_cores, self.server_cores, self.alpha_s, self.sum_s_per_byte)
        if min(*costs, self.apply_s_per_byte, self.copy_s_per_byte) < 0 or self.round_trips < 1:
            raise ValueError(f"demands, latencies and costs must be >= 0 and round_trips >= 1, got {self}")

    @classmethod
    def uniform(
        cls,
        arch: Arch,
        num_ranks: int,
        host: Host | None = None,
        ranks_per_host: int = 1,
        num_servers: int = 1,
        **rest: Any,
    ) -> Cluster:
        """Equal hosts with ranks on them in order; servers, if any, on equal hosts of their own after these.

        Args:
            arch: See `Cluster`.
            num_ranks: How many ranks, > 0.
            host: What every host is like; None for one without limits.
            ranks_per_host: Ranks on each, > 0.
            num_servers: Parameter servers ("ps" only), > 0.
            **rest: Further fields of `Cluster`.
        """
        num_hosts = -(-num_ranks // ranks_per_host)
        servers = tuple(range(num_hosts, num_hosts + num_servers)) if arch == "ps" else ()
        return cls(
            arch,
            (host or Host(),) * (num_hosts + len(servers)),
            tuple(rank // ranks_per_host for rank in range(num_ranks)),
            servers,
            **rest,
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rank_hosts)

    def latency_s(self, source: int, target: int) -> float:
        """Seconds that latency costs a push or pull between two hosts: round trips * (alpha + what both add)."""
        if source == target:
            return 0.0
        extra_s = self.hosts[source].extra_latency_s + self.hosts[target].extra_latency_s
        return self.round_trips * (self.alpha_s + extra_s)

    def ring_latency_s(self, members: tuple[Rank, ...]) -> float:
        """Latency of an all-reduce in a ring: 2 (n - 1) steps, each as late as its latest message."""
        hosts = {self.rank_hosts[rank] for rank in members}
        if len(hosts) < 2:
            return 2 * (len(members) - 1) * self.alpha_s
        extra_s = max(self.hosts[host].extra_latency_s for host in hosts)
        return 2 * (len(members) - 1) * (self.alpha_s + extra_s)

    def ring_bytes(self, num_members: int, model_bytes: float) -> float:
        """What an all-reduce in a ring sends, and receives, at each member: 2 (n - 1) / n of the model."""
        return 2 * (num_members - 1) / num_members * model_bytes


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank leaves or joins at a virtual time; one whose first line is a join is not there at the start."""

    time_s: float
    rank: Rank
    change: Literal["leave", "join"]


@dataclass(frozen=True, slots=True)
class Stop:
    """When a run ends: at the first of these.

    Args:
        samples: Samples trained, > 0.
        accuracy: The mean of three evaluations is this good, 0..1; None to go on regardless.
        virtual_s: Virtual time, seconds, > 0.
        max_events: Events of the virtual clock; reaching this is an error.

    Raises:
        ValueError: no samples or no time.
    """

    samples: int
    accuracy: float | None = None
    virtual_s: float = inf
    max_events: int = 100_000_000

    def __post_init__(self) -> None:
        if self.samples < 1 or not self.virtual_s > 0:
            raise ValueError(f"a run needs a budget of samples and time, got {self.samples} and {self.virtual_s} s")
