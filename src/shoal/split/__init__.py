"""One network trained as many parts, on one device or over slow links.

Names are loaded when they are used, so that `import shoal` does not wait for them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.split.api import data_parallel as data_parallel
    from shoal.split.api import ist as ist
    from shoal.split.api import local_sgd as local_sgd
    from shoal.split.core.report import SplitReport as SplitReport
    from shoal.split.core.state import State as State
    from shoal.split.executors.executors import Serial as Serial
    from shoal.split.executors.packed import Packed as Packed
    from shoal.split.methods.averaging import DataParallel as DataParallel
    from shoal.split.methods.averaging import LocalSGD as LocalSGD
    from shoal.split.methods.ist import IST as IST
    from shoal.split.sil import sil as sil
    from shoal.split.trainer import train_split as train_split

_HOME = {
    "DataParallel": "shoal.split.methods.averaging",
    "IST": "shoal.split.methods.ist",
    "LocalSGD": "shoal.split.methods.averaging",
    "Packed": "shoal.split.executors.packed",
    "Serial": "shoal.split.executors.executors",
    "SplitReport": "shoal.split.core.report",
    "State": "shoal.split.core.state",
    "data_parallel": "shoal.split.api",
    "ist": "shoal.split.api",
    "local_sgd": "shoal.split.api",
    "sil": "shoal.split.sil",
    "train_split": "shoal.split.trainer",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.split' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """Files that have the name of a function, as ist.py, do not take its place here when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
