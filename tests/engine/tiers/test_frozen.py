"""Weights that are not trained and that members have alike: kept once, run once, and every member as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from tests.engine.loop import run
from tests.engine.tiers.captured import host_kernels
from tests.engine.tiers.captured.test_captured_on_cpu import OnCpu, as_on_a_gpu, train  # noqa: F401
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.engine.proof.group import Group, group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.captured import _step
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.evaluate import evaluate
from shoal.engine.tiers.stacked.forward import Forward
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.preparation.checks import prepare

IMAGES, TOKENS, TARGETS = numbers(3, 20, 2, 6, 6), whole(6, 11, 20, 5), whole(8, 3, 20)


class Backbone(nn.Module):
    """Everything but the head is frozen; its batch norm has fixed statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.features = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.GELU()
            ).double()
            self.features[1].running_mean.normal_()
        self.features.requires_grad_(False).eval()
        self.head = nn.Linear(8, 3).double()

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


class Adapted(nn.Module):
    """A frozen embedding and layers, with a low-rank addition and dropout that each member has for itself."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.table, self.norm = nn.Embedding(11, 6).double(), nn.LayerNorm(6).double()
            self.base = nn.Linear(6, 6).double()
        for part in (self.table, self.norm, self.base):
            part.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False).double(), nn.Linear(2, 6, bias=False).double()
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(6, 3).double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x + F.gelu(self.base(x) + self.up(self.down(self.dropout(x))))
        out: Tensor = self.head(x.mean(1))
        return out


def jobs(
    model: Callable[[int], nn.Module], x: Tensor, count: int = 4, *, data_seed: int | None = None, **more: object
) -> list[shoal.Job]:
    return [
        shoal.Job(
            model=lambda seed=seed: model(seed), data=(x, TARGETS), val=(x, TARGETS), loss=F.cross_entropy,
            hparams={"lr": 0.01 * (1 + seed)}, batch_size=8, epochs=2, seed=seed, data_seed=data_seed, name=str(seed),
            **more,
        )
        for seed in range(count)
    ]  # fmt: skip


def groups(listed: Sequence[shoal.Job]) -> list[Group]:
    return group(prepare(list(listed), torch.device("cpu")), TraceCache(share=True))


@pytest.mark.parametrize("data_seed", [None, 5])
@pytest.mark.parametrize(("model", "x"), [(lambda _: Backbone(), IMAGES), (lambda _: Adapted(), TOKENS)])
def test_members_over_one_base_are_as_alone(
    model: Callable[[int], nn.Module], x: Tensor, data_seed: int | None
) -> None:
    listed = jobs(model, x, data_seed=data_seed, keep="best", metrics={"accuracy": _accuracy})
    (alike,) = groups(listed)
    assert alike.recipes[0].shared
    results = assert_as_alone(listed)
    models = [result.model for result in results]
    for name, value in models[0].state_dict().items():  # each has its own again
        others = [model.state_dict()[name] for model in models[1:]]
        assert all(value.data_ptr() != other.data_ptr() for other in others)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("data_seed", [None, 5])
@pytest.mark.parametrize(("model", "x"), [(lambda _: Backbone(), IMAGES), (lambda _: Adapted(), TOKENS)])
def test_captured_members_over_one_base_are_as_alone(
    model: Callable[[int], nn.Module], x: Tensor, data_seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.tiers.captured import test_captured_on_cpu as captured

    monkeypatch.setattr(captured, "TraceCache", lambda: TraceCache(share=True))
    listed = jobs(model, x, data_seed=data_seed)
    for result, job in zip(train(listed, 4), listed, strict=True):
        alone = shoal.solo(job, device="cpu").model.state_dict()
        for name, value in result.model.state_dict().items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)


class Masked(nn.Module):
    """All of its weights are trained; a table in a buffer is what members have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()
        self.register_buffer("mask", torch.arange(8.0, dtype=torch.float64) % 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.first(tokens.double())) * self.mask)
        return out


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("data_seed", [None, 5])
@pytest.mark.parametrize(("model", "x"), [(Backbone, IMAGES), (Adapted, TOKENS), (Masked, TOKENS)])
def test_steps_over_one_base_are_fused(
    model: Callable[[], nn.Module], x: Tensor, data_seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that a GPU gets, compiled for the host. What is shared cannot be written to."""
    monkeypatch.setattr(_step, "can_fuse", lambda _: True)
    monkeypatch.setattr(_step.cuda_kernels, "load", host_kernels.load)
    listed, trace_cache = jobs(lambda _: model(), x, data_seed=data_seed), TraceCache(share=True)
    members = prepare(listed, torch.device("cpu"))
    (alike,) = group(members, trace_cache)
    assert alike.recipes[0].shared
    unit = CapturedUnit(alike.recipes, trace_cache, {}, chunk=4, compiled=False)
    run([unit], CapturedExecutor(OnCpu()))
    assert all(chunk.step(8).fused is not None for chunk in unit.chunks)
    for member, job in zip(members, listed, strict=True):
        alone = shoal.solo(job, device="cpu").model.state_dict()
        for name, value in member.model.state_dict().items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)


def _accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).double().mean())


def test_shared_weights_are_in_memory_once_and_run_once() -> None:
    (alike,) = groups(jobs(lambda _: Backbone(), IMAGES, data_seed=5))
    stack = Stack(alike.recipes, size=len(alike.recipes))
    trace = next(iter(alike.recipes[0].steps.values()))
    names = [*trace.params, *trace.buffers]
    shared = {names[place] for place in stack.shared}
    assert shared == {name for name in names if name.startswith("features") and "tracked" not in name}
    for place in stack.shared:
        assert stack.state[place].stride(0) == 0
    program = TraceCache(share=True).programs.get(
        [recipe.steps[8] for recipe in alike.recipes], [False, False], torch.device("cpu"), stack.shared
    )
    carried = [str(node.target) for node in trace.nodes if node in program._carries and node.op == "call_function"]
    assert not any("conv2d" in name or "batch_norm" in name or "gelu" in name for name in carried)
    assert any("linear" in name for name in carried)


class Convolutions(TorchDispatchMode):
    """Counts convolutions, by the shapes of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.weights.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_validation_and_predictions_run_the_base_once() -> None:
    listed = jobs(lambda _: Backbone(), IMAGES, data_seed=5, metrics={"accuracy": _accuracy})
    (alike,) = groups(listed)
    unit = StackedUnit(alike.recipes, TraceCache(share=True))
    first = evaluate(unit, list(range(len(listed))))
    with Convolutions() as seen:
        assert evaluate(unit, list(range(len(listed)))) == first
    assert seen.weights == [(4, 2, 3, 3)] * 3  # 20 rows in batches of 8, whatever the number of members

    models = [member.model.eval() for member in alike.members]
    with Forward(models) as forward:
        expected, together = torch.stack([model(IMAGES) for model in models]), forward((IMAGES,))
        with Convolutions() as seen:
            again = forward((IMAGES,))
        assert seen.weights == [(4, 2, 3, 3)] and torch.equal(again, together)
        assert (together - expected).abs().max() < 1e-12
        features = Forward([model.features for model in models])((IMAGES,))
    assert features.is_contiguous()  # each member's output is its own, also where it was computed once
    assert torch.equal(features[0], features[1])


def test_members_with_other_frozen_weights_are_other_stacks() -> None:
    listed = jobs(lambda seed: Backbone(seed // 2), IMAGES)
    assert [[member.name for member in alike.members] for alike in groups(listed)] == [["0", "1"], ["2", "3"]]
    assert_as_alone(listed)


def test_members_of_their_own_random_layers_stay_one_stack() -> None:
    listed = jobs(lambda seed: Backbone(seed), IMAGES)
    (alike,) = groups(listed)
    assert len(alike.members) == 4
    assert not alike.recipes[0].shared
    assert_as_alone(listed)


def test_zeros_of_another_sign_are_other_weights() -> None:
    def model(seed: int) -> nn.Module:
        made = Backbone()
        with torch.no_grad():
            made.features[0].bias.fill_(0.0 if seed < 2 else -0.0)
        return made

    assert len(groups(jobs(model, IMAGES))) == 2


def test_statistics_that_a_step_moves_are_each_members_own() -> None:
    class Moving(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.train()

        def train(self, mode: bool = True) -> Backbone:
            nn.Module.train(self, mode)
            return self

    listed = jobs(lambda _: Moving(), IMAGES)
    (alike,) = groups(listed)
    trace = next(iter(alike.recipes[0].steps.values()))
    names = [*trace.params, *trace.buffers]
    assert not any("running" in names[place] for place in alike.recipes[0].shared)
    assert_as_alone(listed)


class Measured(Backbone):
    """Validation, and no step, writes a buffer that steps read: in place, or another tensor in its place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("level", torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x)) * self.level
        if not self.training and self.in_place:
            self.level.mul_(0.9).add_(out.mean().detach())
        elif not self.training:
            self.level = 0.9 * self.level + out.mean().detach()
        return out


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_validation_writes_is_each_members_own(in_place: bool) -> None:
    listed = jobs(lambda _: Measured(in_place), IMAGES, data_seed=5)
    (alike,) = groups(listed)
    trace = next(iter(alike.recipes[0].steps.values()))
    names = [*trace.params, *trace.buffers]
    shared = {names[place] for place in alike.recipes[0].shared}
    assert "features.0.weight" in shared and "level" not in shared
    assert_as_alone(listed)


def test_members_leave_and_stay_as_alone() -> None:
    listed = jobs(lambda _: Backbone(), IMAGES, data_seed=5)
    ends = [1, 3, 2, 4]
    assert_as_alone([shoal.Job(**{**_fields(job), "epochs": end}) for job, end in zip(listed, ends, strict=True)])


def _fields(job: shoal.Job) -> dict[str, object]:
    names = ("model", "data", "val", "loss", "hparams", "batch_size", "seed", "data_seed", "name")
    return {name: getattr(job, name) for name in names}


class Shrink(torch.optim.SGD):
    """Makes every parameter smaller, whether it has a gradient or not."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for settings in self.param_groups:
            for param in settings["params"]:
                param.mul_(0.99)
        return super().step(closure)


def test_an_optimizer_of_the_users_own_may_write_to_frozen_weights() -> None:
    listed = jobs(lambda _: Backbone(), IMAGES, optimizer=Shrink)
    assert not any(recipe.shared for alike in groups(listed) for recipe in alike.recipes)
    assert_as_alone(listed, tier=None)


def test_deterministic_members_have_their_own() -> None:
    (alike,) = group(
        prepare(jobs(lambda _: Backbone(), IMAGES), torch.device("cpu")), TraceCache(share=True, deterministic=True)
    )
    assert not alike.recipes[0].shared
