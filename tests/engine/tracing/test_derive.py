"""Graphs that are worked out from others are those that would have been recorded; otherwise they are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.recipes import recipe as recipes
from shoal.engine.recipes.recipe import Evaluation, Recipe, TraceCache
from shoal.engine.tracing import derive as derive_module
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import same_graph
from shoal.preparation.checks import prepare

X, Y = torch.randn(24, 6), torch.randint(3, (24,))


class Net(nn.Module):
    def __init__(self, rate: float, slope: float = 0.1, way: str = "plain") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.rate, self.slope, self.way, self.calls = rate, slope, way, 0

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.first(x)), self.slope)
        if self.way == "branch" and self.rate > 0.3:
            h = torch.tanh(h)
        if self.way == "detach" and self.rate > 0.3:
            h = h.detach()
        if self.way == "count" and self.rate > 0.3:
            self.calls += 1
        if self.way == "constant":
            h = h * torch.tensor([self.rate] * 8)
        rate = 1 - self.rate if self.way == "computed" else self.rate
        return self.last(F.dropout(h, rate, self.training))


def job(net: Any, **more: Any) -> shoal.Job:
    settings = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD, "hparams": {"lr": 0.1}, **more}
    return shoal.Job(model=net, data=(X, Y), batch_size=8, epochs=2, **settings)


def made(nets: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Recipe | str], int]:
    """The recipes of these networks, or why there is none, and how many steps were recorded for them."""
    recorded: list[int] = []
    original = recipes.trace
    monkeypatch.setattr(recipes, "trace", lambda *a, **k: recorded.append(1) or original(*a, **k))  # type: ignore[func-returns-value]
    cache, found = TraceCache(), list[Recipe | str]()
    for member in prepare([job(net) for net in nets], torch.device("cpu")):
        try:
            found.append(cache.recipe(member))
        except Untraceable as refusal:
            found.append(str(refusal))
    return found, len(recorded)


def as_recorded(found: list[Recipe | str]) -> None:
    """Each is the one that is recorded with nothing known before."""
    for one in found:
        assert isinstance(one, Recipe)
        alone = TraceCache().recipe(one.member)
        assert one.key == alone.key
        assert all(same_graph(one.steps[rows], alone.steps[rows]) for rows in one.steps)


RATES = [0.1, 0.2, 0.4, 0.45, 0.6, 0.25]


def test_steps_that_differ_in_numbers_are_recorded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = made([Net(rate, slope=rate / 7) for rate in RATES], monkeypatch)
    assert count == 2
    as_recorded(found)


def test_a_number_that_was_the_same_so_far_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = made([Net(0.1), Net(0.2), Net(0.3, slope=0.2), Net(0.4, slope=0.3)], monkeypatch)
    assert count == 3
    as_recorded(found)


@pytest.mark.parametrize(("way", "count"), [("branch", 5), ("detach", 5), ("computed", 6), ("constant", 6)])
def test_what_the_code_makes_of_a_number_is_recorded(way: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are below the limit of the branch, and one more; three are above it."""
    found, recorded = made([Net(rate, way=way) for rate in RATES], monkeypatch)
    assert recorded == count
    as_recorded(found)


def test_state_that_one_of_them_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = made([Net(rate, way="count") for rate in RATES], monkeypatch)
    assert [isinstance(one, str) for one in found] == [rate > 0.3 for rate in RATES]


def test_evaluations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    original = recipes.trace
    monkeypatch.setattr(recipes, "trace", lambda *a, **k: recorded.append(1) or original(*a, **k))  # type: ignore[func-returns-value]
    cache, nets = TraceCache(), [Net(0.1, slope=rate) for rate in RATES]
    graphs = [cache.evaluation(net, Evaluation.forward(), (X,)) for net in nets]
    assert len(recorded) == 2
    for net, graph in zip(nets, graphs, strict=True):
        assert same_graph(graph, TraceCache().evaluation(net, Evaluation.forward(), (X,)))
        assert net.training and net.norm.num_batches_tracked == 0


def test_a_sweep_of_rates_trains_as_each_alone() -> None:
    jobs = [job(lambda rate=rate: Net(rate), seed=place) for place, rate in enumerate(RATES)]
    before = torch.get_rng_state()
    results = shoal.train(jobs, device="cpu")
    assert {result.tier for result in results} == {"stacked"}
    assert torch.equal(torch.get_rng_state(), before)
    for result, one in zip(results, jobs, strict=True):
        torch.testing.assert_close(result.model.state_dict(), shoal.solo(one).model.state_dict())


class Layered(nn.Module):
    """Its rate is that of a layer of torch, which its own code may read too."""

    def __init__(self, rate: float, way: str = "plain") -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(rate), nn.Linear(8, 3)
        self.way = way
        if way == "hook":
            self.drop.register_forward_hook(lambda module, _, out: torch.tanh(out) if module.p > 0.3 else out)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.first(x)))
        if self.way == "branch" and self.drop.p > 0.3:
            h = torch.tanh(h)
        if self.way == "text" and "p=0.4" in repr(self.drop):
            h = torch.tanh(h)
        out: Tensor = self.last(F.dropout(h, self.drop.p) if self.way == "function" else h)
        return out


def test_rates_of_layers_that_no_other_code_reads_need_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = derive_module._gives_the_same
    monkeypatch.setattr(derive_module, "_gives_the_same", lambda *given: runs.append(1) or original(*given))  # type: ignore[func-returns-value]
    found, count = made([Layered(rate) for rate in RATES], monkeypatch)
    assert (count, len(runs)) == (2, 0)
    as_recorded(found)
    assert not hasattr(nn.Dropout, "p")


@pytest.mark.parametrize("way", ["branch", "text", "function", "hook"])
def test_rates_that_other_code_reads_are_tried_or_recorded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = derive_module._gives_the_same
    monkeypatch.setattr(derive_module, "_gives_the_same", lambda *given: runs.append(1) or original(*given))  # type: ignore[func-returns-value]
    found, count = made([Layered(rate, way) for rate in RATES], monkeypatch)
    assert count + len(runs) >= len(RATES)
    as_recorded(found)


def test_rates_at_the_ends_are_not_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = made([Layered(rate) for rate in (0.1, 0.2, 0.0, 1.0, 0.3)], monkeypatch)
    assert count >= 2
    as_recorded(found)
