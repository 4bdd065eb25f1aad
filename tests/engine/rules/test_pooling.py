"""Pooling of many channels: members train as they do alone."""

from __future__ import annotations

from tests.engine.equality import assert_as_alone
from tests.engine.rules.layers import INPUTS
from tests.engine.rules.test_layers import jobs
from torch import nn


def test_many_channels_train_as_they_do_alone() -> None:
    def body() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 9, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))

    assert_as_alone(jobs(body, INPUTS["image"]))
