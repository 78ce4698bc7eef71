"""The dtypes of a policy, ``[precision]``."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.core.dtype_names import FLOATING, full_name
from bridge.core.sharding.policy.float8 import FORMATS
from bridge.core.sharding.policy.group_dtypes import AskedDtypes
from bridge.core.sharding.policy.policy_error import require

GIVEN = "given"
MAIN_DTYPES = ("float32", "float64", "bfloat16", "float16", GIVEN)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Names of dtypes; None takes the default, which the properties give. Raises PolicyError naming the field.

    Short names ("bf16", "fp32", "half") are accepted, and stored as the full names.

    main: of the main weights of trainable parameters. "float32": even if parameters were given in bfloat16 or float16.
        "bfloat16" or "float16": parameters given in another dtype are rounded once, when they are sharded. "float64":
        parameters must be given in float64, which otherwise only "given" allows. "given": each parameter keeps its
        given dtype, as frozen parameters always do.
    compute: of forward and backward (None: that of the main weights).
    reduce: of gradients on the network (None: that of compute).
    grad: of the reduced gradient that the optimizer reads (None: that of the main weights).
    gather: of weights of two or more dimensions on the network, "mxfp8" or "float8_e4m3fn"; forward and backward
        compute with the quantized values (None: that of compute). See ``bridge.core.sharding.policy.float8``.
    store_param_remainders: for units whose bfloat16 compute weights stay whole at rest, store float32 main weights as
        the rank's rows of the compute weights plus int16 remainders, which saves 2 bytes per element. Only in PyTorch:
        in JAX, compute weights exist only inside a step, so nothing is stored twice.
    """

    main: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    grad: str | None = None
    gather: str | None = None
    store_param_remainders: bool = False

    def __post_init__(self) -> None:
        choices = {"main": MAIN_DTYPES, "gather": FORMATS}
        for key, value in vars(self).items():
            if isinstance(value, str):
                object.__setattr__(self, key, full_name(value, choices.get(key, FLOATING)))
        dtypes = (self.main, self.compute, self.gather)
        for key, value in vars(self).items():
            if key == "store_param_remainders":
                require(isinstance(value, bool), key, "true or false", value)
                continue
            known = choices.get(key, FLOATING)
            require(
                value in known or (value is None and key != "main"), key, f"one of {', '.join(known)}", value
            )
        require(
            self.gather is None or self.main == "float32",
            "main",
            f'"float32" with gather = "{self.gather}", which quantizes float32 main weights',
            self.main,
        )

        require(
            not self.store_param_remainders or dtypes == ("float32", "bfloat16", None),
            "store_param_remainders",
            'main = "float32", compute = "bfloat16" and no gather with it',
            dict(zip(("main", "compute", "gather"), dtypes, strict=True)),
        )

    def asked(self, runtime: str) -> AskedDtypes:
        """In the form that the runtime, "torch" or "jax", takes."""
        torch, remainders = runtime == "torch", self.store_param_remainders
        dtypes = (self.compute, self.reduce, self.grad)
        if torch:
            dtypes = (self.compute_dtype, self.reduce_dtype, self.grad_dtype)
        return AskedDtypes(self.main_dtype, *dtypes, self.gather, remainders=remainders, narrowest=torch)

    @property
    def main_dtype(self) -> str | None:
        """The dtype of main weights; None: each parameter's own."""
        return None if self.main == GIVEN else self.main

    @property
    def compute_dtype(self) -> str | None:
        """The dtype of forward and backward; None: that of each parameter's main weights."""
        return self.compute or self.main_dtype

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype of gradients on the network; None: that of forward and backward."""
        return self.reduce or self.compute_dtype

    @property
    def grad_dtype(self) -> str | None:
        """The dtype of the reduced gradient; None: that of each parameter's main weights."""
        return self.grad or self.main_dtype
