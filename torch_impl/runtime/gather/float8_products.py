"""Linear modules that multiply in float8: ``MixedPrecisionPolicy(float8_products=True)``.

    output   = input @ weight^T        e4m3 by e4m3
    d input  = d output @ weight       e5m2 by e4m3
    d weight = d output^T @ input      in the dtype of the input

Each factor of a rank's product has one power of two as its scale, from its largest magnitude. Sums are float32. Weights
that were gathered as float8_e4m3fn are converted back without loss, because they are float8 numbers times a power of
two. If this torch has no kernels for CPUs (such as 2.11), the same float8 numbers are multiplied in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torch_impl.runtime.gather.float8 import inverse_of, magnitudes_of, powers_of, scales_of

_WEIGHT = torch.float8_e4m3fn
_GRADIENT = torch.float8_e5m2
# Kernels require matrices whose dimensions are multiples of this.
_MULTIPLE = 16


class Float8Linear(nn.Linear):
    """A linear module with ``float8_products``, used if there are kernels for its shape and device."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not can_multiply(input, self.weight):
            return super().forward(input)
        output: torch.Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def computing_class(cls: type[nn.Module], float8_products: bool) -> type[nn.Module]:
    """The class that a module gets. Subclasses of ``nn.Linear`` may compute differently, and stay."""
    return Float8Linear if float8_products and cls is nn.Linear else cls


def can_multiply(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are float8 kernels: on CPUs, and on GPUs from compute capability 8.9."""
    # Weights of a model axis are DTensors; in float16 a small scale has changed the weight.
    if type(weight) is not nn.Parameter or input.dtype != weight.dtype or weight.dtype == torch.float16:
        return False
    if any(size % _MULTIPLE for size in weight.shape) or not input.numel():
        return False
    if weight.is_cuda:
        return torch.cuda.get_device_capability(weight.device) >= (8, 9)
    return weight.is_cpu


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        factors = (*_quantized(input, _WEIGHT), *_quantized(weight, _WEIGHT, transposed=True))
        return _multiply(*factors, weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            # The kernels require the second factor in column-major order.
            payload, power = _quantized(weight, _WEIGHT)
            by_columns = payload.view(torch.uint8).t().contiguous().t().view(_WEIGHT)
            of_input = _multiply(*_quantized(grad, _GRADIENT), by_columns, power, weight.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = grad.t() @ input
        return of_input, of_weight


def _quantized(
    values: torch.Tensor, dtype: torch.dtype, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload of a matrix, and the float32 factor that restores its values."""
    wide, largest = values.float(), torch.finfo(dtype).max
    scale = scales_of(magnitudes_of(wide).amax().view(1), int(math.log2(largest)))
    payload = wide.mul(inverse_of(scale)).clamp_(-largest, largest).to(dtype)
    return payload.t() if transposed else payload, powers_of(scale)


def _multiply(
    left: torch.Tensor,
    left_power: torch.Tensor,
    right: torch.Tensor,
    right_power: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    if left.is_cpu and not _cpus_have_kernels():
        return left.float().mm(right.float()).mul_(left_power * right_power).to(dtype)
    return _scaled_product(left, right, left_power, right_power, dtype)


def _scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_power: torch.Tensor,
    right_power: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(left, right, left_power, whole, right_power, whole, output_dtype=dtype)


@functools.cache
def _cpus_have_kernels() -> bool:
    square, unit_scale = torch.zeros(_MULTIPLE, _MULTIPLE).to(_WEIGHT), torch.ones(1)
    try:
        _scaled_product(square, square.t(), unit_scale, unit_scale, torch.float32)
    except NotImplementedError:
        return False
    return True
