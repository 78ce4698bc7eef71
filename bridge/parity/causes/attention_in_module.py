"""An attention inside a module: what its own code gets on each side, and what it returns.

The outputs of the projections are query, key and value, separate or in one array. The attention mixes them into the
input of the last projection, or into the module's output. ``attention.py`` then looks for the two formulas.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bridge.parity.causes.attention import attention_cause
from bridge.parity.causes.formulas import LARGEST, NEAR, AttentionInputs
from bridge.parity.partners.runs import CallPair, Children
from bridge.parity.recorded.distance import fits
from bridge.parity.recorded.recording import Leaves

_ROLE = re.compile(r"(?:^|_|w)(q|k|v)(?:uery|ey|alue)?s?(?:$|_)")
"""Parts of module names: which order of three projections is tried first."""
_SIZES = (64, 128, 96, 32, 80, 256, 16, 8)
"""Head sizes of attentions, if neither an array nor a module gives one; tried before other divisors of the width."""
_MOST_OTHERS = 24
_FUSED = {
    "blocks": "query, key and value as blocks of their projection",
    "heads": "query, key and value of each head side by side in their projection",
}


@dataclass(frozen=True)
class _Mixing:
    """What one side's own attention code gets and returns: projections' outputs, module inputs, mixed values.

    ``projected``: query, key and value, or all three in one. ``length``: of the queries' sequence. ``exchanged``:
    whether query, key and value differ from what names or the order of calls say.
    """

    projected: tuple[np.ndarray, ...]
    mixed: np.ndarray
    module_inputs: Leaves
    length: int
    exchanged: bool


def attention_in_module(
    pair: CallPair, inner: Children, outputs: Leaves, inner_inputs: Mapping[int, Leaves]
) -> str:
    """The cause of a difference in what an attention's own code computes from query, key and value."""
    mixings = [
        (torch, jax)
        for torch, jax in _mixings(pair, inner, outputs, inner_inputs)
        if max(array.size for side in (torch, jax) for array in (*side.projected, side.mixed)) <= LARGEST
    ]
    # The usual formulas refute a wrong size or order cheaply. The other formulas try the orders themselves.
    for usual, (torch, jax) in itertools.product((True, False), mixings):
        if torch.exchanged and not usual:
            continue
        sides = (("torch's", torch), ("JAX's", jax))
        known = {f"{owner} {name}": table for owner, side in sides for name, table in _tables(side)}
        masks = {f"{owner} {name}": mask for owner, side in sides for name, mask in _masks(side)}
        ways = _FUSED if len(torch.projected) == 1 else ("",)
        fused = sorted(itertools.product(ways, ways), key=lambda both: both[0] != both[1])
        sizes, others = _sizes(pair, torch, jax, known)
        for size, both in itertools.product((*sizes, *others) if usual else sizes, fused):
            ours, theirs = (
                _inputs(side, size, way, known, masks) for side, way in zip((torch, jax), both, strict=True)
            )
            if ours is not None and theirs is not None:
                stored = _FUSED.get(both[0], ""), _FUSED.get(both[1], "")
                cause = attention_cause(ours, theirs, NEAR, stored, starts=(usual,))
                if cause:
                    return cause
    return ""


def _mixings(
    pair: CallPair, inner: Children, jax_outputs: Leaves, inner_inputs: Mapping[int, Leaves]
) -> Iterator[tuple[_Mixing, _Mixing]]:
    """With an output projection (the last module inside), and without one.

    Of the modules before it, the projections are the ones whose output no other module gets.
    """
    x = next((pair.torch.inputs[name] for name, _, _ in pair.inputs), np.zeros(0))
    if x.ndim < 2 or not inner.pairs:
        return
    length = x.shape[0] if x.ndim == 2 else x.shape[1]
    *before, last = inner.pairs
    given = inner_inputs.get(len(before), {})
    if not all(_same_inputs(child, inner_inputs.get(index)) for index, child in enumerate(before)):
        return
    for name, other, _ in last.inputs[:1]:
        if other in given:
            yield from _sides(pair, before, last.torch.inputs[name], given[other], length)
    for name, other, _ in pair.outputs[:1]:
        if other in jax_outputs and _same_inputs(last, inner_inputs.get(len(before))):
            yield from _sides(pair, inner.pairs, pair.torch.outputs[name], jax_outputs[other], length)


