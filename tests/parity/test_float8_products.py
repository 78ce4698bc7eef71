"""One product in float8 in both halves: the same output and gradients, to the order of sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jax_impl import float8_dot_general
from tests.support.bridge import float8_reference
from torch_impl.runtime.gather.float8_products import computing_class

# In units of the last place that the dtype has.
DTYPES = {"float32": (torch.float32, 2.0**-20), "bfloat16": (torch.bfloat16, 2.0**-8)}


def products_of(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(array, np.float32) for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(6, 32, 48), (3, 32, 40)])
def test_both_halves_multiply_the_same_numbers(dtype: str, sizes: tuple[int, int, int]) -> None:
    rows, inputs, outputs = sizes
    random = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 10.0 ** random.integers(-4, 2, shape)).astype(np.float32)

    payload, scale = float8_reference.quantize_tensor(values(outputs, inputs))
    weight = float8_reference.dequantize_tensor(payload, scale)
    x, grad = values(rows, inputs), values(rows, outputs)

    of_torch, unit = DTYPES[dtype]
    linear = nn.Linear(inputs, outputs, bias=False).to(of_torch)
    linear.__class__ = computing_class(nn.Linear, float8_products=True)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
    torch_x = torch.from_numpy(x).to(of_torch).requires_grad_()
    output = linear(torch_x)
    output.backward(torch.from_numpy(grad).to(of_torch))
    assert torch_x.grad is not None
    assert linear.weight.grad is not None
    theirs = products_of(
        *(tensor.detach().float() for tensor in (output, torch_x.grad, linear.weight.grad.t()))
    )

    @jax.jit
    def compute(x: jax.Array, kernel: jax.Array, grad: jax.Array) -> Any:
        output, back = jax.vjp(lambda x, w: float8_dot_general(x, w, (((1,), (0,)), ((), ()))), x, kernel)
        return output, *back(grad)

    mine = products_of(*compute(*(jnp.asarray(array, dtype) for array in (x, weight.T, grad))))
    plain = products_of(x @ weight.T, grad @ weight, x.T @ grad)
    for product, other, unrounded in zip(mine, theirs, plain, strict=True):
        np.testing.assert_allclose(product, other, rtol=unit, atol=unit * float(np.abs(other).max()))
        assert product.shape == unrounded.shape
    # 40 is no multiple of 16: neither half rounds its factors.
    rounds = not np.allclose(mine[0], plain[0], rtol=0, atol=2.0**-7 * float(np.abs(plain[0]).max()))
    assert rounds == (outputs % 16 == 0)
