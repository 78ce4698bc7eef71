"""A model as the planner sees it: module paths, and the shape of every parameter. Nothing is allocated.

Model
  modules      ""  "embed"  "layers.0"  "layers.0.attention"  ...       modules with a forward, in definition order
  parameters   "embed.weight" (257, 331) float32, "layers.0.attention.wq.weight" (320, 331) float32, ...
  activations  of the segments "embed", "layers.0", ..., ""             for the peak, in the order of forward, if known
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from bridge.core.dtype_names import BYTES
from bridge.planning.models.activations import Segment
from bridge.planning.models.errors import PlanError


@dataclass(frozen=True)
class Parameter:
    """One parameter: dotted ``path``, ``shape``, name of its ``dtype`` as given, and whether it is trained.

    kind: the meaning of its dimensions, see ``model_axes``; "": as its name says.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise PlanError("parameter: expected a dotted path, got an empty one")
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in self.shape):
            raise PlanError(f"parameter {self.path!r}: expected a shape of ints >= 0, got {self.shape!r}")
        if self.dtype not in BYTES:
            raise PlanError(f"dtype: expected one of {', '.join(BYTES)}, got {self.dtype!r}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The path of the module that contains it."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Model:
    """A model of one runtime, or a shape that either could run.

    modules: dotted paths of all modules with a forward, from which a policy's patterns choose; ``""`` is the root.
    parameters: in the order in which the runtime lays them out.
    source: the origin of shapes and activation formulas, for people.
    attention: the kind that the activations count, see ``formulas``; None if the model's own code decides.
    stacks: paths of modules that JAX scans as one; their layers are ``layers.0``, ``layers.1``, ... here.
    buffers: bytes of everything else that the model holds, whole on each device, such as tables and statistics.

    Raises ``PlanError`` for a parameter given twice.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    activations: tuple[Segment, ...] = ()
    source: str = ""
    stacks: tuple[str, ...] = ()
    attention: str | None = None
    buffers: int = 0

    def __post_init__(self) -> None:
        seen = set()
        for parameter in self.parameters:
            if parameter.path in seen:
                raise PlanError(
                    f"model {self.name}: expected each parameter once, got {parameter.path!r} twice"
                )
            seen.add(parameter.path)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def layer_of(self, path: str) -> tuple[str, str, str] | None:
        """Stack, number and rest of a path in a layer of a stack: ``layers``, ``3``, ``mlp`` for ``layers.3.mlp``."""
        for stack in self.stacks:
            if path.startswith(f"{stack}."):
                number, _, rest = path[len(stack) + 1 :].partition(".")
                return stack, number, rest
        return None

    @staticmethod
    def of(
        name: str, parameters: Iterable[Parameter], activations: Iterable[Segment] = (), source: str = ""
    ) -> Model:
        """A model whose modules are those on its parameters' paths, except lists of modules.

        A list is a module whose children are all called 0, 1, ....
        """
        parameters = tuple(parameters)
        modules: dict[str, None] = {"": None}
        for parameter in parameters:
            parts = parameter.module.split(".") if parameter.module else []
            for depth in range(1, len(parts) + 1):
                if depth == len(parts) or not parts[depth].isdecimal():
                    modules[".".join(parts[:depth])] = None
        return Model(name, tuple(modules), parameters, tuple(activations), source)
