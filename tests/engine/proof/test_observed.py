"""The check in float64: by the graph that will train, or by one that is recorded in float64 where dtypes are in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.proof._observed import widened
from shoal.engine.tracing import trace as tracing

X, Y = torch.randn(12, 3), torch.randn(12, 2)
WEIGHTS = torch.tensor([0.3, 0.7])
Step = Callable[[Any, Any], Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def plain(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def makes_a_tensor(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) + torch.full((), 0.1).sqrt()


def asks_for_a_dtype(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) + model[0].weight.to(torch.float32).sum().to(batch[0].dtype)


def from_whole_numbers(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) * (batch[1] > 0).sum().div(3)


def moves_to_the_device(model: Any, batch: Any) -> Tensor:
    """`to(device)` is recorded with the dtype of its tensor."""
    return F.mse_loss(model(batch[0]).to(batch[1].device), batch[1].to("cpu"))


def has_a_constant(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]) * WEIGHTS, batch[1])


def has_an_empty_tensor(model: Any, batch: Any) -> Tensor:
    """As the caches of keys and values in transformers begin."""
    return F.mse_loss(
        torch.cat([torch.tensor([], dtype=batch[0].dtype), model(batch[0]).flatten()]), batch[1].flatten()
    )


def counts_as_integers(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) * (batch[1] > 0).int().cumsum(0).to(torch.int64).sum()


def makes_a_constant(model: Any, batch: Any) -> Tensor:
    """In float64 it is another number."""
    return plain(model, batch) + (model[0].weight * torch.tensor(0.1, dtype=batch[0].dtype)).sum()


def takes_an_epsilon(model: Any, batch: Any) -> Tensor:
    """In float64 it is another number, though no dtype is in the graph."""
    return plain(model, batch) + model[0].weight.abs().clamp(min=1e5 * torch.finfo(batch[0].dtype).eps).log().mean()


def traced(step: Step) -> tracing.Trace:
    return tracing.trace(network(), lambda model, batch: (step(model, batch), {}), (X, Y))


def test_values_of_a_wider_graph() -> None:
    narrow = traced(plain)
    wide = widened(narrow)
    assert wide is not None and wide.like(narrow) and wide.used == narrow.used
    for node, other in zip(wide.nodes, narrow.nodes, strict=True):
        value, before = node.meta["val"], other.meta.get("val")
        if isinstance(value, Tensor):
            assert (value.shape, value.stride(), value.device) == (before.shape, before.stride(), before.device)
            assert value.dtype == (torch.float64 if before.is_floating_point() else before.dtype)


@pytest.mark.parametrize("step", [makes_a_tensor, asks_for_a_dtype, from_whole_numbers])
def test_a_graph_with_dtypes_of_its_own_is_not_widened(step: Step) -> None:
    assert widened(traced(step)) is None


@pytest.mark.parametrize(
    ("step", "records"),
    [
        (plain, 1),
        (moves_to_the_device, 1),
        (has_a_constant, 1),
        (has_an_empty_tensor, 1),
        (counts_as_integers, 1),
        (makes_a_tensor, 2),
        (asks_for_a_dtype, 2),
        (from_whole_numbers, 2),
        (makes_a_constant, 2),
        (takes_an_epsilon, 2),
    ],
)
def test_a_step_is_recorded_in_float64_where_it_must_be(
    step: Step, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    record = tracing._record
    monkeypatch.setattr(tracing, "_record", lambda *args: (made.append(args), record(*args))[1])
    monkeypatch.setenv("SHOAL_PACK", "always")
    fields: dict[str, Any] = {"model": network, "data": (X, Y), "step": step, "batch_size": 6, "epochs": 1}
    fields |= {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1}}
    jobs = [shoal.Job(**fields, seed=seed) for seed in range(2)]
    results = shoal.train(jobs, device="cpu", threads=1)
    assert {result.tier for result in results} == {"stacked"}
    assert len(made) == records
    for job, result in zip(jobs, results, strict=True):
        torch.testing.assert_close(result.model.state_dict(), shoal.solo(job).model.state_dict())
