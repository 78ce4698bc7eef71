"""The relation between a torch array and its JAX twin: equal, reshaped, or with their axes in another order.

Convolutions (NCHW and NHWC) and split heads need no hint from the caller::

    torch [B, T, (h d)]       ->  jax [B, T, h, d]      reshape
    torch [B, C, H, W]        ->  jax [B, H, W, C]      axes (0, 2, 3, 1)
    torch [B, h, T, d]        ->  jax [B, T, (h d)]     axes (0, 2, 1, 3), reshape

Shapes allow one way, or several ways if sizes are equal (square images, as many heads as tokens). Then values decide,
if one way leaves less than half of the distance of every other way. If the arrays differ in another respect, no way
stands out, and noise must not choose: then the ways of other arrays decide (``known``), and after them the usual order.
A way has a ``doubt`` if only the usual order chose it, or if values chose it against that order: it may be a mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

_NEARER = 0.5
"""A way must reduce the distance to this fraction of every other way's before values may decide."""
_FEW = 16
"""Below this many elements, some noise is twice as near by chance: they must be equal up to a fraction ``_EXACT``."""
_EXACT = 1e-2
_MOST_AXES = 5
"""Six axes have 720 orders, and each order costs a pass over the array."""

DOUBTS = "values alone chose", "layout not certain"
"""The possible beginnings of a ``doubt``."""
Moves = tuple[tuple[int, ...], tuple[int, ...]]
"""Orders of axes, for any sizes: ``Alignment.axes`` and ``Alignment.then``."""
CHANNELS_LAST: tuple[Moves, ...] = tuple(
    ((0, *range(2, axes), 1), tuple(range(axes))) for axes in range(3, _MOST_AXES + 1)
)


@dataclass(frozen=True)
class Alignment:
    """torch ``[shape]`` -> transpose by ``axes`` -> reshape to ``between`` -> transpose by ``then`` -> jax.

    ``order``: applied first, the source of each element of the last axis; None for the existing order.
    ``copies``: the number of equal arrays along torch's first axis, of which JAX has one (positions, for every row of a
    batch); 0 for none. ``torch`` is then the shape of one of them.

    ``certain``: shapes, values or other arrays chose the way. ``doubt``: a caveat about the choice for the reader.
    """

    torch: tuple[int, ...]
    axes: tuple[int, ...]
    between: tuple[int, ...]
    then: tuple[int, ...]
    order: tuple[int, ...] | None = None
    copies: int = 0
    certain: bool = field(default=True, compare=False)
    doubt: str = field(default="", compare=False)

    @property
    def moves(self) -> Moves:
        return self.axes, self.then

    def to_jax(self, array: np.ndarray) -> np.ndarray:
        """A torch array in the layout of its JAX twin."""
        if self.copies:
            array = array[0]
        if self.order is not None:
            array = array[..., self.order]
        return array.transpose(self.axes).reshape(self.between).transpose(self.then)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """A JAX array in the layout of its torch twin."""
        middle = array.transpose(np.argsort(self.then)) if self.then else array
        moved = middle.reshape(tuple(self.torch[axis] for axis in self.axes))
        laid_out = moved.transpose(np.argsort(self.axes)) if self.axes else moved
        laid_out = laid_out if self.order is None else laid_out[..., np.argsort(self.order)]
        return np.broadcast_to(laid_out, (self.copies, *laid_out.shape)) if self.copies else laid_out

    def __str__(self) -> str:
        steps = [f"one of {self.copies} copies"] if self.copies else []
        if self.order is not None:
            steps.append("features reordered")
        if self.axes != tuple(range(len(self.axes))):
            steps.append(f"axes {self.axes}")
        if self.between != tuple(self.torch[axis] for axis in self.axes):
            steps.append("reshape")
        if self.then != tuple(range(len(self.then))):
            steps.append(f"axes {self.then}")
        return ", ".join(steps)


def align(
    torch: np.ndarray, jax: np.ndarray, order: tuple[int, ...] | None = None, known: Sequence[Moves] = ()
) -> Alignment | None:
    """The way from ``torch`` to ``jax``; None if no order of axes leads from one shape to the other.

    ``order``: of the last axis's elements, if known (``WeightMap.feature_orders``). ``known``: the ways of other
    arrays, the nearest relatives first.
    """
    if torch.size != jax.size:
        return _of_copies(torch, jax)
    if order is not None and torch.ndim and torch.shape[-1] == len(order):
        way = align(torch[..., order], jax, None, known)
        return None if way is None else replace(way, order=order)
    plain, *others = _ways(torch.shape, jax.shape)
    ways = sorted((way for way in (plain, *others) if _keeps_axes(way)), key=_unusual)
    if len(ways) < 2:
        return ways[0] if ways else plain
    usual = ways[0]
    distances = [_distance(way.to_jax(torch), jax) for way in ways]
    least = float(np.nanmin(distances)) if not np.isnan(distances).all() else math.nan
    # Ways with the same distance up to the order of the sum count as one answer, whichever comes first.
    nearest = [way for way, far in zip(ways, distances, strict=True) if far <= least * (1 + 1e-12)]
    rest = [far for far in distances if far > least * (1 + 1e-12)]
    exact = least <= _EXACT * float(np.linalg.norm(jax.astype(np.float64).ravel()))
    # Otherwise noise would choose layouts of images that a fault changed, and blame convolutions for it.
    if nearest and rest and least <= _NEARER * min(rest) and (exact or torch.size >= _FEW):
        chosen = _first_known(nearest, known) or nearest[0]
        if chosen is usual or chosen.moves in known:
            return chosen
        words = f"{DOUBTS[0]} {_words(chosen)}, where shapes allow {_words(usual)}"
        return replace(chosen, doubt=f"{words}: if this is not intended, the models differ here")
    told = _first_known(ways, known)
    if told is not None or not rest:
        return told or usual
    doubt = f"{DOUBTS[1]}: {_words(usual)} taken, {_words(ways[1])} also possible"
    return replace(usual, certain=False, doubt=doubt)


