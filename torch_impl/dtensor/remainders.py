"""Float32 weights that are stored as bfloat16 weights and int16 remainders, and restored bit for bit.

    float32, as an integer   |upper 16 bits|lower 16 bits|   =   bfloat16 * 2^16 + remainder
    remainder                the lower 16 bits, as a number from -2^15 to 2^15 - 1
    bfloat16                 the upper 16 bits, plus one where the remainder is negative

So the bfloat16 weight is the float32 weight rounded to nearest, with ties away from zero. With ties to even, as in
casts, 16 bits would not suffice: 65,537 numbers round to each even bfloat16 number. A NaN is restored as a NaN.

The remainder belongs to the local tensor of a ``RowDTensor`` and to its views by rows. Operators that write to such a
tensor write to the float32 weights (``ops``). A write to the bfloat16 weights themselves, through ``to_local()``, sets
the bfloat16 values: torch's version counter reveals it, and the remainders of the whole parameter become zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torch_impl.dtensor.local import local_of

_NAME = "twinshard_remainder"


@dataclass(eq=False)
class _Whole:
    """State that a parameter's remainder and its views share.

    version: the weight's counter after the last write that also set the remainder.
    before_write: completes pending writes to the weight.
    """

    remainder: torch.Tensor
    version: int
    before_write: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Remainder:
    """``values``: int16, of the shape of the weight to which it is attached."""

    values: torch.Tensor
    _whole: _Whole

    def settle(self, weight: torch.Tensor) -> None:
        """Set the remainder to zero if the weight was written to without it."""
        if weight._version != self._whole.version:
            self._whole.remainder.zero_()
            self._whole.version = weight._version

    def written(self, weight: torch.Tensor) -> None:
        """Record that the weight and its remainder now belong together."""
        self._whole.version = weight._version

    def before_write(self) -> None:
        self._whole.before_write()

    def view_for(self, view: torch.Tensor, values: torch.Tensor) -> None:
        """Attach ``values``, a view of this remainder, to the same view of the weight."""
        vars(view)[_NAME] = Remainder(values, self._whole)


def attach(weight: torch.Tensor, values: torch.Tensor, before_write: Callable[[], None]) -> None:
    """Make ``values`` the remainder of ``weight``, a local tensor."""
    vars(weight)[_NAME] = Remainder(values, _Whole(values, weight._version, before_write))


def remainder_of(tensor: torch.Tensor) -> Remainder | None:
    """The remainder of a tensor, or of a DTensor's local tensor."""
    remainder: Remainder | None = getattr(local_of(tensor), _NAME, None)
    return remainder


def main_values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's float32 weights of a tensor with a remainder."""
    weight, remainder = local_of(tensor), _checked(tensor)
    remainder.settle(weight)
    return join(weight, remainder.values)


def set_main_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Set this rank's weights of a tensor with a remainder to ``values`` (float32)."""
    weight = local_of(tensor)
    with written_with_remainders([weight]):
        split(values, weight, _checked(tensor).values)
        # Below autograd, torch does not count.
        torch.autograd.graph.increment_version(weight)


@contextmanager
def written_with_remainders(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside the context, writes to local ``weights`` with remainders leave the remainders unchanged."""
    kept = [(weight, remainder) for weight in weights if (remainder := remainder_of(weight)) is not None]
    for weight, remainder in kept:
        remainder.before_write()
        remainder.settle(weight)
    try:
        yield
    finally:
        for weight, remainder in kept:
            remainder.written(weight)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 weights from bfloat16 weights and their remainders."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write float32 ``values`` into ``weight`` (bfloat16) and ``remainder`` (int16)."""
    # Only for a NaN could the addition below overflow and produce a number.
    bits = values.masked_fill(values.isnan(), torch.nan).view(torch.int32)
    remainder.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(1 << 15).bitwise_right_shift_(16))


def _checked(tensor: torch.Tensor) -> Remainder:
    remainder = remainder_of(tensor)
    if remainder is None:
        raise ValueError(f"expected a tensor with a remainder, got {type(tensor).__name__} of {tensor.dtype}")
    return remainder
