"""Checkpoints that the two runtimes write themselves: through the other format and back into the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from flax import nnx

import jax_impl
import torch_impl
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from jax_impl.models import decoder as jax_decoder
from tests.checkpoints.test_convert import assert_same, objects, tensors
from tests.support.ranks import RankGroup
from torch_impl.models import decoder as torch_decoder

SIZES = {
    "vocab_size": 37,
    "d_model": 13,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "d_ff": 19,
}
TRAIN = {"step": 2, "data": {"seed": 7, "position": 96}, "model": SIZES}
HYPERPARAMETERS: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-9, "weight_decay": 0.1}


def torch_step(model: Any, optimizer: Any, step: int) -> float:
    """One step in which every rank has other tokens; returns this rank's loss."""
    rows = np.random.default_rng((dist.get_rank(), step)).integers(0, SIZES["vocab_size"], (2, 9))
    tokens = torch.from_numpy(rows)
    loss = torch_decoder.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def torch_trainer(seed: int, strategy: str, lr: float) -> tuple[Any, Any]:
    model = torch_decoder.Decoder(torch_decoder.DecoderConfig(**SIZES))
    model.init_weights(seed)
    for layer in model.layers:
        torch_impl.fully_shard(layer, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    return model, torch_impl.MainWeightAdamW(model.parameters(), lr=lr, **HYPERPARAMETERS)


def torch_save(path: str) -> None:
    model, optimizer = torch_trainer(3, "optim_grads_params", 1e-2)
    for step in range(2):
        torch_step(model, optimizer, step)
    torch_impl.save_checkpoint(path, model, optimizer, TRAIN)


def torch_resume(path: str, strategy: str) -> tuple[list[float], dict[str, Any]]:
    """Two more steps from a checkpoint, in a trainer that starts from other weights and another lr."""
    model, optimizer = torch_trainer(4, strategy, 1.0)
    train = torch_impl.load_checkpoint(path, model, optimizer)
    return [torch_step(model, optimizer, step) for step in (2, 3)], train["data"]


@pytest.mark.slow
def test_an_uneven_save_of_three_torch_ranks_resumes_on_two_after_a_detour_through_orbax(
    tmp_path: Path, ranks: RankGroup
) -> None:
    ranks.run(3, torch_save, str(tmp_path / "dcp"))
    assert any(len(info) > 1 for info in _chunks(tmp_path / "dcp").values())
    for family in ("decoder", "decoder_stacked"):
        convert(tmp_path / "dcp", tmp_path / family, mapping=family)
        convert(tmp_path / family, tmp_path / f"back-{family}", mapping=family)
        assert_same(tensors(tmp_path / f"back-{family}"), tensors(tmp_path / "dcp"))
        assert objects(tmp_path / f"back-{family}") == objects(tmp_path / "dcp")
        assert diff(tmp_path / "dcp", tmp_path / family, mapping=family).within
    direct = ranks.run(2, torch_resume, str(tmp_path / "dcp"), "optim")
    detour = ranks.run(2, torch_resume, str(tmp_path / "back-decoder"), "optim")
    assert detour == direct
    assert direct[0][1] == TRAIN["data"]


def _chunks(path: Path) -> dict[str, tuple[Any, ...]]:
    from bridge.core.formats import open_checkpoint

    with open_checkpoint(path) as reader:
        return {name: info.chunks for name, info in reader.tensors.items()}


class JaxTrainer:
    """A plan, an optimizer and a step on some of the simulated devices."""

    def __init__(self, devices: int, strategy: str) -> None:
        config = jax_decoder.DecoderConfig(**SIZES)
        model = nnx.eval_shape(lambda: jax_decoder.Decoder(config, rngs=nnx.Rngs(0)))
        mesh = jax_impl.data_parallel_mesh(devices)
        self.plan = jax_impl.plan_sharding(model, mesh, strategy=strategy)
        self.optimizer = jax_impl.main_weight_adamw(1e-2, 0.8, 0.95, eps=1e-9, weight_decay=0.1)
        self.step = jax_impl.make_train_step(self.plan, self.loss, self.optimizer)

    @staticmethod
    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return jax_decoder.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    def run(self, state: Any, steps: range) -> tuple[Any, list[float]]:
        losses = []
        for step in steps:
            rows = np.random.default_rng(step).integers(0, SIZES["vocab_size"], (12, 9))
            state, measured = self.step(state, jnp.asarray(rows))
            losses.append(float(measured["loss"]))
        return state, losses


def test_a_torch_checkpoint_continues_in_jax_and_its_save_returns_to_torch_bit_for_bit(
    tmp_path: Path, ranks: RankGroup
) -> None:
    ranks.run(3, torch_save, str(tmp_path / "dcp"))
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping="decoder")
    trainer = JaxTrainer(4, "optim")
    loaded = jax_impl.load_checkpoint(tmp_path / "orbax", trainer.plan, trainer.optimizer)
    state, losses = trainer.run(loaded.state, range(2, 4))
    assert all(np.isfinite(losses))
    jax_impl.save_checkpoint(tmp_path / "jax", trainer.plan, state, TRAIN, objects=loaded.objects)

    convert(tmp_path / "jax", tmp_path / "returned", mapping="decoder")
    convert(tmp_path / "returned", tmp_path / "again", mapping="decoder")
    assert_same(tensors(tmp_path / "again"), tensors(tmp_path / "jax"))
    assert objects(tmp_path / "returned") == objects(tmp_path / "dcp")
    returned = tensors(tmp_path / "returned")
    assert {
        float(a) for n, a in returned.items() if n.startswith("optimizer.state.") and n.endswith(".step")
    } == {4.0}
    (first, data), *_ = ranks.run(2, torch_resume, str(tmp_path / "returned"), "optim_grads")
    assert all(np.isfinite(first))
    assert data == TRAIN["data"]

    other = JaxTrainer(3, "optim_grads_params")
    resumed = jax_impl.load_checkpoint(tmp_path / "again", other.plan, other.optimizer)
    direct = jax_impl.load_checkpoint(tmp_path / "jax", other.plan, other.optimizer)
    assert other.run(resumed.state, range(4, 6))[1] == other.run(direct.state, range(4, 6))[1]
