"""A run of a JAX model in one dtype: attributes and names that hold a dtype, and JAX's own settings.

Checkpoints are removed: a checkpoint compiles its function, and calls inside have no values.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NARROW = ("bfloat16", "float16")
_SCALARS = (jnp.float32, jnp.bfloat16, jnp.float16)
_CONVERT = jax.lax.convert_element_type
# Functions that read bits as numbers cannot take other numbers.
_BITS = ("bitcast_convert_type", "isdtype", "frombuffer")


def target(dtype: str, of: str) -> str | None:
    """The dtype that replaces ``of``, which a module names itself, in a run in ``dtype``; None if it stays.

    Narrow dtypes become the run's dtype. A float32 that the model asks for becomes float64 in float64, else it stays.
    """
    if of in NARROW or (of == "float32" and dtype == "float64"):
        return dtype if of != dtype else None
    return None


def retype(value: Any, dtype: str, *, text: bool = False) -> Any:
    """A dtype in any spelling for a run in ``dtype``; other values unchanged. ``text``: may be a dtype's name."""
    if isinstance(value, str):
        return (target(dtype, value) if text else None) or value
    spelled = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    if spelled or any(value is scalar for scalar in _SCALARS):
        wanted = target(dtype, jnp.dtype(value).name)
        return value if wanted is None else jnp.dtype(wanted)
    return value


