"""Formulas that modules usually compute, in float64 NumPy, to explain differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

LARGEST = 1 << 22
"""Elements above which nothing is tried: the catalogue costs hundreds of passes, of 32 MB each at this size."""
NEAR = 1e-6
"""Relative floor of the inputs of inner modules: float32 constants leave less."""
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
    """Norms over the last axis with every usual epsilon: RMS or layer norm, epsilon inside or outside the root."""
    rms = np.mean(x * x, -1, keepdims=True)
    mean = np.mean(x, -1, keepdims=True)
    variance = np.mean((x - mean) ** 2, -1, keepdims=True)
    unbiased = variance * (x.shape[-1] / max(x.shape[-1] - 1, 1))
    kinds = (
        ("RMS norm", x, rms),
        ("layer norm", x - mean, variance),
        ("unbiased layer norm", x - mean, unbiased),
    )
    for (name, centred, square), eps in itertools.product(kinds, EPSILONS):
        for where, root in (("", np.sqrt(square + eps)), (" outside of the root", np.sqrt(square) + eps)):
            if where and not eps:
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
                text = f"{name}, epsilon {eps:g}{where}{form}"
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


def rearranged(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """``x`` with its axes or the elements of its last axis in another order."""
    if x.ndim == 2 and x.shape[0] == x.shape[1]:
        yield "transposed", x.T
    for axis, size in enumerate(x.shape):
        for words, order in _orders(size) if size > 1 else ():
            yield words.format(f"along axis {axis}"), np.take(x, order.reshape(-1), axis)


def _orders(size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Orders that ports mix up, each with words: an array of all positions, to be read row by row."""
    every = np.arange(size)
    yield "reversed {}", every[::-1]
    yield "shifted by one {}", np.roll(every, 1)
    yield "shifted by minus one {}", np.roll(every, -1)
    if size % 2 == 0:
        halves, pairs = every.reshape(2, -1), every.reshape(-1, 2)
        yield "halves exchanged {}", halves[::-1]
        yield "halves interleaved {}", halves.T
        yield "pairs taken apart into halves {}", pairs.T
    for count in (2, 3, 4, 6, 8, 12, 16, 32):
        if size % count or size // count < 2:
            continue
        blocks, part = every.reshape(count, -1), size // count
        yield f"{count} heads in reverse order {{}}", blocks[::-1]
        if part % 2 == 0:
            own_halves, own_pairs = blocks.reshape(count, 2, -1), blocks.reshape(count, -1, 2)
            yield f"halves of each of {count} heads interleaved {{}}", own_halves.transpose(0, 2, 1)
            yield f"pairs of each of {count} heads taken apart into halves {{}}", own_pairs.transpose(0, 2, 1)
        yield f"heads ({count}) and their elements exchanged {{}}", blocks.T


@dataclass(frozen=True)
class AttentionFormula:
    """A formula of attention; either side can be right in one field and differ in another.

    ``rotary``: "none", "half" (element j turns with j + n / 2) or "interleaved" (2 j with 2 j + 1). ``angles``: the
    base of the angles, or the name of a table. ``share``: the share of a head's elements that turn, with a base.
    ``later``: positions that keys are ahead. ``turned``: "both", "queries" or "keys". ``direction``: 1 or -1.
    ``scale``, ``cap``: of scores. ``mask``: "none", "causal", "next" (sees one token more), "strict" (not the token
    itself), or the name of a mask. ``window``: tokens that a causal query sees, 0 for all. ``softmax``: over "keys",
    "queries" or "heads". ``groups``: which query heads share a key head: "repeated" neighbours, "tiled" every n-th
    one, "by key head" tiled, with outputs in key-head order. ``split``, ``joined``: "heads" before elements or the
    reverse; ``joined`` also "positions" (heads before positions). ``roles``: which projections are query, key, value.
    """

    rotary: str
    angles: float | str
    scale: float
    mask: str
    window: int = 0
    cap: float = math.inf
    share: float = 1.0
    later: int = 0
    turned: str = "both"
    direction: int = 1
    softmax: str = "keys"
    groups: str = "repeated"
    split: str = "heads"
    joined: str = "heads"
    roles: str = "qkv"


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one side's mixing: float64 ``query [B, T, H, d]``, ``key`` and ``value [B, S, K, d]``, K divides H.

    ``mixed [B, T, H * d]``: the side's result. ``tables``: cosines and sines ``[B or 1, T, n]``, by name; each angle
    turns two elements. ``masks``: ``[B or 1, H or 1, T, S]``, true for visible keys, or added to the scores.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mixed: np.ndarray
    tables: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)


