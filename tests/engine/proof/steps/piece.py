"""A piece of a training step as source text, with places where one of several texts is taken."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field, fields, replace
from typing import Any

_CHOICE = re.compile("«([^«»]*)»")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a piece adds to a script; `«a ; b»` stands for one of the texts, `{i}` for a number of the piece's own."""

    name: str
    top: str = ""
    """At the module's top level."""
    init: str = ""
    """In `Net.__init__`, where `q` has the member's numbers."""
    forward: str = ""
    """In `Net.features`: makes another `h` ([B, 6]) of `h` and the input `x` ([B, 6])."""
    state: str = ""
    """In `make_step`, before the step: what the step's closure holds."""
    before: str = ""
    """In the step, before the network is called: may change `x` and `y`."""
    loss: str = ""
    """In the step, after `out = model(x)`: makes or changes `loss`, from `out` ([B, 3]), `h`, `x` and `y`."""
    after: str = ""
    """In the step, last."""
    job: dict[str, str] = field(default_factory=dict)
    """Settings of the job that this piece needs, as source."""
    plain: bool = False
    """Whether steps of such pieces alone must be stacked."""

    def __post_init__(self) -> None:
        for name in self._names():
            object.__setattr__(self, name, textwrap.dedent(getattr(self, name)).strip("\n").rstrip())

    @property
    def choices(self) -> tuple[int, ...]:
        """For each place with a choice, the number of texts."""
        return tuple(len(_texts(found)) for text in self._fields() for found in _CHOICE.findall(text))

    def chosen(self, picks: tuple[int, ...], number: int) -> Piece:
        """The piece with one text at each place."""
        rest = iter(picks)

        def pick(found: re.Match[str]) -> str:
            return _texts(found[1])[next(rest)]

        changes: dict[str, Any] = {
            name: _CHOICE.sub(pick, getattr(self, name)).replace("{i}", str(number)) for name in self._names()
        }
        return replace(self, **changes)

    def _fields(self) -> list[str]:
        return [getattr(self, name) for name in self._names()]

    @staticmethod
    def _names() -> list[str]:
        return [f.name for f in fields(Piece) if f.name not in ("name", "job", "plain")]


def _texts(choice: str) -> list[str]:
    return [text.strip() for text in re.split(r"\s+;\s+", f" {choice} ")]
