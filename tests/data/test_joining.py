"""Data sets of one form become parts of one, and jobs read the same rows as before."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.data import Pool, Rows, TensorSource
from shoal.data.joining import joined_views
from shoal.engine.planning.joined_data import join_data
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reference import solo

CPU, MOST = torch.device("cpu"), 1 << 20


def data(seed: int, rows: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randint(4, (rows,), generator=generator)


def opened(*given: Any) -> list[Any]:
    pool = Pool(CPU)
    views = [pool.open(each) for each in given]
    for view in views:
        if isinstance(view.source, TensorSource):
            view.source.owned = True  # as on a GPU, where they are copies
    return views


def test_rows_are_the_same_and_equal_data_is_kept_once() -> None:
    own, fold = data(1), torch.tensor([7, 3, 3, 19])
    views = opened(own, data(2), data(1), Rows(own, fold), data(3, rows=21), (own[0], own[1].float()))
    joined: list[Any] = joined_views(views, [], MOST)
    assert joined[0].source is joined[1].source is joined[2].source is joined[3].source
    assert joined[0].source.length == 40
    assert joined[4].source is views[4].source and joined[5].source is views[5].source  # of other forms
    for before, after in zip(views, joined, strict=True):
        assert len(before) == len(after)
        for a, b in zip(before.take(0, len(before)), after.take(0, len(after)), strict=True):
            assert torch.equal(a, b)
    assert joined[0].same(joined[2]) and not joined[0].same(joined[1]) and not joined[0].same(joined[3])


def test_only_equal_data_needs_no_common_data_set() -> None:
    views = opened(data(1), data(1))
    joined: list[Any] = joined_views(views, [], MOST)
    assert joined[0].source is joined[1].source is views[0].source
    assert joined[0].index is None and joined[0].same(joined[1])


def test_data_that_differs_in_one_late_number_stays_apart() -> None:
    x, y = data(1)
    other = x.clone()
    other[-1, -1] += 1
    a, b = cast("list[Any]", joined_views(opened((x, y), (other, y)), [], MOST))
    assert torch.equal(a.take(0, 20)[0], x) and torch.equal(b.take(0, 20)[0], other)


def test_data_that_its_user_has_on_the_device_is_left_alone() -> None:
    pool, (x, y), (other, labels) = Pool(CPU), data(1), data(2)
    views = [pool.open(each) for each in ((x, y), (other, labels), (x, labels), (other, y))]
    assert joined_views(views, [], MOST) == views


def test_validation_data_is_not_kept_a_second_time() -> None:
    own, other = data(1), data(2)
    train, val = torch.arange(15), torch.arange(15, 20)
    views = opened(Rows(own, train), Rows(other, train), Rows(own, val), Rows(other, val), data(3))
    joined = joined_views(views[:2], [*views[2:], None], MOST)
    assert len({view.source for view in joined[:4] if view is not None}) == 1
    assert joined[4] is views[4] and joined[5] is None
    for before, after in zip(views, joined, strict=False):
        assert after is not None
        for a, b in zip(before.take(0, len(before)), after.take(0, len(after)), strict=True):
            assert torch.equal(a, b)


def test_data_too_large_to_copy_is_left_apart() -> None:
    views = opened(data(1), data(2), data(1))
    joined: list[Any] = joined_views(views, [], 100)
    assert [view.source for view in joined] == [views[0].source, views[1].source, views[0].source]


def test_training_on_joined_data_is_training_on_ones_own() -> None:
    shared = data(9)
    jobs = [
        shoal.Job(
            model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 4)).double(),
            data=(each[0].double(), each[1]), val=(each[0][:5].double(), each[1][:5]), loss=F.cross_entropy,
            batch_size=6, epochs=3, seed=i, data_seed=i % 2, name=f"{i}", hparams={"lr": 0.1},
        )
        for i, each in enumerate([data(1), data(2), shared, shared, data(4)])
    ]  # fmt: skip
    members = prepare(jobs, CPU)
    for member in members:
        assert isinstance(member.data.source, TensorSource)
        member.data.source.owned = True
    join_data(members)
    assert len({member.data.source for member in members}) == 1
    Run(members, PlanningContext(members, timed=False)).go()
    for member in members:
        assert member.tier == "stacked"
        expected = solo(member.job)
        for a, b in zip(member.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        for row, by_itself in zip(member.history, expected.history, strict=True):
            assert abs(row["val_loss"] - by_itself["val_loss"]) < 1e-9
