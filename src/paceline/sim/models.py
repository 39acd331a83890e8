"""Small models in plain numpy: turns a flat vector of parameters and a batch into the gradient of the mean loss. Pure.

Written by hand because that is what thousands of simulated runs need: an update of a few samples costs a few dozen
small array operations, and an autograd tape costs several times as much. Every gradient is tested against torch's.

Parameters and gradients are flat float32 vectors; a model looks at them through views of its layers' shapes. Matrices
have shape (inputs, outputs), so that a layer is `x @ W`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Array = NDArray[Any]
Labels = NDArray[np.int64]
Shape = tuple[int, ...]

_TEST_BATCH = 128  # samples tested at a time: their intermediate values stay in the cache


class Model(Protocol):
    """Something to train by gradients: maps inputs to a distribution over classes."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the parameters, in the order in which they lie in the flat vector."""
        ...

    def initial(self, seed: int) -> Vector:
        """Return the parameters that training begins with, the same for the same seed."""
        ...

    def gradient(self, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> Vector:
        """Return the gradient of the mean cross-entropy over the batch.

        Args:
            parameters: Shape (num_parameters,).
            inputs: One row per sample.
            targets: The right class, one row per sample.

        Returns:
            Shape (num_parameters,).
        """
        ...

    def logits(self, parameters: Vector, inputs: NDArray[Any]) -> Array:
        """Return the unnormalised log-probabilities; the last axis is the class."""
        ...


def num_parameters(model: Model) -> int:
    """Return the length of a model's flat vector.

    Example:
        >>> num_parameters(MLP(64, 32, 10))
        2410
    """
    return sum(math.prod(shape) for shape in model.shapes)


def accuracy(model: Model, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> float:
    """Return the share of targets to which the model gives the largest probability, 0..1."""
    hits = 0
    for start in range(0, len(inputs), _TEST_BATCH):
        part = slice(start, start + _TEST_BATCH)
        hits += int(np.count_nonzero(model.logits(parameters, inputs[part]).argmax(-1) == targets[part]))
    return hits / targets.size


@dataclass(frozen=True, slots=True)
class MLP:
    """Two fully connected layers with a ReLU between them.

    Args:
        num_inputs: Features per sample.
        num_hidden: Width.
        num_classes: Classes.
    """

    num_inputs: int
    num_hidden: int
    num_classes: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Weights and biases of both layers."""
        hidden, classes = self.num_hidden, self.num_classes
        return (self.num_inputs, hidden), (hidden,), (hidden, classes), (classes,)

    def initial(self, seed: int) -> Vector:
        """Return He-normal weights and zero biases."""
        return _he_normal(self.shapes, seed)

    def gradient(self, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> Vector:
        """Return the gradient of the mean cross-entropy; inputs (samples, num_inputs)."""
        w1, b1, w2, b2 = _views(parameters, self.shapes)
        hidden = _relu(inputs @ w1 + b1)
        by_logits = _cross_entropy_gradient(hidden @ w2 + b2, targets)
        by_hidden = by_logits @ w2.T
        by_hidden *= hidden > 0
        gradient = np.empty_like(parameters)
        _fill(gradient, self.shapes, (inputs.T @ by_hidden, by_hidden.sum(0), hidden.T @ by_logits, by_logits.sum(0)))
        return gradient

    def logits(self, parameters: Vector, inputs: NDArray[Any]) -> Array:
        """Return (samples, classes)."""
        w1, b1, w2, b2 = _views(parameters, self.shapes)
        logits: Array = _relu(inputs @ w1 + b1) @ w2 + b2
        return logits


@dataclass(frozen=True, slots=True)
class CNN1d:
    """Convolutions of stride 2 over a signal, each with a ReLU, then one fully connected layer.

    Args:
        length: Of the signal; one channel.
        channels: Of each convolution.
        kernels: Width of each, odd; zero padding of half of it on both sides.
        num_classes: Classes.
    """

    length: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    num_classes: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Kernel (width * channels in, channels out) and bias of each convolution, then of the last layer."""
        shapes: list[Shape] = []
        length, before = self.length, 1
        for kernel, channels in zip(self.kernels, self.channels, strict=True):
            shapes += [(kernel * before, channels), (channels,)]
            length, before = (length + 1) // 2, channels
        return (*shapes, (length * before, self.num_classes), (self.num_classes,))

    def initial(self, seed: int) -> Vector:
        """Return He-normal weights and zero biases."""
        return _he_normal(self.shapes, seed)

    def gradient(self, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> Vector:
        """Return the gradient of the mean cross-entropy; inputs (samples, length)."""
        weights = _views(parameters, self.shapes)
        columns, outputs = self._forward(weights, inputs)
        num_samples = len(inputs)
        flat = outputs[-1].reshape(num_samples, -1)
        by_logits = _cross_entropy_gradient(flat @ weights[-2] + weights[-1], targets)
        parts = [by_logits.sum(0), flat.T @ by_logits]
        by_output = (by_logits @ weights[-2].T).reshape(outputs[-1].shape)
        for layer in reversed(range(len(self.kernels))):
            by_output *= outputs[layer] > 0
            rows = by_output.reshape(-1, self.channels[layer])
            parts += [rows.sum(0), columns[layer].T @ rows]
            if layer > 0:
                by_columns = rows @ weights[2 * layer].T
                by_output = _fold(by_columns, outputs[layer - 1].shape, self.kernels[layer])
        gradient = np.empty_like(parameters)
        _fill(gradient, self.shapes, parts[::-1])
        return gradient

    def logits(self, parameters: Vector, inputs: NDArray[Any]) -> Array:
        """Return (samples, classes)."""
        weights = _views(parameters, self.shapes)
        _, outputs = self._forward(weights, inputs)
        logits: Array = outputs[-1].reshape(len(inputs), -1) @ weights[-2] + weights[-1]
        return logits

    def _forward(self, weights: Sequence[Array], inputs: NDArray[Any]) -> tuple[list[Array], list[Array]]:
        """Columns (samples * positions, width * channels in) and outputs (samples, positions, channels) by layer."""
        columns: list[Array] = []
        outputs: list[Array] = []
        signal = inputs[:, :, None]
        for layer, kernel in enumerate(self.kernels):
            unfolded = _unfold(signal, kernel)
            columns.append(unfolded.reshape(-1, unfolded.shape[2]))
            signal = _relu(columns[-1] @ weights[2 * layer] + weights[2 * layer + 1])
            signal = signal.reshape(len(inputs), unfolded.shape[1], -1)
            outputs.append(signal)
        return columns, outputs


@dataclass(frozen=True, slots=True)
class CharTransformer:
    """A decoder: predicts each next character of a sequence from those before it.

    Pre-norm blocks of causal attention and a ReLU layer, RMS norms without gains, no biases. Order comes from a penalty
    on the distance that attention looks over, a different one for each head, so that it need not be learned.

    Args:
        vocabulary: Characters.
        context: Characters per sequence.
        width: Features per character, a multiple of `num_heads`.
        num_layers: Blocks.
        num_heads: Of the attention.
        num_hidden: Width of the ReLU layer.
    """

    vocabulary: int
    context: int
    width: int
    num_layers: int
    num_heads: int
    num_hidden: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Characters; by block query-key-value, its projection and both ReLU matrices; the read-out."""
        d = self.width
        block = ((d, 3 * d), (d, d), (d, self.num_hidden), (self.num_hidden, d))
        return (self.vocabulary, d), *(block * self.num_layers), (d, self.vocabulary)

    def initial(self, seed: int) -> Vector:
        """Return normal weights of variance 1 / inputs; what is added to the residual stream starts smaller."""
        rng = np.random.default_rng(seed)
        residual = 1.0 / math.sqrt(2 * self.num_layers)
        parts = []
        for i, shape in enumerate(self.shapes):
            if i == 0:
                scale = 0.5
            elif i == len(self.shapes) - 1:
                scale = 0.5 / math.sqrt(shape[0])
            else:
                scale = (1.0 if i % 2 else residual) / math.sqrt(shape[0])
            parts.append(rng.standard_normal(math.prod(shape)) * scale)
        return np.concatenate(parts).astype(np.float32)

    def gradient(self, parameters: Vector, inputs: NDArray[Any], targets: Labels) -> Vector:
        """Return the gradient of the cross-entropy, mean over characters; inputs and targets (samples, context)."""
        weights = _views(parameters, self.shapes)
        kept = []
        stream = self._embed(weights, inputs)
        for block in range(self.num_layers):
            kept.append(self._forward(weights[1 + 4 * block :], stream))
            stream = kept[-1][-1]
        normed, scale = _rms_norm(stream)
        by_logits = _cross_entropy_gradient(normed @ weights[-1], targets.reshape(-1))
        parts = [normed.T @ by_logits]
        by_stream = _rms_norm_gradient(by_logits @ weights[-1].T, normed, scale)
        for block in reversed(range(self.num_layers)):
            by_stream, by_weights = self._backward(weights[1 + 4 * block :], kept[block], by_stream)
            parts += by_weights[::-1]
        one_hot = np.eye(self.vocabulary, dtype=np.float32)[inputs.reshape(-1)]
        parts.append(one_hot.T @ by_stream)
        gradient = np.empty_like(parameters)
        _fill(gradient, self.shapes, parts[::-1])
        return gradient

    def logits(self, parameters: Vector, inputs: NDArray[Any]) -> Array:
        """Return (samples, context, vocabulary)."""
        weights = _views(parameters, self.shapes)
        stream = self._embed(weights, inputs)
        for block in range(self.num_layers):
            stream = self._forward(weights[1 + 4 * block :], stream)[-1]
        logits: Array = (_rms_norm(stream)[0] @ weights[-1]).reshape(*inputs.shape, -1)
        return logits

    def _embed(self, weights: Sequence[Array], inputs: NDArray[Any]) -> Array:
        """The residual stream (samples * context, width) at the start."""
        embedded: Array = weights[0][inputs]
        return embedded.reshape(-1, self.width)

    def _forward(self, block: Sequence[Array], stream: Array) -> tuple[Array, ...]:
        """One block: all that its backward needs, and last its output."""
        by_head = (-1, self.context, 3, self.num_heads, self.width // self.num_heads)
        normed, scale = _rms_norm(stream)
        query, key, value = (normed @ block[0]).reshape(by_head).transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2)
        scores *= 1.0 / math.sqrt(by_head[-1])
        scores += _look_back(self.num_heads, self.context)
        attention = _softmax(scores)
        mixed = (attention @ value).swapaxes(1, 2).reshape(stream.shape)
        middle = stream + mixed @ block[1]
        normed2, scale2 = _rms_norm(middle)
        hidden = _relu(normed2 @ block[2])
        output = middle + hidden @ block[3]
        return normed, scale, query, key, value, attention, mixed, normed2, scale2, hidden, output

    def _backward(self, block: Sequence[Array], kept: tuple[Array, ...], by_stream: Array) -> tuple[Array, list[Array]]:
        """The gradient by the block's input, and by its four matrices."""
        normed, scale, query, key, value, attention, mixed, normed2, scale2, hidden, _ = kept
        by_hidden = by_stream @ block[3].T
        by_hidden *= hidden > 0
        by_w2, by_w1 = hidden.T @ by_stream, normed2.T @ by_hidden
        by_stream = by_stream + _rms_norm_gradient(by_hidden @ block[2].T, normed2, scale2)
        by_projection = mixed.T @ by_stream
        by_head = (-1, self.context, self.num_heads, query.shape[-1])
        by_mixed = (by_stream @ block[1].T).reshape(by_head).swapaxes(1, 2)
        by_scores = by_mixed @ value.swapaxes(-1, -2)
        by_scores -= np.einsum("...ij,...ij->...i", by_scores, attention)[..., None]
        by_scores *= attention
        by_scores *= 1.0 / math.sqrt(by_head[-1])
        by_qkv = np.empty((len(query), self.context, 3, *by_head[2:]), np.float32).transpose(2, 0, 3, 1, 4)
        by_qkv[0] = by_scores @ key
        by_qkv[1] = by_scores.swapaxes(-1, -2) @ query
        by_qkv[2] = attention.swapaxes(-1, -2) @ by_mixed
        rows = by_qkv.transpose(1, 3, 0, 2, 4).reshape(len(normed), -1)
        by_input = by_stream + _rms_norm_gradient(rows @ block[0].T, normed, scale)
        return by_input, [normed.T @ rows, by_projection, by_w1, by_w2]


def _views(flat: Vector, shapes: tuple[Shape, ...]) -> list[Array]:
    """The layers' parameters as views of the flat vector."""
    views, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        views.append(flat[start:stop].reshape(shape))
        start = stop
    return views


def _fill(flat: Vector, shapes: tuple[Shape, ...], parts: Sequence[Array]) -> None:
    for view, part in zip(_views(flat, shapes), parts, strict=True):
        view[...] = part


def _he_normal(shapes: tuple[Shape, ...], seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    parts = [
        rng.standard_normal(math.prod(shape)) * math.sqrt(2.0 / shape[0]) if len(shape) == 2 else np.zeros(shape)
        for shape in shapes
    ]
    return np.concatenate(parts).astype(np.float32)


def _relu(values: Array) -> Array:
    """max(0, x), in place: callers pass what they have just computed."""
    return np.maximum(values, 0, out=values)


def _softmax(values: Array) -> Array:
    """Softmax over the last axis, in place."""
    values -= values.max(-1, keepdims=True)
    np.exp(values, out=values)
    values /= values.sum(-1, keepdims=True)
    return values


def _cross_entropy_gradient(logits: Array, targets: Labels) -> Array:
    """(softmax - one-hot) / number of targets, in place; shape (targets, classes)."""
    _softmax(logits)
    logits[np.arange(len(targets)), targets] -= 1.0
    logits *= 1.0 / len(targets)
    return logits


def _rms_norm(rows: Array) -> tuple[Array, Array]:
    """Rows divided by the root of their mean square, and the factor by row."""
    mean_sq = np.einsum("ij,ij->i", rows, rows) / rows.shape[1]
    scale = (1.0 / np.sqrt(mean_sq + 1e-6))[:, None]
    return rows * scale, scale


def _rms_norm_gradient(by_output: Array, normed: Array, scale: Array) -> Array:
    """By the rows: scale * (g - y mean(g y)), where y is the output."""
    mean = np.einsum("ij,ij->i", by_output, normed) / normed.shape[1]
    result: Array = scale * (by_output - normed * mean[:, None])
    return result


def _unfold(signal: Array, kernel: int) -> Array:
    """Windows of the padded signal at stride 2: (samples, positions, kernel * channels), copied."""
    num_samples, length, channels = signal.shape
    half = kernel // 2
    padded = np.zeros((num_samples, length + 2 * half, channels), np.float32)
    padded[:, half : half + length] = signal
    step = padded.strides
    shape = (num_samples, (length + 1) // 2, kernel * channels)
    windows = np.lib.stride_tricks.as_strided(padded, shape, (step[0], 2 * step[1], step[2]), writeable=False)
    return np.ascontiguousarray(windows)


def _fold(columns: Array, shape: Shape, kernel: int) -> Array:
    """The adjoint of `_unfold`: sums what every position was copied to; returns (samples, length, channels)."""
    num_samples, length, channels = shape
    half, positions = kernel // 2, (length + 1) // 2
    windows = columns.reshape(num_samples, positions, kernel, channels)
    padded = np.zeros((num_samples, length + 2 * half, channels), np.float32)
    for offset in range(kernel):
        padded[:, offset : offset + 2 * positions : 2][:, :positions] += windows[:, :, offset]
    return padded[:, half : half + length]


@functools.cache
def _look_back(num_heads: int, context: int) -> Array:
    """What attention adds to its scores, shape (heads, context, context): minus slope * distance; never ahead."""
    distance = np.arange(context)[:, None] - np.arange(context)
    slopes = 4.0 ** -np.arange(num_heads)[:, None, None]
    return np.where(distance < 0, -1e9, -slopes * distance).astype(np.float32)
