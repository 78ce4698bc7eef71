"""The leaves of a template: what their paths say, numbers of a source for them, both sides in one reader and plan.

source            template          destination
int, float, 0-d   0-d tensor        whole numbers exactly; fractions rounded to a floating-point dtype
0-d tensor        int, float        a number of the template's type, with the value of the source
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from bridge.checkpoints.ground.selection import STATE_ROOTS, root_of
from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo, TreePath
from bridge.core.formats.tensors.leaves import kinds_of
from bridge.core.formats.tensors.wrapping import AlteredReader, ReadWhenAsked
from bridge.core.mapping.language.conventions import MOMENTS, WORDS, Section
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.plan.plan import TranslationPlan
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS
from bridge.core.mapping.states.source_tree import SourceTree

_STEPS = frozenset({"step", "count", "gradient_step"})
"""Last keys of step counts: of torch, optax and MaxText; ``gradient_step`` of ``optax.MultiSteps``."""

_ROOTS_OF_STEPS = OPTIMIZER_KEYS | {"step", "state", "param_groups", "train", "train_state"}
"""First keys above step counts: elsewhere, as in random state, a count counts something else."""

_KEYS = frozenset({"key", "rng", "rng_key"})
"""Last keys of random keys, as in ``optax.add_noise``."""

_MOMENT_OF: Mapping[str, Section] = {WORDS[moment]: moment for moment in MOMENTS} | {m: m for m in MOMENTS}
"""Moments by the key that optax and torch give them."""


def is_state(path: TreePath) -> bool:
    """Whether something is the program's own state, such as random state anywhere in the tree, not a weight."""
    return root_of(path) in STATE_ROOTS or not {"rng", "rngs"}.isdisjoint(path)


def is_count(path: TreePath) -> bool:
    """Whether a leaf counts steps."""
    last = str(path[-2] if len(path) > 1 and path[-1] == "value" else path[-1]).rpartition(".")[2]
    # Outside an optimizer, as among metrics, a count counts something else.
    return root_of(path) in _ROOTS_OF_STEPS and (
        last == "step" or (last in _STEPS and _below_optimizer(path))
    )


def tells_of_state(info: TensorInfo, path: TreePath) -> bool:
    """Whether the origin of a tensor, with this usual path, tells the origin of a count next to it.

    It does for an array, and for an optimizer's number. A random key begins anew in any program.
    """
    is_number_of_state = _below_optimizer(path) and not is_count(path)
    return path[-1] not in _KEYS and (bool(info.shape) or is_number_of_state)


def _below_optimizer(path: TreePath) -> bool:
    return any(part in OPTIMIZER_KEYS for key in path for part in str(key).split("."))


@dataclass(frozen=True)
class OptimizerRoots:
    """Where the optimizer states of a tree begin, such as ("state", "opt_state"), or (1,) in a tuple with weights."""

    roots: tuple[TreePath, ...]

    @staticmethod
    def of(tree: SourceTree) -> OptimizerRoots:
        """The shortest paths above moments that are not above weights."""
        roots: dict[TreePath, None] = {}
        weights = [info.path for info in tree.weights.values()]
        for section in (section for state in tree.states for section in state.sections.values()):
            path = next((info.path for info in section.values()), ())
            above = {weight[:depth] for weight in weights for depth in range(len(weight))}
            root = next((path[:depth] for depth in range(1, len(path)) if path[:depth] not in above), ())
            if root and not _below_optimizer(root[:1]):
                roots[root] = None
        return OptimizerRoots(tuple(roots))

    def usual(self, path: TreePath) -> TreePath:
        """A path as in a tree with ``opt_state`` at its root, and with a step next to it."""
        for root in self.roots:
            if path[: len(root)] == root:
                return ("opt_state", *path[len(root) :])
            if len(root) > 1 and path[: len(root) - 1] == root[:-1]:
                return path[len(root) - 1 :]
        return path


def moment_of(path: TreePath) -> tuple[TreePath, Section] | None:
    """What a moment belongs to, as its path without the moment's key, and the moment; None for other tensors."""
    keys = tuple(part for key in path for part in str(key).split("."))
    if keys[0] not in OPTIMIZER_KEYS and "state" not in keys:
        return None
    place = next((k for k in reversed(range(len(keys))) if keys[k] in _MOMENT_OF), None)
    return None if place is None else ((*keys[:place], *keys[place + 1 :]), _MOMENT_OF[keys[place]])


Number = int | float | complex


def number_of(value: object) -> Number | None:
    """A Python or NumPy number as a Python number; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, Number) else None


def stored_as(number: Number | None, info: TensorInfo) -> np.ndarray | None:
    """An array like ``info``. None without a number, for several elements, and if the dtype cannot store the number."""
    if number is None or info.numel != 1:
        return None
    # A number that does not fit raises, or becomes another one, which the comparison finds.
    with np.errstate(all="ignore"), suppress(OverflowError, TypeError, ValueError):
        array = np.full(info.shape, number, info.dtype)
        return array if _same(number, array.flat[0].item()) else None
    return None


def typed_as(number: Number | None, like: float) -> float | None:
    """The number with the type of ``like``, an int or float; None without a number, and if the type cannot hold it."""
    if number is None or isinstance(number, complex):
        return None
    with suppress(OverflowError, ValueError):
        typed = type(like)(number)
        return typed if _same(number, typed) else None
    return None


def _same(number: Number, stored: object) -> bool:
    if isinstance(number, float) and isinstance(stored, float):
        # Rounding to fewer bits is allowed, as it is for tensors.
        return math.isnan(number) == math.isnan(stored) and math.isinf(number) == math.isinf(stored)
    return number == stored


OWN = "template:"
"""Before the names of the template's leaves, among those of the source."""


class BothReader(AlteredReader):
    """``reader`` with the leaves of the template, under names that begin with `OWN`."""

    def __init__(self, reader: CheckpointReader, template: CheckpointReader) -> None:
        super().__init__(reader)
        self._template = template
        own = {OWN + name: info.named(OWN + name, info.path) for name, info in template.tensors.items()}
        self.tensors = {**reader.tensors, **own}
        paths = {OWN + name: path for name, path in template.object_paths.items()}
        self.object_paths = {**reader.object_paths, **paths}
        self.objects = ReadWhenAsked(self.object_paths, self._object)
        own_kinds = {OWN + name: leaf_kind for name, leaf_kind in kinds_of(template).items()}
        self.kinds = {**kinds_of(reader), **own_kinds}

    def _own(self, name: str) -> str | None:
        return None if name.startswith(OWN) else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        return self._template.read(name.removeprefix(OWN), box)

    def _object(self, name: str) -> object:
        reader = self._template if name.startswith(OWN) else self._reader
        return reader.objects[name.removeprefix(OWN)]


@dataclass(frozen=True)
class Fitted:
    """A plan with exactly the template's leaves, and the reader that has them and the source's.

    casts: to the template's dtypes where the source's differ, by patterns that each match one name. filled: by name in
    the destination, the content of each leaf that the source lacks. mapping, sides: the translation and its conventions
    of source and template, also between equal names.
    """

    plan: TranslationPlan
    reader: CheckpointReader
    casts: Mapping[str, np.dtype] = field(default_factory=dict)
    filled: Mapping[str, str] = field(default_factory=dict)
    mapping: MappingTable | None = None
    sides: tuple[str, str] | None = None
