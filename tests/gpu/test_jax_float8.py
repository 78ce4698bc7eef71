"""Float8 in ``jax_impl`` on a GPU: factors of products are float8, and numbers are those of rounded factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu import jax_jobs as jobs
from tests.gpu.devices import needs_jax_device
from tests.gpu.jax_process import JaxProcess

pytestmark = needs_jax_device


def has_float8_kernels() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_made_in_float8_and_are_those_of_rounded_factors(
    jax_process: JaxProcess, dtype: str
) -> None:
    report = jax_process.run(jobs.float8_product, dtype, (64, 128, 256))
    for mine, want in zip(report["computed"], report["expected"], strict=True):
        # Tensor cores sum float8 products in 14 bits or so before the sums become float32, and TF32, of which the
        # gradient of the weight is a product, has 11 bits.
        step = 2.0**-8 if dtype == "bfloat16" else 2.0**-10
        np.testing.assert_allclose(mine, want, rtol=step, atol=np.abs(want).max() * 2.0**-11)
    if has_float8_kernels():
        print(report["lines"], report["products"])
        # Forward, and for the gradient of the input.
        assert report["products"]["without Triton"] == 2


@pytest.mark.parametrize("products", [False, True])
def test_a_decoder_with_float8_weights_learns_as_one_in_bfloat16(
    jax_process: JaxProcess, products: bool
) -> None:
    losses, expected, calls = jax_process.run(jobs.float8_training, "float8_e4m3fn", products)
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert losses != expected
    if has_float8_kernels():
        projections = 7 * jobs.CONFIG.n_layers + 1
        assert calls == (2 * projections if products else 0)


def test_mxfp8_weights_learn_as_those_in_bfloat16(jax_process: JaxProcess) -> None:
    losses, expected, _ = jax_process.run(jobs.float8_training, "mxfp8", False)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses != expected
