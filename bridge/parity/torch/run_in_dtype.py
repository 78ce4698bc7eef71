"""A run of a PyTorch model in one dtype: its copy, its context, and float64 where the code asks for less."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bridge.core.dtype_names import FLOATING
from bridge.parity.torch.leaves import cast, deep_copy, is_leaf, is_sharded

SEED = 0


def has_shards(model: object) -> bool:
    """Whether it is a module of which this process holds only parts of the parameters."""
    return isinstance(model, nn.Module) and any(map(is_sharded, model.parameters()))


def check_unsharded(model: nn.Module) -> None:
    """Raises ValueError that names a parameter of which this process holds only a part."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded (a DTensor): call bridge.parity.capture_torch with the model on all ranks, with "
                "torchrun, and capture_jax with the JAX model, and compare the traces; or build the model unsharded"
            )


def copy_in(model: nn.Module, dtype: str) -> nn.Module:
    """A copy with all floating parameters in ``dtype``.

    Persistent buffers follow. Other buffers are constants that modules computed, often deliberately in float32. These
    buffers, and tensors that are plain attributes, follow only to float64.
    """
    if dtype not in FLOATING:
        raise ValueError(f"expected a dtype among {', '.join(FLOATING)}, got {dtype!r}")
    check_unsharded(model)
    try:
        model = deep_copy(model, {})
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied by copy.deepcopy: {error}") from error
    wanted = getattr(torch, dtype)
    persistent = model.state_dict().keys()
    for parameter in model.parameters():
        parameter.data = cast(parameter.data, wanted)
        parameter.grad = None
    for name, buffer in model.named_buffers():
        if dtype == "float64" or name in persistent:
            buffer.data = cast(buffer.data, wanted)
    for module in model.modules() if dtype == "float64" else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = cast(value, wanted)
    return model


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Registered buffers by name, except sparse and nested ones."""
    return ((name, buffer) for name, buffer in model.named_buffers() if is_leaf(buffer))


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, by name."""
    yield from model.named_parameters()
    yield from buffers_of(model)


def second_copy(module: nn.Module, model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A copy that shares the parameters of ``model`` and has its own buffers and attributes.

    Also returns the copies of everything in the module, by the id of the original.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return deep_copy(module, memo), memo


def counterparts(model: nn.Module, other: nn.Module) -> dict[int, Any]:
    """By id, the modules of a model with their counterparts in its second copy, and the parameters unchanged."""
    modules = zip(model.modules(), other.modules(), strict=True)
    return {
        **{id(module): its for module, its in modules},
        **{id(parameter): parameter for parameter in other.parameters()},
    }


def device_of(model: nn.Module) -> torch.device:
    """The device for batches: that of the first parameter."""
    return next(model.parameters()).device


@contextmanager
def running(model: nn.Module, dtype: str) -> Iterator[None]:
    """The context of each run: equal random numbers, gradients, no compilation, and the requirements of float64."""
    used = {parameter.device for parameter in model.parameters()}
    devices = sorted((device for device in used if device.type == "cuda"), key=str)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        # The same dropout in all runs: a float64 run with other random numbers would be no reference.
        torch.default_generator.manual_seed(SEED)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(SEED)
        # Also without a backward: some torch modules take another path if no gradient is needed.
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            # Compiled code calls no hooks. The stance is set only if dynamo is loaded, because importing
            # it takes seconds.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dtype == "float64":
            stack.enter_context(all_float64())
        yield


WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
# Methods of tensors that show the same bytes as numbers of another dtype.
REINTERPRETING = {Tensor.view}
CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
LIKE_ANOTHER = {Tensor.to, Tensor.type_as}
DRAWN = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}
DRAWN_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
TYPES = {
    f"torch.{device}{name}Tensor": torch.float64
    for device in ("", "cuda.")
    for name in ("Float", "Half", "BFloat16")
}