def _sides(
    pair: CallPair, before: Sequence[CallPair], torch: np.ndarray, jax: np.ndarray, length: int
) -> Iterator[tuple[_Mixing, _Mixing]]:
    passed_on = {_fingerprint(child.torch.inputs[name]) for child in before for name, _, _ in child.inputs}
    ends = [
        (child, child.torch.outputs[name], way)
        for child in before
        for name, _, way in child.outputs[:1]
        if _fingerprint(child.torch.outputs[name]) not in passed_on
    ]
    roles = [_ROLE.search(child.modules.torch.rpartition(".")[2]) for child, _, _ in ends]
    if len(ends) == 3 and {match and match[1] for match in roles} == {"q", "k", "v"}:
        ends = [ends[[match and match[1] for match in roles].index(role)] for role in "qkv"]
    # Values, not names, decide which one is the query: a side's own result must follow from it.
    for number, ordered in enumerate(itertools.permutations(ends) if len(ends) in (1, 3) else ()):
        ours = tuple(output for _, output, _ in ordered)
        theirs = tuple(way.to_jax(output) for _, output, way in ordered)
        yield (
            _Mixing(ours, torch, pair.torch.inputs, length, number > 0),
            _Mixing(theirs, jax, pair.jax.inputs, length, number > 0),
        )


def _same_inputs(child: CallPair, jax_inputs: Leaves | None) -> bool:
    """Whether JAX gives a module the same as torch does; otherwise the fault is before the mixing."""
    return jax_inputs is not None and all(
        fits(
            way.to_jax(child.torch.inputs[name]),
            jax_inputs[other],
            NEAR * float(np.linalg.norm(jax_inputs[other])),
        )
        for name, other, way in child.inputs[:1]
        if other in jax_inputs
    )


def _fingerprint(x: np.ndarray) -> tuple[int, float]:
    """The same in any layout."""
    norm = float(np.linalg.norm(x)) if x.dtype.kind == "f" else math.nan
    return x.size, float(f"{norm:.9g}")


def _rows(x: np.ndarray, length: int) -> np.ndarray | None:
    """``[B, T, features]`` of an array; if no axis has ``length``, an axis of any length is the sequence."""
    if x.ndim == 2:
        return x[None]
    if x.ndim == 4 and x.shape[1] != length and x.shape[2] == length:
        x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1) if x.ndim > 2 else None


