"""Models written for this runtime; any flax nnx model can be sharded."""

from jax_impl.models.causal_lm import CausalLM
from jax_impl.models.causal_lm_config import CausalLMConfig, Rotary
from jax_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

__all__ = ["CausalLM", "CausalLMConfig", "Decoder", "DecoderConfig", "Rotary", "next_token_loss"]
