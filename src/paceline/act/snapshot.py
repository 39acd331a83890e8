"""Snapshots: turns the state of all servers at one version into files, and the newest complete set back into state."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError

_KEPT = 2


class Snapshots:
    """The snapshots in one directory that all servers share.

    A snapshot is a directory `v<version>` with a file of each server's; it counts once the chief has written
    `chief.json` into it, which it does when all servers have said that theirs is there.

    Args:
        directory: Where; made if it is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        if self._directory.exists() and not self._directory.is_dir():
            raise ConfigError(f"snapshot_dir must be a directory, got the file {self._directory}")
        self._directory.mkdir(parents=True, exist_ok=True)

    def save(self, version: int, server: int, state: dict[str, Any]) -> None:
        """Write one server's state of this version."""
        place = self._directory / f"v{version}"
        place.mkdir(exist_ok=True)
        temporary = place / f"server{server}.part"
        torch.save(state, temporary)
        os.replace(temporary, place / f"server{server}.pt")

    def complete(self, version: int, chief: dict[str, Any]) -> None:
        """All servers have saved this version: from now on it counts. Older ones than the one before it are deleted."""
        temporary = self._directory / f"v{version}" / "chief.part"
        temporary.write_text(json.dumps(chief), encoding="utf-8")
        os.replace(temporary, self._directory / f"v{version}" / "chief.json")
        versions = self._versions()
        for old in [*versions[:-_KEPT], *(v for v in self._all() if v < version and v not in versions)]:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._directory / f"v{old}")

    def newest(self) -> int | None:
        """The newest version of which there is a complete snapshot; None where there is none."""
        versions = self._versions()
        return versions[-1] if versions else None

    def load(self, version: int, server: int) -> dict[str, Any]:
        """One server's state of this version.

        Raises:
            ConfigError: the snapshot was made with fewer servers.
        """
        path = self._directory / f"v{version}" / f"server{server}.pt"
        if not path.is_file():
            raise ConfigError(f"the snapshot of version {version} has nothing for server {server}: {path} is missing")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state

    def load_chief(self, version: int) -> dict[str, Any]:
        """The chief's state of this version."""
        path = self._directory / f"v{version}" / "chief.json"
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return state

    def _all(self) -> list[int]:
        return sorted(int(path.name[1:]) for path in self._directory.glob("v*") if path.name[1:].isdigit())

    def _versions(self) -> list[int]:
        return [v for v in self._all() if (self._directory / f"v{v}" / "chief.json").is_file()]
