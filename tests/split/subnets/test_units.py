"""Slices of an assignment: they cover, they are disjoint, and going back and forth changes no bit."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.split.drawn import Drawn, networks
from torch import Tensor, nn

from shoal.split.core.state import named_state
from shoal.split.subnets.assignment import assign_units
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import Units, find_units

SHARES = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)
FEW = settings(max_examples=10, deadline=None)
MANY = settings(max_examples=150, deadline=None)


def owners(model: nn.Module, units: Units, hands: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For every tensor, how many parts each element lies in."""
    found = {name: torch.zeros(tensor.shape) for name, tensor in named_state(model).items()}
    for hand in hands:
        for name, piece in units.slices(hand).items():
            piece.put(found[name], piece.take(found[name]) + 1)
    return found


def expected_owners(model: nn.Module, units: Units, hands: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same from what a group says of its units: an element is a part's if all units that it belongs to are."""
    found = {}
    for name, tensor in named_state(model).items():
        count = torch.zeros(tensor.shape)
        for hand in hands:
            mine = torch.ones(tensor.shape)
            for group in units.groups.values():
                for use in group.uses:
                    if use.tensor == name:
                        shape = [-1 if d == use.dim else 1 for d in range(tensor.dim())]
                        absent = torch.ones(tensor.shape[use.dim])
                        for unit in set(range(group.size)) - set(hand[group.name].tolist()):
                            absent[use.rows[unit]] = 0
                        mine = mine * absent.view(shape)
            count = count + mine
        found[name] = count
    return found


@FEW
@given(networks(), SHARES, st.integers(0, 2**31), st.integers(0, 50))
def test_slices_cover_and_are_disjoint(drawn: Drawn, shares: list[float], seed: int, number: int) -> None:
    check_slices(drawn, shares, seed, number)


@pytest.mark.slow
@MANY
@given(networks(), SHARES, st.integers(0, 2**31), st.integers(0, 50))
def test_slices_cover_and_are_disjoint_often(drawn: Drawn, shares: list[float], seed: int, number: int) -> None:
    check_slices(drawn, shares, seed, number)
    check_round_trip(drawn, shares, seed)


def check_slices(drawn: Drawn, shares: list[float], seed: int, number: int) -> None:
    units = find_units(drawn.model, drawn.inputs)
    hands = assign_units(units, shares, seed=seed, round=number)
    for group in units.groups.values():
        assigned = torch.cat([hand[group.name] for hand in hands])
        assert assigned.sort().values.tolist() == list(range(group.size))
        assert all(len(hand[group.name]) for hand in hands)
    counts, expected = owners(drawn.model, units, hands), expected_owners(drawn.model, units, hands)
    for name, count in counts.items():
        assert torch.equal(count, expected[name]), name
        groups = {use.group for group in units.groups.values() for use in group.uses if use.tensor == name}
        if groups:
            assert count.max() <= 1, name
        if len(groups) == 1:
            assert count.min() == 1, name  # a row with one kind of unit is somebody's, always
        if not groups:
            assert bool((count == len(shares)).all()), name


@FEW
@given(networks(), SHARES, st.integers(0, 2**31))
def test_scatter_then_gather_is_the_identity(drawn: Drawn, shares: list[float], seed: int) -> None:
    check_round_trip(drawn, shares, seed)


def check_round_trip(drawn: Drawn, shares: list[float], seed: int) -> None:
    units = find_units(drawn.model, drawn.inputs)
    state = {name: tensor.detach().clone() for name, tensor in named_state(drawn.model).items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    for hand in assign_units(units, shares, seed=seed, round=0):
        part = narrow(drawn.model, units, hand)
        assert type(part) is type(drawn.model)
        pieces = named_state(part)
        slices = units.slices(hand)
        assert list(pieces) == list(slices) == list(state)
        for name, piece in slices.items():
            assert piece.shape(state[name].shape) == tuple(pieces[name].shape), name
            drawn_values = torch.randn(pieces[name].shape).to(pieces[name].dtype)
            piece.put(state[name], drawn_values)
            assert torch.equal(piece.take(state[name]), drawn_values), name
            piece.put(state[name], pieces[name].detach())
    assert all(torch.equal(state[name], before[name]) for name in state)


@FEW
@given(networks(), st.integers(2, 4), st.integers(0, 2**31))
def test_narrow_networks_train(drawn: Drawn, workers: int, seed: int) -> None:
    units = find_units(drawn.model, drawn.inputs)
    for hand in assign_units(units, [1.0] * workers, seed=seed, round=0):
        part = narrow(drawn.model, units, hand)
        out = part(*drawn.inputs)
        assert out.shape == drawn.model(*drawn.inputs).shape
        torch.autograd.backward(out.square().sum())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in part.parameters())