def attention(
    formula: AttentionFormula, inputs: AttentionInputs, rows: slice = slice(None), queries: int | None = None
) -> np.ndarray | None:
    """``[B, T, H * d]`` for these rows and the first queries; None if the formula does not apply to the inputs."""
    parts = {"q": inputs.query, "k": inputs.key, "v": inputs.value}
    q, k, v = (_split(parts[role][rows], formula.split) for role in formula.roles)
    if k.shape != v.shape or q.shape[2] % k.shape[2]:
        return None
    if queries is not None and formula.softmax != "queries" and formula.joined != "positions":
        q = q[:, :queries]
        # A query that sees no key takes the mean of all values.
        if formula.mask in ("causal", "next") and formula.softmax == "keys":
            k, v = k[:, : queries + 1], v[:, : queries + 1]
    turned_q, turned_k = (
        _turned(formula, inputs, rows, x, role) for x, role in ((q, "queries"), (k, "keys"))
    )
    if turned_q is None or turned_k is None:
        return None
    takes, shares = _groups(formula.groups, q.shape[2], k.shape[2])
    q, k, v = turned_q[:, :, takes], turned_k[:, :, shares], v[:, :, shares]
    scores = np.einsum("bthd,bshd->bhts", q, k, optimize=True) * formula.scale
    if math.isfinite(formula.cap):
        scores = formula.cap * np.tanh(scores / formula.cap)
    seen = _mask(formula, inputs, rows, *scores.shape[2:])
    if seen is None:
        return None
    # Not -inf: a row that sees no key would be NaN. With both frameworks' masks it is a mean of all values.
    scores = np.where(seen, scores, -1e30) if seen.dtype == bool else scores + seen
    axis = {"heads": 1, "queries": 2, "keys": 3}[formula.softmax]
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    weights /= weights.sum(axis, keepdims=True)
    mixed = np.einsum("bhts,bshd->bthd", weights, v, optimize=True)
    axes = {"heads": (0, 1, 2, 3), "elements": (0, 1, 3, 2), "positions": (0, 2, 1, 3)}[formula.joined]
    return mixed.transpose(axes).reshape(*mixed.shape[:2], -1)[:, :queries]


def _split(x: np.ndarray, order: str) -> np.ndarray:
    if order == "heads":
        return x
    rows, length, heads, size = x.shape
    return x.reshape(rows, length, size, heads).swapaxes(2, 3)


def _groups(sharing: str, heads: int, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """For each output head, its query head and its key head."""
    every = np.arange(heads)
    if sharing == "tiled":
        return every, every % shared
    if sharing == "by key head":
        return every.reshape(-1, shared).T.reshape(-1), every // (heads // shared)
    return every, every // (heads // shared)


def _turned(
    formula: AttentionFormula, inputs: AttentionInputs, rows: slice, x: np.ndarray, role: str
) -> np.ndarray | None:
    if formula.rotary == "none" or formula.turned not in ("both", role):
        return x
    length, size = x.shape[1], x.shape[3]
    later = formula.later if role == "keys" else 0
    if isinstance(formula.angles, str):
        if formula.angles not in inputs.tables:
            return None
        cos, sin = inputs.tables[formula.angles]
        if cos.shape[1] < length or 2 * cos.shape[2] > size or len(cos) not in (1, len(inputs.query)):
            return None
        cos, sin = (
            np.roll(table, -later, 1)[rows if len(table) > 1 else slice(None)] for table in (cos, sin)
        )
        cos, sin = cos[:, :length], sin[:, :length]
    else:
        turns = int(size * formula.share) // 2
        if not turns:
            return None
        angles = (np.arange(length)[:, None] + later) * formula.angles ** (-np.arange(turns) / turns)
        cos, sin = np.cos(angles)[None], np.sin(angles)[None]
    turns = cos.shape[2]
    cos, sin = cos[:, :, None], sin[:, :, None] * formula.direction
    first, second = (
        (slice(0, turns), slice(turns, 2 * turns))
        if formula.rotary == "half"
        else (slice(0, 2 * turns, 2), slice(1, 2 * turns, 2))
    )
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def _mask(
    formula: AttentionFormula, inputs: AttentionInputs, rows: slice, queries: int, keys: int
) -> np.ndarray | None:
    if formula.mask in inputs.masks:
        mask = inputs.masks[formula.mask]
        if len(mask) not in (1, len(inputs.query)) or mask.shape[1] not in (1, inputs.query.shape[2]):
            return None
        mask = mask[rows if len(mask) > 1 else slice(None), :, :queries]
        return mask if mask.shape[2] in (1, queries) and mask.shape[3] == keys else None
    if formula.mask not in MASKS:
        return None
    distance = np.arange(queries)[:, None] - np.arange(keys)
    seen = distance >= MASKS[formula.mask]
    return seen & (distance < formula.window) if formula.window else seen


MASKS = {"none": -math.inf, "causal": 0, "next": -1, "strict": 1}
"""Minimum distance from a query back to a key that it sees."""


def base_of(cos: np.ndarray, sin: np.ndarray) -> float | None:
    """The base of tables ``[T, n]`` that begin at any position; None if the tables have no single base."""
    if min(cos.shape) < 2:
        return None
    angles = np.arctan2(sin, cos)
    steps = (angles[1] - angles[0]) % (2 * math.pi)
    turns = cos.shape[1]
    # The first pair turns by one radian per position, whatever the base.
    if not steps[-1] > 0 or abs(steps[0] - 1) > 1e-4:
        return None
    base = float(steps[-1] ** (-turns / (turns - 1)))
    expected = base ** (-np.arange(turns) / turns)
    if not math.isfinite(base) or float(np.max(np.abs(steps / expected - 1))) > 1e-4:
        return None
    return next(
        # float32 tables do not hold the last digits of the base: the roundest number near it is the
        # base that was meant.
        rounded
        for digits in range(1, 9)
        if abs((rounded := float(f"{base:.{digits}g}")) / base - 1) < 1e-4
    )
