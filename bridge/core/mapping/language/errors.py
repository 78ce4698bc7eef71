"""The error of a mapping that is malformed or does not fit a checkpoint."""

from __future__ import annotations

from bridge.core.formats.tensors.base import CheckpointError


class MappingError(CheckpointError):
    """A mapping file that cannot be read, or a rule that contradicts the tensors it meets."""
