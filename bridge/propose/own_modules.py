"""The layouts of torch's and flax's own modules, for cases in which shapes allow more than one layout.

torch                              flax
weight [out, in, *window]          kernel [*window, in, out]        linear layers, convolutions
in_proj_weight [(q + k + v), in]   query, key, value / kernel       `nn.MultiheadAttention`, also of biases
weight_ih_l0 [gates, in]           ii, if, ig, io / kernel          `nn.LSTM`; `nn.GRU` has ir, iz, in
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.propose.axes import Fit
from bridge.propose.names import FUSED_WORDS, Family

COUNTER = "num_batches_tracked"
"""Torch's norms count their batches, flax's norms do not."""
FLIPPED = "flax flips the kernel of a transposed convolution, unless transpose_kernel=True"

_MATRICES = frozenset({"weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"})
_RECURRENT = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
_AS_IT_IS = _MATRICES | frozenset(
    {"in_proj_bias", "bias", "scale", "embedding", "mean", "var", "running_mean", "running_var"}
)
_TRANSPOSED = frozenset({"transpose", "transposed", "deconv", "convt", "tconv", "upconv", "up", "upsample"})
# Hugging Face's Conv1D is a linear layer whose weight is [in, out], and nn.Bilinear's weight is [out, in, in].
_UNUSUAL = re.compile(r"\bc_(attn|fc|proj)\b|bilinear")


def is_known_layout(fit: Fit, turned: bool | None) -> bool:
    """Whether the modules imply the layout of ``fit``. ``turned``: whether tensors of these names are transposed if
    shapes leave no choice; None without such tensors."""
    leaves = {entry.family.leaf for entry in (*fit.a, *fit.b)}
    torch = leaves - {"kernel"}
    if "kernel" not in leaves:
        return all(leaf in _AS_IT_IS or leaf.startswith(_RECURRENT) for leaf in leaves) and fit.conventional
    if not torch or not all(leaf in _MATRICES or leaf.startswith(_RECURRENT) for leaf in torch):
        return False
    unusual = turned is False or any(_UNUSUAL.search(entry.family.path) for entry in (*fit.a, *fit.b))
    return not unusual and fit.conventional and not may_be_flipped(fit)


def may_be_flipped(fit: Fit) -> bool:
    """Whether a convolution's kernel may belong to a transposed one: by its name, or with inputs before outputs."""
    entries = (*fit.a, *fit.b)
    if {entry.family.leaf for entry in entries} != {"weight", "kernel"}:
        return False
    if min(len(entry.family.shape) for entry in entries) < 3:
        return False
    return not fit.conventional or any(entry.family.words & _TRANSPOSED for entry in entries)


def in_usual_order(parts: Sequence[Family]) -> Sequence[Family] | None:
    """Query, key and value, or gate and up, in that order; None for other parts."""
    for names in FUSED_WORDS:
        named = [part for name in names for part in parts if name in part.words]
        if len(parts) == len(names) and sorted(map(id, named)) == sorted(map(id, parts)):
            return named
    return None
