"""The two decoders are one function: same logits, loss and gradients, in float64 where rounding hides nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_impl.models.decoder as jax_decoder
import torch_impl.models.decoder as torch_decoder
from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.relay.config import RelayConfig
from torch_impl import save_checkpoint

SIZES = dataclasses.asdict(RelayConfig.load("quick").model)


def as_jax_tree(model: torch_decoder.Decoder, folder: Path) -> dict[str, np.ndarray]:
    """The torch weights under JAX's names and in JAX's layouts, by way of the two checkpoint formats."""
    train = {"model": {name: int(value) for name, value in SIZES.items()}}
    save_checkpoint(folder / "dcp", model, None, train)
    convert(folder / "dcp", folder / "orbax", mapping="decoder")
    with open_checkpoint(folder / "orbax") as checkpoint:
        names = [name for name in checkpoint.tensors if name.startswith("params/")]
        return {name.removeprefix("params/"): checkpoint.read(name) for name in names}


def jax_model(weights: dict[str, np.ndarray]) -> nnx.Module:
    config = jax_decoder.DecoderConfig(**SIZES)
    graph, state = nnx.split(nnx.eval_shape(lambda: jax_decoder.Decoder(config, rngs=nnx.Rngs(0))))
    flat = {
        path: leaf.replace(jnp.asarray(weights["/".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    }
    assert len(flat) == len(weights)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def test_both_configs_have_the_same_fields_and_defaults() -> None:
    fields = [
        [(field.name, field.default) for field in dataclasses.fields(module.DecoderConfig)]
        for module in (torch_decoder, jax_decoder)
    ]
    assert fields[0] == fields[1]
    assert set(SIZES) <= {name for name, _ in fields[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "logits_tolerance", "gradient_tolerance"),
    [("float64", 1e-12, 1e-11), pytest.param("float32", 3e-6, 3e-5, marks=pytest.mark.slow)],
)
def test_logits_loss_and_gradients_agree(
    tmp_path: Path, dtype: str, logits_tolerance: float, gradient_tolerance: float
) -> None:
    random = np.random.default_rng(5)
    tokens = random.integers(0, SIZES["vocab_size"], (3, 18))
    model = torch_decoder.Decoder(torch_decoder.DecoderConfig(**SIZES))
    model.init_weights(11)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4)  # large enough that softmax and SiLU are far from linear
    model = model.to(getattr(torch, dtype))
    inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    logits = model(inputs)
    loss = torch_decoder.next_token_loss(logits, targets)
    loss.backward()
    weights = as_jax_tree(model, tmp_path / "weights")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    gradients = as_jax_tree(model, tmp_path / "gradients")

    with jax.enable_x64(dtype == "float64"):
        twin = jax_model(weights)

        def twin_loss(twin: nnx.Module) -> tuple[jax.Array, jax.Array]:
            out = twin(jnp.asarray(tokens[:, :-1]))
            return jax_decoder.next_token_loss(out, jnp.asarray(tokens[:, 1:])), out

        (twin_value, twin_logits), twin_gradients = nnx.value_and_grad(twin_loss, has_aux=True)(twin)
        assert twin_logits.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(twin_logits),
            logits.detach().numpy(),
            rtol=0,
            atol=logits_tolerance * logits.detach().abs().max().item(),
        )
        assert float(twin_value) == pytest.approx(loss.item(), rel=logits_tolerance)
        asarrays = {
            "/".join(map(str, path)): np.asarray(leaf[...])
            for path, leaf in nnx.to_flat_state(twin_gradients)
        }
    assert asarrays.keys() == gradients.keys()
    for name, expected in gradients.items():
        scale = np.linalg.norm(expected)
        assert scale > 0, name
        assert np.linalg.norm(asarrays[name] - expected) <= gradient_tolerance * scale, name
