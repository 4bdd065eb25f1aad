"""Weights and buffers of a network, put back as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def load_weights(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`model.load_state_dict(state)`, also where a buffer has had another shape when the state was taken."""
    for name, buffer in model.named_buffers():
        saved = state.get(name)
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, torch.empty_like(saved, device=buffer.device))
    model.load_state_dict(state)
