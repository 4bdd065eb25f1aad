"""k-fold cross-validation, which turns one job into k jobs that share its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data import Pool, Rows
from shoal.data.pool import View
from shoal.data.source import TensorSource
from shoal.engine.members.member import open_data
from shoal.errors import JobError
from shoal.jobs.job import Job
from shoal.jobs.loaders import refuse_batches
from shoal.preparation import _fold_rows
from shoal.preparation._fold_rows import Numbers
from shoal.utils.numpy_values import plain_int


def folds(
    job: Job, k: int = 5, *, stratify: Any = None, groups: Any = None, shuffle: bool = True, seed: int = 0
) -> list[Job]:
    """Return k jobs, each validated on its own k-th of the rows and trained on the others. The data is not copied.

    The split depends only on `seed`, `stratify` and `groups`, so that jobs with different hyper-parameters get the same
    folds.

    Args:
        job: The job, without `val`.
        k: The number of folds.
        stratify: A class for each row; "y" for the targets, the last part of the data; or a key of a dict. Every fold
            has nearly the same share of each class.
        groups: A group for each row, or a key of a dict. All rows of a group are in the same fold.
        shuffle: Assign the rows at random; if False, in their order. With `stratify` or `groups` as in scikit-learn.
        seed: The seed of the shuffle.
    """
    k, seed = plain_int(k), plain_int(seed)
    label = f"job {job.name!r}" if job.name else "job"
    try:
        if job.val is not None:
            raise JobError("it has val= already, which folds would replace; remove it")
        refuse_batches(job, "folds")
        view = open_data(Pool(torch.device("cpu")), job, "data")
        _check(k, len(view), shuffle)
        fold_of = _fold_of_rows(view, k, stratify, groups, shuffle, seed)
    except JobError as error:
        raise JobError(*(f"{label}: {line}" for line in error.lines)) from None
    jobs = []
    for fold in range(k):
        inside = torch.from_numpy(fold_of == fold)
        name = f"{job.name} fold={fold + 1}/{k}" if job.name else f"fold={fold + 1}/{k}"
        jobs.append(replace(job, data=Rows(job.data, ~inside), val=Rows(job.data, inside), name=name))
    return jobs


def _check(k: Any, rows: int, shuffle: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 2 <= k <= rows:
        raise JobError(f"k is {k!r}; use a whole number from 2 to the number of rows, {rows}")
    if not isinstance(shuffle, bool):
        raise JobError(f"shuffle is {shuffle!r}; use True or False")


def _fold_of_rows(view: View, k: int, stratify: Any, groups: Any, shuffle: bool, seed: int) -> Numbers:
    """Return the fold in which each row is validated."""
    permute = _fold_rows.permuting(shuffle, seed)
    classes = None if stratify is None else _row_labels("stratify", stratify, view)
    group_of = None if groups is None else _row_labels("groups", groups, view)
    if classes is not None:
        names, classes = np.unique(classes, return_inverse=True)
        classes = classes.reshape(-1)
        rows = np.bincount(classes)
        if rows.min() < k:
            raise JobError(
                f"class {names[rows.argmin()].item()!r} has {_rows(rows.min())}, and each of k = {k} folds needs one; "
                "use a smaller k, or leave the class out"
            )
    if group_of is None:
        if classes is None:
            return _fold_rows.plain(len(view), k, permute)
        return _fold_rows.stratified(classes, k, permute)
    group_of = np.unique(group_of, return_inverse=True)[1].reshape(-1)
    if group_of.max() + 1 < k:
        raise JobError(f"groups has {group_of.max() + 1} groups, and each of k = {k} folds needs one; use a smaller k")
    if classes is None:
        return _fold_rows.grouped(group_of, k, permute, shuffle)
    fold_of = _fold_rows.stratified_groups(classes, group_of, k, permute)
    if len(np.unique(fold_of)) < k:
        raise JobError(f"the groups cannot be divided among k = {k} folds so that none is empty; use a smaller k")
    return fold_of


def _row_labels(name: str, values: Any, view: View) -> Numbers:
    """Return a class or group for each row of the data, as an array."""
    if isinstance(values, str):
        values = _part(name, values, view)
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except Exception:
        array = np.empty(0, dtype=object)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype == object and all(isinstance(value, str) for value in array.flat):
        array = array.astype(str)  # a pandas column of texts
    if array.ndim != 1 or array.dtype == object:
        problem = f"of shape {list(array.shape)}" if array.ndim != 1 else "of mixed or unknown values"
        raise JobError(f"{name} is {problem}; give one number or one text for each row")
    if len(array) != len(view):
        raise JobError(f"{name} has {_rows(len(array))} and data has {_rows(len(view))}; give one for each row of data")
    return array


def _part(name: str, key: str, view: View) -> Any:
    """Return the part of the data with this key, or the last part for "y"."""
    if not isinstance(view.source, TensorSource):
        raise JobError(f"{name} is {key!r}, and data is neither tensors nor arrays; give one value for each row")
    content = view.source.whole()
    if isinstance(content, Mapping):
        if key not in content:
            raise JobError(f"{name} is {key!r}, which data does not have; use one of {', '.join(map(repr, content))}")
        part = content[key]
    elif key == "y" and name == "stratify" and isinstance(content, (tuple, list)) and len(content) > 1:
        part = content[-1]
    else:
        more = "'y' for the targets, or " if name == "stratify" else ""
        raise JobError(f"{name} is {key!r}; use {more}one value for each row, or a key where data is a dict")
    return part if view.index is None or not isinstance(part, Tensor) else part[view.index]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
