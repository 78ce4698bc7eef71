"""Moves checkpoints between PyTorch (DCP), JAX (Orbax) and safetensors, compares them, runs both stacks side by side.

    from bridge import convert, diff, verify

    convert("runs/torch/step_40", "runs/jax/step_40", mapping="decoder")
    assert diff("runs/torch/step_40", "runs/jax/step_40", mapping="decoder").same
    assert verify("runs/jax/step_40").good

Reading, converting and comparing need neither PyTorch nor JAX; only `bridge.parity` and the traces of `bridge.planning`
start a runtime. The names below are imported when they are first used: `import bridge` alone imports no package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.checkpoints.convert import convert
    from bridge.checkpoints.diff import diff
    from bridge.checkpoints.selection import Selection
    from bridge.checkpoints.summary import inspect
    from bridge.checkpoints.ulp import Tolerance
    from bridge.checkpoints.verify import verify
    from bridge.formats import Box, CheckpointError, create_checkpoint, open_checkpoint

__all__ = [
    "Box",
    "CheckpointError",
    "Selection",
    "Tolerance",
    "__version__",
    "convert",
    "create_checkpoint",
    "diff",
    "inspect",
    "open_checkpoint",
    "verify",
]

_HOMES = {
    "Box": "bridge.formats",
    "CheckpointError": "bridge.formats",
    "Selection": "bridge.checkpoints.selection",
    "Tolerance": "bridge.checkpoints.ulp",
    "convert": "bridge.checkpoints.convert",
    "create_checkpoint": "bridge.formats",
    "diff": "bridge.checkpoints.diff",
    "inspect": "bridge.checkpoints.summary",
    "open_checkpoint": "bridge.formats",
    "verify": "bridge.checkpoints.verify",
}

# Hidden from type checkers, which would take every misspelt attribute for one that this function knows.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'bridge' has no attribute {name!r}: it has {', '.join(__all__)}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
