"""Folds by classes and groups, beside scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import shoal

N = 61
G = np.random.default_rng(3)
LABELS = G.permutation(np.repeat([0, 1, 2], [30, 20, 11]))
GROUPS = G.integers(0, 13, N)
X = torch.arange(N, dtype=torch.float32).unsqueeze(1)


def job(data: Any = None, **changes: Any) -> shoal.Job:
    data = (X, torch.from_numpy(LABELS)) if data is None else data
    settings: dict[str, Any] = {"model": lambda: nn.Linear(1, 3), "loss": F.cross_entropy, "epochs": 1, "name": "a"}
    return shoal.Job(data=data, **(settings | changes))


def held_out(jobs: list[shoal.Job]) -> list[list[int]]:
    """The rows that each fold is validated on; the others it is trained on."""
    for one in jobs:
        assert sorted([*one.data.index.tolist(), *one.val.index.tolist()]) == list(range(N))
    assert sorted(row for one in jobs for row in one.val.index.tolist()) == list(range(N))
    return [one.val.index.tolist() for one in jobs]


@pytest.mark.parametrize("k", [2, 3, 5])
def test_unshuffled_folds_are_scikit_learns(k: int) -> None:
    sklearn = pytest.importorskip("sklearn.model_selection")
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (sklearn.KFold, {}),
        (sklearn.StratifiedKFold, {"stratify": LABELS}),
        (sklearn.GroupKFold, {"groups": GROUPS}),
        (sklearn.StratifiedGroupKFold, {"stratify": LABELS, "groups": GROUPS}),
    ]
    for kind, settings in kinds:
        theirs = [test.tolist() for _, test in kind(k).split(X, LABELS, settings.get("groups"))]
        assert held_out(shoal.folds(job(), k, shuffle=False, **settings)) == theirs, kind


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_folds_keep_classes_and_groups(seed: int) -> None:
    shares = np.bincount(LABELS) / 4
    by_class = held_out(shoal.folds(job(), 4, stratify="y", seed=seed))
    for rows in by_class:
        assert np.abs(np.bincount(LABELS[rows], minlength=3) - shares).max() < 1
    by_group = held_out(shoal.folds(job(), 4, groups=GROUPS, seed=seed))
    by_both = held_out(shoal.folds(job(), 4, stratify=LABELS, groups=GROUPS, seed=seed))
    for parts in (by_group, by_both):
        groups = [set(GROUPS[rows]) for rows in parts]
        assert sum(map(len, groups)) == len(set(GROUPS)), "a group is in one fold alone"
    assert all(len(np.bincount(LABELS[rows], minlength=3).nonzero()[0]) == 3 for rows in by_both)
    again = shoal.folds(job(hparams={"lr": 0.5}), 4, stratify="y", seed=seed)
    assert held_out(again) == by_class
    assert held_out(shoal.folds(job(), 4, stratify="y", seed=seed + 1)) != by_class


def test_where_the_classes_come_from() -> None:
    expected = held_out(shoal.folds(job(), 3, stratify=LABELS))
    tensor, words = torch.from_numpy(LABELS), [["few", "some", "rare"][label] for label in LABELS]
    for given in ("y", tensor, tensor.unsqueeze(1), LABELS.tolist(), words):
        assert held_out(shoal.folds(job(), 3, stratify=given)) == expected
    step = {"loss": None, "step": lambda model, batch: model(batch["x"]).sum()}
    table = {"x": X, "label": tensor, "who": torch.from_numpy(GROUPS)}
    assert held_out(shoal.folds(job(table, **step), 3, stratify="label")) == expected
    both = held_out(shoal.folds(job(table, **step), 3, stratify="label", groups="who"))
    assert both == held_out(shoal.folds(job(), 3, stratify=LABELS, groups=GROUPS))
    assert held_out(shoal.folds(job(TensorDataset(X, tensor)), 3, stratify="y")) == expected


def test_texts_in_a_pandas_column() -> None:
    pandas = pytest.importorskip("pandas")
    names = [f"p{group}" for group in GROUPS]
    expected = held_out(shoal.folds(job(), 3, groups=names))
    assert held_out(shoal.folds(job(), 3, groups=pandas.Series(names))) == expected
    assert held_out(shoal.folds(job(), 3, groups=pandas.Series(names, dtype="category"))) == expected
    with pytest.raises(shoal.JobError, match="groups is of mixed or unknown values; give one number or one text"):
        shoal.folds(job(), 3, groups=pandas.Series([*names[1:], None]))


def test_of_some_rows_of_the_data() -> None:
    some = torch.arange(0, N, 2)
    jobs = shoal.folds(job(shoal.Rows((X, torch.from_numpy(LABELS)), some)), 2, stratify="y", shuffle=False)
    alone = shoal.folds(job((X[some], torch.from_numpy(LABELS)[some])), 2, stratify="y", shuffle=False)
    for one, other in zip(jobs, alone, strict=True):
        assert one.val.index.tolist() == some[other.val.index].tolist()


class Items(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        return X[row], int(LABELS[row])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"k": 12, "stratify": "y"},
            "job 'a': class 2 has 11 rows, and each of k = 12 folds needs one; use a",
        ),
        ({"k": 3, "stratify": [0] * 60}, "job 'a': stratify has 60 rows and data has 61 rows; give one for each row"),
        ({"k": 3, "groups": np.zeros((N, 2))}, "job 'a': groups is of shape \\[61, 2\\]; give one number or one text"),
        ({"k": 3, "groups": [None] * N}, "job 'a': groups is of mixed or unknown values"),
        ({"k": 3, "groups": [0, 1] * 30 + [0]}, "job 'a': groups has 2 groups, and each of k = 3 folds needs one"),
        ({"k": 3, "stratify": "label"}, "job 'a': stratify is 'label'; use 'y' for the targets, or one value for each"),
        ({"k": 3, "groups": "y"}, "job 'a': groups is 'y'; use one value for each row, or a key where data is a dict"),
        ({"k": 3, "shuffle": 1}, "job 'a': shuffle is 1; use True or False"),
        ({"k": 62}, "job 'a': k is 62; use a whole number from 2 to the number of rows, 61"),
    ],
)
def test_what_cannot_be_folded(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(shoal.JobError, match=f"^{words}"):
        shoal.folds(job(), **settings)


def test_of_a_dataset_the_classes_must_be_given() -> None:
    with pytest.raises(
        shoal.JobError, match=r"stratify is 'y', and data is neither tensors nor arrays; give one value"
    ):
        shoal.folds(job(Items(), collate=default_collate), 3, stratify="y")
    expected = held_out(shoal.folds(job(), 3, stratify="y"))
    assert held_out(shoal.folds(job(Items(), collate=default_collate), 3, stratify=LABELS)) == expected
    assert held_out(shoal.folds(job(Items()), 3, stratify="y")) == expected, "it is read once and held as tensors"


def test_they_train_as_one_stack() -> None:
    results = shoal.train(shoal.folds(job(), 4, stratify="y"), device="cpu")
    assert {result.tier for result in results} == {"stacked"}
