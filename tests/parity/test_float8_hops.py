"""A run with float8 moments goes from torch to JAX and back: payload and scales to the bit, and it trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flax import nnx

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.scaled import read_decoded
from jax_impl import data_parallel_mesh, load_checkpoint, main_weight_adamw, make_train_step, plan_sharding
from jax_impl import save_checkpoint as save_jax
from jax_impl.models import Decoder as JaxDecoder
from jax_impl.models import DecoderConfig as JaxConfig
from jax_impl.models import next_token_loss as jax_loss
from torch_impl import MainWeightAdamW
from torch_impl import load_checkpoint as load_torch
from torch_impl import save_checkpoint as save_torch
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

SIZES = {
    "vocab_size": 23,
    "d_model": 14,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "d_ff": 18,
}
TRAIN = {"model": {"head_dim": SIZES["head_dim"]}}
MOMENTS = ("exp_avg", "exp_avg_sq")


def tokens(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, SIZES["vocab_size"], (4, 9)).astype(np.int32)


def torch_step(model: Decoder, optimizer: MainWeightAdamW, index: int) -> float:
    rows = torch.from_numpy(tokens(index)).long()
    loss = next_token_loss(model(rows[:, :-1]), rows[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def torch_run(seed: int) -> tuple[Decoder, MainWeightAdamW]:
    model = Decoder(DecoderConfig(**SIZES))
    model.init_weights(seed)
    dtypes = {f"{key}_dtype": torch.float8_e4m3fn for key in MOMENTS}
    return model, MainWeightAdamW(model.parameters(), lr=0.01, weight_decay=0.1, **dtypes)


def assert_equal(path: Path, other: Path) -> None:
    with open_checkpoint(path) as checkpoint, open_checkpoint(other) as expected:
        assert {n: (i.shape, i.dtype) for n, i in checkpoint.tensors.items()} == {
            n: (i.shape, i.dtype) for n, i in expected.tensors.items()
        }
        for name in expected.tensors:
            assert checkpoint.read(name).tobytes() == expected.read(name).tobytes(), name


def decoded(path: Path) -> dict[str, np.ndarray]:
    """The numbers of all moments of torch's names, and the weights."""
    with open_checkpoint(path) as reader:
        reads = {name: reader.read(name) for name in reader.tensors if name.startswith("model")}
        for name in reader.tensors:
            if name.endswith(MOMENTS):
                scales = f"{name}_scale"
                reads[name] = (
                    read_decoded(reader, name, scales) if scales in reader.tensors else reader.read(name)
                )
    return reads


@pytest.mark.slow
def test_torch_to_jax_to_torch(tmp_path: Path) -> None:
    model, optimizer = torch_run(1)
    for index in range(3):
        torch_step(model, optimizer, index)
    save_torch(tmp_path / "torch", model, optimizer, TRAIN)
    # The hops themselves change no bit.
    convert(tmp_path / "torch", tmp_path / "orbax", mapping="decoder")
    convert(tmp_path / "orbax", tmp_path / "back", mapping="decoder")
    assert_equal(tmp_path / "back", tmp_path / "torch")

    # JAX goes on from torch's payload and scales, decoded.
    config = JaxConfig(**SIZES)
    plan = plan_sharding(
        nnx.eval_shape(lambda: JaxDecoder(config, rngs=nnx.Rngs(0))),
        data_parallel_mesh(2),
        strategy="optim_grads_params",
    )
    adamw = main_weight_adamw(0.01, weight_decay=0.1, mu_dtype="float8_e4m3fn", nu_dtype="float8_e4m3fn")
    options = {"mapping": "decoder", "moments": "convert"}
    state = load_checkpoint(tmp_path / "torch", plan, adamw, **options).state
    step = make_train_step(plan, lambda model, rows: jax_loss(model(rows[:, :-1]), rows[:, 1:]), adamw)
    losses = []
    for index in (3, 4):
        state, metrics = step(state, tokens(index))
        losses.append(float(metrics["loss"]))
    expected = [torch_step(model, optimizer, index) for index in (3, 4)]
    # Moments were rounded again, for rows of JAX; wrong ones would change the losses by per cents.
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses[1] == pytest.approx(expected[1], rel=2e-3)

    # And back, each half by its own save and load, to torch's names and layouts.
    save_jax(tmp_path / "jax", plan, state, TRAIN, mapping="decoder")
    plain = tmp_path / "plain"
    save_jax(plain, plan, state, TRAIN)
    convert(plain, tmp_path / "there", to="dcp", mapping="decoder")
    convert(tmp_path / "there", tmp_path / "again", to="orbax", mapping="decoder")
    assert_equal(tmp_path / "again", plain)
    other, its = torch_run(7)
    load_torch(tmp_path / "jax", other, its, **options)
    save_torch(tmp_path / "loaded", other, its, TRAIN)
    before, after = decoded(tmp_path / "there"), decoded(tmp_path / "loaded")
    assert before.keys() == after.keys()
    for name, values in before.items():
        if name.startswith("model"):
            np.testing.assert_array_equal(after[name], values)
        else:
            # Half the spacing of float8, of the largest of a row.
            atol = float(np.abs(values).max()) / 16
            np.testing.assert_allclose(after[name], values, rtol=0, atol=atol)
    state, metrics = step(state, tokens(5))
    assert torch_step(other, its, 5) == pytest.approx(float(metrics["loss"]), rel=1e-5)
