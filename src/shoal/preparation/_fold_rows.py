"""Assign rows to folds at random, by classes, by groups, or by both.

The rules are those of scikit-learn's KFold, StratifiedKFold, GroupKFold and StratifiedGroupKFold; with shuffle=False
the folds are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]
Permute = Callable[[int], Numbers]
"""A function that returns a random order of `count` things, or their given order if nothing is shuffled."""


def permuting(shuffle: bool, seed: int) -> Permute:
    """Return a function that makes orders which depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.randperm(count, generator=generator).numpy() if shuffle else np.arange(count)


def plain(count: int, k: int, permute: Permute) -> Numbers:
    """Assign rows to folds of nearly equal size."""
    folds = np.empty(count, dtype=np.int64)
    for fold, rows in enumerate(np.array_split(permute(count), k)):
        folds[rows] = fold
    return folds


def stratified(classes: Numbers, k: int, permute: Permute) -> Numbers:
    """Assign rows so that every fold has nearly the same share of each class."""
    _, first = np.unique(classes, return_index=True)
    classes = np.argsort(np.argsort(first))[classes]  # numbered by their first rows
    in_order = np.sort(classes)
    shares = np.stack([np.bincount(in_order[fold::k], minlength=classes.max() + 1) for fold in range(k)])
    folds = np.empty(len(classes), dtype=np.int64)
    for number in range(classes.max() + 1):
        blocks = np.arange(k).repeat(shares[:, number])
        folds[classes == number] = blocks[permute(len(blocks))]
    return folds


def grouped(groups: Numbers, k: int, permute: Permute, shuffle: bool) -> Numbers:
    """Assign rows so that all rows of a group are in one fold: at random, or the largest group first to the smallest
    fold."""
    sizes = np.bincount(groups)
    fold_of = np.empty(len(sizes), dtype=np.int64)
    if shuffle:
        for fold, some in enumerate(np.array_split(permute(len(sizes)), k)):
            fold_of[some] = fold
    else:
        rows_in = np.zeros(k)
        for group in np.argsort(sizes, kind="stable")[::-1]:
            fold_of[group] = np.argmin(rows_in)
            rows_in[fold_of[group]] += sizes[group]
    return fold_of[groups]


def stratified_groups(classes: Numbers, groups: Numbers, k: int, permute: Permute) -> Numbers:
    """Assign whole groups to folds so that the folds have nearly the same share of each class.

    Groups with the most uneven classes come first, and each goes to the fold where the shares then vary least.
    """
    counts = np.zeros((groups.max() + 1, classes.max() + 1))
    np.add.at(counts, (groups, classes), 1)
    totals, in_fold = counts.sum(0), np.zeros((k, counts.shape[1]))
    order = permute(len(counts))
    fold_of = np.empty(len(counts), dtype=np.int64)
    for group in order[np.argsort(-counts[order].std(1), kind="stable")]:
        spreads = []
        for fold in range(k):
            candidate = in_fold.copy()
            candidate[fold] += counts[group]
            spreads.append((candidate / totals).std(0).mean())
        fold_of[group] = _smallest(spreads, in_fold.sum(1))
        in_fold[fold_of[group]] += counts[group]
    return fold_of[groups]


def _smallest(spreads: list[float], rows: Numbers) -> int:
    """Return the fold with the smallest spread; among nearly equal ones, the fold with fewer rows."""
    best = 0
    for fold in range(1, len(spreads)):
        equal = bool(np.isclose(spreads[fold], spreads[best]))
        if spreads[fold] < spreads[best] or (equal and rows[fold] < rows[best]):
            best = fold
    return best
