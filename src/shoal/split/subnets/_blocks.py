"""Residual blocks as units: a worker has some whole blocks, and the rest of the network.

A block that a worker does not have is the identity there. What the other blocks add is multiplied by blocks / kept, so
that the whole network needs no correction when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import SplitError, describe
from shoal.split.core.state import named_state
from shoal.split.subnets._classes import subclass
from shoal.split.subnets._record import Record, Run, record, shell
from shoal.split.subnets.units import Blocks, Group, Keep, Span, Units

GROUP = "blocks"


def find_blocks(model: nn.Module, inputs: Sequence[Any]) -> Units:
    """Find the network's residual blocks: modules that add their input to what they compute from it.

    Only innermost blocks count that run once in a forward pass and share no tensor with anything outside.
    """
    from shoal.split.subnets._check import Probe, quiet

    traced = record(model, inputs)
    whole = {}
    by_name = {}
    for name in _innermost(_adding(traced)):
        tensors, reason = _own_tensors(model, name)
        if reason:
            whole[name] = reason
        else:
            by_name[name] = tensors
    with quiet():
        for name in list(by_name):
            if reason := _fault(Probe(model, inputs), name):
                whole[name] = reason
                del by_name[name]
    if len(by_name) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in whole.items())
        raise SplitError(
            f"{type(model).__name__} has {len(by_name)} residual block{'s' * (len(by_name) != 1)} that can be "
            f"distributed{f' ({why})' * bool(why)}: a split by blocks needs two or more; use blocks=False"
        )
    blocks = Blocks(GROUP, tuple(by_name), tuple(by_name.values()))
    in_blocks = frozenset().union(*by_name.values())
    state = named_state(model)
    return Units(
        groups={GROUP: Group(GROUP, len(by_name), "block", ())},
        whole=whole | {name: "it is outside the residual blocks" for name in state if name not in in_blocks},
        spans={name: tuple(Span(n) for n in tensor.shape) for name, tensor in state.items()},
        blocks=blocks,
    )


def without_blocks(
    model: nn.Module, blocks: Blocks, keep: Keep, piece: Callable[[str, Tensor], Tensor | None], *, scale: bool
) -> nn.Module:
    """Build the network with the identity in place of blocks that are not kept. Those have no tensors then."""
    network = shell(model, piece)
    modules = dict(network.named_modules())
    removed = blocks.removed(keep)
    factor = len(blocks.modules) / (len(blocks.modules) - len(removed))
    for name in blocks.modules:
        if name in removed:
            modules[name].__class__ = subclass(type(modules[name]), _skipping)
        elif scale and removed:
            modules[name].shoal_scale = factor
            modules[name].__class__ = subclass(type(modules[name]), _counting)
    return network


def _skipping(_: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x

    return forward


def _counting(cls: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = x + self.shoal_scale * (cls.forward(self, x, *args, **kwargs) - x)
        return made

    return forward


def _adding(traced: Record) -> list[Run]:
    """Find runs of modules that add their input, which has the output's shape, to something."""
    times: dict[str, int] = {}
    for run in traced.runs:
        times[run.module] = times.get(run.module, 0) + 1
    added: dict[int, set[str]] = {}
    for op in traced.ops:
        if op.name in ("add", "add_"):
            for tensor in op.tensors:
                added.setdefault(id(tensor), set()).update(op.modules)
    return [
        run
        for run in traced.runs
        if times[run.module] == 1
        and run.module
        and isinstance(run.given, Tensor)
        and isinstance(run.made, Tensor)
        and run.given.shape == run.made.shape
        and run.given.dtype == run.made.dtype
        and run.module in added.get(id(run.given), ())
    ]


def _innermost(runs: Sequence[Run]) -> list[str]:
    names = [run.module for run in runs]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _own_tensors(model: nn.Module, name: str) -> tuple[frozenset[str], str]:
    """Return the block's parameters and buffers, or the reason why it cannot be a unit."""
    names: dict[int, list[str]] = {}
    for tensor_name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(tensor_name)
    inside = [same for same in names.values() if any(n.startswith(f"{name}.") for n in same)]
    shared = [same for same in inside if not all(n.startswith(f"{name}.") for n in same)]
    if shared:
        return frozenset(), f"it shares {shared[0][0]} with other modules"
    if not inside:
        return frozenset(), "it has no weights"
    return frozenset(same[0] for same in inside), ""


def _fault(probe: Any, name: str) -> str:
    """Compare the network without the block with the whole network in which the block passes its input through.

    Returns what differs; empty if nothing does.
    """
    tensors, _ = _own_tensors(probe.whole, name)
    blocks = Blocks(GROUP, (name, ""), (tensors, frozenset()))
    keep = {GROUP: torch.tensor([1])}
    try:
        small = without_blocks(
            probe.whole, blocks, keep, lambda known, t: None if known in tensors else t, scale=False
        ).eval()
        with torch.no_grad():
            got = probe.run(small)
            handle = dict(probe.whole.named_modules())[name].register_forward_hook(lambda _, args, __: args[0])
            expected = probe.run(probe.whole.eval())
            handle.remove()
    except Exception as error:
        return f"the network does not run without it ({describe(error)})"
    same = all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True))
    return "" if same else "the network without it computes something else"
