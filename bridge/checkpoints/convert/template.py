"""Conversion into the tree that another program restores, told by the template: a checkpoint that the program saved.

    template                             destination
    params/<w>                           the source's weight, in the template's dtype
    opt_state/1/0/mu/<w>                 the source's first moment
    opt_state/1/0/count                  the source's step
    opt_state/1/2/count                  the source's step, which a schedule counts, too
    opt_state/0 (empty), rngs/key        the template's own, because the source has neither

The destination has exactly the template's leaves. The report names every leaf that the source lacks. A template needs
no values where the source has them: a JAX tree in memory of shapes (`jax.eval_shape`), or a file in which `torch.save`
wrote the state dicts of a model and optimizer on the meta device.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from bridge.checkpoints.convert.template_leaves import (
    OWN,
    BothReader,
    Fitted,
    Number,
    OptimizerRoots,
    is_count,
    is_state,
    moment_of,
    number_of,
    stored_as,
    tells_of_state,
    typed_as,
)
from bridge.checkpoints.ground.outputs import kind_of as kind_of_dtype
from bridge.checkpoints.ground.selection import readable_values
from bridge.core.formats import Format, format_named, open_checkpoint
from bridge.core.formats.orbax.item import StepMetadata, step_metadata
from bridge.core.formats.stores.store import is_url, local_path
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    TensorInfo,
    TreePath,
    is_whole,
    unreadable,
)
from bridge.core.formats.tensors.leaves import LEAVES, empty_kind
from bridge.core.formats.tensors.wrapping import value_of
from bridge.core.formats.whole.composite import JoinedReader
from bridge.core.mapping.language.conventions import path_of_scales
from bridge.core.mapping.language.relation import identity
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.one_rule.instance import View
from bridge.core.mapping.one_rule.scales import DecodedView
from bridge.core.mapping.plan.plan import PlannedTensor, TranslationPlan, joined_name
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS
from bridge.core.mapping.states.equal_names import SOURCE, TARGET, table_of_equal_names
from bridge.core.mapping.states.notes import PLACES, kind_of
from bridge.core.mapping.states.numbered_states import NamedStates, is_numbered, unnamed, with_named_states
from bridge.core.mapping.states.optimizers import refused, remarks
from bridge.core.mapping.states.plain_states import plain_paths, with_plain_states
from bridge.core.mapping.states.source_tree import NameIndex, find
from bridge.core.text import first_of

_LISTS = frozenset({"params", "param_names"})
"""Keys of torch's parameter groups that only tell which weights a group has."""

_MOST_PROBLEMS = 8
_UNCHANGED = "as in the template"


@contextmanager
def template_at(like: object) -> Iterator[Template]:
    """The opened template at a path, or that is a tree in memory, until the end of the block."""
    if isinstance(like, str | os.PathLike):
        with open_checkpoint(like) as reader:
            yield Template(reader)
    else:
        from bridge.checkpoints.convert.tree_reader import TreeReader

        yield Template(TreeReader(like))


def step_of_template(like: object) -> StepMetadata | None:
    """The step with named items that the template is, so that the destination is such a step; else None."""
    if not isinstance(like, str | os.PathLike):
        return None
    local = local_path(str(like)) if is_url(like) else Path(like)
    return None if local is None else step_metadata(local)


