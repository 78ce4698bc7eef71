"""A run of a JAX model in one dtype: attributes and names that hold a dtype, and JAX's own settings."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.parity.pair.jax_eager import attribute, no_checkpoints

NARROW = ("bfloat16", "float16")
_SCALARS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def target(dtype: str, of: str) -> str | None:
    """What a dtype ``of`` that a module names itself becomes in a run in ``dtype``; None where it stays.

    Narrow ones become the run's. A float32 that the model asks for becomes float64 in float64, and else stays.
    """
    if of in NARROW or (of == "float32" and dtype == "float64"):
        return dtype if of != dtype else None
    return None


def changed(value: Any, dtype: str, name: str = "") -> Any:
    """``value``, an attribute called ``name``, for a run in ``dtype``: a copy where something changed, else itself.

    Dtypes are found in the attribute itself, in dataclasses, tuples, lists and dicts, and as text in what is called
    ``dtype``.
    """
    if isinstance(value, str):
        found = target(dtype, value) if "dtype" in name else None
        return found or value
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        found = target(dtype, np.dtype(value).name)
        return value if found is None else jnp.dtype(found)
    if any(value is scalar for scalar in _SCALARS.values()):
        found = target(dtype, jnp.dtype(value).name)
        return value if found is None else jnp.dtype(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
        different = {key: new for key, old in fields.items() if (new := changed(old, dtype, key)) is not old}
        if not different:
            return value
        twin = copy.copy(value)
        for key, new in different.items():
            object.__setattr__(twin, key, new)
        return twin
    if type(value) in (tuple, list):
        items = [changed(item, dtype, name) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        new_items = {key: changed(item, dtype, str(key)) for key, item in value.items()}
        return new_items if any(new_items[key] is not value[key] for key in value) else value
    return value


@contextmanager
def settings(dtype: str, modules: Sequence[str] = (), *, eager: bool = True) -> Iterator[None]:
    """JAX as a run in ``dtype`` needs it; ``modules``: names of the Python modules that define the model.

    Products are exact in their dtype. ``eager``: ``jit``, ``scan`` and ``cond`` run as Python, and checkpoints do
    nothing. In float64, ``jnp.float32``, ``jnp.bfloat16`` and ``jnp.float16`` are names of
    float64, also where ``modules`` imported them. What stays in less: other spellings that code does not look up
    when it runs, such as ``"float32"`` in a call, ``np.float32`` and default arguments.
    """
    with ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        if eager:
            stack.enter_context(jax.disable_jit())
            stack.enter_context(no_checkpoints(modules))
        if dtype == "float64":
            stack.enter_context(jax.enable_x64(True))
            float64 = jnp.float64
            for module in {id(one): one for one in [jnp, *map(sys.modules.get, modules)] if one}.values():
                for name, value in list(vars(module).items()):
                    if any(value is scalar for scalar in _SCALARS.values()):
                        stack.enter_context(attribute(module, name, float64))
        yield
