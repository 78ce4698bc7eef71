"""The result of comparing two checkpoints: for each tensor, and for the whole checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.checkpoints.compare.ulp import Difference, Tolerance
from bridge.core.text import counted
from bridge.core.views import Viewed


@dataclass(frozen=True)
class TensorDiff:
    """One tensor that both checkpoints have with the same shape; ``name`` as in ``b``.

    dtype: the dtype of the comparison, which both have unless they were compared ``rounded``. dtype_a, dtype_b: as
    stored. relative: norm of the difference over the norm of ``a``, in float64, over all elements that are not NaN in
    either; infinite against zeros, and if a norm is not finite. Norms are Euclidean, over all elements. within: whether
    the tensor passes as a whole, see `Tolerance`. noise: the norm of the difference over the norm of ``b`` minus the
    noise checkpoint; None without one and for integers.

    percentiles, histogram: of the elements' relative differences, see `Spread`; pairs with a NaN do not count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: Difference
    dtype_a: str
    dtype_b: str
    relative: float
    within: bool = True
    noise: float | None = None
    percentiles: Mapping[str, float] = field(default_factory=dict)
    histogram: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class DiffReport(Viewed):
    """The comparison of two checkpoints; all names are those of ``b``.

    missing: tensors only in ``a``. extra: only in ``b``. mismatched: (name, what differs) if shape or dtype differs.
    objects: (name, value in a, value in b) of values other than tensors that differ; lists and tuples are alike, other
    types are not. unreadable: (name, why) if a value is not plain data in one of them. objects_missing, objects_extra:
    names of values only in ``a`` or only in ``b``; they do not count as differences. structure: (name, what differs) if
    the trees differ in None, empty containers and texts that are leaves of only one, and in lists that are dicts in the
    other; not compared through a mapping. noise: the noise checkpoint, if there was one. left_alone: by path, why files
    next to either checkpoint that look like weights were not compared; they do not count as differences.

    Its truth value is `same`; `within` is another name for `same`, for comparisons with a tolerance.
    """

    a: Path | str
    b: Path | str
    tolerance: Tolerance
    tensors: tuple[TensorDiff, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mismatched: tuple[tuple[str, str], ...]
    objects: tuple[tuple[str, object, object], ...]
    unreadable: tuple[tuple[str, str], ...]
    objects_missing: tuple[str, ...]
    objects_extra: tuple[str, ...]
    structure: tuple[tuple[str, str], ...] = ()
    noise: Path | str | None = None
    left_alone: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """The verdict, and how many differences there are of each kind."""
        counts = {
            "beyond the tolerance": [tensor for tensor in self.tensors if not tensor.within],
            "only in a": self.missing,
            "only in b": self.extra,
            "of another shape or dtype": self.mismatched,
            "other values": (*self.objects, *self.unreadable, *self.structure),
        }
        listed = [f"{len(names)} {what}" for what, names in counts.items() if names]
        verdict = f"{'same' if self.same else 'different'}: {counted(len(self.tensors), 'tensor')} compared"
        return ", ".join([verdict, f"{self.total.max_ulp} ULP apart at most", *listed])

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each of the ``offenders``."""
        rows = [
            (
                one.name,
                one.dtype,
                "yes" if one.within else "no",
                str(one.difference.max_ulp),
                f"{one.relative:.2e}",
            )
            for one in self.offenders
        ]
        return [("tensor", "dtype", "within", "max ULP", "error"), *rows]

    @property
    def total(self) -> Difference:
        """All compared tensors together."""
        elements = sum([tensor.difference.elements for tensor in self.tensors])
        # Tensors without a difference add only elements, and an addition makes an object.
        differing = (tensor.difference for tensor in self.tensors if tensor.difference.differing)
        return replace(sum(differing, Difference()), elements=elements)

    @property
    def max_ulp(self) -> float:
        """The largest distance in any tensor; 0 only if both contain the same, to the bit.

        Infinite if something has no distance: a name that only one has, another shape, dtype or tree, another value.
        `total` has the largest distance in the compared tensors only.
        """
        return math.inf if self._apart else self.total.max_ulp

    @property
    def same(self) -> bool:
        """Whether both have the same tensors in the same tree, all within the tolerance, and common objects agree."""
        return all(tensor.within for tensor in self.tensors) and not self._apart

    within = same

    def __bool__(self) -> bool:
        return self.same

    @property
    def _apart(self) -> bool:
        return any((self.missing, self.extra, self.mismatched, self.objects, self.unreadable, self.structure))

    @property
    def offenders(self) -> tuple[TensorDiff, ...]:
        """Tensors that differ: those beyond the tolerance first, then those with NaNs, then by relative error."""
        differing = [tensor for tensor in self.tensors if tensor.difference.differing]
        return tuple(sorted(differing, key=_severity, reverse=True))


def _severity(tensor: TensorDiff) -> tuple[bool, bool, float, int]:
    difference = tensor.difference
    return not tensor.within, bool(difference.nan), tensor.relative, difference.max_ulp
