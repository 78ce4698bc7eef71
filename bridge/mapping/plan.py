"""A conversion plan: every tensor of the destination, and where in the source its elements come from.

Planning reads metadata and a few scalars, no tensor data, and finds every mistake that names and shapes can reveal;
so a conversion that does not fit fails before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from bridge.formats.base import Box, CheckpointError, CheckpointReader, TensorInfo, TreePath
from bridge.mapping import trees
from bridge.mapping.apply import Axes, apply_rule
from bridge.mapping.errors import MappingError
from bridge.mapping.relation import TensorView, identity
from bridge.mapping.rules import MappingTable, Rule
from bridge.mapping.trees import Format


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the destination: a view of source tensors, or a 0-d value known already (the step count)."""

    name: str
    path: TreePath
    content: TensorView | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.content.shape

    @property
    def dtype(self) -> np.dtype:
        return self.content.dtype

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``, C-contiguous; needs memory for the box and one bounded source region."""
        if isinstance(self.content, TensorView):
            return self.content.read(reader, box)
        return self.content


@dataclass(frozen=True)
class Plan:
    """What a checkpoint will hold. ``objects`` maps names there to (tree path, name in source)."""

    tensors: Mapping[str, PlannedTensor]
    objects: Mapping[str, tuple[TreePath, str]]
    dropped: tuple[str, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def make_plan(reader: CheckpointReader, to: Format, mapping: MappingTable | None = None) -> Plan:
    """Plan the translation of an open checkpoint to format ``to``.

    Without a mapping tensors keep their tree paths. With one, every source tensor must be matched by exactly one rule,
    be optimizer or train state, or be listed as dropped. Raises CheckpointError (MappingError) with the names that
    do not fit, and when a mapping is given between checkpoints of the same format.
    """
    source = cast(Format, reader.format)
    if mapping is None:
        names = {
            name: name if source == to else _join(info.path, to) for name, info in reader.tensors.items()
        }
        planned = [
            PlannedTensor(names[name], info.path, identity(name, info.shape, info.dtype))
            for name, info in reader.tensors.items()
        ]
        return _collect(reader, to, planned, reader.object_paths, ())
    if source == to:
        raise MappingError(
            f"mapping {mapping.name} translates between dcp and orbax, but {reader.path} is {source} already; "
            "leave the mapping out to keep the names"
        )
    return _Planner(reader, source, to, mapping).plan()


class _Planner:
    def __init__(self, reader: CheckpointReader, source: Format, to: Format, mapping: MappingTable) -> None:
        self.reader, self.source, self.to, self.mapping = reader, source, to, mapping
        self.side = trees.SIDES[source]
        self.dropped = tuple(name for name in (*reader.tensors, *reader.object_paths) if mapping.drops(name))
        left = set(self.dropped)
        self.tensors = {name: info for name, info in reader.tensors.items() if name not in left}
        self.object_paths = {name: path for name, path in reader.object_paths.items() if name not in left}

    def plan(self) -> Plan:
        sections: dict[str, dict[str, TensorInfo]] = {section.title: {} for section in trees.SECTIONS}
        steps: dict[str, str] = {}
        planned: list[PlannedTensor] = []
        unmatched: list[str] = []
        for name, info in self.tensors.items():
            weights = {
                s.title: w for s in trees.SECTIONS if (w := s.weight_of(name, self.source)) is not None
            }
            if trees.is_train(name, self.source):
                planned.append(_train(info, self.to))
            elif self.source == "dcp" and (weight := trees.STEP.weight_of(name, "dcp")) is not None:
                steps[weight] = name
            elif self.source == "orbax" and name == trees.COUNT:
                continue
            elif not weights:
                unmatched.append(name)
            for title, weight in weights.items():
                sections[title][weight] = info

        owners = {title: self._owners(tensors) for title, tensors in sections.items()}
        for section in trees.SECTIONS:
            known = owners[section.title]
            unmatched += [info.name for w, info in sections[section.title].items() if w not in known]
        unmatched += [name for weight, name in steps.items() if not self._rules_of(weight)]
        used = owners[trees.WEIGHTS.title].values()
        idle = [rule for rule in self.mapping.rules if not rule.optional and rule not in used]
        if unmatched or idle:
            raise self._misfit(unmatched, idle)

        axes = self._axes()
        outputs = {
            section.title: list(self._outputs(sections[section.title], axes)) for section in trees.SECTIONS
        }
        self._require_whole_states(sections, steps)
        for section in trees.SECTIONS:
            planned += [
                PlannedTensor(section.name_of(weight, self.to), section.path_of(weight, self.to), view)
                for weight, view in outputs[section.title]
            ]
        with_moments = dict.fromkeys(weight for s in trees.MOMENTS for weight, _ in outputs[s.title])
        planned += self._steps(steps, list(with_moments))
        paths = self.object_paths
        if self.to == "dcp":
            paths = {name: trees.object_path(path) for name, path in paths.items()}
        return _collect(self.reader, self.to, planned, paths, self.dropped)

    def _require_whole_states(
        self, sections: Mapping[str, Mapping[str, TensorInfo]], steps: Mapping[str, str]
    ) -> None:
        """Adam's state of a weight is both moments and, in DCP, a step: a part alone could not be written there."""
        per_weight: dict[trees.Section, Iterable[str]] = {s: sections[s.title] for s in trees.MOMENTS}
        if self.source == "dcp":
            per_weight[trees.STEP] = steps
        weights = dict.fromkeys(weight for members in per_weight.values() for weight in members)
        missing = [
            section.name_of(weight, self.source)
            for weight in weights
            for section, members in per_weight.items()
            if weight not in members
        ]
        if missing:
            raise MappingError(
                f"expected the whole optimizer state of each weight in {self.reader.path}, but "
                f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )

    def _rules_of(self, weight: str) -> list[Rule]:
        return [
            rule
            for rule in self.mapping.rules
            for entry in rule.entries(self.side)
            if entry.path.match(weight) is not None
        ]

    def _owners(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Rule]:
        """The rule of each weight that has one."""
        owners = {}
        for weight, info in tensors.items():
            rules = self._rules_of(weight)
            if len(rules) > 1:
                raise MappingError(f"tensor {info.name} matches two rules: {rules[0]} and {rules[1]}")
            if rules:
                owners[weight] = rules[0]
        return owners

    def _outputs(self, tensors: Mapping[str, TensorInfo], axes: Axes) -> Iterator[tuple[str, TensorView]]:
        for rule in self.mapping.rules:
            yield from apply_rule(rule, self.side, tensors, axes)

    def _steps(self, steps: Mapping[str, str], with_moments: list[str]) -> Iterator[PlannedTensor]:
        if self.source == "dcp" and steps:
            count = trees.count_from_steps(self.reader, list(steps.values()))
            yield PlannedTensor(trees.COUNT, tuple(trees.COUNT.split("/")), count)
        if self.source == "orbax":
            has_count = trees.COUNT in self.tensors
            if has_count != bool(with_moments):
                expected = "moments (opt_state/mu, opt_state/nu)" if has_count else trees.COUNT
                found = trees.COUNT if has_count else "moments"
                raise MappingError(
                    f"expected {expected} beside the {found} in {self.reader.path}, found none"
                )
            step = trees.step_from_count(self.reader) if has_count else np.zeros((), np.float32)
            for weight in with_moments:
                yield PlannedTensor(
                    trees.STEP.name_of(weight, "dcp"), trees.STEP.path_of(weight, "dcp"), step
                )

    def _axes(self) -> Axes:
        sizes: dict[str, int] = {}
        alias: dict[str, str] = {}
        absent: dict[str, str] = {}
        table = self.mapping.axes
        for axis, value in table.items():
            end, seen = axis, [axis]
            while isinstance(target := table.get(end), str) and "/" not in target:
                if target in seen:
                    raise MappingError(
                        f"the axes {' = '.join([*seen, target])} of mapping {self.mapping.name} form a loop"
                    )
                end = target
                seen.append(target)
            if end != axis:
                alias[axis] = end
            elif isinstance(value, int):
                sizes[axis] = value
            elif (name := trees.canonical_to(value, self.source)) in self.reader.tensors:
                sizes[axis] = self._scalar(axis, name)
            else:
                absent[axis] = f"the mapping takes it from {name}, which {self.reader.path} does not have"
        return Axes(sizes, alias, absent)

    def _scalar(self, axis: str, name: str) -> int:
        info = self.reader.tensors[name]
        if info.shape != () or info.dtype.kind not in "iu":
            raise MappingError(
                f"expected a scalar integer in {name} for axis {axis} of mapping {self.mapping.name}, "
                f"got {info.dtype} of shape {info.shape}"
            )
        size = int(self.reader.read(name))
        if size < 0:
            raise MappingError(f"expected a size of 0 or more in {name} for axis {axis}, got {size}")
        return size

    def _misfit(self, unmatched: list[str], idle: list[Rule]) -> MappingError:
        lines = [f"mapping {self.mapping.name} does not fit {self.reader.path}; is this another model?"]
        if unmatched:
            lines.append(
                f"{len(unmatched)} of {len(self.tensors)} tensors match no rule: {_some(unmatched)}."
            )
        if idle:
            texts = [" & ".join(e.path.text for e in rule.entries(self.side)) for rule in idle]
            lines.append(f"{len(idle)} of {len(self.mapping.rules)} rules found no tensor: {_some(texts)}.")
        else:
            known = [e.path.text for rule in self.mapping.rules for e in rule.entries(self.side)]
            lines.append(f"Mapping {self.mapping.name} knows {_some(known)}.")
        lines.append(
            "Add rules, list what may be left behind under drop, or leave the mapping out to keep the names."
        )
        return MappingError(" ".join(lines))


def _collect(
    reader: CheckpointReader,
    to: Format,
    planned: list[PlannedTensor],
    object_paths: Mapping[str, TreePath],
    dropped: tuple[str, ...],
) -> Plan:
    tensors: dict[str, PlannedTensor] = {}
    for tensor in planned:
        if tensor.name in tensors:
            raise CheckpointError(f"two tensors of {reader.path} would both be named {tensor.name} in {to}")
        tensors[tensor.name] = tensor
    objects: dict[str, tuple[TreePath, str]] = {}
    for name, path in object_paths.items():
        if (joined := _join(path, to)) in objects:
            raise CheckpointError(f"two objects of {reader.path} would both be named {joined} in {to}")
        objects[joined] = (path, name)
    return Plan(tensors, objects, dropped)


def _train(info: TensorInfo, to: Format) -> PlannedTensor:
    return PlannedTensor(_join(info.path, to), info.path, identity(info.name, info.shape, info.dtype))


def _join(path: TreePath, to: Format) -> str:
    return ("." if to == "dcp" else "/").join(map(str, path))


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
