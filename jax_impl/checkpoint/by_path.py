"""A checkpoint of any format as a tree: tensors by path, such as ``params/layers/0/w``, however the files name them.

::

    Orbax          params/layers/0/w      the same
    DCP            params.layers.0.w      the path in the saved state dict
    safetensors    params.layers.0.w      the path that twinshard stored, or the name split at its dots
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.formats import Box, CheckpointReader, TreePath, open_checkpoint
from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.formats.tensors.leaves import LEAVES, key_types


class TreeReader:
    """``tensors``, ``objects`` and ``read`` by slash-separated path; reads only the boxes that are asked for.

    ``translate``: wraps the checkpoint's own reader in another one.
    """

    def __init__(
        self, path: Path, translate: Callable[[CheckpointReader], CheckpointReader] | None = None
    ) -> None:
        self._reader = opened = open_checkpoint(path)
        try:
            self._reader = opened if translate is None else translate(opened)
        except BaseException:
            opened.close()
            raise
        self.path, self.format = path, self._reader.format
        self._names: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in self._reader.tensors.items():
            tree: TreePath = (
                tuple(name.split(".")) if len(info.path) == 1 and self.format != "orbax" else info.path
            )
            slashed = "/".join(map(str, tree))
            self._names[slashed] = name
            self.tensors[slashed] = replace(info, path=tree)

    @property
    def objects(self) -> dict[TreePath, Any]:
        """Values that are not arrays, by tree path, without the entry that records the types of other leaves."""
        paths = self._reader.object_paths
        return {paths[name]: value for name, value in self._reader.objects.items() if paths[name] != LEAVES}

    @property
    def key_types(self) -> Mapping[str, str]:
        """The algorithms of random keys by path, if the checkpoint records them."""
        types = key_types(self._reader)
        return {path: types[name] for path, name in self._names.items() if name in types}

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        return self._reader.read(self._names[name], box)

    def __enter__(self) -> TreeReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
