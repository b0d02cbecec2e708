"""Models of the PyTorch programs, written out: nothing is downloaded."""

from __future__ import annotations

import torch
from common import DEVICE
from torch import nn
from torch.nn import functional as f


class Cnn(nn.Module):
    """A small image classifier (32 × 32, 10 classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),  # pooling is not deterministic
            nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 64, 128), nn.ReLU(), nn.Dropout(0.1),
                                  nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def cnn_batch(size: int = 64, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of random images and classes, made on the CPU."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 32, 32, generator=made), torch.randint(0, 10, (size,), generator=made)


class Block(nn.Module):
    """A transformer block with causal attention and an optional cache of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = [key, value]
        y = f.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(f.gelu(self.grow(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """The shape of GPT-2 124M: 12 layers, 12 heads, width 768, 50,257 tokens; head and embedding share weights."""

    def __init__(self, layers: int = 12, heads: int = 12, width: int = 768, tokens: int = 50257,
                 context: int = 1024) -> None:
        super().__init__()
        self.tokens = tokens
        self.words, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, caches: list[list[torch.Tensor]] | None = None,
                start: int = 0) -> torch.Tensor:
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index])
        return f.linear(self.norm(x), self.words.weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return f.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy generation of ``count`` tokens with a cache of keys and values."""
        caches: list[list[torch.Tensor]] = [[] for _ in self.blocks]
        token, start, made = prompt, 0, []
        for _ in range(count):
            logits = self(token, caches, start)[:, -1]
            start += token.shape[1]
            token = logits.argmax(-1, keepdim=True)
            made.append(token)
        return torch.cat(made, 1)


def small(size: int) -> Gpt2:
    """A GPT-2 for trying a program without a GPU."""
    return Gpt2(layers=2, heads=2, width=32, tokens=size, context=64)


def gpt2() -> Gpt2:
    return Gpt2() if DEVICE == "cuda" else small(97)
