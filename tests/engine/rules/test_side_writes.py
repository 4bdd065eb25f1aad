"""Operators that change more than their first argument are not stacked: what they changed would be lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers
from tests.engine.rules.stacking import Stacked, assert_stacks
from torch import Tensor, nn

import shoal
from shoal.engine.rules import _registry
from shoal.engine.rules.op_context import NotStackable

aten = torch.ops.aten


def operators() -> Iterator[Any]:
    """Every ATen operator, also those that nobody has called yet."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and name.isidentifier() and hasattr(aten, name):
            yield getattr(getattr(aten, name), schema.overload_name or "default", None)


def test_every_operator_that_writes_aside_is_refused_or_has_a_rule() -> None:
    found = {str(op): _registry.side_writes(op) for op in operators() if op is not None and hasattr(op, "_schema")}
    writing = {name: arguments for name, arguments in found.items() if arguments}
    for expected in (
        "aten._fused_moving_avg_obs_fq_helper.default", "aten.fused_moving_avg_obs_fake_quant.default",
        "aten._native_batch_norm_legit.default", "aten.native_batch_norm.default", "aten.batch_norm.default",
        "aten.instance_norm.default", "aten.rrelu_with_noise.default", "aten._amp_update_scale_.default",
    ):  # fmt: skip
        assert expected in writing, expected
    for plain in ("aten.add_.Tensor", "aten.add.out", "aten.index_put_.default", "aten.linear.default"):
        assert not found[plain], plain
    for op in (op for op in operators() if op is not None and str(op) in writing):
        if op in _registry._RULES:
            assert op in (aten.batch_norm.default, aten.instance_norm.default)
        else:
            with pytest.raises(NotStackable, match=writing[str(op)][0]):
                _registry.refuse_side_writes(op)


def observed(x: Tensor, low: Tensor, high: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    on = torch.ones(1, dtype=torch.long)
    out: Tensor = torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.01, 0, 255, -1)
    return out


def test_an_observer_is_refused_by_name() -> None:
    one = torch.ones(1)
    stacked = Stacked(observed, [numbers(1, 4), -one, one, one, one.int()], "pbbbb", shared=True, members=2)
    with pytest.raises(NotStackable, match=r"fused_moving_avg_obs.* changes its argument 'running_min' in place"):
        stacked.run()


def test_batch_norm_called_by_its_inner_name_is_refused() -> None:
    def step(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        out: Tensor = torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0]
        return out

    tensors = [numbers(1, 4, 3), torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(NotStackable, match="running_mean"):
        Stacked(step, tensors, "pbb", shared=True, members=2).run()


def quantised() -> nn.Module:
    import torch.ao.quantization as quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        net.qconfig = quantization.get_default_qat_qconfig("x86")
        prepared: nn.Module = quantization.prepare_qat(net.train())
        return prepared


@pytest.mark.filterwarnings("ignore")
def test_training_for_quantisation_is_as_alone() -> None:
    x, y = numbers(2, 20, 8, dtype=torch.float32), numbers(3, 20, 1, dtype=torch.float32)
    jobs = [
        shoal.Job(
            model=quantised,
            data=(x, y),
            loss=F.mse_loss,
            epochs=2,
            batch_size=8,
            seed=seed,
            name=f"{seed}",
            optimizer=torch.optim.SGD,
            hparams={"lr": 0.01},
        )
        for seed in range(2)
    ]
    results = assert_as_alone(jobs, tier="serial", tolerance=0.0)
    assert results[0].model.state_dict()["1.weight_fake_quant.scale"].shape == (8,)


IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "addmm_": lambda w, x: (x * 1).addmm_(w, w),
    "addmv_": lambda w, x: x[0].clone().addmv_(w, w[0]),
    "baddbmm_": lambda w, x: torch.stack([x, x]).baddbmm_(torch.stack([w, w]), torch.stack([w, w])),
    "atan2_": lambda w, x: (x * 1).atan2_(w),
    "index_add_": lambda w, x: (x * 1).index_add_(0, torch.tensor([1, 0, 1]), w),
    "transpose_": lambda w, x: (w * x).transpose_(0, 1) * x,
    "squeeze_, unsqueeze_": lambda w, x: (w[:1] * 1).squeeze_(0).unsqueeze_(0) * x,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_what_has_no_gradient_yet(name: str) -> None:
    """Once one member's row has been written to, the whole stack has a gradient; the next row is written to after."""
    assert_stacks(IN_PLACE[name], [numbers(4, 3, 3), numbers(5, 3, 3)], "px", shared=False)
