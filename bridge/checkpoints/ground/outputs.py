"""Dtypes of outputs: casts by name, what a format supports, kinds of leaves, and the dtype of a comparison."""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np

from bridge.core.dtype_names import full_name, hint
from bridge.core.formats.safetensors.header import DTYPE_NAMES
from bridge.core.formats.tensors.base import (
    DTYPES,
    ORBAX_DTYPES,
    Box,
    CheckpointError,
    CheckpointReader,
    TreePath,
    drop_options,
    is_whole,
    unreadable,
)
from bridge.core.formats.tensors.leaves import implied_kinds, key_implementation, kinds_of
from bridge.core.formats.whole.quantized import DECODE, DECODE_ELSEWHERE, quantized
from bridge.core.mapping.language.conventions import path_of_scales
from bridge.core.mapping.language.operations import ChangedView, as_dtype
from bridge.core.mapping.language.relation import TensorView
from bridge.core.mapping.one_rule.scales import DecodedView
from bridge.core.mapping.plan.plan import PlannedTensor
from bridge.core.text import first_of

_KINDS = (
    dict.fromkeys("fV", "floating-point") | dict.fromkeys("iu", "integer") | {"c": "complex", "b": "boolean"}
)

_COUNTS = ("step", "count")
_OF_WEIGHTS = ("_scale_inv", "_scale")
_UNSCALED = ("float32", "float64", "bfloat16")
"""Dtypes with enough range for moments without scales."""

# Shared by all outputs: counting is rare, and there may be 20,000 outputs.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Output:
    """A tensor as it will be written: a planned tensor, cast or not.

    A cast rounds to nearest, ties to even. `overflowed` counts finite elements that became infinite, or
    NaN in dtypes without infinity.
    """

    planned: PlannedTensor
    dtype: np.dtype
    _counts: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def path(self) -> TreePath:
        return self.planned.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.planned.shape

    @property
    def rounds(self) -> bool:
        """Whether the cast may round."""
        return not np.can_cast(self.planned.dtype, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, as written."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.planned.dtype

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of its source tensors; none if its value follows from the plan."""
        return self.planned.sources

    @property
    def overflowed(self) -> int:
        return sum(self._counts)

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of `box` as they will be written."""
        array = self.planned.read(reader, box)
        if not self.is_cast:
            return array
        result = as_dtype(array, self.dtype)
        lost = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(result)))
        if lost:
            with _LOCK:
                self._counts.append(lost)
        return result


def parse_casts(options: Iterable[str]) -> dict[str, np.dtype]:
    """`PATTERN=DTYPE` texts as a table, such as "model.*=bfloat16" or "*=bf16". CheckpointError for anything else."""
    casts: dict[str, np.dtype] = {}
    for option in options:
        pattern, equals, name = option.rpartition("=")
        if not (pattern and equals and name):
            raise CheckpointError(
                f"expected a cast PATTERN=DTYPE such as 'model.*=bfloat16', got {option[:80]!r}"
            )
        # For a repeated pattern, the last position counts.
        casts.pop(pattern, None)
        dtype = full_name(name, DTYPES)
        if dtype not in DTYPES:
            floating = ", ".join(
                known for known, known_dtype in DTYPES.items() if kind_of(known_dtype) == "floating-point"
            )
            raise CheckpointError(
                f"cast {option[:80]!r}: expected a floating-point dtype ({floating}; bf16, fp16, fp32, fp64 and the "
                f"like mean the same) or a complex one, got {name[:80]!r}{hint(name, DTYPES)}"
            )
        casts[pattern] = DTYPES[dtype]
    return casts


