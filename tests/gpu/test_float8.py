"""Float8 in ``torch_impl`` on a GPU: quantization has the CPU's bits, and products are made by float8 kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.devices import DEVICE, ON_GPU, needs_device
from tests.gpu.networks import LAYERS, adamw, loss_of, network, rows, same_bits, sharded, train
from torch_impl import MixedPrecisionPolicy
from torch_impl.runtime.gather.float8_products import _cpus_have_kernels, _Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_kernels() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9) if ON_GPU else _cpus_have_kernels()


def policy(gather: Any, **options: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype=gather, **options)}


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To numbers of ``dtype`` times the least power of two with which none is too large, in float64."""
    wide = values.cpu().double()
    power = 2.0 ** math.ceil(math.log2(wide.abs().max().item() / torch.finfo(dtype).max))
    return (wide / power).float().to(dtype).double() * power


class Products(TorchDispatchMode):
    """Notes the dtypes of the factors of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.overloadpacket.__name__:
            factors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
            self.seen.append((func.overloadpacket.__name__, factors[0].dtype, factors[1].dtype))
        return func(*args, **(kwargs or {}))

    def of(self, first: torch.dtype, second: torch.dtype) -> int:
        return sum(product[1:] == (first, second) for product in self.seen)


@needs_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [64, 17])
def test_a_product_is_that_of_rounded_factors(dtype: torch.dtype, count: int) -> None:
    """Of any number of rows; the gradient of the weight is a product of factors as they are."""
    random = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(shape, generator=random).to(DEVICE, dtype)
        for shape in ((count, 128), (256, 128), (count, 256))
    )
    x.requires_grad_()
    weight.requires_grad_()
    counted = has_kernels()
    with Products() as products:
        output = _Product.apply(x, weight)
        output.backward(grad)
    expected = [
        rounded(x.detach(), E4M3) @ rounded(weight.detach(), E4M3).t(),
        rounded(grad, E5M2) @ rounded(weight.detach(), E4M3),
    ]
    for mine, want in zip((output.detach(), x.grad), expected, strict=True):
        assert mine.dtype == dtype
        # Tensor cores sum float8 products in 14 bits or so before the sums become float32.
        step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
        torch.testing.assert_close(
            mine.cpu().double(), want, rtol=step, atol=want.abs().max().item() * 2.0**-11
        )
    if counted:
        assert products.of(E4M3, E4M3) == 1
        assert products.of(E5M2, E4M3) == 1


@needs_device
def test_linear_modules_of_a_unit_multiply_in_float8(one_rank: None) -> None:
    model = sharded(**policy(E4M3, float8_products=True))
    counted = has_kernels()
    with Products() as products:
        loss_of(model, rows(0).requires_grad_()).backward()
    if counted:
        linears = 2 * LAYERS + 1
        assert products.of(E4M3, E4M3) == linears
        assert products.of(E5M2, E4M3) == linears


@needs_device
@pytest.mark.parametrize(
    ("gather", "products", "within"), [("mxfp8", False, 0.02), (E4M3, False, 0.02), (E4M3, True, 0.05)]
)
def test_float8_weights_learn_as_those_in_bfloat16(
    one_rank: None, gather: Any, products: bool, within: float
) -> None:
    usual, model = sharded(**policy(None)), sharded(**policy(gather, float8_products=products))
    expected, losses = train(usual, adamw(usual), range(15)), train(model, adamw(model), range(15))
    assert losses == pytest.approx(expected, rel=within)
    assert losses != expected


@needs_device
@pytest.mark.parametrize("gather", ["mxfp8", E4M3])
def test_gathered_weights_have_the_bits_that_a_cpu_quantizes(one_rank: None, gather: Any) -> None:
    """Of what forward computes with, in float32, where nothing is rounded a second time."""
    from tests.support.bridge import float8_reference

    model = sharded(mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, gather_dtype=gather))
    plain = network()
    model.unshard()
    for layer, want in zip(model.layers, plain.layers, strict=True):
        layer.unshard()
        matrix = want.up.weight.detach().cpu().numpy()
        quantize, dequantize = (
            (float8_reference.quantize_rows, float8_reference.dequantize_rows)
            if gather == "mxfp8"
            else (float8_reference.quantize_tensor, float8_reference.dequantize_tensor)
        )
        expected = torch.from_numpy(dequantize(*quantize(matrix)).copy())
        assert same_bits([layer.up.weight], [expected])
        assert not torch.equal(layer.up.weight.detach().cpu(), torch.from_numpy(matrix))
