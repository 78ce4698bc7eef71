"""Match the tensors of a checkpoint, saved by any JAX program, to the tensors of a plan.

::

    plan                         checkpoint
    params/<path>                <path> below params, model, model/params, ..., or at the top
    variables/<path>             <path> below variables, or next to the weights
    opt_state/<name>/<path>      <name>/<path> below opt_state, optimizer/opt_state (``nnx.Optimizer``), ...
    train/step                   step, next to any of these

In the state of an nnx module, every name ends in ``/value``. The names of trees tell where weights, the optimizer
state and the step are::

    known words    params/<path>   model/params/<path>   opt_state/mu/<path>   step      found automatically
    other words    student/<path>   teacher/params/<path>                                ``tree="student"`` chooses

A chosen tree is searched like a whole checkpoint; missing parts of the optimizer state may be next to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge.core.formats import CheckpointError
from bridge.core.text import first_of
from jax_impl.checkpoint.moments import SCALE, match_moments, parameter_of
from jax_impl.checkpoint.names import ShapeDtype

_CONVERT = 'moments="convert" converts moments that were saved in another format'


@dataclass(frozen=True)
class Match:
    """``sources``: the checkpoint's name for each plan tensor that it contains. ``fresh``: the plan's other tensors.

    ``ignored``: the checkpoint's other tensors. ``step``: the name of a step number next to the trees.
    """

    sources: Mapping[str, str]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    step: str | None


@dataclass(frozen=True)
class Wanted:
    """The tensors that a load expects in a checkpoint.

    ``tensors``: from ``names.state_tensors``. ``parameters``: paths of the parameters. ``with_weights``,
    ``with_variables``: whether the caller has values for weights and variables that the checkpoint lacks. ``tree``: the
    tree that contains the weights, "" for the tree with the most of them. ``convert``: whether moments may have another
    floating dtype.
    """

    tensors: Mapping[str, ShapeDtype]
    parameters: Collection[str]
    with_optimizer: bool
    with_weights: bool
    with_variables: bool
    strict: bool
    tree: str = ""
    convert: bool = False


def match(path: Path, saved: Mapping[str, ShapeDtype], wanted: Wanted) -> Match:
    """Compare names, then shapes, then dtypes, so that each error reports one kind of difference.

    ``saved``: the tensors of the checkpoint at ``path``, without ``train``. Raises ``CheckpointError`` for tensors that
    are missing, different or, if strict, unexpected.
    """
    root = root_of_weights(saved, wanted.parameters, wanted.tree)
    sources = _sources(saved, wanted, root)
    step = step_beside(saved, sources.values(), wanted.tree)
    used = {*sources.values(), step}
    rest = [name for name in saved if name not in used]
    # A load that would use only initial values is an error.
    some = any(f"params/{p}" in sources for p in wanted.parameters) or not wanted.parameters
    missing = [
        name for name in wanted.tensors if name not in sources and not (some and _may_be_fresh(name, wanted))
    ]
    unexpected = [
        name
        for name in rest
        if wanted.strict
        and is_below(name, wanted.tree)
        and (wanted.with_optimizer or not is_of_optimizer(name, wanted.tree))
    ]
    if missing or unexpected:
        hint = _hint_of_trees(saved, missing, unexpected, wanted, root)
        hint = hint or _hint_of_scales(missing, unexpected, wanted) or _hint(missing, wanted, some)
        raise CheckpointError(
            f"{path}: this seems to be a checkpoint of another model or optimizer. {hint}Missing: "
            f"{first_of(missing) or 'none'}; unexpected: {first_of(unexpected) or 'none'}"
        )
    for field in ShapeDtype._fields:
        wrong = [
            f"{name} (expected {getattr(wanted.tensors[name], field)}, got {getattr(saved[source], field)})"
            for name, source in sources.items()
            if getattr(wanted.tensors[name], field) != getattr(saved[source], field)
            and not (field == "dtype" and _may_be_cast(name, wanted, saved[source]))
        ]
        if wrong:
            hint = ""
            moments = any(name.startswith("opt_state/") for name in wrong)
            scales = all(f"{SCALE}/" in name for name in wrong)
            if (field == "dtype" and moments) or (field == "shape" and scales and not wanted.convert):
                hint = f"; {_CONVERT}"
            elif field == "dtype" and wanted.strict:
                hint = "; strict=False casts floating-point weights"
            elif field == "shape" and not wanted.with_weights and wrong[0].startswith("params/"):
                hint = "; strict=False with initial=state uses the state's own weights for these"
            raise CheckpointError(
                f"{path}: tensors with another {field} than this model's: {first_of(wrong)}{hint}"
            )
    fresh = tuple(name for name in wanted.tensors if name not in sources)
    return Match(sources, fresh, tuple(rest), step)


def _may_be_cast(name: str, wanted: Wanted, saved: ShapeDtype) -> bool:
    """Whether the tensor is a weight in another floating dtype, such as a bfloat16 copy for inference, or a moment."""
    both = (wanted.tensors[name].dtype, saved.dtype)
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in both)
    if name.startswith("opt_state/"):
        return wanted.convert and floating
    wide = floating and all(jnp.finfo(dtype).bits >= 16 for dtype in both)
    return not wanted.strict and name.startswith("params/") and wide


def _sources(saved: Mapping[str, ShapeDtype], wanted: Wanted, root: str) -> dict[str, str]:
    around = root.rpartition("/")[0]
    optimizer = root_of_optimizer(saved, wanted.tree)
    variables = (f"{wanted.tree}/variables".lstrip("/"), "variables", root, around)
    sources: dict[str, str] = {}
    for name in wanted.tensors:
        tree, _, rest = name.partition("/")
        if tree == "opt_state" and not wanted.strict:
            continue
        roots = {"params": (root,), "variables": variables, "opt_state": (optimizer,)}[tree]
        source = next((n for r in roots for n in spellings(r, rest) if n in saved), None)
        if source is not None:
            sources[name] = source
    if not wanted.strict:
        for name in list(sources):
            if _is_replaced(wanted, name, saved[sources[name]]):
                del sources[name]
        # Moments belong to the weights with which they were saved.
        kept = {path for path in wanted.parameters if f"params/{path}" not in sources}
        moments = {
            n: k
            for n, k in wanted.tensors.items()
            if n.startswith("opt_state/") and parameter_of(n, wanted.parameters) not in kept
        }
        stored = {n: k for n, k in saved.items() if n.startswith(f"{optimizer}/")}
        sources |= match_moments(
            {bare(n, "opt_state"): (n, _comparable(tree, wanted)) for n, tree in moments.items()},
            {bare(n, optimizer): (n, _comparable(tree, wanted)) for n, tree in stored.items()},
            wanted.parameters,
        )
    return sources


def _comparable(tensor: ShapeDtype, wanted: Wanted) -> ShapeDtype:
    """The same value for all floating dtypes that a load can convert."""
    convertible = wanted.convert and jnp.issubdtype(tensor.dtype, jnp.floating)
    return ShapeDtype(tensor.shape, np.dtype(np.float32)) if convertible else tensor


def _is_replaced(wanted: Wanted, name: str, saved: ShapeDtype) -> bool:
    """Whether the caller's own value is used, because the checkpoint's value does not fit."""
    if name.startswith("variables/"):
        return wanted.with_variables and saved != wanted.tensors[name]
    return name.startswith("params/") and wanted.with_weights and saved.shape != wanted.tensors[name].shape


def _may_be_fresh(name: str, wanted: Wanted) -> bool:
    """Whether a load continues without the tensor."""
    if name.startswith("variables/"):
        return wanted.with_variables
    return not wanted.strict and (name.startswith("opt_state/") or wanted.with_weights)


def _hint_of_trees(
    saved: Mapping[str, ShapeDtype],
    missing: Collection[str],
    unexpected: Collection[str],
    wanted: Wanted,
    root: str,
) -> str:
    """Advice if the weights are in a tree that was not chosen, or in several trees."""
    trees = trees_of_weights(saved, wanted.parameters)
    others = [tree for tree in trees if tree and tree != root]
    lacking = any(name.startswith("params/") for name in missing)
    if not others or not (lacking or any(is_below(name, tree) for name in unexpected for tree in others)):
        return ""
    where = " and ".join(repr(tree) if tree else "the top" for tree in trees)
    rest = "" if lacking else f", or use strict=False, which takes {root or 'the top'!r} and ignores the rest"
    return (
        f"It has this model's weights in {where}: choose by load_checkpoint(..., tree={others[0]!r}){rest}. "
    )


def _hint_of_scales(missing: Collection[str], unexpected: Collection[str], wanted: Wanted) -> str:
    """Advice if two formats of moments differ only in their scales."""
    differing = [*missing, *unexpected]
    only = all(any(word.endswith(SCALE) for word in name.split("/")) for name in differing)
    return f"Its moments are in another format: {_CONVERT}. " if only and not wanted.convert else ""


def _hint(missing: list[str], wanted: Wanted, some: bool) -> str:
    if any(name.startswith("params/") for name in missing):
        return "strict=False with initial=state uses the state's own weights for these. " if some else ""
    if any(name.startswith("variables/") for name in missing):
        return "variables=jax_impl.variable_leaves(model) supplies variables that a checkpoint lacks. "
    return "strict=False continues with the tensors that fit. "


def saved_tensors(tensors: Mapping[str, Any]) -> dict[str, ShapeDtype]:
    """Shapes and dtypes of a checkpoint's tensors, except those that the caller passed as ``train``."""
    return {
        name: ShapeDtype(info.shape, info.dtype)
        for name, info in tensors.items()
        if not (len(info.path) > 1 and info.path[0] == "train")
    }


# Usual names of trees that hold a model's parameters, and of the trees around them; the likeliest name comes first.
_WEIGHTS = ("params", "model", "weights", "state", "train_state")
_OPTIMIZER = ("opt_state", "optimizer")
_VALUE = "value"


def root_of_weights(names: Collection[str], parameters: Collection[str], tree: str) -> str:
    """The tree that contains the most parameters; among equals, the outermost tree or the likeliest name.

    ``tree``: the tree to search, "" for the whole checkpoint.
    """

    def rank(root: str) -> tuple[int, int, list[int]]:
        have = sum(any(n in names for n in spellings(root, path)) for path in parameters)
        inner = root.removeprefix(tree).strip("/")
        words = inner.split("/") if inner else []
        return -have, len(words), [_WEIGHTS.index(word) for word in words]

    default = tree or "params"
    roots = {default, tree, *(root for name in names for root in _prefixes(name, _WEIGHTS, tree))}
    best = min(roots, key=rank)
    return best if rank(best)[0] else default


def root_of_optimizer(names: Collection[str], tree: str) -> str:
    """The innermost tree that is named like an optimizer, preferably in ``tree``; ``opt_state`` if there is none."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    for base in (tree, ""):
        roots = [
            root
            for name in names
            for root in _prefixes(name, words, base)
            if root.rpartition("/")[2] in _OPTIMIZER
        ]
        if roots:
            return max(roots, key=lambda root: root.count("/"))
    return "opt_state"


def is_of_optimizer(name: str, tree: str) -> bool:
    words = (*_OPTIMIZER, *_WEIGHTS)
    return any(root.rpartition("/")[2] in _OPTIMIZER for root in _prefixes(name, words, tree))


def step_beside(tensors: Mapping[str, ShapeDtype], used: Collection[str], tree: str) -> str | None:
    """The outermost integer that is called step and is only inside known trees or ``tree``."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    numbers = [n for n, k in tensors.items() if n not in used and k.shape == () and k.dtype.kind in "iu"]
    for base in (tree, ""):
        steps = [
            name
            for name in numbers
            for root in (base, *_prefixes(name, words, base))
            if name in spellings(root, "step")
        ]
        if steps:
            return min(steps, key=lambda name: name.count("/"))
    return None


