"""State dicts as plain torch writes them: names without wrappers, and a scalar for each step count.

model.layers.0._checkpoint_wrapped_module._orig_mod.up.weight      model.layers.0.up.weight
optimizer.state.module.layers.0.up.weight.exp_avg                  without DDP's module., or another module around all

optimizer.state.0.step              3                   torch before 1.12, many third-party optimizers
optimizer.param_groups.0.step       3                   one for all weights of a group, as in apex
optimizer.state.0.step              tensor([3.])        of shape (1,)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo, TreePath
from bridge.core.formats.tensors.wrapping import AlteredReader, ReadWhenAsked, value_of
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.source_tree import NameIndex

_STEP = "step"
_STATE, _GROUPS = "state", "param_groups"
_MOMENT = "exp_avg"
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_MOST_STEPS = 1e30
_STATE_DICTS = frozenset({"dcp", "safetensors", "torch"})


def with_plain_states(reader: CheckpointReader, mapping: MappingTable) -> CheckpointReader:
    """``reader`` with plain names, and a float32 scalar for each step count that is a number or has one element.

    A group's step count is given to each of its weights that has a first moment and no count. A reader that has nothing
    else is returned as it is. mapping: see `plain_paths`.
    """
    if reader.format not in _STATE_DICTS:
        return reader
    if paths := plain_paths(reader, mapping):
        reader = PlainNames(reader, paths, _prefix(_paths(reader), mapping))
    values = dict(_of_weights(reader))
    known = {info.path for info in reader.tensors.values()} | values.keys()
    values |= {path: value for path, value in _of_groups(reader) if path not in known}
    short = [n for n, info in reader.tensors.items() if _is_step(info.path) and info.shape == (1,)]
    return StepTensors(reader, values, short) if values or short else reader


def plain_paths(reader: CheckpointReader, mapping: MappingTable) -> Mapping[TreePath, TreePath]:
    """Each leaf's path without wrappers, by its path.

    Empty if no name has a wrapper, if rules of the mapping name one, and if two paths would become equal.
    """
    paths = _paths(reader)
    prefix = _prefix(paths, mapping) if reader.format in _STATE_DICTS else ""
    if not prefix and not any(map(_WRAPPER.search, (*reader.tensors, *reader.object_paths))):
        return {}
    plain = {path: tuple(_plain(key, prefix) for key in path) for path in paths}
    if len({".".join(map(str, path)) for path in plain.values()}) < len(paths):
        return {}
    entries = (
        entry for rule in mapping.rules for side in mapping.conventions for entry in rule.entries(side)
    )
    return {} if any(_WRAPPER.search(entry.path.text) for entry in entries) else plain


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """The names without wrappers, by name; unchanged if two would become equal."""
    plain = {name: _WRAPPER.sub("", name) for name in names}
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in plain}


def in_plain_names(reader: CheckpointReader) -> CheckpointReader:
    """A state dict's reader without wrappers in its names, as the model had them before it was wrapped."""
    paths = {path: tuple(_plain(key, "") for key in path) for path in _paths(reader)}
    wrapped = reader.format in _STATE_DICTS and any(path != plain for path, plain in paths.items())
    return PlainNames(reader, paths) if wrapped and len({*paths.values()}) == len(paths) else reader


def _paths(reader: CheckpointReader) -> list[TreePath]:
    return [*(info.path for info in reader.tensors.values()), *reader.object_paths.values()]


def _plain(key: str | int, prefix: str) -> str | int:
    if not isinstance(key, str):
        return key
    return re.sub(rf"^((?:state|param_groups)\.)?{re.escape(prefix)}", r"\1", _WRAPPER.sub("", key))


def _prefix(paths: Sequence[TreePath], mapping: MappingTable) -> str:
    """What stands before all names of weights that rules have, where optimizer states repeat it; else empty."""
    inside = {str(path[path.index(_STATE) + 1]) for path in paths if _STATE in path[:-1]}
    inside |= {str(key)[len("state.") :] for path in paths for key in path if str(key).startswith("state.")}
    of_states = {_WRAPPER.sub("", key) for key in inside}
    known = [NameIndex(mapping.rules, side) for side in mapping.conventions]
    prefixes = set()
    for path in paths if of_states else ():
        key = _WRAPPER.sub("", str(path[-1])) if len(path) > 1 and _STATE not in path else ""
        # The longest name that a rule has is the weight's.
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", key))):
            if any(index.knows(key[start:]) for index in known):
                prefixes.add(key[:start])
                break
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return prefix if any(key.isdecimal() or key.startswith(prefix) for key in of_states) else ""


