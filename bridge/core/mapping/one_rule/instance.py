"""One rule at fixed values of its shared indices: the tensors it makes, and where their elements come from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bridge.core.formats.tensors.base import TensorInfo, is_whole
from bridge.core.mapping.language.entries import PAIR, Entry
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.expression import Affine, Alternative
from bridge.core.mapping.language.operations import Change, ChangedView, LeftOut, PaddedView, change
from bridge.core.mapping.language.relation import Block, TensorView, identity
from bridge.core.mapping.one_rule.open_axes import OpenAxes, equations_of, named
from bridge.core.mapping.one_rule.scales import scale_view

Values = Mapping[str, int]
Plain = TensorView | ChangedView
View = Plain | PaddedView

LARGEST_STACK = 1 << 20
"""A stack of empty layers may claim any number of layers; one this large is a mistake."""


@dataclass(frozen=True)
class Axes:
    """Axis sizes that are known without the source's shapes.

    absent: why an axis of the table has no size, by axis. wanted: target tensors with known shapes, by weight; they
    determine sizes that otherwise stay open. asked: axes in the mapping's tables, which errors mention first.
    """

    sizes: Mapping[str, int]
    alias: Mapping[str, str]
    absent: Mapping[str, str]
    wanted: Mapping[str, TensorInfo] = field(default_factory=dict)
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Instance:
    """A rule at fixed values ``at`` of the shared indices. ``counts``: sizes of the gathered indices.

    weight_entries: the weight of each entry, if ``inputs_`` are entries of moments.
    """

    rule: str
    inputs_: tuple[Entry, ...]
    outputs_: tuple[Entry, ...]
    at: Values
    counts: Values
    tensors: Mapping[str, TensorInfo]
    scales: Mapping[str, TensorInfo]
    axes: Axes
    power: int
    weight_entries: Sequence[tuple[Entry, TensorInfo]]

    def outputs(self) -> Iterator[tuple[str, View, Plain | None]]:
        infos = [self._infos(entry) for entry in self.inputs_]
        first = infos[0][0]
        for info in itertools.chain.from_iterable(infos):
            if info.dtype != first.dtype:
                raise self._error(
                    f"expected one dtype, got {first.dtype} in {first.name} and {info.dtype} in {info.name}"
                )
        if self.inputs_[0].expression is None:
            view = identity(first.name, first.shape, first.dtype)
            changes = [self._change(self.inputs_[0], self.outputs_[0], self.axes.sizes)]
            yield self.outputs_[0].path.format(self.at), *self._finished(view, changes)
            return
        sizes = self._sizes(infos)
        self._require_sizes(infos, sizes)
        parts = dict(self._parts(self.inputs_, sizes))
        whole, sizes = sizes, {**sizes, **dict.fromkeys(self._padding, 0)}
        for entry in self.outputs_:
            assert entry.expression is not None
            own = {index: sizes[index] for index in entry.path.indices if index not in self.at}
            if math.prod(own.values()) > LARGEST_STACK:
                raise self._error(
                    f"expected at most {LARGEST_STACK} tensors in a stack, got {math.prod(own.values())}"
                )
            for scattered in _grid(own):
                blocks, changes = [], []
                for axes, (_, alternative) in self._parts((entry,), sizes):
                    for gathered in _grid(self.counts):
                        blocks.append(self._block(parts[axes], alternative, scattered, gathered, sizes))
                        changes.append(self._change(parts[axes][0], entry, sizes))
                view = TensorView(entry.expression.shape(sizes), first.dtype, tuple(blocks))
                made, scale = self._finished(view, changes)
                shape = entry.expression.shape(whole)
                if shape != view.shape and scale is not None:
                    raise self._error(
                        f"expected moments without scales to add padding to, found {scale.blocks[0].source}: decode "
                        "the moments first (--cast)"
                    )
                name = entry.path.format({**self.at, **scattered})
                yield name, made if shape == view.shape else PaddedView(made, shape), scale

    def padding_left_out(self) -> Iterator[LeftOut]:
        infos = [self._infos(entry) for entry in self.inputs_]
        sizes = self._sizes(infos) if self._padding else {}
        for entry, members in zip(self.inputs_, infos, strict=True):
            for dim, axis in entry.zeros.items():
                if axis in self._padding - self.axes.sizes.keys() and sizes[axis]:
                    for info in members:
                        yield LeftOut(info, dim, info.shape[dim] - sizes[axis], axis)

    @cached_property
    def _padding(self) -> frozenset[str]:
        """The padding axes that one side lacks."""
        ours, theirs = (
            {axis for entry in side for axis in entry.zeros.values()}
            for side in (self.inputs_, self.outputs_)
        )
        return frozenset(ours ^ theirs)

    def _change(self, source: Entry, target: Entry, sizes: Values) -> Change | None:
        if source.operation is None and target.operation is None:
            return None
        pairs = {axis.removesuffix(PAIR): 2 * n for axis, n in sizes.items() if axis.endswith(PAIR)}
        known = {**pairs, **sizes}
        known |= {axis: known[other] for axis, other in self.axes.alias.items() if other in known}
        try:
            return change(source.operation, target.operation, known, self.power)
        except MappingError as error:
            raise self._error(str(error)) from error

    def _finished(self, view: TensorView, changes: Sequence[Change | None]) -> tuple[Plain, Plain | None]:
        """The tensor and its scales, one of them changed."""
        sources = dict.fromkeys(block.source for block in view.blocks)
        by_name = {self.tensors[weight].name: scale for weight, scale in self.scales.items()}
        lacking = next((name for name in sources if name not in by_name), None)
        if len(by_name.keys() & sources) == 0:
            return self._changed(view, changes), None
        if lacking is not None:
            with_scales = next(name for name in sources if name in by_name)
            raise self._error(f"expected scales for {lacking}, as for {with_scales}, found none")
        shapes = {info.name: info.shape for info in self.tensors.values()}
        try:
            scales = scale_view(view, shapes, by_name)
        except MappingError as error:
            raise self._error(str(error)) from error
        return view, self._changed(scales, changes)

    def _changed(self, view: TensorView, changes: Sequence[Change | None]) -> Plain:
        if not any(changes):
            return view
        if is_whole(view.dtype):
            raise self._error(
                f"expected a floating-point tensor to calculate with, got {view.dtype} in {view.blocks[0].source}"
            )
        return ChangedView(view, tuple(changes))

    def _infos(self, entry: Entry) -> list[TensorInfo]:
        """The source tensors of one entry, of one shape, one for every value of the gathered indices."""
        names = (entry.path.format({**self.at, **values}) for values in _grid(self.counts))
        # Lazily, since one stray layer number of a billion would otherwise make a list of a billion names.
        missing = list(itertools.islice((name for name in names if name not in self.tensors), 3))
        if missing:
            present = next(name for name in self.tensors if self._belongs(name))
            raise self._error(
                f"found no tensor {', '.join(missing)}, which the rule needs with {present}: give both, or leave out "
                "both (--drop)"
            )
        names = (entry.path.format({**self.at, **values}) for values in _grid(self.counts))
        infos = [self.tensors[name] for name in names]
        for info in infos:
            if info.shape != infos[0].shape:
                raise self._error(
                    f"expected tensors of one shape to stack, got {infos[0].shape} in {infos[0].name} and "
                    f"{info.shape} in {info.name}"
                )
        return infos

    def _belongs(self, name: str) -> bool:
        matches = (entry.path.match(name) for entry in self.inputs_)
        return any(values is not None and values.items() >= self.at.items() for values in matches)

    def _sizes(self, infos: list[list[TensorInfo]]) -> dict[str, int]:
        shapes = [(entry, members[0]) for entry, members in zip(self.inputs_, infos, strict=True)]
        sizes = self._solved(shapes, self._solved(self.weight_entries, {**self.axes.sizes, **self.counts}))
        for entry in self.outputs_:
            assert entry.expression is not None
            if entry.expression.axes <= sizes.keys():
                continue
            # All tensors of a stack are alike.
            info = self.axes.wanted.get(
                entry.path.format({**dict.fromkeys(entry.path.indices, 0), **self.at})
            )
            if info is not None:
                try:
                    wanted = entry.expression.solve(info.shape, sizes, self.axes.alias)
                except MappingError as error:
                    raise self._error(f"tensor {info.name}, which is wanted: {error}") from error
                sizes = self._solved(shapes, wanted)
        if (
            unsaid := {axis for e in (*self.inputs_, *self.outputs_) for axis in e.zeros.values()}
            - sizes.keys()
        ):
            sizes = self._solved(shapes, {**sizes, **dict.fromkeys(unsaid, 0)})
        return sizes

    def _solved(self, shapes: Sequence[tuple[Entry, TensorInfo]], known: Values) -> dict[str, int]:
        """``known``, and the sizes that follow from the source's shapes."""
        sizes = dict(known)
        for _ in shapes:  # sizes from one entry may determine sizes of another
            for entry, info in shapes:
                assert entry.expression is not None
                try:
                    sizes = entry.expression.solve(info.shape, sizes, self.axes.alias)
                except MappingError as error:
                    raise self._error(f"tensor {info.name}: {error}") from error
        return sizes

    def _parts(
        self, entries: tuple[Entry, ...], sizes: Values
    ) -> Iterator[tuple[frozenset[str], tuple[Entry, Alternative]]]:
        for entry in entries:
            assert entry.expression is not None
            alternatives = entry.expression.alternatives(sizes)
            for axes, alternative in zip(entry.axis_sets, alternatives, strict=True):
                if not axes & self._padding:
                    yield axes, (entry, alternative)

    def _require_sizes(self, infos: list[list[TensorInfo]], sizes: Values) -> None:
        """Raise OpenAxes unless all sizes are known."""
        expressions = [e.expression for e in (*self.inputs_, *self.outputs_) if e.expression is not None]
        if all(expression.axes <= sizes.keys() for expression in expressions):
            return
        shapes = [(e, members[0]) for e, members in zip(self.inputs_, infos, strict=True)]
        equations = [
            equation
            for entry, info in (*shapes, *self.weight_entries)
            if entry.expression is not None
            for equation in equations_of(entry.expression, info.shape, sizes, self.axes.alias)
        ]
        missing = {axis for expression in expressions for axis in expression.axes if axis not in sizes}
        needed = frozenset(named(axis, self.axes.alias) for axis in missing)
        absent = {axis: why for axis, why in self.axes.absent.items() if axis in needed}
        raise OpenAxes(self.rule, needed, equations, self.axes.asked, absent)

    def _block(
        self,
        source: tuple[Entry, Alternative],
        target: Alternative,
        scattered: Values,
        gathered: Values,
        sizes: Values,
    ) -> Block:
        entry, index = source
        name = self.tensors[entry.path.format({**self.at, **gathered})].name
        left = {axis: sizes[axis] for dim in index for axis, _ in dim.terms if axis not in scattered}
        return Block(name, _fix(index, scattered), _fix(target, gathered), left)

    def _error(self, reason: str) -> MappingError:
        where = "".join(f" with {index[1:-1]} = {value}" for index, value in self.at.items())
        return MappingError(f"rule {self.rule}{where}: {reason}")


def _grid(counts: Values) -> Iterator[dict[str, int]]:
    """All index values, one at a time: itertools.product would first hold every range as a tuple."""
    if not counts:
        yield {}
        return
    (*outer, (index, count)) = counts.items()
    for values in _grid(dict(outer)):
        for value in range(count):
            yield {**values, index: value}


def _fix(index: Alternative, values: Values) -> Alternative:
    """``index`` with some axes held at a value."""
    return tuple(
        Affine(
            dim.offset + sum(stride * values[axis] for axis, stride in dim.terms if axis in values),
            tuple((axis, stride) for axis, stride in dim.terms if axis not in values),
        )
        for dim in index
    )
