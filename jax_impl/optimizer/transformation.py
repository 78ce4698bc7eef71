"""Checks of what the user gives to the optimizers of main weights; ``of``: the optimizer's name, in errors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_rate(name: str, value: Any, of: str) -> None:
    """``TypeError`` unless ``value`` is a number, a schedule or a scalar array; ``ValueError`` for one below 0."""
    if callable(value):
        return
    if isinstance(value, jax.Array | np.ndarray):
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        if value.shape != () or not real:
            raise TypeError(
                f"{of}: {name}: expected a number or a schedule, got an array of {value.dtype}, shape {value.shape}"
            )
        if isinstance(value, jax.core.Tracer):
            return
    elif not _is_number(value):
        raise TypeError(f"{of}: {name}: expected a number or a schedule, got {value!r}")
    _check_range(name, value, of)


def check_number(name: str, value: Any, of: str) -> None:
    """``TypeError`` unless ``value`` is a number that the program has as a constant."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{of}: {name}: expected a number, got an array, as optax.inject_hyperparams gives for each number that it "
            f"is not told of: name all but learning_rate, optax.inject_hyperparams({of}, "
            f"static_args=({name!r}, ...)), or leave it out and give {of} the schedule itself"
        )
    if not _is_number(value):
        raise TypeError(f"{of}: {name}: expected a number, got {value!r}")


def check_not_negative(name: str, value: Any, of: str) -> None:
    """``TypeError`` as ``check_number``; ``ValueError`` for a number below 0."""
    check_number(name, value, of)
    _check_range(name, value, of)


def numbers_of(name: str, values: Any, count: int, of: str) -> tuple[float, ...]:
    """As a tuple. ``TypeError`` unless ``values`` are numbers, ``ValueError`` for more or fewer than ``count``."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{of}: {name}: expected {count} numbers, got {values!r}")
    listed = tuple(values)
    for value in listed:
        check_number(name, value, of)
    if len(listed) != count:
        raise ValueError(f"{of}: {name}: expected {count} numbers, got {listed!r}")
    return listed


def check_flag(name: str, value: Any, of: str) -> None:
    """``TypeError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{of}: {name}: expected True or False, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_range(name: str, value: Any, of: str) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{of}: expected {name} >= 0, got {value}")