def change_dtypes(value: Any, dtype: str, name: str = "") -> Any:
    """``value``, an attribute called ``name``, for a run in ``dtype``: a copy if something changed, else itself.

    Dtypes are found in the attribute itself, in dataclasses, tuples, lists and dicts, and as text in attributes called
    ``dtype``.
    """
    new = retype(value, dtype, text="dtype" in name)
    if new is not value:
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        different = {
            key: new for key, old in fields.items() if (new := change_dtypes(old, dtype, key)) is not old
        }
        if not different:
            return value
        twin = copy.copy(value)
        for key, new in different.items():
            object.__setattr__(twin, key, new)
        return twin
    if type(value) in (tuple, list):
        items = [change_dtypes(item, dtype, name) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        new_items = {key: change_dtypes(item, dtype, str(key)) for key, item in value.items()}
        return new_items if any(new_items[key] is not value[key] for key in value) else value
    return value


@contextmanager
def settings(dtype: str, modules: Sequence[str] = (), *, eager: bool = True) -> Iterator[None]:
    """Set JAX up for a run in ``dtype``; ``modules``: names of the Python modules that define the model.

    Matrix products are exact in their dtype. ``eager``: ``jit``, ``scan`` and ``cond`` run as Python, and checkpoints
    do nothing. For float64 see ``only_float64``.
    """
    with ExitStack() as stack:
        # By default GPUs and TPUs compute float32 products in fewer bits, and this would be the
        # difference that the comparison finds.
        stack.enter_context(jax.default_matmul_precision("highest"))
        if eager:
            # Calls inside a compiled function have no values.
            stack.enter_context(jax.disable_jit())
            stack.enter_context(no_checkpoints(modules))
        if dtype == "float64":
            stack.enter_context(jax.enable_x64(True))
            stack.enter_context(only_float64(modules))
        yield


@contextmanager
def only_float64(modules: Sequence[str] = ()) -> Iterator[None]:
    """While this context is open, code that asks for float32, bfloat16 or float16 gets float64.

    ``jnp.float32`` and similar names mean float64, also where ``modules`` imported them. ``x.astype(dtype)`` and the
    functions of ``jax.numpy``, ``jax.lax``, ``jax.nn`` and ``jax.random`` that take a dtype replace a narrower dtype,
    however it is spelled, with float64. JAX's own code is unchanged. Random numbers are those of a float32 run.

    Two cases stay narrower: functions that the model imported by name from JAX and calls with a dtype spelled otherwise
    than ``jnp.float32``, such as ``np.float32``; and kernels that choose a dtype themselves.
    """
    with ExitStack() as stack:
        for owner, name, value in _narrow_names(tuple(modules)):
            stack.enter_context(attribute(owner, name, value))
        yield


@functools.lru_cache(maxsize=8)
def _narrow_names(modules: tuple[str, ...]) -> list[tuple[Any, str, Any]]:
    """The names that ``only_float64`` changes, with their new values; cached because a run has many reruns."""
    changes: list[tuple[Any, str, Any]] = []
    for module in {id(owner): owner for owner in [jnp, *map(sys.modules.get, modules)] if owner}.values():
        names = [name for name, value in vars(module).items() if any(value is scalar for scalar in _SCALARS)]
        changes += [(module, name, jnp.float64) for name in names]
    for owner in (jax.random, jnp, jax.lax, jax.nn):
        wrapped = _drawn_in_float32 if owner is jax.random else _with_float64
        functions = [(name, value) for name, value in vars(owner).items() if _takes_a_dtype(name, value)]
        changes += [(owner, name, wrapped(function)) for name, function in functions]
    changes.append((jax.random, "bernoulli", _with_float32_chance(jax.random.bernoulli)))
    for array_type in (jax.core.Tracer, type(jnp.zeros(()))):
        changes.append((array_type, "astype", _with_float64(vars(array_type)["astype"])))
    return changes


def _takes_a_dtype(name: str, function: Any) -> bool:
    if name.startswith("_") or name in _BITS or isinstance(function, type) or not callable(function):
        return False
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return any(parameter == "preferred_element_type" or parameter.endswith("dtype") for parameter in names)


def _by_jax() -> bool:
    """Whether JAX itself called the function that called this one."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0] in ("jax", "jaxlib")


def _with_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        if _by_jax():
            return function(*args, **kwargs)
        return function(
            *(retype(value, "float64", text=True) for value in args),
            **{name: retype(value, "float64", text=True) for name, value in kwargs.items()},
        )

    return wide


def _drawn_in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Random floats as a float32 run draws them, so that runs can be compared."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        numbers = function(*args, **kwargs)
        if _by_jax() or not isinstance(numbers, jax.Array) or not jnp.issubdtype(numbers.dtype, jnp.floating):
            return numbers
        if numbers.dtype == np.float64:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["dtype"] = np.float32
            numbers = function(*bound.args, **bound.kwargs)
        return _CONVERT(numbers, np.float64)

    return drawn


def _with_float32_chance(bernoulli: Callable[..., Any]) -> Callable[..., Any]:
    """The same for booleans, which are drawn in the dtype of their probability."""

    @functools.wraps(bernoulli)
    def drawn(key: Any, p: Any = 0.5, *args: Any, **kwargs: Any) -> Any:
        return bernoulli(key, p if _by_jax() else _CONVERT(p, np.float32), *args, **kwargs)

    return drawn


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` while this context is open."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def no_checkpoints(modules: Iterable[str]) -> Iterator[None]:
    """While this context is open, ``jax.checkpoint`` and ``jax.remat`` do nothing.

    Checkpoints that already wrap functions of the Python ``modules`` and methods of their classes do nothing either.
    """
    with ExitStack() as stack:
        for name in ("checkpoint", "remat"):
            stack.enter_context(attribute(jax, name, _transparent))
        for owner, name, inner in _checkpointed(tuple(modules)):
            stack.enter_context(attribute(owner, name, inner))
        yield


@functools.lru_cache(maxsize=8)
def _checkpointed(modules: tuple[str, ...]) -> list[tuple[Any, str, Any]]:
    """The places of functions with checkpoints, and the plain functions; cached because a run has many reruns."""
    replaced = []
    for module in {name: sys.modules[name] for name in modules if name in sys.modules}.values():
        own = [
            member
            for member in vars(module).values()
            if isinstance(member, type) and member.__module__ == module.__name__
        ]
        for owner in [module, *own]:
            for name, value in list(vars(owner).items()):
                inner = without_checkpoint(value)
                if inner is not value:
                    replaced.append((owner, name, inner))
    return replaced


def _transparent(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda wrapped: wrapped


def without_checkpoint(function: Any) -> Any:
    """The function that ``jax.checkpoint`` or ``nnx.remat`` wraps; anything else unchanged."""
    if not isinstance(function, FunctionType):
        return function
    links = _links(function)
    marks = [_mark(link) for link in links]
    for wrappers in CHECKPOINTS:
        if len(links) > len(wrappers) and marks[: len(wrappers)] == wrappers:
            return without_checkpoint(links[len(wrappers)])
    return function


def _links(function: Any) -> list[Any]:
    """A function and the functions that it wraps, from outside to inside."""
    links = [function]
    while hasattr(links[-1], "__wrapped__"):
        links.append(links[-1].__wrapped__)
    return links


def _mark(function: Any) -> frozenset[Any]:
    """The code of a wrapper and of the functions that it calls, without the function that it wraps."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [cell for cell in cells if cell is not getattr(function, "__wrapped__", None)]
    return frozenset(cell.__code__ for cell in (function, *inner) if isinstance(cell, FunctionType))


def _wrappers(checkpoint: Callable[..., Any]) -> list[frozenset[Any]]:
    """The wrappers that ``checkpoint`` puts around a function."""
    return [_mark(link) for link in _links(checkpoint(lambda: None))[:-1]]


CHECKPOINTS = [_wrappers(jax.checkpoint), _wrappers(nnx.remat)]
