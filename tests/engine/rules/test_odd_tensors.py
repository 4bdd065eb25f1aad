"""Tensors that are not plain memory, wherever a step reaches them: such jobs run, as they do alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import numbers
from torch import Tensor, nn

import shoal
from shoal.reference import solo

X, Y = numbers(1, 32, 6), numbers(2, 32, 1)
DENSE = (numbers(3, 8, 8) > 0.5).double()


KINDS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}:UserWarning")
    for said in (
        "Sparse CS. tensor support is in beta",
        "torch.quantize_per_tensor",
        "The PyTorch API of nested tensors",
    )
]


class Graph(nn.Module):
    """A network over a graph, which it has as an attribute, in a list, or as a buffer, in its state_dict() or not."""

    def __init__(self, graph: Tensor, place: str) -> None:
        super().__init__()
        self.lin, self.place = nn.Linear(6, 1).double(), place
        if "buffer" in place:
            self.register_buffer("graph", graph, persistent=place == "buffer")
        else:
            self.graph = graph if place == "attribute" else [graph]

    def forward(self, x: Tensor) -> Tensor:
        graph = self.graph[0] if isinstance(self.graph, list) else self.graph
        assert isinstance(graph, Tensor)
        return graph @ self.lin(x)


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(6, 1).double(), "data": (X, Y), "batch_size": 8, "epochs": 3, "name": f"{seed}",
        "loss": F.mse_loss,
    }  # fmt: skip
    return shoal.Job(seed=seed, **(settings | changes))


def assert_as_alone(jobs: list[shoal.Job]) -> None:
    for result, own in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        alone = solo(own)
        assert (result.status, result.error, alone.status) == ("done", None, "done")
        for a, b in zip(result.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", ["attribute", "list", "buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_graph_of_a_network(kind: str, place: str) -> None:
    graph = KINDS[kind](DENSE)
    assert_as_alone([job(i, model=lambda: Graph(graph, place)) for i in range(2)])
    assert_as_alone([job(0, model=lambda: Graph(KINDS[kind](DENSE), place))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_graph_that_is_not_in_the_state_dict(kind: str) -> None:
    assert_as_alone([job(i, model=lambda: Graph(KINDS[kind](DENSE), "other buffer")) for i in range(2)])


@pytest.mark.parametrize("place", ["buffer", "other buffer"])
def test_a_sparse_graph_in_a_run_folder(place: str, tmp_path: Path) -> None:
    jobs = [job(i, model=lambda: Graph(DENSE.to_sparse(), place)) for i in range(2)]
    trained = shoal.train(jobs, device="cpu", out=tmp_path)
    again = shoal.train(jobs, device="cpu", out=tmp_path)  # read, not trained
    for a, b in zip(trained, again, strict=True):
        assert a.status == b.status == "done" and torch.equal(a.model(X[:8]), b.model(X[:8]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_graph_of_a_step(kind: str) -> None:
    graph = KINDS[kind](DENSE)
    step = lambda model, batch: F.mse_loss(graph @ model(batch[0]), batch[1])  # noqa: E731
    assert_as_alone([job(i, step=step, loss=None) for i in range(2)])
    assert "layout" in str(shoal.explain([job(0, step=step, loss=None)], device="cpu", measure=False)) or kind != "coo"


def test_a_sparse_tensor_that_is_made_in_the_step() -> None:
    step = lambda model, batch: F.mse_loss(DENSE.to_sparse() @ model(batch[0]), batch[1])  # noqa: E731
    assert_as_alone([job(i, step=step, loss=None) for i in range(2)])


def test_sparse_data() -> None:
    data = (X.clamp_min(0).to_sparse(), Y)
    assert_as_alone([job(i, data=data, val=data) for i in range(2)])


def test_sparse_gradients() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 1, sparse=True).double()

        def forward(self, x: Tensor) -> Tensor:
            out = self.table(x)
            assert isinstance(out, Tensor)
            return out

    settings = {"model": Table, "data": (torch.arange(32), Y), "optimizer": torch.optim.SparseAdam}
    assert_as_alone([job(i, **settings) for i in range(2)])


@pytest.mark.parametrize("kind", ["quantized", "nested", "mkldnn"])
def test_other_tensors_that_a_step_reads(kind: str) -> None:
    made = {
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
        "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    }[kind]()
    read = {"quantized": lambda: made.dequantize(), "nested": lambda: made[0], "mkldnn": lambda: made.to_dense()}[kind]
    step = lambda model, batch: F.mse_loss(model(batch[0]) + read().sum().double(), batch[1])  # noqa: E731
    assert_as_alone([job(i, step=step, loss=None) for i in range(2)])
