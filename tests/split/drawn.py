"""Networks drawn by hypothesis: fully connected, convolutional, residual, attention; widths as they come."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTHS = st.integers(4, 11)


@dataclass
class Drawn:
    model: nn.Module
    inputs: tuple[Any, ...]


@st.composite
def fully_connected(draw: st.DrawFn) -> Drawn:
    widths = draw(st.lists(WIDTHS, min_size=1, max_size=3))
    layers: list[nn.Module] = []
    before = 5
    for width in widths:
        layers.append(nn.Linear(before, width, bias=draw(st.booleans())))
        norm = draw(st.sampled_from([None, nn.BatchNorm1d, nn.LayerNorm]))
        layers += [norm(width)] if norm is not None else []
        layers.append(draw(st.sampled_from([nn.ReLU, nn.Tanh, nn.PReLU, nn.Dropout]))())
        before = width
    return Drawn(nn.Sequential(*layers, nn.Linear(before, 3)), (torch.rand(6, 5),))


@st.composite
def convolutional(draw: st.DrawFn) -> Drawn:
    first, second = draw(WIDTHS), draw(WIDTHS)
    layers: list[nn.Module] = [nn.Conv2d(2, first, 3, bias=draw(st.booleans()))]
    layers += [nn.BatchNorm2d(first)] if draw(st.booleans()) else []
    layers += [nn.ReLU(), nn.MaxPool2d(2)]
    if draw(st.booleans()):
        layers += [nn.Conv2d(first, first, 1, groups=first)]
    layers += [nn.Conv2d(first, second, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * second, 3)]
    return Drawn(nn.Sequential(*layers), (torch.rand(4, 2, 8, 8),))


class Residual(nn.Module):
    """x + f(x), over a width of its own inside."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, inner), nn.BatchNorm1d(inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.norm(self.up(x))))
        return y


@st.composite
def residual(draw: st.DrawFn) -> Drawn:
    width = draw(WIDTHS)
    blocks = [Residual(width, draw(WIDTHS)) for _ in range(draw(st.integers(1, 3)))]
    return Drawn(nn.Sequential(nn.Linear(5, width), *blocks, nn.Linear(width, 3)), (torch.rand(6, 5),))


class Attention(nn.Module):
    """Heads written by hand, with sizes in the code."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(6, 3 * heads * width), nn.Linear(heads * width, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).split(self.heads * self.width, dim=2)
        q, k, v = (t.view(rows, tokens, self.heads, self.width).transpose(1, 2) for t in (q, k, v))
        mixed = torch.softmax(q @ k.transpose(-2, -1) / self.width**0.5, -1) @ v
        y: Tensor = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, self.heads * self.width))
        return y


@st.composite
def transformers(draw: st.DrawFn) -> Drawn:
    heads = draw(st.integers(4, 6))
    if draw(st.booleans()):
        inner: nn.Module = Attention(heads, draw(st.integers(1, 3)))
        return Drawn(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), inner, nn.Linear(6, 3)), (torch.rand(2, 4, 5),))
    inner = nn.TransformerEncoderLayer(2 * heads, heads, draw(WIDTHS), dropout=0.1, batch_first=draw(st.booleans()))
    return Drawn(nn.Sequential(nn.Linear(5, 2 * heads), inner, nn.Linear(2 * heads, 3)), (torch.rand(2, 4, 5),))


def networks() -> st.SearchStrategy[Drawn]:
    return st.one_of(fully_connected(), convolutional(), residual(), transformers())
