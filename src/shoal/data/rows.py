"""A subset of the rows of some data, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import JobError
from shoal.utils.numpy_values import tensor_of


class Rows:
    """Rows of other data, by index: folds and subsets share one copy of the data behind them.

    Examples:
        >>> import torch
        >>> Rows((torch.arange(10), torch.arange(10)), [1, 3]).index.tolist()
        [1, 3]
    """

    def __init__(self, data: Any, index: Any) -> None:
        index = tensor_of(index) if isinstance(index, np.ndarray) else torch.as_tensor(index)
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(-1)
        if index.ndim != 1 or index.is_floating_point() or index.is_complex():
            raise JobError(
                f"Rows: index has shape {list(index.shape)} and dtype {index.dtype}; use one dimension of whole numbers"
            )
        if isinstance(data, Rows):
            data, index = data.data, data.index[index.to(torch.int64)]
        self.data: Any = data
        self.index: Tensor = index.to(device="cpu", dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.index)
