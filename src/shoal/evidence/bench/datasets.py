"""Real data for comparisons: MNIST and similar data from a folder, or scikit-learn's digits if no folder is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.results import Results

DIGITS_TEST = 360
HELD_OUT = 6
"""One in this many of the training rows is held out when settings are chosen."""


@dataclass(frozen=True, slots=True)
class Data:
    """Rows [N, D] of floats with their classes, for training and for testing."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def held_out(self) -> Data:
        """Return data on which settings are chosen: a part of the training rows replaces the test rows."""
        is_held_out = torch.arange(len(self.x)) % HELD_OUT == 0
        return Data(
            f"{self.name}, held out",
            self.x[~is_held_out],
            self.y[~is_held_out],
            self.x[is_held_out],
            self.y[is_held_out],
        )


def load(folder: Path | None = None, rows: int | None = None) -> Data:
    """Return MNIST from `mnist.npz` in this folder, or digits; `rows` limits the training rows, in one fixed random
    order."""
    data = _digits() if folder is None else _mnist(folder)
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    chosen = order if rows is None else order[:rows]
    mean, deviation = data.x[chosen].mean(), data.x[chosen].std()
    return Data(
        data.name,
        (data.x[chosen] - mean) / deviation,
        data.y[chosen],
        (data.x_test - mean) / deviation,
        data.y_test,
    )


def _mnist(folder: Path) -> Data:
    import numpy as np

    path = folder / "mnist.npz"
    if not path.is_file():
        raise ValueError(f"{path} is not there; put mnist.npz (x_train, y_train, x_test, y_test) into the folder")
    with np.load(path) as stored:
        missing = [name for name in ("x_train", "y_train", "x_test", "y_test") if name not in stored]
        if missing:
            raise ValueError(f"{path} has no {missing[0]}; it needs x_train, y_train, x_test and y_test")
        x, y, x_test, y_test = (torch.as_tensor(stored[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
    return Data("MNIST", x.flatten(1).float() / 255, y.long(), x_test.flatten(1).float() / 255, y_test.long())


def _digits() -> Data:
    x, y = digits()
    return Data("digits", x[DIGITS_TEST:], y[DIGITS_TEST:], x[:DIGITS_TEST], y[:DIGITS_TEST])


def digits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's handwritten digits, rows [1797, 64] from 0 to 1 in one fixed random order, and their
    classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("this needs scikit-learn: pip install 'shoal[demo]'") from None
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(images, dtype=dtype)[order] / 16, torch.as_tensor(classes, dtype=torch.int64)[order]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of rows whose largest output is their class, as a metric of jobs."""
    return (outputs.argmax(-1) == targets).double().mean()


def finished(results: Results) -> Results:
    """Return these results, or raise a RuntimeError if one of them is not done."""
    for result in results:
        if result.status != "done":
            raise RuntimeError(f"{result.name} ended as {result.status}: {result.error}")
    return results
