"""Which jobs look alike, so that one dry step shows the mistakes of all of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.engine.members.member import Member
from shoal.engine.tracing.fingerprint import fingerprint
from shoal.engine.tracing.rate_reads import LAYERS, RATE


def likeness(member: Member) -> tuple[Any, ...]:
    """Return a key that members share if their dry steps are the same: network, data, loss, batch size.

    Rates of torch's dropout layers are left out; where other code reads them, `rates` are part of it too.
    """
    job, model = member.job, member.model
    tensors = tuple(
        (name, tuple(t.shape) if not nn.parameter.is_lazy(t) else None, t.dtype) for name, t in model.named_parameters()
    )
    modules = tuple(
        (
            name,
            type(module),
            _described(module),
            *(
                (k, v)
                for k, v in vars(module).items()
                if isinstance(v, int | float | str) and not k.startswith("_") and not (k == RATE and _drops(module))
            ),
        )
        for name, module in model.named_modules()
    )
    sources = tuple((id(view.source), len(view)) if view else None for view in (member.data, member.val))
    code = fingerprint((job.loss, job.step, job.metrics))
    return tensors, modules, sources, code, job.batch_size, job.drop_last, job.precision


def rates(member: Member) -> tuple[float, ...]:
    """Return the rates of the network's dropout layers."""
    return tuple(vars(module)[RATE] for module in member.model.modules() if _drops(module))


def _drops(module: nn.Module) -> bool:
    """Return whether a module is a dropout layer of torch that drops some values and not all."""
    rate = vars(module).get(RATE)
    return type(module) in LAYERS and isinstance(rate, float) and 0.0 < rate < 1.0


def _described(module: nn.Module) -> str:
    """Return a module's own part of its representation."""
    if _drops(module):
        return ""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return module.extra_repr() if of_torch or type(module).__repr__ is nn.Module.__repr__ else repr(module)
