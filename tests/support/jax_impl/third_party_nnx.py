"""Public flax nnx models, each made small by its own configuration."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.support.jax_impl.third_party_programs import (
    Axis,
    Program,
    decoder_loss,
    features,
    labels,
    tokens,
    with_values,
)
from tests.support.third_party import FLAX, JAXTYPING, TUNIX, WADLER_LINDIG, load_file, put_on_path


def flax_gemma(axis: Axis) -> Program:
    put_on_path(WADLER_LINDIG, JAXTYPING)
    folder = FLAX.folder() / "examples" / "gemma"
    example = load_file("flax_examples_gemma", folder / "transformer.py", siblings=True)
    config = example.TransformerConfig.gemma3_1b(
        num_layers=2, num_embed=37, embed_dim=16, hidden_dim=28, head_dim=6, sliding_window_size=3
    )
    model = with_values(example.Transformer(config, rngs=nnx.Rngs(0)))
    return Program(model, decoder_loss, tokens(config.num_embed), ["layers/*"])


def flax_mnist(axis: Axis) -> Program:
    folder = FLAX.folder() / "examples" / "mnist"
    data = ["tensorflow", "tensorflow_datasets", "ml_collections", "flax.metrics.tensorboard"]
    example = load_file("flax_examples_mnist", folder / "train.py", absent=data)
    model = with_values(example.CNN(nnx.Rngs(0)))
    model.set_attributes(nnx.Dropout, deterministic=True)
    model.set_attributes(nnx.BatchNorm, axis_name=axis)

    def loss(model: Any, rows: Any) -> jax.Array:
        return example.loss_fn(model, rows, None)[0]

    batches = [
        {"image": images, "label": classes}
        for images, classes in zip(features(28, 28, 1), labels(10), strict=True)
    ]
    # BatchNorm cancels these, so their gradient is rounding error.
    return Program(
        model,
        loss,
        batches,
        ["conv*", "linear*"],
        idle=("conv1/bias", "conv2/bias", "batch_norm1/mean", "batch_norm2/mean"),
    )


def flax_scanned(axis: Axis) -> Program:
    folder = FLAX.folder() / "examples" / "nnx_toy_examples"
    with redirect_stdout(io.StringIO()):  # the file ends with a call and prints its result
        example = load_file("flax_examples_scan", folder / "06_scan_over_layers.py")
    model = with_values(example.ScanMLP(10, n_layers=3, rngs=nnx.Rngs(0)))
    model.set_attributes(nnx.Dropout, deterministic=True)
    model.set_attributes(nnx.BatchNorm, axis_name=axis)

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean((model(rows) - 0.3) ** 2)

    return Program(
        model,
        loss,
        features(10),
        ["layers/*"],
        stacked=["layers"],
        idle=("layers/linear/bias", "layers/bn/mean"),
    )


def _tunix(name: str) -> Any:
    put_on_path(WADLER_LINDIG, JAXTYPING)
    folder = TUNIX.folder() / "tunix"
    return load_file(f"tunix_{name}", folder / "models" / name / "model.py", packages={"tunix": folder})


def tunix_llama3(axis: Axis) -> Program:
    llama = _tunix("llama3")
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=37,
        embed_dim=16,
        hidden_dim=28,
        num_heads=4,
        head_dim=6,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    return Program(
        with_values(llama.Llama3(config, rngs=nnx.Rngs(0))),
        decoder_loss,
        tokens(config.vocab_size),
        ["layers/*"],
    )


def tunix_gemma2(axis: Axis) -> Program:
    gemma = _tunix("gemma")
    config = gemma.ModelConfig(
        num_layers=2,
        num_embed=37,
        embed_dim=16,
        hidden_dim=28,
        num_heads=4,
        head_dim=6,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attn_logits_soft_cap=50.0,
        sliding_window_size=3,
    )
    return Program(
        with_values(gemma.Gemma(config, rngs=nnx.Rngs(0))),
        decoder_loss,
        tokens(config.num_embed),
        ["layers/*"],
    )
