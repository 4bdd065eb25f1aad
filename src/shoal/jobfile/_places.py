"""Where in the file a mistake belongs that was found later, in a job that has no lines any more."""

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
"""How a line about a job begins that does not name its field, and that field; others are about the model."""


class Places:
    """The lines of one job's fields."""

    def __init__(self, fields: Mapping[str, Node], line: int) -> None:
        self.fields = fields
        self.line = line

    def line_of(self, text: str) -> int:
        """The line of the field that a mistake names first, before what was raised or is to be done."""
        known = dict(self.fields)
        hparams = self.fields.get("hparams")
        if hparams is not None and hparams.is_table:
            known = hparams.value | known
        begun = [field for begin, field in BEGINS.items() if text.startswith(begin)]
        words = re.findall(r"\w+", re.split(r" raised|[;:]", text)[0])
        node = next((known[name] for name in (*begun, *words, "model") if name in known), None)
        return node.line if node is not None else self.line
