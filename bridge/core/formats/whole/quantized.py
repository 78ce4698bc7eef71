"""Weights that Hub files store in few bits with scales, and a reader that gives the numbers that they represent.

MXFP4, as in OpenAI's GPT-OSS: 32 consecutive numbers along a row share a scale, a power of two. The model's
matrices are transposed, ``[experts, in, out]``::

    <name>_blocks   uint8  [experts, out, in / 32, 16]    two numbers per byte, the first in the low bits
    <name>_scales   uint8  [experts, out, in / 32]        the exponent + 127
    <name>          bfloat16 [experts, in, out]           the decoded weights

Float8 in blocks, as in DeepSeek-V3: each block of 128 x 128 numbers, smaller at the ends, shares a scale. Shapes do not
determine the block size: two blocks of 100 rows could be 64 and 36, or 50 and 50. `weight_block_size` in `config.json`
gives the size; without it, the size is the only one that fits, DeepSeek's 128, or a power of two that divides::

    <name>.weight             float8   [out, in]
    <name>.weight_scale_inv   float32  [out / 128, in / 128], rounded up
    <name>.weight             bfloat16 [out, in]          the product in float32, rounded

Both are what transformers computes when it loads such files with ``dequantize=True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo
from bridge.core.formats.tensors.boxes import box_of
from bridge.core.formats.tensors.scaled import decode, scale_box
from bridge.core.formats.tensors.wrapping import AlteredReader
from bridge.core.formats.whole.companions import QUANTIZATION, config_beside

DECODED = np.dtype(ml_dtypes.bfloat16)

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_RUN = 32
_BLOCK = 128
_BLOCK_SIZE = "weight_block_size"
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_KINDS: Mapping[str, str] = {
    _BLOCKS: "MXFP4",
    _SCALES: "MXFP4",
    ".weight_scale_inv": "float8 with scales of blocks",
    ".weight_scale": "float8 or integers with scales of rows",
    ".weight_packed": "compressed-tensors",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
}
DECODE = "decode them to bfloat16 during the conversion (convert --dequantize; in a program dequantize=True)"
DECODE_ELSEWHERE = "decode them first, with the program that made them"
_READ = frozenset({_BLOCKS, _SCALES, ".weight_scale_inv"})


def quantized(names: Iterable[str]) -> tuple[str, str, bool] | None:
    """A tensor of quantized weights among these names: name, encoding, and whether `DequantizedReader` reads it."""
    for name in names:
        for ending, encoding in _KINDS.items():
            if name.endswith(ending):
                return name, encoding, ending in _READ
    return None


class DequantizedReader(AlteredReader):
    """A checkpoint with its quantized weights decoded to bfloat16; see `CheckpointReader`.

    Raises CheckpointError if the checkpoint has none, or has scales whose shape fits no weight.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self._weights: dict[str, _Mxfp4 | _Float8] = {}
        stored = reader.tensors
        tensors = dict(stored)
        block = _block_size(reader)
        for name, info in stored.items():
            if name.endswith(_BLOCKS) and f"{name.removesuffix(_BLOCKS)}{_SCALES}" in stored:
                plain = name.removesuffix(_BLOCKS)
                scales = stored[plain + _SCALES]
                self._weights[plain] = weights = _Mxfp4.of(info, scales, self.path)
                del tensors[info.name], tensors[scales.name]
                path = (*info.path[:-1], str(info.path[-1]).removesuffix(_BLOCKS))
                tensors[plain] = _plain(info, plain, path, weights.shape)
            elif name.endswith(_SCALE_INV) and name.removesuffix(_SCALE_INV) in stored:
                weight = stored[name.removesuffix(_SCALE_INV)]
                self._weights[weight.name] = _Float8.of(weight, info, self.path, block)
                del tensors[name]
                tensors[weight.name] = _plain(weight, weight.name, weight.path, weight.shape)
        if not self._weights:
            raise CheckpointError(
                f"{self.path}: expected quantized weights to decode (<name>_blocks with <name>_scales, or "
                "<name>.weight_scale_inv with <name>.weight), found none: leave out --dequantize"
            )
        self.tensors = tensors

    def _own(self, name: str) -> str | None:
        return None if name in self._weights else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        """A decoded block; needs memory for twice the block in float32."""
        box = box_of(self.tensors[name], box)
        return self._weights[name].read(self._reader, box).astype(DECODED, order="C")


