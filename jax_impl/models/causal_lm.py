"""A causal language model that computes what Hugging Face's classes compute from the same weights.

``CausalLMConfig.from_hf`` reads a ``config.json`` of Llama, Qwen 2 and 3, Mixtral, Mistral, Granite, OLMo 2 and 3,
Phi-3, GPT-NeoX, Gemma 2 and 3 or GPT-2. Parameter paths are the same as in ``Decoder`` wherever the parts are the same;
families with more parts have more paths. With ``twinshard convert hf_folder jax_checkpoint --mapping llama``::

    config = CausalLMConfig.from_hf(json.load(open("hf_folder/config.json")))
    model = CausalLM(config, rngs=nnx.Rngs(0))
    params = orbax.checkpoint.StandardCheckpointer().restore("/path/jax_checkpoint")["params"]
    nnx.update(model, nnx.restore_int_paths(params))  # then fully_shard(model, mesh, "fsdp"), or model(tokens)

In float32 logits agree with ``transformers`` to 1e-5 of their standard deviation (tests/parity/test_causal_lm.py). Keys
of ``config.json`` that would change the model in unsupported ways (rope scaling other than Llama 3's, other
activations, quantization) are refused by name, as are unknown keys. There is no dropout and no router loss; rows start
at position 0. The layers of Gemma and OLMo 3 alternate their windows, so they cannot be one stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl.models.causal_lm_config import CausalLMConfig, Rotary
from jax_impl.models.decoder import Embedding, Kernel, widened
from jax_impl.modules.stack import scan_layers, stack_layers

RotaryTables = tuple[jax.Array, jax.Array]
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """``x`` bent into ``(-cap, cap)``; with ``None``, ``x`` itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotary_frequencies(rotary: Rotary, head_dim: int) -> np.ndarray:
    """Radians per position for each rotating pair of a head: float32 ``[rotary.size(head_dim) / 2]``.

    Computed in float32 throughout, because the models were trained with angles computed in float32.
    """
    unity, size = np.float32(1), rotary.size(head_dim)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = unity / np.power(np.float32(rotary.theta), exponents) / np.float32(rotary.linear_factor)
    if rotary.factor == 1:
        return frequencies
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    periods = np.float32(rotary.original_length) / (np.float32(2 * math.pi) / frequencies)
    share = np.clip((periods - np.float32(low)) / np.float32(high - low), 0, 1)
    return ((unity - share) * frequencies / np.float32(rotary.factor) + share * frequencies).astype(
        np.float32
    )


