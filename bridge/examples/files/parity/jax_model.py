"""The port: the same decoder in flax. One line has a mistake."""

import jax
from flax import nnx
from jax.nn import dot_product_attention, gelu


class Decoder(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        self.query, self.key, self.value, self.out = (nnx.Linear(32, 32, rngs=rngs) for _ in range(4))
        self.mlp_norm = nnx.LayerNorm(32, rngs=rngs)
        self.up, self.down, self.head = (nnx.Linear(*n, rngs=rngs) for n in ((32, 128), (128, 32), (32, 64)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        h = self.attention_norm(x)
        q, k, v = (p(h)[:, :, None] for p in (self.query, self.key, self.value))
        x = x + self.out(dot_product_attention(q, k, v, is_causal=True)[:, :, 0])
        return self.head(x + self.down(gelu(self.up(self.mlp_norm(x)), approximate=False)))
