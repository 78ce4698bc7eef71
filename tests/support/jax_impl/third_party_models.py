"""Models that no one here wrote, each made small by its own configuration, with a loss as its user would write it."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl import (
    apply_linen,
    data_parallel_mesh,
    fully_shard,
    init_state,
    make_train_step,
    unshard,
    variable_leaves,
)
from tests.support.third_party import Package, load_file, put_on_path

DEVICES, ROWS, STEPS = 4, 8, 3
RATE = 1e-3
AXIS = "batch"

FLAX = Package(
    "flax",
    "0.12.8",
    "1bb438775b967a3f1f42b9c3d4ddf1d2883cd6406589f9cecdc244634036bdc4",
    source=True,
    keep="examples/",
)
TUNIX = Package("google-tunix", "0.1.7", "857b893b8ba71a61cce8cb9de2301218d311f72044de94aa2b826275968033b4")
EQUIMO = Package("equimo", "1.1.0", "37114916d60d4850a20f57efa878ce62b85eb5eb222bd8364825425b3148327d")
EQUINOX = Package("equinox", "0.13.8", "ca004348533cc30a63ebe8823d7dd4bb626dce17743d40bbddb89b402ef2a240")
HAIKU = Package("dm-haiku", "0.0.17", "aa1394276adf59d695c910810ad90febb741503a83c32b022ce1162483904bbb")
HAIKU_EXAMPLES = Package(
    "dm-haiku",
    "0.0.17",
    "6daa56f3b54f43675713ef7525d1dec7327f2512b57cc2b12104f76f6d7cf581",
    source=True,
    keep="examples/",
)
JMP = Package("jmp", "0.0.4", "6aa7adbddf2bd574b28c7faf6e81a735eb11f53386447896909c6968dc36807d")
TABULATE = Package("tabulate", "0.10.0", "f0b0622e567335c8fabaaa659f1b33bcb6ddfe2e496071b743aa113f8774f2d3")
JAXTYPING = Package("jaxtyping", "0.3.11", "8a4bedc4e3f963fa82df41bd13c7ebc2bad925601eb48614c65798f21329d4e3")
WADLER_LINDIG = Package(
    "wadler-lindig", "0.1.8", "8671e8c98449ae3f4e4ba720eccd63a502b3983042f8d112b49a9c6be49e8d92"
)

# The mesh axes over which BatchNorm takes its statistics: none where a program sees the whole batch.
Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Program:
    """``model``: what ``fully_shard`` takes. ``loss(model, rows)``: the mean over rows. ``batches``: one a step."""

    model: Any
    loss: Callable[[Any, Any], jax.Array]
    batches: Sequence[Any]
    units: Sequence[str]
    stacked: Sequence[str] = ()
    idle: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """``idle``: see ``Program``."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    idle: Sequence[str]


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(RATE, weight_decay=0.1)


def tokens(vocabulary: int, length: int = 6) -> list[np.ndarray]:
    """Another batch for every step, another row for every device."""
    random = np.random.default_rng(0)
    return [random.integers(1, vocabulary, (ROWS, length)).astype(np.int32) for _ in range(STEPS)]


def features(*shape: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(ROWS, *shape)).astype(np.float32) for _ in range(STEPS)]


