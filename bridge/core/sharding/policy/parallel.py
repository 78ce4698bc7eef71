"""Which parameters are cut over a model axis, and along which dimension: the ``[[parallel]]`` entries of a policy.

A weight ``(6, 4)`` on ``tp = 2``, cut over dimension 0::

    plain        rank 0 has rows 0 1 2, rank 1 has rows 3 4 5
    fused = 2    the rows are two consecutive tensors, gate 0 1 2 and up 3 4 5, each of which is cut:
    (size 8)     gate 0 1 2 3 and up 4 5 6 7: rank 0 has rows 0 1 4 5, rank 1 has rows 2 3 6 7

The dimension that a style cuts depends on how a framework stores weights; each runtime defines it for its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridge.core.sharding.policy.policy_error import PolicyError, at, require
from bridge.core.sharding.policy.unit_policy import is_pattern, matches, near

STYLES = ("colwise", "rowwise", "expert")


@dataclass(frozen=True)
class ParallelPolicy:
    """How the parameters of modules with a matching path are cut over one model axis.

    match: patterns as in ``UnitPolicy``, for modules or single parameters; at least one of them must match. One
        pattern may be given without a tuple.
    axis: a model axis of the mesh.
    style: "colwise" cuts output features, "rowwise" input features, "expert" dimension 0 of every parameter.
    dimension: instead of a style, the dimension to cut, for parameters that have it.
    fused: the cut dimension contains several consecutive tensors, each of which is cut separately: their relative
        sizes, such as (4, 1, 1) for queries, keys and values, or the number of equal tensors. (): one tensor.

    Raises PolicyError naming the field.
    """

    match: tuple[str, ...]
    axis: str
    style: str | None = None
    dimension: int | None = None
    fused: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        listed = [self.match] if isinstance(self.match, str) else self.match
        legal = isinstance(listed, list | tuple) and listed and all(map(is_pattern, listed))
        require(legal, "match", 'dotted paths as in "layers.*.mlp.up"', self.match)
        object.__setattr__(self, "match", tuple(listed))
        require(isinstance(self.axis, str), "axis", "the name of a model axis", self.axis)
        if (self.style is None) == (self.dimension is None):
            description = f"both, style {self.style!r}" if self.style is not None else "none of them"
            raise PolicyError(f"expected style or dimension, got {description}")
        require(self.style in (None, *STYLES), "style", f"one of {', '.join(STYLES)}", self.style)
        legal = self.dimension is None or (type(self.dimension) is int and self.dimension >= 0)
        require(legal, "dimension", "a number >= 0", self.dimension)
        object.__setattr__(self, "fused", _sizes(self.fused))

    def matches(self, path: str) -> bool:
        """Whether one of the patterns matches ``path``."""
        return any(matches(pattern, path) for pattern in self.match)


def _sizes(fused: Any) -> tuple[int, ...]:
    sizes = [1] * fused if type(fused) is int and 2 <= fused <= 1024 else fused
    legal = isinstance(sizes, list | tuple) and all(type(size) is int and size >= 1 for size in sizes)
    require(
        legal and len(sizes) != 1,
        "fused",
        "a number >= 2 of equal tensors, or a list of relative sizes as in [4, 1, 1]",
        fused,
    )
    return tuple(sizes)


def entries_of(
    entries: Sequence[ParallelPolicy], paths: Iterable[str], source: str
) -> dict[str, tuple[ParallelPolicy, ...]]:
    """``ShardingPolicy.parallel_of``; errors begin with ``source``."""
    known = [path for path in dict.fromkeys(paths) if path]
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(entries, 1):
        with at(f"{source}: [[parallel]] {number}: match"):
            matched = [path for path in known if entry.matches(path)]
            if not matched:
                wanted = " or ".join(map(repr, entry.match))
                raise PolicyError(
                    f"expected modules or parameters that {wanted} matches, got none; near: "
                    f"{near(entry.match[0], known)}"
                )
            for path in matched:
                for other in numbers.setdefault(path, []):
                    if entries[other - 1].axis == entry.axis:
                        raise PolicyError(
                            f"expected parameters that no other entry cuts over {entry.axis!r}, got {path!r}, which "
                            f"[[parallel]] {other} cuts"
                        )
                numbers[path].append(number)
    return {path: tuple(entries[number - 1] for number in numbers[path]) for path in known if path in numbers}


@dataclass(frozen=True)
class Cut:
    """A parameter's ``dimension`` cut over the model axis ``axis``; ``fused`` as in ``ParallelPolicy``."""

    axis: str
    dimension: int
    fused: tuple[int, ...] = ()

    def parts(self, size: int) -> tuple[int, ...]:
        """The sizes of the tensors in the dimension of ``size``."""
        total = sum(self.fused)
        return tuple(size * share // total for share in self.fused) if self.fused else (size,)


def check_cuts(name: str, shape: Sequence[int], cuts: Sequence[Cut], sizes: Mapping[str, int]) -> None:
    """PolicyError naming the parameter unless a parameter of ``shape`` can be cut this way, over axes of ``sizes``."""
    axes: set[str] = set()
    taken: dict[int, str] = {}
    for cut in cuts:
        described = f"{name} {tuple(shape)}"
        if cut.axis in axes:
            raise PolicyError(f"{described}: expected one cut over {cut.axis!r}, got several")
        axes.add(cut.axis)
        if not 0 <= cut.dimension < len(shape):
            raise PolicyError(
                f"{described}: expected a parameter with dimension {cut.dimension}, to cut it over {cut.axis!r}, got "
                f"{len(shape)} dimensions"
            )
        other = taken.setdefault(cut.dimension, cut.axis)
        if other != cut.axis:
            raise PolicyError(
                f"{described}: expected one axis that cuts dimension {cut.dimension}, got {other!r} and {cut.axis!r}"
            )
        _check_size(described, shape[cut.dimension], cut, sizes[cut.axis])


def _check_size(described: str, size: int, cut: Cut, ranks: int) -> None:
    if size % (sum(cut.fused) or 1):
        raise PolicyError(
            f"{described}: expected dimension {cut.dimension} to hold tensors of relative sizes {list(cut.fused)}, got "
            f"{size}, which {sum(cut.fused)} does not divide"
        )
    for part in cut.parts(size):
        if part % ranks:
            of = f", {part} of a fused tensor" if cut.fused else ""
            raise PolicyError(
                f"{described}: expected dimension {cut.dimension} to be cut over {cut.axis} = {ranks} in equal parts, "
                f"got {size}{of}, which {ranks} does not divide"
            )


def local_shape(shape: Sequence[int], cuts: Iterable[Cut], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's part of a parameter of ``shape``."""
    local = list(shape)
    for cut in cuts:
        local[cut.dimension] //= sizes[cut.axis]
    return tuple(local)


def local_ranges(size: int, cut: Cut, ranks: int, rank: int) -> list[tuple[int, int]]:
    """Ranges ``[start, stop)`` of the cut dimension of ``size`` on rank ``rank`` of the axis, in order."""
    ranges, start = [], 0
    for part in cut.parts(size):
        ranges.append((start + part // ranks * rank, start + part // ranks * (rank + 1)))
        start += part
    return ranges


def cut_dimension(shape: Sequence[int], shards: int) -> int | None:
    """The largest dimension that ``shards`` divides, the first of equal ones; None if there is none."""
    able = [i for i, size in enumerate(shape) if size and size % shards == 0]
    return max(able, key=lambda i: shape[i], default=None)


FEATURE_STYLES: Final = ("colwise", "rowwise")
"""Styles that cut features, and imply a computation on parts of the features."""
_OF_COLWISE: Final = {"linear": 0, "kernel": 1, "embedding": 1}


def styled_dimension(style: str, kind: str, ndim: int) -> int | None:
    """The dimension that a style cuts of a parameter of ``ndim`` dimensions, by its kind; None if it stays whole.

    "colwise" cuts output features, "rowwise" input features, "expert" dimension 0 of every parameter::

        kind                                                 colwise     rowwise
        linear        of PyTorch: (out, in)                  0           1
        kernel        of JAX: (in, out), (in, heads, d)      1           0
                      (heads, d, out)                                    0
        convolution   of JAX: (..., in, out)                 last        last but one
        embedding     (tokens, features)                     1           0
        bias          and every other vector                 0           whole
    """
    if style == "expert":
        return 0
    if kind == "bias" or ndim < 2:
        return 0 if style == "colwise" else None
    if kind == "convolution":
        return ndim - 1 if style == "colwise" else ndim - 2
    return _OF_COLWISE[kind] if style == "colwise" else 1 - _OF_COLWISE[kind]
