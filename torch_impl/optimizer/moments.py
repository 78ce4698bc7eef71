"""How moments are stored: float32 unchanged, bfloat16 rounded, float16 and float8 with a scale per row.

    moment   |m00 m01 m02|          stored  |q00 q01 q02|   scale |s0|        moment = stored * scale
             |m10 m11 m12|                  |q10 q11 q12|         |s1|        s = largest magnitude of the row / Q

Q is the largest number of the stored dtype (448 for float8_e4m3fn, 57344 for float8_e5m2, 65504 for float16), so the
largest element of a row is stored as Q, and nothing overflows, whatever its size. Layouts never cut a row, so neither
sharding nor loading on another number of ranks changes a stored byte or a scale. The scale is float32, has the
parameter's shape with 1 as last dimension, and is a DTensor over the same rows. Tensors whose rows are single elements
(vectors, scalars) remain float32.

Rounding is to nearest, with two exceptions:

* A second moment that is not zero is stored as at least the smallest positive number, because zero would make the next
  update huge. Therefore elements whose gradient stays below 1/480 (float8_e5m2: 1/6*10^4, float16: 1/10^6) of the
  largest gradient of their row get smaller updates than AdamW's.
* With beta2 = 0.999 a second moment changes by 0.1 % per step, far less than the spacing of float8 (6 to 12 %, of
  float8_e5m2 12 to 25 %), so rounding to nearest would never change it. Float8 second moments are dithered: the
  position between two stored numbers determines how often the upper one is chosen over the steps, in a fixed sequence
  of (row, column, step), the same on every rank. In a test, second moments in float8_e4m3fn that shrink ninefold over
  2000 steps end 9 % too small on average, and at most 26 % too small.

bfloat16 has the range of float32 and needs no scale. Its spacing (0.4 to 0.8 %) is too wide for beta2 above about
0.996, where a second moment cannot decrease and stops increasing early: this is plain rounding, as in other
implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement

from bridge.core.sharding.layout.rows import rows_of
from bridge.core.sharding.policy.optimizer_state import SCALED
from torch_impl.dtensor.local import local_of, plain_values, row_bounds_of, row_range_of
from torch_impl.dtensor.placement import FusedShard, RowShard
from torch_impl.dtensor.tensor import RowDTensor, make_dtensor, wrap_like

_SCALED = tuple(getattr(torch, name) for name in SCALED)
_DTYPES = (torch.float32, torch.bfloat16, *_SCALED)

# From the golden ratio and the plastic number: their multiples, modulo 1, fill the unit interval evenly.
_STEP_TURN, _ROW_TURN, _COLUMN_TURN = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532


@dataclass(frozen=True)
class MomentFormat:
    """How the moment ``key`` ("exp_avg", "exp_avg_sq", "momentum_buffer") is stored; ``positive`` for second moments.

    ``option``: the argument that sets ``dtype``, by default ``<key>_dtype``. Raises ValueError for a dtype other than
    float32, bfloat16, float16, float8_e4m3fn and float8_e5m2.
    """

    key: str
    dtype: torch.dtype
    positive: bool = False
    option: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            stored_as = f"{self.dtype!r}{'' if isinstance(self.dtype, torch.dtype) else ', which is not a torch.dtype'}"
            raise ValueError(
                f"{self.option or f'{self.key}_dtype'}: expected one of {known}, got {stored_as}"
            )

    @property
    def scale_key(self) -> str:
        return f"{self.key}_scale"

    def scaled(self, param: torch.Tensor) -> bool:
        """Whether the moment of this parameter has a scale per row."""
        return self.dtype in _SCALED and rows_of(param.shape)[0] > 1

    def dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """The stored dtype of this parameter's moment; float32 means float64 for float64 parameters."""
        dtype = torch.float32 if self.dtype in _SCALED and not self.scaled(param) else self.dtype
        return param.dtype if dtype == torch.float32 and param.dtype == torch.float64 else dtype

    def zeros(self, param: torch.Tensor, on_host: bool) -> dict[str, torch.Tensor]:
        """Stored zeros: ``{key: ..., scale_key: ...}``, placed like the parameter; ``on_host``: in CPU memory."""
        local = plain_values(param).detach()
        device = torch.device("cpu") if on_host else local.device
        pinned = on_host and local.is_cuda
        values = torch.zeros_like(local, dtype=self.dtype_of(param), device=device, pin_memory=pinned)
        stored = {self.key: _placed_like(param, values)}
        if self.scaled(param):
            shape = (*local.shape[:-1], 1)
            scale = torch.zeros(shape, dtype=torch.float32, device=device, pin_memory=pinned)
            stored[self.scale_key] = _scale_like(param, scale)
        return stored

    def adopt(
        self, param: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor | None, step: int, on_host: bool
    ) -> dict[str, torch.Tensor]:
        """The result of ``zeros``, with the values of a moment that was stored in this or another format.

        The given tensors themselves if they already have this format, else copies; converted values are rounded.
        """
        local, dtype = local_of(stored), self.dtype_of(param)
        same_format = local.dtype == dtype and (scale is not None) == self.scaled(param)
        device = torch.device("cpu") if on_host else local_of(param).device
        pinned = on_host and local_of(param).is_cuda
        if same_format and local.device == device and local.is_pinned() == pinned:
            return {self.key: stored} if scale is None else {self.key: stored, self.scale_key: scale}
        new = self.zeros(param, on_host)
        if same_format:
            for key, tensor in ((self.key, stored), (self.scale_key, scale)):
                if tensor is not None:
                    local_of(new[key]).copy_(local_of(tensor))
        elif local.numel():
            wide = torch.float64 if local.dtype == torch.float64 else torch.float32
            values = torch.empty_like(local, dtype=wide)
            self.decode(local, None if scale is None else local_of(scale), values)
            scales = local_of(new[self.scale_key]) if self.scaled(param) else None
            self.encode(values.to(device), local_of(new[self.key]), scales, first_row(param), step)
        return new

    def decode(self, stored: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the moment that is stored in local tensors into ``out``, of a wider dtype."""
        out.copy_(stored)
        if scale is not None:
            out.mul_(scale)

    def encode(
        self, values: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor | None, row: int, step: int
    ) -> None:
        """Store local ``values``, which it overwrites; ``row``: the index, in the parameter, of their first row."""
        if scale is None:
            stored.copy_(values)
            return
        limits = torch.finfo(stored.dtype)
        largest = values.abs().amax(-1, keepdim=True)
        # For a number as divisor, CUDA multiplies with the reciprocal, which differs from the CPU's quotient.
        torch.div(largest, torch.full_like(largest, limits.max), out=scale)
        small = values > 0 if self.positive else None
        values.div_(scale.masked_fill(scale == 0, 1))
        if self.positive and stored.dtype.itemsize == 1:
            _round_dithered(values, limits, row, step)
        if small is not None:
            # The smallest positive number of either dtype is its spacing below the smallest normal number.
            values.clamp_(min=0)
            values.clamp_min_(small.to(values.dtype).mul_(limits.smallest_normal * limits.eps))
        stored.copy_(values.clamp_(-limits.max, limits.max))


def first_row(param: torch.Tensor) -> int:
    """Index of the first row that this rank holds."""
    return row_range_of(param)[0] if isinstance(param, RowDTensor) else 0


def _round_dithered(scaled: torch.Tensor, limits: torch.finfo, row: int, step: int) -> None:
    """Round positive values, in units of their scale, to float8 numbers with these ``limits``, in place.

    The closer a value is to its upper neighbour, the more often it is rounded up, over steps and over elements.
    """
    columns = scaled.shape[-1]
    rows = torch.arange(row, row + scaled.numel() // columns, dtype=torch.float64, device=scaled.device)
    turns = torch.arange(columns, dtype=torch.float64, device=scaled.device)
    rows.mul_(_ROW_TURN).add_(step * _STEP_TURN).frac_()
    turns.mul_(_COLUMN_TURN).frac_()
    turn = rows.float()[:, None].add(turns.float()).frac_().view(scaled.shape)
    # Below the smallest normal number the spacing is constant.
    power = scaled.float().view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    spacing = power.clamp_min_(limits.smallest_normal).mul_(limits.eps)
    scaled.div_(spacing).add_(turn).floor_().mul_(spacing)


def _placed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if isinstance(param, RowDTensor):
        return wrap_like(param, local)
    return _from_local(param, local, param.shape) if isinstance(param, DTensor) else local


def _scale_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    shape = (*param.shape[:-1], 1)
    if not isinstance(param, DTensor):
        return local
    if any(_cuts(placement, param.ndim - 1) for placement in param.placements):
        raise ValueError(
            f"moments with a scale per row: expected a parameter of shape {tuple(param.shape)} with whole rows, got "
            f"placements {param.placements}; use bfloat16 moments"
        )
    if not isinstance(param, RowDTensor):
        return _from_local(param, local, shape)
    rows = [axis for axis, placement in enumerate(param.placements) if isinstance(placement, RowShard)]
    return make_dtensor(
        local,
        param.device_mesh,
        shape,
        row_bounds_of(param),
        axes=max(1, len(rows)),
        tensor_parallel=param.placements[rows[-1] + 1 if rows else 1 :],
    )


def _cuts(placement: Placement, dim: int) -> bool:
    return placement.is_shard(dim) or (isinstance(placement, FusedShard) and placement.dim == dim)


def _from_local(param: DTensor, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
