"""Which dtype weights have in compute and on the wire, and gradients have on the wire and for the optimizer.

Main weights and moments are float32, or float64 where the given parameters are. Frozen weights, which no update needs
more bits of, stay in the dtype in which they were given; in float8, whose scale only the model knows, also in compute.
With a ``gather_dtype`` matrices and stacks of them are quantized when they are gathered, and computed with as they are
then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bridge.sharding.float8 import FORMATS

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Precision:
    """``param_dtype``: dtype of the compute weights; ``None`` keeps the main weights' dtype.

    ``reduce_dtype``: dtype in which gradients are summed over the ranks; ``None`` takes ``param_dtype``'s, as in
    PyTorch's ``MixedPrecisionPolicy``. ``grad_dtype``: dtype of the gradients that are accumulated over microbatches
    and that the optimizer reads; ``None`` takes the main weights'. All are names; ``of`` takes dtypes too. Raises
    ``ValueError`` for another dtype, or float64 without x64.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None
    gather_dtype: str | None = None

    def __post_init__(self) -> None:
        for field, name in vars(self).items():
            known = FORMATS if field == "gather_dtype" else _DTYPES
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
    ) -> Precision:
        """From names, or NumPy or JAX dtypes (``jnp.bfloat16``, ``x.dtype``)."""
        return cls(_name(param_dtype), _name(reduce_dtype), _name(grad_dtype), _name(gather_dtype))

    def compute(self, main: np.dtype) -> np.dtype:
        own = self.param_dtype is None or jnp.finfo(main).bits < 16
        return main if own else jnp.dtype(self.param_dtype)

    def float8(self, main: np.dtype) -> str | None:
        """The format in which matrices with main weights of this dtype are gathered.

        Raises ``ValueError`` for float64, which float8 would not be quantized from.
        """
        if self.gather_dtype is not None and main == np.float64:
            raise ValueError(
                f"gather_dtype: expected None for float64 main weights, got {self.gather_dtype!r}, which quantizes "
                "float32 ones"
            )
        return self.gather_dtype if jnp.finfo(main).bits >= 16 else None

    def reduce(self, main: np.dtype) -> np.dtype:
        return self.compute(main) if self.reduce_dtype is None else jnp.dtype(self.reduce_dtype)

    def grad(self, main: np.dtype) -> np.dtype:
        return main if self.grad_dtype is None else jnp.dtype(self.grad_dtype)


def _name(dtype: Any) -> Any:
    # A string stays as it is, since NumPy takes "f4" and the like for names, and a policy does not.
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype


def main_dtype(given: np.dtype) -> np.dtype:
    """The dtype of the main weights of a trainable parameter that was given in dtype ``given``."""
    return jnp.dtype(jnp.float64 if given == jnp.float64 else jnp.float32)
