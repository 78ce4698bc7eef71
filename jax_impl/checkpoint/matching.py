"""Which tensor of a checkpoint is which one of a plan's, whatever JAX program saved it.

::

    here                         there
    params/<path>                <path> below params, model, model/params, ..., or at the top
    variables/<path>             <path> below variables, or where the weights are
    opt_state/<name>/<path>      <name>/<path> below opt_state, optimizer/opt_state (``nnx.Optimizer``), ...
    train/step                   step, beside any of these

In the state of an nnx module every name ends in ``/value``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bridge.formats import CheckpointError
from jax_impl.checkpoint.moments import match_moments
from jax_impl.checkpoint.names import Kind, listed

# What programs call the trees that hold a model's parameters, and the trees around those; the first is the likeliest.
_WEIGHTS = ("params", "model", "weights", "state", "train_state")
_OPTIMIZER = ("opt_state", "optimizer")
_VALUE = "value"


@dataclass(frozen=True)
class Match:
    """``sources``: the checkpoint's name of each tensor of the plan that it has. ``fresh``: the plan's other tensors.

    ``ignored``: the checkpoint's other tensors. ``step``: the name of a step number beside the trees.
    """

    sources: Mapping[str, str]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    step: str | None


@dataclass(frozen=True)
class Wanted:
    """What a load asks of a checkpoint.

    ``tensors``: as ``names.kinds`` gives them. ``parameters``: their paths. ``with_variables``: whether the caller has
    values for variables that the checkpoint lacks.
    """

    tensors: Mapping[str, Kind]
    parameters: Collection[str]
    with_optimizer: bool
    with_variables: bool
    strict: bool


def match(path: Path, found: Mapping[str, Kind], wanted: Wanted) -> Match:
    """Compare names, then shapes, then dtypes, so that each error speaks of one kind of difference.

    ``found``: the tensors of the checkpoint at ``path``, but ``train``. Raises ``CheckpointError`` for what is missing,
    different or, if strict, unexpected.
    """
    sources = _sources(found, wanted)
    step = _step(found, sources.values())
    used = {*sources.values(), step}
    rest = [name for name in found if name not in used]
    missing = [name for name in wanted.tensors if name not in sources and not _may_be_fresh(name, wanted)]
    unexpected = [
        name for name in rest if wanted.strict and (wanted.with_optimizer or not _of_optimizer(name))
    ]
    if missing or unexpected:
        raise CheckpointError(
            f"{path}: is this another model's or optimizer's checkpoint? {_hint(missing, wanted)}Missing: "
            f"{listed(missing)}; unexpected: {listed(unexpected)}"
        )
    for field in Kind._fields:
        wrong = [
            f"{name} (expected {getattr(wanted.tensors[name], field)}, got {getattr(found[source], field)})"
            for name, source in sources.items()
            if getattr(wanted.tensors[name], field) != getattr(found[source], field)
            and not (field == "dtype" and _may_be_cast(name, wanted, found[source]))
        ]
        if wrong:
            hint = "; strict=False casts floating-point weights" if field == "dtype" and wanted.strict else ""
            raise CheckpointError(
                f"{path}: tensors of another {field} than this model's: {listed(wrong)}{hint}"
            )
    fresh = tuple(name for name in wanted.tensors if name not in sources)
    return Match(sources, fresh, tuple(rest), step)


def _may_be_cast(name: str, wanted: Wanted, found: Kind) -> bool:
    """Whether these are weights in another floating dtype, such as a bfloat16 copy for inference."""
    both = (wanted.tensors[name].dtype, found.dtype)
    floating = all(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16 for dtype in both)
    return not wanted.strict and name.startswith("params/") and floating


def _sources(found: Mapping[str, Kind], wanted: Wanted) -> dict[str, str]:
    root = _root_of_weights(found, wanted.parameters)
    around = root.rpartition("/")[0]
    optimizer = _root_of_optimizer(found)
    sources: dict[str, str] = {}
    for name in wanted.tensors:
        kind, _, rest = name.partition("/")
        if kind == "opt_state" and not wanted.strict:
            continue
        roots = {"params": (root,), "variables": ("variables", root, around), "opt_state": (optimizer,)}[kind]
        source = next((n for r in roots for n in _spellings(r, rest) if n in found), None)
        if source is not None:
            sources[name] = source
    if not wanted.strict:
        moments = {n: k for n, k in wanted.tensors.items() if n.startswith("opt_state/")}
        stored = {n: k for n, k in found.items() if n.startswith(f"{optimizer}/")}
        sources |= match_moments(
            {_bare(n, "opt_state"): (n, kind) for n, kind in moments.items()},
            {_bare(n, optimizer): (n, kind) for n, kind in stored.items()},
            wanted.parameters,
        )
        for name in [n for n in sources if n.startswith("variables/") and wanted.with_variables]:
            if found[sources[name]] != wanted.tensors[name]:
                del sources[name]
    return sources


def _may_be_fresh(name: str, wanted: Wanted) -> bool:
    """Whether a load goes on without the tensor."""
    if name.startswith("variables/"):
        return wanted.with_variables
    return name.startswith("opt_state/") and not wanted.strict


def _hint(missing: list[str], wanted: Wanted) -> str:
    if any(name.startswith("params/") for name in missing):
        return ""
    if any(name.startswith("variables/") for name in missing):
        return "variables=jax_impl.variable_leaves(model) gives variables that a checkpoint lacks. "
    return "strict=False goes on with what fits. "


def _root_of_weights(found: Mapping[str, Kind], parameters: Collection[str]) -> str:
    """The tree below which most parameters are; of equal ones the outermost, or the one with the likeliest name."""

    def rank(root: str) -> tuple[int, int, list[int]]:
        have = sum(any(n in found for n in _spellings(root, path)) for path in parameters)
        words = root.split("/") if root else []
        return -have, len(words), [_WEIGHTS.index(word) for word in words]

    roots = {"params", "", *(root for name in found for root in _prefixes(name, _WEIGHTS))}
    best = min(roots, key=rank)
    return best if rank(best)[0] else "params"


def _root_of_optimizer(found: Mapping[str, Kind]) -> str:
    """The innermost tree that is named for an optimizer, ``opt_state`` where there is none."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    roots = [
        root for name in found for root in _prefixes(name, words) if root.rpartition("/")[2] in _OPTIMIZER
    ]
    return max(roots, key=lambda root: root.count("/"), default="opt_state")


