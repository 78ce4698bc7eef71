"""Wrong functions that planted bugs substitute for right ones. ``bugs.toml`` names them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.llama import modeling_llama

from jax_impl.models.causal_lm import rotary_tables, rotate, softcap
from jax_impl.models.causal_lm_config import Rotary
from tests.support.parity.causal_pairs import HEAD

Change = Callable[[np.ndarray], np.ndarray]
Tables = tuple[jax.Array, jax.Array]


def edited(function: Callable[..., Any], *changes: tuple[str, str], **helpers: Any) -> Callable[..., Any]:
    """A function with other source text and with other global functions under the names of ``helpers``.

    Each old text must occur exactly once, so that a change of the function it edits is noticed.
    """
    function = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert text.count(old) == 1, f"expected {old!r} once, found {text.count(old)} of it in\n{text}"
        text = text.replace(old, new)
    names = {"torch": torch, "jax": jax, "jnp": jnp} | function.__globals__ | helpers
    exec(compile(text, f"<edited {function.__qualname__}>", "exec"), names)
    return names[function.__name__]


# Values of attributes.


def none() -> None:
    """A value that TOML cannot write."""


def gelu() -> torch.nn.Module:
    return torch.nn.GELU()


def rotary(theta: float) -> Rotary:
    return Rotary(theta=theta)


# Other values of a weight.


def stale(scale: float) -> Change:
    """Values of a few steps ago: each moved by a little."""

    def change(values: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(5).standard_normal(values.shape)
        return (values + scale * noise).astype(values.dtype)

    return change


def rolled(axis: int, by: int) -> Change:
    """Everything moved along an axis, the end to the start."""
    return lambda values: np.roll(values, by, axis)


def swapped(first: int, second: int) -> Change:
    """Two entries of the first axis exchanged."""

    def change(values: np.ndarray) -> np.ndarray:
        values[[first, second]] = values[[second, first]]
        return values

    return change


def transposed(values: np.ndarray) -> np.ndarray:
    return values.reshape(40, 40).T.reshape(values.shape)


def halves_swapped_in_expert(values: np.ndarray) -> np.ndarray:
    values[2] = np.roll(values[2], len(values[2]) // 2, axis=0)
    return values


def halves_swapped(values: np.ndarray) -> np.ndarray:
    return np.roll(values, len(values) // 2, 0)


def gates_in_another_order(values: np.ndarray) -> np.ndarray:
    """Input, cell, forget, output."""
    first, second, third, fourth = np.split(values, 4)
    return np.concatenate([first, third, second, fourth])


def by_kind(values: np.ndarray) -> np.ndarray:
    """All queries, all keys, all values, instead of the three of one head after the other."""
    return values.reshape(4, 3, 8, -1).swapaxes(0, 1).reshape(values.shape)


def unbiased(values: np.ndarray) -> np.ndarray:
    """Variances over 20 values with the divisor 19."""
    return (values * np.float32(20 / 19)).astype(values.dtype)


def flipped(values: np.ndarray) -> np.ndarray:
    return values[::-1, ::-1]


def first_axes_swapped(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(0, 1)


def channels_in_reverse(values: np.ndarray) -> np.ndarray:
    return values[:, ::-1]


# Calls of modules: ``wrong(module, original, *args, **kwargs)``.


def masked(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A torch attention that gets another mask."""

    def forward(module: Any, original: Any, *args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        return original(*args, attention_mask=wrong(attention_mask.clone()), **kwargs)

    return forward


@masked
def sees_one_more(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(mask.shape[-1] - 1)
    mask[..., i, i + 1] = 0
    return mask


@masked
def window_of_four(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(4, mask.shape[-1])
    mask[..., i, i - 4] = torch.finfo(mask.dtype).min
    return mask


@masked
def window_of_five(mask: torch.Tensor) -> torch.Tensor:
    far = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(-5)
    return mask.masked_fill(far, torch.finfo(mask.dtype).min)


def without_bias(module: Any, original: Any, x: jax.Array) -> jax.Array:
    return original(x) - module.bias[...]


def norm_of_each_head(module: Any, original: Any, x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:-1], -1, 8)
    square = jnp.mean(heads * heads, axis=-1, keepdims=True)
    return (heads * jax.lax.rsqrt(square + module.epsilon)).reshape(x.shape) * module.scale[...]


def directions_swapped(module: Any, original: Any, x: torch.Tensor) -> Any:
    out, state = original(x)
    return torch.cat(out.chunk(2, -1)[::-1], -1), state


def norm_by_position(module: Any, original: Any, x: jax.Array) -> jax.Array:
    """A batch norm that reduces the batch only, not the positions."""
    mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
    return (x - mean) * jax.lax.rsqrt(var + module.epsilon) * module.scale[...] + module.bias[...]


def statistics_as_constants(module: Any, original: Any, x: torch.Tensor) -> torch.Tensor:
    """A batch norm through whose statistics no gradient flows."""
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0, keepdim=True)
    weight, bias = module.weight[:, None, None], module.bias[:, None, None]
    return (x - mean) * torch.rsqrt(var + module.eps) * weight + bias


def _still(y: Any) -> Any:
    return y.detach() if isinstance(y, torch.Tensor) else jax.lax.stop_gradient(y)


def doubled_gradient(module: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """A custom gradient that is wrong by a factor of two; the output is an array, or an array and more."""
    output = original(*args, **kwargs)
    first, *rest = output if isinstance(output, tuple) else (output,)
    twice = first + (first - _still(first))
    return (twice, *rest) if isinstance(output, tuple) else twice


def stopped_input(module: Any, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """No gradient flows into the first input of a module."""
    return original(_still(x), *args, **kwargs)


# Functions that a module's code calls.


def interleaved(x: jax.Array, tables: Tables) -> jax.Array:
    """Rotate channels side by side instead of halves."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = tables
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def rotate_by_base_600(x: jax.Array, tables: Any) -> jax.Array:
    return rotate(x, rotary_tables(x.shape[1], Rotary(theta=600.0), HEAD))


def later(tables: Tables) -> Tables:
    cos, sin = tables
    return jnp.roll(cos, -1, 0), jnp.roll(sin, -1, 0)


def straight_through(x: jax.Array, cap: float | None) -> jax.Array:
    return x + jax.lax.stop_gradient(softcap(x, cap) - x)


def rotate_half_backwards(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def tiled_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """Key head j for the query heads j, j + n, ... instead of neighbours."""
    return x.repeat(1, times, 1, 1)


_eager = partial(edited, modeling_llama.eager_attention_forward)
rope_backwards = edited(modeling_llama.apply_rotary_pos_emb, rotate_half=rotate_half_backwards)
eager_with_tiled_heads = _eager(repeat_kv=tiled_heads)
eager_in_bfloat16 = _eager((", dtype=torch.float32", ""))


# Changes of a whole module.


def another_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    with torch.no_grad():
        exponents = torch.arange(0, 10, 2, dtype=torch.float32) / 10
        rotary.inv_freq.copy_(1.0 / 10000.0**exponents)


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(1.02 * model.lm_head.weight.detach().clone())


def no_cap_of_logits(model: Any) -> None:
    model.config.final_logit_softcapping = None


def embed_scale_of_one(module: Any) -> None:
    module.embed_scale.fill_(1.0)
