"""The dtype of each copy of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from bridge.core.sharding.policy import float8
from bridge.core.sharding.policy.group_dtypes import AskedDtypes, GroupDtypes


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The fields of ``torch.distributed.fsdp.MixedPrecisionPolicy``, and additional fields.

    param_dtype: dtype of forward and backward. None: the original dtype of the parameters, or
        ``main_dtype`` if it is no wider, also for frozen parameters.
    reduce_dtype: dtype in which gradients cross the network (None: the dtype of forward and backward).
    output_dtype: floating-point outputs of the module are cast to it (None: not cast).
    cast_forward_inputs: cast floating-point inputs of the module to ``param_dtype`` if it is set,
        else to a ``main_dtype`` of two bytes.
    grad_dtype: dtype of the reduced gradient that the optimizer reads (None: the dtype of the main weights).
    gather_dtype: format in which weights of two dimensions or more cross the network, "mxfp8" or
        ``torch.float8_e4m3fn`` (or its name); None: the dtype of forward and backward. The weights are quantized from
        the main weights, and forward and backward compute with the quantized values in ``param_dtype``; gradients are
        applied to the main weights directly. See ``bridge.core.sharding.policy.float8``.
    float8_products: with ``gather_dtype=torch.float8_e4m3fn``, ``nn.Linear`` modules of the unit
        (not subclasses) multiply in float8 if the device has kernels for it, else in
        ``param_dtype``. Inputs and gradients are then quantized as well; see
        ``torch_impl.runtime.gather.float8_products``.
    store_param_remainders: if compute weights are bfloat16 and stay whole at rest, store float32
        main weights as this rank's rows of the compute weights and an int16 remainder per element,
        which saves 2 bytes per element; see ``torch_impl.dtensor.remainders``. ``parameters()``
        returns the bfloat16 weights, and ``MainWeightAdamW`` updates the float32 weights.
    main_dtype: dtype of the main weights of trainable parameters, to which they are cast when they
        are sharded; with float32, float64 parameters stay float64. None: each parameter keeps its original dtype, as in
        ``torch.distributed.fsdp``. Frozen parameters always keep theirs. So a half-precision parameter that is to have
        wider main weights must be trainable when it is sharded: if it is unfrozen later, the next forward raises.

    Raises ValueError for a dtype that is not floating-point or has one byte, for another format,
    and for ``gather_dtype`` with main weights that are not float32.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    grad_dtype: torch.dtype | None = None
    gather_dtype: str | torch.dtype | None = None
    float8_products: bool = False
    store_param_remainders: bool = False
    main_dtype: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"MixedPrecisionPolicy.{field.name}: expected a bool, got {value!r}")
            if field.name == "gather_dtype" or not field.name.endswith("_dtype") or value is None:
                continue
            if not _is_floating(value):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name}: expected a floating-point dtype of torch, "
                    f"got {value!r}"
                )
            # Neither operators nor gloo support one-byte floating-point dtypes.
            if value.itemsize == 1:
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name}: expected a dtype of two or more bytes, "
                    f"got {value}; use gather_dtype to send weights in float8"
                )
        if self.gather_dtype is not None and self.gather not in float8.FORMATS:
            raise ValueError(
                'MixedPrecisionPolicy.gather_dtype: expected "mxfp8", torch.float8_e4m3fn or None, got '
                f"{self.gather_dtype!r}"
            )
        if self.gather_dtype is not None and self.main_dtype not in (torch.float32, None):
            raise ValueError(
                "MixedPrecisionPolicy.main_dtype: expected torch.float32 (or None, for float32 "
                f"parameters) with gather_dtype={self.gather!r}, which quantizes float32 main "
                f"weights, got {self.main_dtype}"
            )
        if self.float8_products and self.gather != "float8_e4m3fn":
            raise ValueError(
                "MixedPrecisionPolicy.float8_products: expected gather_dtype=torch.float8_e4m3fn, "
                f"with which each weight has one scale, got {self.gather_dtype!r}"
            )

    @property
    def gather(self) -> str | None:
        """The name of ``gather_dtype``."""
        return _name(self.gather_dtype)

    def is_quantized(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether (this rank's part of) a parameter of this dtype and shape is gathered as float8."""
        return self.gather is not None and dtype.is_floating_point and float8.is_quantized(shape)


def input_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype to which floating-point inputs of a module are cast; None: not cast."""
    if not policy.cast_forward_inputs:
        return None
    # Weights are rounded to it, so they compute in another dtype than the model was made for.
    rounded = policy.main_dtype if policy.main_dtype in (torch.bfloat16, torch.float16) else None
    return policy.param_dtype or rounded


def group_dtypes(
    dtype: torch.dtype, policy: MixedPrecisionPolicy, *, trainable: bool, quantized: bool = False
) -> GroupDtypes[torch.dtype]:
    """Dtypes of a group of parameters with original dtype ``dtype``, all ``quantized`` or none."""
    names = (policy.main_dtype, policy.param_dtype, policy.reduce_dtype, policy.grad_dtype, policy.gather)
    asked = AskedDtypes(*map(_name, names), remainders=policy.store_param_remainders, narrowest=True)
    dtypes = asked.of_group(str(_name(dtype)), trainable=trainable, quantized=quantized)
    return dtypes.translate(partial(getattr, torch))


def check_quantized(name: str, dtype: torch.dtype, policy: MixedPrecisionPolicy, *, trainable: bool) -> None:
    """ValueError for a parameter from which float8 weights cannot be made."""
    if dtype == torch.float64:
        raise ValueError(
            f"{name}: expected weights of float32, bfloat16 or float16 with "
            f"gather_dtype={policy.gather!r}, which quantizes float32 main weights, got "
            "torch.float64"
        )
    if trainable and group_dtypes(dtype, policy, trainable=True).main != torch.float32:
        raise ValueError(
            f"{name}: expected float32 main weights with gather_dtype={policy.gather!r}, which "
            f"quantizes them, got {dtype}, which main_dtype=None keeps; use "
            "main_dtype=torch.float32"
        )


def _name(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point
