"""Known causes: a cause is named if it explains a difference down to the noise floor.

For each module that introduces a difference, formulas are tried (``formulas.py``). If torch's output fits one formula
and JAX's another, the two are the cause: "torch: RMS norm, epsilon 1e-06; JAX: RMS norm, epsilon 1e-05". A weight is
tried as a rearrangement of its twin. No cause is named that leaves more than the floor unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from bridge.parity.causes.attention_in_module import attention_in_module
from bridge.parity.causes.formulas import LARGEST, NEAR, activated, norms, rearranged
from bridge.parity.partners.runs import CallPair, Children
from bridge.parity.recorded.distance import FACTOR, distance, fits
from bridge.parity.recorded.recording import Leaves


def weight_cause(name: str, torch: np.ndarray, jax: np.ndarray, floor: float) -> str:
    """Why two weights of one shape differ; empty if no known cause explains it. name: JAX's."""
    if torch.size > LARGEST:
        return ""
    scalar = _multiple(torch, jax, floor)
    if scalar:
        return scalar
    norm = "" if "bias" in name else " (a norm that multiplies by 1 + weight)"
    if fits(torch, jax - 1, floor):
        return f"JAX's is torch's plus 1{norm}"
    if fits(torch - 1, jax, floor):
        return f"torch's is JAX's plus 1{norm}"
    for words, candidate in rearranged(torch):
        if fits(candidate, jax, floor):
            return f"JAX's is torch's, {words}"
    return ""


def module_cause(
    pair: CallPair,
    inner: Children,
    jax_outputs: Leaves,
    inner_inputs: Mapping[int, Leaves],
    floors: Mapping[str, float],
    parameters: Leaves,
) -> str:
    """Why a module's outputs differ when the module runs alone.

    ``jax_outputs``: on torch's inputs. ``inner_inputs``: by index in ``inner.pairs``, what JAX gave to the modules
    inside. ``floors``: absolute, by output leaf. ``parameters``: the torch module's own, by last name.
    """
    for name, other, way in pair.outputs:
        if other not in jax_outputs:
            continue
        torch, jax = way.to_jax(pair.torch.outputs[name]), jax_outputs[other]
        if torch.dtype.kind in "iub" or torch.size > LARGEST:
            continue
        floor = floors.get(other, 0.0)
        if distance(torch, jax).absolute <= FACTOR * floor:
            continue
        cause = _multiple(torch, jax, floor) or _offset(torch, jax, floor, parameters)
        cause = cause or _norm(pair, name, torch, jax, floor, parameters)
        if cause:
            return cause
        for words, candidate in rearranged(torch):
            if fits(candidate, jax, floor):
                return f"JAX's output is torch's, {words}"
    return _activation(inner, inner_inputs) or attention_in_module(pair, inner, jax_outputs, inner_inputs)


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
    formulas = norms(x, weight, None if bias is None else bias.astype(np.float64))
    shaped = ((words, value.reshape(torch.shape)) for words, value in formulas if value.size == torch.size)
    return _both(shaped, torch, jax, floor)


def _activation(inner: Children, inner_inputs: Mapping[int, Leaves]) -> str:
    """The activation between projections whose outputs have the size of the last projection's input."""
    for index, child in enumerate(inner.pairs):
        for name, other, way in child.inputs[:1]:
            theirs = way.to_jax(child.torch.inputs[name])
            ours = inner_inputs.get(index, {}).get(other)
            if ours is None or ours.shape != theirs.shape or theirs.size > LARGEST:
                continue
            before = [
                twin.to_jax(earlier.torch.outputs[leaf]).astype(np.float64).reshape(theirs.shape)
                for earlier in inner.pairs[:index]
                for leaf, _, twin in earlier.outputs[:1]
                if twin.to_jax(earlier.torch.outputs[leaf]).size == theirs.size
            ]
            sources: list[tuple[np.ndarray, np.ndarray | None]] = [(last, None) for last in before[-1:]]
            if len(before) >= 2:
                sources.insert(0, (before[-2], before[-1]))
            for first, second in sources:
                floor = NEAR * float(np.linalg.norm(theirs))
                cause = _both(activated(first, second), theirs, ours, floor)
                if cause:
                    return cause
    return ""


