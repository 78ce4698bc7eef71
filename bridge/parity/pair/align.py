"""How a torch array and its JAX twin lie to each other: equal, reshaped, or with their axes in another order.

Values decide between the ways that shapes allow, so that convolutions (NCHW against NHWC) and split heads need no word
from the caller::

    torch [B, T, (h d)]       ->  jax [B, T, h, d]      reshape
    torch [B, C, H, W]        ->  jax [B, H, W, C]      axes (0, 2, 3, 1)
    torch [B, h, T, d]        ->  jax [B, T, (h d)]     axes (0, 2, 1, 3), reshape

The plain way wins unless another one is far nearer: a transposition that a mistake made must not be taken for a layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

_NEARER = 0.5
"""Another way must reduce the distance to this part of the plain way's to be chosen."""
_MOST_AXES = 5


@dataclass(frozen=True)
class Alignment:
    """torch ``[shape]`` -> transpose by ``axes`` -> reshape to ``between`` -> transpose by ``then`` -> jax.

    ``order``: before all that, which element of the last axis comes where; None for the order that they have.
    ``copies``: of equal arrays along torch's first axis, of which JAX has one (positions, for every row of a batch); 0
    for none. ``torch`` is then the shape of one of them.
    """

    torch: tuple[int, ...]
    axes: tuple[int, ...]
    between: tuple[int, ...]
    then: tuple[int, ...]
    order: tuple[int, ...] | None = None
    copies: int = 0

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
        found = moved.transpose(np.argsort(self.axes)) if self.axes else moved
        found = found if self.order is None else found[..., np.argsort(self.order)]
        return np.broadcast_to(found, (self.copies, *found.shape)) if self.copies else found

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


def align(torch: np.ndarray, jax: np.ndarray, order: tuple[int, ...] | None = None) -> Alignment | None:
    """The way from ``torch`` to ``jax``; None where no order of axes leads from one shape to the other.

    ``order``: of the last axis's elements, where it is known (``WeightMap.feature_orders``).
    """
    if torch.size != jax.size:
        return _of_copies(torch, jax)
    if order is not None and torch.ndim and torch.shape[-1] == len(order):
        way = align(torch[..., order], jax)
        return None if way is None else replace(way, order=order)
    ways = list(_ways(torch.shape, jax.shape))
    if len(ways) < 2:
        return ways[0] if ways else None
    plain = ways[0]
    distances = [_distance(way.to_jax(torch), jax) for way in ways]
    if _is_natural(plain) and not min(distances[1:]) <= _NEARER * distances[0]:
        return plain
    return ways[int(np.nanargmin(distances))] if not np.isnan(distances).all() else plain


def _of_copies(torch: np.ndarray, jax: np.ndarray) -> Alignment | None:
    if torch.ndim < 2 or not jax.size or torch.size != torch.shape[0] * jax.size:
        return None
    if not np.array_equal(torch, np.broadcast_to(torch[:1], torch.shape), equal_nan=torch.dtype.kind == "f"):
        return None
    way = align(torch[0], jax)
    return None if way is None else replace(way, copies=torch.shape[0])


def _is_natural(way: Alignment) -> bool:
    # A reshape to another shape of as many axes mixes elements of all of them.
    return not str(way) or (str(way) == "reshape" and len(way.torch) != len(way.between))


def _ways(torch: Sequence[int], jax: Sequence[int]) -> Iterator[Alignment]:
    """The plain ways first."""
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
    torch: Mapping[str, np.ndarray], jax: Mapping[str, np.ndarray], order: tuple[int, ...] | None = None
) -> list[tuple[str, str, Alignment]]:
    """Partners among leaves of two calls: of equal name, else the first that fits, in order.

    Floating leaves go with floating ones, and others with others. Names count from their last part, so ``"0"`` and
    ``"hidden_states"`` are no obstacle. ``order``: see ``align``.
    """
    found: list[tuple[str, str, Alignment]] = []
    left = dict(jax)
    for named in (True, False):
        for name, array in torch.items():
            if any(name == used for used, _, _ in found):
                continue
            for other, twin in left.items():
                if named and name.rpartition(".")[2].lower() != other.rpartition(".")[2].lower():
                    continue
                if _is_floating(array) != _is_floating(twin):
                    continue
                way = align(array, twin, order)
                if way is not None:
                    found.append((name, other, way))
                    del left[other]
                    break
    places = {name: number for number, name in enumerate(torch)}
    return sorted(found, key=lambda one: places[one[0]])


def _is_floating(array: np.ndarray) -> bool:
    return array.dtype.kind not in "iub"
