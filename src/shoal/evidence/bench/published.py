"""The four networks of Pack's table, written from their papers for ImageNet-shaped input.

MobileNetV2 (Sandler et al. 2018), ResNet-50 (He et al. 2016, stride in the 3 x 3 convolution),
DenseNet-121 (Huang et al. 2017). Pack does not give the widths of its MLP-3; ours is three linear
layers of hidden width 128, so that the first layer (150,528 inputs) does not drown the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP3(nn.Module):
    """Three linear layers over the flattened image."""

    def __init__(self, side: int = 224, hidden: int = 128, classes: int = 1000) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * side * side, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.layers(x_BCHW)
        return logits


def _conv_norm(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class _Inverted(nn.Module):
    """Widen by `expand`, filter each channel, narrow again; a skip where shapes agree."""

    def __init__(self, channels: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = channels * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [*_conv_norm(channels, wide, 1), nn.ReLU6()]
        layers += [*_conv_norm(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_conv_norm(wide, out, 1)]
        self.layers = nn.Sequential(*layers)
        self.skip = stride == 1 and channels == out

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW: Tensor = self.layers(x_BCHW)
        return x_BCHW + y_BCHW if self.skip else y_BCHW


class MobileNetV2(nn.Module):
    """Inverted residuals with linear bottlenecks, width 1.0."""

    # expansion, output channels, repeats, stride of the first
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_norm(3, 32, 3, 2), nn.ReLU6()]
        channels = 32
        for expand, out, repeats, stride in self.STAGES:
            for i in range(repeats):
                layers.append(_Inverted(channels, out, stride if i == 0 else 1, expand))
                channels = out
        layers += [*_conv_norm(channels, 1280, 1), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(1280, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.features(x_BCHW).mean((2, 3))))
        return logits


class _Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up by four."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.layers = nn.Sequential(
            *_conv_norm(channels, width, 1),
            nn.ReLU(),
            *_conv_norm(width, width, 3, stride),
            nn.ReLU(),
            *_conv_norm(width, out, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(*_conv_norm(channels, out, 1, stride))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.layers(x_BCHW) + self.shortcut(x_BCHW))


class ResNet50(nn.Module):
    """Stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(repeats):
                layers.append(_Bottleneck(channels, width, stride if i == 0 else 1))
                channels = 4 * width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x_BCHW).mean((2, 3)))
        return logits


class _Dense(nn.Module):
    """Norm, ReLU, 1 x 1 to four times the growth, norm, ReLU, 3 x 3; the result joins the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([x_BCHW, self.layers(x_BCHW)], 1)


class DenseNet121(nn.Module):
    """Dense blocks of 6, 12, 24 and 16 layers, growth 32, halving between them."""

    def __init__(self, classes: int = 1000, growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [*_conv_norm(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks = (6, 12, 24, 16)
        for b, repeats in enumerate(blocks):
            for _ in range(repeats):
                layers.append(_Dense(channels, growth))
                channels += growth
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            if b + 1 < len(blocks):
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x_BCHW).mean((2, 3)))
        return logits