@dataclass(frozen=True)
class Template:
    """A checkpoint that the destination's program saved, with the tree that the program restores."""

    reader: CheckpointReader

    @property
    def format(self) -> Format:
        """The format of the destination: the template's, or the writable format with the same tree."""
        return format_named(kind_of(self.reader.format))

    def fitted(
        self,
        source: CheckpointReader,
        table: MappingTable | None,
        from_: str | None,
        into: str | None,
        to: Format,
        order: str | None,
    ) -> Fitted:
        """Plan the translation of ``source`` into the template's tree.

        table: None if both have the same names. from_, into: the conventions of source and template, if names do not
        tell. order: see `with_named_states`. Raises CheckpointError with all leaves that do not fit.
        """
        translated = table is not None
        if table is None:
            table, from_, into = table_of_equal_names(source, self.reader), SOURCE, TARGET
            source = with_named_states(with_plain_states(source, table), table, order)
        named = with_named_states(with_plain_states(self.reader, table), table, order)
        tree = find(named.tensors.values(), table, into, str(self.reader.path))
        plan = make_plan(source, to, table, into=tree.convention, from_=from_, wanted=tree.weights)
        rules = NameIndex(table.rules, tree.convention.name)
        lacking = [w for w, info in tree.weights.items() if joined_name(info.path, to) not in plan.tensors]
        if any(rule.tied_to for weight in lacking for rule in rules.rules_of(weight)):
            # The program restores one parameter under both names, and may keep the second one's values.
            both = dataclasses.replace(table, tied="both")
            plan = make_plan(source, to, both, into=tree.convention, from_=from_, wanted=tree.weights)
        assert plan.conventions is not None  # it has a mapping
        told, sides = plan.remarks, plan.conventions
        roots = OptimizerRoots.of(tree)
        if any(moment_of(roots.usual(tensor.path)) for tensor in plan.tensors.values()):
            for info in tree.others.values():
                if is_numbered(info.path) and not tree.convention.is_tree:
                    raise CheckpointError(unnamed(self.reader, info.path[:-3]))
            # The template's state is read as strictly as a source's: its names may mean other values.
            convention = table.conventions[plan.conventions[0]]
            index = NameIndex(table.rules, tree.convention.name, moments=True)
            unequal = refused(named, named.object_paths, tree, convention, index, is_template=True)
            if unequal.problems:
                raise CheckpointError("\n".join(unequal.problems))
            told = (*told, *remarks(named, named.object_paths, tree, convention, ()))
        plan = dataclasses.replace(
            plan, conventions=plan.conventions if translated else None, remarks=tuple(dict.fromkeys(told))
        )
        plain = plain_paths(self.reader, table)
        fitted = _Fit(source, self.reader, named, plain, plan, to, roots.usual).fitted()
        return dataclasses.replace(fitted, mapping=table, sides=sides)


