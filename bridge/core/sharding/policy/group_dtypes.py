"""The dtype of each copy of a parameter, from the dtype in which it was given and those that were asked for.

main      the weights that the optimizer updates; of frozen parameters as given
compute   forward and backward
reduce    gradients on the network; by default as compute
grad      the reduced gradient that the optimizer reads; by default as main
gather    the float8 format in which matrices cross the network; None: as compute

Both runtimes have these rules, and differ in the compute dtype where none is asked for (``narrowest``).
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

    trained: of main weights if these parameters were trained; another one than ``main`` where they are frozen and keep
    the dtype in which they were given. remainders: main weights are stored as compute weights and remainders.
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
        """The same in other terms, such as ``jnp.dtype``'s."""
        dtypes = map(dtype_of, (self.main, self.compute, self.reduce, self.grad, self.trained))
        return GroupDtypes(*dtypes, gather=self.gather, remainders=self.remainders)


@dataclass(frozen=True)
class AskedDtypes:
    """Names of the dtypes that were asked for; None takes the default.

    main: float32 leaves float64 as it is; None: each parameter keeps the dtype in which it was given. narrowest: the
    default of ``compute`` is the narrower one of that dtype and the trained main weights' (PyTorch), else that of main.
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

        Parameters that are no floating-point numbers, or float8 whose scale only the model knows, keep their dtype
        throughout. quantized: they are matrices, which cross the network in the format that was asked for.
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
        # Weights that keep fewer bits have no remainders.
        remainders = self.remainders and main == trained
        dtypes = main, compute, self.reduce or compute, self.grad or main, trained
        return GroupDtypes(*dtypes, gather=gather, remainders=remainders)
