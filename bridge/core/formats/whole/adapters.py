"""Adapters of peft, LoRA and DoRA, merged into the weights of their base model.

    adapter_config.json          r, lora_alpha, use_rslora, ...
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight             A  [r, in]
                                 base_model.model.<module>.lora_B.weight             B  [out, r]
                                 base_model.model.<module>.lora_magnitude_vector     m  [out], in DoRA only
                                 base_model.model.<module>.weight or .bias           replaces the base model's tensor
    base model                   <module>.weight                                     W  [out, in]

    LoRA    W + s B A                               s = lora_alpha / r, with use_rslora lora_alpha / sqrt(r)
    DoRA    (m / norm(W + s B A)) * (W + s B A)     norm of each row

Embeddings, and all layers if ``fan_in_fan_out`` is set (GPT-2), store the transposed matrix. Convolutions are matrices
``[out, in * kernel]``. The product, the sum and DoRA's factor are float32 (float64 for a float64 weight), and the
result is rounded once to the base weight's dtype. The formulas are those of arXiv:2106.09685 (LoRA), 2312.03732
(rsLoRA) and 2402.09353 (DoRA), in the order of operations of peft's ``merge``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from bridge.core.formats.reading.read_memory import array_for
from bridge.core.formats.reading.regular_files import small_file
from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo
from bridge.core.formats.tensors.boxes import box_of
from bridge.core.formats.tensors.wrapping import AlteredReader, home_of
from bridge.core.formats.whole.companions import ADAPTER_CONFIG
from bridge.core.text import counted, did_you_mean, first_of
from bridge.core.text_files import parse_json

_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.weight)?"
)
_WRAPPED: Final = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")
_A, _B, _MAGNITUDE = "A", "B", "m"
_LETTERS: Final = {
    **{"lora_A": _A, "lora_embedding_A": _A, "lora_B": _B, "lora_embedding_B": _B},
    "lora_magnitude_vector": _MAGNITUDE,
}

_TIED: Final = re.compile(r"embed|lm_head|wte|output|head")
"""Names of weights that models tie: the embedding and the output layer."""

_ROWS: Final = 256
"""Rows of a product that are made at once. Blocks begin at multiples of it, whatever is read: BLAS adds the terms of a
smaller block in another order, so that a conversion in parts would write other bits than a whole one."""

_OTHER_ARITHMETIC: Final = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
_CHANGES_BASE: Final = ("corda", "loftq", "lora_ga", "olora", "pissa")
_FLOATS: Final = frozenset(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_MAX_CONFIG: Final = 1 << 20
_MOST_ALPHA: Final = 1e9
_MERGE_THERE: Final = "merge the adapter with peft (merge_and_unload), and convert the result"


def adapter_tensor(names: Iterable[str]) -> str | None:
    """The first of these names that is a LoRA adapter's; None if there is none."""
    return next((name for name in names if _PART.fullmatch(name)), None)


