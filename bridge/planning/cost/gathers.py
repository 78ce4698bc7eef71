"""How often a microbatch gathers a unit: twice, and in JAX more often inside of units that recompute.

PyTorch keeps the weights of units inside of a recomputed one from its second forward to its backward. JAX keeps those
of the last of them, as many as ``prefetch`` allows at once, and gathers the others a third time
(``jax_impl/runtime/unit/order.py``). Here units are taken to run in the order in which the model defines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

TWICE = 2


@dataclass
class Gathers:
    """A walk through forward and backward of one microbatch in JAX.

    sharded, recomputed: paths of units that are gathered, and of those that recompute. inside: of each unit those that
    no other unit inside of it contains, in the order in which they run. traced: whether the inner of two units runs in
    the program of the outer one, not in a loop. limit: of how many units there may be whole weights at once.
    """

    sharded: Collection[str]
    recomputed: Collection[str]
    inside: Mapping[str, Sequence[str]]
    traced: Callable[[str, str], bool]
    limit: int
    _times: Counter[str] = field(default_factory=Counter)
    _kept: list[str] = field(default_factory=list)

    def of_each(self, root: str) -> Mapping[str, int]:
        """Of units that are gathered."""
        self._forward(root, again=False)
        self._backward(root)
        return self._times

    def _forward(self, path: str, *, again: bool) -> None:
        """``again``: where the backward of the same program follows."""
        if path in self.sharded:
            self._times[path] += 1
            del self._kept[: max(0, len(self._kept) - self.limit + 1)]
        # Forward and backward of what is inside are traced apart, unless the unit neither gathers nor recomputes.
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
