"""Parameter classes with all-gather extensions, for FSDP2 and ``torch_impl.runtime.weights.extension``.

``Halved`` and ``Rounded`` train in float32 and are gathered as bfloat16; FSDP2 can train ``Rounded``, too. ``Bytes`` is
frozen: rows of int8 with a scale each.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

_aten = torch.ops.aten


class Halved(torch.Tensor):
    """Wraps a tensor of the same shape and dtype. With ``pads``, pads rows to the number of the first rank."""

    calls: ClassVar[Counter[str]] = Counter()
    pads: ClassVar[bool] = True

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Halved:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Halved:
        return Halved(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Halved, lambda halved: halved.values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        # Results of computations are plain tensors.
        if func in (_aten.mm.default, _aten.addmm.default, _aten.t.default):
            return out
        # Derived classes keep their own.
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert outer_stride == torch.empty(outer_size, device="meta").stride()
        assert isinstance(module, torch.nn.Module)
        assert hasattr(mp_policy, "param_dtype")
        Halved.calls["pre"] += 1
        half = self.values.bfloat16()
        if Halved.pads and len(half) * mesh.size() != outer_size[0]:
            rows = math.ceil(outer_size[0] / mesh.size())
            padded = half.new_zeros(rows, *outer_size[1:])
            padded[: len(half)] = half
            half = padded
        return (half,), outer_size

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], size: torch.Size, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        Halved.calls["post" if out is None else "post again"] += 1
        (half,) = gathered
        assert half.dtype == torch.bfloat16
        assert len(half) >= size[0]
        if out is not None:
            local = out.to_local() if hasattr(out, "to_local") else out
            # Counts as a change for autograd: see ``Rounded``.
            with torch.no_grad():
                local.copy_(half[: len(local)])
            return None
        whole = half.to(dtype)
        # Also if the cast changes nothing.
        whole = whole.clone() if whole is half else whole
        return whole, (half, whole)


class Rounded(Halved):
    """Autograd must see no change when a whole weight is filled again. FSDP2 leaves this to the class."""

    def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(*args)
        with torch.autograd._unsafe_preserve_version_counter(out):
            return super().fsdp_post_all_gather(*args, out=out)


class Bytes(torch.Tensor):
    """``payload``, int8 of the same shape, times ``scale``, float32 of one for each row. Two dimensions."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: torch.Tensor) -> Bytes:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, payload.shape, payload.stride(), dtype=torch.float32, device=payload.device
        )

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor) -> None:
        self.payload, self.scale = payload, scale

    @staticmethod
    def of(values: torch.Tensor) -> Bytes:
        """Quantized row by row."""
        scale = values.abs().amax(1) / 127
        return Bytes((values / scale[:, None]).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """The values."""
        return self.payload * self.scale[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Bytes:
        return Bytes(inner["payload"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func is _aten.split.Tensor:
            pieces = zip(first.payload.split(args[1]), first.scale.split(args[1]), strict=True)
            return [Bytes(*piece) for piece in pieces]
        if func is _aten.new_zeros.default:
            return Bytes(first.payload.new_zeros(args[1]), first.scale.new_zeros(args[1][:1]))
        if func is _aten.slice.Tensor:
            assert args[1] == 0
            return Bytes(first.payload[args[2] : args[3]], first.scale[args[2] : args[3]])
        if func is _aten.copy_.default:
            first.payload.copy_(args[1].payload)
            first.scale.copy_(args[1].scale)
            return first
        if func is _aten.as_strided.default:
            rows, columns = args[1]
            return Bytes(first.payload[:rows, :columns], first.scale[:rows])
        if func in (_aten.detach.default, _aten.view.default, _aten.alias.default):
            return Bytes(first.payload.detach(), first.scale.detach())
        if func in (_aten.empty_like.default, _aten.clone.default, _aten._to_copy.default):
            device = (kwargs or {}).get("device", first.device)
            return Bytes(
                *(
                    func(part, device=device) if func is not _aten.clone.default else part.clone()
                    for part in (first.payload, first.scale)
                )
            )
        raise NotImplementedError(f"{func} of {cls.__name__}")

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.payload, self.scale), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        payload, scale = gathered
        if out is not None:
            assert payload.untyped_storage().data_ptr() == out.payload.untyped_storage().data_ptr()
            return None
        return Bytes(payload, scale), gathered
