"""The port: the same block in flax nnx. One line of it has a mistake."""

import jax
from flax import nnx

VOCABULARY, WIDTH, HEADS = 64, 32, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.attention_norm(x)
        q, k, v = (p(h).reshape(*h.shape[:2], HEADS, -1) for p in (self.query, self.key, self.value))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False))


class Decoder(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """``tokens [B, T]`` -> logits ``[B, T, VOCABULARY]``."""
        return self.head(self.block(self.embed(tokens)))