def apply_casts(tensors: Iterable[PlannedTensor], casts: Mapping[str, np.dtype]) -> dict[str, Output]:
    """The tensors with the dtype of the last pattern that matches their name in the destination.

    Only floating-point tensors are cast to floating point, and complex tensors to complex: a pattern leaves other
    matching tensors unchanged. A pattern like "*" also leaves step counts unchanged, which bfloat16 would round from
    257 on: only a pattern that ends in their name ("*.step") casts them. Moments with scales are decoded, and then have
    no scales; scales alone are never cast. CheckpointError for a pattern without a tensor to cast, for a dtype of
    moments that would need other scales, and for weights of 8 bits or less with scales, which a cast would ignore.
    """
    by_path = {tensor.path: tensor for tensor in tensors}
    if not casts:
        return {tensor.name: Output(tensor, tensor.dtype) for tensor in by_path.values()}
    scales = {
        moment.name: scale
        for moment in by_path.values()
        if (path := path_of_scales(moment.path)) is not None and (scale := by_path.get(path)) is not None
    }
    are_scales = {scale.name for scale in scales.values()}
    names = {tensor.name for tensor in by_path.values()}
    outputs = {}
    used: dict[str, bool] = dict.fromkeys(casts, False)
    for tensor in by_path.values():
        dtype = tensor.dtype
        for pattern, wanted in casts.items():
            if _can_cast(tensor.dtype, wanted) and _means(pattern, tensor) and tensor.name not in are_scales:
                dtype, used[pattern] = wanted, True
        if dtype != tensor.dtype and tensor.dtype.itemsize == 1 and tensor.name not in scales:
            _require_no_scales(tensor.name, names)
        scale = scales.get(tensor.name) if dtype != tensor.dtype else None
        outputs[tensor.name] = Output(tensor if scale is None else _decoded(tensor, scale, dtype), dtype)
    for moment, scale in scales.items():
        if outputs[moment].planned is not by_path[outputs[moment].path]:
            del outputs[scale.name]
    for pattern, wanted in casts.items():
        if not used[pattern]:
            dtypes = sorted({t.planned.dtype.name for t in outputs.values() if fnmatchcase(t.name, pattern)})
            such = ", ".join(list(outputs)[:3])
            if any(fnmatchcase(name, pattern) for name in are_scales):
                dtypes.append("scales of moments, which stay as they are")
            got = f"dtypes {', '.join(dtypes)}" if dtypes else f"no tensor of {len(outputs)}, such as {such}"
            raise CheckpointError(
                f"cast {pattern}={wanted.name}: expected floating-point tensors (complex ones to a complex dtype) with "
                f"a name of this form, got {got}"
            )
    return outputs


def _require_no_scales(weight: str, names: Container[str]) -> None:
    scales = next((weight + end for end in _OF_WEIGHTS if weight + end in names), None)
    if scales is not None:
        _, _, readable = quantized([scales.replace("/", ".")]) or ("", "", False)
        raise CheckpointError(
            f"cast of {weight}, which has scales in {scales}: expected numbers, got quantized values, which mean "
            f"numbers only with their scales: {DECODE if readable else DECODE_ELSEWHERE}, or leave them out of the "
            "cast"
        )


def _decoded(moment: PlannedTensor, scale: PlannedTensor, dtype: np.dtype) -> PlannedTensor:
    if dtype.name not in _UNSCALED:
        raise CheckpointError(
            f"cast of {moment.name}, which has scales in {scale.name}: expected one of {', '.join(_UNSCALED)}, "
            f"got {dtype.name}, which needs its own scales: the optimizer computes them, with load_checkpoint(..., "
            'moments="convert")'
        )
    assert isinstance(moment.content, TensorView | ChangedView)
    assert isinstance(scale.content, TensorView | ChangedView)
    return PlannedTensor(moment.name, moment.path, DecodedView(moment.content, scale.content))


def _means(pattern: str, tensor: PlannedTensor) -> bool:
    last = re.split("[./]", tensor.name)[-1]
    counts = tensor.shape == () and last in _COUNTS
    return fnmatchcase(tensor.name, pattern) and (not counts or re.split("[./]", pattern)[-1] == last)


def _can_cast(dtype: np.dtype, wanted: np.dtype) -> bool:
    return kind_of(dtype) == kind_of(wanted) and kind_of(wanted) in ("floating-point", "complex")


def kind_of(dtype: np.dtype) -> str:
    """ "floating-point", "complex", "integer" or "boolean"."""
    return "integer" if dtype.kind == "V" and is_whole(dtype) else _KINDS[dtype.kind]


_KNOWN: Mapping[str, frozenset[str]] = {
    "dcp": frozenset(DTYPES),
    "orbax": frozenset(ORBAX_DTYPES),
    "safetensors": frozenset(DTYPE_NAMES.values()),
}