class MergedReader(AlteredReader):
    """A checkpoint of a base model with an adapter merged into its weights; see `CheckpointReader`.

    reader: the base model. adapter: a folder that peft saved. Closing the reader closes both. remarks: sentences about
    what is merged. CheckpointError, by name, for an adapter of another kind or for another base model, and for a tensor
    of the adapter that has no place in the base model.
    """

    def __init__(self, reader: CheckpointReader, adapter: CheckpointReader) -> None:
        super().__init__(reader)
        self._adapter = adapter
        config = _Config.beside(adapter)
        parts: dict[str, dict[str, str]] = defaultdict(dict)
        whole: dict[str, str] = {}
        for name in adapter.tensors:
            own = _WRAPPED.sub("", name.removeprefix(_PREFIX))
            match = _PART.fullmatch(own)
            place, key = (parts[match["module"]], _LETTERS[match["part"]]) if match else (whole, own)
            if place.setdefault(key, name) != name or adapter.tensors[name].dtype not in _FLOATS:
                raise CheckpointError(
                    f"{adapter.path}: expected one tensor of floating-point numbers for each part, found "
                    f"{first_of([*dict.fromkeys((place[key], name))])} of {adapter.tensors[name].dtype}"
                )
        if not parts:
            raise CheckpointError(f"{adapter.path}: expected lora_A and lora_B of some module, found none")
        names = _base_names(reader, [*(f"{module}.weight" for module in parts), *whole], adapter.path)
        weights = {module: reader.tensors[names[f"{module}.weight"]] for module in parts}
        self._merges = {
            weight.name: _Merge.of(weight, module, parts[module], adapter, config)
            for module, weight in weights.items()
        }
        square = [name for name, merge in self._merges.items() if merge.order is None]
        if square and any(merge.order == (not config.transposed) for merge in self._merges.values()):
            raise CheckpointError(
                f"{adapter.path}: expected fan_in_fan_out as the sizes of other weights say, found "
                f"{config.transposed}, so the order of axes in {first_of(square)} is not known: {_MERGE_THERE}"
            )
        self._replaced = {names[own]: name for own, name in whole.items()}
        for base, name in self._replaced.items():
            shapes, dtype = (
                (adapter.tensors[name].shape, reader.tensors[base].shape),
                reader.tensors[base].dtype,
            )
            if shapes[0] != shapes[1] or dtype not in _FLOATS:
                raise CheckpointError(
                    f"{adapter.path}: tensor {name!r:.200}: expected shape {shapes[1]} as in {reader.path}, which has "
                    f"{dtype}, found {shapes[0]}, floating-point: {_MERGE_THERE}"
                )
        self._require_untied()

    def _require_untied(self) -> None:
        """CheckpointError if an embedding's weight is also stored under another name, which would keep its elements."""
        for weight in (self.tensors[name] for name in self._merges if _TIED.search(name)):
            for other in self.tensors.values():
                alike = (other.shape, other.dtype) == (weight.shape, weight.dtype) and _TIED.search(
                    other.name
                )
                if alike and other.name not in (*self._merges, *self._replaced):
                    blocks = _blocks_of_rows(weight, Box.whole(weight.shape))
                    pairs = (
                        (self._reader.read(weight.name, box), self._reader.read(other.name, box))
                        for box in blocks
                    )
                    if all(np.array_equal(a, b) for a, b in pairs):
                        raise CheckpointError(
                            f"{self.path}: expected one name of a merged weight, found {weight.name!r:.200} and "
                            f"{other.name!r:.200} with the same elements: leave one out of the base model"
                        )

    @property
    def remarks(self) -> tuple[str, ...]:
        own = f", {counted(len(self._replaced), 'tensor')} replaced by its own" if self._replaced else ""
        return (
            f"the adapter {self._adapter.path} is merged into {counted(len(self._merges), 'weight')}{own}: calculated "
            "in float32 or the weight's own float64, rounded once to its dtype",
        )

    def close(self) -> None:
        super().close()
        self._adapter.close()

    def _own(self, name: str) -> str | None:
        return None if name in self._merges or name in self._replaced else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        """A merged block. Needs memory for some blocks of ``_ROWS`` whole rows in float32."""
        info = self.tensors[name]
        box = box_of(info, box)
        if name not in self._merges:
            return self._base(name, box).astype(info.dtype, order="C")
        result = array_for(info, box, self.path)
        for rows in _blocks_of_rows(info, box):
            if (part := rows.intersect(box)) is not None:
                base = partial(self._base, name)
                result[part.slices(box)] = self._merges[name].read(base, rows, part)
        return result

    def _base(self, name: str, box: Box) -> np.ndarray:
        """A block before merging: peft also saves a merged embedding's own weight."""
        if name in self._replaced:
            return self._adapter.read(self._replaced[name], box)
        return self._reader.read(name, box)


def _blocks_of_rows(info: TensorInfo, box: Box) -> Iterator[Box]:
    """The blocks of whole rows that the box touches."""
    first, stop = box.offsets[0], box.stops[0]
    for start in range(first - first % _ROWS, stop, _ROWS):
        rows = min(_ROWS, info.shape[0] - start)
        yield Box((start, *(0 for _ in info.shape[1:])), (rows, *info.shape[1:]))


