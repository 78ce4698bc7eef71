"""A conversion plan: every tensor of the destination, and where in the source its elements come from.

Planning reads metadata and a few scalars, no tensor data, and finds every mistake that names and shapes can reveal;
so a conversion that does not fit fails before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bridge.formats.base import Box, CheckpointError, CheckpointReader, TensorInfo, TreePath
from bridge.mapping import trees
from bridge.mapping.apply import Axes, apply_rule
from bridge.mapping.conventions import MOMENTS, SECTIONS, Convention, Section
from bridge.mapping.errors import MappingError
from bridge.mapping.found import NameIndex, find
from bridge.mapping.relation import TensorView, identity
from bridge.mapping.rules import HALF, PAIR, MappingTable, Rule


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


PLACES: TreePath = ("twinshard", "places")
"""Where an object notes at which places a convention's tensors were found, for the way back."""

_SHOWN = 10
_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class Plan:
    """What a checkpoint will hold.

    objects: names there, with (tree path, name in the source). notes: names of further objects, with (path, value).
    dropped: names in the source that do not go along.
    """

    tensors: Mapping[str, PlannedTensor]
    objects: Mapping[str, tuple[TreePath, str]]
    dropped: tuple[str, ...] = ()
    notes: Mapping[str, tuple[TreePath, object]] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def make_plan(
    reader: CheckpointReader,
    to: str,
    mapping: MappingTable | None = None,
    *,
    into: str | Convention | None = None,
    from_: str | None = None,
) -> Plan:
    """Plan the translation of an open checkpoint to format ``to``.

    Without a mapping tensors keep their tree paths. With one, every source tensor must be matched by exactly one rule,
    be optimizer or train state, or be listed as dropped. into, from_: the conventions of the mapping that are meant,
    where names and format do not say; into as a `Convention` also says at which places. Raises CheckpointError
    (MappingError) with everything that does not fit.
    """
    if mapping is None:
        if into is not None or from_ is not None:
            raise ValueError(f"expected a mapping for the conventions {from_} and {into}, got none")
        planned = [
            PlannedTensor(
                name if reader.format == to else _join(info.path, to),
                info.path,
                identity(name, info.shape, info.dtype),
            )
            for name, info in reader.tensors.items()
        ]
        return _collect(reader, to, planned, reader.object_paths, (), {})
    return _Planner(reader, to, mapping, into, from_).plan()


