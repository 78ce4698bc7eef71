"""A checkpoint of transformers' Trainer goes on in flax, and back in PyTorch, with losses as if it had never moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint
from flax import nnx

from bridge import convert
from jax_impl.models import CausalLM, CausalLMConfig

transformers = pytest.importorskip("transformers")
RATE, DECAY, BEFORE, AFTER = 1e-2, 0.1, 3, 3


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 64, size=(4, 12))


class Training:
    """What `Trainer` does: AdamW with one group of weights that decay and one without, and a falling rate."""

    def __init__(self, model: Any) -> None:
        self.model = model.double()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            for group in self.optimizer.param_groups:
                group["lr"] = RATE / (1 + step)
            tokens = torch.from_numpy(batch(step))
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def save(self, folder: Path) -> Path:
        """As the Trainer lays it out, and both together, as `inspect` says."""
        self.model.save_pretrained(folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        state = {"model": read.state_dict(), "optimizer": torch.load(folder / "optimizer.pt")}
        torch.save(state, folder.parent / f"{folder.name}.pt")
        return folder.parent / f"{folder.name}.pt"


def started(seed: int) -> Training:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    return Training(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
def test_a_trainers_checkpoint_goes_on_in_flax_and_back(tmp_path: Path) -> None:
    straight = started(1)
    straight.train(0, BEFORE)
    source = straight.save(tmp_path / "checkpoint-3")
    expected = straight.train(BEFORE, 2 * AFTER)

    with jax.enable_x64(True):
        config = CausalLMConfig.from_hf(json.loads((tmp_path / "checkpoint-3/config.json").read_text()))
        graph, params = nnx.split(CausalLM(config, rngs=nnx.Rngs(0)), nnx.Param)
        decays = jax.tree.map(lambda leaf: leaf.ndim > 1, nnx.to_pure_dict(params))
        optimizer = optax.adamw(lambda step: RATE / (1 + step), weight_decay=DECAY, mask=decays)

        def start() -> dict[str, Any]:
            weights = jax.tree.map(lambda leaf: leaf.astype(float), nnx.to_pure_dict(params))
            return {"params": weights, "opt_state": optimizer.init(weights)}

        shapes = jax.eval_shape(start)
        report = convert(
            source, tmp_path / "flax", mapping="llama", like=shapes, optimizer_order="model", axes={"d": 4}
        )
        assert report.filled == {"opt_state/2/count": "the source's step, 3"}
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(tmp_path / "flax", shapes)

        def loss_of(weights: Any, tokens: jax.Array) -> jax.Array:
            nnx.replace_by_pure_dict(params, weights)
            logits = nnx.merge(graph, params)(tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        weights, opt_state, losses = state["params"], state["opt_state"], []
        for step in range(BEFORE, BEFORE + AFTER):
            loss, gradients = jax.value_and_grad(loss_of)(weights, batch(step))
            updates, opt_state = optimizer.update(gradients, opt_state, weights)
            weights = optax.apply_updates(weights, updates)
            losses.append(float(loss))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "flax_6", {"params": weights, "opt_state": opt_state})
    # Both frameworks compute rotary positions and norms in float32.
    assert losses == pytest.approx(expected[:AFTER], rel=1e-6)

    again = started(2)
    again.train(0, 1)
    like = again.save(tmp_path / "own")
    convert(
        tmp_path / "flax_6",
        tmp_path / "back",
        mapping="llama",
        like=like,
        optimizer_order="model",
        axes={"d": 4},
    )
    whole = {"model": again.model.state_dict(), "optimizer": again.optimizer.state_dict()}
    torch.distributed.checkpoint.load(whole, checkpoint_id=tmp_path / "back", no_dist=True)
    again.model.load_state_dict(whole["model"])
    again.optimizer.load_state_dict(whole["optimizer"])
    assert again.train(BEFORE + AFTER, AFTER) == pytest.approx(expected[AFTER:], rel=1e-6)
