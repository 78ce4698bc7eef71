"""The proof of a conversion: stock libraries restore the result, and take the same step from it as from the source.

    source: weight, moments, count --- torch or optax, gradient from a seed ---> update
                                                                                   | mapping of the weight
    result: weight, moments, count --- optax or torch, the gradient mapped ---> update: equal?

The mapping W of a weight is linear up to a constant c = W(0). With f = W(1) - c, an update u becomes W(u) - c, and a
gradient g becomes (W(g) - c) / f^2, since gradients change inversely to weights. The moments' own mapping is not used,
so wrong moments are seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import numpy as np

from bridge.checkpoints.convert.plan import Conversion, ConvertOptions, adapter_of, altered, planned
from bridge.checkpoints.ground.selection import SelectedReader
from bridge.checkpoints.prove.weight_state import WeightState, options_by_weight
from bridge.core.formats import open_checkpoint
from bridge.core.formats.files.certificate import WRONG
from bridge.core.formats.orbax.item import step_metadata
from bridge.core.formats.stores.store import is_url
from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo, TreePath
from bridge.core.formats.tensors.wrapping import AlteredReader
from bridge.core.mapping.language.conventions import MOMENTS, SCALES, Moment
from bridge.core.mapping.plan.plan import PlannedTensor
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.numbered_states import with_named_states
from bridge.core.mapping.states.plain_states import with_plain_states
from bridge.core.mapping.states.source_tree import SourceState, SourceTree, find
from bridge.core.text import counted, first_of
from bridge.core.views import Viewed

_TOLERANCE = 1e-6
"""Of updates in float64, relative: both libraries round in another order, and measured differences are below 1e-12."""

_TOLERANCE_HALF = 2.0**-5
"""If the result has moments or weights of 16 bits: eight roundings to bfloat16, since a cast may have rounded them."""

_SCALED = {"weight_decay": 0.0, "eps": 1e-30}
"""For weights with a factor: decay follows the factor, and eps does not, so neither can be compared."""

Step: TypeAlias = Callable[[WeightState], np.ndarray]


@dataclass(frozen=True)
class StateProof:
    """One optimizer state. place: of its first moment. largest: relative difference of updates, of the weight ``at``.

    tolerance: larger than usual for numbers of 16 bits. factor: what the mapping multiplies weights by, if it does.
    """

    place: str
    weights: int
    largest: float
    at: str
    tolerance: float
    factor: str = ""

    @property
    def equal(self) -> bool:
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        same = "equal updates" if self.equal else "different updates"
        scaled = f"; {self.factor}" if self.factor else ""
        return (
            f"{self.place}: {same} of {counted(self.weights, 'weight')}, largest difference {self.largest:.2g} "
            f"(tolerance {self.tolerance:.2g}) in {self.at}{scaled}"
        )


@dataclass(frozen=True, repr=False)
class Proof(Viewed):
    """The outcome. libraries: that restored and stepped. states: of the result. problems: what differs otherwise.

    missing: why a part could not be proven. The proof is true if nothing differs and nothing is missing.
    """

    libraries: tuple[str, ...]
    tensors: int
    states: tuple[StateProof, ...]
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.problems or self.missing) and all(state.equal for state in self.states)

    @property
    def verdict(self) -> str:
        """In a few words."""
        wrong = bool(self.problems) or not all(state.equal for state in self.states)
        return WRONG if wrong else "not proven" if self.missing else "proven"

    def summary(self) -> str:
        """The verdict, and a line for each problem and state."""
        lines = [" by ".join(filter(None, (self.verdict, ", ".join(self.libraries))))]
        if not self.problems and self.tensors:
            no_step = "" if self.states or self.missing else "; no optimizer state to take a step from"
            lines.append(f"{counted(self.tensors, 'tensor')} restored, with every bit{no_step}")
        return "\n".join([*lines, *self.problems, *self.missing, *map(str, self.states)])


def prove(source: str | os.PathLike[str], result: str | os.PathLike[str], options: ConvertOptions) -> Proof:
    """Prove that ``result`` is what `convert` with these options makes of ``source``, for who trains on.

    Needs the destination's library (torch or Orbax), the libraries of both sides for the step, and memory for the whole
    result and twenty times its largest weight. Raises the errors of `convert` and `open_checkpoint`.
    """
    if is_url(result):
        return Proof((), 0, (), missing=(f"{result} is in a store: expected a local path",))
    with planned(source, options) as (conversion, _), open_checkpoint(result) as reader:
        tensors, problems, missing = 0, list[str](), list[str]()
        libraries: dict[str, None] = {}
        try:
            for restored in _restored(Path(result), reader, options, libraries):
                tensors += 1
                problems += [restored] if restored else []
        except ImportError as error:
            missing.append(f"restoring needs a library that is not installed: {error}")
        except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
            problems.append(f"the library does not restore it: {str(error)[:500]}")
        states: list[StateProof] = []
        if conversion.mapping is None or conversion.sides is None:
            missing.append("no step was taken: expected a mapping (--mapping) or a template (--like)")
        else:
            with open_checkpoint(source, items=options.items) as whole, adapter_of(options) as adapter:
                held = altered(whole, adapter, options)
                steps = _Steps(held, reader, conversion, options)
                try:
                    states = list(steps.proofs(libraries))
                except ImportError as error:
                    missing.append(f"the step needs a library that is not installed: {error}")
                problems, missing = [*problems, *steps.problems], [*missing, *steps.missing]
    return Proof(tuple(libraries), tensors, tuple(states), tuple(problems), tuple(missing))


def _restored(
    path: Path, reader: CheckpointReader, options: ConvertOptions, libraries: dict[str, None]
) -> Iterator[str]:
    """For each tensor what is wrong with it as the stock library restores it; "" for nothing."""
    arrays: Iterable[tuple[str, np.ndarray]] = ()
    if reader.format == "orbax":
        from bridge.checkpoints.prove.optax_step import LIBRARY, restored

        libraries[LIBRARY] = None
        like, items = options.like, _items(path)
        templates = _items(Path(like)) if isinstance(like, str | os.PathLike) else dict.fromkeys(items, like)
        above = {item: f"{item}." if len(items) > 1 else "" for item in items}
        arrays = (
            (above[item] + _key(own), array)
            for item in items
            for own, array in restored(items[item], templates.get(item))
        )
    elif reader.format == "dcp":
        from bridge.checkpoints.prove import torch_step

        libraries[torch_step.LIBRARY] = None
        arrays = torch_step.restored(path, reader)
    infos = {_key(info.path): info for info in reader.tensors.values()}
    for own, array in arrays:
        if (info := infos.pop(own, None)) is not None:
            same = np.array_equal(reader.read(info.name).reshape(-1).view(np.uint8), array)
            yield "" if same else f"{info.name}: expected its bits, other bits were restored"
    if libraries:
        yield from (f"{info.name}: expected the tensor, it was not restored" for info in infos.values())


def _items(path: Path) -> dict[str, Path]:
    """The directories of a step's items by name; the path itself, without a name, if it is an item."""
    step = step_metadata(path)
    return {"": path} if step is None else {name: path / name for name in step.handlers}


