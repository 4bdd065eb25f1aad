"""Ordinary networks of the sizes that people train many of, by name in job files and by class in Python.

They know nothing about packs and are written as a user would write them.
Shape legend: B rows of a batch, T tokens, D features, C channels, H and W height and width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _drop(network: MLP | CNN | GPT | _Decoder, x: Tensor) -> Tensor:
    return F.dropout(x, network.dropout, network.training) if network.dropout else x


class MLP(nn.Module):
    """A multilayer perceptron with ReLU, with two hidden layers by default; inputs of any shape are flattened."""

    def __init__(
        self, features: int = 784, hidden: int = 256, classes: int = 10, *, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [features, *[hidden] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)
        self.dropout = dropout

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = x_BD.flatten(1)
        for layer in self.hidden:
            x_BD = _drop(self, F.relu(layer(x_BD)))
        logits: Tensor = self.head(x_BD)
        return logits


class CNN(nn.Module):
    """Two convolutions with pooling and two linear layers; by default for 28 x 28 grey images."""

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: int = 1,
        side: int = 28,
        width: int = 32,
        hidden: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (side // 4) ** 2, hidden)
        self.head = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.max_pool2d(F.relu(self.conv1(x_BCHW)), 2)
        x_BCHW = F.max_pool2d(F.relu(self.conv2(x_BCHW)), 2)
        x_BD = F.relu(self.hidden(_drop(self, x_BCHW).flatten(1)))
        logits: Tensor = self.head(_drop(self, x_BD))
        return logits


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm and a shortcut, which is the identity or a 1 x 1 projection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(self.norm2(self.conv2(y_BCHW)) + self.shortcut(x_BCHW))


class ResNet18(nn.Module):
    """ResNet-18 as it is used on CIFAR, with a 3 x 3 stem and no pooling before the stages."""

    def __init__(self, classes: int = 10, width: int = 64, *, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages += [Residual(inputs, out, stride), Residual(out, out, 1)]
            inputs = out
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stages(F.relu(self.norm(self.stem(x_BCHW))))
        logits: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits


class _Decoder(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x_BTD = x_BTD + _drop(self, self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        wide_BTD = F.gelu(self.up(self.norm2(x_BTD)))
        out_BTD: Tensor = x_BTD + _drop(self, self.down(wide_BTD))
        return out_BTD


class GPT(nn.Module):
    """A small decoder-only transformer over bytes, for sequences of exactly `tokens` bytes."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        tokens: int = 128,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(_Decoder(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.dropout = dropout

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = _drop(self, self.embedding(x_BT) + self.position)
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


class LSTMClassifier(nn.Module):
    """An LSTM that classifies a sequence by its last hidden state."""

    def __init__(self, features: int = 32, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        states_BTD, _ = self.lstm(x_BTD)
        logits: Tensor = self.head(states_BTD[:, -1])
        return logits


class Encoder(nn.Module):
    """An nn.TransformerEncoder over a short sequence, with dropout and mean pooling."""

    def __init__(
        self,
        features: int = 32,
        width: int = 64,
        *,
        layers: int = 2,
        heads: int = 4,
        classes: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(x_BTD)).mean(1))
        return logits


MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet18": ResNet18,
    "gpt": GPT,
    "lstm": LSTMClassifier,
    "encoder": Encoder,
}
"""The names that job files can use."""
