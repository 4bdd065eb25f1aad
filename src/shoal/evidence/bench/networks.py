"""What the benchmark trains: the networks of `shoal.models`, and one smaller still."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models import CNN, GPT, MLP, Encoder, LSTMClassifier, ResNet18

__all__ = ["CNN", "GPT", "MLP", "Encoder", "LSTMClassifier", "ResNet18", "TinyMLP"]


class TinyMLP(nn.Module):
    """One hidden layer: a step is almost all overhead, so packing has the most to give."""

    def __init__(self, features: int = 64, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x_BD: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.hidden(x_BD.flatten(1))))
        return logits
