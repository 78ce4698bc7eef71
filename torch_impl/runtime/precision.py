"""Which dtype each copy of a parameter has."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The fields of ``torch.distributed.fsdp.MixedPrecisionPolicy``, and ``grad_dtype``.

    param_dtype: dtype of forward and backward (None: the dtype in which the parameters were given).
    reduce_dtype: dtype in which gradients cross the network (None: that of forward and backward).
    output_dtype: floating-point outputs of the module are cast to it (None: left alone).
    cast_forward_inputs: cast floating-point inputs of the module to ``param_dtype`` when that is set.
    grad_dtype: dtype of the reduced gradient that the optimizer reads (None: that of the main weights).

    Raises ValueError for a dtype that is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_dtype") and value is not None and not _is_floating(value):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name}: expected a floating-point dtype, got {value}"
                )


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one parameter group: main weights, compute weights, reduction, reduced gradient."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype


def group_dtypes(given: torch.dtype, policy: MixedPrecisionPolicy) -> GroupDtypes:
    """Dtypes of a group whose parameters were given as ``given``.

    Main weights of half-precision parameters are float32; float32 and float64 stay. Parameters that are not floating
    point (buffers kept as frozen parameters) keep their dtype throughout.
    """
    if not given.is_floating_point:
        return GroupDtypes(given, given, given, given)
    # An update smaller than the last bit of a half-precision weight would be lost.
    main = torch.float32 if given in (torch.float16, torch.bfloat16) else given
    compute = policy.param_dtype or given
    return GroupDtypes(main, compute, policy.reduce_dtype or compute, policy.grad_dtype or main)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point
