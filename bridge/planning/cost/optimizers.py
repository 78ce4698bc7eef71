"""Optimizers in plans: which runtime can run them, and their counterparts in JAX.

``moments`` says how much of their state a device holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bridge.core.dtype_names import full_name, hint
from bridge.core.sharding.policy.optimizer_state import MOMENTS, SCALED
from bridge.core.text import did_you_mean
from bridge.planning.models.errors import PlanError
from bridge.planning.models.runtimes import framework

NAMES = ("adamw", "sgd", "sgd-momentum", "lion", "adafactor", "muon")
CONSTANTS = (".count",)
"""Ends of paths in an optax state that do not lead to moments: step counters, which no plan counts."""
_TWO_MOMENTS = ("adamw", "muon")
OF_MAIN_WEIGHTS = ("adamw", "sgd-momentum", "muon")
"""Optimizers of torch_impl and jax_impl, with state in any of the dtypes: MainWeightAdamW, -SGD and -Muon, and in JAX
main_weight_adamw, main_weight_sgd, main_weight_muon."""


@dataclass(frozen=True)
class Optimizer:
    """``name``: one of ``NAMES``. ``moments``: dtypes of the first and second moment; None: the dtype of the update,
    that of the main weights, but float32 for main weights of two bytes.

    ``offload``: the share of the state in CPU memory. Raises ``PlanError`` for other values.
    """

    name: str = "adamw"
    moments: tuple[str | None, str | None] = (None, None)
    offload: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise PlanError(
                f"--optimizer: expected one of {', '.join(NAMES)}, got {self.name!r}{did_you_mean(self.name, NAMES)}"
            )
        full = (dtype if dtype is None else full_name(dtype, MOMENTS) for dtype in self.moments)
        object.__setattr__(self, "moments", tuple(full))
        for dtype in self.moments:
            if dtype is not None and dtype not in MOMENTS:
                raise PlanError(
                    f"--moments: expected one of {', '.join(MOMENTS)}, got {dtype!r}{hint(dtype, MOMENTS)}"
                )
        if not 0 <= self.offload <= 1:
            raise PlanError(f"--offload: expected 0 to 100%, got {float(100 * self.offload):g}%")

    def __str__(self) -> str:
        words = [self.name]
        if self.moments != (None, None):
            words.append(
                f"moments in {' and '.join(dtype or 'the main dtype' for dtype in self.of_elements)}"
            )
        if self.offload:
            words.append(f"{float(100 * self.offload):g} % of the state in CPU memory")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "moments": list(self.moments), "offload": str(self.offload)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Optimizer:
        first, second = values["moments"]
        return Optimizer(values["name"], (first, second), Fraction(values["offload"]))

    @property
    def of_elements(self) -> Sequence[str | None]:
        """Dtypes of the moments of a parameter that the optimizer does not treat as a matrix."""
        return self.moments if self.name in _TWO_MOMENTS else self.moments[:1]

    @property
    def by_parameter(self) -> bool:
        """Whether JAX passes parameters to the optimizer instead of buffers."""
        return self.name in ("adafactor", "muon")

    @property
    def looks_at_rows(self) -> bool:
        """Whether some state depends on the shapes of parameters: by means of rows, or by scales of rows."""
        return self.by_parameter or any(dtype in SCALED for dtype in self.moments)

    def why_not(self, runtime: str, stacks: Collection[str] = ()) -> str | None:
        """The reason why a runtime cannot run the optimizer; None if it can."""
        first = None if self.moments[0] == "float32" else self.moments[0]
        if runtime == "torch":
            if self.name == "lion":
                return "torch: lion: torch.optim has none"
            if self.name not in OF_MAIN_WEIGHTS and first:
                return f"torch: --moments: {self.name} keeps its state in the dtype of the gradients"
            if self.name not in OF_MAIN_WEIGHTS and self.offload:
                return (
                    f"torch: --offload: only the state of {', '.join(OF_MAIN_WEIGHTS)} can be in CPU memory, not the "
                    f"state of {self.name}"
                )
            return None
        if self.name in OF_MAIN_WEIGHTS:
            return None
        if first is not None and first.startswith("float8"):
            return f"jax: --moments: optax has no scales for {first}; bfloat16 needs none"
        if first is not None and self.name != "lion":
            return f"jax: --moments: {self.name} has no first moment"
        if self.name == "adafactor" and stacks:
            return f"jax: {self.name} looks at shapes, which stacking changes; plan it without --stacked"
        return None

    def transformation(self) -> Any:
        """The transformation of jax_impl if there is one, else of optax. Raises ``PlanError`` if JAX cannot run it."""
        reason = self.why_not("jax")
        if reason is not None:
            raise PlanError(reason)
        first, second = self.moments
        if self.name in OF_MAIN_WEIGHTS:
            ours = framework("jax_impl")
            if self.name == "sgd-momentum":
                return ours.main_weight_sgd(1e-3, momentum=0.9, momentum_dtype=first)
            if self.name == "muon":
                return ours.main_weight_muon(1e-3, momentum_dtype=first, mu_dtype=first, nu_dtype=second)
            return ours.main_weight_adamw(1e-3, mu_dtype=first, nu_dtype=second)
        optax = framework("optax")
        if self.name == "lion":
            return optax.lion(1e-4, mu_dtype=None if first == "float32" else first)
        return {"sgd": optax.sgd, "adafactor": optax.adafactor}[self.name](1e-3)


ADAMW = Optimizer()


def parse_optimizer(name: str, moments: str | None, offload: str | None) -> Optimizer:
    """Parse the command line: ``"bfloat16"`` for both moments or ``"bfloat16,float32"``; ``"50%"``, ``"100%"`` or none.

    Raises ``PlanError`` for other values.
    """
    words = [] if moments is None else [word.strip() for word in moments.split(",")]
    if len(words) > 2:
        raise PlanError(f"--moments: expected one or two dtypes, got {moments!r}")
    first, second = (words * 2)[:2] if words else (None, None)
    share = Fraction(0)
    if offload is not None:
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*|\s*0\s*", offload)
        if match is None:
            raise PlanError(f"--offload: expected a share of the state such as 50% or 100%, got {offload!r}")
        share = Fraction(match[1] or 0) / 100
    return Optimizer(name, (first, second), share)
