"""``WholeNorm``, the type of norms of sharded tensors: a plain scalar that also has ``full_tensor()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# With these functions ``clip_grad_norm_``, and programs that do the same by hand, combine many norms into one.
_STAYS = {torch.Tensor.to, torch.stack, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm}


class WholeNorm(torch.Tensor):
    """A norm of whole tensors, equal on all ranks that hold parts of them.

    Not a DTensor, unlike FSDP2's norms, so that norms over several meshes and of plain tensors can be combined. All
    results computed from it are plain, except norms of norms.
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
        # So that files with norms can be read without this package.
        return self.full_tensor().__reduce_ex__(protocol)
