"""One module alone: the JAX module on torch's inputs, with torch's outputs for the modules inside.

    torch:  x ---> [ norm ] -n-> [ attention ] -a-> ( + ) ---> y          as recorded, float64
                      |               |
    JAX:    x ---> [ n     ] --> [ a         ] --> ( + ) ---> y'          only the layer's own code runs

The outputs are compared, and the inputs of the inner modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.parity.causes.causes import module_cause
from bridge.parity.partners.rows import ratio_of
from bridge.parity.partners.runs import CallPair, Children, Runs, children_of, in_layout, largest_ratio
from bridge.parity.recorded.distance import FACTOR, distance, noise
from bridge.parity.recorded.recording import Call, Leaves, Replacements, Rerun


@dataclass(frozen=True)
class Rounding:
    """The effect of the compute dtype on torch's and JAX's values, and their distance in this dtype; absolute."""

    torch: float
    jax: float
    between: float

    @property
    def floor(self) -> float:
        return max(self.torch, self.jax)


def rounding(
    dtype: str, torch: tuple[np.ndarray | None, np.ndarray], jax: tuple[np.ndarray | None, np.ndarray]
) -> Rounding:
    """``torch``, ``jax``: values in the compute dtype, None if unknown, and in float64."""
    torch_low, jax_low = torch[0], jax[0]
    between = math.nan
    if torch_low is not None and jax_low is not None and torch_low.shape == jax_low.shape:
        between = distance(torch_low, jax_low, dtype).absolute
    return Rounding(noise(*torch, dtype), noise(*jax, dtype), between)


@dataclass(frozen=True)
class ModuleRerun:
    """A module's ratios when it runs alone, by output leaf; ``inner``: by input of an inner module.

    ``cause``: of the difference, if it is a known one. ``coarse``: the effect of the compute dtype, by output leaf, and
    by inner module for its inputs.
    """

    outputs: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    cause: str = ""
    coarse: Mapping[str, Rounding] = field(default_factory=dict)

    @property
    def worst_inner(self) -> float:
        return max(self.inner.values(), default=0.0)

    @property
    def differences(self) -> frozenset[str]:
        """Where the module differs: outputs, and inner modules' inputs."""
        outputs = {f"output {leaf}" for leaf, ratio in self.outputs.items() if ratio > FACTOR}
        return frozenset(outputs | {name for name, ratio in self.inner.items() if ratio > FACTOR})

    def without(self, module: str) -> ModuleRerun:
        """The same without the inputs of one inner module."""
        inner = {name: ratio for name, ratio in self.inner.items() if name.partition(" as ")[0] != module}
        return replace(self, inner=inner)


def rerun_module(runs: Runs, pair: CallPair, inner: Children, own: Sequence[CallPair] = ()) -> ModuleRerun:
    """Run the JAX module on torch's inputs, with torch's outputs for the modules inside, and compare.

    ``own``: modules inside that return their own outputs, on both sides.
    """
    torch_inputs = {name: pair.torch.inputs[name] for name, _, _ in pair.inputs}
    jax_inputs = in_layout(pair.inputs, pair.torch.inputs)
    torch_replaced, jax_replaced = _replacements(inner, own)
    path, jax_path, number = pair.modules.torch, pair.modules.jax, pair.number
    try:
        jax_high, jax_low = (
            runs.jax.rerun(dtype, jax_path, number, jax_inputs, replaced=jax_replaced)
            for dtype in ("float64", runs.dtype)
        )
        torch_low = runs.torch.rerun(runs.dtype, path, number, torch_inputs, replaced=torch_replaced)
    # A module that cannot be called alone is not a fault of the model.
    except Exception as error:
        return ModuleRerun(note=f"not run alone: {type(error).__name__}: {error!s:.200}")
    outputs, floors = {}, {}
    coarse: dict[str, Rounding] = {}
    for name, leaf, way in pair.outputs:
        if leaf not in jax_high.outputs or jax_high.outputs[leaf].shape != pair.jax.outputs[leaf].shape:
            continue
        # Torch's recorded output is also its output alone: a float64 rerun would give the same.
        high = way.to_jax(pair.torch.outputs[name])
        coarse[leaf] = rounding(
            runs.dtype,
            (way.to_jax(torch_low.outputs[name]), high),
            (jax_low.outputs.get(leaf), jax_high.outputs[leaf]),
        )
        floors[leaf] = coarse[leaf].floor
        outputs[leaf] = ratio_of(distance(high, jax_high.outputs[leaf], runs.dtype), floors[leaf])
    inner_ratios, inner_coarse = _compare_inner_inputs(runs.dtype, inner, jax_high, torch_low, jax_low)
    coarse |= inner_coarse
    cause = note = ""
    rerun = ModuleRerun(outputs, inner_ratios, coarse=coarse)
    if rerun.worst_inner > FACTOR:
        target = max(inner_ratios, key=lambda name: inner_ratios[name])
        note = f"in what it gives to {target.partition(' as ')[0]}"
    if rerun.differences:
        names = ", ".join((*pair.without_twin, *pair.masks_without_twin))
        if names:
            note = f"{note}{'; ' if note else ''}torch's inputs {names} have no twin: they may be the cause"
        prefix = f"{path}." if path else ""
        inside = {name.removeprefix(prefix): name for name in runs.parameters if name.startswith(prefix)}
        parameters = {own: runs.parameters[name] for own, name in inside.items() if "." not in own}
        calls = (
            _nth(jax_high.calls, child.modules.jax, n)
            for child, n in zip(inner.pairs, inner.jax, strict=True)
        )
        inner_inputs = {index: call.inputs for index, call in enumerate(calls) if call is not None}
        cause = module_cause(pair, inner, jax_high.outputs, inner_inputs, floors, parameters)
    return replace(rerun, note=note, cause=cause)


