"""Record a network's forward pass as a list of calls, by running it on tensors without data.

The forward pass runs unchanged, so that Python code may branch on configuration, on shapes, or on None: networks that
torch.fx cannot trace symbolically, such as those of transformers, can be recorded. A call of one of torch's own modules
is one call; every other torch function is a call of its own. A module whose code branches on values stays one call.

The network runs twice, with two numbers of rows. Numbers that differ between both depend on the number of rows; they
are computed from a tensor's shape when the recorded calls run.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import GraphError, describe
from shoal.graphs._joining import join
from shoal.graphs.calls import ROWS, Calls, as_arguments, rows_of
from shoal.utils.torch_flags import quiet_fake_tensors

CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
"""Torch's own modules that call others in plain Python: their calls are recorded one by one."""
STRUCTURE = "_output_structure"
"""Attribute of the part that returns the network's output: how the output is structured."""
TRAINING = "training"
MOST_OPAQUE = 200
"""The largest number of modules that stay one call because they cannot be recorded."""
PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis))


def record_calls(model: nn.Module, sample: Any) -> Calls:
    """Record `model(sample)` on tensors without data; a module that cannot be recorded stays one call.

    Raises:
        GraphError: If the network's own forward cannot be recorded.
    """
    rows, opaque = rows_of(sample), set[str]()
    while True:
        recorders = []
        try:
            for count in ROWS:
                recorders.append(_Recorder(model, opaque))
                recorders[-1].run(sample, rows, count)
            nodes, index = join(model, [recorder.graph for recorder in recorders])
            first = recorders[0]
            return Calls(
                model, nodes, tuple(sorted(opaque)), first.input_structure, first.input_places, first.constants,
                *({name: [index[i] for i in ends] for name, ends in of.items()} for of in (first.before, first.after)),
            )  # fmt: skip
        except Exception as error:
            failed = recorders[-1].failed if recorders else None
            if not failed or failed in opaque or len(opaque) >= MOST_OPAQUE:
                _check_sample(model, sample)
                raise GraphError(
                    f"the network cannot be traced ({describe(error)}); it can be cut only where its forward "
                    "calls modules without branches on values"
                ) from error
            opaque.add(failed)


def _check_sample(model: nn.Module, sample: Any) -> None:
    """Raise a GraphError if the network itself does not accept the sample."""
    args, kwargs = as_arguments(sample)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.is_meta for tensor in (*model.parameters(), *tensors)):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model)(*args, **kwargs)
    except Exception as error:
        raise GraphError(
            f"the network does not take the sample ({describe(error)}); give a sample input: a tensor, a tuple "
            "of arguments, or a dict of named ones"
        ) from error