@dataclass
class _Fit:
    """The work of `Template.fitted`. named: the template with names for numbers and without wrappers, from ``plain``.

    plan: at the template's places. usual: see `OptimizerRoots`.
    """

    source: CheckpointReader
    template: CheckpointReader
    named: CheckpointReader
    plain: Mapping[TreePath, TreePath]
    plan: TranslationPlan
    to: Format
    usual: Callable[[TreePath], TreePath]
    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    objects: dict[str, tuple[TreePath, str]] = field(default_factory=dict)
    notes: dict[str, tuple[TreePath, object]] = field(default_factory=dict)
    casts: dict[str, np.dtype] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    without_place: list[str] = field(default_factory=list)

    def fitted(self) -> Fitted:
        for own, info in self.template.tensors.items():
            self._tensor(own, info)
        for own, path in self.template.object_paths.items():
            if path not in (LEAVES, PLACES):
                self._object(own, path)
        dropped = (*self.plan.dropped, *self.without_place, *self._without_place())
        self._require_equal_moments()
        if self.problems:
            raise CheckpointError(
                f"{self.source.path} does not fit the template {self.template.path}: "
                f"{first_of(self.problems, _MOST_PROBLEMS)}"
            )
        plan = dataclasses.replace(
            self.plan, tensors=self.tensors, objects=self.objects, notes=self.notes, dropped=dropped
        )
        return Fitted(plan, BothReader(self.source, self.template), self.casts, self.filled)

    def _tensor(self, own: str, info: TensorInfo) -> None:
        """Plan the destination's tensor at the path of the template's tensor ``own``."""
        name, planned_name = joined_name(info.path, self.to), self._planned_name(info.path)
        planned = self.plan.tensors.get(planned_name)
        content: View | DecodedView | np.ndarray
        if planned is None and (value := self._value_at(planned_name)) is not None:
            content = self._stored(name, value, info)
        elif planned is None:
            step = self._step_at(info.path) if is_count(self.usual(info.path)) and info.numel == 1 else None
            if step is None:
                if (reason := unreadable(self.template).get(own)) is not None:
                    self.problems.append(f"{name}: {reason}")
                content, self.filled[name] = identity(OWN + own, info.shape, info.dtype), _UNCHANGED
            else:
                content, self.filled[name] = self._stored(name, step, info), f"the source's step, {step}"
        elif is_count(self.usual(info.path)) and info.numel == 1:
            content = self._stored(name, self._number(planned), info)
        else:
            content = planned.content
            if planned.shape != info.shape:
                self.problems.append(
                    f"{name}: expected shape {list(info.shape)} as in the template, got {list(planned.shape)}"
                )
            if kind_of_dtype(planned.dtype) != kind_of_dtype(info.dtype) or (
                planned.dtype != info.dtype and is_whole(info.dtype)
            ):
                self.problems.append(
                    f"{name}: expected dtype {info.dtype.name} as in the template, got {planned.dtype.name}"
                )
            elif planned.dtype != info.dtype:
                self.casts[glob.escape(name)] = info.dtype
        self.tensors[name] = PlannedTensor(name, info.path, content)

    def _stored(self, name: str, value: object, info: TensorInfo) -> np.ndarray:
        stored = stored_as(number_of(value), info)
        if stored is None:
            self.problems.append(
                f"{name}: expected a number that {info.dtype.name} of shape {list(info.shape)} can store, as in the "
                f"template, got {value!r:.80}"
            )
        return np.zeros(info.shape, info.dtype) if stored is None else stored

    def _object(self, own: str, path: TreePath) -> None:
        """Plan the destination's object at the path of the template's object ``own``."""
        name, planned_name = joined_name(path, self.to), self._planned_name(path)
        value = value_of(self.template, own)
        planned, given = self.plan.tensors.get(planned_name), self._value_at(planned_name)
        if path[-1] in _LISTS or (given is None and planned is None):
            is_step = is_count(self.usual(path)) and isinstance(value, int | float)
            step = self._step_at(path) if is_step else None
            if step is not None:
                self.notes[name], self.filled[name] = (path, step), f"the source's step, {step}"
                return
            self.objects[name] = path, OWN + own
            try:
                self.template.objects[own]
            except CheckpointError as error:
                self.problems.append(
                    f"{error}, and nothing in the source: save the template without this value"
                )
            if empty_kind(value) is None and path[-1] not in _LISTS:
                self.filled[name] = _UNCHANGED
        elif self.to == "orbax" and empty_kind(value) is not None:
            # Orbax restores an empty leaf only as an empty leaf.
            self.objects[name] = path, OWN + own
            self.without_place += planned.sources if planned is not None else (planned_name,)
        elif planned is not None:
            # Not as a tensor: stock DCP loads a tensor only into a tensor.
            number = self._number(planned)
            typed = typed_as(number, value) if isinstance(value, int | float) else number
            if typed is None or not (value is None or isinstance(value, int | float)):
                self.problems.append(
                    f"{name}: expected a value that {type(value).__name__} can hold, as in the template, got "
                    f"{number or 'a tensor'} of shape {list(planned.shape)}"
                )
            self.notes[name] = path, typed
        elif planned_name in self.plan.objects:
            self.objects[name] = path, self.plan.objects[planned_name][1]
        else:
            self.notes[name] = path, given

    def _without_place(self) -> Iterator[str]:
        """The names of what the template has no place for. A weight without a place is a problem."""
        placed = {self._planned_name(info.path) for info in self.template.tensors.values()}
        placed |= {self._planned_name(path) for path in self.template.object_paths.values()}
        weights: dict[str, str] = {}
        # A cast decodes moments with scales, and then drops the scales.
        scales = {
            path_of_scales(tensor.path) for tensor in self.plan.tensors.values() if tensor.name in placed
        }
        for name, tensor in self.plan.tensors.items():
            if name in placed:
                continue
            if tensor.path in scales:
                self.tensors[name] = tensor
            elif moment_of(self.usual(tensor.path)) is None and not is_state(self.usual(tensor.path)):
                weights[name] = first_of(tensor.sources)
            else:
                yield from tensor.sources or (name,)
        if weights:
            self.problems.append(
                f"{first_of(weights, _MOST_PROBLEMS)}: expected a place in the template for the weights "
                f"{first_of(weights.values(), 2)}, found none; leave weights out that the other program does not "
                f"have (--drop {next(iter(weights.values()))!r})"
            )
        for name, (path, old) in self.plan.objects.items():
            if name in placed:
                continue
            with suppress(CheckpointError):
                if empty_kind(self.source.objects[old]) is not None:
                    continue
            # Orbax keeps other values outside an item's tree, where no program restores them.
            if self.to == "orbax" and (
                not isinstance(self.template, JoinedReader) or path[0] in self.template.parts
            ):
                self.objects[name] = path, old
            else:
                yield old
        self.notes |= {name: note for name, note in self.plan.notes.items() if note[0] == PLACES}

    def _require_equal_moments(self) -> None:
        """Note each weight of which source and template have different moments: they are of different optimizers."""
        sides: tuple[dict[TreePath, set[str]], ...] = ({}, {})
        paths = (tensor.path for tensor in self.plan.tensors.values())
        own_paths = (self._planned_path(info.path) for info in self.template.tensors.values())
        for owners, of_side in zip(sides, (paths, own_paths), strict=True):
            for path in of_side:
                if (moment := moment_of(self.usual(path))) is not None:
                    owners.setdefault(moment[0], set()).add(moment[1])
        ours, theirs = sides
        self.problems += [
            f"{'.'.join(map(str, owner))}: expected the optimizer's state {', '.join(sorted(theirs[owner]))} as in the "
            f"template, got {', '.join(sorted(moments))}: another optimizer; leave its state out (--weights-only)"
            for owner, moments in ours.items()
            if moments != theirs.get(owner, moments)
        ]

    def _planned_path(self, path: TreePath) -> TreePath:
        """The path in the plan of a leaf of the template, which may number its weights or wrap its modules."""
        path = self.plain.get(path, path)
        return self.named.renamed(path) if isinstance(self.named, NamedStates) else path

    def _planned_name(self, path: TreePath) -> str:
        return joined_name(self._planned_path(path), self.to)

    def _value_at(self, planned_name: str) -> object:
        """The source's value for a leaf; None for a tensor, no value or an empty one. CheckpointError if unreadable."""
        _, value = self.plan.notes.get(planned_name, ((), None))
        if planned_name in self.plan.objects:
            old = self.plan.objects[planned_name][1]
            value = readable_values(self.source, [old])[old]
        return None if empty_kind(value) is not None else value

    def _number(self, tensor: PlannedTensor) -> Number | None:
        """The only element of a tensor; None for several elements."""
        whole = Box.whole(tensor.shape)
        return number_of(tensor.read(self.source, whole).flat[0]) if whole.numel == 1 else None

    def _step_at(self, path: TreePath) -> int | None:
        """The source's step for a count at ``path`` that the source lacks; None if the template's count is kept.

        A count is kept if all values next to it and below are the template's, because their state begins anew.
        """
        node = path[:-2] if path[-1] == "value" else path[:-1]
        others = [
            info
            for info in self.template.tensors.values()
            if info.path[: len(node)] == node and tells_of_state(info, self.usual(info.path))
        ]
        if others and not any(self._planned_name(info.path) in self.plan.tensors for info in others):
            return None
        if len(self._steps) > 1:
            (first, one), (second, other) = list(self._steps.items())[:2]
            self.problems.append(
                f"{joined_name(path, self.to)}: expected one step in the source, got {one} in {first} and {other} in "
                f"{second}"
            )
        return next(iter(self._steps.values()), None)

    @cached_property
    def _steps(self) -> dict[str, int]:
        """A planned count for each different step of the source's optimizer."""
        values: dict[int, str] = {}
        for name, tensor in self.plan.tensors.items():
            path = self.usual(tensor.path)
            is_step = is_count(path) and not tensor.shape and str(path[0]) in OPTIMIZER_KEYS
            if is_step and (step := typed_as(self._number(tensor), 0)) is not None:
                values.setdefault(int(step), name)
        return {name: value for value, name in values.items()}
