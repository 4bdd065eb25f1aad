"""Join data sets of the same form that are on one device.

A step that is captured on a GPU reads its rows from one data set. So that jobs with data of their own can be trained in
one step, their data sets become parts of one, and each job reads the rows of its part. Equal data sets are kept once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shoal.data.pool import View
from shoal.data.source import Source, TensorSource, content_hash

LARGEST = 1 << 33
"""Data sets of more bytes together are not joined, since that takes their memory twice for a moment."""
_HASHED_ROWS = 8
"""Rows that are compared first, so that data sets which differ are found soon."""


def joined_views(views: Sequence[View]) -> list[View]:
    """Return views of the same rows, in the same order, on as few data sets as possible.

    Data that its user has on the device, and may change there, stays apart.
    """
    by_form: dict[Hashable, list[TensorSource]] = {}
    for source in dict.fromkeys(view.source for view in views):
        if isinstance(source, TensorSource) and source.owned and all(map(_can_join, source.leaves)):
            by_form.setdefault(_form(source), []).append(source)
    parts: dict[Source, View] = {}
    for sources in by_form.values():
        if len(sources) > 1:
            parts |= _join(sources)
    return [_part(parts[view.source], view) if view.source in parts else view for view in views]


def _can_join(leaf: Tensor) -> bool:
    has_few_operators = leaf.is_floating_point() and leaf.dtype.itemsize == 1
    return leaf.layout == torch.strided and not has_few_operators


def _form(source: TensorSource) -> Hashable:
    return str(source.spec), *((leaf.shape, leaf.dtype, leaf.device) for leaf in source.leaves)


def _join(sources: Sequence[TensorSource]) -> dict[Source, View]:
    """Return for each of these data sets of one form the part of a common one that has its rows."""
    distinct: list[TensorSource] = []
    place: dict[TensorSource, int] = {}
    by_first_rows: dict[Hashable, list[int]] = {}
    for source in sources:
        alike = by_first_rows.setdefault(tuple(content_hash(leaf[:_HASHED_ROWS]) for leaf in source.leaves), [])
        equal = next((i for i in alike if distinct[i].holds(source.leaves, source.spec)), None)
        if equal is None:
            equal = len(distinct)
            alike.append(equal)
            distinct.append(source)
        place[source] = equal
    first = distinct[0]
    if len(distinct) == 1:
        return {source: View(first) for source in sources}
    if sum(leaf.nbytes for source in distinct for leaf in source.leaves) > LARGEST:
        return {source: View(distinct[i]) for source, i in place.items()}
    leaves = [torch.cat(column) for column in zip(*(source.leaves for source in distinct), strict=True)]
    whole = TensorSource(leaves, first.spec, first.device, first.note, owned=True)
    rows = [torch.arange(i * first.length, (i + 1) * first.length) for i in range(len(distinct))]
    return {source: View(whole, rows[i]) for source, i in place.items()}


def _part(part: View, view: View) -> View:
    """Return the rows of `view` in the part that its data set has become."""
    if view.index is None:
        return part
    return View(part.source, view.index if part.index is None else part.index[view.index])