class _Float64(TorchFunctionMode):
    """Turns requests for narrower floating dtypes into requests for float64, in forward and in backward."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in REINTERPRETING:
            return func(*args, **kwargs)
        if func in (Tensor.backward, torch.autograd.backward) and not kwargs.get("inputs"):
            # torch has left the mode here, and a backward runs in the mode in which it starts.
            with self:
                return _backward(args[0], **kwargs)
        if func in CASTS:
            return _to(args[0], CASTS[func], **kwargs)
        if func in LIKE_ANOTHER and isinstance(other := (*args, *kwargs.values())[1], Tensor):
            func, args, kwargs = Tensor.to, (args[0], other.device, other.dtype, *args[2:]), {}
        # Generators draw different numbers in float64, and runs must be comparable.
        if func in DRAWN and kwargs.get("dtype") != torch.float64:
            # Drawn as in the float32 run, then widened.
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if func in DRAWN_IN_PLACE and args[0].dtype == torch.float64:
            return args[0].copy_(func(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **kwargs))
        if func is Tensor.type:
            args = tuple(TYPES.get(_type_name(value), value) for value in args)
        asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
        args = tuple(_wide(value) for value in args)
        kwargs = {name: _wide(value) for name, value in kwargs.items()}
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.type) and asked in SIXTEEN_BITS and result is args[0]:
            return result.clone()
        # Results of narrow tensors stay narrow: a change of a view must reach the tensor itself.
        if isinstance(result, Tensor) and _narrow(result) and not _any_narrow((*args, *kwargs.values())):
            return result.to(WIDE[result.dtype])
        return result


def _backward(
    tensors: Tensor | Sequence[Tensor],
    *,
    gradient: Tensor | None = None,
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    inputs: None = None,
    **kwargs: Any,
) -> None:
    """``torch.autograd.backward`` from the tensors' edges, for which torch does not call the mode again."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    gradients = grad_tensors if gradient is None else gradient
    if gradients is None or isinstance(gradients, Tensor):
        gradients = [gradients] * len(tensors)
    gradients = [
        torch.ones_like(tensor) if its is None else its
        for tensor, its in zip(tensors, gradients, strict=True)
    ]
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
    torch.autograd.backward(edges, gradients, **kwargs)


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """``torch.nn.functional.grouped_mm`` for experts' weights [E, K, N], because torch has none in float64."""
    if offs is None:
        return rows @ weights
    if (rows.ndim, weights.ndim) != (2, 3):
        raise NotImplementedError(
            f"grouped_mm of {rows.ndim} and {weights.ndim} dimensions has no float64: run the experts eagerly"
        )
    ends = offs.tolist()
    spans = zip([0, *ends[:-1]], ends, weights, strict=True)
    parts = [rows[start:end] @ weight for start, end, weight in spans]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def _to(tensor: Tensor, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """A cast to a narrow dtype. Casts to 16 bits copy, so that changes of the copy do not reach the tensor."""
    # A cast from float64 to float64 returns the tensor itself, while a cast to bfloat16 returns a new one.
    wide = tensor.to(WIDE[dtype], **kwargs)
    return wide.clone() if wide is tensor and dtype in SIXTEEN_BITS else wide


def _wide(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _type_name(value: Any) -> str:
    """The name of ``"torch.FloatTensor"`` and of ``torch.FloatTensor``."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__name__}"
    return value if isinstance(value, str) else ""


def _narrow(tensor: Tensor) -> bool:
    return tensor.dtype in WIDE


def _any_narrow(values: tuple[Any, ...]) -> bool:
    flat = [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]
    return any(isinstance(item, Tensor) and _narrow(item) for item in flat)


@contextmanager
def all_float64() -> Iterator[None]:
    """Inside, computations that PyTorch code requests in float32, bfloat16 or float16 run in float64.

    This covers ``.float()``, ``.to(dtype)``, ``dtype=`` arguments and new tensors without a dtype. Autocast has no
    effect on float64. It does not cover NumPy, extensions that call no function of torch, and the backward of
    ``torch.autograd.grad``. Narrow tensors from before stay narrow: what was rounded stays rounded. Random numbers are
    those of a float32 run.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(default)
