"""How often a microbatch gathers a unit: twice, and in JAX more often inside units that recompute.

PyTorch keeps the weights of units inside a recomputed unit from the unit's second forward to its backward. JAX keeps
the weights of the last ones, as many as ``prefetch`` allows at once, and gathers the others a third time
(``jax_impl/runtime/unit/order.py``). Here units are assumed to run in the order in which the model defines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

TWICE = 2


@dataclass
class Gathers:
    """A walk through forward and backward of one microbatch in JAX.

    sharded, recomputed: paths of units that are gathered, and of units that recompute. inside: for each unit, the units
    directly inside, in the order in which they run. traced: whether the inner of two units runs in the program of the
    outer one, not in a loop. limit: for how many units there may be whole weights at once.
    """

    sharded: Collection[str]
    recomputed: Collection[str]
    inside: Mapping[str, Sequence[str]]
    traced: Callable[[str, str], bool]
    limit: int
    _times: Counter[str] = field(default_factory=Counter)
    _kept: list[str] = field(default_factory=list)

    def of_each(self, root: str) -> Mapping[str, int]:
        """The number of gathers of each gathered unit."""
        self._forward(root, again=False)
        self._backward(root)
        return self._times

    def _forward(self, path: str, *, again: bool) -> None:
        """``again``: whether the backward of the same program follows."""
        if path in self.sharded:
            self._times[path] += 1
            del self._kept[: max(0, len(self._kept) - self.limit + 1)]
        # Forward and backward of the inner units are traced separately, unless the unit neither gathers nor recomputes.
        plain = again and path not in self.sharded and path not in self.recomputed
        for inner in self.inside[path]:
            self._forward(inner, again=plain and self.traced(path, inner))
        if again and path in self.sharded:
            self._kept.append(path)

    def _backward(self, path: str) -> None:
        if self._kept[-1:] == [path]:
            self._kept.pop()
        elif path in self.sharded:
            self._times[path] += 1
            self._kept.clear()
        if path in self.recomputed:
            for inner in self.inside[path]:
                self._forward(inner, again=self.traced(path, inner))
        for inner in reversed(self.inside[path]):
            self._backward(inner)
