"""A checkpoint's weights under the names of a model, through a mapping."""

from __future__ import annotations

import os

import numpy as np

from bridge.formats import open_checkpoint
from bridge.formats.base import Box
from bridge.mapping import MappingError, MappingTable
from bridge.mapping.found import find
from bridge.mapping.sizes import with_config
from bridge.mapping.translation import make_plan
from bridge.parity.pair.in_memory import ArrayReader
from bridge.parity.pair.recording import Leaves


def stored_weights(
    path: str | os.PathLike[str], mapping: MappingTable, model: Leaves, separator: str, where: str
) -> dict[str, np.ndarray]:
    """The weights of a model, read from a checkpoint of any format in any convention of the mapping.

    ``model``: the model's parameters, for their names, shapes and dtypes. Raises ``CheckpointError`` (``MappingError``)
    where the checkpoint lacks some of them.
    """
    own = find(ArrayReader(model, separator, where).tensors.values(), mapping, None, where)
    with open_checkpoint(path) as reader:
        table = with_config(mapping, reader)
        found = find(reader.tensors.values(), table, None, str(path))
        if found.convention.name == own.convention.name:
            values = {weight: reader.read(info.name) for weight, info in found.weights.items()}
        else:
            target = own.convention.at("{w}", own.convention.states)
            plan = make_plan(reader, "orbax" if separator == "/" else "dcp", table, into=target)
            values = {
                name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()
            }
    missing = sorted(own.weights.keys() - values.keys())
    if missing:
        raise MappingError(
            f"{path}: expected the weights of {where}, found none for {', '.join(missing[:8])}"
            f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}"
        )
    return {info.name: values[weight].astype(model[info.name].dtype) for weight, info in own.weights.items()}
