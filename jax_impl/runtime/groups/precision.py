"""The dtypes of weights in compute and on the wire, and of gradients on the wire and for the optimizer.

Main weights are float32, or float64 for float64 parameters, unless ``main_dtype`` says otherwise. Frozen weights keep
their given dtype, because no update needs more bits. For float8, whose scale only the model knows, and for integers and
bools, the given dtype is also the compute dtype. With a ``gather_dtype``, matrices and stacks of matrices are quantized
for the gather, and compute uses the quantized values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bridge.core.dtype_names import FLOATING, full_name
from bridge.core.sharding.policy import optimizer_state
from bridge.core.sharding.policy.float8 import FORMATS
from bridge.core.sharding.policy.group_dtypes import AskedDtypes, GroupDtypes


@dataclass(frozen=True)
class Precision:
    """``param_dtype``: dtype of the compute weights; ``None`` keeps the main weights' dtype.

    ``reduce_dtype``: dtype in which gradients are summed over the ranks; ``None`` uses ``param_dtype``, as in PyTorch's
    ``MixedPrecisionPolicy``. ``grad_dtype``: dtype of the gradients that are accumulated over microbatches and that the
    optimizer reads; ``None`` uses the main weights' dtype. ``main_dtype``: dtype of trainable weights at rest, to which
    weights are cast once, when they are sharded; float32 keeps float64 weights, and ``None`` keeps all. All are names;
    ``of`` accepts dtypes, too. Raises ``ValueError`` for another dtype, or float64 without x64.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None
    gather_dtype: str | None = None
    main_dtype: str | None = "float32"

    def __post_init__(self) -> None:
        for field, name in vars(self).items():
            known = FORMATS if field == "gather_dtype" else FLOATING
            if isinstance(name, str):
                name = full_name(name, known)
                object.__setattr__(self, field, name)
            if name is not None and name not in known:
                raise ValueError(f"{field}: expected None or one of {list(known)}, got {name!r}")
            if name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                raise ValueError(f'{field}: float64 needs jax.config.update("jax_enable_x64", True) first')

    @classmethod
    def of(
        cls,
        param_dtype: DTypeLike | None,
        reduce_dtype: DTypeLike | None,
        grad_dtype: DTypeLike | None,
        gather_dtype: DTypeLike | None = None,
        main_dtype: DTypeLike | None = "float32",
    ) -> Precision:
        """From names, or NumPy or JAX dtypes (``jnp.bfloat16``, ``x.dtype``)."""
        names = map(_name, (param_dtype, reduce_dtype, grad_dtype, gather_dtype, main_dtype))
        return cls(*names)

    def of_group(self, dtype: np.dtype, *, trainable: bool, quantized: bool = False) -> GroupDtypes[np.dtype]:
        """Dtypes of parameters that were given as ``dtype`` and are either all ``quantized`` or all not.

        With a ``gather_dtype``, raises ``ValueError`` for float64, from which float8 is not quantized, and for
        trainable weights of 16 bits, whose gradients would not belong to the quantized values.
        """
        asked = AskedDtypes(
            self.main_dtype, self.param_dtype, self.reduce_dtype, self.grad_dtype, self.gather_dtype
        )
        dtypes = asked.of_group(dtype.name, trainable=trainable, quantized=quantized)
        if dtypes.gather and (dtypes.main == "float64" or (trainable and dtypes.main != "float32")):
            raise ValueError(
                f"gather_dtype: expected None for {dtypes.main} main weights, got {dtypes.gather!r}, which quantizes "
                "float32 weights"
            )
        return dtypes.translate(jnp.dtype)


def update_dtype(main: np.dtype) -> np.dtype:
    """The dtype in which an optimizer of main weights computes, and keeps moments that must not be rounded."""
    return np.dtype(optimizer_state.update_dtype(main.name))


def is_integer(dtype: np.dtype) -> bool:
    """True for bools and integers of whole bytes, which only frozen parameters may have; they are never cast."""
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits >= 8)


def _name(dtype: Any) -> Any:
    # A string stays unchanged, since NumPy accepts names such as "f4", but a policy does not.
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype
