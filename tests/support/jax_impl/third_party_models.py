"""Models that no one here wrote, each made small by its own configuration, with a loss as its user would write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl import apply_linen, data_parallel_mesh, fully_shard, init_state, make_train_step, unshard, variable_leaves
from tests.support.third_party import Package, load_file, put_on_path

DEVICES, ROWS, STEPS = 4, 8, 3
RATE = 1e-3
AXIS = 'batch'

FLAX = Package(
    "flax",
    "0.12.8",
    "1bb438775b967a3f1f42b9c3d4ddf1d2883cd6406589f9cecdc244634036bdc4",
    source=True,
    keep="examples/",
)
TUNIX = Package(
    "google-tunix", "0.1.7", "857b893b8ba71a61cce8cb9de2301218d311f72044de94aa2b826275968033b4"
)
GEMMA = Package(
    "gemma", "3.3.0", "b76d0a6b0602b5f4ece98dd161400f638ebe84e70e246732e5cba584045b7942", keep="gemma/multimodal/"
)
JAXTYPING = Package("jaxtyping", "0.3.11", "8a4bedc4e3f963fa82df41bd13c7ebc2bad925601eb48614c65798f21329d4e3")
WADLER_LINDIG = Package(
    "wadler-lindig", "0.1.8", "8671e8c98449ae3f4e4ba720eccd63a502b3983042f8d112b49a9c6be49e8d92"
)


@dataclass(frozen=True)
class Program:
    """``model``: what ``fully_shard`` takes. ``loss(model, rows)``: the mean over rows. ``batches``: one a step."""

    model: Any
    loss: Callable[[Any, Any], jax.Array]
    batches: Sequence[Any]
    units: Sequence[str]
    idle: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """``idle``: see ``Program``."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    idle: Sequence[str]


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(RATE, eps=float(__import__("os").environ.get("EPS","1e-8")), weight_decay=0.1)


def tokens(vocabulary: int, length: int = 6) -> list[np.ndarray]:
    """Another batch for every step, another row for every device."""
    random = np.random.default_rng(0)
    return [random.integers(1, vocabulary, (ROWS, length)).astype(np.int32) for _ in range(STEPS)]


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
    """The nnx model with weights as if loaded: fresh ones are zero in places, so that others have no gradient."""
    graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
    random = np.random.default_rng(1)

    def value(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(random.normal(scale=0.2, size=leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(value, weights), rest)


def flax_gemma(axis: str | None) -> Program:
    put_on_path(WADLER_LINDIG, JAXTYPING)
    folder = FLAX.folder() / "examples" / "gemma"
    example = load_file("flax_examples_gemma", folder / "transformer.py", siblings=True)
    config = example.TransformerConfig.gemma3_1b(
        num_layers=2, num_embed=37, embed_dim=16, hidden_dim=28, head_dim=6, sliding_window_size=3
    )
    model = with_values(example.Transformer(config, rngs=nnx.Rngs(0)))
    return Program(model, decoder_loss, tokens(config.num_embed), ["layers/*"])


def flax_mnist(axis: str | None) -> Program:
    folder = FLAX.folder() / "examples" / "mnist"
    data = ["tensorflow", "tensorflow_datasets", "ml_collections", "flax.metrics.tensorboard"]
    example = load_file("flax_examples_mnist", folder / "train.py", absent=data)
    model = with_values(example.CNN(nnx.Rngs(0)))
    model.set_attributes(nnx.Dropout, deterministic=True)
    model.set_attributes(nnx.BatchNorm, axis_name=axis)

    def loss(model: Any, rows: Any) -> jax.Array:
        return example.loss_fn(model, rows, None)[0]

    random = np.random.default_rng(0)
    batches = [
        {
            "image": random.normal(size=(ROWS, 28, 28, 1)).astype(np.float32),
            "label": random.integers(0, 10, ROWS).astype(np.int32),
        }
        for _ in range(STEPS)
    ]
    # BatchNorm takes away what these add: their gradient is rounding error.
    return Program(model, loss, batches, ["conv*", "linear*"], idle=("conv1/bias", "conv2/bias"))


def flax_lm1b(axis: str | None) -> Program:
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
    return Program(params, loss, batches, ["decoder/encoderdecoderblock_*"])


def gemma_vit(axis: str | None) -> Program:
    file = GEMMA.folder() / "gemma" / "multimodal" / "vision_utils.py"
    vision = load_file("gemma_vision_utils", file, absent=["kauldron"])
    model = vision.ViTModel(patch_size=(4, 4), width=16, depth=3, mlp_dim=28, num_heads=4, scan=True)
    random = np.random.default_rng(0)
    batches = [random.normal(size=(ROWS, 12, 8, 3)).astype(np.float32) for _ in range(STEPS)]

    def loss(params: Any, rows: Any) -> jax.Array:
        return jnp.mean((apply_linen(model, {"params": params}, rows) - 1) ** 2)

    params = model.init(jax.random.key(0), batches[0])["params"]
    return Program(params, loss, batches, ["embedding"])


def _tunix(name: str) -> Any:
    put_on_path(WADLER_LINDIG, JAXTYPING)
    folder = TUNIX.folder() / "tunix"
    return load_file(
        f"tunix_{name}", folder / "models" / name / "model.py", packages={"tunix": folder}
    )


def tunix_llama3(axis: str | None) -> Program:
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
        with_values(llama.Llama3(config, rngs=nnx.Rngs(0))), decoder_loss, tokens(config.vocab_size), ["layers/*"]
    )


def tunix_gemma2(axis: str | None) -> Program:
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
    return Program(with_values(gemma.Gemma(config, rngs=nnx.Rngs(0))), decoder_loss, tokens(config.num_embed), ["layers/*"])


PROGRAMS: dict[str, Callable[[str | None], Program]] = {
    "flax-gemma": flax_gemma,
    "flax-mnist": flax_mnist,
    "flax-lm1b": flax_lm1b,
    "gemma-vit": gemma_vit,
    "tunix-llama3": tunix_llama3,
    "tunix-gemma2": tunix_gemma2,
}


def plain(name: str) -> Result:
    """The same steps on one device, without sharding, by optax."""
    program = PROGRAMS[name](None)
    weights, rest, merge = _split(program.model)
    adamw = optimizer()

    @jax.jit
    def step(weights: Any, rest: Any, moments: Any, rows: Any) -> Any:
        def loss(weights: Any) -> Any:
            model = merge(weights, rest)
            value = program.loss(model, rows)
            return value, _split(model)[1]

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, moments = adamw.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), rest, moments, value

    moments, losses = adamw.init(weights), []
    for rows in program.batches:
        weights, rest, moments, value = step(weights, rest, moments, rows)
        losses.append(float(value))
    return Result(losses, _named(weights), _named(rest), program.idle)


