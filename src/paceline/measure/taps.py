"""Taps into torch where it offers no hook: turns backward passes and loader fetches into calls on listeners.

Two functions are replaced while at least one listener is there, and put back when the last one leaves:
`torch.autograd.backward` (which `Tensor.backward` calls by attribute, so both spellings pass through) and
`__next__` of DataLoader's iterators. There is no other way to see where the backward pass begins and ends, or when
the training thread waits for data, without changing the user's loop. Arguments and results pass through untouched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter


class Listener(Protocol):
    """What a tap tells; called on the training thread."""

    def before_backward(self) -> None:
        """The autograd engine is about to run."""

    def after_backward(self, error: BaseException | None) -> None:
        """It has run, or failed with `error`; may raise a clearer error in its place."""

    def before_fetch(self) -> None:
        """The loop asks a DataLoader for the next batch."""

    def after_fetch(self) -> None:
        """The batch is there, or the loader is exhausted."""

    def begin_expected(self, name: str) -> None:
        """A stretch begins that must not count as slowness."""

    def end_expected(self) -> None:
        """The stretch ends."""


_listeners: list[Listener] = []
_originals: dict[str, Callable[..., Any]] = {}


def add_listener(listener: Listener) -> None:
    """Start telling `listener`."""
    if not _listeners:
        _install()
    _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Stop telling `listener`; harmless when it is not there."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            _uninstall()


@contextlib.contextmanager
def expected_slow(name: str) -> Iterator[None]:
    """Mark a stretch of the loop that is slow on purpose: a checkpoint, an evaluation on one rank.

    Its time is reported as `expected`, counts for no verdict and drives no decision.

    Args:
        name: What is done, for the run log.

    Example:
        >>> with expected_slow("checkpoint"):
        ...     pass
    """
    listeners = list(_listeners)
    for listener in listeners:
        listener.begin_expected(name)
    try:
        yield
    finally:
        for listener in listeners:
            listener.end_expected()


def _install() -> None:
    backward = torch.autograd.backward
    fetch = _BaseDataLoaderIter.__next__
    _originals.update(backward=backward, fetch=fetch)

    @functools.wraps(backward)
    def tapped_backward(*args: Any, **kwargs: Any) -> None:
        for listener in _listeners:
            listener.before_backward()
        error: BaseException | None = None
        try:
            backward(*args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            for listener in _listeners:
                listener.after_backward(error)

    @functools.wraps(fetch)
    def tapped_fetch(self: Any) -> Any:
        for listener in _listeners:
            listener.before_fetch()
        try:
            return fetch(self)
        finally:
            for listener in _listeners:
                listener.after_fetch()

    torch.autograd.backward = tapped_backward
    _BaseDataLoaderIter.__next__ = tapped_fetch  # type: ignore[method-assign]


def _uninstall() -> None:
    torch.autograd.backward = _originals.pop("backward")
    _BaseDataLoaderIter.__next__ = _originals.pop("fetch")  # type: ignore[method-assign]
