"""What sharded tensors say of themselves in errors, and methods of plain tensors that they have not."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

_NAME = "_name_in_unit"


def set_name(param: nn.Parameter, name: str) -> None:
    """Give a sharded parameter the name by which errors speak of it."""
    setattr(param, _NAME, name)


def described(tensor: torch.Tensor, unnamed: str = "a tensor") -> str:
    """ "parameter '0.weight' of shape (7, 8)"; what is computed from parameters has no name."""
    name = getattr(tensor, _NAME, None)
    return f"{unnamed if name is None else f'parameter {name!r}'} of shape {tuple(tensor.shape)}"


class NoPlainTensor:
    """Mixed into the class of sharded tensors: torch answers these by its own words, or ends the process."""

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
            f"{method}() of {described(self)}, of which each rank holds some rows: use full_tensor().{method}() for "
            f"the whole, on all ranks, or to_local().{method}() for this rank's rows"
        )
