"""Find the line in the file for a mistake that was found later, in a job that no longer has lines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.jobfile._tree import Node

BEGINS = {
    "building the optimizer": "hparams",
    "the last batch": "batch_size",
    "a batch is": "data",
    "validating": "val",
    "metric": "metrics",
}
"""Beginnings of lines about a job that do not name their field, and that field; other such lines are about the
model."""


class Places:
    """The lines of one job's fields."""

    def __init__(self, fields: Mapping[str, Node], line: int) -> None:
        self.fields = fields
        self.line = line

    def line_of(self, text: str) -> int:
        """Return the line of the first field that a mistake names before the error that was raised or the fix."""
        known = dict(self.fields)
        hparams = self.fields.get("hparams")
        if hparams is not None and hparams.is_table:
            known = hparams.value | known
        field_by_beginning = [field for begin, field in BEGINS.items() if text.startswith(begin)]
        words = re.findall(r"\w+", re.split(r" raised|[;:]", text)[0])
        node = next((known[name] for name in (*field_by_beginning, *words, "model") if name in known), None)
        return node.line if node is not None else self.line
