"""Known causes: what explains a difference to the noise floor is named.

Each module that introduces a difference is tried against formulas (``formulas.py``). Where torch's output fits one of
them and JAX's another one, the two are the cause: "torch: RMS norm, epsilon 1e-06; JAX: RMS norm, epsilon 1e-05". A
weight is tried as another arrangement of its twin. Nothing is named that leaves more than the floor unexplained.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bridge.parity.pair.attention import attention_cause
from bridge.parity.pair.distance import FACTOR, distance
from bridge.parity.pair.formulas import AttentionInputs, activated, norms, rearranged
from bridge.parity.pair.recording import Leaves
from bridge.parity.pair.runs import CallPair, Children

_LARGEST = 1 << 22
"""Elements above which nothing is tried: the catalogue costs hundreds of passes."""


_NEAR = 1e-6
"""The floor of what modules inside are given, relative: constants in float32 leave less."""
_ROLE = re.compile(r"(?:^|_|w)(q|k|v)(?:uery|ey|alue)?s?(?:$|_)")
_SIZES = (64, 128, 96, 32, 80, 256, 16, 8)
"""Of an attention's heads, where no array says it."""
_FUSED = {
    "blocks": "query, key and value as blocks of their projection",
    "heads": "query, key and value of each head side by side in their projection",
}


def weight_cause(torch: np.ndarray, jax: np.ndarray, floor: float) -> str:
    """Why two weights of one shape differ; empty where nothing known explains it."""
    if torch.size > _LARGEST:
        return ""
    scalar = _multiple(torch, jax, floor)
    if scalar:
        return scalar
    if _fits(torch, jax - 1, floor):
        return "JAX's is torch's plus 1 (a norm that multiplies by 1 + weight)"
    if _fits(torch - 1, jax, floor):
        return "torch's is JAX's plus 1 (a norm that multiplies by 1 + weight)"
    for words, candidate in rearranged(torch):
        if _fits(candidate, jax, floor):
            return f"JAX's is torch's, {words}"
    return ""


def module_cause(
    pair: CallPair,
    inner: Children,
    found: Leaves,
    given: Mapping[int, Leaves],
    floors: Mapping[str, float],
    parameters: Leaves,
) -> str:
    """Why a module's outputs differ when it runs alone.

    ``found``: JAX's outputs on torch's inputs. ``given``: by index in ``inner.pairs``, what JAX gave to the modules
    inside. ``floors``: absolute, by output leaf. ``parameters``: the torch module's own ones, by last name.
    """
    for name, other, way in pair.outputs:
        if other not in found:
            continue
        torch = way.to_jax(pair.torch.outputs[name])
        if torch.dtype.kind in "iub" or torch.size > _LARGEST:
            continue
        floor = floors.get(other, 0.0)
        if distance(torch, found[other]).absolute <= FACTOR * floor:
            continue
        cause = _multiple(torch, found[other], floor) or _offset(torch, found[other], floor, parameters)
        cause = cause or _norm(pair, name, torch, found[other], floor, parameters)
        if cause:
            return cause
        for words, candidate in rearranged(torch):
            if _fits(candidate, found[other], floor):
                return f"JAX's output is torch's, {words}"
    return _activation(inner, given) or _attention(pair, inner, found, given)


def _norm(
    pair: CallPair, name: str, torch: np.ndarray, jax: np.ndarray, floor: float, parameters: Leaves
) -> str:
    inputs = [leaf for leaf in pair.torch.inputs.values() if leaf.shape == pair.torch.outputs[name].shape]
    weight = parameters.get("weight", parameters.get("scale", parameters.get("gamma")))
    if not inputs or (weight is not None and weight.shape != inputs[0].shape[-1:]):
        return ""
    x = inputs[0].astype(np.float64)
    weight = None if weight is None else weight.astype(np.float64)
    bias = parameters.get("bias", parameters.get("beta"))
    formulas = list(norms(x, weight, None if bias is None else bias.astype(np.float64)))
    return _both(
        [(words, value.reshape(torch.shape)) for words, value in formulas if value.size == torch.size],
        torch,
        jax,
        floor,
    )


