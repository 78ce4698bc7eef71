"""Main weights in half precision: both halves compute in float32 and round once, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_impl.models
import torch_impl.models
from bridge.core.formats import open_checkpoint
from jax_impl import main_weight_adamw, main_weight_muon, main_weight_sgd
from tests.parity.test_momentum import convert
from torch_impl import MainWeightAdamW, MainWeightMuon, MainWeightSGD

pytestmark = pytest.mark.optimized

STEPS = 30
SHAPES = [(7, 5), (13,), (64, 48), (), (3, 16, 8)]
HALVES = ["bfloat16", "float16"]
LOW = [None, "bfloat16", "float16", "float8_e4m3fn"]


def values(seed: int, spread: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Of scales over ``spread`` powers of ten; float16 has some of them below its smallest normal number."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(s) * 10.0 ** rng.uniform(-spread, 0, s)).astype(np.float32) for s in shapes]


def bits(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).tobytes()


def trained(
    dtype: str, mine: Any, optimizer: Any, gradients: str, shapes: list[tuple[int, ...]] = SHAPES
) -> tuple[list[torch.nn.Parameter], Any, dict[str, jax.Array], Any]:
    """Weights and state of torch's optimizer ``mine(params)``, and of JAX's ``optimizer``, after the same steps."""
    params = [torch.nn.Parameter(torch.tensor(x).to(getattr(torch, dtype))) for x in values(0, 4, shapes)]
    weights = {str(n): jnp.asarray(x).astype(dtype) for n, x in enumerate(values(0, 4, shapes))}
    theirs = mine(params)
    state, step = optimizer.init(weights), jax.jit(optimizer.apply)
    for number in range(1, STEPS + 1):
        slopes = values(number, 3, shapes)
        for param, slope in zip(params, slopes, strict=True):
            # Torch wants gradients in the dtype of the parameter, unless a unit of ours says otherwise.
            param.grad = torch.tensor(slope).to(getattr(torch, dtype))
        theirs.step()
        rounded = [jnp.asarray(slope).astype(dtype).astype(gradients) for slope in slopes]
        weights, state = step({str(n): x for n, x in enumerate(rounded)}, state, weights)
    return params, theirs, weights, state


@pytest.mark.fast_cases("bfloat16-float16-float32", "bfloat16-float8_e4m3fn-float32", "float16-bfloat16-own")
@pytest.mark.parametrize("gradients", ["float32", "own"])
@pytest.mark.parametrize("stored", LOW)
@pytest.mark.parametrize("dtype", HALVES)
def test_adamw_has_the_same_bits(dtype: str, stored: str | None, gradients: str) -> None:
    low = (
        {}
        if stored is None
        else {key: getattr(torch, stored) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    )
    params, theirs, weights, state = trained(
        dtype,
        lambda params: MainWeightAdamW(params, lr=1e-2, weight_decay=0.1, **low),
        main_weight_adamw(1e-2, weight_decay=0.1, mu_dtype=stored, nu_dtype=stored, torch_vector_bytes=32),
        dtype if gradients == "own" else gradients,
    )
    for number, param in enumerate(params):
        name, held = str(number), theirs.state[param]
        assert weights[name].dtype == dtype
        assert bits(weights[name]) == bits(param), number
        for key, moment in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            assert bits(getattr(state, key)[name]) == bits(held[moment]), (key, number)
            if f"{moment}_scale" in held:
                assert bits(getattr(state, f"{key}_scale")[name]) == bits(held[f"{moment}_scale"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "momentum_dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_sgd_has_the_same_bits(dtype: str, options: dict[str, Any]) -> None:
    low = {key: getattr(torch, x) for key, x in options.items() if key == "momentum_dtype"}
    params, theirs, weights, state = trained(
        dtype,
        lambda params: MainWeightSGD(params, lr=0.03, **{**options, **low}),
        main_weight_sgd(0.03, **options),
        dtype,
    )
    for number, param in enumerate(params):
        assert bits(weights[str(number)]) == bits(param), number
        if options:
            assert bits(state.trace[str(number)]) == bits(theirs.state[param]["momentum_buffer"])


def test_muon_decays_weights_to_the_same_bits() -> None:
    """Without a direction, whose products have other sums in the two halves."""
    arrays = values(0, 4, [(7, 5), (64, 48)])
    params = [torch.nn.Parameter(torch.tensor(x).bfloat16()) for x in arrays]
    theirs = MainWeightMuon(params, lr=0.02)
    weights = {str(n): jnp.asarray(x).astype("bfloat16") for n, x in enumerate(arrays)}
    optimizer = main_weight_muon(0.02)
    state, step = optimizer.init(weights), jax.jit(optimizer.apply)
    for _ in range(5):
        for param in params:
            param.grad = torch.zeros_like(param)
        theirs.step()
        weights, state = step(jax.tree.map(jnp.zeros_like, weights), state, weights)
    for number, param in enumerate(params):
        assert bits(weights[str(number)]) == bits(param)


def test_muon_has_the_same_momentum_and_near_weights() -> None:
    lr, shapes = 0.02, [(7, 5), (64, 48), (3, 16, 8)]
    params, theirs, weights, state = trained(
        "bfloat16",
        lambda params: MainWeightMuon(params, lr=lr),
        main_weight_muon(lr, outputs=-2, use_muon=lambda path, leaf: True),
        "bfloat16",
        shapes,
    )
    for number, param in enumerate(params):
        assert weights[str(number)].dtype == jnp.bfloat16
        assert bits(state.trace[str(number)]) == bits(theirs.state[param]["momentum_buffer"])
        ours = np.asarray(weights[str(number)], np.float32)
        expected = param.detach().float().numpy()
        # Of the orthogonal directions, as in test_momentum.py; and of weights, which then round to other numbers.
        error = 4 * 2**-8 * 2 * lr * STEPS**0.5 + STEPS**0.5 * 2**-8 * np.abs(expected).max()
        assert np.abs(ours - expected).max() < error


@pytest.mark.slow
def test_a_checkpoint_of_bfloat16_weights_hops_there_and_back_exactly(tmp_path: Path) -> None:
    model = torch_impl.models.Decoder(torch_impl.models.DecoderConfig()).to(torch.bfloat16)
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
    sizes = {"model": {"head_dim": model.layers[0].attention.head_dim}}

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
        optimizer.step()

    step(0)
    torch_impl.save_checkpoint(tmp_path / "torch", model, optimizer, sizes)
    convert(tmp_path / "torch", tmp_path / "jax")
    twin = jax_impl.models.Decoder(jax_impl.models.DecoderConfig(), rngs=nnx.Rngs(0))
    plan, _ = jax_impl.fully_shard(twin, jax_impl.data_parallel_mesh(2), main_dtype="bfloat16")
    state = jax_impl.load_checkpoint(tmp_path / "jax", plan, main_weight_adamw(1e-2)).state
    assert {array.dtype.name for array in state.weights.values()} == {"bfloat16"}
    assert {array.dtype.name for array in state.opt_state.mu.values()} == {"float32"}
    jax_impl.save_checkpoint(tmp_path / "again", plan, state, sizes)
    convert(tmp_path / "again", tmp_path / "back")
    with open_checkpoint(tmp_path / "torch") as sent, open_checkpoint(tmp_path / "back") as back:
        names = {name for name in sent.tensors if name.startswith(("model.", "optimizer.state."))}
        assert names <= back.tensors.keys()
        for name in names:
            assert bits(back.read(name)) == bits(sent.read(name)), name
    torch_impl.load_checkpoint(tmp_path / "back", model, optimizer)
    step(1)
