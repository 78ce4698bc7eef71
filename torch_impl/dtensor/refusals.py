"""How errors describe sharded tensors, and methods of plain tensors that sharded tensors refuse."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

_NAME = "_name_in_unit"


def set_name(param: nn.Parameter, name: str) -> None:
    """Give a sharded parameter its name for errors."""
    setattr(param, _NAME, name)


def described(tensor: torch.Tensor, unnamed: str = "a tensor") -> str:
    """ "parameter '0.weight' of shape (7, 8)"; tensors computed from parameters have no name."""
    name = getattr(tensor, _NAME, None)
    return f"{unnamed if name is None else f'parameter {name!r}'} of shape {tuple(tensor.shape)}"


class NoPlainTensor:
    """Mixed into the class of sharded tensors: torch's own errors here are unclear, or torch ends the process."""

    def tolist(self) -> NoReturn:
        """RuntimeError."""
        self._refuse("tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """RuntimeError."""
        self._refuse("numpy")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("numpy")

    def share_memory_(self) -> NoReturn:
        """RuntimeError."""
        self._refuse("share_memory_")

    def _refuse(self, method: str) -> NoReturn:
        assert isinstance(self, torch.Tensor)
        raise RuntimeError(
            f"{method}() of {described(self)}, which is sharded over the ranks: use full_tensor().{method}() for "
            f"the whole, on all ranks, or to_local().{method}() for this rank's rows"
        )
