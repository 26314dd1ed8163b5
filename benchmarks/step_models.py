"""The models of the benchmark of whole steps: each makes a model and one batch of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise.apps import models


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is trained.

    Attributes:
        name: in the table.
        goal: of the ratio to the plain step.
        build: the model.
        examples: as many inputs and labels as asked for.
        batch: how many examples a batch has.
        low: whether under bfloat16 autocast.
    """

    name: str
    goal: float
    build: Callable[[], nn.Module]
    examples: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    low: bool = False


class Block(nn.Module):
    """A layer of BERT: attention and two linear layers, each followed by LayerNorm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.first, self.second = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.dropout, self.heads = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        drop = 0.1 if self.training else 0.0
        met = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        x = self.first(x + self.dropout(self.out(met.transpose(1, 2).flatten(2))))
        return self.second(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Classifier(nn.Module):
    """BERT-base, randomly initialised, with a linear layer on its first token.

    Of torch's layers, since the one of Hugging Face takes a slower attention while a CUDA graph is
    captured. Positions are looked up for every example: Opacus cannot tell rows apart that the
    examples share.
    """

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(30_522, width), nn.Embedding(512, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.places(places) + self.kinds(torch.zeros_like(tokens))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Language(nn.Module):
    """GPT-2 of the small size unless said, randomly initialised, with its tied output."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.gpt(tokens, position_ids=places, use_cache=False).logits


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(rank: int = 8) -> nn.Module:
    """BERT-base with low-rank updates of the queries and values, and a trained head."""
    model = Classifier().requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        block.query, block.value = LoRA(block.query, rank), LoRA(block.value, rank)
    return model


class Residual(nn.Module):
    """A block of a wide residual network, with GroupNorm before each activation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.GroupNorm(16, inputs)
        self.second = nn.GroupNorm(16, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = inputs == outputs and stride == 1
        self.short = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first(x))
        short = x if self.short is None else self.short(y)
        return short + self.conv2(functional.relu(self.second(self.conv1(y))))


def wide_resnet(depth: int = 16, widen: int = 4) -> nn.Module:
    """WRN-depth-widen for 32x32 pictures and ten classes."""
    widths, count = [16, *(16 * widen * 2**k for k in range(3))], (depth - 4) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for k in range(3):
        for i in range(count):
            first = i == 0
            layers.append(
                Residual(
                    widths[k] if first else widths[k + 1], widths[k + 1], 2 if first and k else 1
                )
            )
    layers += [nn.GroupNorm(16, widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(widths[3], 10))


def _tokens(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(count: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 30_000, (count, length)), torch.randint(0, 2, (count,))

    return make


def _pictures(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


def _text(count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 50_000, (count, 512))
    return tokens, tokens


def loss(case: Case) -> Any:
    """The mean over examples of the loss of one: of all positions for a language model."""

    def language(logits: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])

    return language if case.name.startswith("GPT") else functional.cross_entropy


CASES = (
    Case("BERT-base, 128 tokens, batch 128", 1.20, Classifier, _tokens(128), 128),
    Case("BERT-base, 512 tokens, batch 64", 1.20, Classifier, _tokens(512), 64),
    Case("BERT-base, 128 tokens, batch 128, bf16", 1.30, Classifier, _tokens(128), 128, low=True),
    Case("BERT-base, 128 tokens, batch 32", 1.35, Classifier, _tokens(128), 32),
    Case("BERT-base, LoRA rank 8, 128 tokens, batch 128", 1.15, lora, _tokens(128), 128),
    Case("GPT-2 small, 512 tokens, batch 16, bf16", 1.30, Language, _text, 16, low=True),
    Case("WRN-16-4, batch 256", 1.60, wide_resnet, _pictures, 256),
    Case(
        "the paper's convnet, batch 512", 1.25,
        lambda: models.build("convnet", (3, 32, 32), 10), _pictures, 512,
    ),
)  # fmt: skip
