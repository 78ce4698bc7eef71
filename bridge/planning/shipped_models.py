"""Published models by shape alone, with the decoder's module names, so that one policy file fits them all.

    embed  layers.N.{attention_norm, attention, mlp_norm, mlp}  norm  lm_head

Gate and up projections are one matrix [2 f, h], as in the decoder; experts are stacks [experts, out, in]. Counts of
parameters do not depend on that. Shapes and sizes are those of:

* Llama 3: "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; vocabulary 128,256.
* Mixtral 8x7B: "Mixtral of Experts", arXiv 2401.04088, table 1.
* DeepSeek-V3: arXiv 2412.19437, section 4.2, and the published config.json. Without the multi-token prediction module
  (14 B more), and without the routers' correction biases, which no gradient trains.

Activations of one forward are counted for PyTorch with a fused attention kernel, which keeps no scores, as in "Reducing
Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4, with RMSNorm, SwiGLU and grouped
queries in place of its layers. Elements a token, h hidden, q and k widths of queries and keys, f feed-forward width::

    attention   x h, normalised h, queries q, keys and values 2 k, output q      + 4 bytes a head (log-sum-exp), 4 norm
    SwiGLU      x h, normalised h, gate and up 2 f, their product f              + 4 bytes (norm)
    experts     as SwiGLU for each of a token's experts, and their inputs and outputs 2 h each
    MLA         also the compressed queries and keys, twice: as they are and normalised
    head        x h, normalised h, logits V, and in float32 V

Experts are taken to be evenly loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bridge.planning.activations import FormulaSegment
from bridge.planning.errors import PlanError
from bridge.planning.model import Model, Parameter

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
    def saved(self) -> int:
        """Elements a token, beside the block's input and its normalised form."""
        return (2 * self.heads + 2 * self.kv_heads) * self.head_dim


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
    def saved(self) -> int:
        """Elements a token, beside the block's input and its normalised form."""
        low_rank = 2 * self.query_rank + 2 * self.key_rank + self.rotary_dim
        return low_rank + self.heads * 2 * (self.plain_dim + self.rotary_dim + self.value_dim)


@dataclass(frozen=True)
class Experts:
    """``count`` experts of width ``ff``, ``active`` of them for a token, and ``shared`` ones for all."""

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

    def saved(self, hidden: int) -> int:
        """Elements a token."""
        return self.count + 3 * self.ff * (self.active + self.shared) + 2 * hidden * self.active

    def working(self) -> int:
        """Elements a token."""
        return 3 * self.ff * (self.active + self.shared)


@dataclass(frozen=True)
class DenseMlp:
    """SwiGLU of width ``ff``."""

    ff: int

    def parameters(self, hidden: int) -> Shapes:
        yield "w13.weight", (2 * self.ff, hidden)
        yield "w2.weight", (hidden, self.ff)

    def saved(self, hidden: int) -> int:
        """Elements a token."""
        return 3 * self.ff

    def working(self) -> int:
        """Elements a token."""
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

    def causal_lm(self) -> dict[str, Any] | None:
        """Keywords of ``jax_impl.models.CausalLMConfig``, but ``rotary``; None for what it cannot be."""
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
            "n_experts": mlp.count if isinstance(mlp, Experts) else 1,
            "experts_per_token": mlp.active if isinstance(mlp, Experts) else 1,
        }

    def mlp_of(self, layer: int) -> DenseMlp | Experts:
        return self.dense if self.dense is not None and layer < self.dense_layers else self.mlp

    def parameters(self) -> Iterator[Parameter]:
        """In the order of the decoder's definition."""
        hidden = self.hidden
        yield Parameter("embed.weight", (self.vocabulary, hidden))
        for layer in range(self.layers):
            at = f"layers.{layer}"
            yield Parameter(f"{at}.attention_norm.weight", (hidden,))
            for name, shape in self.attention.parameters(hidden):
                yield Parameter(f"{at}.attention.{name}", shape)
            yield Parameter(f"{at}.mlp_norm.weight", (hidden,))
            for name, shape in self.mlp_of(layer).parameters(hidden):
                yield Parameter(f"{at}.mlp.{name}", shape)
        yield Parameter("norm.weight", (hidden,))
        yield Parameter("lm_head.weight", (self.vocabulary, hidden))

    def activations(self) -> Iterator[FormulaSegment]:
        """Of the embedding, each layer, and the head at the root."""
        yield FormulaSegment("embed", working=self.hidden)
        for layer in range(self.layers):
            mlp = self.mlp_of(layer)
            yield FormulaSegment(
                f"layers.{layer}",
                input=self.hidden,
                saved=4 * self.hidden + self.attention.saved + mlp.saved(self.hidden),
                saved_bytes=4 * self.attention.heads + 8,
                working=2 * self.hidden + mlp.working(),
            )
        yield FormulaSegment(
            "",
            input=self.hidden,
            saved=2 * self.hidden + self.vocabulary,
            saved_bytes=4 * self.vocabulary + 4,
            working=self.hidden + self.vocabulary,
            working_bytes=4 * self.vocabulary,
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


def shipped_model(name: str) -> Model:
    """Raises ``PlanError`` for an unknown name."""
    if name not in SHIPPED:
        raise PlanError(f"model: expected one of {', '.join(SHIPPED)}, got {name!r}")
    shape = SHIPPED[name]()
    return Model.of(
        name, shape.parameters(), shape.activations(), "published shapes, formulas of arXiv 2205.05198"
    )
