"""``WholeNorm``: what norms of sharded tensors return, a plain scalar that also answers ``full_tensor()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# By these ``clip_grad_norm_``, and programs that do the same by hand, make one norm of many.
_STAYS = {torch.Tensor.to, torch.stack, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm}


class WholeNorm(torch.Tensor):
    """A norm of whole tensors, equal on all ranks that hold parts of them.

    No DTensor, as FSDP2's norms are: norms over several meshes, and of plain tensors, may be combined. All that is
    computed from it is plain, but norms of norms.
    """

    def full_tensor(self) -> torch.Tensor:
        """Itself, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _STAYS else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # So that files with norms are read without this package.
        return self.full_tensor().__reduce_ex__(protocol)
