"""Main gradients that fused kernels write by themselves, without a gradient of autograd's in between.

While a unit runs backward, its unsharded parameters carry three attributes, named as the kernels of TransformerEngine
and Megatron expect them:

    main_grad                  view of the buffer that will be reduced, shaped like the parameter (or this rank's part,
                               under tensor parallelism), in ``reduce_dtype``, or in ``grad_dtype`` when it is kept
    overwrite_main_grad        True: it holds nothing yet, so the first write overwrites; False: add to it
    grad_added_to_main_grad    False; a kernel sets it to True when it has written; later writes add

Whatever autograd then delivers for such a parameter, a placeholder, is ignored; without a placeholder the attribute
alone counts. Parameters whose kernels do not know of this get their gradient copied as always.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_impl.runtime.gradient import GroupGradient

_ATTRIBUTES = ("main_grad", "overwrite_main_grad", "grad_added_to_main_grad")


def expose(params: Sequence[torch.Tensor], gradient: GroupGradient, keep: bool) -> None:
    """Give the unsharded ``params`` of a group the attributes that they lack; ``keep`` as in ``gradient.add``."""
    for index, param in enumerate(params):
        if param.requires_grad and not hasattr(param, "main_grad"):
            view, empty = gradient.direct_view(index, keep)
            vars(param).update(zip(_ATTRIBUTES, (view, empty, False), strict=True))


def written(param: torch.Tensor) -> bool:
    """Whether a kernel has written this parameter's main gradient."""
    return getattr(param, "grad_added_to_main_grad", False)


def withdraw(params: Sequence[torch.Tensor], gradient: GroupGradient | None) -> None:
    """Take the attributes away, and tell ``gradient`` what was written, unless it is None: then it is dropped."""
    for index, param in enumerate(params):
        if gradient is not None and written(param):
            gradient.mark_written(index)
        for name in _ATTRIBUTES:
            vars(param).pop(name, None)
