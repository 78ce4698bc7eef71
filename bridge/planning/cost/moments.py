"""Bytes of an optimizer's state: what a device holds for one group between steps, and in addition during an update.

For a group with R_o elements of parameters on a device, in a shard of S_o (see ``at_rest``), with m bytes per element
of main weights and g per element of gradients::

    --optimizer     PyTorch                                       JAX
    adamw           MainWeightAdamW: two moments, each in         main_weight_adamw: two moments, each in m S_o or in
                    m R_o or in ``--moments``                     ``--moments``
    sgd             torch.optim.SGD: nothing                      optax.sgd: nothing
    sgd-momentum    MainWeightSGD: m R_o or ``--moments``         main_weight_sgd: m S_o or ``--moments``
    lion            torch has none                                optax.lion: m S_o or mu_dtype
    adafactor       torch.optim.Adafactor, of matrices and        optax.adafactor: rows and columns of the two largest
                    stacks means of rows (cut as the rows are)    dimensions, if both have 128 or more; else one moment
                    and of columns (whole), else one moment: g
    muon            MainWeightMuon: of matrices and stacks the    main_weight_muon: of matrices the first, of others
                    first, of others two, as of adamw             two, as of adamw

m in moments of ``main_weight_adamw``, ``MainWeightAdamW``, ``-SGD`` and ``-Muon`` is 4 with main weights of 2 bytes,
which these optimizers update in float32.

Moments in float16 and float8 have one float32 scale per row, and single elements stay float32 (``torch_impl.optimizer
.moments``); with JAX's flat buffers this takes separate arrays (``row_moment_bytes``). Adafactor and Muon look at
shapes, so JAX gives them parameters instead of buffers (``jax_impl.optimizer.logical``): moments in the shape of a
parameter are cut along a dimension that the number of shards divides, others are whole on each device. ``MuonRounds``
describes the matrices that a Muon update in PyTorch brings together.

``--offload`` puts a share of the moments into CPU memory (``offload``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bridge.core.dtype_names import BYTES
from bridge.core.sharding.layout.matrices import MUON_DIMENSIONS, num_cut
from bridge.core.sharding.layout.rows import rows_of
from bridge.core.sharding.policy.optimizer_state import (
    CHUNK,
    MOMENT_BYTES,
    ROUND,
    SCALE_BYTES,
    SCALED,
    VECTOR,
    moment_bytes,
    unscaled_bytes,
    update_dtype,
)
from bridge.core.sharding.policy.parallel import cut_dimension
from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.offload import travelling
from bridge.planning.cost.optimizers import OF_MAIN_WEIGHTS, Optimizer

# The default ``min_dim_size_to_factor`` of ``optax.adafactor``.
_FACTORED_FROM = 128
# Halves of arrays the size of a key's weights in JAX, for each moment with scales: as many as XLA:GPU and XLA:CPU need.
_CONVERTED = 5


@dataclass(frozen=True)
class Held:
    """Bytes of moments of one group on one device.

    allocated, real: on the device, and the part of them that belongs to parameters. host: in CPU memory.
    """

    allocated: int = 0
    real: int = 0
    host: int = 0


@dataclass(frozen=True)
class Placed:
    """Equal groups: ``layers`` of them in one array in JAX. ``on_host``: names whose moments are in CPU memory."""

    group: GroupBuffers
    on_host: Collection[str] = ()
    layers: int = 1


@dataclass(frozen=True)
class _Piece:
    """A parameter's part on a device: its name and shape, and the number of its rows and elements there."""

    name: str
    shape: tuple[int, ...]
    rows: int
    numel: int


@dataclass
class _Batch:
    """The tensors that PyTorch updates together. ``largest``: elements that cannot be cut apart."""

    numel: int = 0
    all_bytes: int = 0
    largest: int = 0

    def add(self, piece: _Piece, nbytes: int, times: int, *, scaled: bool) -> None:
        """``scaled``: whether moments have scales for whole rows."""
        self.numel += piece.numel * times
        self.all_bytes += nbytes * times
        row_size, _ = rows_of(piece.shape)
        together = math.lcm(row_size, VECTOR) if scaled and row_size else 1
        self.largest = max(self.largest, min(piece.numel, together))

    @property
    def nbytes(self) -> int:
        """The bytes of one batch, at most."""
        together = min(self.numel, max(CHUNK, self.largest))
        return self.all_bytes * together // self.numel if self.numel else 0