def trees_of_weights(names: Collection[str], parameters: Collection[str]) -> list[str]:
    """Every tree, with any name, that has all or most parameters; "" is the top. Optimizer states do not count."""
    counts: Counter[str] = Counter()
    for name in names:
        for spelling in {name, name.removesuffix(f"/{_VALUE}")}:
            words = spelling.split("/")
            for start in range(len(words)):
                if "/".join(words[start:]) in parameters and not {*words[:start]} & {*_OPTIMIZER}:
                    counts["/".join(words[:start])] += 1
    most = max(counts.values(), default=0)
    return sorted(root for root, count in counts.items() if 2 * count > most)


def is_below(name: str, tree: str) -> bool:
    return not tree or name.startswith(f"{tree}/")


def _prefixes(name: str, words: Collection[str], tree: str) -> Iterator[str]:
    """The roots of ``name`` in ``tree`` that consist of known words only."""
    if not is_below(name, tree):
        return
    start = f"{tree}/" if tree else ""
    parts = name.removeprefix(start).split("/")
    for end in range(1, len(parts)):
        if parts[end - 1] not in words:
            return
        yield start + "/".join(parts[:end])


def spellings(root: str, rest: str) -> tuple[str, str]:
    name = f"{root}/{rest}" if root else rest
    return name, f"{name}/{_VALUE}"


def bare(name: str, root: str) -> str:
    """The inverse of ``spellings``."""
    return name.removeprefix(f"{root}/").removesuffix(f"/{_VALUE}")