@dataclass(frozen=True)
class _Config:
    """What `adapter_config.json` says about the arithmetic. alphas: lora_alpha by the end of a module's name."""

    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    dora: bool
    transposed: bool

    @classmethod
    def beside(cls, adapter: CheckpointReader) -> _Config:
        home = home_of(adapter)
        folder = home if home.is_dir() else home.parent
        path = folder / ADAPTER_CONFIG
        if not path.exists():
            raise CheckpointError(
                f"{adapter.path}: expected a folder that peft saved, with {ADAPTER_CONFIG}, found none"
            )
        data = small_file(folder, ADAPTER_CONFIG, "the configuration of the adapter", most=_MAX_CONFIG)
        fields = parse_json(data, str(path), CheckpointError, "JSON")
        peft_type = fields.get("peft_type") if isinstance(fields, dict) else fields
        if not isinstance(fields, dict) or peft_type != "LORA":
            raise CheckpointError(f"{path}: expected peft_type LORA, found {peft_type!r:.80}: {_MERGE_THERE}")
        if other := [name for name in _OTHER_ARITHMETIC if fields.get(name)]:
            raise CheckpointError(
                f"{path}: expected plain LoRA or DoRA, found {first_of(other)}: {_MERGE_THERE}"
            )
        start = fields.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise CheckpointError(
                f"{path}: init_lora_weights is {start!r:.80}, which also changes the weights of the base model: "
                f"{_MERGE_THERE}, or save the adapter with path_initial_model_for_weight_conversion"
            )
        alpha, alphas = fields.get("lora_alpha", math.nan), fields.get("alpha_pattern") or {}
        if not isinstance(alphas, dict) or not all(map(_is_number, (alpha, *alphas.values()))):
            raise CheckpointError(f"{path}: expected numbers in lora_alpha and alpha_pattern, found others")
        # peft takes each key for a regular expression. Other expressions could take exponential time.
        if expressions := [key for key in alphas if re.fullmatch(r"[\w.]+", key) is None]:
            raise CheckpointError(
                f"{path}: expected names of modules in alpha_pattern, found {first_of(expressions)}: {_MERGE_THERE}"
            )
        flags = {name: fields.get(name) or False for name in ("use_rslora", "use_dora", "fan_in_fan_out")}
        if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
            raise CheckpointError(
                f"{path}: expected true or false in {wrong[0]}, found {flags[wrong[0]]!r:.80}"
            )
        return cls(alpha, alphas, *flags.values())

    def scale(self, module: str, rank: int) -> float:
        """s for the module's weight."""
        ends = (alpha for key, alpha in self.alphas.items() if re.fullmatch(rf"(.*\.)?{key}", module))
        return next(ends, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_ALPHA


@dataclass(frozen=True)
class _Merge:
    """A weight's adapter. a, b: A and B as stored, as matrices. magnitude: DoRA's m. transposed: as for embeddings.

    order: whether it is transposed if its sizes say so, which those of a square matrix do not (None).
    """

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    scale: float
    transposed: bool
    order: bool | None

    @classmethod
    def of(
        cls,
        weight: TensorInfo,
        module: str,
        parts: Mapping[str, str],
        adapter: CheckpointReader,
        config: _Config,
    ) -> _Merge:
        what = f"{adapter.path}: {module!r:.200}"
        if not {_A, _B} <= parts.keys():
            raise CheckpointError(
                f"{what}: expected lora_A and lora_B, found {first_of(list(parts.values()))}"
            )
        if weight.dtype not in _FLOATS or len(weight.shape) < 2:
            raise CheckpointError(
                f"{what}: expected a matrix of bfloat16, float16, float32 or float64 in the base model, found "
                f"{weight.dtype} {weight.shape} in {weight.name!r:.200} (decode quantized weights: --dequantize)"
            )
        shapes = {letter: adapter.tensors[name].shape for letter, name in parts.items()}
        rank, rows, columns = shapes[_A][0] if shapes[_A] else 0, weight.shape[0], math.prod(weight.shape[1:])
        # peft saves one flag, that of the last layer, and ignores it for convolutions. Sizes that differ tell more.
        stored = (*shapes[_B][:1], *shapes[_A][1:])
        transposed = "lora_embedding_" in parts[_A] or (
            len(weight.shape) == 2
            and (config.transposed if rows == columns else stored[::-1] == weight.shape)
        )
        out, inner = (columns, rows) if transposed else (rows, columns)
        sizes = {_A: (rank, inner), _B: (out, rank), _MAGNITUDE: (out,)}
        if any(math.prod(shape) != math.prod(sizes[letter]) for letter, shape in shapes.items()) or not rank:
            raise CheckpointError(
                f"{what}: expected A [r, {inner}] and B [{out}, r] for {weight.name!r:.200} {weight.shape} of the base "
                f"model, found {first_of([f'{adapter.tensors[name].shape} in {name}' for name in parts.values()])}"
            )
        if config.dora != (_MAGNITUDE in parts):
            raise CheckpointError(
                f"{what}: expected magnitudes if use_dora is true, and none otherwise, found {first_of([*parts])}"
            )
        if transposed and _MAGNITUDE in parts:
            raise CheckpointError(
                f"{what}: expected no DoRA of a transposed matrix, found one: {_MERGE_THERE}"
            )
        wide = np.float64 if weight.dtype == np.float64 else np.float32
        read = {
            letter: adapter.read(name).astype(wide).reshape(sizes[letter]) for letter, name in parts.items()
        }
        linear = len(weight.shape) == 2 and "lora_A" in parts[_A]
        order = (None if rows == columns else transposed) if linear else config.transposed
        scale = config.scale(module, rank)
        return cls(read[_A], read[_B], read.get(_MAGNITUDE), scale, transposed, order)

    def read(self, base: Callable[[Box], np.ndarray], rows: Box, part: Box) -> np.ndarray:
        """``part`` of a block of whole rows, merged, in the dtype of A and B. base: reads the base model's weight."""
        start, stop = rows.offsets[0], rows.stops[0]
        product = (self.b @ self.a[:, start:stop]).T if self.transposed else self.b[start:stop] @ self.a
        change = (product * product.dtype.type(self.scale)).reshape(rows.sizes)
        if self.magnitude is None:
            return base(part).astype(change.dtype) + change[part.slices(rows)]
        merged = base(rows).astype(change.dtype) + change
        norms = np.linalg.norm(merged.reshape(len(merged), -1), axis=1)
        factors = self.magnitude[start:stop] / norms
        return (factors.reshape(-1, *(1 for _ in rows.sizes[1:])) * merged)[part.slices(rows)]


def _base_names(reader: CheckpointReader, names: Sequence[str], adapter: object) -> dict[str, str]:
    """The base model's name of each tensor that the adapter changes, by the adapter's name.

    One of both may have a prefix that the other lacks, such as the name of the key that holds the model.
    """
    add, drop = "", ""
    first = next((name for name in names if name.endswith(".weight")), None)
    if first is not None and first not in reader.tensors:
        alike = [
            name
            for name in reader.tensors
            if name.endswith((f".{first}", f"/{first}")) or first.endswith(f".{name}")
        ]
        if len(alike) == 1:
            length = len(alike[0]) - len(first)
            add, drop = alike[0][: max(0, length)], first[: max(0, -length)]
    found = {name: add + name.removeprefix(drop) for name in names}
    if missing := [name for name, own in found.items() if own not in reader.tensors]:
        close = did_you_mean(missing[0], reader.tensors)
        raise CheckpointError(
            f"{adapter}: expected an adapter of the model in {reader.path}, found "
            f"{counted(len(missing), 'tensor')} of the adapter that the model lacks: {first_of(missing)}{close}"
        )
    return found
