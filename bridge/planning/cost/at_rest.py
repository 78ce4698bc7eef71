"""Bytes that one device holds between two steps, by kind.

For a group of P parameters in buffers of S_a elements per device at level a (see ``buffers``), of which R_a on the
device are real, with strategy (p, g, o) and m, c, g bytes per element of main weights, compute weights, gradients::

    kind              PyTorch                                 JAX
    main weights      m S_o                                   m S_o
    moments (AdamW)   2 m R_o: tensors by parameter           2 m S_o: buffers like the weights'
    gradients         g G_o, until zero_grad                  0: they live in the step only
    compute weights   p = 0: c S_0, but 0 where the main      0
                      weights are whole and of the dtype;
                      0 < p < o: c S_p, or float8
                      payload and scales; p = o: 0

Main weights with remainders (``store_param_remainders``, PyTorch, p = 0) take 2 S_o in addition to the compute weights.

``moments`` gives the moments of other optimizers and dtypes; moments in CPU memory are a separate kind, outside the
device's total. G_o is S_o plus one element per parameter, see ``traffic``. Bytes of these that belong to no parameter
are padding. Frozen groups have no gradients and no moments. The optimizer's step counters (4 bytes per parameter in
PyTorch, on the host; 4 bytes in JAX) are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bridge.core.sharding.policy.strategy_collectives import keeps_shard
from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.moments import held
from bridge.planning.cost.optimizers import ADAMW, Optimizer

# Bytes of a remainder: the 16 bits of a float32 that bfloat16 lacks, as int16.
_REMAINDER = 2
KINDS = ("main_weights", "moments", "gradients", "compute_weights")


@dataclass(frozen=True)
class Stored:
    """Allocated bytes, and the part of them that holds parameters."""

    allocated: int = 0
    real: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.allocated + other.allocated, self.real + other.real)

    def times(self, count: int) -> Stored:
        return Stored(self.allocated * count, self.real * count)

    @property
    def padding(self) -> int:
        return self.allocated - self.real


@dataclass(frozen=True)
class AtRest:
    """The bytes of one device, after a step and before its gradients are cleared. ``host``: moments in CPU memory."""

    main_weights: Stored = Stored()
    moments: Stored = Stored()
    gradients: Stored = Stored()
    compute_weights: Stored = Stored()
    host: int = 0

    def __add__(self, other: AtRest) -> AtRest:
        return AtRest(**{part: getattr(self, part) + getattr(other, part) for part in (*KINDS, "host")})

    def times(self, count: int) -> AtRest:
        """The bytes of ``count`` equal units."""
        return AtRest(**{kind: getattr(self, kind).times(count) for kind in KINDS}, host=self.host * count)

    @property
    def padding(self) -> int:
        return sum(getattr(self, kind).padding for kind in KINDS)

    @property
    def total(self) -> int:
        """Bytes allocated on the device, padding included."""
        return sum(getattr(self, kind).allocated for kind in KINDS)

    def by_kind(self) -> dict[str, int]:
        """Bytes of parameters by kind, then of padding; the sum is ``total``."""
        return {**{kind: getattr(self, kind).real for kind in KINDS}, "padding": self.padding}


def at_rest(
    groups: Iterable[GroupBuffers],
    runtime: str,
    device: int,
    optimizer: Optimizer = ADAMW,
    on_host: Collection[str] = (),
) -> AtRest:
    """The bytes of one unit on ``device``; devices are numbered row-major on the mesh.

    on_host: names of parameters in the unit whose moments are in CPU memory.
    """
    return sum((_of_group(group, runtime, device, optimizer, on_host) for group in groups), AtRest())


def _of_group(
    group: GroupBuffers, runtime: str, device: int, optimizer: Optimizer, on_host: Collection[str]
) -> AtRest:
    strategy = group.strategy

    def stored(level: int, size: int) -> Stored:
        return Stored(group.size(level) * size, group.real(level, device) * size)

    remainders = runtime == "torch" and group.has_remainders
    main = stored(strategy.optimizer, _REMAINDER if remainders else group.main_bytes)
    own = held(optimizer, group, runtime, device, on_host)
    moments = Stored(own.allocated, own.real)
    if runtime == "jax":
        return AtRest(main, moments, host=own.host)
    gradients = compute = Stored()
    if group.shape.trainable:
        allocated = group.gradient_size(strategy.optimizer, runtime) * group.grad_bytes
        gradients = Stored(allocated, group.real(strategy.optimizer, device) * group.grad_bytes)
    if keeps_weights(group):
        compute = stored(strategy.parameters, group.compute_bytes)
        if strategy.parameters and group.shape.dtypes.gather is not None:
            # Payload and scales; the share of them that belongs to parameters equals that of the elements.
            nbytes = group.gather_bytes(strategy.parameters)
            compute = Stored(nbytes, min(nbytes, group.real(strategy.parameters, device)))
    return AtRest(main, moments, gradients, compute, own.host)


def keeps_weights(group: GroupBuffers) -> bool:
    """Whether PyTorch keeps compute weights of this group between steps, whole or a resident shard."""
    strategy = group.strategy
    kept = not strategy.shard_parameters or keeps_shard(strategy)
    return kept and not group.computes_with_main
