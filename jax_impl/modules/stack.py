"""Equal layers as one stacked module that is scanned: one layer is compiled, for any depth.

``stack_layers`` builds the same module as ``nnx.vmap`` over a constructor, and ``scan_layers`` runs the module like
``nnx.scan``; models that use flax's functions work as well. ``fully_shard(..., stacked=["layers"])`` names the stacks.
Without that option stacks are recognized: a module from ``nnx.vmap`` looks like any other module except for its shapes,
but flax's layers record the shape with which they were created, and a stack has one axis more::

    layers: Block
      dense: nnx.Linear, in_features 8, out_features 16
        kernel [4, 8, 16]                                    a stack of 4

Only modules that patterns such as ``layers/*`` match are examined. A wrong guess cannot silently change the training: a
stack that nothing scans is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.modules.module_tree import ROOT, VARIABLES, UnitModule, joined, matches, parameter_leaves
from jax_impl.modules.tree_model import may_be_unit

M = TypeVar("M", bound=nnx.Module)


def stack_layers(layers: Sequence[M]) -> M:
    """One module whose variables stack the layers' variables on a new leading axis.

    Raises ``ValueError`` for no layers, or layers that differ in structure or in the shape of a variable.
    """
    if not layers:
        raise ValueError("stack_layers: expected at least one layer, got none")
    graphdef, first = nnx.split(layers[0])
    states = [first]
    for number, layer in enumerate(layers[1:], 1):
        other, state = nnx.split(layer)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), variables) for variables in (first, state)]
        if other != graphdef or shapes[0] != shapes[1]:
            raise ValueError(f"stack_layers: expected equal layers, but layer {number} differs from layer 0")
        states.append(state)
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def scan_layers(layers: nnx.Module, carry: Any, *args: Any) -> Any:
    """Call ``layer(carry, *args)`` for each layer of a stack; each result is the ``carry`` of the next layer.

    All layers get the same ``args``. The layers' variables, such as batch statistics, are updated layer by layer.
    """
    graphdef, parameters, variables = cast(tuple[Any, Any, Any], nnx.split(layers, nnx.Param, ...))

    def run(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        module: Any = nnx.merge(graphdef, *layer)
        carry = module(carry, *args)
        return carry, nnx.as_pure(nnx.state(module, VARIABLES))

    # Variables remember the trace in which they were created, and may change only there. So plain arrays pass through
    # the loop instead.
    carry, changed = jax.lax.scan(run, carry, (nnx.as_pure(parameters), nnx.as_pure(variables)))
    nnx.update(layers, changed)
    return carry


# Errors of JAX and flax if the arrays of a unit that is not a stack are scanned or mapped.
_AXIS_ERRORS = ("leading axis", "out of bounds for array of dimension", "inconsistent sizes for array axes")


def stack_lengths(model: nnx.Module, stacked: Sequence[str]) -> dict[str, int]:
    """The number of layers of each stack. Raises ``ValueError`` for a path without module, or unequal leading sizes."""
    modules = {joined(key): module for key, module in nnx.iter_modules(model)}
    lengths: dict[str, int] = {}
    for path in stacked:
        if path not in modules or path == ROOT:
            raise ValueError(
                f"stacked: expected paths of submodules, got {path!r}; the model has {sorted(modules)[1:12]}"
            )
        if not may_be_unit(modules[path]):
            raise ValueError(
                f"stacked: expected a module whose parameters have a leading axis over layers, got {path!r}, a list "
                "or dictionary of modules: stack_layers makes one module of equal layers"
            )
        if _overlaps(path, lengths):
            raise ValueError(f"stacked: expected no stack inside another, got {path!r} with {list(lengths)}")
        sizes = {
            name: value.shape[0] if value.ndim else None
            for name, value in parameter_leaves(model).items()
            if name.startswith(f"{path}/")
        }
        length = _common(sizes.values())
        if length is None:
            raise ValueError(
                f"stacked: expected all parameters of {path!r} with one leading axis over its layers, which nn.scan "
                f'makes with variable_axes={{"params": 0}}, got leading sizes {dict(list(sizes.items())[:8])}'
            )
        lengths[path] = length
    return lengths


def recognized_stacks(model: nnx.Module, patterns: Iterable[str]) -> dict[str, int]:
    """The number of layers of each module that patterns like ``layers/*`` treat as a stack and that looks like one."""
    modules = {joined(key): module for key, module in nnx.iter_modules(model) if may_be_unit(module)}
    lengths: dict[str, int] = {}
    for pattern in patterns:
        parts = pattern.split("/")
        for end in (i for i, part in enumerate(parts) if i and part == "*"):
            for path in [path for path in modules if matches(path, "/".join(parts[:end]))]:
                length = None if _overlaps(path, lengths) else _length_seen(modules[path])
                if length is not None:
                    lengths[path] = length
    return lengths


def unnamed_stack(error: ValueError, units: Iterable[UnitModule]) -> str | None:
    """A message to replace JAX's ``error`` if a loss scans or maps a unit that is no stack; else None."""
    if not any(words in str(error) for words in _AXIS_ERRORS):
        return None
    chosen = [unit for unit in units if unit.path != ROOT]
    suspects = [
        unit.path
        for unit in chosen
        if unit.layers is None
        and unit.shapes
        and _common(shape[0] if shape else None for shape in unit.shapes) is not None
    ]
    if not suspects and all(unit.layers is None for unit in chosen):
        return None
    which = f"units {suspects[:5]}" if suspects else "a stack"
    return (
        "loss: expected a loop over layers, or over an ensemble's members, along axis 0 of a module that is declared "
        f'as a stack, got a loop over {which}: declare that module, fully_shard(..., units=["layers/*"], '
        f'stacked=["layers"]) ({error})'
    )


def _length_seen(module: nnx.Module) -> int | None:
    length = _common(value.shape[0] if value.ndim else None for value in parameter_leaves(module).values())
    made = list(_made_with(module))
    if length is None or not made or any(shape_seen != (length, *shape) for shape_seen, shape in made):
        return None
    return length


def _made_with(module: nnx.Module) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shape of each parameter of flax's layers, and the shape with which it was created."""
    for _, below in nnx.iter_modules(module):
        layer: Any = below
        match below:
            case nnx.Linear():
                yield layer.kernel.shape, (layer.in_features, layer.out_features)
            case nnx.LinearGeneral() if not layer.batch_axis:
                yield layer.kernel.shape, (*layer.in_features, *layer.out_features)
            case nnx.Conv() | nnx.ConvTranspose() | nnx.Einsum():
                yield layer.kernel.shape, tuple(layer.kernel_shape)
            case nnx.Embed():
                yield layer.embedding.shape, (layer.num_embeddings, layer.features)
            case nnx.LayerNorm() | nnx.RMSNorm() | nnx.BatchNorm() | nnx.GroupNorm():
                for parameter in jax.tree.leaves(nnx.as_pure(nnx.state(layer, nnx.Param))):
                    yield parameter.shape, (layer.num_features,)


def _common(sizes: Iterable[int | None]) -> int | None:
    different = set(sizes)
    return None if len(different) != 1 or different & {None, 0} else cast(int, different.pop())


def _overlaps(path: str, others: Collection[str]) -> bool:
    return any(
        path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in others
    )
