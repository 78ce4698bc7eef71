"""A conversion plan: every tensor of the destination, and where in the source its elements come from.

Planning reads metadata and a few scalars, but no tensor data. Planning finds every mistake that names and shapes can
reveal, so a conversion that does not fit fails before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from bridge.core.formats.tensors.base import CheckpointReader, TensorInfo, TreePath
from bridge.core.mapping.fit.problems import NAMES, Problems, idle, misfit, num_layers, uneven
from bridge.core.mapping.language.conventions import (
    BY_WEIGHT,
    MODEL_WEIGHTS,
    MOMENTS,
    POWERS,
    SCALES,
    WEIGHT,
    Convention,
    Section,
    usual_in,
)
from bridge.core.mapping.language.entries import Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.operations import require_zeros
from bridge.core.mapping.language.relation import identity
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.one_rule.apply import AppliedRule
from bridge.core.mapping.one_rule.instance import Axes, Plain, View
from bridge.core.mapping.one_rule.scales import of_whole_rows
from bridge.core.mapping.one_rule.sizes import known_sizes
from bridge.core.mapping.plan.plan import PlannedTensor, TranslationPlan, carried_over, collect, joined_name
from bridge.core.mapping.states import beside_weights
from bridge.core.mapping.states.chains import completed
from bridge.core.mapping.states.equal_names import SOURCE
from bridge.core.mapping.states.hyperparameters import followed
from bridge.core.mapping.states.notes import (
    PLACES,
    added_parts,
    conventions_for,
    noted,
    noted_axes,
    read_notes,
    root_remark,
    updated,
)
from bridge.core.mapping.states.numbered_states import is_numbered, unnamed
from bridge.core.mapping.states.optimizers import refused, remarks
from bridge.core.mapping.states.source_tree import NameIndex, Tensors, find
from bridge.core.mapping.states.states import StatePlan, like_source, merged, of_other_shapes, require_whole
from bridge.core.mapping.states.tied import one_of_two, require_ties, second_of_two, under_first_names
from bridge.core.text import did_you_mean, first_lines

T = TypeVar("T")
_Made = tuple[str, View, Plain | None]
_MAX_PROBLEMS = 20


def make_plan(
    reader: CheckpointReader,
    to: str,
    mapping: MappingTable | None = None,
    *,
    into: str | Convention | None = None,
    from_: str | None = None,
    wanted: Tensors | None = None,
) -> TranslationPlan:
    """Plan the translation of an open checkpoint to format ``to``.

    Without a mapping, tensors keep their tree paths. With a mapping, every source tensor must be matched by exactly one
    rule, be optimizer or train state, or be listed as dropped. into, from_: the mapping's conventions of target and
    source, if names and format leave the choice open; a `Convention` as ``into`` also gives the places. wanted: weights
    of the target with known shapes, by name in ``into``: they also determine sizes of axes.

    Raises CheckpointError (MappingError) with everything that does not fit.
    """
    if mapping is None:
        if into is not None or from_ is not None:
            raise ValueError(f"expected a mapping for the conventions {from_} and {into}, got none")
        return carried_over(reader, to)
    return _Planner(reader, to, mapping, into, from_, wanted or {}).plan()


class _Planner:
    def __init__(
        self,
        reader: CheckpointReader,
        to: str,
        mapping: MappingTable,
        into: str | Convention | None,
        from_: str | None,
        wanted: Tensors,
    ) -> None:
        self.reader, self.to = reader, to
        self.dropped = tuple(name for name in (*reader.tensors, *reader.object_paths) if mapping.drops(name))
        left = set(self.dropped)
        self.tensors = {name: info for name, info in reader.tensors.items() if name not in left}
        self.object_paths = {name: path for name, path in reader.object_paths.items() if name not in left}
        self.notes = read_notes(reader, self.object_paths)
        known = mapping.config.keys() - mapping.axes.keys()
        earlier = {axis: n for axis, n in noted_axes(self.notes).items() if axis in known}
        self.mapping = mapping = mapping.with_axes(earlier)
        self.asked = {axis: n for axis in sorted(mapping.asked) if isinstance(n := mapping.axes[axis], int)}
        self.tree = find(self.tensors.values(), mapping, from_, str(reader.path))
        self.source = self.tree.convention
        self.kept, self.wanted = False, wanted
        if isinstance(into, Convention):
            self.target = into
        else:
            self.target = self._at_its_places(self._target(into))
        self.problems = Problems()
        sides = self.source.name, self.target.name
        self.mapping = mapping = self._try(lambda: mapping.decided(sides, str(reader.path))) or mapping
        self.index, self.moments_index = (
            NameIndex(mapping.rules, self.source.name, moments=moments) for moments in (False, True)
        )

    def plan(self) -> TranslationPlan:
        tree = self.tree
        unequal = refused(self.reader, self.object_paths, tree, self.target, self.moments_index)
        for text in unequal.problems:
            self.problems.append(text)
        carried, unmatched = self._others(unequal.names)
        under_first_names(self.mapping, tree)
        sections = merged(tree, self.problems)
        twice = self._try(lambda: one_of_two(self.reader, self.mapping, tree, self.target, self._axes)) or []
        dropped = (*self.dropped, *(tree.weights.pop(weight).name for weight in twice))
        owners = self._owners("weights", tree.weights)
        parts = {rule.part for rule in owners.values() if rule.part}
        self._try(lambda: require_ties(self.reader, self.mapping, tree, self._axes, parts))
        self._require_fit(owners, unmatched)
        outputs = self._moments(sections)
        weights = self._weights(owners, parts)
        if not unequal.problems:
            own = self.mapping.conventions[self.source.name]
            require_whole(tree, own, str(self.reader.path), self.problems)
        planned = [*carried, *(self._tensor("weights", weight, view) for weight, view in weights.items())]
        states = StatePlan(self.reader, tree, self.target, outputs, self.kept)
        planned += [self._tensor(s, w, content, k) for s, w, k, content in states.tensors(self.problems)]
        paths, values = self._objects(weights)
        empty, chain = self._chain(outputs, [*(tensor.path for tensor in planned), *paths.values()])
        self._raise_problems()
        if self.to == "dcp":
            paths = {name: beside_weights.object_path(path) for name, path in paths.items()}
        plan = collect(self.reader, self.to, planned, paths, dropped, values | empty | self._noted(empty))
        told: Iterable[str] = ()
        if self.target.name not in self.notes:
            # A template may have no place for them.
            names = [] if self.wanted else ["/".join(map(str, tensor.path)) for tensor in carried]
            told = remarks(self.reader, self.object_paths, tree, self.target, names)
            if any(outputs.values()) and (root := root_remark(self.target, self.to)):
                told = (*told, root)
        told = (*told, *([chain] if chain else []), *self._fewer_layers(owners))
        return replace(plan, conventions=(self.source.name, self.target.name), remarks=told)

    def _others(self, refused_names: Collection[str]) -> tuple[list[PlannedTensor], list[str]]:
        """Tensors other than weights and moments: those that are copied, and the names of those without a rule.

        A state that only numbers its weights is a problem.
        """
        trees = self.source.is_tree and self.target.is_tree
        # In a template with another chain, the source's places of other parts mean something else.
        moved = bool(self.wanted) and trees and self.source.states != self.target.states
        at = "" if self.source.name == SOURCE else self.source.places["weights"]
        carried, unmatched, numbered = [], [], set[TreePath]()
        for info in self.tree.others.values():
            if info.name in refused_names:
                continue
            if moved and info.path[0] in beside_weights.OPTIMIZER_KEYS:
                self.dropped += (info.name,)
                continue
            if beside_weights.is_carried(info, between_trees=trees and bool(at), weights=at):
                view = identity(info.name, info.shape, info.dtype)
                carried.append(PlannedTensor(joined_name(info.path, self.to), info.path, view))
            elif not is_numbered(info.path):
                unmatched.append(info.name)
            elif info.path[:-3] not in numbered:
                numbered.add(info.path[:-3])
                self.problems.append(unnamed(self.reader, info.path[:-3]))
        return carried, unmatched

    def _require_fit(self, owners: Mapping[str, Rule], unmatched: Sequence[str]) -> None:
        """Note tensors without rules, rules without tensors, and layers that are not alike."""
        rules, source = self.mapping.rules, self.source.name
        unused = idle(rules, source, owners)
        if unmatched or unused:
            self.problems.append(
                misfit(self.reader, len(self.tensors), self.mapping, source, unmatched, unused)
            )
        for text, rule in uneven(rules, source, owners):
            self.problems.add(text, rule)

    def _moments(self, sections: Mapping[Section, Tensors]) -> dict[Section, dict[str, View]]:
        """The target's moments and their scales, by section and weight."""
        cut = of_other_shapes(self.tree, str(self.reader.path), self.problems)
        outputs: dict[Section, dict[str, View]] = {section: {} for section in BY_WEIGHT}
        for moment in MOMENTS:
            mapped = {w: info for w, info in sections[moment].items() if info.name not in cut}
            owned = self._owners(moment, mapped)
            scales = {w: info for w, info in sections[SCALES[moment]].items() if w in owned}
            made = self._outputs(moment, sections[moment], owned, scales)
            outputs[moment], outputs[SCALES[moment]] = made
        return outputs

    def _weights(self, owners: Mapping[str, Rule], parts: Collection[str]) -> dict[str, View]:
        """The target's weights, including second names. parts: the parts of the model that the source has."""
        weights, _ = self._outputs("weights", self.tree.weights, owners, {})
        # Numbers of cases and heights of stacks can be compared only if all layers have one name.
        if any(self.source.name in rule.cases for rule in owners.values()):
            theirs = NameIndex(self.mapping.rules, self.target.name)
            there = {weight: rule for weight in weights for rule in theirs.rules_of(weight)}
            for text, rule in uneven(self.mapping.rules, self.target.name, there):
                self.problems.add(text, rule)
        # A PyTorch state dict has all names of its tensors.
        every = self.to == "dcp"
        named = partial(
            second_of_two, self.mapping, self.tree, self.target.name, self._axes, parts, every=every
        )
        return weights | (self._try(lambda: dict(named())) or {})

    def _objects(self, weights: Mapping[str, View]) -> tuple[dict[str, TreePath], dict[TreePath, object]]:
        """The paths of objects that are copied, and values that replace the source's in the target."""
        added = added_parts(self.notes, self.target)
        written = {
            name: "/".join(map(str, path)) for name, path in self.object_paths.items() if path != PLACES
        }
        # In an edited checkpoint, this may no longer be an empty part.
        empty_there = {n for n, path in written.items() if path in added and self.reader.objects[n] is None}
        paths = {name: self.object_paths[name] for name in written if name not in empty_there}
        follow = partial(followed, self.reader, paths, self.mapping, self.target, weights)
        return self._try(follow) or ({}, {})

    def _raise_problems(self) -> None:
        if self.problems:
            problems = self._told_by_config(self.problems.texts(self.mapping.name))
            raise MappingError("\n".join(first_lines(problems, _MAX_PROBLEMS, " problems")))

    def _target(self, into: str | None) -> Convention:
        """The convention to translate to: the requested one, the only other one, or the usual one of the format."""
        conventions = self.mapping.conventions
        if into is not None:
            known = self.mapping.convention_of(into)
            if known is None or known == self.source.name:
                others = [name for name in conventions if name != self.source.name]
                raise MappingError(
                    f"expected a convention of mapping {self.mapping.name} other than {self.source.name}, which "
                    f"{self.reader.path} already has: {', '.join(others)}; got {into!r}{did_you_mean(into, others)}"
                )
            return conventions[known]
        left = [c for name, c in conventions.items() if name != self.source.name]
        came = [c for c in left if c.name in conventions_for(self.notes, self.to)]
        if len(came) == 1:
            return came[0]
        # A model without its heads becomes a model without heads.
        fitting = usual_in(self.to, [c for c in left if c.without == self.source.without])
        if len(fitting) == 1:
            return fitting[0]
        if len(conventions) == 2:
            formats = " and ".join(c.format for c in conventions.values())
            raise MappingError(
                f"mapping {self.mapping.name} translates between {formats}, but {self.reader.path} is already "
                f"{self.reader.format}, with the names of {self.source.name}; leave the mapping out to keep the "
                f"names, or give --into {left[0].name} to translate them"
            )
        raise MappingError(
            f"mapping {self.mapping.name}: the target convention of {self.reader.path}, which has the names of "
            f"{self.source.name}, is not clear; choose one (--into): {', '.join(c.name for c in left)}; in a program, "
            f"load_mapping({self.mapping.name!r}).between({self.source.name!r}, NAME)"
        )

    def _at_its_places(self, target: Convention) -> Convention:
        """The target at places that an earlier conversion noted, else with the states of a source of the same kind."""
        if is_noted := target.name in self.notes:
            target = noted(target, self.notes[target.name])
        else:
            self.kept = self.source.is_tree == target.is_tree
        if self.to == "safetensors" and target.places["weights"] == MODEL_WEIGHTS:
            # `from_pretrained` and all other readers expect the weights at the root of such files.
            target = target.at(WEIGHT, target.states)
        return target if is_noted else like_source(self.source, target)

    def _chain(
        self, outputs: Mapping[Section, Mapping[str, View]], taken: Sequence[TreePath]
    ) -> tuple[dict[TreePath, object], str]:
        """Empty parts of an optax chain, and which optimizer it fits; nothing if the chain is known.

        It is known if a checkpoint records it, or if the target is a tree that exists.
        """
        usual = self.mapping.conventions[self.target.name].states
        if self.to != "orbax" or not self.target.is_tree or self.target.states != usual or self.wanted:
            return {}, ""
        return completed(self.target, [section for section in outputs if outputs[section]], taken)

    def _told_by_config(self, problems: Sequence[str]) -> Sequence[str]:
        """The problems, and the origin of sizes that do not fit."""
        config = self.mapping.told
        if config is None or not config.sizes or not any("expected size" in text for text in problems):
            return problems
        sizes = ", ".join(f"{axis}={size}" for axis, size in config.sizes.items())
        return [
            *problems,
            f"{config.where} gives {sizes}: if it is for another model, give the sizes (--axis AXIS=SIZE --any-model)",
        ]

    def _fewer_layers(self, owners: Mapping[str, Rule]) -> Sequence[str]:
        config, there = self.mapping.told, num_layers(self.source.name, owners)
        if config is None or config.layers is None or not 0 < there < config.layers:
            return ()
        return (
            f"{config.where} says that the model has {config.layers} layers, but these are the weights of {there}",
        )

    def _noted(self, empty: Iterable[TreePath]) -> dict[TreePath, object]:
        """The notes that a conversion back needs about this source, and earlier notes."""
        known, format = self.mapping.conventions, self.reader.format
        notes = updated(self.notes, self.source, self.target, known, format, self.asked, empty)
        return {PLACES: notes} if notes else {}

    def _tensor(
        self, section: Section, weight: str, content: View | np.ndarray, state: int = 0
    ) -> PlannedTensor:
        path = self.target.path_of(section, weight, state)
        return PlannedTensor(joined_name(path, self.to), path, content)

    def _owners(self, section: Section, tensors: Tensors) -> dict[str, Rule]:
        """The rule of each weight in a section."""
        owners = {}
        index = self.index if section == "weights" else self.moments_index
        for weight, info in tensors.items():
            rules = index.rules_of(weight)
            if len(rules) > 1:
                self.problems.add(f"tensor {NAMES} matches two rules: {rules[0]} and {rules[1]}", info.name)
            owners[weight] = rules[0]
            if section == "weights" and not rules[0].entries(self.target.name):
                self.problems.add(
                    f"tensor {NAMES} has no counterpart in convention {self.target.name}: drop it, or add a "
                    f"counterpart to rule {rules[0]}",
                    info.name,
                )
        return owners

    def _outputs(
        self, section: Section, tensors: Tensors, owners: Mapping[str, Rule], scales: Tensors
    ) -> tuple[dict[str, View], dict[str, View]]:
        """The target's tensors of a section, and their scales if the source has some, by weight."""
        views: dict[str, View] = {}
        scale_views: dict[str, View] = {}
        makers: dict[str, Rule] = {}
        members: dict[int, dict[str, TensorInfo]] = {}
        for weight, rule in owners.items():
            members.setdefault(id(rule), {})[weight] = tensors[weight]
        for rule in self.mapping.rules:
            if id(rule) not in members or not rule.entries(self.target.name):
                continue
            own = members[id(rule)]
            applied = AppliedRule(
                rule,
                self.source.name,
                self.target.name,
                own,
                self._axes,
                POWERS[section],
                self.tree.weights,
                {weight: info for weight, info in scales.items() if weight in own},
                moments=section != "weights",
            )
            made: list[_Made] = self._try(partial(list[_Made], applied.outputs())) or []
            if made and any(entry.zeros for entry in rule.entries(self.source.name)):
                left_out = applied.padding_left_out()
                self._try(partial(require_zeros, self.reader, left_out, self.target.name))
            for weight, view, scale in made:
                if weight in makers:
                    self.problems.add(
                        f"{self.target.name} {NAMES} is made by two rules, and only one can be written: "
                        f"{makers[weight]} and {rule}",
                        weight,
                    )
                makers[weight], views[weight] = rule, view
                if scale is not None:
                    scale_views[weight] = of_whole_rows(scale, self.reader)
        return views, scale_views

    def _try(self, work: Callable[[], T]) -> T | None:
        """The result of ``work``; None if ``work`` raises MappingError, which is then added to the problems."""
        try:
            return work()
        except MappingError as error:
            self.problems.raised(error)
            return None

    @cached_property
    def _axes(self) -> Axes:
        return replace(known_sizes(self.reader, self.mapping), wanted=self.wanted)
