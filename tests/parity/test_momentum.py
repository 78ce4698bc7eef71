"""Momentum in both halves: SGD bit for bit, Muon but for the products of bfloat16 matrices; a hop there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jax_impl.models
import torch_impl.models
from bridge.commands.main import main
from bridge.core.formats import open_checkpoint
from jax_impl import main_weight_muon, main_weight_sgd
from torch_impl import MainWeightMuon, MainWeightSGD

pytestmark = pytest.mark.optimized

SHAPES = [(7, 5), (13,), (64, 48), (), (5, 33)]
SGD: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
LOW = [None, "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def values(seed: int, dtype: Any, shapes: list[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(10 ** rng.uniform(-2, 2) * rng.standard_normal(s), dtype) for s in shapes]


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.each_value
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("stored", LOW)
def test_sgd_is_torch_s_bit_for_bit(stored: str | None, options: dict[str, Any], double: bool) -> None:
    if stored is not None and (double or "momentum" not in options):
        pytest.skip("one dtype of weights, and momentum, tell all")
    dtype = np.float64 if double else np.float32
    with jax.enable_x64(double):
        arrays = values(0, dtype)
        params = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in arrays]
        low = {} if stored is None else {"momentum_dtype": getattr(torch, stored)}
        mine = MainWeightSGD(params, lr=0.03, **options, **low)
        stock = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in arrays]
        theirs = torch.optim.SGD(stock, lr=0.03, **options)
        optimizer = main_weight_sgd(0.03, **options, momentum_dtype=stored)
        weights = [jnp.asarray(x) for x in arrays]
        state, step = optimizer.init(weights), jax.jit(optimizer.apply)
        for number in range(1, 51):
            slopes = values(number, dtype)
            for parameter, other, slope in zip(params, stock, slopes, strict=True):
                parameter.grad, other.grad = torch.from_numpy(slope), torch.from_numpy(slope.copy())
            mine.step()
            theirs.step()
            weights, state = step([jnp.asarray(x) for x in slopes], state, weights)
        for number, param in enumerate(params):
            assert bits(weights[number]) == bits(param.detach().numpy())
            if stored is None:
                assert torch.equal(param, stock[number])
            if "momentum" in options:
                held = mine.state[param]
                buffer = held["momentum_buffer"]
                assert bits(state.trace[number]) == bits(buffer.reshape(-1).view(torch.uint8).numpy())
                if "momentum_buffer_scale" in held:
                    assert bits(state.trace_scale[number]) == bits(held["momentum_buffer_scale"].numpy())


MATRICES = [(7, 5), (64, 48), (32, 96), (3, 16, 8)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.4},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "weight_decay": 0.5},
    ],
)
def test_muon_is_torch_s_within_the_rounding_of_its_products(options: dict[str, Any]) -> None:
    lr, steps = 0.02, 10
    arrays = values(0, np.float32, MATRICES)
    params = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in arrays]
    mine = MainWeightMuon(params, lr=lr, **options)
    optimizer = main_weight_muon(lr, **options, outputs=-2, use_muon=lambda path, leaf: True)
    weights = {str(number): jnp.asarray(x) for number, x in enumerate(arrays)}
    state, step = optimizer.init(weights), jax.jit(optimizer.apply)
    for number in range(1, steps + 1):
        slopes = values(number, np.float32, MATRICES)
        for param, slope in zip(params, slopes, strict=True):
            param.grad = torch.from_numpy(slope)
        mine.step()
        weights, state = step({str(n): jnp.asarray(x) for n, x in enumerate(slopes)}, state, weights)
    for number, param in enumerate(params):
        # Momentum comes before the products.
        assert bits(state.trace[str(number)]) == bits(mine.state[param]["momentum_buffer"].numpy())
        rate = lr * (0.2 * max(param.shape[-2:]) ** 0.5 if "adjust_lr_fn" in options else 2)
        # Of elements up to 1, some units of bfloat16 in each step.
        error = np.abs(np.asarray(weights[str(number)]) - param.detach().numpy()).max()
        assert error < 4 * 2**-8 * rate * steps**0.5, error


def test_muon_has_optax_s_direction_and_rate() -> None:
    """Without nesterov, whose average optax corrects for its zero start."""
    weight, slope = (jnp.asarray(x) for x in values(3, np.float32, [(24, 40), (24, 40)]))
    optimizer = main_weight_muon(0.02, weight_decay=0.0, nesterov=False)
    updated, _ = optimizer.apply({"a": slope}, optimizer.init({"a": weight}), {"a": weight})
    stock = optax.contrib.muon(0.02, nesterov=False)
    updates, _ = stock.update({"a": slope}, stock.init({"a": weight}), {"a": weight})
    np.testing.assert_allclose(updated["a"] - weight, updates["a"], atol=0.02 * 2**-5)


TRAINED = {
    "sgd": (
        lambda model, dtype: MainWeightSGD(model.parameters(), lr=0.1, momentum=0.9, momentum_dtype=dtype),
        lambda dtype: main_weight_sgd(0.1, 0.9, momentum_dtype=dtype),
    ),
    "muon": (
        lambda model, dtype: MainWeightMuon(
            model.named_parameters(),
            use_muon=lambda name, param: param.ndim == 2 and "mlp" in name,
            momentum_dtype=dtype,
        ),
        lambda dtype: main_weight_muon(
            use_muon=lambda path, leaf: len(leaf.shape) == 2 and "mlp" in path, momentum_dtype=dtype
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_hops_there_and_back_exactly(tmp_path: Path, name: str, dtype: str) -> None:
    in_torch, in_jax = TRAINED[name]
    model = torch_impl.models.Decoder(torch_impl.models.DecoderConfig())
    optimizer = in_torch(model, getattr(torch, dtype))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    sizes = {"head_dim": model.layers[0].attention.head_dim}
    torch_impl.save_checkpoint(tmp_path / "torch", model, optimizer, {"model": sizes})
    convert(tmp_path / "torch", tmp_path / "jax")
    twin = jax_impl.models.Decoder(jax_impl.models.DecoderConfig(), rngs=nnx.Rngs(0))
    plan, _ = jax_impl.fully_shard(twin, jax_impl.data_parallel_mesh(2))
    state = jax_impl.load_checkpoint(tmp_path / "jax", plan, in_jax(dtype)).state
    assert int(state.opt_state.count) == 2
    jax_impl.save_checkpoint(tmp_path / "again", plan, state, {"model": sizes})
    convert(tmp_path / "again", tmp_path / "back")
    with open_checkpoint(tmp_path / "torch") as sent, open_checkpoint(tmp_path / "back") as back:
        names = {
            tensor_name
            for tensor_name in sent.tensors
            if tensor_name.startswith(("model.", "optimizer.state."))
        }
        assert any(tensor_name.endswith(".momentum_buffer") for tensor_name in names)
        assert names <= back.tensors.keys()
        for tensor_name in names:
            assert bits(back.read(tensor_name)) == bits(sent.read(tensor_name)), tensor_name


def convert(source: Path, target: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["twinshard", "convert", str(source), str(target), "--mapping", "decoder"])
        with pytest.raises(SystemExit) as done:
            main()
    assert done.value.code == 0
