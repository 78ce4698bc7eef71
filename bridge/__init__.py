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
import sys
from typing import TYPE_CHECKING

from bridge.core.version import __version__
from bridge.old_paths import OldPaths

if TYPE_CHECKING:
    from bridge.checkpoints.compare.diff import diff
    from bridge.checkpoints.compare.ulp import Tolerance
    from bridge.checkpoints.convert import convert
    from bridge.checkpoints.convert.plan import ConvertOptions
    from bridge.checkpoints.ground.selection import Selection
    from bridge.checkpoints.inspect.summary import inspect
    from bridge.checkpoints.prove.proof import prove
    from bridge.checkpoints.verify import verify
    from bridge.core.formats import Box, CheckpointError, create_checkpoint, open_checkpoint

__all__ = [
    "Box", "CheckpointError", "ConvertOptions", "Selection", "Tolerance", "__version__", "convert",
    "create_checkpoint", "diff", "inspect", "open_checkpoint", "prove", "verify",
]  # fmt: skip

_HOMES = {
    "Box": "bridge.core.formats", "CheckpointError": "bridge.core.formats",
    "ConvertOptions": "bridge.checkpoints.convert.plan", "Selection": "bridge.checkpoints.ground.selection",
    "Tolerance": "bridge.checkpoints.compare.ulp", "convert": "bridge.checkpoints.convert",
    "create_checkpoint": "bridge.core.formats", "diff": "bridge.checkpoints.compare.diff",
    "inspect": "bridge.checkpoints.inspect.summary", "open_checkpoint": "bridge.core.formats",
    "prove": "bridge.checkpoints.prove.proof", "verify": "bridge.checkpoints.verify",
}  # fmt: skip

if OldPaths not in sys.meta_path:
    sys.meta_path.insert(0, OldPaths)

# Hidden from type checkers, which would take every misspelt attribute for one that this function knows.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'bridge' has no attribute {name!r}: it has {', '.join(__all__)}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
