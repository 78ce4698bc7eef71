"""Ways in which tensors of one shape can contain the elements of tensors of another, found from shapes alone.

    [320, 331] and [331, 8, 40]              (h d) m  =  m h d
    24 times [320, 331] and [24, 331, 320]   n m      =  {i} m n
    [1766, 331] and twice [331, 883]         (gate + up) m  =  m gate  and  m up

Axes of one shape are merged in their stored order. Other orders are not tried. Everything else that fits is found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridge.propose.names import INDEX_NAMES, Family

Product = tuple[str, ...]
Dim = tuple[Product, ...]
"""One axis of a tensor: consecutive parts, each a product of elementary axes, the slowest first."""

_MAX_RANK = 6
_MAX_FITS = 64


@dataclass(frozen=True)
class Entry:
    """A family and its axes; None if both sides store the same. ``path``: the path with the indices of the rule."""

    family: Family
    path: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Fit:
    """Families of ``a`` that contain the elements of families of ``b``; one of the two is a single family.

    sizes: of each elementary axis, path indices included. turned: pairs of axes whose order is reversed in ``b``.
    """

    a: tuple[Entry, ...]
    b: tuple[Entry, ...]
    sizes: Mapping[str, int] = field(hash=False)
    turned: int

    @property
    def plain(self) -> bool:
        """Whether nothing moves inside the tensors, so that no axis expressions are needed."""
        if len(self.a) > 1 or len(self.b) > 1:
            return False
        left, right = self.a[0], self.b[0]
        return left.dims == right.dims and all(len(dim[0]) == 1 or not dim[0] for dim in left.dims)

    @property
    def conventional(self) -> bool:
        """Whether a torch weight [out, in, *window] is a flax kernel [*window, in, out], each of which may be several
        axes; or an array of one axis, or of torch's or flax's alone, lies as it is."""
        whole, parts = (self.a[0], self.b) if len(self.a) == 1 else (self.b[0], self.a)
        kernels = {entry.family.leaf == "kernel" for entry in parts}
        turned = (whole.family.leaf == "kernel") not in kernels
        for number, part in enumerate(parts):
            dims = [dim[number if len(dim) > 1 else 0] for dim in whole.dims]
            others = [dim[0] for dim in part.dims]
            torch, flax = (others, dims) if whole.family.leaf == "kernel" else (dims, others)
            wanted = [*torch[2:], *torch[1:2], *torch[:1]] if turned and len(torch) > 1 else torch
            order, twin = (itertools.chain.from_iterable(products) for products in (wanted, flax))
            if [x for x in order if x not in INDEX_NAMES] != [x for x in twin if x not in INDEX_NAMES]:
                return False
        return True

    def swapped(self) -> Fit:
        return replace(self, a=self.b, b=self.a)


def fits(a: Family, b: Family) -> list[Fit]:
    """Every way in which two families can contain the same elements; at most 64."""
    if len(a.numbers) < len(b.numbers):
        return [fit.swapped() for fit in fits(b, a)]
    return list(itertools.islice(_fits(a, b), _MAX_FITS))


def fused_fits(whole: Family, parts: Sequence[Family]) -> list[Fit]:
    """Every way in which ``whole`` can be the concatenation of ``parts``, in this order, along one axis; at most 64."""
    return list(itertools.islice(_fused_fits(whole, parts), _MAX_FITS))


def _fits(a: Family, b: Family) -> Iterator[Fit]:
    if not a.complete or not b.complete:
        return
    for renamed, stacked in _pair_indices(a, b):
        free = list(range(len(b.shape)))
        for places in itertools.permutations(free, len(stacked)):
            counts = [len(a.numbers[INDEX_NAMES.index(name)]) for name in stacked]
            if any(b.shape[position] != count for position, count in zip(places, counts, strict=True)):
                continue
            rest = [axis for axis in free if axis not in places]
            for left, right, sizes in align(a.shape, [b.shape[axis] for axis in rest]):
                dims: dict[int, Dim] = dict(zip(rest, right, strict=True))
                dims |= {position: ((name,),) for position, name in zip(places, stacked, strict=True)}
                sizes |= {name: len(numbers) for name, numbers in zip(INDEX_NAMES, a.numbers, strict=False)}
                yield Fit(
                    (Entry(a, a.path, left),),
                    (Entry(b, _renamed(b.path, renamed), tuple(dims[axis] for axis in free)),),
                    sizes,
                    _turns(left, right),
                )


def _fused_fits(whole: Family, parts: Sequence[Family]) -> Iterator[Fit]:
    for axis in range(len(whole.shape)):
        others = math.prod(whole.shape[:axis] + whole.shape[axis + 1 :])
        for stacking in _part_fits(whole, parts, axis, others):
            # All axes except the fused one are the same in all parts.
            first = stacking[0]
            beside = first.a[0].dims[:axis] + first.a[0].dims[axis + 1 :]
            names = [_match_axes(first, fit, axis) for fit in stacking]
            if any(name is None for name in names):
                continue
            sizes = dict(first.sizes)
            fused: list[Product] = []
            entries = []
            for number, (fit, name) in enumerate(zip(stacking, names, strict=True)):
                assert name is not None
                own = {x: f"{x}p{number}" for x in fit.a[0].dims[axis][0]}
                table = {**name, **own}
                fused.append(tuple(own[x] for x in fit.a[0].dims[axis][0]))
                sizes |= {table.get(x, x): n for x, n in fit.sizes.items()}
                entry = fit.b[0]
                renamed = (tuple(tuple(table.get(x, x) for x in part) for part in dim) for dim in entry.dims)
                entries.append(replace(entry, dims=tuple(renamed)))
            used = {x for entry in entries for dim in entry.dims for part in dim for x in part}
            used |= set(INDEX_NAMES)
            dims = (*beside[:axis], tuple(fused), *beside[axis:])
            yield Fit(
                (replace(first.a[0], family=whole, dims=dims),),
                tuple(entries),
                {x: n for x, n in sizes.items() if x in used},
                sum(fit.turned for fit in stacking),
            )


def _part_fits(whole: Family, parts: Sequence[Family], axis: int, others: int) -> Iterator[tuple[Fit, ...]]:
    """For each part, how it can be a slab of ``whole`` along ``axis``; all choices together."""
    slabs = []
    total = 0
    for part in parts:
        elements = math.prod(part.shape) * len(part.members)
        size, rest = divmod(elements, max(others, 1) * len(whole.members))
        total += size
        if rest or not size:
            return
        shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
        slabs.append([fit for fit in _fits_of_shape(whole, shape, part) if fit.a[0].dims[axis][0]])
    if total == whole.shape[axis]:
        yield from itertools.product(*slabs)


def _fits_of_shape(whole: Family, shape: tuple[int, ...], part: Family) -> list[Fit]:
    members = {numbers: replace(info, shape=shape, chunks=()) for numbers, info in whole.members.items()}
    slab = replace(whole, members=members)
    if len(slab.numbers) < len(part.numbers):
        return []
    return list(itertools.islice(_fits(slab, part), _MAX_FITS))


def _match_axes(first: Fit, fit: Fit, axis: int) -> dict[str, str] | None:
    """Another part's axes except the fused one, by their names in the first part; None if they are cut differently."""
    table: dict[str, str] = {}
    for number, (own, other) in enumerate(zip(fit.a[0].dims, first.a[0].dims, strict=True)):
        if number == axis:
            continue
        if len(own[0]) != len(other[0]):
            return None
        for x, y in zip(own[0], other[0], strict=True):
            if fit.sizes[x] != first.sizes[y]:
                return None
            table[x] = y
    return table