def _both(
    formulas: Iterable[tuple[str, np.ndarray]], torch: np.ndarray, jax: np.ndarray, floor: float
) -> str:
    """Both sides' formulas, if both are known and differ."""
    candidates = list(formulas)
    named = []
    for value in (torch, jax):
        near = [(distance(candidate, value).absolute, words) for words, candidate in candidates]
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
    # A factor of 1 explains nothing, and a factor of 0 explains any difference. Constants in float32
    # move a factor by less than 1e-6.
    if abs(factor - 1) < 1e-6 or abs(factor) < 1e-6 or not fits(factor * torch, jax, floor):
        return ""
    # Some factor explains any single number: only a whole one, such as a number of rows, tells something.
    whole = max(abs(factor), 1 / abs(factor))
    if torch.size < 2 and abs(whole - round(whole)) > 1e-5 * whole:
        return ""
    return f"JAX's is {factor:.6g} times torch's{_known(factor)}"


def _known(factor: float) -> str:
    """A factor as a power of a whole number, if it is one: scores divided by sqrt(d) once, twice or never."""
    for power, words in ((2, "sqrt({})"), (-2, "1 / sqrt({})")):
        whole = abs(factor) ** power
        # Wider than 1e-6: a power multiplies the relative error of the factor.
        if 1.5 < whole < 1e6 and abs(whole - round(whole)) < 1e-4 * whole:
            return f", {words.format(round(whole))}"
    return ""


def _offset(torch: np.ndarray, jax: np.ndarray, floor: float, parameters: Leaves) -> str:
    """The same vector added everywhere: a bias that one side lacks or adds twice."""
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
            # The mean over all positions is more precise than one value by this factor.
            scale = 1e-5 * float(np.linalg.norm(value)) + floor
            for sign, words in ((-1, "JAX does not add"), (1, "JAX adds twice")):
                if float(np.linalg.norm(mean - sign * value)) <= scale:
                    return f"{words} torch's {name}"
    # At one position some vector always does.
    return "JAX's is torch's plus one vector at every position" if len(difference) > 1 else ""


def statistics_cause(
    name: str,
    torch_before: np.ndarray,
    jax_before: np.ndarray,
    torch: np.ndarray,
    jax: np.ndarray,
    floor: float,
) -> str:
    """Why two buffers that started equal differ after a forward; empty if no known cause explains it. name: torch's."""
    if not fits(torch_before, jax_before, floor):
        return ""
    start = torch_before.astype(np.float64).ravel()
    ours, theirs = torch.astype(np.float64).ravel(), jax.astype(np.float64).ravel()
    moved, other = ours - start, theirs - start
    square = float(moved @ moved)
    factor = float(moved @ other) / square if square > 0 else 0.0
    # Otherwise the two are the same statistic, and something else differs.
    if start.size > 2 and factor and abs(factor - 1) > 1e-6 and fits(factor * moved, other, floor):
        of_norm = any(word in name.rpartition(".")[2] for word in ("mean", "var"))
        momentum = ": momentum a in torch is 1 - a in flax" if factor > 0 and of_norm else ""
        return f"JAX's moves {factor:.6g} times as far in a step as torch's{momentum}"
    # torch - r = a (n / (n - 1) v - r) and JAX - r = a (v - r), so (n - 1) (torch - JAX) = JAX - (1 - a) r.
    known = np.stack([theirs, -start], 1)
    (part, kept), _, rank, _ = np.linalg.lstsq(known, ours - theirs)
    if rank < 2 or start.size < 3 or not fits(known @ np.array([part, kept]), ours - theirs, floor):
        return ""
    # Least squares do not know that the count is a whole number: a count near one is the evidence for the formula.
    count = 1 / part + 1 if part > 0 else 0.0
    if count < 1.5 or abs(count - round(count)) > 1e-3 * count or not 0 <= kept / part < 1:
        return ""
    return (
        f"torch keeps the unbiased variance, {round(count)} / {round(count) - 1} times the batch's, and flax the "
        "biased one; this is the libraries' convention, not a fault of the port: compare in eval mode, or list this "
        "buffer under drop"
    )