def require_readable(reader: CheckpointReader, names: Iterable[str]) -> None:
    """Refuse tensors that cannot be read, all in one CheckpointError."""
    reasons = unreadable(reader)
    if not reasons:
        return
    closed = {name: reasons[name] for name in names if name in reasons}
    if closed:
        raise CheckpointError(
            f"{reader.path}: expected tensors that can be read, found {some_with_reasons(closed)}: leave them out "
            f"({drop_options([*closed])})"
        )


def require_dtypes(reader: CheckpointReader, outputs: Iterable[Output], target: str) -> None:
    """Refuse tensors that cannot be read, and dtypes that the format ``target`` does not have. CheckpointError."""
    outputs = list(outputs)
    require_readable(reader, (name for output in outputs for name in output.sources))
    # There are few dtypes, and NumPy builds a dtype's name anew at each access.
    unknown = {dtype for dtype in {output.dtype for output in outputs} if dtype.name not in _KNOWN[target]}
    if unknown:
        lacking = {o.name: o.dtype.name for o in outputs if o.dtype in unknown}
        sources = [name for output in outputs if output.name in lacking for name in output.sources]
        able = [format for format, known in _KNOWN.items() if known >= set(lacking.values())]
        other = f", or write another format (--to {' or '.join(able)})" if able else ""
        raise CheckpointError(
            f"{reader.path}: expected dtypes that {target} has, found {some_with_reasons(lacking)}: leave these "
            f"tensors out ({drop_options(sources)}){other}"
        )


def some_with_reasons(reasons: Mapping[str, str]) -> str:
    """The first of these names, each with its reason, and how many more there are."""
    return first_of([f"{name!r:.200} ({why})" for name, why in reasons.items()])


def carried_kinds(
    reader: CheckpointReader,
    outputs: Iterable[Output],
    objects: Mapping[str, tuple[TreePath, object]],
    origins: Mapping[str, str],
) -> dict[str, str]:
    """The kinds to declare to a conversion's writer, by name in the destination: all except implied ones.

    outputs, objects: of the destination. origins: the names in the source of the objects that exist there.

    CheckpointError if elements of a typed PRNG key would be rearranged: that would be another key.
    """
    known = kinds_of(reader)
    outputs = tuple(outputs)
    # In most checkpoints no tensor has a kind.
    noted = outputs if known else ()
    told = {
        output.name: leaf_kind
        for output in noted
        if (leaf_kind := _kind(reader, output.planned, known)) is not None
    }
    implied = implied_kinds((output.path for output in outputs), dict(objects.values()))
    for name, old in origins.items():
        leaf_kind, path = known.get(old), objects[name][0]
        if leaf_kind is not None and implied.get(path) != leaf_kind:
            told[name] = leaf_kind
    return told


def _kind(reader: CheckpointReader, tensor: PlannedTensor, known: Mapping[str, str]) -> str | None:
    sources = tensor.sources
    whole = tensor.unchanged and reader.tensors[sources[0]].shape == tensor.shape
    if whole:
        return known.get(sources[0])
    for name in sources:
        if key_implementation(known.get(name)) is not None:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r}: expected a mapping that leaves typed PRNG keys as they are, got one "
                f"that rearranges the data of {known[name]}: change its rule, or leave the tensor out (--drop "
                f"{name!r}) and make the keys anew"
            )
    return None


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype | None:
    """The dtype in which to compare two dtypes: the narrower floating-point type, to which the other is rounded.

    For integers, the type that holds the values of both, since no value may change. None if neither floating-point type
    holds all values of the other (float16 and bfloat16), and for types of different kinds.
    """
    if a == b:
        return a
    if is_whole(a) and is_whole(b):
        # NumPy promotes none of ml_dtypes' integers, which take one byte each.
        joint = np.promote_types(*(dtype if dtype.kind in "biu" else np.int8 for dtype in (a, b)))
        return joint if joint.kind in "biu" else None
    if a.kind == b.kind == "c":
        return min(a, b, key=lambda dtype: dtype.itemsize)
    if any(is_whole(dtype) or dtype.kind == "c" for dtype in (a, b)):
        return None
    return next((n for n, w in ((a, b), (b, a)) if _holds(w, n)), None)


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    return bool(w.nmant >= n.nmant and w.maxexp >= n.maxexp and w.minexp <= n.minexp)
