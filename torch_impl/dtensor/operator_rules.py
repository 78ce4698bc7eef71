"""Lets ``RowDTensor`` handle operators itself where torch would not call it.

Up to torch 2.11, DTensor's own dispatch in C++ handles operators on every subclass of DTensor and bypasses the
subclass's ``__torch_dispatch__``. A rule registered for an operator and a class precedes that dispatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

# Rules live as long as the object with which they were registered.
_RULES = torch.library.Library("aten", "FRAGMENT")


def answer_operators(tensor_class: type[torch.Tensor]) -> None:
    """Have every ATen operator on ``tensor_class`` call ``tensor_class.__torch_dispatch__``."""
    if TorchVersion(torch.__version__) >= "2.12.0a0":
        return

    def rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tensor_class.__torch_dispatch__(func, types, args, kwargs or {})

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            torch.library.register_torch_dispatch(name, tensor_class, rule, lib=_RULES)