class _Planner:
    def __init__(
        self,
        reader: CheckpointReader,
        to: str,
        mapping: MappingTable,
        into: str | Convention | None,
        from_: str | None,
    ) -> None:
        self.reader, self.to, self.mapping = reader, to, mapping
        self.dropped = tuple(name for name in (*reader.tensors, *reader.object_paths) if mapping.drops(name))
        left = set(self.dropped)
        self.tensors = {name: info for name, info in reader.tensors.items() if name not in left}
        self.object_paths = {name: path for name, path in reader.object_paths.items() if name not in left}
        self.found = find(self.tensors.values(), mapping, from_, str(reader.path))
        self.source = self.found.convention
        self.places = self._noted_places()
        if isinstance(into, Convention):
            self.target = into
        else:
            target = self._target(into)
            self.target = target.at(self.places.get(target.name, {}))
        self.index = NameIndex(mapping.rules, self.source.name)
        self.problems: list[str] = []

    def plan(self) -> Plan:
        found, planned = self.found, []
        unmatched = []
        for info in found.others.values():
            if trees.is_carried(info.path, tree=self.source.separator == "/"):
                view = identity(info.name, info.shape, info.dtype)
                planned.append(PlannedTensor(_join(info.path, self.to), info.path, view))
            else:
                unmatched.append(info.name)
        owners = {section: self._owners(section) for section in SECTIONS}
        used = {id(rule) for rule in owners["weights"].values()}
        idle = [
            rule
            for rule in self.mapping.rules
            if not rule.optional and rule.entries(self.source.name) and id(rule) not in used
        ]
        if unmatched or idle:
            self.problems.append(self._misfit(unmatched, idle))
        outputs = {section: self._outputs(section, owners[section]) for section in ("weights", *MOMENTS)}
        self._require_whole_states()
        for section, views in outputs.items():
            planned += [self._tensor(section, weight, view) for weight, view in views.items()]
        planned += self._steps(list(dict.fromkeys(w for m in MOMENTS for w in outputs[m])))
        if self.problems:
            shown = self.problems[:_MAX_PROBLEMS]
            more = len(self.problems) - len(shown)
            raise MappingError("\n".join([*shown, *([f"... and {more} more problems"] if more else [])]))
        paths = {name: path for name, path in self.object_paths.items() if path != PLACES}
        if self.to == "dcp":
            paths = {name: trees.object_path(path) for name, path in paths.items()}
        return _collect(self.reader, self.to, planned, paths, self.dropped, self._notes())

    def _target(self, into: str | None) -> Convention:
        """The convention to translate to: the one asked for, the only other one, or the usual one of the format."""
        conventions = self.mapping.conventions
        if into is not None:
            if into not in conventions or into == self.source.name:
                others = [name for name in conventions if name != self.source.name]
                raise MappingError(
                    f"expected another convention of mapping {self.mapping.name} than {self.source.name}, which "
                    f"{self.reader.path} has: {', '.join(others)}; got {into!r}"
                )
            return conventions[into]
        left = [c for name, c in conventions.items() if name != self.source.name]
        fitting = [c for c in left if c.format == self.to]
        flat = {"dcp", "safetensors"}
        if not fitting and self.to in flat:
            fitting = [c for c in left if c.format in flat]
        if len(fitting) == 1:
            return fitting[0]
        if len(conventions) == 2:
            formats = " and ".join(c.format for c in conventions.values())
            raise MappingError(
                f"mapping {self.mapping.name} translates between {formats}, but {self.reader.path} is "
                f"{self.reader.format} already, with names of {self.source.name}; leave the mapping out to keep the "
                f"names, or say that {left[0].name} is meant (--into)"
            )
        raise MappingError(
            f"mapping {self.mapping.name}: {self.reader.path} has the names of {self.source.name}; say into which they "
            f"are to be translated (--into): {', '.join(c.name for c in left)}"
        )

    def _noted_places(self) -> dict[str, dict[Section, str]]:
        """What an earlier conversion noted of the places of conventions; nothing that is malformed."""
        name = next((name for name, path in self.object_paths.items() if path == PLACES), None)
        noted = self.reader.objects[name] if name is not None else {}
        places: dict[str, dict[Section, str]] = {}
        if isinstance(noted, dict):
            for convention, sections in noted.items():
                if isinstance(sections, dict) and all(isinstance(text, str) for text in sections.values()):
                    places[str(convention)] = {s: sections[s] for s in SECTIONS if s in sections}
        return places

    def _notes(self) -> dict[TreePath, object]:
        """Places of this source that are not the usual ones, for the way back, beside those noted before."""
        usual = self.mapping.conventions[self.source.name].places
        here = {section: place for section, place in self.source.places.items() if place != usual[section]}
        notes = {name: dict(places) for name, places in self.places.items() if name != self.target.name}
        if here:
            notes[self.source.name] = here
        return {PLACES: notes} if notes else {}

    def _tensor(self, section: Section, weight: str, content: TensorView | np.ndarray) -> PlannedTensor:
        path = self.target.path_of(section, weight)
        return PlannedTensor(_join(path, self.to), path, content)

    def _owners(self, section: Section) -> dict[str, Rule]:
        """The rule of each weight that a section has."""
        owners = {}
        for weight, info in self.found.sections[section].items():
            rules = self.index.rules_of(weight)
            if len(rules) > 1:
                self.problems.append(f"tensor {info.name} matches two rules: {rules[0]} and {rules[1]}")
            owners[weight] = rules[0]
            if section == "weights" and not rules[0].entries(self.target.name):
                self.problems.append(
                    f"tensor {info.name} has no counterpart in convention {self.target.name}: drop it, or add one to "
                    f"rule {rules[0]}"
                )
        return owners

    def _outputs(self, section: Section, owners: Mapping[str, Rule]) -> dict[str, TensorView]:
        views: dict[str, TensorView] = {}
        members: dict[int, dict[str, TensorInfo]] = {}
        for weight, rule in owners.items():
            members.setdefault(id(rule), {})[weight] = self.found.sections[section][weight]
        for rule in self.mapping.rules:
            if id(rule) not in members or not rule.entries(self.target.name):
                continue
            try:
                made = apply_rule(rule, self.source.name, self.target.name, members[id(rule)], self._axes)
                views.update(made)
            except MappingError as error:
                # Moments say the same again where the weights are at fault.
                if str(error) not in self.problems:
                    self.problems.append(str(error))
        return views

    def _require_whole_states(self) -> None:
        """Adam's state of a weight is both moments and, where steps are kept, a step: a part could not be written."""
        sections: list[Section] = [*MOMENTS, *(() if self.source.one_step else ("step",))]
        found = self.found.sections
        weights = dict.fromkeys(weight for section in sections for weight in found[section])
        missing = [
            self.source.name_of(section, weight)
            for weight in weights
            for section in sections
            if weight not in found[section]
        ]
        if missing:
            self.problems.append(
                f"expected the whole optimizer state of each weight in {self.reader.path}, but "
                f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )

    def _steps(self, with_moments: list[str]) -> Iterator[PlannedTensor]:
        """The step counts as the target has them."""
        try:
            step = self._step(with_moments)
        except MappingError as error:
            self.problems.append(str(error))
            return
        if step is None:
            return
        for weight in [""] if self.target.one_step else with_moments:
            yield self._tensor("step", weight, step)

    def _step(self, with_moments: list[str]) -> np.ndarray | None:
        steps = list(self.found.sections["step"].values())
        if self.source.one_step:
            count, name = self.found.count, self.source.name_of("step")
            if (count is not None) != bool(self.found.sections["exp_avg"]):
                moments = " and ".join(self.source.name_of(m, "*") for m in MOMENTS)
                expected = f"moments ({moments})" if count is not None else name
                beside = name if count is not None else "moments"
                raise MappingError(
                    f"expected {expected} beside the {beside} in {self.reader.path}, found none"
                )
            if count is None:
                return None
            value = trees.step_from_count(self.reader, count)
            return np.asarray(int(value), np.int32) if self.target.one_step else value
        if not steps:
            return None
        value = trees.count_from_steps(self.reader, steps, self.target.name_of("step"))
        return value if self.target.one_step else np.asarray(int(value), np.float32)

    @cached_property
    def _axes(self) -> Axes:
        sizes: dict[str, int] = {}
        alias: dict[str, str] = {}
        absent: dict[str, str] = {}
        table = self.mapping.axes
        by_path = {"/".join(map(str, info.path)): info for info in self.reader.tensors.values()}
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
            elif value in by_path:
                sizes[axis] = self._scalar(axis, by_path[value])
            else:
                name = value.replace("/", "/" if self.reader.format == "orbax" else ".")
                absent[axis] = f"the mapping takes it from {name}, which {self.reader.path} does not have"
        for axis in self.mapping.rotary_axes():
            sizes[axis + HALF] = 2
            if (size := sizes.get(alias.get(axis, axis))) is not None:
                if size % 2:
                    raise MappingError(
                        f"expected an even size for axis {axis} of mapping {self.mapping.name}, which is of rotary "
                        f"positions, got {size}"
                    )
                sizes[axis + PAIR] = size // 2
        return Axes(sizes, alias, absent)

    def _scalar(self, axis: str, info: TensorInfo) -> int:
        if info.shape != () or info.dtype.kind not in "iu":
            raise MappingError(
                f"expected a scalar integer in {info.name} for axis {axis} of mapping {self.mapping.name}, "
                f"got {info.dtype} of shape {info.shape}"
            )
        size = int(self.reader.read(info.name))
        if size < 0:
            raise MappingError(f"expected a size of 0 or more in {info.name} for axis {axis}, got {size}")
        return size

    def _misfit(self, unmatched: list[str], idle: list[Rule]) -> str:
        side = self.source.name
        rules = [rule for rule in self.mapping.rules if rule.entries(side)]
        lines = [f"mapping {self.mapping.name} does not fit {self.reader.path}; is this another model?"]
        if len(self.mapping.conventions) > 2:
            lines.append(f"Of its conventions ({', '.join(self.mapping.conventions)}) {side} is the nearest.")
        if unmatched:
            lines.append(
                f"{len(unmatched)} of {len(self.tensors)} tensors match no rule: {_some(unmatched)}."
            )
        if idle:
            texts = [" & ".join(e.path.text for e in rule.entries(side)) for rule in idle]
            lines.append(f"{len(idle)} of {len(rules)} rules found no tensor: {_some(texts)}.")
        else:
            known = [e.path.text for rule in rules for e in rule.entries(side)]
            lines.append(f"Mapping {self.mapping.name} knows {_some(known)}.")
        lines.append(
            "Add rules, list what may be left behind under drop, or leave the mapping out to keep the names."
        )
        return " ".join(lines)


def _collect(
    reader: CheckpointReader,
    to: str,
    planned: list[PlannedTensor],
    object_paths: Mapping[str, TreePath],
    dropped: tuple[str, ...],
    notes: Mapping[TreePath, object],
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
    further = {_join(path, to): (path, value) for path, value in notes.items()}
    return Plan(tensors, objects, dropped, further)


def _join(path: TreePath, to: str) -> str:
    return ("/" if to == "orbax" else ".").join(map(str, path))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
