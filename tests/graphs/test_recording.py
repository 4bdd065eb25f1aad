"""Recorded forward passes: networks nobody here wrote, any number of rows, Python code that looks at shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import GraphError
from shoal.graphs.calls import Extent, as_arguments, rows_of
from shoal.graphs.recording import record_calls


class Reshaping(nn.Module):
    """Sizes from shapes, a constant made in the forward pass, a property, a tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.weights = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        h = self.fc(x.view(rows, width)).reshape(rows * 2, 4)
        steps = torch.arange(rows * 2, device=x.device).unsqueeze(1)
        with torch.no_grad():
            scale = h.abs().amax()
        return (h * steps + self.weights + scale).mT.reshape(rows, -1)


class Whole(nn.Module):
    """Control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if out.sum() > 0 else -out


def run(model: nn.Module, sample: object, batch: object) -> object:
    """The recorded calls, one by one, on another batch."""
    calls = record_calls(model, sample)
    inputs = iter(calls.tensors_of(batch))
    values: dict[object, object] = {}
    for node in calls.nodes:
        values[node] = next(inputs) if node.op == "placeholder" else calls.evaluate(node, values, model)  # type: ignore[arg-type]
    return values[calls.nodes[-1]]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_sizes_follow_the_rows(rows: int) -> None:
    model, x = Reshaping(), torch.randn(rows, 6)
    out = run(model, torch.randn(2, 6), x)
    assert isinstance(out, Tensor)
    assert torch.equal(out, model(x))


def test_a_tensor_made_without_gradients_stays_without() -> None:
    calls = record_calls(Reshaping(), torch.randn(2, 6))
    values = {node.name: node.meta["value"] for node in calls.nodes if "value" in node.meta}
    assert not values["detach"].has_gradient and values["fc"].has_gradient


def test_a_module_that_looks_at_values_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Whole(), nn.Linear(8, 2))
    calls = record_calls(model, torch.randn(2, 6))
    assert calls.opaque == ("1",)
    x = torch.randn(5, 6)
    assert torch.equal(run(model, torch.randn(2, 6), x), model(x))  # type: ignore[arg-type]


def test_a_network_that_looks_at_values_is_refused() -> None:
    with pytest.raises(GraphError, match=r"cannot be traced .*branches on values"):
        record_calls(Whole(), torch.randn(2, 8))


def test_a_branch_on_the_number_of_rows_is_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out if len(x) > 5 else F.relu(out)

    with pytest.raises(GraphError, match="for another number of rows"):
        record_calls(Rows(), torch.randn(2, 3))


def test_recording_leaves_the_network_and_the_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    record_calls(model.eval(), torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_inputs_of_another_structure_are_refused() -> None:
    calls = record_calls(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(GraphError, match="recorded with"):
        calls.tensors_of((torch.randn(2, 4), torch.randn(2, 4)))


def test_what_a_model_is_called_with() -> None:
    x = torch.randn(3, 2)
    assert as_arguments(x) == ((x,), {})
    assert as_arguments({"a": x}) == ((), {"a": x})
    assert rows_of({"flag": True, "a": x}) == 3
    with pytest.raises(GraphError, match="no tensor with rows"):
        rows_of({"flag": True})


def test_extents_are_lines() -> None:
    assert Extent.through((8, 12)) == Extent(0, 2)
    assert Extent.through((5, 5)) == Extent(5)
    assert Extent.through((2, 3)).at(10) == 5
    assert Extent.through((9, 13)).at(1) == 3
