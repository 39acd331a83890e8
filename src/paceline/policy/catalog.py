"""All policies by name: turns a policy into JSON and back, and a name from the command line into a policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.group import GroupSync
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing, GroupedRing
from paceline.policy.stale import ASP, SSP, KAsync, Zeno
from paceline.types import Rank

POLICIES: tuple[Callable[..., SyncPolicy[Any]], ...] = (
    BSP,
    KSync,
    Deadline,
    SSP,
    ASP,
    KAsync,
    Zeno,
    GroupSync,
    AttachedRing,
    GroupedRing,
    LocalSGD,
    DropCompute,
)
"""Every kind of policy; a new one is a line here, and one in `parse`'s table where the command line should know it."""

_BY_NAME = {kind.__name__: kind for kind in POLICIES}


def to_json(policy: SyncPolicy[Any]) -> dict[str, Any]:
    """A policy as a JSON-ready object: its name and its arguments; `from_json` turns it back.

    Raises:
        ValueError: a kind of policy that is not in the catalog.

    Example:
        >>> to_json(AttachedRing((0, 1), {2: 0}))
        {'name': 'AttachedRing', 'ring': [0, 1], 'parent_of': {'2': 0}, 'max_staleness': 16}
    """
    name = type(policy).__name__
    if name not in _BY_NAME:
        raise ValueError(f"{policy} is not in the catalog; known are {', '.join(_BY_NAME)}")
    return {"name": name, **{field.name: _encoded(getattr(policy, field.name)) for field in _arguments(name)}}


def from_json(data: Mapping[str, Any]) -> SyncPolicy[Any]:
    """The policy behind such an object; an argument that is left out has its default.

    Raises:
        ValueError: an unknown name, an unknown or missing argument, or one that the policy refuses.

    Example:
        >>> from_json({"name": "LocalSGD", "local_steps": 8, "inner": {"name": "KSync", "k": 6}})
        LocalSGD(local_steps=8, inner=KSync(k=6, late='drop'))
    """
    name = data.get("name")
    if name not in _BY_NAME:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(_BY_NAME)}")
    arguments = {field.name: field for field in _arguments(name)}
    given = {key: _decoded(value) for key, value in data.items() if key != "name"}
    needed = {key for key, field in arguments.items() if field.default is field.default_factory is MISSING}
    if not needed <= set(given) <= set(arguments):
        raise ValueError(f"{name} takes {sorted(arguments)} and needs {sorted(needed)}, got {sorted(given)}")
    try:
        return _BY_NAME[name](**given)
    except (TypeError, AttributeError) as error:  # an argument of a type that its checks cannot even compare
        raise ValueError(f"{name} cannot take {given}: {error}") from error


def _arguments(name: str) -> list[Field[Any]]:
    return [field for field in fields(_BY_NAME[name]) if field.init]  # type: ignore[arg-type]


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _encoded(item) for key, item in value.items()}
    return to_json(value) if type(value).__name__ in _BY_NAME else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(item) for item in value)
    if isinstance(value, Mapping):
        return from_json(value) if "name" in value else {int(key): _decoded(item) for key, item in value.items()}
    return value


def parse(text: str, num_ranks: int) -> SyncPolicy[Any]:
    """Return the policy that a name from the command line stands for.

    `NAME:ARGUMENT:...`, later arguments optional where in brackets; the wrappers take the policy inside after a `+`:

    | text | policy |
    |---|---|
    | `bsp` | BSP |
    | `ksync:K[:LATE]` | KSync; LATE is drop, cancel, join_next or carry |
    | `deadline:SECONDS[:LATE]` | Deadline |
    | `ssp:BOUND`, `asp[:MAX_STALENESS]`, `kasync:X` | SSP, ASP, KAsync |
    | `zeno[:RHO[:EPSILON[:MAX_STALENESS]]]` | Zeno |
    | `groups:0-1-2,3` | GroupSync; groups parted by commas, ranks by dashes |
    | `ring:0-1-3;2>0[:MAX_STALENESS]` | AttachedRing; the ring, then every attached rank > its parent |
    | `ring:0-1;2-3>0[:MAX_STALENESS]` | GroupedRing; as before, with clusters, the leader first |
    | `local:STEPS[+POLICY]`, `dropcompute:SECONDS[+POLICY]` | LocalSGD, DropCompute around it (BSP if left out) |

    Args:
        text: The name; upper and lower case are the same.
        num_ranks: Ranks there are, >= 1. A ring or groups must name each of them once.

    Raises:
        ValueError: a name or an argument that cannot be read, or that does not fit so many ranks.

    Example:
        >>> parse("ksync:6", 8)
        KSync(k=6, late='drop')
        >>> parse("ring:0-1-3;2>0", 4)
        AttachedRing(ring=(0, 1, 3), parent_of={2: 0}, max_staleness=16)
        >>> parse("local:8+ksync:6:join_next", 8)
        LocalSGD(local_steps=8, inner=KSync(k=6, late='join_next'))
    """
    if num_ranks < 1:
        raise ValueError(f"there must be at least one rank, got num_ranks={num_ranks}")
    head, plus, inside = text.strip().lower().partition("+")
    name, *words = head.split(":")
    if name not in _READERS:
        raise ValueError(f"unknown policy {text!r}; wanted one of {', '.join(_USAGES.values())}")
    usage = _USAGES[name]
    inner = (parse(inside, num_ranks),) if plus else ()
    try:
        least, most = usage.partition("[")[0].count(":"), usage.partition("+")[0].count(":")
        if not least <= len(words) <= most:
            raise ValueError(f"{len(words)} arguments")
        if inner and "+" not in usage:
            raise ValueError("there is nothing to go inside")
        return _READERS[name](words, num_ranks, *inner)
    except ValueError as error:
        raise ValueError(f"cannot read policy {text!r}: {error}; wanted {usage} for {num_ranks} ranks") from None