def _plain(info: TensorInfo, name: str, path: tuple[str | int, ...], shape: tuple[int, ...]) -> TensorInfo:
    return replace(info, name=name, path=path, shape=shape, dtype=DECODED, chunks=(Box.whole(shape),))


@dataclass(frozen=True)
class _Mxfp4:
    blocks: str
    scales: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, blocks: TensorInfo, scales: TensorInfo, where: object) -> _Mxfp4:
        expected = (*scales.shape, _RUN // 2)
        if (
            blocks.shape != expected
            or len(scales.shape) != 3
            or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}
        ):
            raise CheckpointError(
                f"{where}: expected MXFP4 weights, uint8 [experts, out, in / 32, 16], with scales, uint8 [experts, "
                f"out, in / 32], found {blocks.dtype} {blocks.shape} in {blocks.name} and {scales.dtype} "
                f"{scales.shape} in {scales.name}"
            )
        experts, out, runs = scales.shape
        return cls(blocks.name, scales.name, (experts, runs * _RUN, out))

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The numbers of a box of ``[experts, in, out]`` in float32."""
        (expert, start, row), (experts, size, rows) = box.offsets, box.sizes
        first, last = start // _RUN, -(-(start + size) // _RUN)
        at, sizes = (expert, row, first), (experts, rows, last - first)
        packed = reader.read(self.blocks, Box((*at, 0), (*sizes, _RUN // 2)))
        exponents = reader.read(self.scales, Box(at, sizes)).astype(np.int32) - 127
        pairs = np.stack([_FP4[packed & 15], _FP4[packed >> 4]], axis=-1).reshape(*sizes, _RUN)
        numbers = np.ldexp(pairs, exponents[..., None]).reshape(experts, rows, -1)
        skipped = start - first * _RUN
        return numbers[..., skipped : skipped + size].swapaxes(1, 2)


@dataclass(frozen=True)
class _Float8:
    weight: str
    scales: str
    runs: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: TensorInfo, scales: TensorInfo, where: object, block: tuple[int, ...] | None
    ) -> _Float8:
        """``block``: the sizes that the configuration gives, of the last dimensions."""
        if len(weight.shape) == len(scales.shape) and weight.dtype.name.startswith("float8"):
            axes = len(weight.shape)
            per_axis = ((1,) * (axes - len(block)) + block)[-axes:] if block and axes else (None,) * axes
            runs = [_run(*sizes) for sizes in zip(weight.shape, scales.shape, per_axis, strict=True)]
            if None not in runs:
                return cls(weight.name, scales.name, tuple(run for run in runs if run is not None))
        expected = " x ".join(map(str, block)) if block else "one size that follows from the shapes"
        raise CheckpointError(
            f"{where}: expected float8 weights with a scale for each block of {expected} ({_BLOCK_SIZE} in "
            f"config.json), found {weight.dtype} {weight.shape} in {weight.name} and {scales.shape} in {scales.name}"
        )

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The numbers of a box in float32."""
        scales = reader.read(self.scales, scale_box(box, self.runs))
        return decode(reader.read(self.weight, box), box, scales, self.runs)


def _run(numbers: int, scales: int, wanted: int | None) -> int | None:
    """How many numbers along an axis share a scale; None if that is impossible or ambiguous."""
    if wanted is not None:
        return wanted if -(-numbers // wanted) == scales else None
    if scales < 2:
        return numbers if scales == 1 else None
    least, most = -(-numbers // scales), (numbers - 1) // (scales - 1)
    if least == most or least <= _BLOCK <= most:
        return least if least == most else _BLOCK
    return least if least.bit_count() == 1 and least * scales == numbers else None


def _block_size(reader: CheckpointReader) -> tuple[int, ...] | None:
    """The block sizes in `config.json`; None if it has none."""
    config = config_beside(reader)
    quantization = config[0].get(QUANTIZATION) if config else None
    sizes = quantization.get(_BLOCK_SIZE) if isinstance(quantization, dict) else None
    if config is None or sizes is None:
        return None
    if not (isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes)):
        raise CheckpointError(
            f"{config[1]}: {_BLOCK_SIZE}: expected sizes of at least 1 such as [128, 128], found {sizes!r:.80}"
        )
    return tuple(sizes)
