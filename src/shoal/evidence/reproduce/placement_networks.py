"""AlexNet, VGG-16, ResNet-50 and Inception-v3 for the comparisons of placement.

`width` scales all channels and hidden layers, so that parameters and operations keep their proportions; `classes` is
the number of outputs. On the meta device (`shape_of`) the full-size networks need no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal.evidence.bench.published import Conv, ImageNet, Kernel, ResNet50, scaled


def _classifier(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


class AlexNet(nn.Module):
    """A network of five convolutions and three fully connected layers."""

    def __init__(self, width: float = 1.0, classes: int = ImageNet) -> None:
        super().__init__()
        c = scaled(width)
        self.features = nn.Sequential(
            nn.Conv2d(3, c(64), 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(c(64), c(192), 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(c(192), c(384), 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(c(384), c(256), 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(c(256), c(256), 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = _classifier(36 * c(256), c(4096), classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


class VGG16(nn.Module):
    """A network of thirteen convolutions of 3 x 3 and three fully connected layers."""

    def __init__(self, width: float = 1.0, classes: int = ImageNet) -> None:
        super().__init__()
        c, layers, channels = scaled(width), list[nn.Module](), 3
        for count, out in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, c(out), 3, padding=1), nn.ReLU(inplace=True)]
                channels = c(out)
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = _classifier(49 * c(512), c(4096), classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


class _Branches(nn.Module):
    """Branches over the same input, whose outputs are concatenated by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _chain(inputs: int, *steps: tuple[int, Kernel] | tuple[int, Kernel, int]) -> nn.Sequential:
    """Return a sequence of convolutions: (channels, kernel), padded to keep the size, or (channels, kernel, stride)."""
    layers: list[nn.Module] = []
    for channels, kernel, *stride in steps:
        if stride:
            layers.append(Conv(inputs, channels, kernel, stride[0]))
        else:
            sides = (kernel, kernel) if isinstance(kernel, int) else kernel
            layers.append(Conv(inputs, channels, kernel, 1, (sides[0] // 2, sides[1] // 2)))
        inputs = channels
    return nn.Sequential(*layers)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Conv(inputs, outputs, 1))


class InceptionV3(nn.Module):
    """A network of eleven blocks of branches and one fully connected layer, without the auxiliary output."""

    def __init__(self, width: float = 1.0, classes: int = ImageNet) -> None:
        super().__init__()
        c = scaled(width)
        self.stem = nn.Sequential(
            Conv(3, c(32), 3, 2), Conv(c(32), c(32), 3), Conv(c(32), c(64), 3, 1, 1), nn.MaxPool2d(3, 2),
            Conv(c(64), c(80), 1), Conv(c(80), c(192), 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.blocks = nn.Sequential(*_inception_blocks(c))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(c(320) + 4 * c(384) + c(192), classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.dropout(self.avgpool(self.blocks(self.stem(x)))).flatten(1))
        return out


def _inception_blocks(c: Callable[[int], int]) -> list[nn.Module]:
    blocks, inputs = list[nn.Module](), c(192)
    for pool in (32, 64, 64):
        blocks.append(_Branches(
            _chain(inputs, (c(64), 1)), _chain(inputs, (c(48), 1), (c(64), 5)),
            _chain(inputs, (c(64), 1), (c(96), 3), (c(96), 3)), _pooled(inputs, c(pool)),
        ))  # fmt: skip
        inputs = 2 * c(64) + c(96) + c(pool)
    blocks.append(_Branches(
        _chain(inputs, (c(384), 3, 2)), _chain(inputs, (c(64), 1), (c(96), 3), (c(96), 3, 2)), nn.MaxPool2d(3, 2)
    ))  # fmt: skip
    inputs = c(384) + c(96) + inputs
    for middle in (128, 160, 160, 192):
        m, out = c(middle), c(192)
        blocks.append(_Branches(
            _chain(inputs, (out, 1)), _chain(inputs, (m, 1), (m, (1, 7)), (out, (7, 1))),
            _chain(inputs, (m, 1), (m, (7, 1)), (m, (1, 7)), (m, (7, 1)), (out, (1, 7))), _pooled(inputs, out),
        ))  # fmt: skip
        inputs = 4 * out
    m = c(192)
    blocks.append(_Branches(
        _chain(inputs, (m, 1), (c(320), 3, 2)), _chain(inputs, (m, 1), (m, (1, 7)), (m, (7, 1)), (m, 3, 2)),
        nn.MaxPool2d(3, 2),
    ))  # fmt: skip
    inputs = c(320) + m + inputs
    for _ in range(2):
        m = c(384)
        blocks.append(_Branches(
            _chain(inputs, (c(320), 1)), nn.Sequential(_chain(inputs, (m, 1)), _both_ways(m)),
            nn.Sequential(_chain(inputs, (c(448), 1), (m, 3)), _both_ways(m)), _pooled(inputs, c(192)),
        ))  # fmt: skip
        inputs = c(320) + 4 * m + c(192)
    return blocks


def _both_ways(channels: int) -> _Branches:
    return _Branches(_chain(channels, (channels, (1, 3))), _chain(channels, (channels, (3, 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A network of the comparison."""

    name: str
    make: Callable[..., nn.Module]
    """A function of (width, classes) that builds the network."""
    image: int
    """The side of its full-size images, in pixels."""
    batch: int
    """The rows of one worker in the published arithmetic."""
    cut: str = "avgpool"
    """The last layer before the fully connected ones."""


SHAPES: Sequence[Shape] = (
    Shape(name="AlexNet", make=AlexNet, image=224, batch=128),
    Shape(name="VGG-16", make=VGG16, image=224, batch=32),
    Shape(name="ResNet-50", make=ResNet50, image=224, batch=64),
    Shape(name="Inception-v3", make=InceptionV3, image=299, batch=64, cut="dropout"),
)


def shape_of(name: str) -> tuple[nn.Module, Tensor]:
    """Return a full-size network and a sample, on the meta device."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    with torch.device("meta"):
        return shape.make(), torch.empty(shape.batch, 3, shape.image, shape.image)


alexnet = partial(shape_of, "AlexNet")
vgg16 = partial(shape_of, "VGG-16")
resnet50 = partial(shape_of, "ResNet-50")
inception_v3 = partial(shape_of, "Inception-v3")