class _Recorder(TorchFunctionMode):
    """Records every torch function outside of torch's own modules as a node."""

    def __init__(self, model: nn.Module, opaque: set[str]) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.real, self.model = model, make_fake(model, self.fake)
        if not model.training:
            self.model.train()
        self.opaque = opaque
        self.graph = fx.Graph()
        self.mode = self.graph.get_attr(TRAINING)
        self.names = {id(module): name for name, module in self.model.named_modules()}
        state = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.attributes = {id(tensor): name for name, tensor in state}
        self.known: dict[int, tuple[Tensor, fx.Node]] = {}
        self.constants: dict[str, Any] = {}
        self.counter = FlopCounterMode(display=False)
        self.inside = False
        self.failed: str | None = None
        self.before: dict[str, list[int]] = {}
        self.after: dict[str, list[int]] = {}
        self.input_places: tuple[int, ...] = ()
        self.input_structure: pytree.TreeSpec

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, sample: Any, rows: int, count: int) -> None:
        """Record one forward pass with `count` rows in place of the sample's."""
        leaves, self.input_structure = pytree.tree_flatten(as_arguments(sample))
        self.input_places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(quiet_fake_tensors())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(self.fake)
            for i in self.input_places:
                shape = list(leaves[i].shape)
                if shape and shape[0] == rows:
                    shape[0] = count
                leaves[i] = torch.empty(shape, dtype=leaves[i].dtype, device=device)
                self._register(leaves[i], self.graph.placeholder(f"input_{i}"))
            args, kwargs = pytree.tree_unflatten(leaves, self.input_structure)
            stack.enter_context(self._modules_watched())
            stack.enter_context(self.counter)
            with self:
                out = self.model(*args, **kwargs)
            self._output(out)

    def _output(self, out: Any) -> None:
        """Record the output's tensors and its structure. What is neither a tensor nor plain data becomes None."""
        leaves, structure = pytree.tree_flatten(out)
        output_nodes = [
            self._argument(leaf) if isinstance(leaf, Tensor | int | float | str) else None for leaf in leaves
        ]
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            if not isinstance(out, Tensor):
                self.constants[STRUCTURE] = structure
                spec = self.graph.get_attr(STRUCTURE)
                self.graph.output(self.graph.call_function(pytree.tree_unflatten, (output_nodes, spec)))
            else:
                self.graph.output(output_nodes[0])
            return
        raise GraphError(f"the model gives a {type(out).__name__} without tensors")

    @contextmanager
    def _modules_watched(self) -> Iterator[None]:
        """Record calls of torch's own modules as one call inside this context."""
        original_call = nn.Module.__call__
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = recorder.names.get(id(module))
            if recorder.inside or not name:
                return original_call(module, *args, **kwargs)
            recorder.before.setdefault(name, []).append(len(recorder.graph.nodes))
            try:
                if recorder._is_leaf(module, name, (args, kwargs)):
                    out = recorder._call_module(name, original_call, module, args, kwargs)
                else:
                    out = original_call(module, *args, **kwargs)
            except Exception:
                recorder.failed = recorder.failed or name
                raise
            recorder.after.setdefault(name, []).append(len(recorder.graph.nodes))
            return out

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]

    def _is_leaf(self, module: nn.Module, name: str, arguments: Any) -> bool:
        """Return whether a module is recorded as one call: torch's own layers, and others that contain no modules."""
        if name in self.opaque:
            return True
        if type(module).__module__.startswith("torch.nn"):
            return not isinstance(module, CONTAINERS)
        plain = all(leaf is None or isinstance(leaf, (Tensor, *PLAIN)) for leaf in pytree.tree_leaves(arguments))
        return plain and next(module.children(), None) is None

    def _call_module(
        self, name: str, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module and record it as one call."""
        old_operations, versions, self.inside = self.counter.get_total_flops(), _versions((args, kwargs)), True
        try:
            out = self._run_on_data(name, args, kwargs) if name in self.opaque else plain(module, *args, **kwargs)
        finally:
            self.inside = False
        positional, named = self._arguments(args), self._arguments(kwargs)
        self._finish(self.graph.call_module(name, positional, named), out, old_operations, _changed(versions))
        return out

    def _run_on_data(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a module that cannot run without data, by running it on random data of the same
        shapes."""
        with unset_fake_temporarily():
            module = copy.deepcopy(self.real.get_submodule(name)).train(self.model.training)
            inputs = pytree.tree_map_only(Tensor, _some_data, (args, kwargs))
            out = module(*inputs[0], **inputs[1])
        return pytree.tree_map_only(Tensor, lambda x: self.fake.from_tensor(x.detach()), out)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        old_operations, versions = self.counter.get_total_flops(), _versions((args, kwargs))
        out = func(*args, **kwargs)
        changed = _changed(versions)
        if changed or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            node = self._function(func, self._arguments(args), self._arguments(kwargs))
            self._finish(node, out, old_operations, changed)
        return out

    def _function(self, func: Any, positional: Any, named: dict[str, Any]) -> fx.Node:
        """Record a call of a torch function, with `training` taken from the network's mode."""
        if named.get("training") is True:
            named = {**named, "training": self.mode}
        if func is torch.nn.functional.scaled_dot_product_attention and named.get("dropout_p"):
            named = {**named, "dropout_p": self.graph.call_function(operator.mul, (named["dropout_p"], self.mode))}
        if getattr(func, "__name__", "") == "__get__":  # a property, such as x.mT
            return self.graph.call_function(getattr, (positional[0], func.__self__.__name__))
        if (
            getattr(func, "__objclass__", None) is not None
            or getattr(Tensor, getattr(func, "__name__", ""), None) is func
        ):
            return self.graph.call_method(func.__name__, positional, named)
        return self.graph.call_function(func, positional, named)

    # --- tensors and nodes ------------------------------------------------------------------------------------------

    def _finish(self, node: fx.Node, out: Any, old_operations: int, changed: Sequence[Tensor]) -> None:
        """Record the result of a node, and which tensors it changes in place."""
        node.meta["operations"] = self.counter.get_total_flops() - old_operations
        node.meta["changes"] = [self.known[id(leaf)][1] for leaf in changed if id(leaf) in self.known]
        detached = not torch.is_grad_enabled()
        for path, leaf in pytree.tree_flatten_with_path(out)[0]:
            if isinstance(leaf, Tensor):
                self._register(leaf, self._element(node, path), detached)

    def _element(self, node: fx.Node, path: tuple[Any, ...]) -> fx.Node:
        for key in path:
            index = getattr(key, "idx", getattr(key, "key", None))
            name = getattr(key, "name", None)
            if name is not None:
                node = self.graph.call_function(getattr, (node, name))
            else:
                node = self.graph.call_function(operator.getitem, (node, index))
        return node

    def _register(self, tensor: Tensor, node: fx.Node, detached: bool = False) -> None:
        if detached and tensor.is_floating_point():
            node = self.graph.call_method("detach", (node,))
        if id(tensor) in self.attributes:
            return  # a buffer that is updated in place stays the module's own
        self._describe(tensor, node)
        self.known[id(tensor)] = (tensor, node)

    def _arguments(self, value: Any) -> Any:
        return pytree.tree_map(self._argument, value)

    def _argument(self, leaf: Any) -> Any:
        """Return the node of a tensor, or plain data unchanged."""
        if isinstance(leaf, slice):
            return slice(*(self._argument(x) for x in (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.Size):
            return tuple(leaf)
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, PLAIN) or leaf is None or callable(leaf):
                return leaf
            raise GraphError(f"a call takes a {type(leaf).__name__}, which is neither a tensor nor plain data")
        if id(leaf) in self.known:
            return self.known[id(leaf)][1]
        if id(leaf) not in self.attributes:
            if isinstance(leaf, FakeTensor):
                raise GraphError("a tensor is made by a call that cannot be recorded")
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = leaf
            self.attributes[id(leaf)] = name
        node = self.graph.get_attr(self.attributes[id(leaf)])
        self._describe(leaf, node)
        self.known[id(leaf)] = (leaf, node)
        return node

    def _describe(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["tensor"] = (tuple(tensor.shape), tensor.dtype)
        node.meta["storage"] = tensor.untyped_storage()._cdata


def _some_data(like: Tensor) -> Tensor:
    return (torch.randn if like.is_floating_point() else torch.zeros)(like.shape, dtype=like.dtype, device=like.device)


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _changed(versions: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    return [leaf for leaf, version in versions if leaf._version != version]


def make_fake(network: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy of the network with fake weights; tied weights stay tied."""
    fake_of: dict[int, Any] = {id(b): fake.from_tensor(b.detach()) for b in network.buffers()}
    for p in network.parameters():
        fake_of[id(p)] = nn.Parameter(fake.from_tensor(p.detach()), requires_grad=p.requires_grad)
    return copy.deepcopy(network, fake_of)
