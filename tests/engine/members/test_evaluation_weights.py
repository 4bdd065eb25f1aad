"""The weights that a member returns, where they are not those in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.members.evaluation_weights import finish_weights
from shoal.preparation.checks import prepare


class Halving(torch.optim.SGD):
    """In eval mode the weights are half of those in training."""

    def eval(self) -> None:
        self._scale(0.5)

    def train(self) -> None:
        self._scale(1.0)

    @torch.no_grad()
    def _scale(self, wanted: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(wanted / group.get("scale", 1.0))
            group["scale"] = wanted


def test_what_an_optimizer_needs_to_train_on_is_kept_as_it_is_stored() -> None:
    """By itself and on the CPU, wherever the member has trained: it is sent between processes, and saved."""
    job = shoal.Job(
        model=lambda: nn.Linear(3, 2, bias=False), data=(torch.ones(4, 3), torch.ones(4, 2)), loss=F.mse_loss,
        optimizer=Halving, hparams={"lr": 0.1, "momentum": 0.9}, epochs=1,
    )  # fmt: skip
    member = prepare([job], torch.device("cpu"))[0]
    optimizer = Halving(member.model.parameters(), lr=0.1, momentum=0.9)
    optimizer.train()
    member.model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trained = member.model.weight.detach().clone()
    rows = torch.stack([torch.full((2, 3), float(row)) for row in range(99)])  # as a stack has them
    member.optimizer_state = optimizer.state_dict()
    member.optimizer_state["state"][0]["momentum_buffer"] = rows[4]
    finish_weights(member)
    assert member.trained is not None
    assert torch.equal(member.model.weight, trained / 2) and torch.equal(member.trained["model"]["weight"], trained)
    kept = member.trained["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(kept, rows[4]) and kept.untyped_storage().nbytes() == kept.nbytes
