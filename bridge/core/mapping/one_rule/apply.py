"""One rule applied to one section of a checkpoint: which tensors it makes, and where their elements lie.

Indices of a path fall in three kinds. *Shared* ones are in the path on both sides: the rule applies once per value.
*Gathered* ones are in the source's path and an axis of the target (layers are stacked). *Scattered* ones are the
reverse (a stack is taken apart)::

    layers.{i}.w2 : m f   ->   layers/down : {i} f m       i gathered: n source tensors make one
    layers/down : {i} f m ->   layers.{i}.w2 : m f         i scattered: one source tensor makes n
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.mapping.language.entries import Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.padding import LeftOut
from bridge.core.mapping.one_rule.instance import Axes, Instance, Plain, Values, View
from bridge.core.mapping.one_rule.open_axes import OpenAxes


def apply_rule(
    rule: Rule,
    source: str,
    target: str,
    tensors: Mapping[str, TensorInfo],
    axes: Axes,
    power: int = 1,
    weights: Mapping[str, TensorInfo] = MappingProxyType({}),
) -> Iterator[tuple[str, View]]:
    """The tensors of convention ``target``, by weight name, that ``rule`` makes of those of ``source``.

    power: how the tensors grow with the weights, for operations of the rule: 1 for the weights themselves, see
    `operations.change`. weights: all weights by name, where ``tensors`` are moments: stacks of both are as high.

    Raises MappingError when a tensor that the rule needs is missing, shapes or dtypes contradict
    the expressions, or an axis size stays open.
    """
    for weight, view, _ in apply_with_scales(rule, source, target, tensors, {}, axes, power, weights):
        yield weight, view


def apply_with_scales(
    rule: Rule,
    source: str,
    target: str,
    tensors: Mapping[str, TensorInfo],
    scales: Mapping[str, TensorInfo],
    axes: Axes,
    power: int,
    weights: Mapping[str, TensorInfo],
    *,
    moments: bool = False,
) -> Iterator[tuple[str, View, Plain | None]]:
    """As `apply_rule`, of moments and of their ``scales``, by weight: each moment made with its scales, if it has any.

    An operation of the rule changes the scales alone, so the payload stays as it is. moments: the tensors are what an
    optimizer keeps, for which a rule may have entries of its own; sizes that these leave open follow from ``weights``.
    """
    for instance in _instances(rule, source, target, tensors, scales, axes, power, weights, moments=moments):
        yield from instance.outputs()


def padding_left_out(
    rule: Rule,
    source: str,
    target: str,
    tensors: Mapping[str, TensorInfo],
    axes: Axes,
    weights: Mapping[str, TensorInfo],
    *,
    moments: bool = False,
) -> Iterator[LeftOut]:
    """What `apply_with_scales` leaves out as padding, where ``axes`` does not have the size of that, so far.

    Raises as `apply_rule` does.
    """
    for instance in _instances(rule, source, target, tensors, {}, axes, 1, weights, moments=moments):
        yield from instance.padding_left_out()


def _instances(
    rule: Rule,
    source: str,
    target: str,
    tensors: Mapping[str, TensorInfo],
    scales: Mapping[str, TensorInfo],
    axes: Axes,
    power: int,
    weights: Mapping[str, TensorInfo],
    *,
    moments: bool,
) -> Iterator[Instance]:
    """The rule at each value of its shared indices."""
    if source in rule.cases or target in rule.cases:
        for case, own, limits in _cases(rule, source, target, tensors, axes, moments=moments):
            yield from _instances(
                case,
                source,
                target,
                own,
                {weight: info for weight, info in scales.items() if weight in own},
                replace(axes, sizes={**axes.sizes, **limits}),
                power,
                weights,
                moments=moments,
            )
        return
    inputs = rule.entries(source, moments=moments)
    outputs = rule.entries(target, moments=moments)
    from_path, to_path = inputs[0].path.indices, outputs[0].path.indices
    shared = [index for index in from_path if index in to_path]
    gathered = [index for index in from_path if index not in to_path]

    groups: dict[tuple[int, ...], list[Values]] = {}
    for name in tensors:
        for entry in inputs:
            values = entry.path.match(name)
            if values is not None:
                groups.setdefault(tuple(values[index] for index in shared), []).append(values)
    height = {key: list(members) for key, members in groups.items()}
    usual = rule.entries(source)
    for values in (
        found for name in weights for entry in usual if (found := entry.path.match(name)) is not None
    ):
        if (key := tuple(values[index] for index in shared)) in height:
            height[key].append(values)
    for key in sorted(groups):
        at = dict(zip(shared, key, strict=True))
        counts = {index: 1 + max(values[index] for values in height[key]) for index in gathered}
        first = {**at, **dict.fromkeys(counts, 0)}
        beside = [
            (e, weights[n]) for e in usual if inputs != usual and (n := e.path.format(first)) in weights
        ]
        yield Instance(
            rule.between(source, target, moments=moments),
            inputs,
            outputs,
            at,
            counts,
            tensors,
            scales,
            axes,
            power,
            beside,
        )


def _cases(
    rule: Rule,
    source: str,
    target: str,
    tensors: Mapping[str, TensorInfo],
    axes: Axes,
    *,
    moments: bool,
) -> Iterator[tuple[Rule, dict[str, TensorInfo], dict[str, int]]]:
    """For each case of a rule: its own rule, its tensors, and how many numbers its digits with bounds have.

    Raises MappingError for a tensor of no case or of several, and OpenAxes for a size that the cases need.
    """
    between = rule.between(source, target, moments=moments)
    known = dict(axes.sizes)
    known |= {axis: known[other] for axis, other in axes.alias.items() if other in known}
    owners: dict[str, str] = {}
    found = []
    for numbering in rule.numberings.values():
        try:
            case = rule.at(here := numbering.at(known))
        except KeyError:
            lacking = numbering.axes - known.keys()
            absent = {axis: why for axis, why in axes.absent.items() if axis in lacking}
            raise OpenAxes(between, frozenset(lacking), [], axes.asked, absent) from None
        entries = case.entries(source, moments=moments)
        own = {
            name: info
            for name, info in tensors.items()
            if any(entry.path.match(name) is not None for entry in entries)
        }
        if not own or not case.entries(target, moments=moments):
            continue
        for name in own:
            if name in owners:
                raise MappingError(
                    f"rule {between}: expected one case of [numbers] for {tensors[name].name}, got {owners[name]} and "
                    f"{numbering.name}"
                )
            owners[name] = numbering.name
        found.append((case, own, here.limits()))
    if left := [info.name for name, info in tensors.items() if name not in owners]:
        cases = ", ".join(f"{n.name} ({n.text})" for n in rule.numberings.values())
        raise MappingError(
            f"rule {between}: expected a number of the cases {cases} in {left[0]}"
            f"{f' and {len(left) - 1} more' if len(left) > 1 else ''}, got one of none; check the sizes of the axes in "
            "them"
        )
    yield from found