def _activation(inner: Children, given: Mapping[int, Leaves]) -> str:
    """Of the projections whose outputs have the size of what the last one gets."""
    for index, child in enumerate(inner.pairs):
        for name, other, way in child.inputs[:1]:
            theirs = way.to_jax(child.torch.inputs[name])
            ours = given.get(index, {}).get(other)
            if ours is None or ours.shape != theirs.shape or theirs.size > _LARGEST:
                continue
            before = [
                twin.to_jax(one.torch.outputs[leaf]).astype(np.float64).reshape(theirs.shape)
                for one in inner.pairs[:index]
                for leaf, _, twin in one.outputs[:1]
                if twin.to_jax(one.torch.outputs[leaf]).size == theirs.size
            ]
            for first, second in _sources(before):
                floor = _NEAR * float(np.linalg.norm(theirs))
                cause = _both(list(activated(first, second)), theirs, ours, floor)
                if cause:
                    return cause
    return ""


@dataclass(frozen=True)
class _Mixing:
    """What one side's own code of an attention gets and makes: projections' outputs, module inputs, what is mixed.

    ``projected``: query, key and value, or all three in one. ``length``: of the queries' sequence.
    """

    projected: tuple[np.ndarray, ...]
    mixed: np.ndarray
    given: Leaves
    length: int


def _attention(pair: CallPair, inner: Children, found: Leaves, given: Mapping[int, Leaves]) -> str:
    """Of what the own code of an attention makes of query, key and value."""
    for torch, jax in _mixings(pair, inner, found, given):
        if max(one.size for side in (torch, jax) for one in (*side.projected, side.mixed)) > _LARGEST:
            continue
        sides = (("torch's", torch), ("JAX's", jax))
        known = {f"{owner} {name}": one for owner, side in sides for name, one in _tables(side)}
        masks = {f"{owner} {name}": one for owner, side in sides for name, one in _masks(side)}
        ways = _FUSED if len(torch.projected) == 1 else ("",)
        fused = sorted(itertools.product(ways, ways), key=lambda both: both[0] != both[1])
        sizes = _sizes(pair, torch, jax, known)
        # The usual formulas refute a wrong size cheaply.
        for usual, size, both in itertools.product((True, False), sizes, fused):
            ours, theirs = (
                _inputs(side, size, way, known, masks) for side, way in zip((torch, jax), both, strict=True)
            )
            if ours is not None and theirs is not None:
                stored = _FUSED.get(both[0], ""), _FUSED.get(both[1], "")
                cause = attention_cause(ours, theirs, _NEAR, stored, starts=(usual,))
                if cause:
                    return cause
    return ""


def _mixings(
    pair: CallPair, inner: Children, found: Leaves, given: Mapping[int, Leaves]
) -> Iterator[tuple[_Mixing, _Mixing]]:
    """With an output projection, the last module inside, and without one.

    Of the modules before it, those whose output no other one is given are the projections.
    """
    x = next((pair.torch.inputs[name] for name, _, _ in pair.inputs), np.zeros(0))
    if x.ndim < 2 or not inner.pairs:
        return
    length = x.shape[0] if x.ndim == 2 else x.shape[1]
    last = len(inner.pairs) - 1
    for name, other, _ in inner.pairs[last].inputs[:1]:
        if other in given.get(last, {}):
            mixed = inner.pairs[last].torch.inputs[name], given[last][other]
            if all(_same_inputs(child, given.get(index)) for index, child in enumerate(inner.pairs[:last])):
                yield from _sides(pair, inner.pairs[:last], *mixed, length)
    for name, other, _ in pair.outputs[:1]:
        if other in found and all(
            _same_inputs(child, given.get(index)) for index, child in enumerate(inner.pairs)
        ):
            yield from _sides(pair, inner.pairs, pair.torch.outputs[name], found[other], length)


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
    if len(ends) == 3 and {one and one[1] for one in roles} == {"q", "k", "v"}:
        ends = [ends[[one and one[1] for one in roles].index(role)] for role in "qkv"]
    if len(ends) in (1, 3):
        ours = tuple(output for _, output, _ in ends)
        theirs = tuple(way.to_jax(output) for _, output, way in ends)
        yield (
            _Mixing(ours, torch, pair.torch.inputs, length),
            _Mixing(theirs, jax, pair.jax.inputs, length),
        )


