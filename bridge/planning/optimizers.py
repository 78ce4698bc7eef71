"""Optimizers as they are planned: what of their state a device holds, and which runtime can run them.

For a group with R_o elements of parameters on a device, in a shard of S_o (see ``at_rest``), m bytes an element of main
weights, g of gradients::

    --optimizer     PyTorch                                       JAX
    adamw           MainWeightAdamW: two moments, each in         main_weight_adamw: 2 m S_o; first moment in bfloat16
                    m R_o or in ``--moments``                     or float16: optax.adamw(mu_dtype=...)
    sgd             torch.optim.SGD: nothing                      optax.sgd: nothing
    sgd-momentum    torch.optim.SGD(momentum=...): g R_o          optax.sgd(momentum=...): m S_o or accumulator_dtype
    lion            torch has none                                optax.lion: m S_o or mu_dtype
    adafactor       torch.optim.Adafactor, of matrices and        optax.adafactor: rows and columns of the two largest
                    stacks means of rows (cut as the rows are)    dimensions, if both have 128 or more; else one moment
                    and of columns (whole), else one moment: g
    muon            refused: it needs whole matrices              optax.contrib.muon: of matrices one, of others two

Moments in float16 and float8 have a float32 scale a row, and single elements stay float32 (``torch_impl.optimizer
.moments``). Adafactor and Muon look at shapes, so that JAX gives them parameters instead of buffers
(``jax_impl.optimizer.logical``): moments in the shape of a parameter are cut along a dimension that the number of
shards divides, others are whole on each device.

``--offload`` puts moments into CPU memory: with MainWeightAdamW any share of them, in JAX all of a state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bridge.planning.buffers import GroupBuffers
from bridge.planning.dtypes import size_of
from bridge.planning.errors import PlanError
from bridge.planning.model import Parameter
from bridge.planning.runtimes import framework
from bridge.sharding.rows import rows_of

NAMES = ("adamw", "sgd", "sgd-momentum", "lion", "adafactor", "muon")
MOMENT_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
CONSTANTS = (".count", ".ns_coeffs")
"""Ends of paths in an optax state that lead to no moments: step counters and constants, which no plan counts."""
_SCALED = ("float16", "float8_e4m3fn")
_TWO_MOMENTS = ("adamw", "muon")
_FACTORED_FROM = 128
_BATCH = 1 << 20
"""Elements of which the moments are staged together in PyTorch, unless one tensor is larger."""


@dataclass(frozen=True)
class Held:
    """Bytes of moments of one group on one device.

    allocated, real: on the device, and the part of them that belongs to parameters. host: in CPU memory.
    """

    allocated: int = 0
    real: int = 0
    host: int = 0


@dataclass(frozen=True)
class _Piece:
    """A parameter's part on a device: its name and shape, and how many rows and elements of it are there."""

    name: str
    shape: tuple[int, ...]
    rows: int
    numel: int


@dataclass
class _Batch:
    """The tensors of an update that PyTorch works on together. ``largest``: elements of the largest of them."""

    numel: int = 0
    all_bytes: int = 0
    largest: int = 0

    def add(self, numel: int, nbytes: int) -> None:
        self.numel += numel
        self.all_bytes += nbytes
        self.largest = max(self.largest, numel)

    @property
    def nbytes(self) -> int:
        """Of one batch, at most."""
        together = min(self.numel, max(_BATCH, self.largest))
        return self.all_bytes * together // self.numel if self.numel else 0