class _Values(AlteredReader):
    """The source with its weights and first moments in float64, whose values `values` gives by tensor."""

    def __init__(self, reader: CheckpointReader, altered: Iterable[str]) -> None:
        super().__init__(reader)
        self.values: Callable[[TensorInfo], np.ndarray] = lambda info: np.zeros(info.shape)
        self._altered = {name: replace(reader.tensors[name], dtype=np.dtype(np.float64)) for name in altered}
        self.tensors = {**reader.tensors, **self._altered}

    def _own(self, name: str) -> str | None:
        return None if name in self._altered else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        values = self.values(self._altered[name])
        return values if box is None else np.ascontiguousarray(values[box.slices()])


class _Steps:
    """The steps from both sides. problems: what differs before any step. missing: why a step was not taken."""

    def __init__(
        self,
        source: CheckpointReader,
        result: CheckpointReader,
        conversion: Conversion,
        options: ConvertOptions,
    ) -> None:
        mapping, sides = conversion.mapping, conversion.sides
        assert mapping is not None
        assert sides is not None
        order = options.optimizer_order
        named, there = (
            with_named_states(with_plain_states(reader, mapping), mapping, order)
            for reader in (source, result)
        )
        everything = options.selection.everything
        self.readers = (named if everything else SelectedReader(named, options.selection), there)
        self.trees = tuple(
            find(reader.tensors.values(), mapping, side, str(reader.path))
            for reader, side in zip(self.readers, sides, strict=True)
        )
        ours, theirs = self.trees
        self.options = tuple(options_by_weight(reader) for reader in self.readers)
        self.by_name = {info.name: weight for weight, info in ours.weights.items()}
        self.by_moment = {
            info.name: weight
            for state in ours.states
            for moment in MOMENTS
            for weight, info in state.sections.get(moment, {}).items()
        }
        self.values = _Values(self.readers[0], (*self.by_name, *self.by_moment))
        plan = make_plan(
            self.values,
            conversion.format,
            mapping.part(),
            into=theirs.convention,
            from_=ours.convention.name,
            wanted=theirs.weights,
        )
        self.planned = {_key(tensor.path): tensor for tensor in plan.tensors.values()}
        self.problems, self.missing = list[str](), list[str]()
        # A template may lack states, and a selection may leave them out.
        self.left = set(self.by_moment.values()) if options.like is None and everything else set()
        self.with_state = frozenset(self.by_moment.values())

    def proofs(self, libraries: dict[str, None]) -> Iterator[StateProof]:
        """A proof for each state of the result. ImportError without a library that takes the step."""
        steps = tuple(_step_of(tree, libraries) for tree in self.trees)
        for state in self.trees[1].states:
            moments = [moment for moment in MOMENTS if moment in state.sections]
            if any(SCALES[moment] in state.sections for moment in moments):
                self.missing.append(
                    "no step was taken from moments with scales (float8, float16): expected a cast"
                )
            elif moments:
                yield self._proof(state, moments, steps)
        if self.left and not self.missing:
            self.problems.append(
                f"expected the optimizer's state of {first_of(sorted(self.left))}, found none"
            )

    def _proof(self, state: SourceState, moments: list[Moment], steps: tuple[Step, ...]) -> StateProof:
        largest, at, tolerance, factors = 0.0, "", _TOLERANCE, set[float]()
        weights = state.sections[moments[0]]
        for weight in weights:
            difference, own, factor = self._difference(weight, state, moments, steps)
            tolerance, factors = max(tolerance, own), factors | factor
            if not difference <= largest:
                largest, at = difference, weight
        place = next(iter(weights.values())).name.replace(next(iter(weights)), "*")
        said = ""
        if factors - {0.0, 1.0}:
            shown = first_of([f"{factor:.4g}" for factor in sorted(factors - {0.0, 1.0})], 3)
            said = f"the mapping multiplies weights by {shown}, but not the optimizer's updates: training differs"
        return StateProof(place, len(weights), largest, at or next(iter(weights)), tolerance, said)

    def _difference(
        self, weight: str, state: SourceState, moments: list[Moment], steps: tuple[Step, ...]
    ) -> tuple[float, float, set[float]]:
        """The relative difference of a weight's updates, its tolerance, and the factors of its elements."""
        planned, sources, of_weights = self._plan_of(weight, state.sections[moments[0]][weight])
        stored = [state.sections[moment][weight] for moment in moments]
        stored += [info for info in (self.trees[1].weights.get(weight),) if info is not None]
        coarsest = min(info.dtype.itemsize for info in stored)
        tolerance = _TOLERANCE if coarsest > 2 else _TOLERANCE_HALF

        def mapped(values: Callable[[TensorInfo], np.ndarray]) -> np.ndarray:
            self.values.values = values
            return planned.read(self.values, Box.whole(planned.shape)).astype(np.float64)

        zero = mapped(lambda info: np.zeros(info.shape))
        factor = mapped(lambda info: np.ones(info.shape)) - zero
        inverse = np.divide(1.0, factor, out=np.zeros_like(factor), where=factor != 0)
        # Gradients, and so the updates of SGD, change inversely to weights, as first moments do. Adam's do not follow.
        of_gradients = inverse**2 if of_weights else 1.0
        of_updates = inverse if "exp_avg" in moments else of_gradients
        factors = set(np.unique(factor if of_weights else inverse).tolist())
        fixed = _SCALED if not of_weights or factors - {0.0, 1.0} else {}
        theirs = self.options[1].get(weight, {})
        shared = next((self.options[0][name] for name in sources.values() if name in self.options[0]), theirs)
        updates = {}
        self.left.difference_update(sources.values())
        for tensor, name in sources.items():
            chosen = {**self.options[0].get(name, shared), **fixed}
            gradient = _gradient(self.readers[0].tensors[tensor])
            if (own := self._state(0, name, self._state_of(name), moments, chosen, gradient)) is None:
                return np.inf, tolerance, factors
            updates[tensor] = steps[0](own)
        expected = (mapped(lambda info: updates[info.name]) - zero) * of_updates
        gradient = (mapped(_gradient) - zero) * of_gradients
        there = self._state(1, weight, state, moments, {**(theirs or shared), **fixed}, gradient)
        if there is None:
            return np.inf, tolerance, factors
        if of_weights:
            moved = mapped(lambda info: self.readers[0].read(info.name).astype(np.float64))
            if not np.allclose(there.weight, moved, rtol=tolerance, atol=1e-30):
                self.problems.append(f"{weight}: expected the source's weight, found other values")
        update = np.where(factor != 0, steps[1](there), 0.0)
        difference = float(np.linalg.norm(update - expected))
        return difference / (float(np.linalg.norm(expected)) or 1.0), tolerance, factors

    def _plan_of(self, weight: str, moment: TensorInfo) -> tuple[PlannedTensor, dict[str, str], bool]:
        """How the weight is mapped, the source's weights by tensor, and whether the tensors are weights.

        If one side's optimizer has other weights than its model, such as torchtitan's fused wqkv, they are the first
        moments.
        """
        info = self.trees[1].weights.get(weight)
        if info is not None:
            planned = self.planned[_key(info.path)]
            sources = {name: self.by_name[name] for name in planned.sources}
            if self.with_state.issuperset(sources.values()):
                return planned, sources, True
        planned = self.planned[_key(moment.path)]
        return planned, {name: self.by_moment[name] for name in planned.sources}, False

    def _state_of(self, weight: str) -> SourceState | None:
        states = self.trees[0].states
        return next((s for s in states if any(weight in s.sections.get(m, {}) for m in MOMENTS)), None)

    def _state(
        self,
        side: int,
        weight: str,
        state: SourceState | None,
        moments: list[Moment],
        options: Mapping[str, object],
        gradient: np.ndarray,
    ) -> WeightState | None:
        """The state of a weight; None, with a problem, if it is not there."""
        reader, info = self.readers[side], self.trees[side].weights.get(weight)
        where = ("source", "result")[side]
        lacking = [m for m in moments if state is None or weight not in state.sections.get(m, {})]
        further = [m for m in MOMENTS if state is not None and weight in state.sections.get(m, {})]
        if state is None or lacking or further != moments:
            self.problems.append(
                f"{weight}: expected the moments {', '.join(moments)} in the {where}, found "
                f"{', '.join(further) or 'none'}"
            )
            return None
        step = state.sections.get("step", {}).get(weight, state.count)
        if step is None and "exp_avg" in moments:
            self.problems.append(f"{weight}: expected a step count in the {where}, found none")
            return None
        first = state.sections[moments[0]][weight]
        return WeightState(
            np.zeros(first.shape) if info is None else reader.read(info.name).astype(np.float64),
            gradient,
            {m: reader.read(state.sections[m][weight].name).astype(np.float64) for m in moments},
            0.0 if step is None else float(reader.read(step.name).item()),
            options,
        )


def _key(path: TreePath) -> str:
    """A path as text that state dicts with nested and with dotted keys share."""
    return ".".join(map(str, path))


def _gradient(info: TensorInfo) -> np.ndarray:
    """A gradient from a seed, which is the weight's name."""
    return np.random.default_rng(crc32(info.name.encode())).normal(size=info.shape)


def _step_of(tree: SourceTree, libraries: dict[str, None]) -> Step:
    if tree.convention.is_tree:
        from bridge.checkpoints.prove.optax_step import LIBRARY, update
    else:
        from bridge.checkpoints.prove.torch_step import LIBRARY, update
    libraries[LIBRARY] = None
    return update
