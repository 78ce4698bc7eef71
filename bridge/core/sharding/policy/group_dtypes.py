"""The dtype of each copy of a parameter, from the parameter's given dtype and the requested dtypes.

main      the weights that the optimizer updates; frozen parameters as given
compute   forward and backward
reduce    gradients on the network; by default as compute
grad      the reduced gradient that the optimizer reads; by default as main
gather    the float8 format in which matrices cross the network; None: as compute

Both runtimes have these rules, and differ in the default compute dtype (``narrowest``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from bridge.core.dtype_names import BYTES, FLOATING

D = TypeVar("D")
E = TypeVar("E")


@dataclass(frozen=True)
class GroupDtypes(Generic[D]):
    """Dtypes of one parameter group: names, or a framework's own dtypes.

    trained: dtype of the main weights if these parameters were trained; differs from ``main`` if they are frozen and
    keep their given dtype. remainders: main weights are stored as compute weights and remainders.
    """

    main: D
    compute: D
    reduce: D
    grad: D
    trained: D
    _: KW_ONLY
    gather: str | None = None
    remainders: bool = False

    def translate(self, dtype_of: Callable[[D], E]) -> GroupDtypes[E]:
        """The same with other dtype objects, such as ``jnp.dtype``."""
        dtypes = map(dtype_of, (self.main, self.compute, self.reduce, self.grad, self.trained))
        return GroupDtypes(*dtypes, gather=self.gather, remainders=self.remainders)


@dataclass(frozen=True)
class AskedDtypes:
    """Names of the requested dtypes; None takes the default.

    main: float32 leaves float64 unchanged; None: each parameter keeps its given dtype. narrowest: the default of
    ``compute`` is the narrower of the given dtype and the trained main weights' dtype (PyTorch), else that of main.
    """

    main: str | None
    compute: str | None
    reduce: str | None
    grad: str | None
    gather: str | None = None
    _: KW_ONLY
    remainders: bool = False
    narrowest: bool = False

    def of_group(self, stored: str, *, trainable: bool, quantized: bool = False) -> GroupDtypes[str]:
        """Dtypes of a group whose parameters have dtype ``stored``, and are all ``quantized`` or none.

        Parameters that are not floating-point, or that are float8 with a scale that only the model knows, keep their
        dtype throughout. quantized: they are matrices, which cross the network in the requested format.
        """
        if stored not in FLOATING:
            return GroupDtypes(stored, stored, stored, stored, stored)
        # An update smaller than the last bit of a half-precision weight would be lost.
        kept = self.main is None or (self.main, stored) == ("float32", "float64")
        trained = stored if self.main is None or kept else self.main
        main = trained if trainable else stored
        own = min(trained, stored, key=BYTES.__getitem__) if self.narrowest else main
        compute = self.compute or own
        gather = self.gather if quantized else None
        # Weights with fewer bits have no remainders.
        remainders = self.remainders and main == trained
        dtypes = main, compute, self.reduce or compute, self.grad or main, trained
        return GroupDtypes(*dtypes, gather=gather, remainders=remainders)
