"""Where in the file a mistake belongs that was found later, in a job that has no lines any more."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.jobfile._tree import Node

BEGINS = {
    "forward": "model",
    "building the model": "model",
    "building the optimizer": "hparams",
    "its factory": "model",
    "its optimizer": "optimizer",
    "parameter group": "hparams",
    "reading the first": "data",
    "validating": "val",
    "a batch is": "data",
    "the last batch": "batch_size",
    "its schedule": "schedule",
    "metric": "metrics",
    "metrics": "metrics",
    "it has both loss": "loss",
    "it has neither loss": "model",
    "it has both epochs": "epochs",
}
"""How a line about a job begins, and the field that it is about."""


class Places:
    """The lines of one job's fields."""

    def __init__(self, fields: Mapping[str, Node], line: int) -> None:
        self.fields = fields
        self.line = line

    def line_of(self, text: str) -> int:
        """The line of the field that a mistake names, or of the job's block."""
        hparams = self.fields.get("hparams")
        word = re.split(r"\W", text, maxsplit=1)[0]
        if word in self.fields:
            return self.fields[word].line
        if hparams is not None and hparams.is_table and word in hparams.value:
            line: int = hparams.value[word].line
            return line
        for begin, field in BEGINS.items():
            if text.startswith(begin):
                node = self.fields.get(field) or self.fields.get({"hparams": "optimizer"}.get(field, field))
                return node.line if node is not None else self.line
        return self.line
