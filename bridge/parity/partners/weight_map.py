"""Which torch parameters are which JAX parameters, and values of one side in the layout of the other.

A mapping's rules relate tensors; a stack on one side relates its layers one by one::

    torch                               JAX
    layers.0.mlp.up.weight      <-->    (layers/mlp/up/kernel, 0)
    layers.1.mlp.up.weight      <-->    (layers/mlp/up/kernel, 1)

A parameter, or a layer of a stack of parameters, is a ``Key``: its name, and its numbers along the axes that the other
side writes as numbers in names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bridge.core.formats.tensors.base import Box, TensorInfo
from bridge.core.mapping import MappingError, MappingTable
from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.one_rule.apply import AppliedRule
from bridge.core.mapping.one_rule.instance import View
from bridge.core.mapping.one_rule.sizes import known_sizes
from bridge.core.mapping.states.source_tree import NameIndex, SourceTree, find
from bridge.core.text import first_of
from bridge.parity.partners.lazy_arrays import ArrayReader, LazyLeaves
from bridge.parity.partners.rows import BUFFER
from bridge.parity.recorded.recording import Leaves, Side

Key = tuple[str, tuple[int, ...]]
Order = tuple[int, ...] | None


@dataclass(frozen=True)
class WeightMap:
    """Two models' parameters through a mapping. Names are the models' own, with whatever root they have.

    ``edges``: pairs of keys that hold the same elements or parts of them. ``torch_only``, ``jax_only``: parameters that
    the mapping relates to no other. ``torch_buffers``, ``jax_buffers``: names of buffers, which the mapping need not
    know. ``dropped``: buffers that it drops. MappingError if the mapping does not fit both models.
    """

    mapping: MappingTable
    torch: SourceTree = field(repr=False)
    jax: SourceTree = field(repr=False)
    torch_names: Mapping[str, str] = field(repr=False)
    jax_names: Mapping[str, str] = field(repr=False)
    torch_buffers: frozenset[str] = frozenset()
    jax_buffers: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, mapping: MappingTable, torch: Leaves, jax: Leaves, buffers: tuple[Leaves, Leaves] = ({}, {})
    ) -> WeightMap:
        """The relation of two models' weights and buffers."""
        sides, names, dropped = [], [], []
        for what, leaves, held, separator in (
            ("the torch model", torch, buffers[0], "."),
            ("the JAX model", jax, buffers[1], "/"),
        ):
            state, own = found_in_model(mapping, leaves, held, separator, what)
            others = {info.name: own[info.name] for info in state.others.values()}
            drops = {name for stored, name in others.items() if mapping.drops(stored)}
            unknown = sorted(set(others.values()) - drops - held.keys())
            dropped += sorted(drops & held.keys())
            if unknown or not state.weights:
                raise MappingError(
                    f"{what}: expected parameters that mapping {mapping.name} knows, as convention "
                    f"{state.convention.name}, got {first_of(unknown) or 'none that it knows'}; "
                    "add rules, list them "
                    "under drop, or give another mapping"
                )
            index = NameIndex(mapping.rules, state.convention.name)
            for weight in state.weights:
                if len(rules := index.rules_of(weight)) > 1:
                    raise MappingError(
                        f"{what}: {weight} matches two rules of mapping {mapping.name}: {rules[0]} and {rules[1]}"
                    )
            sides.append(state)
            names.append({weight: own[info.name] for weight, info in state.weights.items()})
        first, second = sides
        if first.convention.name == second.convention.name:
            raise MappingError(
                f"mapping {mapping.name}: expected two conventions, got both models in {first.convention.name}"
            )
        of_buffers = frozenset(buffers[0]), frozenset(buffers[1])
        return cls(mapping, first, second, names[0], names[1], *of_buffers, tuple(dropped))

    @classmethod
    def of_sides(cls, mapping: MappingTable, torch: Side, jax: Side) -> WeightMap:
        """The relation of two sides' weights and buffers."""
        return cls.of(mapping, torch.weights(), jax.weights(), (torch.buffers(), jax.buffers()))

    @cached_property
    def edges(self) -> frozenset[tuple[Key, Key]]:
        edges = set()
        for rule in self.mapping.rules:
            left = _members(rule, self.torch.convention.name, self.torch_names)
            right = _members(rule, self.jax.convention.name, self.jax_names)
            for entry, name, values in left:
                for other, other_name, others in right:
                    if any(others.get(index, value) != value for index, value in values.items()):
                        continue
                    if self._torch_sources.get(other_name, {name}).isdisjoint({name}):
                        continue
                    every = {**values, **others}
                    edges.add(((name, _along(entry, every)), (other_name, _along(other, every))))
        return frozenset(edges)

    @cached_property
    def _torch_sources(self) -> Mapping[str, frozenset[str]]:
        """The torch tensors with a JAX tensor's elements, by name; empty if sizes are open.

        A rule with several tensors on both sides, such as query, key and value that another convention stores in one
        tensor, relates all of them to each other.
        """
        leaves = {weight: _shape_of(info) for weight, info in self.torch.weights.items()}
        try:
            views = self._views(leaves, self.torch, self.jax.convention.name, 1)
        except MappingError:
            return {}
        return {
            self.jax_names[weight]: frozenset(self.torch_names[block.source] for block in view.blocks)
            for weight, view in views.items()
            if weight in self.jax_names
        }

    @cached_property
    def torch_only(self) -> tuple[str, ...]:
        related = {name for (name, _), _ in self.edges}
        return tuple(name for name in self.torch_names.values() if name not in related | self.torch_buffers)

    @cached_property
    def jax_only(self) -> tuple[str, ...]:
        related = {name for _, (name, _) in self.edges}
        return tuple(name for name in self.jax_names.values() if name not in related | self.jax_buffers)

    @cached_property
    def buffers_only(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Torch's and JAX's buffers that the mapping neither relates to the other side nor drops."""
        related = [{edge[side][0] for edge in self.edges} for side in (0, 1)]
        left = [
            tuple(sorted(names - known - set(self.dropped)))
            for names, known in zip((self.torch_buffers, self.jax_buffers), related, strict=True)
        ]
        return left[0], left[1]

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """By JAX parameter, the torch parameters that it consists of."""
        sources: dict[str, set[str]] = {}
        for (name, _), (other, _) in self.edges:
            sources.setdefault(other, set()).add(name)
        return {name: tuple(sorted(names)) for name, names in sources.items()}

    def owners(self, name: str) -> str:
        """The torch names of a JAX name's parts, as text."""
        return ", ".join(self.sources.get(name, ()))

    def kind_of(self, name: str) -> str:
        """``BUFFER`` if it is a buffer on either side, by JAX name; empty for parameters."""
        return BUFFER if {name, *self.sources.get(name, ())} & (self.jax_buffers | self.torch_buffers) else ""

    def to_jax(self, leaves: Leaves, *, gradients: bool = False) -> Leaves:
        """Values of all torch parameters in the form of the JAX parameters, by JAX name; made on each access.

        ``gradients``: if a rule multiplies a weight, its gradient is divided.
        """
        return self._all_translated(
            leaves, (self.torch, self.torch_names), (self.jax, self.jax_names), gradients
        )

    def to_torch(self, leaves: Leaves) -> Leaves:
        """Values of all JAX parameters in the form of the torch parameters, by torch name; made on each access."""
        return self._all_translated(leaves, (self.jax, self.jax_names), (self.torch, self.torch_names), False)

    def _all_translated(
        self,
        leaves: Leaves,
        source: tuple[SourceTree, Mapping[str, str]],
        target: tuple[SourceTree, Mapping[str, str]],
        gradients: bool,
    ) -> Leaves:
        weights = {name: weight for weight, name in source[1].items()}
        by_weight = LazyLeaves(
            {weights[name]: name for name in leaves if name in weights}, leaves.__getitem__
        )
        reader = self._reader(by_weight, source[0])
        views = self._views(by_weight, source[0], target[0].convention.name, -1 if gradients else 1)
        return LazyLeaves(views, lambda view: view.read(reader, Box.whole(view.shape))).renamed(target[1])

    def parts_to_jax(self, leaves: Leaves, *, gradients: bool = False) -> dict[Key, np.ndarray]:
        """Values of some torch parameters, as the JAX parameters or layers of stacks that they complete."""
        names = {name: weight for weight, name in self.torch_names.items()}
        by_weight = {names[name]: array for name, array in leaves.items() if name in names}
        source, target = self.torch.convention.name, self.jax.convention.name
        parts: dict[Key, np.ndarray] = {}
        for rule in self.mapping.rules:
            inputs, outputs = rule.entries(source), rule.entries(target)
            if not inputs or not outputs:
                continue
            gathered = [index for index in inputs[0].path.indices if index not in outputs[0].path.indices]
            groups: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
            # The rule needs the shapes of its other tensors. A part with elements of other tensors is left out.
            others: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
            for entry in inputs:
                for weight, array in by_weight.items():
                    values = entry.path.match(weight)
                    if values is not None:
                        key = tuple(values[index] for index in gathered)
                        at_first = {**values, **dict.fromkeys(gathered, 0)}
                        groups.setdefault(key, {})[entry.path.format(at_first)] = array
                        for mate in inputs:
                            info = self.torch.weights.get(mate.path.format(values))
                            if info is not None:
                                others.setdefault(key, {})[mate.path.format(at_first)] = _shape_of(info)
            # A stack of one layer: the result is the part of this layer.
            for key, arrays in groups.items():
                every = {**others.get(key, {}), **arrays}
                try:
                    views = self._views(every, self.torch, target, -1 if gradients else 1)
                except MappingError:
                    continue
                reader = self._reader(every, self.torch)
                for weight, view in views.items():
                    if weight in self.jax_names and all(block.source in arrays for block in view.blocks):
                        parts[self.jax_names[weight], key] = view.read(reader, Box.whole(view.shape))
        whole = {name for _, (name, numbers) in self.edges if numbers}
        everything = set(self.torch_names.values()) - self.torch_buffers
        for name in whole if everything <= set(leaves) else ():
            parts[name, ()] = self.to_jax(leaves, gradients=gradients)[name]
        return parts

    def feature_orders(self, name: str, shape: tuple[int, ...]) -> tuple[Order, Order]:
        """For a torch matrix ``[out, in]``: by JAX position, the input and the output of torch that belong there.

        None for torch's own order, and if the mapping does not say. Flattened convolutions have ``(c h w)`` features on
        one side and ``(h w c)`` on the other; rotary heads have halves or pairs.
        """
        orders: list[Order] = []
        for axis in (1, 0):
            numbers = np.broadcast_to(np.indices(shape, sparse=True)[axis], shape)
            try:
                parts = self.parts_to_jax({name: np.ascontiguousarray(numbers)})
            except MappingError:
                return None, None
            orders.append(_order(list(parts.values()), shape[axis]))
        return orders[0], orders[1]

    def _reader(self, leaves: Leaves, source: SourceTree) -> ArrayReader:
        return ArrayReader(leaves, source.convention.separator, f"the {source.convention.name} parameters")

    def _views(self, leaves: Leaves, source: SourceTree, target: str, power: int) -> dict[str, View]:
        """The tensors that the rules build from ``leaves``, by weight. ``power``: see ``AppliedRule``."""
        name, reader = source.convention.name, self._reader(leaves, source)
        axes = known_sizes(reader, self.mapping)
        index = NameIndex(self.mapping.rules, name)
        members: dict[int, dict[str, TensorInfo]] = {}
        for weight in leaves:
            for rule in index.rules_of(weight)[:1]:
                members.setdefault(id(rule), {})[weight] = reader.tensors[weight]
        made: dict[str, View] = {}
        for rule in self.mapping.rules:
            own = members.get(id(rule))
            if own and rule.entries(target):
                applied = AppliedRule(rule, name, target, own, axes, power, weights=own)
                made |= {weight: view for weight, view, _ in applied.outputs()}
        return made


def found_in_model(
    mapping: MappingTable, leaves: Leaves, buffers: Leaves, separator: str, where: str
) -> tuple[SourceTree, Mapping[str, str]]:
    """A model's weights and buffers in the mapping, and the model's own name for each mapping name.

    linen's buffers are named after their collections, its parameters are not. A mapping may name both with the
    collection, or both without, as checkpoints and nnx models do.
    """
    every = {**leaves, **buffers}
    ways = [{name: name for name in every}]
    if buffers and separator == "/":
        ways.append({name if name in leaves else name.partition("/")[2] or name: name for name in every})
        ways.append({f"params/{name}" if name in leaves else name: name for name in every})
    best: tuple[SourceTree, Mapping[str, str]] | None = None
    errors = []
    for own in ways:
        if len(own) < len(every):
            continue
        reader = ArrayReader(LazyLeaves(own, every.__getitem__), separator, where)
        try:
            state = find(reader.tensors.values(), mapping, None, where)
        except MappingError as error:
            errors.append(error)
            continue
        if best is None or len(state.weights) > len(best[0].weights):
            best = state, own
    if best is None:
        raise errors[0]
    return best


def _shape_of(info: TensorInfo) -> np.ndarray:
    """Zeros that represent a tensor's shape and dtype without its memory."""
    return np.broadcast_to(np.zeros((), info.dtype), info.shape)


def _order(parts: Sequence[np.ndarray], size: int) -> Order:
    """The numbers along the axes of the one array in which they change, if the array contains each number once."""
    if len(parts) != 1:
        return None
    (array,) = parts
    changing = [axis for axis in range(array.ndim) if np.any(np.diff(_line(array, axis)))]
    along = array[tuple(slice(None) if axis in changing else 0 for axis in range(array.ndim))].reshape(-1)
    if along.size != size or not np.array_equal(np.sort(along), np.arange(size)):
        return None
    return None if np.array_equal(along, np.arange(size)) else tuple(map(int, along))


def _line(array: np.ndarray, axis: int) -> np.ndarray:
    """The elements along one axis, at index 0 of the others."""
    return array[tuple(slice(None) if index == axis else 0 for index in range(array.ndim))]


def _members(
    rule: Rule, convention: str, names: Mapping[str, str]
) -> Sequence[tuple[Entry, str, dict[str, int]]]:
    return [
        (entry, name, values)
        for entry in rule.entries(convention)
        for weight, name in names.items()
        if (values := entry.path.match(weight)) is not None
    ]


def _along(entry: Entry, values: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of a tensor's stacked axes, in the order of the axes."""
    if entry.expression is None:
        return ()
    axes: Iterable[str] = dict.fromkeys(axis for axes in entry.expression.axis_sets for axis in axes)
    return tuple(values[axis] for axis in axes if axis in values and axis not in entry.path.indices)