def held(
    optimizer: Optimizer, group: GroupBuffers, runtime: str, device: int, on_host: Collection[str] = ()
) -> Held:
    """``on_host``: names in the group whose moments are in CPU memory; in JAX all names or none."""
    if not group.shape.trainable or optimizer.name == "sgd":
        return Held()
    if runtime == "torch":
        apart = {True: 0, False: 0}
        for piece in _pieces(group, device):
            apart[piece.name in on_host] += _in_torch(optimizer, group, piece)
        return Held(apart[False], apart[False], apart[True])
    allocated, real = _in_jax(optimizer, group, device)
    return Held(host=allocated) if set(group.shape.names) & set(on_host) else Held(allocated, real)


def staged(optimizer: Optimizer, groups: Iterable[Placed], runtime: str, device: int) -> int:
    """Bytes of moments that an update has on the device in addition to the moments at rest.

    In PyTorch: two batches of moments in CPU memory, and a batch converted to the dtype of the weights; or a round of
    Muon's matrices. In JAX: travelling arrays (all at once for an optimizer that sees parameters), and the converted
    arrays of one key.
    """
    groups = [placed for placed in groups if placed.group.shape.trainable]
    if runtime == "torch":
        return _staged_in_torch(optimizer, groups, device)
    # Equal units share their groups.
    known = {id(placed.group): placed.group for placed in groups}
    whole = {number: sum(_in_jax(optimizer, group, device)[:1]) for number, group in known.items()}
    hosts = [whole[id(placed.group)] * placed.layers for placed in groups if placed.on_host]
    converted = max((_converted_in_jax(optimizer, group) for group in known.values()), default=0)
    return (sum(hosts) if optimizer.by_parameter else travelling(hosts)) + converted


def brought_together(optimizer: Optimizer, groups: Iterable[Placed]) -> int:
    """Bytes of whole weights and gradients on the device in a JAX update that sees parameters: a lower bound."""
    if not optimizer.by_parameter:
        return 0
    own = (placed for placed in groups if placed.group.shape.trainable and placed.group.strategy.optimizer)
    return sum(2 * placed.group.numel * placed.group.main_bytes * placed.layers for placed in own)


def _staged_in_torch(optimizer: Optimizer, groups: Iterable[Placed], device: int) -> int:
    if optimizer.name not in OF_MAIN_WEIGHTS:
        return 0
    moved, converted = _Batch(), _Batch()
    matrices = MuonRounds(optimizer.moments[0] not in (None, "float32"))
    scaled = any(dtype in SCALED for dtype in optimizer.moments)
    for placed in groups:
        group = placed.group
        for piece in _pieces(group, device):
            nbytes = _in_torch(optimizer, group, piece) if piece.name in placed.on_host else 0
            if _is_matrix(optimizer, piece.shape, "torch"):
                matrices.add(group, piece.name, piece.shape, placed.layers, nbytes, piece.numel)
                continue
            if piece.name in placed.on_host:
                moved.add(piece, nbytes, placed.layers, scaled=scaled)
            wide = _converted_in_torch(optimizer, group, piece)
            if group.has_remainders:
                # The joined weights, and a copy of them during the split.
                wide += 2 * group.main_bytes
            if wide:
                converted.add(piece, wide * piece.numel, placed.layers, scaled=scaled)
    # Muon's matrices and the other parameters are updated one after the other.
    return max(min(2 * moved.nbytes, moved.all_bytes) + converted.nbytes, matrices.nbytes)


def _converted_in_torch(optimizer: Optimizer, group: GroupBuffers, piece: _Piece) -> int:
    """Bytes per element of the converted batch."""
    dtypes, held = _dtypes(optimizer, piece.shape, "torch"), group.shape.dtypes
    others = sum(dtype not in (None, "float32") for dtype in dtypes)
    if group.main_bytes < _update_bytes(group):
        # AdamW's kernel accepts half precision if everything is in one dtype.
        if optimizer.name != "sgd-momentum" and {*dtypes, held.grad} == {held.main}:
            return 0
        others += 1 + (group.grad_bytes < _update_bytes(group))
    return others * _update_bytes(group)