def split_names(text: str) -> tuple[str, ...]:
    """Split a list of names at its commas, but not at those that part the groups of `groups:0-1-2,3`.

    What follows a comma and begins with a digit belongs to the name before it: no name begins with a digit.

    Example:
        >>> split_names("bsp, groups:0-1,2-3, local:8+groups:0,1, auto")
        ('bsp', 'groups:0-1,2-3', 'local:8+groups:0,1', 'auto')
    """
    names: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if names and part[0].isdigit():
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(names)


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None


def _ranks(word: str) -> tuple[Rank, ...]:
    return tuple(_whole(rank) for rank in word.split("-"))


def _count(word: str, num_ranks: int) -> int:
    count = _whole(word)
    if not 1 <= count <= num_ranks:
        raise ValueError(f"{count} gradients cannot come from {num_ranks} ranks")
    return count


def _check_all_placed(named: list[Rank], num_ranks: int) -> None:
    if sorted(named) != list(range(num_ranks)):
        raise ValueError(f"ranks 0..{num_ranks - 1} must be named once each, got {sorted(named)}")


def _read_groups(words: list[str], num_ranks: int) -> GroupSync:
    groups = tuple(_ranks(group) for group in words[0].split(","))
    _check_all_placed([rank for group in groups for rank in group], num_ranks)
    return GroupSync(groups)


def _read_ring(words: list[str], num_ranks: int) -> AttachedRing | GroupedRing:
    first, *attachments = words[0].split(";")
    ring, clusters, parent_of = _ranks(first), [], {}
    for attachment in attachments:
        cluster, arrow, parent = attachment.partition(">")
        if not arrow:
            raise ValueError(f"{attachment!r} names no parent")
        clusters.append(_ranks(cluster))
        parent_of[clusters[-1][0]] = _whole(parent)
    _check_all_placed([*ring, *(rank for cluster in clusters for rank in cluster)], num_ranks)
    bound = [_whole(word) for word in words[1:]]
    if all(len(cluster) == 1 for cluster in clusters):
        return AttachedRing(ring, parent_of, *bound)
    return GroupedRing(ring, tuple(clusters), parent_of, *bound)


def _read_zeno(words: list[str], _num_ranks: int) -> Zeno:
    rho, epsilon, max_staleness = (*words, *("0.001", "0", "10")[len(words) :])  # Zeno's own defaults
    return Zeno(_number(rho), _number(epsilon), _whole(max_staleness))


_READERS: dict[str, Callable[..., SyncPolicy[Any]]] = {
    "bsp": lambda _words, _n: BSP(),
    "ksync": lambda words, n: KSync(_count(words[0], n), *words[1:]),
    "deadline": lambda words, _n: Deadline(_number(words[0]), *words[1:]),
    "ssp": lambda words, _n: SSP(_whole(words[0])),
    "asp": lambda words, _n: ASP(*map(_whole, words)),
    "kasync": lambda words, n: KAsync(_count(words[0], n)),
    "zeno": _read_zeno,
    "groups": _read_groups,
    "ring": _read_ring,
    "local": lambda words, _n, *inner: LocalSGD(_whole(words[0]), *inner),
    "dropcompute": lambda words, _n, *inner: DropCompute(_number(words[0]), *inner),
}
_USAGES = {
    "bsp": "bsp",
    "ksync": "ksync:K[:LATE]",
    "deadline": "deadline:SECONDS[:LATE]",
    "ssp": "ssp:BOUND",
    "asp": "asp[:MAX_STALENESS]",
    "kasync": "kasync:X",
    "zeno": "zeno[:RHO[:EPSILON[:MAX_STALENESS]]]",
    "groups": "groups:0-1-2,3",
    "ring": "ring:0-1-3;2>0[:MAX_STALENESS]",
    "local": "local:STEPS[+POLICY]",
    "dropcompute": "dropcompute:SECONDS[+POLICY]",
}
