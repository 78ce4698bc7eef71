"""Which dtype weights have in compute, and gradients have on the wire and for the optimizer.

Main weights and moments are float32, or float64 where the given parameters are.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Precision:
    """``param_dtype``: dtype of the compute weights; ``None`` keeps the main weights' dtype.

    ``reduce_dtype``: dtype in which gradients are summed over the ranks; ``None`` takes ``param_dtype``'s, as in
    PyTorch's ``MixedPrecisionPolicy``. ``grad_dtype``: dtype of the gradients that are accumulated over microbatches
    and that the optimizer reads; ``None`` takes the main weights'. Raises ``ValueError`` for another dtype, or float64
    without x64.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None

    def __post_init__(self) -> None:
        for field, name in vars(self).items():
            if name is not None and name not in _DTYPES:
                raise ValueError(f"{field}: expected None or one of {list(_DTYPES)}, got {name!r}")
            if name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                raise ValueError(f'{field}: float64 needs jax.config.update("jax_enable_x64", True) first')

    def compute(self, main: np.dtype) -> np.dtype:
        return main if self.param_dtype is None else jnp.dtype(self.param_dtype)

    def reduce(self, main: np.dtype) -> np.dtype:
        return self.compute(main) if self.reduce_dtype is None else jnp.dtype(self.reduce_dtype)

    def grad(self, main: np.dtype) -> np.dtype:
        return main if self.grad_dtype is None else jnp.dtype(self.grad_dtype)


def main_dtype(given: np.dtype) -> np.dtype:
    """The dtype of the main weights of a parameter that was given in dtype ``given``."""
    return jnp.dtype(jnp.float64 if given == jnp.float64 else jnp.float32)
