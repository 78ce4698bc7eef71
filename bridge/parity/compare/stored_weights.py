"""A checkpoint's weights and buffers under the names of a model, through a mapping."""

from __future__ import annotations

import os

import numpy as np

from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable
from bridge.core.mapping.one_rule.sizes import with_config
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.source_tree import find
from bridge.core.text import first_of
from bridge.parity.partners.weight_map import found_in_model
from bridge.parity.recorded.recording import Side


def stored_weights(
    path: str | os.PathLike[str], mapping: MappingTable, side: Side
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The weights and buffers of a model, read from a checkpoint of any format in any convention of the mapping.

    With them the names of buffers that the checkpoint lacks. Raises ``CheckpointError`` (``MappingError``) where it
    lacks parameters.
    """
    parameters, buffers = side.weights(), side.buffers()
    model, separator, where = {**parameters, **buffers}, side.separator, f"the {side.framework} model"
    own, names = found_in_model(mapping, parameters, buffers, separator, None, where)
    with open_checkpoint(path) as reader:
        table = with_config(mapping, reader)
        found = find(reader.tensors.values(), table, None, str(path))
        same = found.convention.name == own.convention.name
        if same:
            values = {weight: reader.read(info.name) for weight, info in found.weights.items()}
        else:
            target = own.convention.at("{w}", own.convention.states)
            plan = make_plan(reader, "orbax" if separator == "/" else "dcp", table, into=target)
            values = {
                name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()
            }
        loaded = {names[info.name]: values[w] for w, info in own.weights.items() if w in values}
        for name in buffers.keys() - loaded.keys() if same else ():
            # Buffers that the mapping does not know, or that lie beside the root of the weights, as batch_stats do.
            ends = [
                info.name
                for other, info in found.others.items()
                if f"{separator}{other}".endswith(separator + name) and info.shape == buffers[name].shape
            ]
            if len(ends) == 1:
                loaded[name] = reader.read(ends[0])
    missing = sorted(parameters.keys() - loaded.keys())
    if missing:
        raise MappingError(f"{path}: expected the weights of {where}, found none for {first_of(missing)}")
    cast = {name: value.astype(model[name].dtype) for name, value in loaded.items()}
    return cast, tuple(sorted(buffers.keys() - loaded.keys()))