class PlainNames(AlteredReader):
    """``reader`` with the tree paths that ``paths`` gives for its own, and with names that follow from these paths.

    prefix: see `_prefix`.
    """

    def __init__(
        self, reader: CheckpointReader, paths: Mapping[TreePath, TreePath], prefix: str = ""
    ) -> None:
        super().__init__(reader)
        self._prefix = prefix
        old = {name: info.path for name, info in reader.tensors.items()} | dict(reader.object_paths)
        plain = {name: ".".join(map(str, paths[path])) for name, path in old.items()}
        self._owns = {plain[name]: name for name in old}
        self.tensors = {
            plain[name]: dataclasses.replace(info, name=plain[name], path=paths[info.path])
            for name, info in reader.tensors.items()
        }
        self.object_paths = {plain[name]: paths[path] for name, path in reader.object_paths.items()}
        self.objects = ReadWhenAsked(self.object_paths, self._object)
        self.unreadable = {plain[name]: reason for name, reason in self.unreadable.items()}
        if self.kinds is not None:
            self.kinds = {plain[name]: leaf_kind for name, leaf_kind in self.kinds.items()}

    def _own(self, name: str) -> str | None:
        return self._owns[name]

    def _object(self, name: str) -> object:
        value = self._reader.objects[self._owns[name]]
        # A group of a state dict with names lists the names of its weights.
        if self.object_paths[name][-1] in ("params", "param_names") and isinstance(value, list):
            return [_plain(key, self._prefix) for key in value]
        return value


class StepTensors(AlteredReader):
    """``reader`` with additional scalars ``values``, by path, and with the one-element tensors ``short`` as scalars."""

    def __init__(
        self, reader: CheckpointReader, values: Mapping[TreePath, float], short: Sequence[str]
    ) -> None:
        super().__init__(reader)
        self._values = {".".join(map(str, path)): _scalar(value) for path, value in values.items()}
        self._short = frozenset(short)
        scalar = (Box.whole(()),)
        tensors = dict(reader.tensors)
        for name in short:
            tensors[name] = dataclasses.replace(tensors[name], shape=(), chunks=scalar)
        for path, name in zip(values, self._values, strict=True):
            tensors[name] = TensorInfo(name, path, (), self._values[name].dtype, scalar)
        self.tensors = tensors
        self.object_paths = {name: path for name, path in reader.object_paths.items() if path not in values}
        self.objects = ReadWhenAsked(self.object_paths, reader.objects.__getitem__)

    def _own(self, name: str) -> str | None:
        return None if name in self._values or name in self._short else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        return self._values[name].copy() if name in self._values else self._reader.read(name).reshape(())


def _scalar(value: float) -> np.ndarray:
    """float32 as in torch's own optimizers, unless that would change the number."""
    narrow = np.asarray(value, np.float32)
    return narrow if float(narrow) == value else np.asarray(value, np.float64)


def _is_step(path: TreePath) -> bool:
    """Whether this is a weight's step count, even as one key of a flattened optimizer: ``state.<weight>.step``."""
    if len(path) > 2 and path[-3] == _STATE:
        return path[-1] == _STEP
    last = str(path[-1])
    return last.startswith(f"{_STATE}.") and last.endswith(f".{_STEP}")


def _number(reader: CheckpointReader, name: str) -> float | None:
    value = value_of(reader, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST_STEPS:
        return None
    return float(value)


def _of_weights(reader: CheckpointReader) -> Iterator[tuple[TreePath, float]]:
    for name, path in reader.object_paths.items():
        if _is_step(path) and (value := _number(reader, name)) is not None:
            yield path, value


def _of_groups(reader: CheckpointReader) -> Iterator[tuple[TreePath, float]]:
    names = {path: name for name, path in reader.object_paths.items()}
    paths = {info.path for info in reader.tensors.values()}
    for path, name in names.items():
        if path[-1] != _STEP or path[-3:-2] != (_GROUPS,) or (*path[:-1], "params") not in names:
            continue
        weights = value_of(reader, names[(*path[:-1], "params")])
        value = _number(reader, name)
        if value is None or not isinstance(weights, list):
            continue
        for weight in weights:
            state = (*path[:-3], _STATE, str(weight))
            if (*state, _MOMENT) in paths:
                yield (*state, _STEP), value
