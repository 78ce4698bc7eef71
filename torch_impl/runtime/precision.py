"""Which dtype each copy of a parameter has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from bridge.sharding import float8


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The fields of ``torch.distributed.fsdp.MixedPrecisionPolicy``, ``grad_dtype`` and ``gather_dtype``.

    param_dtype: dtype of forward and backward (None: the dtype in which the parameters were given).
    reduce_dtype: dtype in which gradients cross the network (None: that of forward and backward).
    output_dtype: floating-point outputs of the module are cast to it (None: left alone).
    cast_forward_inputs: cast floating-point inputs of the module to ``param_dtype`` when that is set.
    grad_dtype: dtype of the reduced gradient that the optimizer reads (None: that of the main weights).
    gather_dtype: format in which weights of two dimensions or more cross the network, "mxfp8" or
        ``torch.float8_e4m3fn`` (or its name); None: that of forward and backward. They are quantized from the main
        weights, and forward and backward compute with the quantized values in ``param_dtype``; gradients are applied to
        the main weights as they are. See ``bridge.sharding.float8``.
    float8_products: with ``gather_dtype=torch.float8_e4m3fn``, ``nn.Linear`` modules of the unit (no subclasses)
        multiply in float8 where the device has kernels for it, else in ``param_dtype``. Inputs and gradients are then
        quantized as well; see ``torch_impl.runtime.float8_products``.
    store_param_remainders: where compute weights are bfloat16 and stay whole at rest, store float32 main weights as
        this rank's rows of them and an int16 remainder an element, 2 bytes less; see ``torch_impl.dtensor.remainders``.
        ``parameters()`` shows the bfloat16 weights, and ``MainWeightAdamW`` updates the float32 ones.

    Raises ValueError for a dtype that is not floating-point or has one byte, and for another format.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    grad_dtype: torch.dtype | None = None
    gather_dtype: str | torch.dtype | None = None
    float8_products: bool = False
    store_param_remainders: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "gather_dtype" or not field.name.endswith("_dtype") or value is None:
                continue
            if not _is_floating(value):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name}: expected a floating-point dtype, got {value}"
                )
            # Neither operators nor gloo know them.
            if value.itemsize == 1:
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name}: expected a dtype of two or more bytes, got {value}; "
                    "gather_dtype has weights in float8 on the network"
                )
        if self.gather_dtype is not None and self.gather not in float8.FORMATS:
            raise ValueError(
                'MixedPrecisionPolicy.gather_dtype: expected "mxfp8", torch.float8_e4m3fn or None, got '
                f"{self.gather_dtype!r}"
            )

        if self.float8_products and self.gather != "float8_e4m3fn":
            raise ValueError(
                "MixedPrecisionPolicy.float8_products: expected gather_dtype=torch.float8_e4m3fn beside it, whose "
                f"weights have one scale each, got {self.gather_dtype!r}"
            )

    @property
    def gather(self) -> str | None:
        """The name of ``gather_dtype``."""
        return None if self.gather_dtype is None else str(self.gather_dtype).removeprefix("torch.")

    def is_quantized(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether a parameter that was given so, this rank's part of it, is gathered as float8."""
        return self.gather is not None and dtype.is_floating_point and float8.is_quantized(shape)


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one parameter group: main weights, compute weights, reduction, reduced gradient.

    ``gather``: a float8 format, see ``MixedPrecisionPolicy.gather_dtype``; None: weights are gathered in ``compute``.
    ``remainders``: main weights are stored as compute weights and remainders.
    """

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    gather: str | None = None
    remainders: bool = False


def group_dtypes(given: torch.dtype, policy: MixedPrecisionPolicy, quantized: bool = False) -> GroupDtypes:
    """Dtypes of a group whose parameters were given as ``given``, and are all ``quantized`` or none.

    Main weights of half-precision parameters are float32; float32 and float64 stay. Parameters that are not floating
    point (buffers kept as frozen parameters) keep their dtype throughout.
    """
    if not given.is_floating_point:
        return GroupDtypes(given, given, given, given)
    # An update smaller than the last bit of a half-precision weight would be lost.
    main = torch.float32 if given in (torch.float16, torch.bfloat16) else given
    compute = policy.param_dtype or given
    gather = policy.gather if quantized else None
    reduce, grad = policy.reduce_dtype or compute, policy.grad_dtype or main
    return GroupDtypes(main, compute, reduce, grad, gather, policy.store_param_remainders)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point
