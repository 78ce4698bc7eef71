"""Sharding that a model asks for at its parameters: ``nnx.with_partitioning``, and linen's ``nn.Partitioned`` boxes.

Names of model axes are followed (``partitioning.py``). Other names have no effect, and are warned of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx
from flax.core import meta
from flax.linen import get_logical_axis_rules

from bridge.core.callers import warn_caller
from bridge.core.text import first_of
from jax_impl.modules.tree_model import given_node


def warn_of_annotations(model: nnx.Module, found: Mapping[str, Any] | None = None) -> None:
    """Warn with ``RuntimeWarning`` of parameters, by path, that name an axis which has no effect.

    ``found``: names by path; None: all that name an axis for one of their dimensions.
    """
    if found is None:
        listed = (*_of_variables(model, {}), *_of_boxes(model, {}))
        found = {path: names for path, names in listed if _names_an_axis(names)}
    if not found:
        return
    shown = first_of([f"{path!r} {names}" for path, names in found.items()])
    warn_caller(
        f"model: {len(found)} parameters carry sharding annotations, which have no effect: {shown}; "
        "jax_impl cuts parameters over the data-parallel axes of the mesh, "
        "and over its model axes (tp, ep, ...) where annotations name those. Take the annotations away to be sure that "
        "nothing relies on them: leave out nnx.with_partitioning, or pass flax.linen.meta.unbox(params)",
        RuntimeWarning,
    )


def annotations_of(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Path and names of each parameter that names an axis, logical names replaced by flax's rules.

    Rules are those of the variable or box, or ``flax.linen.logical_axis_rules`` around.
    """
    rules = dict(get_logical_axis_rules())
    for path, names in _of_variables(model, rules):
        if _names_an_axis(names):
            yield path, names
    for path, names in _of_boxes(model, rules):
        if _names_an_axis(names):
            yield f"{path}/value" if path else "value", names


def _of_variables(model: nnx.Module, rules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        # A NamedSharding has its names in a spec.
        names = metadata.get("out_sharding")
        names = getattr(names, "spec", names)
        yield (
            "/".join(map(str, path)),
            _replaced(names, {**rules, **dict(metadata.get("sharding_rules") or ())}),
        )


def _of_boxes(model: nnx.Module, rules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        box = given_node(module, meta.AxisMetadata)
        if box is not None:
            own = {**rules, **dict(getattr(box, "rules", None) or ())}
            yield "/".join(map(str, path)), _replaced(getattr(box, "names", None), own)


def _replaced(names: Any, rules: Mapping[str, Any]) -> Any:
    if names is None or not rules:
        return names
    return tuple(rules.get(name, name) if isinstance(name, str) else name for name in names)


def _names_an_axis(names: Any) -> bool:
    return names is not None and any(name is not None for name in names)