def labels(classes: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, classes, ROWS).astype(np.int32) for _ in range(STEPS)]


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def causal(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions ``[B, T]`` and mask ``[B, T, T]`` of rows without padding."""
    count, length = rows.shape
    positions = jnp.broadcast_to(jnp.arange(length), (count, length))
    return positions, jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (count, length, length))


def decoder_loss(model: Any, rows: jax.Array) -> jax.Array:
    """For the three that are called with tokens, positions, cache and mask."""
    positions, mask = causal(rows)
    logits, _ = model(rows, positions, None, mask)
    return next_token_loss(logits, rows)


def with_values(model: Any) -> Any:
    """Weights as if loaded: fresh ones are zero in places, so that others have no gradient."""
    weights, rest, merge = split(model)
    random = np.random.default_rng(1)

    def value(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(random.normal(scale=0.2, size=leaf.shape), leaf.dtype)

    return merge(jax.tree.map(value, weights), rest)


def split(model: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Weights, what else the model has, and what makes a model of both."""
    if isinstance(model, nnx.Module):
        graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
        return nnx.as_pure(weights), nnx.as_pure(rest), partial(nnx.merge, graphdef)
    if isinstance(model, dict):
        return model, {}, lambda weights, rest: weights
    equinox = importlib.import_module("equinox")
    weights, rest = equinox.partition(model, equinox.is_inexact_array)
    return weights, {}, lambda weights, _: equinox.combine(weights, rest)


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
    # BatchNorm takes away what these add: their gradient is rounding error.
    return Program(
        model,
        loss,
        batches,
        ["conv*", "linear*"],
        idle=("conv1/bias", "conv2/bias", "batch_norm1/mean", "batch_norm2/mean"),
    )


def flax_scanned(axis: Axis) -> Program:
    folder = FLAX.folder() / "examples" / "nnx_toy_examples"
    with redirect_stdout(io.StringIO()):  # the file ends in a call, whose result it prints
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

    params = model.init(jax.random.key(0), batches[0])["params"]
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

    params = model.init(jax.random.key(0), *batches[0][:2])["params"]
    return Program(with_values(params), loss, batches, ["embedder", "encoder", "classifier"])


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
    return Program(with_values(model.init(jax.random.key(0), batches[0])), loss, batches, [])


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
        key=jax.random.key(0),
    )
    batches = list(zip(features(3, 12, 12), labels(5), strict=True))

    def loss(model: Any, rows: Any) -> jax.Array:
        images, classes = rows
        logits = jax.vmap(lambda image: model(image, inference=True))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

    return Program(with_values(model), loss, batches, [])


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


PROGRAMS: dict[str, Callable[[Axis], Program]] = {
    "flax-gemma": flax_gemma,
    "flax-mnist": flax_mnist,
    "flax-scanned": flax_scanned,
    "flax-lm1b": flax_lm1b,
    "flax-sst2": flax_sst2,
    "tunix-llama3": tunix_llama3,
    "tunix-gemma2": tunix_gemma2,
    "haiku-transformer": haiku_transformer,
    "equimo-vit": equimo_vit,
}


@cache
def built(name: str, axis: Axis) -> Program:
    """Raises ``Unreachable`` where a package is not there."""
    return PROGRAMS[name](axis)


@cache
def plain(name: str) -> Result:
    """The same steps on one device, without sharding, by optax."""
    program = built(name, None)
    weights, rest, merge = split(program.model)
    adamw = optimizer()

    @jax.jit
    def step(weights: Any, rest: Any, moments: Any, rows: Any) -> Any:
        def loss(weights: Any) -> Any:
            model = merge(weights, rest)
            value = program.loss(model, rows)
            return value, split(model)[1]

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, moments = adamw.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), rest, moments, value

    moments, losses = adamw.init(weights), []
    for rows in program.batches:
        weights, rest, moments, value = step(weights, rest, moments, rows)
        losses.append(float(value))
    return Result(losses, named(weights), named(rest), program.idle)


def named(tree: Any) -> dict[str, np.ndarray]:
    """Floating-point leaves by path, names joined with slashes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def sharded(name: str, engine: str, strategy: str, sizes: Mapping[str, int] | None = None) -> Result:
    """By default on a mesh of one axis."""
    sizes = sizes or {AXIS: DEVICES}
    axis: Any = tuple(sizes) if len(sizes) > 1 else AXIS
    program = built(name, axis if engine == "shard_map" else None)
    plan, weights = fully_shard(
        program.model,
        data_parallel_mesh(sizes),
        engine=engine,
        strategy=strategy,
        units=program.units,
        stacked=program.stacked,
    )
    adamw = optimizer()
    variables = variable_leaves(program.model) if isinstance(program.model, nnx.Module) else None
    state = init_state(plan, weights, adamw, variables)
    step = make_train_step(plan, program.loss, adamw)
    losses = []
    for rows in program.batches:
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
    return Result(losses, named(unshard(plan, state.weights)), named(state.variables), program.idle)


def differences(found: Result, expected: Result) -> tuple[float, float]:
    """The largest relative difference of losses, and of weights and other variables.

    That of an array is the norm of the difference against the norm of the array.
    """
    losses = np.abs(np.subtract(found.losses, expected.losses)) / np.abs(expected.losses)
    got, arrays = (result.weights | result.variables for result in (found, expected))
    assert sorted(got) == sorted(arrays)
    parts = [
        np.linalg.norm(got[path] - array) / max(np.linalg.norm(array), RATE)
        for path, array in arrays.items()
        if path not in expected.idle
    ]
    return float(losses.max()), float(max(parts))
