"""A job trains memory of its own, whatever its factory hands out; what is the user's stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, numbers
from torch import Tensor, nn

import shoal
from shoal.engine.members.ownership import copied, overlapping, spans
from shoal.reference import solo

X, Y = numbers(1, 24, 6), numbers(2, 24, 1)
RATES = (1e-3, 1e-2, 0.1)


class Normed(nn.Module):
    """With statistics of the data as buffers, and a batch norm of its own."""

    def __init__(self, mean: Tensor, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.backbone = backbone if backbone is not None else nn.Linear(6, 6).double()
        self.norm, self.head = nn.BatchNorm1d(6).double(), nn.Linear(6, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.norm(torch.tanh(self.backbone(x - self.mean))))
        assert isinstance(out, Tensor)
        return out


class Given:
    """What a user has, and factories that give parts of it out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mean = X.mean(0)
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double().requires_grad_(False)
        self.trained = nn.Linear(6, 6).double()
        self.whole = Normed(X.mean(0))
        self.array = np.random.default_rng(0).normal(size=(1, 6))
        self.state = {k: v.clone() for k, v in nn.Linear(6, 1).double().state_dict().items()}
        self.flat = numbers(3, 7)

    def tensors(self) -> dict[str, Tensor]:
        modules = {"frozen": self.frozen, "trained": self.trained, "whole": self.whole}
        found = {f"{name} {k}": v for name, module in modules.items() for k, v in module.state_dict().items()}
        return {**found, **self.state, "mean": self.mean, "flat": self.flat, "array": torch.from_numpy(self.array)}

    def assigned(self) -> nn.Module:
        model = nn.Linear(6, 1, device="meta")
        model.load_state_dict(self.state, assign=True)
        return model

    def from_array(self) -> nn.Module:
        model = nn.Linear(6, 1).double()
        model.weight = nn.Parameter(torch.from_numpy(self.array))
        return model

    def views(self) -> nn.Module:
        """Weights side by side in one memory, which is the user's."""
        model = nn.Linear(6, 1).double()
        model.weight, model.bias = nn.Parameter(self.flat[:6].view(1, 6)), nn.Parameter(self.flat[6:])
        return model

    def begun_again(self) -> nn.Module:
        """One module again and again, with new weights each time."""
        for module in self.whole.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return self.whole

    def ready(self) -> nn.Module:
        """One module, as it is after inference."""
        return self.whole.eval()


FACTORIES: dict[str, Callable[[Given], Callable[[], nn.Module]]] = {
    "statistics": lambda given: lambda: Normed(given.mean),
    "a frozen backbone": lambda given: lambda: Normed(X.mean(0), given.frozen),
    "a backbone that is trained": lambda given: lambda: Normed(X.mean(0), given.trained),
    "weights that are assigned": lambda given: given.assigned,
    "weights of an array": lambda given: given.from_array,
    "views of one memory": lambda given: given.views,
    "the same network": lambda given: lambda: given.whole,
    "the same network, begun again": lambda given: given.begun_again,
    "the same network, in eval mode": lambda given: given.ready,
    "a cached network": lambda given: lru_cache(lambda: Normed(given.mean)),
    "a partial": lambda given: partial(Normed, given.mean, given.frozen),
}


def job(model: Any, place: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "data": (X, Y), "loss": F.mse_loss, "optimizer": torch.optim.SGD, "hparams": {"lr": RATES[place]},
        "batch_size": 8, "epochs": 4, "seed": place, "name": f"{place}",
    }  # fmt: skip
    return shoal.Job(model=model, **(settings | changes))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", FACTORIES)
def test_each_job_trains_its_own(kind: str, count: int) -> None:
    given = Given()
    before = copy.deepcopy(given.tensors())
    jobs = [job(FACTORIES[kind](given), place) for place in range(count)]
    results = shoal.train(jobs, device="cpu")
    if kind != "the same network, begun again":
        for name, value in given.tensors().items():
            assert torch.equal(value, before[name]), f"{name} of the user's was trained"
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))
    memory = [spans(result.model) for result in results]
    users = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in given.tensors().values()]
    assert not overlapping([*memory, users])
    if count > 1:
        heads = [next(reversed(list(result.model.parameters()))) for result in results]
        assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


