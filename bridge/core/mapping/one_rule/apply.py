"""One rule applied to one section of a checkpoint: which tensors it makes, and where their elements come from.

There are three kinds of path indices. A *shared* index is in the path on both sides: the rule applies once per value. A
*gathered* index is in the source's path and an axis of the target (layers are stacked). A *scattered* index is the
reverse (a stack is taken apart)::

    layers.{i}.w2 : m f   ->   layers/down : {i} f m       i gathered: n source tensors make one
    layers/down : {i} f m ->   layers.{i}.w2 : m f         i scattered: one source tensor makes n
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.operations import LeftOut
from bridge.core.mapping.one_rule.instance import Axes, Instance, Plain, Values, View
from bridge.core.mapping.one_rule.open_axes import OpenAxes


@dataclass(frozen=True)
class AppliedRule:
    """A rule, and the tensors of one section of a checkpoint to which it is applied.

    tensors: tensors of convention ``source``, by weight name. scales: of moments, by weight. power: how the tensors
    scale with the weights, for operations of the rule: 1 for the weights themselves, see `operations.change`. weights:
    all weights by name, if ``tensors`` are moments: stacks of both have equal heights. moments: whether ``tensors`` are
    optimizer state, for which a rule may have separate entries; sizes that these leave open follow from ``weights``.

    Its methods raise MappingError if a tensor that the rule needs is missing, if shapes or dtypes contradict the
    expressions, or if an axis size stays undetermined.
    """

    rule: Rule
    source: str
    target: str
    tensors: Mapping[str, TensorInfo]
    axes: Axes
    power: int = 1
    weights: Mapping[str, TensorInfo] = field(default_factory=dict)
    scales: Mapping[str, TensorInfo] = field(default_factory=dict)
    moments: bool = False

    def outputs(self) -> Iterator[tuple[str, View, Plain | None]]:
        """The tensors of convention ``target``, by weight name, and the scales of tensors whose sources have scales.

        An operation of the rule changes only the scales, so the payload is unchanged.
        """
        for instance in self._instances():
            yield from instance.outputs()

    def padding_left_out(self) -> Iterator[LeftOut]:
        """The padding that `outputs` has left out so far, if ``axes`` does not have its size."""
        for instance in self._instances():
            yield from instance.padding_left_out()

    def _instances(self) -> Iterator[Instance]:
        """The rule at each value of its shared indices."""
        if self.source in self.rule.cases or self.target in self.rule.cases:
            for case, own, limits in self._cases():
                scales = {weight: info for weight, info in self.scales.items() if weight in own}
                axes = replace(self.axes, sizes={**self.axes.sizes, **limits})
                yield from replace(self, rule=case, tensors=own, scales=scales, axes=axes)._instances()
            return
        inputs = self.rule.entries(self.source, moments=self.moments)
        outputs = self.rule.entries(self.target, moments=self.moments)
        from_path, to_path = inputs[0].path.indices, outputs[0].path.indices
        shared = [index for index in from_path if index in to_path]
        gathered = [index for index in from_path if index not in to_path]

        groups = _by_shared(inputs, self.tensors, shared)
        usual = self.rule.entries(self.source)
        of_weights = _by_shared(usual, self.weights, shared)
        for key in sorted(groups):
            at = dict(zip(shared, key, strict=True))
            stacked = [*groups[key], *of_weights.get(key, ())]
            counts = {index: 1 + max(values[index] for values in stacked) for index in gathered}
            first = {**at, **dict.fromkeys(counts, 0)}
            weight_entries = [
                (entry, self.weights[name])
                for entry in usual
                if inputs != usual and (name := entry.path.format(first)) in self.weights
            ]
            yield Instance(
                self._between,
                inputs,
                outputs,
                at,
                counts,
                self.tensors,
                self.scales,
                self.axes,
                self.power,
                weight_entries,
            )

    @property
    def _between(self) -> str:
        return self.rule.between(self.source, self.target, moments=self.moments)

    def _cases(self) -> Iterator[tuple[Rule, dict[str, TensorInfo], dict[str, int]]]:
        """For each case of the rule: its own rule, its tensors, and how many numbers its digits with bounds have.

        Raises MappingError for a tensor of no case or of several, and OpenAxes for a size that the cases need.
        """
        rule, axes, tensors = self.rule, self.axes, self.tensors
        known = dict(axes.sizes)
        known |= {axis: known[other] for axis, other in axes.alias.items() if other in known}
        owners: dict[str, str] = {}
        cases = []
        for numbering in rule.numberings.values():
            try:
                case = rule.at(here := numbering.at(known))
            except KeyError:
                lacking = numbering.axes - known.keys()
                absent = {axis: why for axis, why in axes.absent.items() if axis in lacking}
                raise OpenAxes(self._between, frozenset(lacking), [], axes.asked, absent) from None
            entries = case.entries(self.source, moments=self.moments)
            own = {
                name: info
                for name, info in tensors.items()
                if any(entry.path.match(name) is not None for entry in entries)
            }
            if not own or not case.entries(self.target, moments=self.moments):
                continue
            for name in own:
                if name in owners:
                    raise MappingError(
                        f"rule {self._between}: expected one case of [numbers] for {tensors[name].name}, "
                        f"got {owners[name]} and {numbering.name}"
                    )
                owners[name] = numbering.name
            cases.append((case, own, here.limits()))
        if left := [info.name for name, info in tensors.items() if name not in owners]:
            known_cases = ", ".join(f"{n.name} ({n.text})" for n in rule.numberings.values())
            raise MappingError(
                f"rule {self._between}: expected a number of one of the cases {known_cases} in "
                f"{left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}, got a number of no case; check "
                "the sizes of the axes in the cases"
            )
        yield from cases


def _by_shared(
    entries: Sequence[Entry], names: Iterable[str], shared: Sequence[str]
) -> dict[tuple[int, ...], list[Values]]:
    """The values of all indices in each name that an entry matches, by the values of the shared indices."""
    groups: dict[tuple[int, ...], list[Values]] = {}
    for name in names:
        for entry in entries:
            values = entry.path.match(name)
            if values is not None:
                groups.setdefault(tuple(values[index] for index in shared), []).append(values)
    return groups


def apply_rule(
    rule: Rule, source: str, target: str, tensors: Mapping[str, TensorInfo], axes: Axes
) -> Iterator[tuple[str, View]]:
    """The tensors that a rule makes of weights, by name; see `AppliedRule`."""
    for weight, view, _ in AppliedRule(rule, source, target, tensors, axes).outputs():
        yield weight, view
