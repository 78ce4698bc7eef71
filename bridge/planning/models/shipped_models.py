"""Published models by shape alone, with the decoder's module names, so that one policy file fits them all.

    embed  layers.N.{attention_norm, attention, mlp_norm, mlp}  norm  lm_head

Gate and up projections are one matrix [2 f, h], as in the decoder; experts are stacks [experts, out, in]. Parameter
counts do not depend on this. The sources of shapes and sizes are:

* Llama 3: "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; vocabulary 128,256.
* Mixtral 8x7B: "Mixtral of Experts", arXiv 2401.04088, table 1.
* DeepSeek-V3: arXiv 2412.19437, section 4.2, and the published config.json. Without the multi-token prediction module
  (14 B more), and without the routers' correction biases, which no gradient trains.

In PyTorch the modules are the decoder's, and activations are those of Hugging Face's models: RMSNorm in float32, SwiGLU
that keeps gate, its SiLU, up and their product, and by default fused attention. "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198, section 4, counts another layer in the same way. Elements per token, with h
hidden, q and k widths of queries and keys, f feed-forward width::

    norms       two: x in float32, normalised h, scaled h                        + 4 bytes each
    attention   queries q, keys and values 2 k, output q                         + 4 bytes a head (log-sum-exp)
                plain: keys and values repeated for each head, and scores (``formulas``)
    SwiGLU      4 f
    experts     as SwiGLU for each of a token's experts, and their inputs and outputs 2 h each
    MLA         also the compressed queries and keys, twice: raw and normalised
    head        as a norm, and log-probabilities V in float32

In JAX parameters and activations are those of ``jax_impl.models.CausalLM``, by default with plain attention. It has no
latent attention and no shared experts: DeepSeek-V3 has PyTorch's modules there, too, with activations as ``CausalLM``
would keep them.

Experts are assumed to be evenly loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bridge.planning.models.activations import Segment
from bridge.planning.models.errors import PlanError
from bridge.planning.models.formulas import Attention, FormulaSegment, LossSegment, ResidualSegment
from bridge.planning.models.model import Model, Parameter

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class GroupedQueries:
    """Attention of ``heads`` query heads that share ``kv_heads`` key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int

    def parameters(self, hidden: int) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "wq.weight", (queries, hidden)
        yield "wk.weight", (keys, hidden)
        yield "wv.weight", (keys, hidden)
        yield "wo.weight", (hidden, queries)

    @property
    def rotated(self) -> int:
        """Elements per token of queries and keys."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def others(self) -> int:
        """Elements per token that attention keeps in addition: values and outputs."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def repeated(self) -> int:
        """Elements per token that keys and values gain when they are repeated for each query head."""
        return 2 * (self.heads - self.kv_heads) * self.head_dim

    def jax_parameters(self, hidden: int) -> Shapes:
        """The parameters of ``CausalLM``."""
        yield "key.kernel", (hidden, self.kv_heads, self.head_dim)
        yield "out.kernel", (self.heads, self.head_dim, hidden)
        yield "query.kernel", (hidden, self.heads, self.head_dim)
        yield "value.kernel", (hidden, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: queries and keys through low-rank projections."""

    heads: int
    query_rank: int
    key_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    def parameters(self, hidden: int) -> Shapes:
        yield "wq_a.weight", (self.query_rank, hidden)
        yield "q_norm.weight", (self.query_rank,)
        yield "wq_b.weight", (self.heads * (self.plain_dim + self.rotary_dim), self.query_rank)
        yield "wkv_a.weight", (self.key_rank + self.rotary_dim, hidden)
        yield "kv_norm.weight", (self.key_rank,)
        yield "wkv_b.weight", (self.heads * (self.plain_dim + self.value_dim), self.key_rank)
        yield "wo.weight", (hidden, self.heads * self.value_dim)

    @property
    def rotated(self) -> int:
        """Elements per token of queries and keys."""
        return 2 * self.heads * (self.plain_dim + self.rotary_dim)

    @property
    def others(self) -> int:
        """Elements per token that attention keeps in addition: values, outputs, and the inputs of their projections."""
        low_rank = 2 * self.query_rank + 2 * self.key_rank + self.rotary_dim
        return low_rank + 2 * self.heads * self.value_dim

    @property
    def repeated(self) -> int:
        """Every head has its own keys and values."""
        return 0


@dataclass(frozen=True)
class Experts:
    """``count`` experts of width ``ff``, ``active`` of them for a token, and ``shared`` experts for all tokens."""

    count: int
    active: int
    ff: int
    shared: int = 0

    def parameters(self, hidden: int) -> Shapes:
        yield "router.weight", (self.count, hidden)
        yield "experts.w13", (self.count, 2 * self.ff, hidden)
        yield "experts.w2", (self.count, hidden, self.ff)
        if self.shared:
            yield "shared.w13.weight", (2 * self.ff * self.shared, hidden)
            yield "shared.w2.weight", (hidden, self.ff * self.shared)

    def jax_parameters(self, hidden: int) -> Shapes:
        """The parameters of ``CausalLM``, which has no shared experts."""
        yield "down.kernel", (self.count, self.ff, hidden)
        yield "gate.kernel", (self.count, hidden, self.ff)
        yield "router.kernel", (hidden, self.count)
        yield "up.kernel", (self.count, hidden, self.ff)

    def saved(self, hidden: int) -> int:
        """Elements per token."""
        return self.count + 4 * self.ff * (self.active + self.shared) + 2 * hidden * self.active

    def residuals(self, hidden: int) -> tuple[int, int, int]:
        """Per token in JAX: elements in the compute dtype, elements in float32, bytes of places."""
        narrow = 6 * self.ff * (self.active + self.shared) + hidden * self.active
        return narrow, (hidden + 2) * self.active + self.count, 12 * self.active

    def widest(self, hidden: int) -> tuple[int, int]:
        """Elements per token of the largest array in the compute dtype, and in float32."""
        return self.ff * self.active, hidden * self.active

    def working(self) -> int:
        """Elements per token."""
        return 3 * self.ff * (self.active + self.shared)


@dataclass(frozen=True)
class DenseMlp:
    """SwiGLU of width ``ff``."""

    ff: int

    def parameters(self, hidden: int) -> Shapes:
        yield "w13.weight", (2 * self.ff, hidden)
        yield "w2.weight", (hidden, self.ff)

    def jax_parameters(self, hidden: int) -> Shapes:
        """The parameters of ``CausalLM``."""
        yield "down.kernel", (self.ff, hidden)
        yield "gate.kernel", (hidden, self.ff)
        yield "up.kernel", (hidden, self.ff)

    def saved(self, hidden: int) -> int:
        """Elements per token."""
        return 4 * self.ff

    def residuals(self, hidden: int) -> tuple[int, int, int]:
        """Per token in JAX: elements in the compute dtype, elements in float32, bytes of places."""
        return 6 * self.ff, 0, 0

    def widest(self, hidden: int) -> tuple[int, int]:
        """Elements per token of the largest array in the compute dtype, and in float32."""
        return self.ff, hidden

    def working(self) -> int:
        """Elements per token."""
        return 3 * self.ff


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder-only model; the first ``dense_layers`` layers have ``dense``, the others ``mlp``."""

    vocabulary: int
    hidden: int
    layers: int
    attention: GroupedQueries | LatentAttention
    mlp: DenseMlp | Experts
    dense_layers: int = 0
    dense: DenseMlp | None = None
    rope_theta: float = 500000.0
    tied: bool = False

    def causal_lm(self) -> dict[str, Any] | None:
        """Keywords of ``jax_impl.models.CausalLMConfig``, except ``rotary``; None for an unsupported shape."""
        attention, mlp = self.attention, self.mlp
        if isinstance(attention, LatentAttention) or (isinstance(mlp, Experts) and mlp.shared):
            return None
        return {
            "vocab_size": self.vocabulary,
            "d_model": self.hidden,
            "n_layers": self.layers,
            "n_heads": attention.heads,
            "n_kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "d_ff": mlp.ff,
            "norm_eps": 1e-5,
            "tied": self.tied,
            "n_experts": mlp.count if isinstance(mlp, Experts) else 1,
            "experts_per_token": mlp.active if isinstance(mlp, Experts) else 1,
        }

    def mlp_of(self, layer: int) -> DenseMlp | Experts:
        return self.dense if self.dense is not None and layer < self.dense_layers else self.mlp

    def parameters(self) -> Iterator[Parameter]:
        """In the order of the decoder's definition."""
        hidden = self.hidden
        yield Parameter("embed.weight", (self.vocabulary, hidden), kind="embedding")
        for layer in range(self.layers):
            at = f"layers.{layer}"
            yield Parameter(f"{at}.attention_norm.weight", (hidden,))
            for name, shape in self.attention.parameters(hidden):
                yield Parameter(f"{at}.attention.{name}", shape)
            yield Parameter(f"{at}.mlp_norm.weight", (hidden,))
            for name, shape in self.mlp_of(layer).parameters(hidden):
                yield Parameter(f"{at}.mlp.{name}", shape)
        yield Parameter("norm.weight", (hidden,))
        if not self.tied:
            yield Parameter("lm_head.weight", (self.vocabulary, hidden))

    def jax_parameters(self) -> Iterator[Parameter]:
        """The parameters of ``CausalLM``, in the order of its state, for a shape that it supports."""
        hidden = self.hidden
        yield Parameter("embed.embedding", (self.vocabulary, hidden))
        for layer in range(self.layers):
            at, mlp = f"layers.{layer}", self.mlp_of(layer)
            assert isinstance(self.attention, GroupedQueries)
            for name, shape in self.attention.jax_parameters(hidden):
                yield Parameter(f"{at}.attention.{name}", shape)
            yield Parameter(f"{at}.attention_norm.scale", (hidden,))
            for name, shape in mlp.jax_parameters(hidden):
                yield Parameter(f"{at}.mlp.{name}", shape)
            yield Parameter(f"{at}.mlp_norm.scale", (hidden,))
        if not self.tied:
            yield Parameter("lm_head.kernel", (hidden, self.vocabulary))
        yield Parameter("norm.scale", (hidden,))

    def torch_activations(self, attention: Attention) -> Iterator[Segment]:
        """Segments of the embedding, each layer, and the head at the root."""
        hidden, plain = self.hidden, attention is Attention.plain
        own = self.attention
        kept = own.rotated + own.others + (own.repeated if plain else 0)
        yield FormulaSegment("embed", working=hidden)
        for layer in range(self.layers):
            mlp = self.mlp_of(layer)
            after = mlp.saved(hidden)
            yield FormulaSegment(
                f"layers.{layer}",
                input=hidden,
                saved=4 * hidden + kept + after,
                saved_bytes=2 * 4 * hidden + 8 + (0 if plain else 4 * own.heads),
                working=2 * hidden + mlp.working(),
                heads=own.heads if plain else 0,
                after=after,
            )
        yield LossSegment("", hidden, self.vocabulary)

    def jax_activations(self, attention: Attention) -> Iterator[Segment]:
        """Segments of the embedding, each layer, and the head at the root."""
        hidden, plain = self.hidden, attention is Attention.plain
        own = self.attention
        # The numbers of the tokens.
        yield ResidualSegment("embed", saved_bytes=4, arrays=(0, 1))
        for layer in range(self.layers):
            mlp = self.mlp_of(layer)
            narrow, wide, places = mlp.residuals(hidden)
            yield ResidualSegment(
                f"layers.{layer}",
                input=hidden,
                saved=4 * hidden + own.others + narrow + (0 if plain else own.rotated),
                # For a norm its input and 2 numbers, for a softmax maximum and sum, or one number for both.
                wide=2 * hidden + 4 + wide + (own.rotated + 2 * own.heads if plain else own.heads),
                saved_bytes=places,
                arrays=mlp.widest(hidden),
                heads=own.heads if plain else 0,
            )
        yield ResidualSegment(
            "",
            input=hidden,
            saved=2 * hidden,
            wide=hidden + self.vocabulary + 3,
            saved_bytes=1,
            arrays=(hidden, self.vocabulary),
        )


def _llama(layers: int, hidden: int, ff: int, heads: int) -> DecoderShape:
    return DecoderShape(128256, hidden, layers, GroupedQueries(heads, 8, 128), DenseMlp(ff))


def _deepseek_v3() -> DecoderShape:
    attention = LatentAttention(128, 1536, 512, 128, 64, 128)
    return DecoderShape(129280, 7168, 61, attention, Experts(256, 8, 2048, 1), 3, DenseMlp(18432))


SHIPPED: dict[str, Callable[[], DecoderShape]] = {
    "llama3-8b": lambda: _llama(32, 4096, 14336, 32),
    "llama3-70b": lambda: _llama(80, 8192, 28672, 64),
    "llama3-405b": lambda: _llama(126, 16384, 53248, 128),
    "mixtral-8x7b": lambda: DecoderShape(
        32000, 4096, 32, GroupedQueries(32, 8, 128), Experts(8, 2, 14336), rope_theta=1e6
    ),
    "deepseek-v3": _deepseek_v3,
}


DEFAULTS = {"torch": Attention.fused, "jax": Attention.plain}
"""The attention that each runtime runs."""


def shipped_model(name: str, runtime: str = "torch", attention: Attention | None = None) -> Model:
    """``attention``: None for the kind that the runtime runs. Raises ``PlanError`` for an unknown name."""
    if name not in SHIPPED:
        raise PlanError(f"model: expected one of {', '.join(SHIPPED)}, got {name!r}")
    return shape_model(name, SHIPPED[name](), runtime, attention)


def shape_model(name: str, shape: DecoderShape, runtime: str, attention: Attention | None = None) -> Model:
    """A shape as a runtime's model."""
    chosen = attention or DEFAULTS[runtime]
    if runtime == "torch":
        source = "published shapes; activations of Hugging Face's layers"
        model = Model.of(name, shape.parameters(), shape.torch_activations(chosen), source)
    else:
        fits = shape.causal_lm() is not None
        source = "jax_impl.models.CausalLM" if fits else "published shapes; activations like CausalLM's"
        parameters = shape.jax_parameters() if fits else shape.parameters()
        model = Model.of(name, parameters, shape.jax_activations(chosen), source)
    return replace(model, attention=chosen.value)
