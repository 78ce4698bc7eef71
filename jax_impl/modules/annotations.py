"""Sharding that a model asks for at its parameters: ``nnx.with_partitioning``, and linen's ``nn.Partitioned`` boxes.

Flat buffers cut parameters over data-parallel axes only, so such annotations have no effect here. They are warned of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from flax.core import meta

from bridge.callers import warn_caller
from jax_impl.modules.tree_model import given_node

_SHOWN = 3


def warn_of_annotations(model: nnx.Module) -> None:
    """Warn with ``RuntimeWarning`` of parameters, by path, that name a mesh axis for one of their dimensions."""
    found = {
        path: names for path, names in (*_of_variables(model), *_of_boxes(model)) if _names_an_axis(names)
    }
    if not found:
        return
    shown = ", ".join(f"{path!r} {names}" for path, names in list(found.items())[:_SHOWN])
    warn_caller(
        f"model: {len(found)} parameters carry sharding annotations, which have no effect: {shown}"
        f"{', ...' if len(found) > _SHOWN else ''}; jax_impl cuts parameters over the data-parallel axes of the mesh "
        "only. Take the annotations away to be sure that nothing relies on them: leave out nnx.with_partitioning, or "
        "pass flax.linen.meta.unbox(params)",
        RuntimeWarning,
    )


def _of_variables(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield "/".join(map(str, path)), variable.get_metadata().get("out_sharding")


def _of_boxes(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        box = given_node(module, meta.AxisMetadata)
        if box is not None:
            yield "/".join(map(str, path)), getattr(box, "names", None)


def _names_an_axis(names: Any) -> bool:
    return names is not None and any(name is not None for name in names)
