"""The four networks of Pack's table, written from their papers for ImageNet-shaped input.

MobileNetV2 (Sandler et al. 2018), ResNet-50 (He et al. 2016, stride in the 3 x 3 convolution),
DenseNet-121 (Huang et al. 2017). Pack does not give the widths of its MLP-3; ours is three linear
layers of hidden width 128, so that the first layer (150,528 inputs) does not drown the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

Layers = list[nn.Module]


ImageNet = 1000
"""The number of classes."""
Kernel = int | tuple[int, int]


def scaled(width: float) -> Callable[[int], int]:
    """Return a function that scales a number of channels by `width`."""
    return lambda channels: max(4, round(channels * width))


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: Layers = [part for a, b in pairwise(widths[:-1]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def mlp3(side: int = 224, hidden: int = 128, classes: int = ImageNet) -> nn.Module:
    """Return three linear layers over the flattened image."""
    return nn.Sequential(nn.Flatten(), *mlp(3 * side * side, hidden, hidden, classes))


class Residual(nn.Sequential):
    """Adds its input to the output of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + super().forward(x)  # type: ignore[no-untyped-call]
        return y


class Dense(nn.Sequential):
    """Concatenates its input and the output of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)  # type: ignore[no-untyped-call]


def _conv_norm(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Layers:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


def _classifier(layers: Layers, channels: int, classes: int, dropout: float = 0.0) -> nn.Module:
    last: Layers = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, *last, nn.Linear(channels, classes))


def mobilenet_v2(classes: int = ImageNet) -> nn.Module:
    """Return MobileNetV2: inverted residuals with linear bottlenecks, width 1.0."""
    # expansion, output channels, repeats, stride of the first
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: Layers = [*_conv_norm(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expand, out, repeats, first in stages:
        for stride in (first, *[1] * (repeats - 1)):
            wide = channels * expand
            widen: Layers = [*_conv_norm(channels, wide, 1), nn.ReLU6()] if expand != 1 else []
            block = [*widen, *_conv_norm(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_conv_norm(wide, out, 1)]
            layers.append(Residual(*block) if stride == 1 and channels == out else nn.Sequential(*block))
            channels = out
    return _classifier([*layers, *_conv_norm(channels, 1280, 1), nn.ReLU6()], 1280, classes, dropout=0.2)


class Conv(nn.Module):
    """A convolution without bias, followed by batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class _Bottleneck(nn.Module):
    """Three convolutions, 1 x 1, 3 x 3 and 1 x 1, with a shortcut around them."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = Conv(inputs, middle, 1)
        self.middle = Conv(middle, middle, 3, stride, 1)
        self.expand = nn.Conv2d(middle, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.expand(self.middle(self.reduce(x)))) + self.shortcut(x))


class ResNet50(nn.Module):
    """A network of sixteen residual blocks of three convolutions and one fully connected layer."""

    def __init__(self, width: float = 1.0, classes: int = ImageNet) -> None:
        super().__init__()
        c, blocks, inputs = scaled(width), list[nn.Module](), scaled(width)(64)
        self.stem = Conv(3, inputs, 7, 2, 3)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        for stage, count in enumerate((3, 4, 6, 3)):
            for index in range(count):
                middle, outputs = c(64 * 2**stage), c(256 * 2**stage)
                blocks.append(_Bottleneck(inputs, middle, outputs, 2 if stage and not index else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.avgpool(self.blocks(self.maxpool(self.stem(x)))).flatten(1))
        return out


def densenet121(classes: int = ImageNet, growth: int = 32) -> nn.Module:
    """Return DenseNet-121: dense blocks of 6, 12, 24 and 16 layers, growth 32, halving between them."""
    channels = 2 * growth
    layers: Layers = [*_conv_norm(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for repeats in (6, 12, 24, 16):
        if repeats > 6:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(repeats):
            narrow: Layers = [nn.BatchNorm2d(channels), nn.ReLU(), *_conv_norm(channels, 4 * growth, 1), nn.ReLU()]
            layers.append(Dense(*narrow, nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    return _classifier(layers, channels, classes)
