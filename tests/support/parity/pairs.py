"""Small models in PyTorch and JAX, in pairs, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.parity.causal_pairs import FAMILIES, causal_pair
from tests.support.parity.convnext_pair import convnext_pair
from tests.support.parity.further_decoders import neox_pair, olmo2_pair, opt_pair
from tests.support.parity.further_encoders import bert_pair, t5_pair
from tests.support.parity.gru_pair import gru_pair
from tests.support.parity.pair_tools import Pair
from tests.support.parity.phi3_pair import phi3_pair
from tests.support.parity.recurrent_pairs import lstm_pair
from tests.support.parity.routed_pair import routed_pair
from tests.support.parity.scanned_pair import scanned_pair
from tests.support.parity.seq2seq_pair import seq2seq_pair
from tests.support.parity.tied_pair import tied_pair
from tests.support.parity.unet_pair import unet_pair
from tests.support.parity.vision_pairs import convnet_pair, vit_pair

__all__ = ["FRESH", "FURTHER", "PAIRS", "Pair", "build"]

_PAIRS: dict[str, Callable[[str, int], Pair]] = {
    **dict.fromkeys(FAMILIES, causal_pair),
    "convnet": convnet_pair,
    "convnet_train": convnet_pair,
    "vit": vit_pair,
    "lstm": lstm_pair,
}
_FURTHER: dict[str, Callable[[str, int], Pair]] = {
    "gpt_neox": neox_pair,
    "opt": opt_pair,
    "olmo2": olmo2_pair,
    "bert": bert_pair,
    "t5_encoder": t5_pair,
}
_FRESH: dict[str, Callable[[str, int], Pair]] = {
    "tied": tied_pair,
    "phi3": phi3_pair,
    "convnext": convnext_pair,
    "gru": gru_pair,
    "routed": routed_pair,
    "scanned": scanned_pair,
    "unet": unet_pair,
    "seq2seq": seq2seq_pair,
}
PAIRS = tuple(_PAIRS)
"""Names of the pairs."""
FURTHER = tuple(_FURTHER)
"""Names of the pairs of classes that no shipped mapping covers."""

FRESH = tuple(_FRESH)
"""Names of the pairs that were written after the thresholds were chosen."""


def build(name: str, seed: int) -> Pair:
    """The pair of this name with random weights and a random batch. Raises ``KeyError`` for an unknown name."""
    return (_PAIRS | _FURTHER | _FRESH)[name](name, seed)
