"""The bytes of a step besides tensors: headers and descriptions of messages, row numbers, random state.

They follow the messages of `training/`, and matter if tensors are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.place.devices import BUCKET_BYTES
from shoal.place.graph import Cut, Layer

TASK, UPDATE, DONE = 210, 150, 85
"""Bytes of the message that starts a worker's batch, of the optimizer's settings in it, and of the message that ends
it."""
MESSAGE, TENSOR = 60, 30
"""Bytes of any other message, and of each tensor in it without its name."""
ROW = 8
RANDOM_STATE = 5056 + TENSOR


def message_bytes(
    layers: Sequence[Layer], ways: Mapping[int, str], cut: Cut | None, rows: float, micro_batches: int
) -> int:
    """Return the bytes both ways for one worker with so many rows in a step. `layers` are those on the workers."""
    total = TASK + DONE + ROW * rows
    if cut is not None:
        total += 2 * micro_batches * (MESSAGE + TENSOR * len(cut.values))
    through_server = [layers[i] for i, way in ways.items() if way == "server"]
    names = [name for layer in through_server for name in layer.parameters]
    total += sum(2 * (TENSOR + len(name)) for name in names)  # gradients up, parameters down
    total += MESSAGE * -(-sum(layer.trained_bytes for layer in through_server) // BUCKET_BYTES)
    if len(through_server) < len(ways):
        total += UPDATE
    if any("Dropout" in layer.kind for layer in layers):
        total += RANDOM_STATE
    return round(total)