@dataclass(frozen=True)
class Optimizer:
    """``name``: one of ``NAMES``. ``moments``: dtypes of the first and second moment, None that of the main weights.

    ``offload``: the share of the state that lies in CPU memory. Raises ``PlanError`` for others.
    """

    name: str = "adamw"
    moments: tuple[str | None, str | None] = (None, None)
    offload: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise PlanError(f"--optimizer: expected one of {', '.join(NAMES)}, got {self.name!r}")
        for dtype in self.moments:
            if dtype is not None and dtype not in MOMENT_DTYPES:
                raise PlanError(f"--moments: expected one of {', '.join(MOMENT_DTYPES)}, got {dtype!r}")
        if not 0 <= self.offload <= 1:
            raise PlanError(f"--offload: expected 0 to 100%, got {float(100 * self.offload):g}%")

    def __str__(self) -> str:
        words = [self.name]
        if self.moments != (None, None):
            words.append(f"moments in {' and '.join(one or 'the main dtype' for one in self.moments)}")
        if self.offload:
            words.append(f"{float(100 * self.offload):g} % of the state in CPU memory")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "moments": list(self.moments), "offload": str(self.offload)}

    @staticmethod
    def from_json(found: dict[str, Any]) -> Optimizer:
        first, second = found["moments"]
        return Optimizer(found["name"], (first, second), Fraction(found["offload"]))

    @property
    def by_parameter(self) -> bool:
        """Whether JAX gives it parameters instead of buffers."""
        return self.name in ("adafactor", "muon")

    @property
    def looks_at_rows(self) -> bool:
        """Whether a state depends on the shapes of parameters: by means of rows, or by scales of rows."""
        return self.by_parameter or any(dtype in _SCALED for dtype in self.moments)

    def why_not(self, runtime: str, stacks: Collection[str] = ()) -> str | None:
        """The reason why a runtime cannot run it; None where the runtime can."""
        first, second = (None if one == "float32" else one for one in self.moments)
        second = second if self.name in _TWO_MOMENTS else None
        if runtime == "torch":
            if self.name == "lion":
                return "torch: lion: torch.optim has none"
            if self.name == "muon":
                return "torch: muon: torch.optim.Muon needs whole matrices, which sharded parameters are not"
            if self.name != "adamw" and (first or second):
                return f"torch: --moments: {self.name} keeps its state in the dtype of the gradients"
            if self.name != "adamw" and self.offload:
                return f"torch: --offload: only MainWeightAdamW (adamw) keeps state in CPU memory, not {self.name}"
            return None
        if second is not None:
            return (
                f"jax: --moments: optax keeps second moments in the dtype of the weights, got {second}; --moments "
                f"{first or 'float32'},float32 says the first alone"
            )
        if first == "float8_e4m3fn":
            return "jax: --moments: optax has no scales for float8_e4m3fn; bfloat16 needs none"
        if first is not None and self.name in ("sgd", "adafactor"):
            return f"jax: --moments: {self.name} has no first moment"
        if 0 < self.offload < 1:
            return "jax: --offload: a state lies in CPU memory as a whole: 100%, or none"
        if self.by_parameter and stacks:
            return f"jax: {self.name} looks at shapes, which of stacked layers are others; plan it without --stacked"
        return None

    def offloaded(self, parameters: Iterable[Parameter]) -> frozenset[str]:
        """Paths of the parameters whose state MainWeightAdamW puts into CPU memory, of all in the model's order."""
        found, seen, picked = set(), 0, 0
        for one in parameters:
            seen += one.numel
            # In floating point, as ``torch_impl.optimizer.offload.Share`` has it.
            if one.numel and picked + one.numel / 2 <= float(self.offload) * seen:
                picked += one.numel
                found.add(one.path)
        return frozenset(found)

    def held(self, group: GroupBuffers, runtime: str, device: int, on_host: Collection[str] = ()) -> Held:
        """``on_host``: names in the group whose state is in CPU memory, in PyTorch."""
        if not group.shape.trainable or self.name == "sgd":
            return Held()
        if runtime == "torch":
            apart = {True: 0, False: 0}
            for piece in _pieces(group, device):
                apart[piece.name in on_host] += self._piece_bytes(group, piece)
            return Held(apart[False], apart[False], apart[True])
        if self.by_parameter:
            total = sum(self._parameter_bytes(group, shape) for shape in group.shape.shapes)
            found = Held(total, total)
        else:
            main = group.main_bytes
            sizes = [self._first(main), main] if self.name == "adamw" else [self._first(main)]
            level = group.strategy.optimizer
            found = Held(group.size(level) * sum(sizes), group.real(level, device) * sum(sizes))
        return Held(host=found.allocated) if self.offload else found

    def staged(
        self, groups: Iterable[tuple[GroupBuffers, Collection[str]]], runtime: str, device: int
    ) -> int:
        """Bytes of moments that an update has on the device beside those at rest. ``groups``: with their ``on_host``.

        In PyTorch two batches of those in CPU memory, and a batch converted to the dtype of the weights; JAX brings a
        state as a whole.
        """
        if runtime == "jax":
            return sum(self.held(group, runtime, device).host for group, _ in groups)
        if self.name != "adamw":
            return 0
        travelling, converted = _Batch(), _Batch()
        for group, on_host in groups:
            if not group.shape.trainable:
                continue
            for piece in _pieces(group, device):
                if piece.name in on_host:
                    travelling.add(piece.numel, self._piece_bytes(group, piece))
                wide = sum(group.main_bytes for dtype in self.moments if dtype not in (None, "float32"))
                if wide:
                    converted.add(piece.numel, wide * piece.numel)
        return min(2 * travelling.nbytes, travelling.all_bytes) + converted.nbytes

    def _first(self, main: int) -> int:
        dtype = self.moments[0]
        return main if dtype in (None, "float32") else size_of(dtype)

    def _piece_bytes(self, group: GroupBuffers, piece: _Piece) -> int:
        """In PyTorch, of one parameter's part."""
        if self.name == "adamw":
            return sum(_moment_bytes(piece, dtype, group.main_bytes) for dtype in self.moments)
        shape = piece.shape
        if self.name == "adafactor" and len(shape) > 1:
            whole = math.prod((*shape[:-2], shape[-1]))
            columns = piece.numel if shape[-2] == 1 else whole
            return (piece.rows + columns) * group.grad_bytes
        return piece.numel * group.grad_bytes

    def _parameter_bytes(self, group: GroupBuffers, shape: Sequence[int]) -> int:
        """In JAX, of one parameter on a device, where the optimizer sees parameters."""
        main, numel = group.main_bytes, math.prod(shape)
        shards = group.mesh.shards(group.strategy.optimizer)
        cut = numel // shards if any(size and size % shards == 0 for size in shape) else numel
        if self.name == "muon":
            return cut * (self._first(main) + (0 if len(shape) == 2 else main))
        *_, second, largest = (0, 0, *sorted(shape))
        if len(shape) > 1 and second >= _FACTORED_FROM:
            return (numel // largest + numel // second + 1) * main
        return (cut + 2) * main

    def transformation(self) -> Any:
        """The optax transformation, or ``main_weight_adamw``. Raises ``PlanError`` for what JAX cannot run."""
        reason = self.why_not("jax")
        if reason is not None:
            raise PlanError(reason)
        optax = framework("optax")
        first = None if self.moments[0] in (None, "float32") else self.moments[0]
        if self.name == "adamw":
            plain = framework("jax_impl").main_weight_adamw(1e-3)
            return plain if first is None else optax.adamw(1e-3, weight_decay=0.01, mu_dtype=first)
        if self.name == "muon":
            return framework("optax.contrib").muon(1e-3, mu_dtype=first)
        made = {
            "sgd": lambda: optax.sgd(1e-3),
            "sgd-momentum": lambda: optax.sgd(1e-3, momentum=0.9, accumulator_dtype=first),
            "lion": lambda: optax.lion(1e-4, mu_dtype=first),
            "adafactor": lambda: optax.adafactor(1e-3),
        }
        return made[self.name]()


ADAMW = Optimizer()


def parse_optimizer(name: str, moments: str | None, offload: str | None) -> Optimizer:
    """From the command line: ``"bfloat16"`` for both moments or ``"bfloat16,float32"``; ``"50%"``, ``"100%"`` or none.

    Raises ``PlanError`` for others.
    """
    words = [] if moments is None else [word.strip() for word in moments.split(",")]
    if len(words) > 2:
        raise PlanError(f"--moments: expected one dtype, or two, got {moments!r}")
    first, second = (words * 2)[:2] if words else (None, None)
    share = Fraction(0)
    if offload is not None:
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*|\s*0\s*", offload)
        if match is None:
            raise PlanError(f"--offload: expected a share of the state such as 50% or 100%, got {offload!r}")
        share = Fraction(match[1] or 0) / 100
    return Optimizer(name, (first, second), share)


def _pieces(group: GroupBuffers, device: int) -> Iterator[_Piece]:
    shard = int(group.mesh.shard_by_device(group.strategy.optimizer)[device])
    ranges = group.layout.row_ranges(shard)
    for name, shape in zip(group.shape.names, group.shape.shapes, strict=True):
        row_size, _ = rows_of(shape)
        first, last = ranges[name]
        yield _Piece(name, tuple(shape), last - first, (last - first) * row_size)


def _moment_bytes(piece: _Piece, dtype: str | None, main: int) -> int:
    scaled = dtype in _SCALED and rows_of(piece.shape)[0] > 1
    if dtype in (None, "float32") or (dtype in _SCALED and not scaled):
        return piece.numel * main
    return piece.numel * (1 if dtype == "float8_e4m3fn" else 2) + (4 * piece.rows if scaled else 0)
