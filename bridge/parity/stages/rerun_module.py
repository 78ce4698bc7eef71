"""One module alone: the JAX module on torch's inputs, with torch's outputs of the modules inside.

    torch:  x ---> [ norm ] -n-> [ attention ] -a-> ( + ) ---> y          as recorded, float64
                      |               |
    JAX:    x ---> [ n     ] --> [ a         ] --> ( + ) ---> y'          only the layer's own code runs

Compared are the outputs, and what the inner modules are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridge.parity.causes.causes import module_cause
from bridge.parity.partners.rows import ratio_of
from bridge.parity.partners.runs import CallPair, Children, Runs, children_of, in_layout, largest_ratio
from bridge.parity.recorded.distance import FACTOR, distance
from bridge.parity.recorded.recording import Call, Leaves, Replacements, Rerun
from bridge.parity.stages.precision import Rounding, rounding


@dataclass(frozen=True)
class Alone:
    """A module's ratios when it runs alone, by output leaf, and ``inner`` by what it gives to modules inside of it.

    ``cause``: of what differs, if it is a known one. ``coarse``: by output leaf, and by module inside for what it is
    given, what the compute dtype does.
    """

    outputs: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    cause: str = ""
    coarse: Mapping[str, Rounding] = field(default_factory=dict)

    @property
    def given(self) -> float:
        """The worst of ``inner``."""
        return max(self.inner.values(), default=0.0)

    @property
    def places(self) -> frozenset[str]:
        """Where it differs: outputs, and inner modules' inputs."""
        places = {f"output {leaf}" for leaf, ratio in self.outputs.items() if ratio > FACTOR}
        return frozenset(places | {name for name, ratio in self.inner.items() if ratio > FACTOR})

    def without(self, module: str) -> Alone:
        """The same but for what it gives to one module."""
        inner = {name: ratio for name, ratio in self.inner.items() if name.partition(" as ")[0] != module}
        return replace(self, inner=inner)


