"""The four networks of Pack's table, written from their papers for ImageNet-shaped input.

MobileNetV2 (Sandler et al. 2018), ResNet-50 (He et al. 2016, stride in the 3 x 3 convolution),
DenseNet-121 (Huang et al. 2017). Pack does not give the widths of its MLP-3; ours is three linear
layers of hidden width 128, so that the first layer (150,528 inputs) does not drown the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Layers = list[nn.Module]


def mlp3(side: int = 224, hidden: int = 128, classes: int = 1000) -> nn.Module:
    """Three linear layers over the flattened image."""
    layers: Layers = [nn.Flatten(), nn.Linear(3 * side * side, hidden), nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, classes))


class Residual(nn.Module):
    """Adds its input, or a projection of it, to what its layers make of it."""

    def __init__(self, layers: Layers, shortcut: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + self.shortcut(x)
        return y


class Dense(nn.Sequential):
    """Puts what its layers make of its input behind the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)  # type: ignore[no-untyped-call]


def _conv_norm(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Layers:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


def _classifier(layers: Layers, channels: int, classes: int, dropout: float = 0.0) -> nn.Module:
    last: Layers = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, *last, nn.Linear(channels, classes))


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """Inverted residuals with linear bottlenecks, width 1.0."""
    # expansion, output channels, repeats, stride of the first
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: Layers = [*_conv_norm(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expand, out, repeats, first in stages:
        for stride in (first, *[1] * (repeats - 1)):
            wide = channels * expand
            widen: Layers = [*_conv_norm(channels, wide, 1), nn.ReLU6()] if expand != 1 else []
            block = [*widen, *_conv_norm(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_conv_norm(wide, out, 1)]
            layers.append(Residual(block) if stride == 1 and channels == out else nn.Sequential(*block))
            channels = out
    return _classifier([*layers, *_conv_norm(channels, 1280, 1), nn.ReLU6()], 1280, classes, dropout=0.2)


def resnet50(classes: int = 1000) -> nn.Module:
    """Stages of 3, 4, 6 and 3 bottlenecks: 1 x 1 down, 3 x 3, 1 x 1 up by four."""
    layers: Layers = [*_conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, repeats, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for stride in (first, *[1] * (repeats - 1)):
            block = [*_conv_norm(channels, width, 1), nn.ReLU(), *_conv_norm(width, width, 3, stride), nn.ReLU()]
            shortcut = _conv_norm(channels, 4 * width, 1, stride) if stride != 1 or channels != 4 * width else []
            layers += [Residual([*block, *_conv_norm(width, 4 * width, 1)], shortcut), nn.ReLU()]
            channels = 4 * width
    return _classifier(layers, channels, classes)


def densenet121(classes: int = 1000, growth: int = 32) -> nn.Module:
    """Dense blocks of 6, 12, 24 and 16 layers, growth 32, halving between them."""
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
