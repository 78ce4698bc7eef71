"""Models written for this runtime; any flax nnx model whose only variables are parameters can be sharded."""

from jax_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

__all__ = ["Decoder", "DecoderConfig", "next_token_loss"]
