"""A small GPT (Radford et al. 2019 layout: pre-norm blocks, learned positions, tied output) over bytes."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """10.8 million parameters with 6 layers, 6 heads, 384 wide."""

    def __init__(self, layers: int, heads: int, width: int, block: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # residual projections are scaled down with depth, as GPT-2 does
                depth = (2 * layers) ** -0.5 if name.endswith(("attention_out.weight", "mlp.2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of predicting each next byte, in nats."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