def _converted_in_jax(optimizer: Optimizer, group: GroupBuffers) -> int:
    """XLA fuses the conversion of bfloat16 into the arithmetic, except for one array."""
    if optimizer.name not in ("adamw", "sgd-momentum"):
        return 0
    size = group.size(group.strategy.optimizer)
    dtypes = optimizer.of_elements
    scaled = sum(dtype in SCALED for dtype in dtypes)
    if scaled and row_moment_bytes(group, 0, 1, 1) is not None:
        return _CONVERTED * scaled * _update_bytes(group) * size // 2
    return MOMENT_BYTES["bfloat16"] * size if "bfloat16" in dtypes else 0


def _in_jax(optimizer: Optimizer, group: GroupBuffers, device: int) -> tuple[int, int]:
    """The allocated bytes, and the part of them that belongs to parameters."""
    if optimizer.by_parameter:
        total = sum(_of_parameter(optimizer, group, shape) for shape in group.shape.shapes)
        return total, total
    level, main = group.strategy.optimizer, group.main_bytes
    allocated = real = 0
    for dtype in optimizer.of_elements:
        size, own = unscaled_bytes(dtype, group.shape.dtypes.main), None
        if optimizer.name == "lion":
            # optax has no scales.
            size = main if dtype in (None, "float32") else MOMENT_BYTES[dtype]
        elif dtype in SCALED:
            own = row_moment_bytes(group, device, MOMENT_BYTES[dtype], size)
        if own is None:
            own = group.size(level) * size, group.real(level, device) * size
        allocated, real = allocated + own[0], real + own[1]
    return allocated, real


def _update_bytes(group: GroupBuffers) -> int:
    """Bytes per element of the dtype in which an optimizer of main weights computes, and keeps unrounded values."""
    return BYTES[update_dtype(group.shape.dtypes.main)]


def _in_torch(optimizer: Optimizer, group: GroupBuffers, piece: _Piece) -> int:
    if optimizer.name in OF_MAIN_WEIGHTS:
        dtypes = _dtypes(optimizer, piece.shape, "torch")
        main = group.shape.dtypes.main
        return sum(moment_bytes(dtype, main, piece.shape, piece.numel, piece.rows) for dtype in dtypes)
    shape = piece.shape
    if optimizer.name == "adafactor" and len(shape) > 1:
        whole = math.prod((*shape[:-2], shape[-1]))
        columns = piece.numel if shape[-2] == 1 else whole
        return (piece.rows + columns) * group.grad_bytes
    return piece.numel * group.grad_bytes


def _dtypes(optimizer: Optimizer, shape: Sequence[int], runtime: str) -> Sequence[str | None]:
    return optimizer.moments[:1] if _is_matrix(optimizer, shape, runtime) else optimizer.of_elements


def _is_matrix(optimizer: Optimizer, shape: Sequence[int], runtime: str) -> bool:
    """Whether Muon updates the parameter as a matrix, or as a stack of matrices."""
    return optimizer.name == "muon" and len(shape) in MUON_DIMENSIONS[runtime]


