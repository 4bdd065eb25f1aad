"""Train one network as several parts, on one device or over slow links. `shoal` imports this package when it is
used."""

from shoal.split.api import data_parallel, ist, local_sgd
from shoal.split.core.report import SplitReport
from shoal.split.core.state import State
from shoal.split.executors.local import Serial
from shoal.split.executors.packed import Packed
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.sil import sil
from shoal.split.trainer import train_split

__all__ = [
    "IST",
    "DataParallel",
    "LocalSGD",
    "Packed",
    "Serial",
    "SplitReport",
    "State",
    "data_parallel",
    "ist",
    "local_sgd",
    "sil",
    "train_split",
]
