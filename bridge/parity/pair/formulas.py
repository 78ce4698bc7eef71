"""Formulas that modules usually compute, in float64 NumPy: what a difference is tried against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

EPSILONS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + _ERF(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu (exact)": gelu,
    "gelu (tanh)": gelu_tanh,
    "quick gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "squared relu": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "no activation": lambda x: x,
}


def norms(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Norms over the last axis, by every usual epsilon: RMS or layer norm, epsilon inside or outside of the root."""
    rms = np.mean(x * x, -1, keepdims=True)
    mean = np.mean(x, -1, keepdims=True)
    variance = np.mean((x - mean) ** 2, -1, keepdims=True)
    unbiased = variance * (x.shape[-1] / max(x.shape[-1] - 1, 1))
    kinds = (
        ("RMS norm", x, rms),
        ("layer norm", x - mean, variance),
        ("unbiased layer norm", x - mean, unbiased),
    )
    for (kind, centred, square), eps in itertools.product(kinds, EPSILONS):
        for place, root in (("", np.sqrt(square + eps)), (" outside of the root", np.sqrt(square) + eps)):
            if place and not eps:
                continue
            with np.errstate(all="ignore"):
                plain = centred / root
            for form, factor in (
                ("", weight),
                (", times 1 + weight", None if weight is None else 1 + weight),
            ):
                if form and factor is None:
                    continue
                scaled = plain if factor is None else plain * factor
                text = f"{kind}, epsilon {eps:g}{place}{form}"
                yield text, scaled if bias is None else scaled + bias
                if bias is not None:
                    yield f"{text}, without the bias", scaled


def activated(first: np.ndarray, second: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """Activations of the first projection, with and without the second one as a gate's partner."""
    for name, function in ACTIVATIONS.items():
        if second is None:
            yield name, function(first)
        else:
            yield f"{name} of the first projection times the second", function(first) * second
            yield f"{name} of the second projection times the first", function(second) * first


def rearranged(x: np.ndarray, heads: int | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """``x`` with its axes or the elements of its last axis in another order."""
    if x.ndim == 2 and x.shape[0] == x.shape[1]:
        yield "transposed", x.T
    for axis in range(x.ndim):
        size = x.shape[axis]
        if size > 1:
            where = f"along axis {axis}"
            yield f"reversed {where}", np.flip(x, axis)
            yield f"shifted by one {where}", np.roll(x, 1, axis)
            yield f"shifted by minus one {where}", np.roll(x, -1, axis)
            if size % 2 == 0:
                halves = np.arange(size).reshape(2, -1)
                yield f"halves exchanged {where}", np.take(x, halves[::-1].reshape(-1), axis)
                yield f"halves interleaved {where}", np.take(x, halves.T.reshape(-1), axis)
                pairs = np.arange(size).reshape(-1, 2)
                yield f"pairs taken apart into halves {where}", np.take(x, pairs.T.reshape(-1), axis)
            for count in _divisors(size) if heads is None else (heads,):
                if size % count == 0 and size // count > 1:
                    blocks = np.arange(size).reshape(count, -1)
                    part = size // count
                    yield (
                        f"{count} heads in reverse order {where}",
                        np.take(x, blocks[::-1].reshape(-1), axis),
                    )
                    if part % 2 == 0:
                        inner = blocks.reshape(count, 2, part // 2)
                        yield (
                            f"halves of each of {count} heads interleaved {where}",
                            np.take(x, inner.transpose(0, 2, 1).reshape(-1), axis),
                        )
                        inner = blocks.reshape(count, part // 2, 2)
                        yield (
                            f"pairs of each of {count} heads taken apart into halves {where}",
                            np.take(x, inner.transpose(0, 2, 1).reshape(-1), axis),
                        )
                    yield (
                        f"heads ({count}) and their elements exchanged {where}",
                        np.take(x, blocks.T.reshape(-1), axis),
                    )


def _divisors(size: int) -> list[int]:
    return [n for n in (2, 3, 4, 6, 8, 12, 16, 32) if n < size and size % n == 0]
