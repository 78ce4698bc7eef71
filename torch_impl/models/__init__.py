"""Models that both runtimes train."""

from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

__all__ = ["Decoder", "DecoderConfig", "next_token_loss"]
