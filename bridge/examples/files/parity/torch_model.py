"""The original: a decoder of one block in PyTorch."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.attention_norm = nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        h = self.attention_norm(x)
        q, k, v = self.query(h), self.key(h), self.value(h)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x + self.down(gelu(self.up(self.mlp_norm(x)))))