def rotary_tables(length: int, rotary: Rotary, head_dim: int) -> RotaryTables:
    """Cosines and sines for positions from 0: float32 ``[length, 1, rotary.size(head_dim) / 2]``."""
    positions = jnp.arange(length, dtype=jnp.float32)
    angles = positions[:, None, None] * jnp.asarray(rotary_frequencies(rotary, head_dim))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: RotaryTables) -> jax.Array:
    """Rotate the halves of the last axis of ``x [B, T, heads, head_dim]``, or of the part that the tables cover."""
    cos, sin = tables
    size = 2 * cos.shape[-1]
    first, second = jnp.split(widened(x[..., :size]), 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate(parts, axis=-1).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


class Projection(Kernel):
    """A kernel whose first axes are summed over, with an optional bias over the others."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(equation, shape, rngs=rngs, dtype=dtype, std=std)
        kernel_axes, result = equation.split(",")[1].split("->")
        kept = sum(axis in result for axis in kernel_axes)
        self.bias = nnx.Param(jnp.zeros(shape[-kept:], dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """Normalizes over the last axes, of these sizes, in at least float32; kinds as in ``CausalLMConfig.norm``."""

    def __init__(self, config: CausalLMConfig, *sizes: int, dtype: jnp.dtype) -> None:
        self.kind = config.norm
        self.eps = config.norm_eps
        self.scale = nnx.Param((jnp.zeros if self.kind == "rms_one_plus" else jnp.ones)(sizes, dtype))
        self.bias = nnx.Param(jnp.zeros(sizes, dtype)) if self.kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y, scale = widened(x), self.scale[...]
        axes = tuple(range(-scale.ndim, 0))
        if self.bias is not None:
            y = y - jnp.mean(y, axis=axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=axes, keepdims=True) + self.eps)
        if self.kind == "rms_one_plus":
            return (y * (1 + widened(scale))).astype(x.dtype)
        if self.bias is not None:
            return (y * widened(scale) + widened(self.bias[...])).astype(x.dtype)
        return y.astype(x.dtype) * scale


class Attention(nnx.Module):
    """Causal attention; query head j reads key/value head ``j // (n_heads // n_kv_heads)``."""

    def __init__(self, config: CausalLMConfig, index: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        c = config
        self.config = c
        self.window = c.windows[index] if c.windows else None
        project = partial(Projection, std=c.init_std, rngs=rngs, dtype=dtype)
        self.query = project("btd,dhk->bthk", (c.d_model, c.n_heads, c.head_dim), bias=c.qkv_bias)
        self.key = project("btd,dhk->bthk", (c.d_model, c.n_kv_heads, c.head_dim), bias=c.qkv_bias)
        self.value = project("btd,dhk->bthk", (c.d_model, c.n_kv_heads, c.head_dim), bias=c.qkv_bias)
        self.out = project("bthk,hkd->btd", (c.n_heads, c.head_dim, c.d_model), bias=c.out_bias)
        across = c.norms_across_heads
        query_sizes, key_sizes = (((n,) if across else ()) + (c.head_dim,) for n in (c.n_heads, c.n_kv_heads))
        self.query_norm = Norm(c, *query_sizes, dtype=dtype) if c.query_key_norms else None
        self.key_norm = Norm(c, *key_sizes, dtype=dtype) if c.query_key_norms else None

    def __call__(self, x: jax.Array, tables: RotaryTables | None) -> jax.Array:
        c = self.config
        batch, length, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if tables is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        grouped = query.reshape(batch, length, c.n_kv_heads, -1, c.head_dim)
        einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        scores = softcap(einsum("btngk,bsnk->bngts", widened(grouped), widened(key)) * scale, c.attention_cap)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = einsum("bngts,bsnk->btngk", weights, value)
        return self.out(mixed.reshape(batch, length, c.n_heads, c.head_dim))


class MLP(nnx.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate."""

    def __init__(self, config: CausalLMConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        c = config
        self.activation = c.activation
        project = partial(Projection, bias=c.mlp_bias, std=c.init_std, rngs=rngs, dtype=dtype)
        self.gate = project("btd,df->btf", (c.d_model, c.d_ff)) if c.gated else None
        self.up = project("btd,df->btf", (c.d_model, c.d_ff))
        self.down = project("btf,fd->btd", (c.d_ff, c.d_model))

    def __call__(self, x: jax.Array) -> jax.Array:
        act = _ACTIVATIONS[self.activation]
        return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


class ExpertKernels(nnx.Module):
    """One kernel ``[in, out]`` for each expert; rows come sorted by expert, ``counts[e]`` of them for expert e."""

    def __init__(self, shape: tuple[int, int, int], *, std: float, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))

    def __call__(self, rows: jax.Array, counts: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, self.kernel[...], counts, precision=jax.lax.Precision.HIGHEST)


class Experts(nnx.Module):
    """Gated MLPs; each token uses the few that the router prefers. No token is dropped."""

    def __init__(self, config: CausalLMConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        c = config
        self.config = c
        kernels = partial(ExpertKernels, std=c.init_std, rngs=rngs, dtype=dtype)
        self.router = Kernel("btd,de->bte", (c.d_model, c.n_experts), std=c.init_std, rngs=rngs, dtype=dtype)
        self.gate = kernels((c.n_experts, c.d_model, c.d_ff))
        self.up = kernels((c.n_experts, c.d_model, c.d_ff))
        self.down = kernels((c.n_experts, c.d_ff, c.d_model))

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        probabilities = jax.nn.softmax(widened(self.router(x)), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, c.experts_per_token)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        rows = x.reshape(-1, c.d_model)[order // c.experts_per_token]
        counts = jnp.bincount(expert, length=c.n_experts).astype(jnp.int32)
        act = _ACTIVATIONS[c.activation]
        results = self.down(act(self.gate(rows, counts)) * self.up(rows, counts), counts)
        results = results[jnp.argsort(order)].reshape(*chosen.shape, c.d_model)
        return jnp.sum(widened(results) * weights[..., None], axis=-2).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and MLP in sequence or in parallel, with norms on inputs and outputs as the config says."""

    def __init__(self, config: CausalLMConfig, index: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        norm = partial(Norm, config, config.d_model, dtype=dtype)
        self.parallel, self.residual_scale = config.parallel, config.residual_scale
        self.attention_norm = norm() if config.input_norms else None
        self.attention = Attention(config, index, rngs=rngs, dtype=dtype)
        self.attention_output_norm = norm() if config.output_norms else None
        self.mlp_norm = norm() if config.input_norms else None
        self.mlp = (Experts if config.n_experts > 1 else MLP)(config, rngs=rngs, dtype=dtype)
        self.mlp_output_norm = norm() if config.output_norms else None

    def __call__(self, x: jax.Array, tables: RotaryTables | None) -> jax.Array:
        y = self.attention(_normed(self.attention_norm, x), tables)
        after = x + self._scaled(_normed(self.attention_output_norm, y))
        y = self.mlp(_normed(self.mlp_norm, x if self.parallel else after))
        return after + self._scaled(_normed(self.mlp_output_norm, y))

    def _scaled(self, y: jax.Array) -> jax.Array:
        return y if self.residual_scale == 1 else y * jnp.asarray(self.residual_scale, y.dtype)


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class CausalLM(nnx.Module):
    """``tokens`` int ``[B, T]`` -> logits ``[B, T, vocab_size]`` in the dtype of the parameters.

    Rows start at position 0, and every token sees the tokens before it; pad rows of unequal length on the right.
    ``dtype`` is the dtype of fresh parameters; float64 needs ``jax_enable_x64``. ``stacked``: all layers form one
    scanned stack, with the same parameters plus a leading axis. Raises ``ValueError`` for a stack of layers with
    different windows, and in a call for more tokens than there are learned positions.

    Paths: ``embed/embedding``, ``positions/embedding`` if positions are learned, ``layers/{i}/...``, ``norm/scale``,
    ``lm_head/kernel`` unless tied. In a layer: ``attention_norm``, ``attention/{query,key,value,out}/kernel``,
    ``mlp_norm``, ``mlp/{gate,up,down}/kernel``, and where the config has them ``.../bias``,
    ``attention/{query_norm,key_norm}``, ``attention_output_norm``, ``mlp_output_norm``, ``mlp/router/kernel``; without
    ``input_norms`` there is no ``attention_norm`` and no ``mlp_norm``. Kernels are ``[in, out]``, with heads as
    ``[d_model, heads, head_dim]`` and ``[heads, head_dim, d_model]``; kernels of experts have a leading expert axis.
    """

    def __init__(
        self, config: CausalLMConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32, stacked: bool = False
    ) -> None:
        if stacked and len(set(config.windows)) > 1:
            raise ValueError(
                f"CausalLM: expected layers with equal windows for a stack, got {config.windows}; use stacked=False"
            )
        self.config = config
        self.stacked = stacked
        table = partial(Embedding, config.d_model, rngs=rngs, dtype=dtype, std=config.init_std)
        self.embed = table(config.vocab_size)
        self.positions = None if config.max_length is None else table(config.max_length)
        layers = [Block(config, i, rngs=rngs, dtype=dtype) for i in range(config.n_layers)]
        self.layers: Any = stack_layers(layers) if stacked else nnx.List(layers)
        self.norm = Norm(config, config.d_model, dtype=dtype)
        if not config.tied:
            shape = (config.d_model, config.vocab_size)
            self.lm_head = Kernel("btd,dv->btv", shape, rngs=rngs, dtype=dtype, std=config.init_std)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        length = tokens.shape[1]
        x = self.embed(tokens)
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if self.positions is not None:
            # An index beyond the table would silently read the last row.
            if length > (config.max_length or 0):
                raise ValueError(
                    f"CausalLM: expected at most {config.max_length} tokens in a row, got {length}"
                )
            x = x + self.positions(jnp.arange(length))
        rotary, of_windows = config.rotary, config.window_rotary
        tables = None if rotary is None else rotary_tables(length, rotary, config.head_dim)
        narrow = tables if of_windows is None else rotary_tables(length, of_windows, config.head_dim)
        windows = config.windows or (None,) * config.n_layers
        if self.stacked:
            x = scan_layers(self.layers, x, tables if windows[0] is None else narrow)
        else:
            for layer, window in zip(self.layers, windows, strict=True):
                x = layer(x, tables if window is None else narrow)
        x = self.norm(x)
        logits = self.embed.attend(x) if config.tied else self.lm_head(x)
        if config.logit_scale != 1:
            logits = logits * jnp.asarray(config.logit_scale, logits.dtype)
        return softcap(logits, config.logit_cap)
