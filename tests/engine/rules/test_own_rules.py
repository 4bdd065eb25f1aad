"""The operators that must have a stacking rule of their own.

Without it most would still be exact, one member after another, and no other test would notice that they are slow.
"""

from __future__ import annotations

import pytest
import torch

from shoal.engine import rules
from shoal.engine.rules import _registry

aten = torch.ops.aten

OWN = [
    aten.linear.default,
    aten.addmm.default,
    aten.matmul.default,
    aten.einsum.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv2d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.rms_norm.default,
    aten.embedding.default,
    aten.embedding_renorm_.default,
    aten.prelu.default,
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
    aten.lstm_cell.default,
    aten.gru_cell.default,
    aten.rnn_tanh_cell.default,
    aten.scaled_dot_product_attention.default,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.vec,
    aten.pixel_shuffle.default,
    aten.cross_entropy_loss.default,
    aten.mse_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.softmax.int,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.view.default,
    aten.transpose.int,
    aten.cat.default,
    aten.randn_like.default,
    aten.rand.default,
    aten.randperm.default,
]


@pytest.mark.parametrize("op", OWN, ids=str)
def test_has_a_rule_of_its_own(op: object) -> None:
    assert rules.find is _registry.find
    assert op in _registry._RULES


def test_everything_elementwise_goes_one_way() -> None:
    assert "pointwise" in _registry._RULES
    for op in (aten.add.Tensor, aten.gelu.default, aten.tanh.default, aten.relu_.default):
        assert torch.Tag.pointwise in op.tags and op not in _registry._RULES
