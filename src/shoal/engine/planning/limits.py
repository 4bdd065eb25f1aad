"""How many members may run at once after memory was full, and for how long."""

from __future__ import annotations

import math
from collections.abc import Collection


class Limits:
    """Bytes and members that may run together: all that the budget allows, until memory was full once.

    A limit is about the kinds of jobs that filled the memory. When the last of them has ended it is lifted: what was
    wrong about their bytes says nothing about those of others.

    >>> limits = Limits()
    >>> limits.lower(1e6, math.inf, {"wide"}); limits.lift({"narrow", "wide"}); limits.bytes
    1000000.0
    >>> limits.lift({"narrow"}); limits.bytes
    inf
    """

    def __init__(self) -> None:
        self.bytes = math.inf
        self.members = math.inf
        self._kinds: set[str] = set()

    def lower(self, bytes: float, members: float, kinds: Collection[str]) -> None:
        """From now on at most so much, since jobs of these kinds did not fit."""
        self.bytes, self.members = min(self.bytes, bytes), min(self.members, members)
        self._kinds |= set(kinds)

    def lift(self, kinds: Collection[str]) -> None:
        """Forget the limits, unless jobs of a kind that did not fit are among these, which are left."""
        if self._kinds and self._kinds.isdisjoint(kinds):
            self.forget()

    def forget(self) -> None:
        """No limits again: the one that did not fit beside others does not fit alone either, and is gone."""
        self.bytes = self.members = math.inf
        self._kinds = set()
