"""Random numbers by address: turns (seed, stream, row, block) into the same numbers in any order. Pure.

A counter-based generator needs no state: its counter is the address, so block 7 is there without blocks 0 to 6. The
caches below save time and change nothing.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np

BLOCK: Final = 256
"""Numbers per block of `uniform` and `normal`."""

_CACHED_BLOCKS: Final = 1 << 14  # 2 KiB each: enough for a few thousand ranks that walk through their steps together


class Stream(IntEnum):
    """What numbers are drawn for; those of different streams have nothing to do with each other."""

    UNIFORM = 0
    NORMAL = 1
    CLASSES = 2
    TURNS = 3
    SWITCHES = 4
    EPISODES = 5


def generator(seed: int, stream: Stream, row: int = 0, block: int = 0) -> np.random.Generator:
    """Return a fresh generator for one address; different addresses never overlap.

    Args:
        seed: Of the trace, 0..2**64 - 1.
        stream: What the numbers are for.
        row: Usually the rank, >= 0.
        block: Usually a stretch of steps or of time, >= 0.

    Returns:
        A generator with 2**128 numbers of its own.

    Source:
        Philox 4x64-10 (Salmon et al., SC'11), as in numpy: seed and stream are the key, row and block the upper
        half of the counter.

    Example:
        >>> first, again = (generator(1, Stream.NORMAL, 3, 4).random(2) for _ in range(2))
        >>> bool((first == again).all())
        True
    """
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, 0, row, block], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@lru_cache(maxsize=_CACHED_BLOCKS)
def _uniforms(seed: int, row: int, block: int) -> array[float]:
    return array("d", generator(seed, Stream.UNIFORM, row, block).random(BLOCK).tobytes())


@lru_cache(maxsize=_CACHED_BLOCKS)
def _normals(seed: int, row: int, block: int) -> array[float]:
    return array("d", generator(seed, Stream.NORMAL, row, block).standard_normal(BLOCK).tobytes())


def uniform(seed: int, row: int, index: int) -> float:
    """Return number `index` of a row of uniform numbers in [0, 1).

    Example:
        >>> uniform(0, 1, 1000) == uniform(0, 1, 1000) != uniform(0, 2, 1000)
        True
    """
    return _uniforms(seed, row, index // BLOCK)[index % BLOCK]


def normal(seed: int, row: int, index: int) -> float:
    """Return number `index` of a row of standard normal numbers.

    Example:
        >>> abs(sum(normal(0, 1, i) for i in range(1000))) / 1000 < 0.1
        True
    """
    return _normals(seed, row, index // BLOCK)[index % BLOCK]


@lru_cache(maxsize=1 << 10)
def permutation(seed: int, stream: Stream, size: int, block: int = 0) -> tuple[int, ...]:
    """Return 0..size - 1 in an order that depends on the address alone.

    Example:
        >>> sorted(permutation(0, Stream.TURNS, 4)), permutation(0, Stream.TURNS, 4) == permutation(0, Stream.TURNS, 4)
        ([0, 1, 2, 3], True)
    """
    return tuple(generator(seed, stream, size, block).permutation(size).tolist())