def _of_optimizer(name: str) -> bool:
    words = (*_OPTIMIZER, *_WEIGHTS)
    return any(root.rpartition("/")[2] in _OPTIMIZER for root in _prefixes(name, words))


def _step(found: Mapping[str, Kind], used: Collection[str]) -> str | None:
    """The outermost integer that is called step and is not inside of anything but known trees."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    steps = [
        name
        for name, kind in found.items()
        if name not in used and kind.shape == () and kind.dtype.kind in "iu"
        for root in ("", *_prefixes(name, words))
        if name in _spellings(root, "step")
    ]
    return min(steps, key=lambda name: name.count("/"), default=None)


def _prefixes(name: str, words: Collection[str]) -> Iterator[str]:
    parts = name.split("/")
    for end in range(1, len(parts)):
        if parts[end - 1] not in words:
            return
        yield "/".join(parts[:end])


def _spellings(root: str, rest: str) -> tuple[str, str]:
    name = f"{root}/{rest}" if root else rest
    return name, f"{name}/{_VALUE}"


def _bare(name: str, root: str) -> str:
    return name.removeprefix(f"{root}/").removesuffix(f"/{_VALUE}")


def kinds_of(tensors: Mapping[str, Any]) -> dict[str, Kind]:
    """Shapes and dtypes of a checkpoint's tensors, but of those that the caller gave as ``train``."""
    return {
        name: Kind(info.shape, info.dtype)
        for name, info in tensors.items()
        if not (len(info.path) > 1 and info.path[0] == "train")
    }
