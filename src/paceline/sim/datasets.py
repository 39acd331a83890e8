"""Data to train on: turns installed packages and Python's own library into arrays. The one place that reads files.

Every loader gives the same data each time it is called and keeps it, so that many runs share one copy.
"""

from __future__ import annotations

import functools
import importlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

VOCABULARY = "\n !\"#$%&'()*+,-./0123456789:;<=>?@[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"
CONTEXT = 32
_DIGITS_TEST = 797
_MNIST1D_TRAIN, _MNIST1D_TEST = 8000, 2000
_TRAIN_MODULES = ("argparse", "doctest", "inspect", "pydoc", "tarfile")
_TEST_MODULES = ("calendar", "codecs", "difflib", "gettext", "heapq", "textwrap")


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples to train on and to test with.

    Args:
        train_inputs: One row per sample.
        train_targets: The right classes, one row per sample.
        test_inputs, test_targets: The same for the test.
    """

    train_inputs: NDArray[np.generic]
    train_targets: NDArray[np.int64]
    test_inputs: NDArray[np.generic]
    test_targets: NDArray[np.int64]


@functools.cache
def digits() -> Dataset:
    """Return scikit-learn's handwritten digits: 8 x 8 pixels in 0..1, 1,000 to train and 797 to test.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    pixels, targets = _required("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(targets))
    pixels = (pixels[order] / 16.0).astype(np.float32)
    targets = targets[order].astype(np.int64)
    return Dataset(pixels[_DIGITS_TEST:], targets[_DIGITS_TEST:], pixels[:_DIGITS_TEST], targets[:_DIGITS_TEST])


@functools.cache
def mnist1d() -> Dataset:
    """Return MNIST-1D: signals of 40 points in ten classes, 8,000 to train and 2,000 to test, made on the spot.

    Making them takes some seconds, once per process. The package seeds the global generators of numpy and Python;
    numpy's is put back as it was.

    Raises:
        ConfigError: mnist1d is not installed.

    Source:
        Greydanus & Kobak 2024, "Scaling Down Deep Learning with MNIST-1D"; its own generator at its own seed. Ours
        differs: twice as many samples, so that models overfit less and accuracy is less noisy.
    """
    package = _required("mnist1d.data", "mnist1d")
    arguments = package.get_dataset_args()
    arguments.num_samples = _MNIST1D_TRAIN + _MNIST1D_TEST
    arguments.train_split = _MNIST1D_TRAIN / arguments.num_samples
    before = np.random.get_state()
    try:
        made = package.make_dataset(arguments)
    finally:
        np.random.set_state(before)
    return Dataset(
        made["x"].astype(np.float32),
        made["y"].astype(np.int64),
        made["x_test"].astype(np.float32),
        made["y_test"].astype(np.int64),
    )


@functools.cache
def library_text() -> Dataset:
    """Return the text of modules of Python's own library, in windows of 33 characters: 32 to see, the next to tell.

    Lower case, runs of blanks as one; characters outside `VOCABULARY` become blanks. The test windows come from other
    modules than the training ones. Texts differ a little between versions of Python, and so do accuracies.

    Raises:
        ConfigError: the library's sources are not installed.
    """
    train, test = _windows(_TRAIN_MODULES, step=1), _windows(_TEST_MODULES, step=25)
    return Dataset(*(np.ascontiguousarray(part) for w in (train, test) for part in (w[:, :-1], w[:, 1:])))


def _windows(modules: tuple[str, ...], step: int) -> NDArray[np.int64]:
    """Every `step`-th window of the modules' text as numbers of characters, shape (windows, CONTEXT + 1)."""
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in modules)
    except OSError as error:
        raise ConfigError(f"the chars task needs the sources of Python's library in {folder}: {error}") from error
    codes = np.full(256, VOCABULARY.index(" "))
    codes[np.frombuffer(VOCABULARY.encode("ascii"), np.uint8)] = np.arange(len(VOCABULARY))
    plain = re.sub(" +", " ", text.lower()).encode("ascii", errors="replace")
    numbers = codes[np.frombuffer(plain, np.uint8)]
    starts = np.arange(0, len(numbers) - CONTEXT, CONTEXT)[::step]
    windows: NDArray[np.int64] = numbers[starts[:, None] + np.arange(CONTEXT + 1)]
    return windows


def _required(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this task's data needs the package {package}: pip install 'paceline[sim]'") from error
