"""Join data sets of the same form that are on one device.

A step that is captured on a GPU reads its rows from one data set. So that jobs with data of their own can be trained in
one step, their data sets become parts of one, and each job reads the rows of its part. Equal data sets are kept once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shoal.data.pool import View
from shoal.data.source import Source, TensorSource


def joined_views(views: Sequence[View], others: Sequence[View | None], most_bytes: int) -> list[View | None]:
    """Return views of the same rows, in the same order, on as few data sets as possible: `views`, then `others`.

    Data that its user has on the device, and may change there, stays apart.

    Args:
        others: Views that need not be joined, but whose data sets should not exist twice.
        most_bytes: Data sets of more bytes together are not joined, since that takes their memory twice for a moment.
    """
    by_form: dict[Hashable, list[TensorSource]] = {}
    for source in dict.fromkeys(view.source for view in views):
        if isinstance(source, TensorSource) and source.owned and all(map(_can_join, source.leaves)):
            by_form.setdefault(_form(source), []).append(source)
    parts: dict[Source, View] = {}
    for sources in by_form.values():
        if len(sources) > 1:
            parts |= _join(sources, most_bytes)
    return [_part(parts[v.source], v) if v is not None and v.source in parts else v for v in (*views, *others)]


def _can_join(leaf: Tensor) -> bool:
    has_few_operators = leaf.is_floating_point() and leaf.dtype.itemsize == 1
    return leaf.layout == torch.strided and not has_few_operators


def _form(source: TensorSource) -> Hashable:
    return str(source.spec), *((leaf.shape, leaf.dtype, leaf.device) for leaf in source.leaves)


def _join(sources: Sequence[TensorSource], most_bytes: int) -> dict[Source, View]:
    """Return for each of these data sets of one form the part of a common one that has its rows."""
    distinct: list[TensorSource] = []
    place: dict[TensorSource, int] = {}
    by_fingerprint: dict[str, list[int]] = {}
    for source in sources:
        alike = by_fingerprint.setdefault(source.fingerprint(), [])
        equal = next((i for i in alike if distinct[i].holds(source.leaves, source.spec)), None)
        if equal is None:
            equal = len(distinct)
            alike.append(equal)
            distinct.append(source)
        place[source] = equal
    first = distinct[0]
    apart: dict[Source, View] = {source: View(distinct[i]) for source, i in place.items()}
    if len(distinct) == 1 or sum(leaf.nbytes for source in distinct for leaf in source.leaves) > most_bytes:
        return apart
    try:
        leaves = [torch.cat(column) for column in zip(*(source.leaves for source in distinct), strict=True)]
    except torch.OutOfMemoryError:
        return apart
    whole = TensorSource(leaves, first.spec, first.device, first.note, owned=True)
    rows = [torch.arange(i * first.length, (i + 1) * first.length) for i in range(len(distinct))]
    return {source: View(whole, rows[i]) for source, i in place.items()}


def _part(part: View, view: View) -> View:
    """Return the rows of `view` in the part that its data set has become."""
    if view.index is None:
        return part
    return View(part.source, view.index if part.index is None else part.index[view.index.cpu()])