def run_alone(runs: Runs, pair: CallPair, inner: Children, own: Sequence[CallPair] = ()) -> Alone:
    """Run the JAX module on torch's inputs, with torch's outputs of the modules inside, and compare.

    ``own``: modules inside that give their own outputs, on both sides.
    """
    torch_inputs = {name: pair.torch.inputs[name] for name, _, _ in pair.inputs}
    jax_inputs = in_layout(pair.inputs, pair.torch.inputs)
    ours, theirs = _replacements(inner, own)
    path, other, number = pair.modules.torch, pair.modules.jax, pair.number
    try:
        found = runs.jax.rerun("float64", other, number, jax_inputs, replaced=theirs)
        jax_low = runs.jax.rerun(runs.dtype, other, number, jax_inputs, replaced=theirs)
        torch_low = runs.torch.rerun(runs.dtype, path, number, torch_inputs, replaced=ours)
    # A module that cannot be called alone is no fault of the model.
    except Exception as error:
        return Alone(note=f"not run alone: {type(error).__name__}: {error!s:.200}")
    outputs, floors = {}, {}
    coarse: dict[str, Rounding] = {}
    for name, leaf, way in pair.outputs:
        if leaf not in found.outputs or found.outputs[leaf].shape != pair.jax.outputs[leaf].shape:
            continue
        high = way.to_jax(pair.torch.outputs[name])
        coarse[leaf] = rounding(
            runs.dtype,
            (way.to_jax(torch_low.outputs[name]), high),
            (jax_low.outputs.get(leaf), found.outputs[leaf]),
        )
        floors[leaf] = coarse[leaf].floor
        outputs[leaf] = ratio_of(distance(high, found.outputs[leaf], runs.dtype), floors[leaf])
    given_ratios, given_coarse = _given(runs.dtype, inner, found, torch_low, jax_low)
    coarse |= given_coarse
    cause = note = ""
    alone = Alone(outputs, given_ratios, coarse=coarse)
    if alone.given > FACTOR:
        target = max(given_ratios, key=lambda name: given_ratios[name])
        note = f"in what it gives to {target.partition(' as ')[0]}"
    if alone.places:
        if pair.without_twin:
            names = ", ".join(pair.without_twin)
            note = f"{note}{'; ' if note else ''}torch's inputs {names} have no twin: they may be the cause"
        prefix = f"{path}." if path else ""
        parts = {
            name.removeprefix(prefix): runs.parameters[name]
            for name in runs.parameters
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        calls = (
            _nth(found.calls, child.modules.jax, n) for child, n in zip(inner.pairs, inner.jax, strict=True)
        )
        given = {index: call.inputs for index, call in enumerate(calls) if call is not None}
        cause = module_cause(pair, inner, found.outputs, given, floors, parts)
    return replace(alone, note=note, cause=cause)


def with_right_inputs(runs: Runs, pairs: Sequence[CallPair]) -> list[CallPair]:
    """The pairs, those that are wrong alone with the inputs and layouts with which they are right, if there are any.

    A convolution that is given images with height and width exchanged, as values say, is no place of that fault, nor is
    an attention that is given another value than torch's.
    """
    found = []
    for pair in pairs:
        differs = largest_ratio(runs, pair, "outputs") > FACTOR
        others = [*pair.alternatives()] if differs else []
        inner = children_of(pair, pairs, runs) if others else Children((), (), ())
        if others and run_alone(runs, pair, inner).places:
            alone = ((other, run_alone(runs, other, inner)) for other in others)
            pair = next((other for other, seen in alone if seen.outputs and not seen.places), pair)
        found.append(pair)
    return found


def _given(
    dtype: str, inner: Children, found: Rerun, torch_low: Rerun, jax_low: Rerun
) -> tuple[dict[str, float], dict[str, Rounding]]:
    """Ratios of what the inner modules are given, and what the dtype does to it: by ``"<module> as <input>"``.

    Infinite for a module that JAX does not call where torch does.
    """
    ratios: dict[str, float] = {}
    coarse: dict[str, Rounding] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        name = child.modules.name + (f"#{torch_number}" if torch_number else "")
        call = _nth(found.calls, child.modules.jax, jax_number)
        if call is None:
            ratios[f"{name}, which JAX does not call there"] = math.inf
            continue
        low = _nth(jax_low.calls, child.modules.jax, jax_number)
        torch_call = _nth(torch_low.calls, child.modules.torch, torch_number)
        for leaf, other, way in child.inputs:
            high = way.to_jax(child.torch.inputs[leaf])
            if other not in call.inputs or call.inputs[other].shape != high.shape:
                continue
            theirs = None if torch_call is None else torch_call.inputs.get(leaf)
            place = f"{name} as {other}"
            coarse[place] = rounding(
                dtype,
                (None if theirs is None else way.to_jax(theirs), high),
                (None if low is None else low.inputs.get(other), call.inputs[other]),
            )
            ratios[place] = ratio_of(distance(high, call.inputs[other], dtype), coarse[place].floor)
    return ratios, coarse


def _replacements(inner: Children, own: Sequence[CallPair]) -> tuple[Replacements, Replacements]:
    """Torch's outputs of the inner modules, for torch and for JAX."""
    ours: dict[tuple[str, int], Leaves] = {}
    theirs: dict[tuple[str, int], Leaves] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        outputs = in_layout(child.outputs, child.torch.outputs)
        if outputs and not any(child is one for one in own):
            ours[child.modules.torch, torch_number] = {
                name: child.torch.outputs[name] for name, _, _ in child.outputs
            }
            theirs[child.modules.jax, jax_number] = outputs
    return ours, theirs


def _nth(calls: Sequence[Call], path: str, number: int) -> Call | None:
    same = [call for call in calls if call.path == path]
    return same[number] if number < len(same) else None
