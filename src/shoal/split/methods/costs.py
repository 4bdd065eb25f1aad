"""What a training step of a network holds and does, measured without doing it.

The step is run on fake tensors: shapes, with no memory behind them. A ledger notes every tensor that is made and when
it is gone; operations are counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.engine.members.member import make_optimizer
from shoal.engine.planning.liveness import Ledger
from shoal.jobs.job import Job


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one optimizer step, batch included."""

    peak_bytes: int
    """The most that is held at one time: weights, gradients, optimizer state, batch, activations, temporaries."""
    operations: int
    """Multiplications and additions of forward and backward."""
    weight_bytes: int
    """Parameters and buffers alone."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def measure(job: Job, network: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any) -> Cost:
    """The cost of one step of `network`, its second: by then the optimizer has its state."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = faked(copy.deepcopy(network), fake)
    counter, ledger = FlopCounterMode(display=False), Ledger()
    with warnings.catch_warnings(), fake:
        warnings.simplefilter("ignore")
        fakes = pytree.tree_map_only(Tensor, fake.from_tensor, batch)
        optimizer = make_optimizer(job, twin)
        with counter:
            _loss(step, twin, fakes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        weights = nbytes([*twin.parameters(), *twin.buffers()])
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = weights + nbytes(kept) + nbytes(fakes)
        start = ledger.know((*twin.parameters(), *twin.buffers(), *kept, *pytree.tree_leaves(fakes)))
        with ledger:
            _loss(step, twin, fakes).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return Cost(held + ledger.held(start).working, int(counter.get_total_flops()), weights)


def nbytes(value: Any) -> int:
    """Of all tensors in a pytree."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def faked(network: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The network with fake weights in place of its own, tied ones still tied."""
    known: dict[int, Any] = {}
    for module in network.modules():
        for name, value in module._parameters.items():
            if value is not None:
                if id(value) not in known:
                    known[id(value)] = nn.Parameter(fake.from_tensor(value.detach()), value.requires_grad)
                module._parameters[name] = known[id(value)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in known:
                    known[id(buffer)] = fake.from_tensor(buffer)
                module._buffers[name] = known[id(buffer)]
    return network


def _loss(step: Callable[[nn.Module, Any], Any], network: nn.Module, batch: Any) -> Tensor:
    out = step(network, batch)
    loss: Tensor = out[0] if isinstance(out, tuple) else out
    return loss
