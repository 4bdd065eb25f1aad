"""Cut a network into parts that are ordinary modules and keep the names of the user's parameters.

A cut is named by a module: "fc3" cuts right before fc3 is called, "after:fc3" right after it. One part computes what
comes before the cut, the next part what comes after it. Exactly one tensor may cross.
"""

from __future__ import annotations

import copy
import difflib
import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.engine.members.step import evaluating
from shoal.errors import GraphError, SplitError, describe
from shoal.graphs.calls import Calls, tensors_in
from shoal.graphs.parts import Parts
from shoal.graphs.recording import record_calls
from shoal.split.core.state import named_state

AFTER = "after:"
MOST_NAMES = 8
"""How many names an error shows."""
OTHER_MODE = (
    "the network's parts do not compute what the network does, as where it does other things in training than in "
    "evaluation (if self.training: ...), so it cannot be cut; use modules that know their mode, such as nn.Dropout"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where one part ends and the next begins."""

    name: str
    """The cut as the user wrote it: a module's name, or "after:" and a module's name."""
    shape: tuple[int, ...]
    """The shape of one row of the tensor that crosses."""
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A network in parts, in the order in which they are computed."""

    networks: list[nn.Module]
    """The parts. Each has the parameters and buffers of its own calls, under the names of the whole network. The first
    takes the network's inputs, every other one the output of the part before it."""
    cuts: list[Cut]
    output: tuple[int, ...]
    """The shape of one row of the network's output; empty if the output is not a single tensor with rows."""
    names: list[dict[str, str]]
    """For each part, the names of its tensors -> their names in the whole network, where tied weights have one name."""


def record(model: nn.Module, inputs: Sequence[Any]) -> Parts:
    """Record `model(*inputs)`, on a copy of the network. Raises a SplitError where it cannot be recorded."""
    try:
        return Parts(record_calls(copy.deepcopy(model), tuple(inputs)))
    except GraphError as error:
        raise SplitError(str(error)) from error


def cut(model: nn.Module, inputs: Sequence[Any], cuts: Sequence[str], recorded: Parts | None = None) -> Pieces:
    """Cut a network into parts at these modules. `inputs` are a few rows, from which the shapes are found.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> pieces = cut(net, (torch.zeros(2, 4),), ["2"])
    >>> [[name for name, _ in part.named_parameters()] for part in pieces.networks], pieces.cuts[0].shape
    ([['0.weight', '0.bias'], ['2.weight', '2.bias']], (3,))

    Raises:
        SplitError: when a cut does not exist, when more than one tensor crosses it, or when a part has no weights.
    """
    recorded = recorded if recorded is not None else record(model, inputs)
    calls = recorded.calls
    borders_by_cut = sorted((border_of(calls, name), i, name) for i, name in enumerate(cuts))
    for (a, _, first), (b, _, second) in pairwise(borders_by_cut):
        if a == b:
            raise SplitError(f"cuts {first!r} and {second!r} are the same place; leave one of them out")
    borders = [0, *(place for place, _, _ in borders_by_cut), len(calls.nodes)]
    crossing = [crossing_of(recorded, border, name) for border, _, name in borders_by_cut]
    networks = [
        _piece(recorded, low, high, out, len(inputs))
        for (low, high), out in zip(pairwise(borders), [*crossing, None], strict=True)
    ]
    names = [name for _, _, name in borders_by_cut]
    _check_weights(networks, names)
    shapes, output = _try_out(calls.model, networks, inputs)
    names_by_id = {id(x): name for name, x in named_state(calls.model).items()}
    return Pieces(
        networks,
        [Cut(name, shape, dtype) for name, (shape, dtype) in zip(names, shapes, strict=True)],
        output,
        [{name: names_by_id[id(x)] for name, x in named_state(network).items()} for network in networks],
    )


def border_of(calls: Calls, cut: str) -> int:
    """Return how many calls come before this cut."""
    names = list(calls.before)
    if not isinstance(cut, str):
        raise SplitError(f"cut {cut!r} is a {type(cut).__name__}; name a module, such as {names[-1]!r}")
    name = cut.removeprefix(AFTER)
    if name not in dict(calls.model.named_modules()) or not name:
        raise SplitError(f"cut {cut!r}: the network has no module {name!r}; there are {_near(name, names)}")
    borders = (calls.after if cut.startswith(AFTER) else calls.before).get(name, [])
    if not borders:
        raise SplitError(
            f"cut {cut!r}: the network's forward does not call {name!r} by itself; cut at one of {_near(name, names)}"
        )
    if len(borders) > 1:
        raise SplitError(f"cut {cut!r}: {name!r} is called {len(borders)} times; cut at a module that is called once")
    return borders[0]


def crossing_of(recorded: Parts, border: int, cut: str) -> fx.Node:
    """Return the tensor that crosses a border. Raises a SplitError if there is more than one."""
    try:
        crossing = recorded.crossing(border)
    except GraphError as error:
        raise SplitError(f"cut {cut!r}: {error}") from error
    if len(crossing) == 1 and crossing[0].op != "placeholder":
        return crossing[0]
    cut_names = [name for name, where in candidates(recorded) if where != border]
    advice = f"; cut at one of {_near(cut.removeprefix(AFTER), cut_names)}" if cut_names else ""
    if all(node.op == "placeholder" for node in crossing):
        raise SplitError(f"cut {cut!r}: no weights come before it, so there is nothing to train apart{advice}")
    names = ", ".join(str(node) for node in crossing[:4])
    raise SplitError(f"cut {cut!r} splits a skip or a residual: {len(crossing)} tensors cross it ({names}){advice}")


def candidates(recorded: Parts) -> list[tuple[str, int]]:
    """List the modules before which the network can be cut, with their places: the outermost module for each place."""
    weights = weights_before(recorded.calls)
    by_border: dict[int, str] = {}
    for name, borders in recorded.calls.before.items():
        border = borders[0]
        if len(borders) != 1 or border in by_border or weights[border] in (0, weights[-1]):
            continue
        try:
            crossing = recorded.crossing(border)
        except GraphError:
            continue
        if len(crossing) == 1 and crossing[0].op != "placeholder":
            by_border[border] = name
    return [(name, border) for border, name in sorted(by_border.items())]


def weights_before(calls: Calls) -> list[int]:
    """Count, for each place, the calls before it that have weights to train."""
    counts = [0]
    for node in calls.nodes:
        counts.append(counts[-1] + any(p.requires_grad for p in weights_of(calls, node)))
    return counts


def weights_of(calls: Calls, node: fx.Node) -> list[nn.Parameter]:
    """List the parameters that a call uses by itself."""
    if node.op == "call_module":
        return list(calls.model.get_submodule(str(node.target)).parameters())
    parameters = dict(calls.model.named_parameters()) if node.op == "get_attr" else {}
    return [parameters[str(node.target)]] if node.target in parameters else []


def _piece(recorded: Parts, low: int, high: int, out: fx.Node | None, num_inputs: int) -> nn.Module:
    """Make a module of the calls from `low` to `high`. The first takes the network's own arguments."""
    graph, calls = fx.Graph(), recorded.calls
    if low:
        known = recorded.entering(graph, low)
    else:
        arguments = tuple(graph.placeholder(f"argument_{i}") for i in range(num_inputs))
        tensors = graph.call_function(tensors_in, (arguments,))
        inputs = (node for node in calls.nodes if node.op == "placeholder")
        known = {node: graph.call_function(operator.getitem, (tensors, i)) for i, node in enumerate(inputs)}
    recorded.copy(graph, low, high, known)
    if out is not None:
        graph.output(known[out])
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(tensor := calls.constants.get(str(node.target)), Tensor):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(_Constant(tensor)))
            graph.erase_node(node)
    return recorded.module(graph, calls.model)