def with_right_inputs(runs: Runs, pairs: Sequence[CallPair]) -> list[CallPair]:
    """The pairs; a pair that is wrong alone gets inputs and layouts with which it is right, if there are any.

    A convolution whose images have height and width exchanged, as values say, is not the place of that fault. The same
    holds for an attention that gets another value than torch's.
    """
    chosen = []
    for pair in pairs:
        differs = largest_ratio(runs, pair, "outputs") > FACTOR
        others = [*pair.alternatives()] if differs else []
        inner = children_of(pair, pairs, runs) if others else Children((), (), ())
        if others and rerun_module(runs, pair, inner).differences:
            reruns = ((other, rerun_module(runs, other, inner)) for other in others)
            pair = next((other for other, rerun in reruns if rerun.outputs and not rerun.differences), pair)
        chosen.append(pair)
    return chosen


def _compare_inner_inputs(
    dtype: str, inner: Children, jax_high: Rerun, torch_low: Rerun, jax_low: Rerun
) -> tuple[dict[str, float], dict[str, Rounding]]:
    """Ratios of the inner modules' inputs, and the effect of the dtype on them: by ``"<module> as <input>"``.

    Infinite for a module that torch calls and JAX does not.
    """
    ratios: dict[str, float] = {}
    coarse: dict[str, Rounding] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        name = child.modules.name + (f"#{torch_number}" if torch_number else "")
        call = _nth(jax_high.calls, child.modules.jax, jax_number)
        if call is None:
            ratios[f"{name}, which JAX does not call there"] = math.inf
            continue
        jax_call = _nth(jax_low.calls, child.modules.jax, jax_number)
        torch_call = _nth(torch_low.calls, child.modules.torch, torch_number)
        for leaf, jax_leaf, way in child.inputs:
            high = way.to_jax(child.torch.inputs[leaf])
            if jax_leaf not in call.inputs or call.inputs[jax_leaf].shape != high.shape:
                continue
            torch_values = None if torch_call is None else torch_call.inputs.get(leaf)
            where = f"{name} as {jax_leaf}"
            coarse[where] = rounding(
                dtype,
                (None if torch_values is None else way.to_jax(torch_values), high),
                (None if jax_call is None else jax_call.inputs.get(jax_leaf), call.inputs[jax_leaf]),
            )
            ratios[where] = ratio_of(distance(high, call.inputs[jax_leaf], dtype), coarse[where].floor)
    return ratios, coarse


def _replacements(inner: Children, own: Sequence[CallPair]) -> tuple[Replacements, Replacements]:
    """Torch's outputs of the inner modules, for torch and for JAX."""
    torch: dict[tuple[str, int], Leaves] = {}
    jax: dict[tuple[str, int], Leaves] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        outputs = in_layout(child.outputs, child.torch.outputs)
        if outputs and not any(child is pair for pair in own):
            torch[child.modules.torch, torch_number] = {
                name: child.torch.outputs[name] for name, _, _ in child.outputs
            }
            jax[child.modules.jax, jax_number] = outputs
    return torch, jax


def _nth(calls: Sequence[Call], path: str, number: int) -> Call | None:
    same = [call for call in calls if call.path == path]
    return same[number] if number < len(same) else None
