"""Which weights a module shows, and how it shows two kinds at once.

After a forward that does not reshard, ``module.weight`` is whole, while ``parameters()`` yields sharded main weights.
``nn.Module`` looks up attributes in its dictionary of parameters by key. All else reads the items of the dictionary,
also copies and pickles of the module. So a dictionary that gives whole weights by key serves both.
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
    """The compute weights as ``module.weight``, the main weights in ``parameters()`` and ``named_parameters()``."""


class _WholeByKey(dict[str, Any]):
    """The parameters of a module, ``plain``; a key of ``whole`` reads the second parameter in place of the first."""

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
        # What torch.func.functional_call puts back it has read by this key.
        super().__setitem__(key, param if whole is None or param is not whole else main)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def hide(self, key: str) -> dict[str, Any]:
        """Forget the whole weight of ``key``; the dictionary for the module to have from now on."""
        self.whole.pop(key, None)
        if self.whole:
            return self
        # Compiled code depends on the identity of this dictionary.
        for changed in [key for key, param in self.items() if self.plain.get(key) is not param]:
            self.plain[changed] = super().__getitem__(changed)
        for deleted in self.plain.keys() - self.keys():
            del self.plain[deleted]
        return self.plain


def show(module: nn.Module, attr: str, main: nn.Parameter, whole: nn.Parameter, shown: Shown) -> None:
    """Show a weight of a module, unless the program has replaced it: the next forward refuses that."""
    if isinstance(module._parameters, _WholeByKey):
        vars(module)["_parameters"] = module._parameters.hide(attr)
    registered = module._parameters.get(attr)
    if registered is not main and registered is not whole:
        return
    if shown is Shown.ATTRIBUTES:
        given = module._parameters
        both = given if isinstance(given, _WholeByKey) else _WholeByKey(given)
        dict.__setitem__(both, attr, main)
        both.whole[attr] = main, whole
        vars(module)["_parameters"] = both
    else:
        register(module, attr, main if shown is Shown.MAIN else whole)


def register(module: nn.Module, attr: str, param: nn.Parameter) -> None:
    """Make ``param`` a parameter of the module."""
    # Only modules that watch assignments (RNNs cache their weights) need the slow way.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attr] = param
    else:
        setattr(module, attr, param)