class _Constant:
    """Gives a tensor that is neither a parameter nor a buffer of the user's network, and so no part of its state."""

    __name__ = "constant"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


def _check_weights(networks: list[nn.Module], cuts: list[str]) -> None:
    """Raise a SplitError if a part has nothing to train, or a tensor is in two parts."""
    owner: dict[int, tuple[int, str]] = {}
    for number, network in enumerate(networks):
        if not any(p.requires_grad for p in network.parameters()):
            where = f"after {cuts[-1]!r}" if number == len(cuts) else f"before {cuts[number]!r}"
            raise SplitError(f"the part {where} has no weights that are trained; move or leave out a cut")
        for name, x in named_state(network).items():
            first, other = owner.setdefault(id(x), (number, name))
            if first != number:
                what = f"{name!r} is" if name == other else f"{other!r} and {name!r} are one tensor"
                raise SplitError(
                    f"cut {cuts[first]!r}: {what} in two parts, so neither could own it; cut so that both uses are in "
                    "one part"
                )


def _try_out(
    model: nn.Module, networks: list[nn.Module], inputs: Sequence[Any]
) -> tuple[list[tuple[tuple[int, ...], torch.dtype]], tuple[int, ...]]:
    """Run the parts one after another and compare the output with the whole network's.

    Returns the shapes at the cuts and of the output.
    """
    shapes = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for network in (model, *networks):
            stack.enter_context(evaluating(network))
        try:
            value: Any = networks[0](*inputs)
            for network in networks[1:]:
                if not isinstance(value, Tensor) or value.dim() == 0:
                    raise SplitError(f"a {type(value).__name__} crosses a cut; it must be a tensor with rows")
                shapes.append((tuple(value.shape[1:]), value.dtype))
                value = network(value.clone())
            expected = model(*inputs)
        except SplitError:
            raise
        except Exception as error:
            raise SplitError(f"the network's parts do not run on the job's data ({describe(error)})") from error
    one, other = (x if isinstance(x, Tensor) else None for x in (value, expected))
    if (one is None) != (other is None) or (one is not None and other is not None and not _alike(one, other)):
        raise SplitError(OTHER_MODE)
    return shapes, tuple(one.shape[1:]) if one is not None and one.dim() else ()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True))


def _near(name: str, names: Sequence[str]) -> str:
    """List names to choose from, those similar to the wanted one first."""
    names = [n for n in names if n]
    like = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    shown = [*like, *(n for n in names if n not in like)]
    return ", ".join(shown[:MOST_NAMES]) + (", ..." if len(shown) > MOST_NAMES else "")
