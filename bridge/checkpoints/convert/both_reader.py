"""The leaves of a source and of a template in one reader."""

from __future__ import annotations

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader
from bridge.core.formats.tensors.leaves import kinds_of
from bridge.core.formats.tensors.wrapping import AlteredReader, ReadWhenAsked

OWN = "template:"
"""Before the names of the template's leaves, among those of the source."""


class BothReader(AlteredReader):
    """``reader`` with the leaves of the template, under names that begin with `OWN`."""

    def __init__(self, reader: CheckpointReader, template: CheckpointReader) -> None:
        super().__init__(reader)
        self._template = template
        own = {OWN + name: info.named(OWN + name, info.path) for name, info in template.tensors.items()}
        self.tensors = {**reader.tensors, **own}
        paths = {OWN + name: path for name, path in template.object_paths.items()}
        self.object_paths = {**reader.object_paths, **paths}
        self.objects = ReadWhenAsked(self.object_paths, self._object)
        own_kinds = {OWN + name: leaf_kind for name, leaf_kind in kinds_of(template).items()}
        self.kinds = {**kinds_of(reader), **own_kinds}

    def _own(self, name: str) -> str | None:
        return None if name.startswith(OWN) else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        return self._template.read(name.removeprefix(OWN), box)

    def _object(self, name: str) -> object:
        reader = self._template if name.startswith(OWN) else self._reader
        return reader.objects[name.removeprefix(OWN)]
