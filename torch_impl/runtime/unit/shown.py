"""Which weights a module shows, and how it shows two kinds at the same time.

After a forward that does not reshard, ``module.weight`` is whole, while ``parameters()`` yields sharded main weights.
``nn.Module`` looks up attributes in its dictionary of parameters by key. All other code, such as copies and pickles of
the module, reads the items of the dictionary. So a dictionary that returns whole weights by key serves both.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torch import nn


class Shown(Enum):
    """Which weights modules show."""

    MAIN = auto()
    WHOLE = auto()
    """The compute weights."""
    ATTRIBUTES = auto()
    """The compute weights as ``module.weight``, the main weights in ``parameters()``."""


class WholeByKey(dict[str, Any]):
    """The parameters of a module, ``plain``; a key in ``whole`` returns its second parameter."""

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.whole: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    def __getitem__(self, key: str) -> Any:
        param = super().__getitem__(key)
        main, whole = self.whole.get(key, (None, None))
        return param if main is None or param is not main else whole

    def __setitem__(self, key: str, param: Any) -> None:
        main, whole = self.whole.get(key, (None, None))
        # torch.func.functional_call restores a weight that it has read by this key.
        super().__setitem__(key, param if whole is None or param is not whole else main)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def hide(self, key: str) -> dict[str, Any]:
        """Drop the whole weight of ``key``; returns the dictionary for the module from now on."""
        self.whole.pop(key, None)
        if self.whole:
            return self
        # Compiled code depends on the identity of this dictionary.
        for changed in [key for key, param in self.items() if self.plain.get(key) is not param]:
            self.plain[changed] = super().__getitem__(changed)
        for deleted in self.plain.keys() - self.keys():
            del self.plain[deleted]
        return self.plain
