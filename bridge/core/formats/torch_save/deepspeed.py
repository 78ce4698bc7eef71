"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3, with the flat shards of all ranks joined to named tensors.

    mp_rank_00_model_states.pt                          stages 1 and 2: bfloat16 weights, buffers, shapes by group
    zero_pp_rank_0_mp_rank_00_model_states.pt, ...      stage 3: shapes and buffers, a file a rank
    bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt, ... a rank's part of float32 weights and moments, flat

Stages 1 and 2 cut each group's flat array into equal parts. Stage 3 cuts each weight, and a rank's parts lie in a row::

    stages 1, 2    rank 0 | a a a a a b |    rank 1 | b b c c c - |          - is padding
    stage 3        rank 0 | a a a b b c c |  rank 1 | a a - b - c - |

The result is a state dict with names, as `torch.distributed.checkpoint` has it: ``module.<weight>`` in float32,
``optimizer.state.<weight>.exp_avg``, ``optimizer.param_groups``. The layout is that of zero_to_fp32.py, which DeepSpeed
writes next to each checkpoint.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from bridge.core.formats.reading.read_memory import array_for
from bridge.core.formats.tensors.arrays import copy_flat
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo, TreePath
from bridge.core.formats.tensors.boxes import box_of
from bridge.core.formats.tensors.leaves import flat_name
from bridge.core.formats.tensors.wrapping import ComputedReader, ReadWhenAsked
from bridge.core.formats.torch_save.reader import TorchSaveReader
from bridge.core.text import first_of

_FILES: Final = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d{2,6})_(?P<role>model|optim)_states\.pt"
)
_STATE: Final = "optimizer_state_dict"
_SHARDED_WEIGHTS: Final = "fp32_flat_groups"
"""The key of a rank's float32 weights in stage 3, where each weight is cut; the next one is that of stages 1 and 2."""
_SHARDED_GROUPS: Final = "single_partition_of_fp32_groups"
_OWN: Final = (
    *("buffer_names", "frozen_param_fragments", "frozen_param_shapes", "module", "optimizer"),
    *("param_shapes", "shared_params"),
)
"""Keys of the model's file whose values are not carried: the tensors have their content."""

