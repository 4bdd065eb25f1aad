"""Notice whether code other than torch's dropout layers reads their rates.

A step whose code does not read them does the same for any rate between 0 and 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import dropout
from torch.nn.modules.dropout import _DropoutNd

from shoal.utils.locks import one_at_a_time

LAYERS: frozenset[type[nn.Module]] = frozenset(
    {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout}
)
RATE = "p"
"""The attribute with the rate."""


@dataclass(slots=True)
class RateReads:
    """What was noticed inside the context."""

    seen: bool = False
    """Whether other code has read a rate."""


@contextmanager
def noting_rate_reads() -> Iterator[RateReads]:
    """Notice reads of the rates inside this context, by any thread. One context may be inside another."""
    with one_at_a_time:
        reads, before = RateReads(), vars(_DropoutNd).get(RATE)
        _set(_Rate(reads, before))
        try:
            yield reads
        finally:
            _set(before)


def _set(attribute: Any) -> None:
    if attribute is None:
        delattr(_DropoutNd, RATE)
    else:
        setattr(_DropoutNd, RATE, attribute)


class _Rate:
    """An attribute of the class, which Python asks before those of an object."""

    def __init__(self, reads: RateReads, outer: _Rate | None) -> None:
        self._reads, self._outer = reads, outer

    def note(self) -> None:
        self._reads.seen = True
        if self._outer is not None:
            self._outer.note()

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None or RATE not in vars(module):
            raise AttributeError(RATE)
        if sys._getframe(1).f_code not in _FORWARDS:
            self.note()
        return vars(module)[RATE]

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[RATE] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[RATE]


_CODES = [getattr(layer.forward, "__code__", None) for layer in LAYERS]
_FORWARDS = frozenset(code for code in _CODES if code is not None and code.co_filename == dropout.__file__)
"""The code of the layers' own `forward`, unless it has been replaced."""
