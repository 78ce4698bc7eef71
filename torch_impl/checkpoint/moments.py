"""Find moments that were saved in another format than the optimizer's, and read them in the optimizer's format.

    checkpoint                                            this optimizer's
    optimizer.state.<w>.exp_avg        float8             ...exp_avg     bfloat16
    optimizer.state.<w>.exp_avg_scale  float32, a row's
    optimizer.state.<w>.exp_avg        float32            ...exp_avg     float8
                                                          ...exp_avg_scale

Saved moments are decoded to float32 (float64 for float64 parameters) and encoded again for this rank's rows. Saved
scales need not follow rows, for example in checkpoints of models whose weights are transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bridge.core.formats import Box, CheckpointReader
from bridge.core.formats.tensors.scaled import read_decoded
from torch_impl.checkpoint.contents import parameter_names
from torch_impl.dtensor.local import local_boxes, local_of, local_pieces
from torch_impl.optimizer.moments import MomentFormat, first_row

MODES = ("same", "convert")


@dataclass(frozen=True)
class OtherFormat:
    """A moment whose saved format differs from the optimizer's.

    name: of the values in checkpoints; ``"_scale"`` is appended for scales. live: the optimizer's tensors by key.
    """

    name: str
    moment_format: MomentFormat
    param: nn.Parameter
    live: dict[str, torch.Tensor]
    step: str

    @property
    def names(self) -> set[str]:
        """The moment's names in either format."""
        return {self.name, f"{self.name}_scale"}

    def described(self, reader: CheckpointReader) -> str:
        """Expected and found, for an error."""
        stored, scale = self.live[self.moment_format.key], self.live.get(self.moment_format.scale_key)
        info = reader.tensors[self.name]
        saved_format = _format(info.dtype.name, f"{self.name}_scale" in reader.tensors)
        wanted = _format(str(stored.dtype).removeprefix("torch."), scale is not None)
        return f"{self.name}: expected {wanted}, found {saved_format}"

    def copies(self, reader: CheckpointReader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """``(live local tensor, its new values)`` for the values and for their scales."""
        stored = local_of(self.live[self.moment_format.key])
        scale = self.live.get(self.moment_format.scale_key)
        wide = torch.float64 if self.param.dtype == torch.float64 else torch.float32
        values = torch.zeros_like(self.live[self.moment_format.key], dtype=wide)
        for box, view in held_boxes(values):
            view.copy_(self._decoded(reader, box))
        new = torch.empty_like(stored)
        new_scale = None if scale is None else torch.empty_like(local_of(scale))
        if stored.numel():
            # Only dithering needs the step.
            step = int(reader.read(self.step)) if new_scale is not None else 0
            self.moment_format.encode(local_of(values), new, new_scale, first_row(self.param), step)
        yield stored, new
        if scale is not None and new_scale is not None:
            yield local_of(scale), new_scale

    def _decoded(self, reader: CheckpointReader, box: Box) -> torch.Tensor:
        if f"{self.name}_scale" in reader.tensors:
            return torch.from_numpy(read_decoded(reader, self.name, f"{self.name}_scale", box))
        # Exact in float64, whatever the saved dtype.
        return torch.from_numpy(np.asarray(reader.read(self.name, box), np.float64))


def other_formats(reader: CheckpointReader, model: nn.Module, optimizer: Optimizer) -> list[OtherFormat]:
    """The moments of ``optimizer`` that have the right shape in the checkpoint, but another format."""
    formats: Sequence[MomentFormat] = getattr(optimizer, "moment_formats", ())
    others = []
    for names, group in zip(parameter_names(model, optimizer), optimizer.param_groups, strict=True):
        for name, param in zip(names, group["params"], strict=True):
            state = optimizer.state.get(param, {})
            for moment_format in formats:
                if moment_format.key not in state:
                    continue
                prefix = f"optimizer.state.{name}"
                keys = (moment_format.key, moment_format.scale_key)
                live = {key: state[key] for key in keys if key in state}
                other = OtherFormat(
                    f"{prefix}.{moment_format.key}", moment_format, param, live, f"{prefix}.step"
                )
                if _differs(reader, other):
                    others.append(other)
    return others


def _differs(reader: CheckpointReader, moment: OtherFormat) -> bool:
    info = reader.tensors.get(moment.name)
    stored, scale = moment.live[moment.moment_format.key], moment.live.get(moment.moment_format.scale_key)
    # Wrong names and shapes are reported elsewhere, with all others of the model.
    if info is None or info.shape != tuple(stored.shape) or info.dtype.name in ("bool", "object"):
        return False
    saved_scale = reader.tensors.get(f"{moment.name}_scale")
    same_scale = (None if scale is None else tuple(scale.shape)) == (
        None if saved_scale is None else saved_scale.shape
    )
    return info.dtype.name != str(stored.dtype).removeprefix("torch.") or not same_scale


def _format(dtype: str, scaled: bool) -> str:
    return f"{dtype} with scales" if scaled else dtype


def held_boxes(tensor: torch.Tensor) -> Iterable[tuple[Box, torch.Tensor]]:
    """What this rank holds of a tensor: boxes in global coordinates, and views of the live elements in them."""
    if isinstance(tensor, DTensor):
        return zip([Box(*box) for box in local_boxes(tensor)], local_pieces(tensor), strict=True)
    # A plain tensor is whole on every rank, and each rank reads the whole tensor.
    return [(Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach())]