_Shapes: TypeAlias = Mapping[int, Mapping[str, tuple[int, ...]]]
_Flats: TypeAlias = Sequence[Mapping[int, str]]
_Pieces: TypeAlias = Sequence[tuple[str | None, int]]


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of a tensor: ``count`` elements from element ``start`` of the flat tensor ``name``."""

    reader: TorchSaveReader
    name: str
    start: int
    count: int


def holds_zero_shards(path: Path) -> bool:
    """Whether this is a directory with files of ZeRO's ranks. Without ZeRO the model's files have the optimizer."""
    names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    files = [match for name in names if (match := _FILES.fullmatch(name))]
    if not files or any(file["role"] == "optim" for file in files):
        return bool(files)
    with TorchSaveReader(path / files[0].string, verify=False) as model:
        # DeepSpeed stores the shapes where the optimizer's files have the weights in float32.
        return any(keys[0] == "param_shapes" and len(keys) > 1 for keys in model.object_paths.values())


def shards_beside(file: Path) -> dict[str, str]:
    """The other files of the ZeRO checkpoint of which ``file`` is read alone, by name, with the reason."""
    beside = file.parent.iterdir() if _FILES.fullmatch(file.name) and holds_zero_shards(file.parent) else ()
    names = sorted(child.name for child in beside if _FILES.fullmatch(child.name) and child.name != file.name)
    return dict.fromkeys(names, "part of the same ZeRO checkpoint, with all float32 weights: read the folder")


class DeepSpeedReader(ComputedReader):
    """A checkpoint of ZeRO opened for reading; see `CheckpointReader`. `path`: the folder of a step.

    Weights are float32, as the optimizer holds them; frozen weights and buffers are as stored. `verify`: as in
    `TorchSaveReader`. DeepSpeed's own loss scaling and bookkeeping is not carried. CheckpointError, by name, if a
    rank's file is missing, for tensor-parallel checkpoints, and for shards that are too short for the shapes.
    """

    format = "torch"

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        names = sorted(child.name for child in path.iterdir() if _FILES.fullmatch(child.name))
        self._opened: list[TorchSaveReader] = []
        self._runs: dict[str, tuple[Sequence[_Run], Sequence[int]]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.object_paths: dict[str, TreePath] = {}
        self.unreadable: Mapping[str, str] = {}
        self._values: dict[str, object] = {}
        try:
            self._models = self._ranks("model", names, verify)
            self._optimizers = self._ranks("optim", names, verify)
            self._main = self._models[0]
            self._cuts_weights = any(self._flats((_STATE, _SHARDED_WEIGHTS)))
            self._base = (_STATE, _STATE if self._cuts_weights else "base_optimizer_state")
            self._require_all_ranks()
            self._take_weights()
            self._take_rest()
        except BaseException:
            self.close()
            raise
        self.objects: Mapping[str, object] = ReadWhenAsked(self.object_paths, self._object)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        info = self.tensors[name]
        box = box_of(info, box)
        runs, _ = self._runs[name]
        if len(runs) == 1 and runs[0].reader.tensors[runs[0].name].shape == info.shape:
            return runs[0].reader.read(runs[0].name, box)
        result = array_for(info, box, self.path)
        copy_flat(info.shape, box, result, lambda start, stop: self._bytes(info, start, stop))
        return result

    def files(self) -> Sequence[Path]:
        """The files of all ranks."""
        return tuple(file for reader in self._opened for file in reader.files())

    def checksummed(self, name: str) -> bool:
        """Whether each shard's storage has a CRC-32, which reading verifies."""
        return all(run.reader.checksummed(run.name) for run in self._runs[name][0])

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        for reader in self._opened:
            reader.close()

    def _ranks(self, role: str, names: Sequence[str], verify: bool) -> list[TorchSaveReader]:
        """The files of a role by rank. Stages 1 and 2 have one file for the model."""
        ranks: dict[int, str] = {}
        for name in names:
            match = _FILES.fullmatch(name)
            if match is None or match["role"] != role:
                continue
            if int(match["mp"]):
                raise CheckpointError(
                    f"{self.path / name}: expected no tensor parallelism, found its rank {match['mp']}: convert to a "
                    "universal checkpoint or join with zero_to_fp32.py, which DeepSpeed writes next to the checkpoint"
                )
            if ranks.setdefault(int(match["rank"] or 0), name) != name:
                raise CheckpointError(
                    f"{self.path}: expected one {role} file of each rank, found also {name}"
                )
        last = max(ranks, default=0)
        if missing := [rank for rank in range(last + 1) if rank not in ranks]:
            raise CheckpointError(
                f"{self.path}: expected {role} files of ranks 0 to {last} (*_{role}_states.pt), found none of rank "
                f"{first_of(missing)}: fetch all files"
            )
        opened = [TorchSaveReader(self.path / ranks[rank], verify) for rank in sorted(ranks)]
        self._opened += opened
        return opened

    def _require_all_ranks(self) -> None:
        """The shards say how many ranks there are: the last ranks' files may be missing, too."""
        count = self._main.objects.get("dp_world_size")
        if type(count) is int and count != len(self._optimizers):
            raise CheckpointError(
                f"{self.path}: expected optimizer files of {count} ranks (dp_world_size), found "
                f"{len(self._optimizers)}: fetch all files"
            )

    def _flats(self, start: TreePath, end: TreePath = ()) -> list[dict[int, str]]:
        """Each rank's flat tensors by group: those with the group's number between the start and end of their path."""
        size = len(start) + 1
        return [
            {
                _number(info.path[size - 1]): name
                for name, info in rank.tensors.items()
                if info.path[: size - 1] == start
                and len(info.path) == size + len(end)
                and info.path[size:] == end
            }
            for rank in self._optimizers
        ]

    def _take_weights(self) -> None:
        shapes = self._shapes("param_shapes", 3)
        if not shapes:
            raise CheckpointError(
                f"{self._main.path}: expected param_shapes, which names the weights, found none"
            )
        state = (*self._base, "state")
        main = self._flats((_STATE, _SHARDED_WEIGHTS if self._cuts_weights else _SHARDED_GROUPS))
        self._take_flat("", shapes, main, main)
        infos = [info for rank in self._optimizers for info in rank.tensors.values()]
        for key in sorted({str(info.path[-1]) for info in infos if info.path[:3] == state and info.shape}):
            self._take_flat(key, shapes, main, self._flats(state, (key,)))
        self._take_scalars(shapes, main[0], state)
        taken = {run.name for runs, _ in self._runs.values() for run in runs}
        for rank in self._optimizers:
            for name, info in rank.tensors.items():
                # Each rank has the same step counts. An empty tensor, or one that is all padding, has a taken name.
                if name not in taken and (info.shape or info.path[:3] != state):
                    raise CheckpointError(
                        f"{rank.path}: found {name!r:.200}, whose place in the weights is not known: join with "
                        "zero_to_fp32.py, which DeepSpeed writes next to the checkpoint"
                    )

    def _take_flat(self, key: str, shapes: _Shapes, main: _Flats, flats: _Flats) -> None:
        """Add a moment of every weight that has it, or the weights themselves, from the flat tensors of all ranks."""
        paddings = self._optimizers[0].objects.get(f"{_STATE}.param_alignment_paddings")
        at, ranks = 0, len(self._optimizers)
        for group, weights in shapes.items():
            at = at if self._cuts_weights else 0
            groups = list(main[0]) if self._cuts_weights else [group]
            # A group without this moment takes the place of its weights.
            pieces = [
                [(own.get(g), _size(rank, own.get(g, whole.get(g)))) for g in groups]
                for rank, own, whole in zip(self._optimizers, flats, main, strict=True)
            ]
            for number, (weight, shape) in enumerate(weights.items()):
                size = math.prod(shape)
                if self._cuts_weights:
                    part = -(-size // ranks)
                    runs = self._parts(pieces, at, part, size)
                    at += part
                else:
                    runs = _consecutive(self._optimizers, pieces, at, size)
                    at += size + _padding(paddings, group, number)
                if runs or not key:
                    self._add(("optimizer", "state", weight, key) if key else ("module", weight), shape, runs)
            lengths = [sum(length for _, length in own) for own in pieces]
            # As in zero_to_fp32.py: DeepSpeed pads a group to a multiple of twice the number of ranks.
            padded = [-(-count // (2 * ranks)) for count in (at, sum(lengths))]
            is_last = group == max(shapes)
            if not key and (
                set(lengths) != {at} and is_last if self._cuts_weights else padded[0] != padded[1]
            ):
                raise CheckpointError(
                    f"{self.path}: group {group}: expected {at} elements and padding for param_shapes, found {lengths}"
                )

    def _take_scalars(self, shapes: _Shapes, main: Mapping[int, str], state: TreePath) -> None:
        """Add the step count, and other scalars and values of a group's state, for each of its weights."""
        rank, at = self._optimizers[0], 0
        paths = {name: info.path for name, info in rank.tensors.items() if not info.shape}
        values = {
            name: path
            for name, path in (paths | dict(rank.object_paths)).items()
            if path[:3] == state and len(path) == 5
        }
        ends = list(itertools.accumulate(_size(rank, name) for name in main.values()))
        for group, weights in shapes.items():
            for weight, shape in weights.items():
                own = [*main, -1][bisect_right(ends, at)] if self._cuts_weights else group
                at += -(-math.prod(shape) // len(self._optimizers))
                for old, (*_, number, key) in values.items():
                    name, path = flat_name(("optimizer", "state", weight, key))
                    if _number(number) == own and old in paths:
                        self._add(path, (), [_Run(rank, old, 0, 1)])
                    elif _number(number) == own:
                        self.object_paths[name], self._values[name] = path, (rank, old)

    def _shapes(self, key: str, depth: int) -> _Shapes:
        """The shapes of weights by group, in the order of the flat tensors. depth: of their paths in the file."""
        shapes: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name, path in self._main.object_paths.items():
            if path[0] != key or len(path) != depth:
                continue
            shape = self._main.objects[name]
            if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
                raise CheckpointError(f"{self._main.path}: {name}: expected a shape, found {shape!r:.80}")
            shapes[_number(path[1]) if depth == 3 else 0][str(path[-1])] = shape
        return shapes

    def _parts(self, pieces: Sequence[_Pieces], start: int, part: int, size: int) -> list[_Run]:
        """The first ``size`` elements of [start, start + part) of each rank, one rank behind the other."""
        runs: list[_Run] = []
        for number, (reader, own) in enumerate(zip(self._optimizers, pieces, strict=True)):
            runs += _consecutive([reader], [own], start, min(part, max(0, size - number * part)))
        return runs

    def _take_rest(self) -> None:
        """Frozen weights, buffers, second names of shared weights, hyperparameters and counters."""
        for weight, shape in self._shapes("frozen_param_shapes", 2)[0].items():
            stored, left, runs = f"frozen_param_fragments.{weight}", math.prod(shape), list[_Run]()
            for rank in self._models:
                held = math.prod(rank.tensors[stored].shape) if stored in rank.tensors else 0
                runs.append(_Run(rank, stored, 0, min(held, left)))
                left -= runs[-1].count
            self._add(("module", weight), shape, [run for run in runs if run.count])
        known = {*self.tensors, *self._main.unreadable}
        for name, info in self._main.tensors.items():
            if (info.path[0] == "module" or info.path[0] not in _OWN) and name not in known:
                self._add(info.path, info.shape, [_Run(self._main, name, 0, info.numel)])
        for name, path in self._main.object_paths.items():
            if path[0] == "shared_params" and len(path) == 2:
                shared = self.tensors.get(f"module.{self._main.objects[name]}")
                if shared is None:
                    raise CheckpointError(
                        f"{self._main.path}: shared_params names {self._main.objects[name]!r:.200}, which is no weight"
                    )
                self._add(("module", *path[1:]), shared.shape, self._runs[shared.name][0])
            elif path[0] not in _OWN:
                self.object_paths[name], self._values[name] = path, self._main
        groups = (*self._base, "param_groups")
        weights = {group: list(names) for group, names in self._shapes("param_shapes", 3).items()}
        for old, path in self._optimizers[0].object_paths.items():
            if path[:2] == self._base and path[:3] not in (groups, (*self._base, "state")):
                raise CheckpointError(
                    f"{self._optimizers[0].path}: expected the state and the param_groups of an optimizer, found "
                    f"{old!r:.200}: convert the weights alone from the files of zero_to_fp32.py"
                )
            if path[:3] == groups:
                name, own = flat_name(("optimizer", *path[2:]))
                self.object_paths[name] = own
                named = path[4:] == ("params",) and _number(path[3]) in weights
                self._values[name] = weights[_number(path[3])] if named else (self._optimizers[0], old)

    def _add(self, path: TreePath, shape: tuple[int, ...], runs: Sequence[_Run]) -> None:
        name, path = flat_name(path)
        held = sum(run.count for run in runs)
        dtypes = {run.reader.tensors[run.name].dtype for run in runs}
        if held != math.prod(shape) or len(dtypes) > 1:
            raise CheckpointError(
                f"{self.path}: tensor {name!r:.200}: expected {math.prod(shape)} elements for shape {shape} in the "
                f"files of {len(self._optimizers)} ranks, found {held} of {first_of([*dtypes]) or 'any'}"
            )
        box = Box.whole(shape)
        dtype = dtypes.pop() if dtypes else np.dtype(np.float32)
        self.tensors[name] = TensorInfo(name, path, shape, dtype, (box,) if box.numel else ())
        self._runs[name] = runs, list(itertools.accumulate((run.count for run in runs), initial=0))

    def _bytes(self, info: TensorInfo, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of a tensor, run by run."""
        runs, starts = self._runs[info.name]
        size = info.dtype.itemsize
        first, last = start // size, -(-stop // size)
        for number in range(bisect_right(starts, first) - 1, len(runs)):
            run, at = runs[number], starts[number]
            low, high = max(first, at), min(last, at + run.count)
            if low < high:
                box = Box((run.start + low - at,), (high - low,))
                yield run.reader.read(run.name, box).tobytes()

    def _object(self, name: str) -> object:
        value = self._values[name]
        if isinstance(value, TorchSaveReader):
            return value.objects[name]
        return value[0].objects[value[1]] if isinstance(value, tuple) else value


def _consecutive(
    ranks: Sequence[TorchSaveReader], pieces: Sequence[_Pieces], start: int, size: int
) -> list[_Run]:
    """Elements [start, start + size) of the tensors of these ranks in a row."""
    runs: list[_Run] = []
    at = 0
    for reader, own in zip(ranks, pieces, strict=True):
        for name, length in own:
            low, high = max(start, at), min(start + size, at + length)
            if name is not None and low < high:
                runs.append(_Run(reader, name, low - at, high - low))
            at += length
    return runs


def _size(reader: TorchSaveReader, name: str | None) -> int:
    return 0 if name is None else reader.tensors[name].numel


def _number(key: str | int) -> int:
    """The group that a key of a path names; -1 for another key."""
    return int(key) if re.fullmatch(r"[0-9]{1,9}", str(key)) else -1


def _padding(paddings: Any, group: int, number: int) -> int:
    """Elements behind a weight in its group's flat array."""
    try:
        value = paddings[group][number]
    except (LookupError, TypeError):
        return 0
    return value if type(value) is int and value >= 0 else 0
