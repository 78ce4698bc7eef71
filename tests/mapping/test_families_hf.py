"""Shipped families against Hugging Face's classes: real models, trained, through the bridge into JAX and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from jax_impl.models import next_token_loss
from tests.support.bridge.family_checkpoints import (
    HYPERPARAMETERS,
    config_json,
    dcp_tensors,
    flat,
    head_dim,
    load_dcp,
    moments,
    orbax_tree,
    same_bits,
    save_dcp,
    train_step,
    trained,
)
from tests.support.bridge.family_models import flax_model, flax_weights, hf_logits, hf_model, tokens

JAX_HYPERPARAMETERS = {
    "learning_rate": HYPERPARAMETERS["lr"],
    "b1": HYPERPARAMETERS["betas"][0],
    "b2": HYPERPARAMETERS["betas"][1],
    "eps": HYPERPARAMETERS["eps"],
    "weight_decay": HYPERPARAMETERS["weight_decay"],
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("mixtral", {"tie_word_embeddings": False}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("gpt2", {"tie_word_embeddings": False}),
]


@pytest.mark.fast_cases("mixtral-changes2")
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_trained_model_becomes_flax_and_comes_back_bit_for_bit(tmp_path: Path, family, changes) -> None:
    model, optimizer = trained(family, **changes)
    save_dcp(tmp_path / "dcp", model, optimizer)
    axes = {"d": head_dim(model)}
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family, axes=axes)
    tree = orbax_tree(tmp_path / "orbax")
    weights = dict(flat(tree["params"]))
    same_bits(weights, flax_weights(model))
    adam = tree["opt_state"]
    same_bits(dict(flat(adam["mu"])), moments(model, optimizer, "exp_avg"))
    same_bits(dict(flat(adam["nu"])), moments(model, optimizer, "exp_avg_sq"))
    assert int(adam["count"]) == 2
    expected = hf_logits(model, tokens())
    logits = np.asarray(flax_model(config_json(model), weights)(jnp.asarray(tokens())))
    assert np.abs(logits - expected).max() < 2e-5 * expected.std()
    convert(tmp_path / "orbax", tmp_path / "back", mapping=family, axes=axes)
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "dcp"))
    again = trained(family, steps=1, seed=1, **changes)
    load_dcp(tmp_path / "back", *again)
    assert [train_step(*again, seed) for seed in (2, 3)] == [
        train_step(model, optimizer, seed) for seed in (2, 3)
    ]


@pytest.mark.fast_cases("llama", "mixtral", "gpt2")
@pytest.mark.parametrize("family", ["llama", *(family for family, _ in CASES)])
def test_what_save_pretrained_writes_becomes_flax_and_what_from_pretrained_reads(
    tmp_path: Path, family: str
) -> None:
    model = hf_model(family)
    model.save_pretrained(tmp_path / "hub")
    into = "flax" if family == "llama" else None
    back = "hf" if family in ("llama", "mixtral") else None
    # The size of a head is in config.json; in flax it is an axis.
    convert(tmp_path / "hub", tmp_path / "orbax", mapping=family, into=into)
    tree = orbax_tree(tmp_path / "orbax")
    weights = dict(flat(tree["params"]))
    same_bits(weights, flax_weights(model))
    # As if trained in JAX: nothing says where it came from.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "jax", {"params": tree["params"]})
    convert(tmp_path / "jax", tmp_path / "back", to="safetensors", mapping=family, into=back)
    assert diff(tmp_path / "hub", tmp_path / "orbax", mapping=family).max_ulp == 0
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "back")
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    same_bits({name: tensor.numpy() for name, tensor in again.state_dict().items()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("below", ["", "transformer."])
def test_gpt2_as_the_oldest_files_on_the_hub_have_it(tmp_path: Path, below: str) -> None:
    """Without or with the root of the class, and with causal masks among the weights."""
    model = hf_model("gpt2")
    (model if below else model.transformer).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    weights = load_file(file)
    assert f"{below}wte.weight" in weights
    for layer in range(3):
        weights[f"{below}h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        weights[f"{below}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    save_file(weights, file, {"format": "pt"})
    report = convert(tmp_path / "hub", tmp_path / "orbax", mapping="gpt2")
    assert len(report.dropped) == 6
    renamed = dict(flat(orbax_tree(tmp_path / "orbax")["params"]))
    same_bits(renamed, flax_weights(model))
    logits = np.asarray(flax_model(config_json(model), renamed)(jnp.asarray(tokens())))
    expected = hf_logits(model, tokens())
    assert np.abs(logits - expected).max() < 2e-5 * expected.std()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for into in (None, "torch", "base"):
        back = tmp_path / f"back-{into}"
        # config.json went along, both ways.
        convert(tmp_path / "orbax", back, to="safetensors", mapping="gpt2", into=into)
        again, info = type(model).from_pretrained(back, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        same_bits({n: t.numpy() for n, t in again.state_dict().items()}, state)


def test_llama_with_the_frequencies_that_older_files_hold(tmp_path: Path) -> None:
    model = hf_model("llama")
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        save_file({**load_file(file), name: np.ones(4, np.float32)}, file, {"format": "pt"})
    report = convert(tmp_path / "hub", tmp_path / "orbax", mapping="llama", into="flax")
    assert len(report.dropped) == 2
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), flax_weights(model))


def test_mixtrals_experts_are_one_tensor_each_on_the_hub_and_one_for_all_in_the_class(tmp_path: Path) -> None:
    model, optimizer = trained("mixtral")
    save_dcp(tmp_path / "dcp", model, optimizer)
    model.save_pretrained(tmp_path / "hub")
    axes = {"d": head_dim(model)}
    convert(tmp_path / "hub", tmp_path / "loaded", to="dcp", mapping="mixtral", axes=axes)
    loaded, expected = dcp_tensors(tmp_path / "loaded"), dcp_tensors(tmp_path / "dcp")
    same_bits(loaded, {name: a for name, a in expected.items() if name.startswith("model.")})
    # Moments are cut like their weights.
    convert(tmp_path / "dcp", tmp_path / "cut", to="safetensors", mapping="mixtral", axes=axes)
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    moment = expected["optimizer.state.model.layers.1.mlp.experts.gate_up_proj.exp_avg"]
    half = moment.shape[1] // 2
    for name, part in (("w1", moment[2, :half]), ("w3", moment[2, half:])):
        stored = cut[f"optimizer.state.model.layers.1.block_sparse_moe.experts.2.{name}.weight.exp_avg"]
        assert np.array_equal(stored, part)
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    assert all(np.array_equal(cut[name], array) for name, array in hub.items())
    convert(tmp_path / "cut", tmp_path / "whole", to="dcp", mapping="mixtral", axes=axes)
    same_bits(dcp_tensors(tmp_path / "whole"), expected)


def _batch(seed: int) -> np.ndarray:
    """The rows of `train_step`."""
    return tokens(2, 20, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_training_goes_on_in_jax_and_then_in_torch_with_equal_losses(tmp_path: Path, family) -> None:
    model, optimizer = trained(family, tie_word_embeddings=False)
    save_dcp(tmp_path / "dcp", model, optimizer)
    axes = {"d": head_dim(model)}
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family, axes=axes)
    expected = [train_step(model, optimizer, seed) for seed in range(2, 5)]

    tree = orbax_tree(tmp_path / "orbax")
    flax = flax_model(config_json(model), dict(flat(tree["params"])))
    graphdef, fresh = nnx.split(flax)
    adam = optax.adamw(**JAX_HYPERPARAMETERS)
    empty = adam.init(nnx.to_pure_dict(fresh))
    stored = tree["opt_state"]
    numbered = [nnx.restore_int_paths(each) for each in (tree["params"], stored["mu"], stored["nu"])]
    weights, mu, nu = (jax.tree.map(jnp.asarray, each) for each in numbered)
    state: Any = (empty[0]._replace(count=jnp.asarray(stored["count"]), mu=mu, nu=nu), *empty[1:])

    @jax.jit
    def step(weights: Any, state: Any, rows: jax.Array) -> tuple[jax.Array, Any, Any]:
        def loss(weights: Any) -> jax.Array:
            module = nnx.merge(graphdef, weights)
            return next_token_loss(module(rows[:, :-1]), rows[:, 1:])

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, state = adam.update(gradients, state, weights)
        return value, optax.apply_updates(weights, updates), state

    losses = []
    for seed in (2, 3):
        value, weights, state = step(weights, state, _batch(seed))
        losses.append(float(value))
    assert losses == pytest.approx(expected[:2], rel=1e-5)

    tree = {"params": weights, "opt_state": {"mu": state[0].mu, "nu": state[0].nu, "count": state[0].count}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "trained", jax.tree.map(jnp.asarray, tree))
    convert(tmp_path / "trained", tmp_path / "back", mapping=family, axes=axes)
    again = trained(family, steps=1, seed=1, tie_word_embeddings=False)
    # The tree that JAX saved has no torch hyperparameters.
    load_dcp(tmp_path / "back", *again, partial=True)
    assert train_step(*again, 4) == pytest.approx(expected[2], rel=1e-5)