def _inputs(
    side: _Mixing,
    size: int,
    way: str,
    tables: Mapping[str, tuple[np.ndarray, np.ndarray]],
    masks: Mapping[str, np.ndarray],
) -> AttentionInputs | None:
    """The inputs with heads of this size; None if the arrays have no such heads."""
    rows = [_rows(array, side.length) for array in (*side.projected, side.mixed)]
    known = [array.astype(np.float64) for array in rows if array is not None]
    if len(known) < len(rows) or any(len(array) != len(known[0]) or array.shape[2] % size for array in known):
        return None
    *parts, mixed = known
    heads = mixed.shape[2] // size
    if way:
        (whole,) = parts
        shared, odd = divmod(whole.shape[2] // size - heads, 2)
        if odd or shared < 1 or heads % shared:
            return None
        split = whole.reshape(*whole.shape[:2], -1, size)
        if way == "heads":
            split = split.reshape(*whole.shape[:2], shared, -1, size)
            parts = [split[:, :, :, :-2], split[:, :, :, -2], split[:, :, :, -1]]
        else:
            parts = np.split(split, (heads, heads + shared), 2)
    q, k, v = (array.reshape(*array.shape[:2], -1, size) for array in parts)
    if q.shape[:3] != (*mixed.shape[:2], heads) or k.shape != v.shape or heads % k.shape[2]:
        return None
    return AttentionInputs(q, k, v, mixed, tables, masks)


def _sizes(
    pair: CallPair, torch: _Mixing, jax: _Mixing, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[list[int], list[int]]:
    """Sizes of heads, the likely ones first: from modules, arrays with an axis for heads, tables, usual sizes.

    If nothing gives a size, also other divisors of the width.
    """
    sizes_said = [
        array.shape[-1] for side in (torch, jax) for array in (side.mixed, *side.projected) if array.ndim == 4
    ]
    mixed = _rows(torch.mixed, torch.length)
    if sizes_said or mixed is None:
        return list(dict.fromkeys(sizes_said)), []
    width = mixed.shape[-1]
    for numbers, head_sizes in (pair.torch.heads, pair.jax.heads):
        sizes_said += [*(width // number for number in numbers if width % number == 0), *head_sizes]
    said = bool(sizes_said)
    # Attention weights by head, which some attentions return.
    sizes_said += [
        width // array.shape[1]
        for array in pair.torch.outputs.values()
        if array.ndim == 4 and array.shape[2] == torch.length
    ]
    sizes_said += [2 * cos.shape[-1] for cos, _ in tables.values()]
    sizes = [size for size in dict.fromkeys((*sizes_said, *_SIZES)) if width % size == 0]
    others = range(0) if said else range(2, width + 1)
    divisors = (size for size in others if width % size == 0 and size not in sizes)
    return sizes, list(itertools.islice(divisors, _MOST_OTHERS))


def _tables(side: _Mixing) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Cosines and sines ``[B or 1, T, n]`` among the inputs of a module, each element once."""
    for (name, cos), (_, sin) in itertools.pairwise(side.module_inputs.items()):
        if cos.shape != sin.shape or cos.dtype.kind != "f" or cos.ndim < 2 or cos.shape[-1] < 1:
            continue
        first, second = (
            x.astype(np.float64).reshape([n for n in x.shape[:-1] if n != 1] + [-1]) for x in (cos, sin)
        )
        square = first**2 + second**2
        if first.ndim not in (2, 3) or np.ptp(square) > 1e-3 * float(np.max(square)):
            continue
        first, second = (x[None] if x.ndim == 2 else x for x in (first, second))
        n = first.shape[-1] // 2
        if first.shape[-1] % 2 == 0 and np.array_equal(first[..., :n], first[..., n:]):
            first, second = first[..., :n], second[..., :n]
        elif first.shape[-1] % 2 == 0 and np.array_equal(first[..., ::2], first[..., 1::2]):
            first, second = first[..., ::2], second[..., ::2]
        yield name, (first, second)


def _masks(side: _Mixing) -> Iterator[tuple[str, np.ndarray]]:
    """Masks ``[B or 1, H or 1, T or 1, S]`` among the inputs of a module."""
    rows = _rows(side.projected[-1], side.length)
    if rows is None:
        return
    batch, keys = rows.shape[:2]
    for name, mask in side.module_inputs.items():
        if mask.ndim not in (2, 3, 4) or mask.shape[-1] < keys:
            continue
        if mask.ndim == 2 and mask.shape[0] == batch:
            mask = mask[:, None, None]
        elif mask.ndim == 2:
            mask = mask[None, None]
        elif mask.ndim == 3:
            mask = mask[:, None]
        enough = mask.shape[2] == 1 or mask.shape[2] >= side.length
        if not enough or mask.shape[0] not in (1, batch):
            continue
        mask = mask[..., : side.length, :keys]
        yield name, mask.astype(np.float64) if mask.dtype.kind == "f" and np.min(mask) < 0 else mask != 0