def _of_parameter(optimizer: Optimizer, group: GroupBuffers, shape: Sequence[int]) -> int:
    """In JAX, the bytes for one parameter on a device, if the optimizer sees parameters."""
    main, numel = group.main_bytes, math.prod(shape)
    shards = group.mesh.shards(group.strategy.optimizer)
    along = cut_dimension(shape, shards)
    cut = numel if along is None else numel // shards
    if optimizer.name == "muon":
        # Scales are not cut if a cut separates the elements of rows.
        scales = math.prod(shape[:-1]) // (1 if along in (None, len(shape) - 1) else shards)
        dtypes = _dtypes(optimizer, shape, "jax")
        return sum(moment_bytes(dtype, group.shape.dtypes.main, shape, cut, scales) for dtype in dtypes)
    if len(shape) > 1 and (second := sorted(shape)[-2]) >= _FACTORED_FROM:
        return (numel // max(shape) + numel // second + 1) * main
    return (cut + 2) * main


def _pieces(group: GroupBuffers, device: int) -> Iterator[_Piece]:
    shard = int(group.mesh.shard_by_device(group.strategy.optimizer)[device])
    ranges = group.layout.row_ranges(shard)
    for name, shape in zip(group.shape.names, group.shape.shapes, strict=True):
        row_size, _ = rows_of(shape)
        first, last = ranges[name]
        yield _Piece(name, tuple(shape), last - first, (last - first) * row_size)


def row_moment_bytes(group: GroupBuffers, device: int, itemsize: int, others: int) -> tuple[int, int] | None:
    """Of a moment with scales in JAX's flat buffers: the bytes on a device, and the part that belongs to parameters.

    If parameters of a group have rows of several elements (*scaled* ones), ``jax_impl.runtime.groups.row_arrays`` keeps
    three arrays for each moment: one shaped like the weights, in the moment's dtype; a float32 scale for each scaled
    row; and the elements of all other parameters, in the dtype of the update. In the latter two, each shard has, for
    each buffer of the layout, room for as many rows as the shard with the most rows has. None for a group without.

    itemsize, others: bytes of an element with a scale, and of one without.
    """
    layout, level = group.layout, group.strategy.optimizer
    own = int(group.mesh.shard_by_device(level)[device])
    scaled = {slot.name: slot.row_size > 1 for slot in layout.slots}
    if not any(scaled.values()):
        return None
    rows, single = (layout.rows_by_shard({n for n in scaled if scaled[n] is has}) for has in (True, False))
    elements = layout.elements_by_shard[list(scaled.values()), own].sum()
    allocated = group.size(level) * itemsize + rows.max(1).sum() * SCALE_BYTES + single.max(1).sum() * others
    real = elements * itemsize + rows[:, own].sum() * SCALE_BYTES + single[:, own].sum() * others
    return int(allocated), int(real)


@dataclass
class MuonRounds:
    """The matrices that a Muon update in PyTorch brings together, see ``torch_impl.optimizer.muon_update``.

    A matrix that spans several shards is orthogonalized by one of them, in bfloat16. Matrices travel in rounds: a rank
    owns up to 2^22 elements of a round, or one larger matrix. Let V be the elements of the rank's rows, W of its own
    matrices, T of its taller-than-wide matrices, M and S the size and shorter side of the largest. A round holds at
    most, in bytes::

        products    2 V + 2 W + 2 (W - M) + 4 M + 4 S^2     rows, whole matrices, results; operand, result, two squares
        way back    4 V + 6 W + 2 T                         rows; whole matrices, results, sent data; the transposed

    A matrix on a single shard is processed alone: 6 M + 4 S^2; with low-precision momentum 10 M while the momentum is
    float32 and the direction is made from it. Moments in CPU memory come to the device a round ahead.

    Parameters are added one after another. ``converted``: whether momentum is stored in low precision.
    cut: by number of shards, how many matrices have a height and width. alone: heights and widths of matrices on a
    single shard. moved, numel: bytes of moments in CPU memory, and elements, that a device has.
    """

    converted: bool
    cut: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    alone: set[tuple[int, int]] = field(default_factory=set)
    moved: int = 0
    numel: int = 0

    def add(
        self, group: GroupBuffers, name: str, shape: Sequence[int], times: int, moved: int, numel: int
    ) -> None:
        """Add ``times`` equal parameters."""
        height, width = shape[-2], shape[-1]
        rows = rows_of(shape)[1]
        if not rows:
            return
        cut = num_cut(shape, group.layout.row_bounds(name))
        if cut:
            self.cut.setdefault(group.layout.num_shards, Counter())[height, width] += cut * times
        if cut < rows // height:
            self.alone.add((height, width))
        self.moved += moved * times
        self.numel += numel * times

    @property
    def nbytes(self) -> int:
        """Bytes on the device at once, at most; including the travelling moments of two rounds."""
        each = self.moved / self.numel if self.numel else 0
        largest = 0
        for height, width in self.alone:
            numel = height * width
            own = 6 * numel + 4 * min(height, width) ** 2
            if self.converted:
                own = max(own, 10 * numel)
            largest = max(largest, own + int(2 * numel * each))
        for shards, members in self.cut.items():
            numels = {shape: math.prod(shape) * count for shape, count in members.items()}
            total = sum(numels.values())
            held = -(-total // shards)
            whole = max(min(ROUND, held), *map(math.prod, members))
            rows = min(whole, held)
            tall = whole * sum(numel for shape, numel in numels.items() if shape[0] > shape[1]) // total
            products = max(2 * math.prod(shape) + 4 * min(shape) ** 2 for shape in members)
            own = max(4 * rows + 6 * whole + 2 * tall, 2 * rows + 4 * whole + products)
            largest = max(largest, own + int(min(2 * rows, held) * each))
        return largest
