"""Differences of two checkpoints' trees other than tensors: typed PRNG keys, empty containers, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from bridge.core.formats.tensors.base import CheckpointReader, TreePath
from bridge.core.formats.tensors.leaves import EMPTY, STRING, key_kind, key_types, separator_of, tree_kinds
from bridge.core.mapping.plan.plan import TranslationPlan

_ROOT = "(the whole tree)"


def dtype_names(
    a: CheckpointReader, plan: TranslationPlan, b: CheckpointReader, common: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """The dtypes in ``a`` and ``b`` of tensors that are typed PRNG keys in one and something else in the other."""
    types_a, types_b = key_types(a), key_types(b)
    names = {}
    for name in common:
        tensor = plan.tensors[name]
        of_a = next((types_a[source] for source in tensor.sources if source in types_a), None)
        of_b = types_b.get(name)
        if of_a != of_b:
            names[name] = _dtype_name(tensor.dtype, of_a), _dtype_name(b.tensors[name].dtype, of_b)
    return names


def _dtype_name(dtype: np.dtype, key: str | None) -> str:
    return dtype.name if key is None else key_kind(key)


def structure_differences(
    a: CheckpointReader, plan: TranslationPlan, b: CheckpointReader, left_out: Set[str]
) -> tuple[tuple[str, str], ...]:
    """Where the trees differ in structure, by the names of ``b``: a restore target for one does not fit the other.

    These are None, empty containers and texts that are leaves of only one tree, and lists that are dicts in the other.
    plan: of ``a`` in the format of ``b``, names unchanged. left_out: names that should not be in ``b``.
    """
    kinds_a, kinds_b = tree_kinds(a), tree_kinds(b)
    leaves_a = {name: kinds_a.get(old) for name, (_, old) in plan.objects.items()}
    leaves_b = {name: kinds_b.get(name) for name in b.object_paths if name not in left_out}
    leaves_a, leaves_b = (
        {name: leaf_kind for name, leaf_kind in leaves.items() if leaf_kind in EMPTY or leaf_kind == STRING}
        for leaves in (leaves_a, leaves_b)
    )
    tensors = {*plan.tensors, *b.tensors}
    only = [
        (name, f"{leaf_kind} in a, not in the tree of b")
        for name, leaf_kind in leaves_a.items()
        if name not in leaves_b and name not in tensors
    ]
    only += [
        (name, f"not in the tree of a, {leaf_kind} in b")
        for name, leaf_kind in leaves_b.items()
        if name not in leaves_a and name not in tensors
    ]
    pairs = [(t.path, b.tensors[name].path) for name, t in plan.tensors.items() if name in b.tensors]
    pairs += [(plan.objects[name][0], b.object_paths[name]) for name in leaves_a if name in leaves_b]
    return (*only, *dict(_other_containers(pairs, separator_of(b.format))).items())


def _other_containers(
    pairs: Iterable[tuple[TreePath, TreePath]], separator: str
) -> Iterator[tuple[str, str]]:
    for path_a, path_b in pairs:
        # A flat name has no containers to compare.
        if len(path_a) != len(path_b):
            continue
        for depth, (key_a, key_b) in enumerate(zip(path_a, path_b, strict=True)):
            if type(key_a) is not type(key_b):
                kinds = ["list" if isinstance(key, int) else "dict" for key in (key_a, key_b)]
                yield (
                    separator.join(map(str, path_b[:depth])) or _ROOT,
                    f"a {kinds[0]} in a, a {kinds[1]} in b",
                )
