"""Public linen, haiku and equinox models, each made small by its own configuration."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen

from jax_impl import apply_linen
from tests.support.jax_impl.third_party_programs import (
    AXIS,
    ROWS,
    Axis,
    Program,
    classifier_loss,
    features,
    labels,
    next_token_loss,
    tokens,
    with_values,
)
from tests.support.third_party import (
    EQUIMO,
    EQUINOX,
    FLAX,
    HAIKU,
    HAIKU_EXAMPLES,
    JAXTYPING,
    JMP,
    TABULATE,
    WADLER_LINDIG,
    load_file,
    put_on_path,
)


def flax_lm1b(axis: Axis) -> Program:
    example = load_file("flax_examples_lm1b", FLAX.folder() / "examples" / "lm1b" / "models.py")
    config = example.TransformerConfig(
        vocab_size=37,
        output_vocab_size=37,
        emb_dim=16,
        num_heads=4,
        num_layers=2,
        qkv_dim=16,
        mlp_dim=28,
        max_len=8,
        deterministic=True,
        logits_via_embedding=True,
    )
    model = example.TransformerLM(config)
    batches = tokens(config.vocab_size)

    def loss(params: Any, rows: Any) -> jax.Array:
        return next_token_loss(apply_linen(model, {"params": params}, rows), rows)

    params = jax.jit(model.init)(jax.random.key(0), batches[0])["params"]
    return Program(with_values(params), loss, batches, ["decoder/encoderdecoderblock_*"])


def flax_sst2(axis: Axis) -> Program:
    """Its LSTMs are scanned over time by linen's lifted scan."""
    example = load_file("flax_examples_sst2", FLAX.folder() / "examples" / "sst2" / "models.py")
    model = example.TextClassifier(
        embedding_size=12,
        hidden_size=10,
        vocab_size=37,
        output_size=3,
        dropout_rate=0.0,
        word_dropout_rate=0.0,
        deterministic=True,
    )
    lengths = np.arange(ROWS, dtype=np.int32) % 6 + 1
    batches = [(rows, lengths, classes) for rows, classes in zip(tokens(37), labels(3), strict=True)]

    def loss(params: Any, rows: Any) -> jax.Array:
        words, lengths, classes = rows
        logits = apply_linen(model, {"params": params}, words, lengths)
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

    params = jax.jit(model.init)(jax.random.key(0), *batches[0][:2])["params"]
    return Program(with_values(params), loss, batches, ["embedder", "encoder", "classifier"])


class OnAxis(linen.Module):
    """A linen module that takes statistics over an axis of the mesh; without a mesh over one of length 1."""

    model: linen.Module
    axis: Axis

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.axis is not None:
            return self.model(x)
        shared = {"params": None, "batch_stats": None}
        mapped = linen.vmap(
            lambda model, x: model(x), variable_axes=shared, split_rngs={"params": False}, axis_name=AXIS
        )
        return mapped(self.model, x[None])[0]


def flax_imagenet(axis: Axis) -> Program:
    """Its BatchNorm names the axis "batch"."""
    example = load_file("flax_examples_imagenet", FLAX.folder() / "examples" / "imagenet" / "models.py")
    model = OnAxis(
        example.ResNet(stage_sizes=[1, 1], block_cls=example.ResNetBlock, num_classes=5, num_filters=4), axis
    )
    units = ["model/conv_init", "model/ResNetBlock_*", "model/Dense_0"]
    return _with_statistics(model, features(16, 16, 3), units, one_axis=True)


class ScannedBlocks(linen.Module):
    """A stack of them, as flax's documentation of ``nn.scan`` has it."""

    block: linen.Module

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = linen.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(self.block, x, None)
        return linen.Dense(5)(x.mean((1, 2)))


def flax_imagenet_scanned(axis: Axis) -> Program:
    """The residual block, with BatchNorm, under linen's scan over layers."""
    example = load_file("flax_examples_imagenet", FLAX.folder() / "examples" / "imagenet" / "models.py")
    block = example.ResNetBlock(
        filters=4,
        conv=partial(linen.Conv, use_bias=False),
        norm=partial(linen.BatchNorm, use_running_average=False, axis_name=axis),
        act=linen.relu,
    )
    return _with_statistics(
        ScannedBlocks(block), features(8, 8, 4), ["block/*", "Dense_0"], stacked=["block"]
    )


def _with_statistics(
    model: linen.Module, images: list[np.ndarray], units: list[str], **options: Any
) -> Program:
    """A classifier whose statistics are an input of its loss, and a result."""

    def loss(params: Any, rows: Any, statistics: Any) -> tuple[jax.Array, Any]:
        images, classes = rows
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = apply_linen(model, variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
        return losses.mean(), updated["batch_stats"]

    variables = jax.jit(model.init)(jax.random.key(0), images[0])
    batches = list(zip(images, labels(5), strict=True))
    params = with_values(variables["params"])
    return Program(params, loss, batches, units, statistics=variables["batch_stats"], **options)


def haiku_transformer(axis: Axis) -> Program:
    put_on_path(HAIKU, JMP, TABULATE)
    hk = importlib.import_module("haiku")
    file = HAIKU_EXAMPLES.folder() / "examples" / "transformer" / "model.py"
    example = load_file("haiku_examples_transformer", file)

    @hk.transform
    def model(rows: jax.Array) -> jax.Array:
        transformer = example.Transformer(num_heads=2, num_layers=2, attn_size=6, dropout_rate=0.0)
        return example.LanguageModel(transformer, model_size=16, vocab_size=37, pad_token=0)(rows)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return next_token_loss(model.apply(params, jax.random.key(0), rows), rows)

    batches = tokens(37)
    params = with_values(jax.jit(model.init)(jax.random.key(0), batches[0]))
    attention = "transformer/multi_head_attention"
    # Softmax cancels these.
    return Program(params, loss, batches, [], idle=(f"{attention}/key/b", f"{attention}_1/key/b"))


def equimo_vit(axis: Axis) -> Program:
    put_on_path(WADLER_LINDIG, JAXTYPING, EQUINOX)
    folder = EQUIMO.folder() / "equimo"
    vit = load_file(
        "equimo_vit",
        folder / "models" / "vit.py",
        packages={"equimo": folder, "equimo.models": folder / "models"},
    )
    model = vit.VisionTransformer(
        img_size=12,
        in_channels=3,
        dim=16,
        patch_size=4,
        num_heads=2,
        depths=[2],
        num_classes=5,
        qkv_bias=False,  # of which the keys' part has no gradient
        key=jax.random.key(0),
    )
    batches = list(zip(features(3, 12, 12), labels(5), strict=True))

    def loss(model: Any, rows: Any) -> jax.Array:
        return classifier_loss(jax.vmap(lambda image: model(image, inference=True)), rows)

    return Program(with_values(model), loss, batches, ["blocks/0/blocks/*", "head"])
