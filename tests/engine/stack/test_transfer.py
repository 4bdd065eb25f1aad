"""Many tensors in few copies: whatever their shapes, dtypes and layouts, they come out as they went in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.engine.stack import transfer

CPU = torch.device("cpu")
G = torch.Generator().manual_seed(3)
WIDE = torch.randn(4, 6, 5, generator=G)
TENSORS: list[Tensor] = [
    torch.randn(3, 4, generator=G),
    torch.tensor(7),
    torch.randn(2, 3, generator=G, dtype=torch.float64),
    torch.tensor([True, False, True]),
    WIDE[2],
    WIDE[1].T,
    torch.randn(2, 3, 4, 4, generator=G).contiguous(memory_format=torch.channels_last),
    torch.empty(0, 3),
    torch.randn((), generator=G),
    torch.arange(5),
    torch.randn(3, generator=G).to(torch.bfloat16),
    torch.randn(2, 2, generator=G, dtype=torch.complex64).conj(),
    torch.nn.Parameter(torch.randn(2, generator=G)),
]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Everything is elsewhere; the tensors of each copy that is made."""
    made: list[int] = []
    real = transfer._copy_flat

    def copied(parts: list[Tensor], device: torch.device) -> Tensor:
        made.append(len(parts))
        return real(parts, device)

    monkeypatch.setattr(transfer, "_copy_flat", copied)
    monkeypatch.setattr(transfer, "is_away", lambda tensor, device: True)
    yield made


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert torch.equal(ours, theirs) and not ours.requires_grad


def test_one_copy_for_each_dtype(copies: list[int]) -> None:
    found = transfer.moved(TENSORS, CPU)
    assert_same(found, TENSORS)
    assert sorted(copies) == [1, 1, 1, 1, 2, 7], "bool, float64, bfloat16, complex; two of int64, seven of float32"
    storages = {value.untyped_storage().data_ptr() for value in found if value.dtype == torch.float32 and value.numel()}
    assert len(storages) == 1


def test_what_is_there_already_stays_as_it_is() -> None:
    found = transfer.moved(TENSORS, CPU)
    assert_same(found, TENSORS)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, TENSORS, strict=True))


def test_much_goes_tensor_by_tensor(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_BYTES", 50)
    assert_same(transfer.moved(TENSORS, CPU), TENSORS)
    assert not copies
    assert_same(transfer.stacked([TENSORS[:1] * 2, TENSORS[1:2] * 2], CPU), [torch.stack([t, t]) for t in TENSORS[:2]])
    assert not copies


def test_a_device_without_room_for_all_of_them_at_once(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(parts: list[Tensor], device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(transfer, "_copy_flat", full)
    assert_same(transfer.moved(TENSORS, CPU), TENSORS)


@pytest.mark.parametrize("count", [1, 3])
def test_stacked_and_filled(count: int, copies: list[int]) -> None:
    columns = [[tensor.detach() * (i + 1) for i in range(count)] for tensor in TENSORS[4:7]]
    found = transfer.stacked(columns, CPU)
    assert_same(found, [torch.stack(column) for column in columns])
    assert copies == [3 * count]
    places = [torch.zeros(5, *tensor.shape, dtype=tensor.dtype) for tensor in TENSORS]
    transfer.fill([(place[3], value) for place, value in zip(places, TENSORS, strict=True)])
    assert_same([place[3] for place in places], [tensor.detach() for tensor in TENSORS])
    assert not any(place[[0, 1, 2, 4]].any() for place in places)
    transfer.fill([(places[0][1], torch.tensor(2.0))])
    assert places[0][1].eq(2).all(), "one element is for the whole row"
    transfer.fill([])


def test_portions_cover_everything_once() -> None:
    sizes = [transfer.MOST_BYTES // n for n in (3, 3, 3, 1, 2, 2, 9, 1, 1)]
    found = list(transfer.portions(sizes))
    assert [place for start, stop in found for place in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= transfer.MOST_BYTES for start, stop in found)
    assert len(found) == 6 and not list(transfer.portions([]))