def _same_inputs(child: CallPair, given: Leaves | None) -> bool:
    """Whether JAX gives a module what torch does: else its fault lies before what it makes of the outputs."""
    return given is not None and all(
        _fits(way.to_jax(child.torch.inputs[name]), given[other], _NEAR * float(np.linalg.norm(given[other])))
        for name, other, way in child.inputs[:1]
        if other in given
    )


def _fingerprint(x: np.ndarray) -> tuple[int, float]:
    """The same in any layout."""
    norm = float(np.linalg.norm(x)) if x.dtype.kind == "f" else math.nan
    return x.size, float(f"{norm:.9g}")


def _rows(x: np.ndarray, length: int) -> np.ndarray | None:
    """``[B, T, features]`` of an array with a sequence of any length where none of ``length`` is."""
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
    """With heads of this size; None where the arrays have none of it."""
    rows = [_rows(one, side.length) for one in (*side.projected, side.mixed)]
    known = [one.astype(np.float64) for one in rows if one is not None]
    if len(known) < len(rows) or any(len(one) != len(known[0]) or one.shape[2] % size for one in known):
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
    q, k, v = (one.reshape(*one.shape[:2], -1, size) for one in parts)
    if q.shape[:3] != (*mixed.shape[:2], heads) or k.shape != v.shape or heads % k.shape[2]:
        return None
    return AttentionInputs(q, k, v, mixed, tables, masks)


