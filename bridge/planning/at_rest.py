"""Bytes that one device holds between two steps, by kind.

For a group of P parameters in buffers of S_a elements a device at level a (see ``buffers``), R_a of them real on the
device, with strategy (p, g, o), m, c, g bytes an element of main weights, compute weights, gradients::

    kind              PyTorch                                 JAX
    main weights      m S_o                                   m S_o
    moments (Adam)    2 m R_o: tensors by parameter           2 m S_o: buffers like the weights'
    gradients         g S_o, until zero_grad                  0: they live in the step only
    compute weights   p = 0: c S_0, but 0 where the main      0
                      weights are whole and of the dtype;
                      0 < p < o: c S_p; p = o: 0

Bytes of these that belong to no parameter are padding. Frozen groups have no gradients and no moments. The optimizer's
step counters (4 bytes per parameter in PyTorch, on the host; 4 bytes in JAX) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from bridge.planning.buffers import GroupBuffers


@dataclass(frozen=True)
class Stored:
    """Bytes allocated, and the part of them that holds parameters."""

    allocated: int = 0
    real: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.allocated + other.allocated, self.real + other.real)

    @property
    def padding(self) -> int:
        return self.allocated - self.real


@dataclass(frozen=True)
class AtRest:
    """The bytes of one device, after a step and before its gradients are cleared."""

    main_weights: Stored = Stored()
    moments: Stored = Stored()
    gradients: Stored = Stored()
    compute_weights: Stored = Stored()

    def __add__(self, other: AtRest) -> AtRest:
        return AtRest(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: int) -> AtRest:
        """The bytes of ``count`` equal units."""
        values = [getattr(self, f.name) for f in fields(self)]
        return AtRest(*(Stored(one.allocated * count, one.real * count) for one in values))

    @property
    def padding(self) -> int:
        return sum(getattr(self, f.name).padding for f in fields(self))

    @property
    def total(self) -> int:
        """Bytes allocated, padding included."""
        return sum(getattr(self, f.name).allocated for f in fields(self))

    def by_kind(self) -> dict[str, int]:
        """Bytes of parameters by kind, then of padding; they sum to ``total``."""
        return {**{f.name: getattr(self, f.name).real for f in fields(self)}, "padding": self.padding}


def at_rest(groups: Iterable[GroupBuffers], runtime: str, device: int) -> AtRest:
    """The bytes of one unit on ``device``; devices are numbered row-major on the mesh."""
    return sum((_of_group(group, runtime, device) for group in groups), AtRest())


def _of_group(group: GroupBuffers, runtime: str, device: int) -> AtRest:
    strategy = group.strategy

    def stored(level: int, size: int) -> Stored:
        return Stored(group.size(level) * size, group.real(level, device) * size)

    main = stored(strategy.optimizer, group.main_bytes)
    moments = gradients = compute = Stored()
    if group.shape.trainable:
        moments = stored(strategy.optimizer, 2 * group.main_bytes)
    if runtime == "jax":
        return AtRest(main, moments)
    if group.shape.trainable:
        moments = Stored(moments.real, moments.real)
        gradients = stored(strategy.optimizer, group.grad_bytes)
    if keeps_weights(group):
        compute = stored(strategy.parameters, group.compute_bytes)
    return AtRest(main, moments, gradients, compute)


def keeps_weights(group: GroupBuffers) -> bool:
    """Whether PyTorch keeps compute weights of this group between steps, whole or a resident shard."""
    strategy = group.strategy
    return strategy.parameters < max(strategy.optimizer, 1) and not group.computes_with_main