def test_factories_of_different_code_that_share_a_backbone() -> None:
    given = Given()
    jobs = [job(lambda: Normed(X.mean(0), given.trained), 0), job(lambda: Normed(X.std(0), given.trained), 1)]
    results = shoal.train(jobs, device="cpu")
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))


def test_factories_that_are_called_once_only() -> None:
    """What can be given out once is nobody else's."""
    networks = [nn.Linear(6, 1).double() for _ in range(3)]
    waiting = list(networks)
    results = shoal.train([job(lambda: waiting.pop(0), place) for place in range(3)], device="cpu")
    assert [result.status for result in results] == ["done"] * 3


def test_networks_that_share_and_cannot_be_copied_are_a_mistake() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not this one")

    shared = Locked(6, 1).double()
    with pytest.raises(shoal.JobError, match=r"job '0': its factory .*TypeError: not this one.*build a new net"):
        shoal.train([job(lambda: shared, 0)], device="cpu")


def test_a_factory_leaves_random_numbers_as_they_were() -> None:
    """It is called once more to see what it gives out."""

    def drawing() -> nn.Module:
        np.random.rand()
        return nn.Linear(6, 1).double()

    np.random.seed(3)
    wanted = np.random.rand()
    np.random.seed(3)
    solo(job(drawing, 0))
    assert np.random.rand() == wanted


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_shared_network_with_a_compressed_tensor_as_an_attribute_is_copied() -> None:
    shared = nn.Linear(6, 1).double()
    shared.graph = torch.eye(6, dtype=torch.float64).to_sparse_csr()  # type: ignore[assignment]
    mine = copied(shared)
    assert torch.equal(mine.graph.to_dense(), torch.eye(6, dtype=torch.float64))  # type: ignore[operator, union-attr]
    assert not overlapping([spans(shared), spans(mine)])


class TiedByMemory(nn.Module):
    """Two parameters in one memory, or one that is a part of another."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 1 if part else 6).double()
        if part:
            self.b.weight = nn.Parameter(self.a.weight.data[:1])
        else:
            self.b.weight.data = self.a.weight.data

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))).mean(1, keepdim=True)
        return out


@pytest.mark.parametrize("part", [False, True])
def test_a_module_whose_copy_would_untie_its_weights_is_refused(part: bool) -> None:
    with pytest.raises(shoal.JobError, match=r"'a\.weight' in the same memory as 'b\.weight'.* pass a function"):
        shoal.train([shoal.Job(model=TiedByMemory(part=part), data=(X, Y), loss=F.mse_loss, epochs=1)], device="cpu")


def test_weights_side_by_side_in_one_memory_are_not_tied() -> None:
    flat = torch.zeros(42, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(6, 6).double(), nn.Linear(6, 1).double())
    for parameter, value in zip((network[0].weight, network[0].bias), flat.split([36, 6]), strict=True):
        parameter.data = value.view_as(parameter).copy_(parameter.data)
    (result,) = shoal.train([shoal.Job(model=network, data=(X, Y), loss=F.mse_loss, epochs=1)], device="cpu")
    assert result.status == "done"


@pytest.mark.parametrize("part", [False, True])
def test_a_clone_keeps_weights_in_one_memory(part: bool) -> None:
    def clone(view: Any) -> None:
        if view.epoch == 1 and view.name == "source":
            view.run.clone("source", "clone")

    source = shoal.Job(
        model=lambda: TiedByMemory(part=part), data=(X, Y), loss=F.mse_loss, epochs=4, hparams={"lr": 0.05},
        batch_size=6, name="source",
    )  # fmt: skip
    results = shoal.start([source], device="cpu", callbacks=[clone]).wait()
    expected = solo(source).model.state_dict()
    for name in ("source", "clone"):
        for a, b in zip(results[name].model.state_dict().values(), expected.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_module_that_cannot_be_copied_is_told_by_name() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1)).double()
    with pytest.raises(shoal.JobError, match=r"model cannot be copied for its job .*; pass a function that builds it"):
        shoal.train([shoal.Job(model=lazy, data=(X, Y), loss=F.mse_loss, epochs=1)], device="cpu")
