"""Planted bugs in the pairs that were written after the thresholds were chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.parity import gru_pair, scanned_pair, seq2seq_pair, unet_pair
from tests.support.parity.bug_tools import (
    Bug,
    bug,
    call,
    doubled_gradient,
    edit,
    put,
    rolled,
    stale,
    stopped_input,
    torch_weight,
)
from tests.support.parity.fresh_nnx_bugs import NNX_BUGS
from tests.support.parity.ported import changed_leaf, rewritten

_BACKWARD: dict[str, Any] = {"direction": "backward"}


def _directions_swapped(module: Any, original: Any, x: torch.Tensor) -> Any:
    out, state = original(x)
    return torch.cat(out.chunk(2, -1)[::-1], -1), state


_gru, _unet = partial(bug, "gru"), partial(bug, "unet")
_scanned, _routed, _seq2seq = partial(bug, "scanned"), partial(bug, "routed"), partial(bug, "seq2seq")
_in_gru, _in_unet = partial(rewritten, gru_pair.__file__), partial(rewritten, unet_pair.__file__)
_in_scan, _in_seq = partial(rewritten, scanned_pair.__file__), partial(rewritten, seq2seq_pair.__file__)
_NEW = "(reset * hidden) @ p['w_state'][:, 2 * HIDDEN :] + p['b_state'][2 * HIDDEN :]"
_ORDER = "reset_{0}, update_{0}, new_{0}"
_OTHER = "update_{0}, reset_{0}, new_{0}"

# Between two taps nobody can tell a part from what it is given: either is right.
GRU: tuple[Bug, ...] = (
    _gru("reset before the product", _in_gru(("reset * new_h", _NEW)), "first"),
    _gru(
        "reset and update swapped",
        _in_gru(*((_ORDER.format(x), _OTHER.format(x)) for x in "xh")),
        "first",
    ),
    _gru(
        "time not reversed back",
        _in_gru(('p["backward"], x, True', 'p["backward"], x[:, ::-1], False')),
        "first",
    ),
    _gru("initial state of ones", _in_gru(("jnp.zeros((len", "jnp.ones((len")), "first"),
    _gru("no bias of the state", _in_gru((' + p["b_state"]', "")), "first"),
    _gru("last position in place of the mean", _in_gru(("x.mean(1) @", "x[:, -1] @")), ""),
    _gru("eps", _in_gru(("var + 1e-5", "var + 1e-3")), "norm"),
    _gru("embedding not scaled", edit("torch", "", (" * 2.0", "")), "", also="first"),
    _gru("no gradient through a layer", stopped_input("torch", "second"), "second", **_BACKWARD),
    _gru("directions in another order", call("torch", "second", _directions_swapped), "second"),
    _gru(
        "stale kernel",
        changed_leaf("second/backward/w_state", stale()),
        "second",
        "second.weight_hh_l0_reverse",
    ),
)
ROUTED: tuple[Bug, ...] = (
    _routed(
        "output not weighted",
        edit("torch", "mixtures.1", ("share[here][:, None] * expert", "expert")),
        "mixtures.1",
    ),
    _routed(
        "exact GELU",
        edit("jax", "mixtures/0/experts/1", ("approximate=True", "approximate=False")),
        "mixtures.0.experts.1",
        also="mixtures.0",
    ),
    _routed(
        "no factor in the router's loss", edit("jax", "mixtures/0", ("EXPERTS * jnp", "jnp")), "mixtures.0"
    ),
    _routed("router's losses summed", edit("jax", "", ("(auxiliary).mean()", "(auxiliary).sum()")), ""),
    _routed("worst expert", edit("jax", "mixtures/1", ("jnp.argmax", "jnp.argmin")), "mixtures.1"),
    _routed(
        "no gradient into the router",
        edit("torch", "mixtures.0", ("share[here][:, None] *", "share[here][:, None].detach() *")),
        "mixtures.0",
        **_BACKWARD,
    ),
    _routed("softmax over positions", edit("jax", "mixtures/1", ("axis=-1)", "axis=1)")), "mixtures.1"),
    _routed("mean in place of the last position", edit("jax", "", ("x[:, -1]", "x.mean(1)")), ""),
    _routed("eps", put("torch", "norms.1", eps=1e-3), "norms.1"),
    _routed("no residual", edit("jax", "", ("x = x + y", "x = y")), ""),
    _routed(
        "experts in another order",
        edit("jax", "mixtures/0", ("in self.experts]", "in list(self.experts)[::-1]]")),
        "mixtures.0",
    ),
)
SCANNED: tuple[Bug, ...] = (
    _scanned(
        "eps",
        _in_scan(
            (
                'epsilon=1e-5, use_fast_variance=False, name="attention_norm"',
                'epsilon=1e-3, name="attention_norm"',
            )
        ),
        "layers.0.attention_norm",
    ),
    _scanned("GELU", _in_scan(("jax.nn.silu(", "jax.nn.gelu(")), "layers.0.mlp"),
    _scanned("rope base", _in_scan(("HEADS, 1000.0)", "HEADS, 10000.0)")), "layers.0.attention"),
    _scanned("no mask", _in_scan(("** -0.5, causal=True", "** -0.5, causal=False")), "layers.0.attention"),
    _scanned("residual after the norm", _in_scan(("return x + MLP(", "return y + MLP(")), "layers.0"),
    _scanned("logits scaled", _in_scan(("embed.attend(x)", "embed.attend(x / 4)")), ""),
    _scanned(
        "layers in another order",
        changed_leaf("layers/mlp/up/kernel", rolled(0)),
        "layers.0.mlp.up",
        "layers.0.mlp.up.weight",
    ),
    _scanned("norm left out", edit("torch", "layers.1", ("self.mlp_norm(x)", "x")), "layers.1"),
    _scanned(
        "no mask",
        edit("torch", "layers.2.attention", ("is_causal=True", "is_causal=False")),
        "layers.2.attention",
    ),
    _scanned("a layer skipped", edit("torch", "", ("in self.layers:", "in self.layers[:2]:")), ""),
    _scanned(
        "no gradient along the residual",
        edit("torch", "layers.1", ("return x + self", "return x.detach() + self")),
        "layers.1",
        **_BACKWARD,
    ),
)
UNET: tuple[Bug, ...] = (
    _unet("SAME at stride 2", _in_unet(("pad = ((self.dilation,) * 2,) * 2", 'pad = "SAME"')), "down1.conv"),
    _unet(
        "no dilation", _in_unet(("dilation=2, groups=2, name", "dilation=1, groups=2, name")), "middle.conv"
    ),
    _unet("nearest", _in_unet(('"bilinear")\n        x = Unit', '"nearest")\n        x = Unit')), ""),
    _unet(
        "concatenated in another order", _in_unet(("concatenate([second, x]", "concatenate([x, second]")), ""
    ),
    _unet("two groups in the norms", _in_unet(("nn.GroupNorm(4, eps", "nn.GroupNorm(2, eps")), "down1.norm"),
    _unet("ReLU", _in_unet(("jax.nn.silu(y)", "jax.nn.relu(y)")), "down1"),
    _unet(
        "transposed convolution shifted",
        _in_unet(("transpose_kernel=True, name", "padding=((1, 3), (1, 3)), transpose_kernel=True, name")),
        "raise1",
    ),
    _unet("align_corners", edit("torch", "", ("align_corners=False", "align_corners=True")), ""),
    _unet(
        "padding not counted",
        edit("torch", "", ("stride=2, padding=1)", "stride=2, padding=1, count_include_pad=False)")),
        "",
    ),
    _unet("eps", put("torch", "up1.norm", eps=1e-3), "up1.norm"),
    _unet("stale kernel", torch_weight("up2.skip.weight", stale()), "up2.skip", "up2.skip.weight"),
    _unet("gradient doubled", doubled_gradient("torch", "middle"), "middle", **_BACKWARD),
    _unet("no gradient into a unit", stopped_input("torch", "up2"), "up2", **_BACKWARD),
)
# As in the linen module; torch's has the same line before another one.
_SCALED = "x = self.embed(ids) * math.sqrt(WIDTH)\n        return x + jnp"
SEQ2SEQ: tuple[Bug, ...] = (
    _seq2seq(
        "memory is the embedding",
        _in_seq(("x = block(x, memory, causal", "x = block(x, self.embedded(source), causal")),
        "",
    ),
    _seq2seq("embedding not scaled", _in_seq((_SCALED, "x = self.embed(ids)\n        return x + jnp")), ""),
    _seq2seq("padding seen", _in_seq(("(source != 0)", "(source >= 0)")), ""),
    _seq2seq("mask off by one", _in_seq(("bool))[None, None]", "bool), 1)[None, None]")), ""),
    _seq2seq("GELU, tanh form", _in_seq(("approximate=False", "approximate=True")), "decoder.0"),
    _seq2seq("norm after", put("torch", "encoder.1", norm_first=False), "encoder.1"),
    _seq2seq("eps", put("torch", "decoder.1.norm2", eps=1e-3), "decoder.1.norm2"),
    _seq2seq(
        "four heads", put("torch", "decoder.0.self_attn", num_heads=4, head_dim=4), "decoder.0.self_attn"
    ),
    _seq2seq(
        "stale value kernel",
        changed_leaf("decoder_1/multihead_attn/value/kernel", stale()),
        "decoder.1.multihead_attn",
        "decoder.1.multihead_attn.in_proj_weight",
    ),
    _seq2seq(
        "no gradient into the encoder",
        _in_seq(
            (
                "memory = self.encoder_norm(memory)\n        causal",
                "memory = jax.lax.stop_gradient(self.encoder_norm(memory))\n        causal",
            )
        ),
        "",
        **_BACKWARD,
    ),
)
FRESH_BUGS: tuple[Bug, ...] = GRU + ROUTED + SCANNED + UNET + SEQ2SEQ + NNX_BUGS
