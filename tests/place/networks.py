"""Small networks of other people's making, with a sample each."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]
"""A network, what it is called with, and the tensor of its output to compare."""


def tokens(rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(0, 90, (rows, length)), "attention_mask": mask}


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 90, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=2, max_position_embeddings=32, **sizes))
    return model, tokens(), lambda out: out.logits


def gpt2(*, tied: bool = True) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=90, n_positions=32, tie_word_embeddings=tied)
    return GPT2LMHeadModel(config), tokens(), lambda out: out.logits


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, **sizes))
    return model, {"pixel_values": torch.randn(3, 3, 16, 16)}, lambda out: out.logits


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16), lambda out: out


class Recurrent(nn.Module):
    """A module that gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 10, 2, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (last, _) = self.lstm(self.embed(x))
        out: Tensor = self.head(hidden[:, -1] + last[-1])
        return out


def recurrent() -> Made:
    return Recurrent(), torch.randint(0, 20, (3, 6)), lambda out: out


def in_place() -> Made:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 16, 5)]
    return nn.Sequential(*layers), torch.randn(3, 3, 6, 6), lambda out: out


def chain(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
