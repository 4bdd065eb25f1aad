"""The layers that the server computes, with the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.step import autocast, evaluating, number, run_step
from shoal.place.training.joined_batch import JoinedDraws, batch_norms
from shoal.place.training.roles import Built, Given, random_state

FEW = 4
"""Where the server has no layers, it runs the network on so many rows to see whether each row counts by itself."""


@dataclass(slots=True)
class Computed:
    """What the server computes for some rows: their loss, and the gradients at the cut."""

    loss: float
    gradients: list[Tensor | None]
    logs: dict[str, float] = field(default_factory=dict)


class Back:
    """The server's layers and the job's loss."""

    def __init__(self, built: Built) -> None:
        self.built, self.job = built, built.job
        self.device = built.member.device
        _, self.part = built.parts(built.member.model)
        values = () if built.whole else built.graph.cuts[built.roles.cut - 1].values
        self.batched = [value.batched for value in values]
        self.has_gradient = [value.has_gradient for value in values]
        self.splits: bool | None = None
        """Whether a batch may be computed in parts: no layer uses other rows, and the loss is a mean over rows."""

    def join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Join the tensors at the cut of several workers to one batch, ready to be differentiated."""
        joined = []
        for i, (batched, has_gradient) in enumerate(zip(self.batched, self.has_gradient, strict=True)):
            tensor = torch.cat([part[i] for part in parts]) if batched else parts[0][i].clone()
            tensor = tensor.to(self.device)
            joined.append(tensor.requires_grad_(has_gradient and tensor.is_floating_point()))
        return joined

    def compute(
        self, tensors: list[Tensor], batch: Any, draws: JoinedDraws, rows: Tensor, factor: float, scaler: Any
    ) -> Computed:
        """Compute loss and gradients; those of the server's parameters are accumulated. `factor` multiplies the
        loss."""
        assert self.part is not None
        part: nn.Module = self.part
        with autocast(self.job, self.device), draws.rows(rows):
            loss, logs = run_step(self.job, Given(self.built.member.model, lambda: part(*tensors)), batch)
        value = number(loss)
        if value - value != 0.0:
            return Computed(value, [])
        loss = loss * factor if factor != 1.0 else loss
        (scaler.scale(loss) if scaler is not None else loss).backward()
        return Computed(value, [tensor.grad for tensor in tensors], {name: number(x) for name, x in logs.items()})

    def can_split(self, tensors: list[Tensor] | None, batch: Any, total: int) -> bool:
        """Return whether this batch's loss is that of its halves, weighted by rows. Measured once."""
        if self.splits is None:
            uses_other_rows = self.part is not None and bool(batch_norms(self.part))
            self.splits = total > 1 and not uses_other_rows and self._loss_is_a_mean(tensors, batch, total)
        return self.splits

    def _loss_is_a_mean(self, tensors: list[Tensor] | None, batch: Any, total: int) -> bool:
        with random_state(None), evaluating(self.built.member.model), autocast(self.job, self.device):
            if tensors is None and total > FEW:
                few = take_rows(batch, slice(0, FEW))
                outputs = self._outputs(few)
                if outputs is not None:
                    # the network would take long here for all rows, which workers compute: its outputs are repeated
                    return self._halves_agree(partial(self._loss, None, few), FEW) and self._halves_agree(
                        partial(self._loss_of, outputs, batch), total
                    )
            return self._halves_agree(partial(self._loss, tensors, batch), total)

    def _halves_agree(self, loss_of: Callable[[slice], Tensor], total: int) -> bool:
        """Return whether the loss of all rows is the mean of those of the two halves."""
        half = total // 2
        try:
            full_loss, first, second = (loss_of(rows) for rows in (slice(0, total), slice(0, half), slice(half, total)))
        except Exception:  # the step accepts only whole batches
            return False
        mean = (number(first) * half + number(second) * (total - half)) / total
        close = 1e-2 if self.job.precision is not None else 1e-9 if full_loss.dtype == torch.float64 else 1e-5
        return abs(mean - number(full_loss)) <= close * max(abs(number(full_loss)), 1e-6)

    def _outputs(self, batch: Any) -> Any:
        """Return what the network gives for a batch; None if the step does not call it once, or does not accept it."""
        model, outputs = self.built.member.model, list[Any]()
        handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            run_step(self.job, model, batch)
        except Exception:
            return None
        finally:
            handle.remove()
        return outputs[0] if len(outputs) == 1 else None

    def _loss_of(self, outputs: Any, batch: Any, rows: slice) -> Tensor:
        """Return the loss of some rows if the network gave these outputs of `FEW` rows, again and again."""
        index = torch.arange(rows.start, rows.stop) % FEW
        given = take_rows(outputs, index)
        return run_step(self.job, Given(self.built.member.model, lambda: given), take_rows(batch, rows))[0]

    def _loss(self, tensors: list[Tensor] | None, batch: Any, rows: slice) -> Tensor:
        """Return the loss of some rows of a batch."""
        part_batch = take_rows(batch, rows)
        if tensors is None or self.part is None:
            return run_step(self.job, self.built.member.model, part_batch)[0]
        part = self.part
        taken = [t.detach()[rows] if batched else t.detach() for t, batched in zip(tensors, self.batched, strict=True)]
        return run_step(self.job, Given(self.built.member.model, lambda: part(*taken)), part_batch)[0]


def take_rows(batch: Any, rows: slice | Tensor) -> Any:
    """Return some rows of a batch."""
    total = next((len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), 0)
    return pytree.tree_map_only(Tensor, lambda x: x[rows] if x.dim() and len(x) == total else x, batch)
