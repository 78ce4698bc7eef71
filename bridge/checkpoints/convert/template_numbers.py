"""Numbers of a source for the leaves of a template: exact, or refused.

source            template          destination
int, float, 0-d   0-d tensor        whole numbers exactly; fractions rounded to a floating-point dtype
0-d tensor        int, float        a number of the template's type, with the value of the source
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from bridge.core.formats.tensors.base import TensorInfo

Number = int | float | complex


def number_of(value: object) -> Number | None:
    """A Python or NumPy number as a Python number; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, Number) else None


def stored_as(number: Number | None, info: TensorInfo) -> np.ndarray | None:
    """An array like ``info``. None without a number, for several elements, and if the dtype cannot store the number."""
    if number is None or info.numel != 1:
        return None
    # A number that does not fit raises, or becomes another one, which the comparison finds.
    with np.errstate(all="ignore"), suppress(OverflowError, TypeError, ValueError):
        array = np.full(info.shape, number, info.dtype)
        return array if _same(number, array.flat[0].item()) else None
    return None


def typed_as(number: Number | None, like: float) -> float | None:
    """The number with the type of ``like``, an int or float; None without a number, and if the type cannot hold it."""
    if number is None or isinstance(number, complex):
        return None
    with suppress(OverflowError, ValueError):
        typed = type(like)(number)
        return typed if _same(number, typed) else None
    return None


def _same(number: Number, stored: object) -> bool:
    if isinstance(number, float) and isinstance(stored, float):
        # Rounding to fewer bits is allowed, as it is for tensors.
        return math.isnan(number) == math.isnan(stored) and math.isinf(number) == math.isinf(stored)
    return number == stored