def other_ways(way: Alignment, jax: Sequence[int], known: Sequence[Moves]) -> list[Alignment]:
    """All ways that shapes allow except ``way``: the ``known`` ones first, then the usual ones."""
    if way.copies:
        return []
    ways = sorted((other for other in _ways(way.torch, jax) if _keeps_axes(other)), key=_unusual)
    ranked = [other for moves in known for other in ways if other.moves == moves] + ways
    return [replace(other, order=way.order) for other in dict.fromkeys(ranked) if other.moves != way.moves]


def _first_known(ways: Sequence[Alignment], known: Sequence[Moves]) -> Alignment | None:
    return next((way for moves in known for way in ways if way.moves == moves), None)


def _words(way: Alignment) -> str:
    return str(way) or "the same axes"


def _unusual(way: Alignment) -> tuple[bool, int]:
    """A sort key: unusual ways are larger, first ways that move the batch rows, then ways that swap more axes."""
    orders = [order for order in (way.axes, way.then) if order]
    exchanged = sum(a > b for order in orders for a, b in itertools.combinations(order, 2))
    return any(order[0] for order in orders), exchanged


def _keeps_axes(way: Alignment) -> bool:
    """Whether the reshape joins or divides whole axes. Any other reshape mixes elements: a mistake, not a layout."""
    before = [size for size in (way.torch[axis] for axis in way.axes) if size != 1]
    after = [size for size in way.between if size != 1]
    many, few = (before, after) if len(before) >= len(after) else (after, before)
    rest = iter(many)
    for size in few:
        joined = 1
        while joined < size:
            joined *= next(rest, size + 1)
        if joined != size:
            return False
    return next(rest, None) is None


def _of_copies(torch: np.ndarray, jax: np.ndarray) -> Alignment | None:
    if torch.ndim < 2 or not jax.size or torch.size != torch.shape[0] * jax.size:
        return None
    if not np.array_equal(torch, np.broadcast_to(torch[:1], torch.shape), equal_nan=torch.dtype.kind == "f"):
        return None
    way = align(torch[0], jax)
    return None if way is None else replace(way, copies=torch.shape[0])


def _ways(torch: Sequence[int], jax: Sequence[int]) -> Iterator[Alignment]:
    """All ways, the plain ones first."""
    same, other = tuple(range(len(torch))), tuple(range(len(jax)))
    yield Alignment(tuple(torch), same, tuple(jax), other)
    if max(len(torch), len(jax)) > _MOST_AXES or 0 in torch:
        return
    for axes in itertools.permutations(same):
        moved = tuple(torch[axis] for axis in axes)
        if axes != same and (moved == tuple(jax) or len(torch) > len(jax)):
            yield Alignment(tuple(torch), axes, tuple(jax), other)
    if len(jax) > len(torch):
        for then in itertools.permutations(other):
            if then != other:
                between = tuple(jax[axis] for axis in np.argsort(then))
                yield Alignment(tuple(torch), same, between, then)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        difference = a.astype(np.float64) - b.astype(np.float64)
    return float(np.sqrt(np.nansum(difference * difference)))


def match_leaves(
    torch: Mapping[str, np.ndarray],
    jax: Mapping[str, np.ndarray],
    order: tuple[int, ...] | None = None,
    known: Sequence[Moves] = (),
) -> list[tuple[str, str, Alignment]]:
    """Partners among the leaves of two calls: leaves of equal name, otherwise the first that fits, in order.

    Floating leaves match floating leaves, and others match others. Names count from their last part, so ``"0"`` and
    ``"hidden_states"`` can be partners. ``order``, ``known``: see ``align``.
    """
    matched: list[tuple[str, str, Alignment]] = []
    left = dict(jax)
    for named in (True, False):
        for name, array in torch.items():
            if any(name == used for used, _, _ in matched):
                continue
            for other, twin in left.items():
                if named and name.rpartition(".")[2].lower() != other.rpartition(".")[2].lower():
                    continue
                if _is_floating(array) != _is_floating(twin):
                    continue
                way = align(array, twin, order, known)
                if way is not None:
                    matched.append((name, other, way))
                    del left[other]
                    break
    places = {name: number for number, name in enumerate(torch)}
    return sorted(matched, key=lambda match: places[match[0]])


def _is_floating(array: np.ndarray) -> bool:
    return array.dtype.kind not in "iub"
