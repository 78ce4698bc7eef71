"""Which layer of a stack a module is, by its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.parity.jax.leaves import reveal

Arrays = Mapping[str, Any]


def length_of(arrays: Arrays, stack: Arrays) -> int:
    """How many layers with the names and shapes of ``arrays`` a stack has, on leading axes; 0 if it is no stack."""
    if not arrays or arrays.keys() != stack.keys():
        return 0
    shapes = {
        (np.shape(stack[name])[:1], np.shape(stack[name])[1:] == np.shape(x)) for name, x in arrays.items()
    }
    (first, same), *others = shapes
    return int(first[0]) if first and same and not others else 0


def equal(arrays: Arrays, others: Arrays, layer: int | None = None) -> bool:
    """Whether names and values are equal, of the other's ``layer`` if given. Raises ``Hidden``."""
    if arrays.keys() != others.keys():
        return False
    for name, array in arrays.items():
        other = reveal(others[name])
        mine, theirs = np.asarray(reveal(array)), np.asarray(other if layer is None else other[layer])
        if mine.shape != theirs.shape or not np.array_equal(mine, theirs, equal_nan=True):
            return False
    return True


def layer_of(arrays: Arrays, stack: Arrays, turn: int) -> int | None:
    """The layer of a stack with these values; of several, the first from ``turn`` on, around the end.

    None if there is none. Raises ``Hidden``.
    """
    length = length_of(arrays, stack)
    turns = [(turn + step) % length for step in range(length)]
    return next((number for number in turns if equal(arrays, stack, number)), None)
