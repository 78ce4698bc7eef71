"""The dtypes of a policy, ``[precision]``."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.sharding.float8 import FORMATS
from bridge.sharding.policy_error import require

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAIN_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Names of dtypes; None takes the default, which the properties give. Raises PolicyError naming the field.

    main: of the main weights, "float32" or "float64"; the model must have such, nothing is cast to it.
    compute: of forward and backward (None: that of the main weights).
    reduce: in which gradients cross the network (None: that of compute).
    grad: of the reduced gradient that the optimizer reads (None: that of the main weights).
    gather: in which weights of two dimensions or more cross the network, "mxfp8" or "float8_e4m3fn"; forward and
        backward compute with the quantized values (None: that of compute). See ``bridge.sharding.float8``.
    """

    main: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    grad: str | None = None
    gather: str | None = None

    def __post_init__(self) -> None:
        choices = {"main": MAIN_DTYPES, "gather": FORMATS}
        for key, value in vars(self).items():
            known = choices.get(key, DTYPES)
            require(
                value in known or (value is None and key != "main"), key, f"one of {', '.join(known)}", value
            )
        require(
            self.gather is None or self.main == "float32",
            "main",
            f'"float32" beside gather = "{self.gather}", which quantizes float32 main weights',
            self.main,
        )

    @property
    def compute_dtype(self) -> str:
        return self.compute or self.main

    @property
    def reduce_dtype(self) -> str:
        return self.reduce or self.compute_dtype

    @property
    def grad_dtype(self) -> str:
        return self.grad or self.main
