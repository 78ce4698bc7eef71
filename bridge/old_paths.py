"""Import paths that documents showed before modules moved. They give the modules of today, the same objects.

    bridge.sharding  ->  bridge.core.sharding          and so for all modules within

Type checkers know the new paths only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Final

MOVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bridge.formats": "bridge.core.formats",
        "bridge.mapping": "bridge.core.mapping",
        "bridge.sharding": "bridge.core.sharding",
        "bridge.checkpoints.diff": "bridge.checkpoints.compare.diff",
        "bridge.checkpoints.picture": "bridge.checkpoints.inspect.chart",
        "bridge.checkpoints.selection": "bridge.checkpoints.ground.selection",
        "bridge.checkpoints.ulp": "bridge.checkpoints.compare.ulp",
        "bridge.parity.config": "bridge.relay.config",
        "bridge.parity.corpus": "bridge.relay.corpus",
        "bridge.parity.plot": "bridge.relay.chart",
        "bridge.parity.relay": "bridge.relay.relay",
        # The parent of the next, which is imported first.
        "bridge.parity.pair": "bridge.parity",
        "bridge.parity.pair.picture": "bridge.parity.report_page.picture",
        "bridge.planning.compilers": "bridge.compiling.machines.compilers",
        "bridge.planning.target_chart": "bridge.compiling.target_chart",
        "bridge.planning.target_plan": "bridge.compiling.target_plan",
        "bridge.planning.target_step": "bridge.compiling.target_step",
        "bridge.planning.target_time": "bridge.compiling.target_time",
        "bridge.planning.targets": "bridge.compiling.machines.targets",
    }
)
"""By old path, the new one."""


class _Moved(Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes from here what it returns: a copy would be a second state beside the module's.
        sys.modules[module.__name__] = importlib.import_module(self._path)


class OldPaths:
    """Finds modules by the paths that they had. First in ``sys.meta_path``: other finders would look in vain."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of today behind an old path, or behind a path within an old package; None for other names."""
        old, rest = name, ""
        while old and old not in MOVED:
            old, _, last = old.rpartition(".")
            rest = f".{last}{rest}"
        return ModuleSpec(name, _Moved(MOVED[old] + rest)) if old else None