def _sizes(
    pair: CallPair, torch: _Mixing, jax: _Mixing, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> list[int]:
    """Sizes of heads, the likely ones first: of arrays with an axis for heads, of tables, of what is usual."""
    found = [one.shape[-1] for side in (torch, jax) for one in (side.mixed, *side.projected) if one.ndim == 4]
    mixed = _rows(torch.mixed, torch.length)
    if found or mixed is None:
        return list(dict.fromkeys(found))
    width = mixed.shape[-1]
    # Weights of the heads, which some attentions return.
    found += [
        width // one.shape[1]
        for one in pair.torch.outputs.values()
        if one.ndim == 4 and one.shape[2] == torch.length
    ]
    found += [2 * cos.shape[-1] for cos, _ in tables.values()]
    return [size for size in dict.fromkeys((*found, *_SIZES)) if width % size == 0]


def _tables(side: _Mixing) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Cosines and sines ``[B or 1, T, n]`` among the inputs of a module, each element once."""
    for (name, cos), (_, sin) in itertools.pairwise(side.given.items()):
        if cos.shape != sin.shape or cos.dtype.kind != "f" or cos.ndim < 2 or cos.shape[-1] < 1:
            continue
        one, other = (
            x.astype(np.float64).reshape([n for n in x.shape[:-1] if n != 1] + [-1]) for x in (cos, sin)
        )
        square = one**2 + other**2
        if one.ndim not in (2, 3) or np.ptp(square) > 1e-3 * float(np.max(square)):
            continue
        one, other = (x[None] if x.ndim == 2 else x for x in (one, other))
        n = one.shape[-1] // 2
        if one.shape[-1] % 2 == 0 and np.array_equal(one[..., :n], one[..., n:]):
            one, other = one[..., :n], other[..., :n]
        elif one.shape[-1] % 2 == 0 and np.array_equal(one[..., ::2], one[..., 1::2]):
            one, other = one[..., ::2], other[..., ::2]
        yield name, (one, other)


def _masks(side: _Mixing) -> Iterator[tuple[str, np.ndarray]]:
    """Masks ``[B or 1, H or 1, T or 1, S]`` among the inputs of a module."""
    rows = _rows(side.projected[-1], side.length)
    if rows is None:
        return
    batch, keys = rows.shape[:2]
    for name, mask in side.given.items():
        if mask.ndim not in (2, 3, 4) or mask.shape[-1] < keys:
            continue
        if mask.ndim == 2 and mask.shape[0] == batch:
            mask = mask[:, None, None]
        elif mask.ndim == 2:
            mask = mask[None, None]
        elif mask.ndim == 3:
            mask = mask[:, None]
        if mask.shape[2] not in (1, *range(side.length, mask.shape[2] + 1)) or mask.shape[0] not in (
            1,
            batch,
        ):
            continue
        mask = mask[..., : side.length, :keys]
        yield name, mask.astype(np.float64) if mask.dtype.kind == "f" and np.min(mask) < 0 else mask != 0


def _sources(before: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    if len(before) >= 2:
        yield before[-2], before[-1]
    if before:
        yield before[-1], None


def _both(
    formulas: Iterable[tuple[str, np.ndarray]], torch: np.ndarray, jax: np.ndarray, floor: float
) -> str:
    """Both sides' formulas, where both are known and differ."""
    candidates = list(formulas)
    named = []
    for value in (torch, jax):
        near = [(distance(one, value).absolute, words) for words, one in candidates]
        least, words = min(near, default=(math.inf, ""))
        if not least <= FACTOR * floor:
            return ""
        named.append(words)
    return "" if named[0] == named[1] else f"torch: {named[0]}; JAX: {named[1]}"


def _multiple(torch: np.ndarray, jax: np.ndarray, floor: float) -> str:
    """JAX's as a multiple of torch's."""
    square = float(np.vdot(torch, torch).real)
    if not square > 0 or not np.isfinite(square):
        return ""
    factor = float(np.vdot(torch, jax).real) / square
    if abs(factor - 1) < 1e-6 or abs(factor) < 1e-6 or not _fits(factor * torch, jax, floor):
        return ""
    return f"JAX's is {factor:.6g} times torch's{_known(factor)}"


def _known(factor: float) -> str:
    """A factor as a power of a whole number, where it is one: scores divided by sqrt(d) once, twice or never."""
    for power, words in ((2, "sqrt({})"), (-2, "1 / sqrt({})")):
        whole = abs(factor) ** power
        if 1.5 < whole < 1e6 and abs(whole - round(whole)) < 1e-4 * whole:
            return f", {words.format(round(whole))}"
    return ""


def _offset(torch: np.ndarray, jax: np.ndarray, floor: float, parameters: Leaves) -> str:
    """The same vector added everywhere: a bias that one side lacks, or has twice."""
    if torch.ndim < 2:
        return ""
    with np.errstate(invalid="ignore"):
        difference = (jax - torch).reshape(-1, torch.shape[-1])
        mean = difference.mean(0)
        spread = float(np.linalg.norm(difference - mean))
    # Not a number where a value is none.
    if not spread <= FACTOR * floor:
        return ""
    for name, value in parameters.items():
        if value.shape == mean.shape:
            scale = 1e-5 * float(np.linalg.norm(value)) + floor
            for sign, words in ((-1, "JAX does not add"), (1, "JAX adds twice")):
                if float(np.linalg.norm(mean - sign * value)) <= scale:
                    return f"{words} torch's {name}"
    return "JAX's is torch's plus one vector at every position"


def _fits(candidate: np.ndarray, value: np.ndarray, floor: float) -> bool:
    return candidate.shape == value.shape and distance(candidate, value).absolute <= FACTOR * floor