def _split(model: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Weights, other variables, and what makes the model of both."""
    if not isinstance(model, nnx.Module):
        return model, {}, lambda weights, rest: weights
    graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
    return nnx.as_pure(weights), nnx.as_pure(rest), partial(nnx.merge, graphdef)


def _named(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by path, names joined with slashes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def sharded(name: str, engine: str, strategy: str, sizes: Mapping[str, int] | None = None) -> Result:
    """By default on a mesh of one axis."""
    sizes = sizes or {AXIS: DEVICES}
    axis: Any = tuple(sizes) if len(sizes) > 1 else AXIS
    program = PROGRAMS[name](axis if engine == "shard_map" else None)
    plan, weights = fully_shard(
        program.model, data_parallel_mesh(sizes), engine=engine, strategy=strategy, units=program.units
    )
    adamw = optimizer()
    variables = variable_leaves(program.model) if isinstance(program.model, nnx.Module) else None
    state = init_state(plan, weights, adamw, variables)
    step = make_train_step(plan, program.loss, adamw)
    losses = []
    for rows in program.batches:
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
    found = jax.device_get((unshard(plan, state.weights), state.variables))
    return Result(losses, *found, program.idle)


def differences(found: Result, expected: Result) -> tuple[float, float]:
    """The largest relative difference of losses, and of weights and other variables.

    That of an array is taken against its largest element, or against the learning rate where all are smaller.
    """
    losses = np.abs(np.subtract(found.losses, expected.losses)) / np.abs(expected.losses)
    arrays = {**expected.weights, **expected.variables}
    assert sorted({**found.weights, **found.variables}) == sorted(arrays)
    values = [
        np.abs({**found.weights, **found.variables}[path] - value).max() / max(np.abs(value).max(), RATE)
        for path, value in arrays.items()
        if path not in expected.idle and np.issubdtype(value.dtype, np.floating)
    ]
    return float(losses.max()), float(max(values))
