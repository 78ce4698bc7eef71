"""The dtype of each copy of a parameter, and its bytes: the rules of both runtimes, without importing either.

main      the weights that the optimizer updates: the policy's, or as given; of frozen parameters as given
compute   forward and backward; None means main, but PyTorch computes with frozen ones in the policy's main dtype too
reduce    gradients on the network; None means compute
grad      the reduced gradient that the optimizer reads (PyTorch); None means main
gather    the float8 format in which matrices are gathered; None means compute

``remainders``: PyTorch stores main weights as compute weights and int16 remainders, where the former stay whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.core.dtype_names import FLOATING, PLAIN
from bridge.core.sharding import PrecisionPolicy
from bridge.planning.models.errors import PlanError


def size_of(dtype: str) -> int:
    """Bytes of an element. Raises ``PlanError`` for an unknown name."""
    if dtype not in PLAIN:
        raise PlanError(f"dtype: expected one of {', '.join(PLAIN)}, got {dtype!r}")
    return PLAIN[dtype]


@dataclass(frozen=True)
class GroupDtypes:
    """Names of the dtypes of one parameter group."""

    main: str
    compute: str
    reduce: str
    grad: str
    gather: str | None = None
    remainders: bool = False

    @staticmethod
    def of(
        given: str, precision: PrecisionPolicy, runtime: str, *, trainable: bool, quantized: bool = False
    ) -> GroupDtypes:
        """The dtypes of parameters given in ``given``. Parameters that are not floating-point keep their dtype.

        quantized: whether they are matrices, which are gathered in the policy's format.
        """
        if given not in FLOATING:
            return GroupDtypes(given, given, given, given)
        trained = precision.main_dtype or given
        main = trained if trainable else given
        compute = precision.compute or (trained if runtime == "torch" else main)
        gather = precision.gather if quantized else None
        reduce, grad = precision.reduce or compute, precision.grad or main
        return GroupDtypes(main, compute, reduce, grad, gather, precision.store_param_remainders)
