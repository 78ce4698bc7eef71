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

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.models.causal_lm_config import CausalLMConfig
from jax_impl.models.causal_lm_layers import Block, Norm, rotary_tables, softcap
from jax_impl.models.decoder import Embedding, Kernel
from jax_impl.modules.stack import scan_layers, stack_layers


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