def _pair_indices(a: Family, b: Family) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Ways to identify b's indices with indices of a, and the remaining indices of a, which are axes of b."""
    names_a, names_b = INDEX_NAMES[: len(a.numbers)], INDEX_NAMES[: len(b.numbers)]
    for chosen in itertools.permutations(range(len(names_a)), len(names_b)):
        if any(a.numbers[k] != b.numbers[n] for n, k in enumerate(chosen)):
            continue
        # The order of identical indices does not matter.
        single = [(b.numbers[n], k) for n, k in enumerate(chosen) if len(b.numbers[n]) == 1]
        if any(x == y and j > k for (x, j), (y, k) in itertools.combinations(single, 2)):
            continue
        left = [k for k in range(len(names_a)) if k not in chosen]
        if any(a.numbers[k] != tuple(range(len(a.numbers[k]))) for k in left):
            continue
        twins = {name: names_a[k] for name, k in zip(names_b, chosen, strict=True)}
        yield twins, tuple(names_a[k] for k in left)


def align(
    a: Sequence[int], b: Sequence[int]
) -> Iterator[tuple[tuple[Dim, ...], tuple[Dim, ...], dict[str, int]]]:
    """Ways to merge axes of the longer shape, in their order, into the other shape's axes, at any position there.

    Yields the axes of ``a``, the axes of ``b`` and the size of each elementary axis; axes of size 1 have no name.
    """
    if len(a) > len(b):
        yield from ((left, right, sizes) for right, left, sizes in align(b, a))
        return
    if len(b) > _MAX_RANK or math.prod(a) != math.prod(b):
        return
    names = {axis: f"x{axis}" for axis, size in enumerate(b) if size != 1}
    sizes = {names[axis]: b[axis] for axis in names}
    for owners in itertools.product(range(len(a)), repeat=len(names)):
        groups: list[Product] = [()] * len(a)
        for axis, owner in zip(names, owners, strict=True):
            groups[owner] += (names[axis],)
        if all(math.prod(sizes[x] for x in group) == n for group, n in zip(groups, a, strict=True)):
            right = tuple(((names[axis],),) if axis in names else ((),) for axis in range(len(b)))
            yield tuple((group,) for group in groups), right, dict(sizes)


def _turns(a: Sequence[Dim], b: Sequence[Dim]) -> int:
    order = {x: number for number, dim in enumerate(a) for part in dim for x in part}
    there = [order[x] for dim in b for part in dim for x in part]
    return sum(left > right for left, right in itertools.combinations(there, 2))


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        path = path.replace(old, f"<{new[1:-1]}>")
    return path.replace("<", "{").replace(">", "}")
