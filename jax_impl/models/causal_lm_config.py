"""The configuration of a causal language model: its sizes, and the variation of each part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax_impl.models.causal_lm_hf import keywords_from_hf

NORMS = ("rms", "rms_one_plus", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: angle ``position * theta ** (-2 i / head_dim)`` for pair ``i`` of the two halves of a head.

    ``factor`` above 1 stretches the low frequencies as Llama 3.1 does: wavelengths longer than ``original_length /
    low_frequency_factor`` by the factor, wavelengths shorter than ``original_length / high_frequency_factor`` not at
    all, and wavelengths between by an interpolated factor. ``linear_factor`` stretches all frequencies equally.
    ``fraction`` below 1: only the first ``head_dim * fraction`` elements of a head rotate, as in a head of this size.
    Raises ``ValueError``.
    """

    theta: float = 10000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    linear_factor: float = 1.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"Rotary.{field.name}: expected a value > 0, got {getattr(self, field.name)}"
                )
        if not self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"Rotary.high_frequency_factor: expected more than low_frequency_factor = "
                f"{self.low_frequency_factor}, got {self.high_frequency_factor}"
            )
        if self.fraction > 1:
            raise ValueError(f"Rotary.fraction: expected at most 1, got {self.fraction}")

    def size(self, head_dim: int) -> int:
        """The number of elements of a head that rotate."""
        return int(head_dim * self.fraction)


@dataclass(frozen=True)
class CausalLMConfig:
    """Sizes and variations of a ``CausalLM``. Raises ``ValueError`` for values that do not fit together.

    ``norm``: ``"rms"``; ``"rms_one_plus"``, whose scale is stored minus one (Gemma); ``"layer"``, with bias (GPT-2).
    ``input_norms``, ``output_norms``: norms on the input and on the output of each attention and MLP.
    ``query_key_norms``: a norm on each head; with ``norms_across_heads``, one norm over all heads of a token (OLMo 2).
    ``parallel``: attention and MLP both read the layer's input (GPT-NeoX). ``residual_scale``: factor of their outputs.
    ``gated``: ``down(act(gate(x)) * up(x))`` rather than ``down(act(up(x)))``. ``activation``: one of ``"silu"``,
    ``"gelu"``, ``"gelu_tanh"``. ``n_experts`` of 1: an ordinary MLP; more: each token goes through the
    ``experts_per_token`` with the largest router probabilities, weighted by these probabilities, which are scaled to
    sum to one. ``rotary``: ``None`` means ``max_length`` learned positions. ``windows``: for each layer, how many
    positions its tokens see, including their own, or ``None`` for all; ``()`` means all for every layer.
    ``window_rotary``: the rotary of layers with a window, if it differs (Gemma 3). ``attention_scale``: factor of the
    scores, ``None`` for ``head_dim ** -0.5``. ``attention_cap``, ``logit_cap``: ``cap * tanh(x / cap)`` of scores and
    logits. ``embedding_scale``, ``logit_scale``: factors of the token vectors and of the logits. ``tied``: the output
    kernel is the embedding. ``init_std``: standard deviation of fresh kernels and embeddings.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm: str = "rms"
    norm_eps: float = 1e-6
    output_norms: bool = False
    query_key_norms: bool = False
    gated: bool = True
    activation: str = "silu"
    n_experts: int = 1
    experts_per_token: int = 1
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rotary: Rotary | None = Rotary()
    max_length: int | None = None
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    init_std: float = 0.02
    input_norms: bool = True
    norms_across_heads: bool = False
    parallel: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    window_rotary: Rotary | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_experts",
        )  # fmt: skip
        for name in sizes:
            self._require(name, getattr(self, name) >= 1, "a value >= 1")
        self._require(
            "n_heads", self.n_heads % self.n_kv_heads == 0, f"a multiple of n_kv_heads = {self.n_kv_heads}"
        )
        self._require("norm", self.norm in NORMS, f"one of {list(NORMS)}")
        self._require("activation", self.activation in ACTIVATIONS, f"one of {list(ACTIVATIONS)}")
        self._require(
            "experts_per_token",
            1 <= self.experts_per_token <= self.n_experts,
            f"from 1 to n_experts = {self.n_experts}",
        )
        if self.n_experts > 1:
            self._require("gated", self.gated, "True with experts")
            self._require("mlp_bias", not self.mlp_bias, "False with experts")
        if self.rotary is None:
            self._require("max_length", (self.max_length or 0) >= 1, "a value >= 1, for learned positions")
        else:
            for rotary in (self.rotary, self.window_rotary or self.rotary):
                turned = rotary.size(self.head_dim)
                self._require("head_dim", turned > 0 and turned % 2 == 0, "an even size (rotary pairs)")
            self._require(
                "max_length", self.max_length is None, "None, since rotary positions have no last one"
            )
        self._require("windows", len(self.windows) in (0, self.n_layers), f"none or {self.n_layers} of them")
        self._require("windows", all(w is None or w >= 1 for w in self.windows), "values >= 1 or None")
        if self.window_rotary is not None:
            self._require("window_rotary", self.rotary is not None, "None without rotary")
        for name in ("residual_scale", "logit_scale"):
            self._require(name, getattr(self, name) > 0, "a value > 0")
        for name in ("attention_scale", "attention_cap", "logit_cap"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "None or a value > 0")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"CausalLMConfig.{name}: expected {expected}, got {getattr(self, name)!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> CausalLMConfig:
        """The config of the model that a Hugging Face ``config.json`` describes: ``from_hf(json.load(file))``.

        Model types: llama, qwen2, qwen3, mixtral, mistral, granite, olmo2, olmo3, phi3, gpt_neox, gpt2, gemma2,
        gemma3_text, and gemma3 (its language model only); files of transformers 4 and 5. Raises ``ValueError`` that
        names the key, the expected and the found value, for unknown keys and for every setting that would change the
        logits and is not supported. Dropout rates and the router's loss are ignored.
        """
        keywords = keywords_from_hf(config)
        rotary, of_windows = keywords.pop("rotary"), keywords.pop("window_rotary", None)
        return cls(
            **keywords,
            rotary=None if rotary is None else Rotary(**rotary),
            window_rotary=None if of_windows is None else Rotary(**of_windows),
        )
