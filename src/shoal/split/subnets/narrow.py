"""Narrow networks: the user's own network with fewer units. The rest is not in memory."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from shoal.errors import SplitError
from shoal.split.core.parts import Slice
from shoal.split.subnets._blocks import without_blocks
from shoal.split.subnets._classes import attend, rescale, resize
from shoal.split.subnets._record import shell
from shoal.split.subnets._sizes import Entry, Size
from shoal.split.subnets.units import Keep, Reader, Sized, Span, Units

NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "group_norm": nn.GroupNorm}


def narrow(model: nn.Module, units: Units, keep: Keep, *, scale: bool = True) -> nn.Module:
    """Build a network of the user's own class with the units that are kept: same names, smaller tensors.

    Only the kept pieces of the model's weights are copied. Attributes of layers (`out_features`, `num_heads`,
    `normalized_shape`) have the new sizes.

    Args:
        model: The whole network. It is not changed.
        units: Its units.
        keep: Group -> the units that are kept.
        scale: Where a layer sums over units that were divided, multiply what it reads by size / kept, as inverted
            dropout does, unless a normalisation undoes it at once.
    """
    slices = units.slices(keep)

    def piece(name: str, tensor: Tensor) -> Tensor | None:
        if name not in slices:
            return None
        taken = slices[name].take(tensor.detach())
        return nn.Parameter(taken, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else taken

    if units.blocks is not None:
        return without_blocks(model, units.blocks, keep, piece, scale=scale)
    network = shell(model, piece)
    modules = dict(network.named_modules())
    for name, module in modules.items():
        _attributes(module)
        if isinstance(module, nn.MultiheadAttention):
            _heads(module, f"{name}." if name else "", units, keep, slices)
    for call in units.calls:
        if call.name in NORMS and call.cut(keep):
            _norm(modules[call.modules[-1]], call, keep)
    leftover: dict[int, float | tuple[float, ...]] = {}
    if scale:
        leftover = _scale(modules, units, keep)
    _resize(modules, units, keep, leftover)
    return network


def _attributes(module: nn.Module) -> None:
    """Set the attributes of a torch layer from the shapes of its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        _convolution(module)
    elif isinstance(module, _NormBase):
        known = module.weight if module.affine else module.running_mean
        if known is not None:
            module.num_features = len(known)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.elementwise_affine:
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm) and module.affine:
        inside = module.num_channels // module.num_groups
        if len(module.weight) != module.num_channels and module.num_groups > 1:
            module.num_groups = len(module.weight) // inside
        module.num_channels = len(module.weight)
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)


def _convolution(module: _ConvNd) -> None:
    back = isinstance(module, _ConvTransposeNd)
    first, second = module.weight.shape[:2]
    before = module.in_channels if back else module.out_channels
    if module.groups > 1:
        module.groups = first // (before // module.groups)
    read, made = (first, second * module.groups) if back else (second * module.groups, first)
    module.in_channels, module.out_channels = read, made


def _heads(module: nn.MultiheadAttention, prefix: str, units: Units, keep: Keep, slices: Mapping[str, Slice]) -> None:
    """Give torch's attention another forward pass: its own takes the width of a head from the model's width."""
    readers = [r for r in units.readers if r.tensor == f"{prefix}out_proj.weight"]
    if any(r.span.left(keep) != r.span.size for r in readers):
        span = readers[0].span
        attend(module, heads=module.num_heads * span.left(keep) // span.size)
    elif any(tensor.startswith(prefix) and not piece.whole for tensor, piece in slices.items()):
        attend(module, heads=module.num_heads)


def _norm(module: nn.Module, call: Sized, keep: Keep) -> None:
    """Set the size of a normalisation without weights, which only its settings hold."""
    dims = call.outs[0]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        shape = module.normalized_shape
        inner = zip(shape, dims[len(dims) - len(shape) :], strict=True)
        module.normalized_shape = tuple(n if d is None or d.rows else d.left(keep) for n, d in inner)
    elif isinstance(module, nn.GroupNorm) and not module.affine and isinstance(dims[1], Span):
        left = dims[1].left(keep)
        module.num_groups = module.num_groups * left // dims[1].size if module.num_groups > 1 else 1
        module.num_channels = left


def _scale(modules: Mapping[str, nn.Module], units: Units, keep: Keep) -> dict[int, float | tuple[float, ...]]:
    """Set the factor of every layer that sums over kept units. Returns the factors of other sums, by call."""
    leftover: dict[int, float | tuple[float, ...]] = {}
    for reader in units.readers:
        factor = None if reader.normalised else _factor(reader, keep)
        if factor is None:
            continue
        owner, module = reader.tensor.rpartition(".")[0], modules[reader.module]
        if isinstance(module, nn.MultiheadAttention) and owner.endswith("out_proj"):
            module.shoal_scale = factor  # type: ignore[assignment]
        elif isinstance(module, nn.MultiheadAttention) and owner == reader.module:
            reads = {**getattr(module, "shoal_reads", {}), reader.tensor.rpartition(".")[2]: factor}
            module.shoal_reads = reads  # type: ignore[assignment]
        elif isinstance(module, nn.Linear | _ConvNd) and owner == reader.module:
            rescale(module, factor)
        elif reader.call is not None:
            leftover[reader.call] = factor
        else:
            raise SplitError(
                f"{reader.tensor} sums over units by a call that cannot be scaled: use a Linear or a matmul"
            )
    return leftover


def _factor(reader: Reader, keep: Keep) -> float | tuple[float, ...] | None:
    """Return one factor if all are equal, otherwise one for each place; None if there is nothing to scale."""
    if reader.span.left(keep) == reader.span.size:
        return None
    factors = tuple(reader.span.factors(keep).tolist())
    return factors[0] if len(set(factors)) == 1 else factors


def _resize(
    modules: Mapping[str, nn.Module], units: Units, keep: Keep, factors: Mapping[int, float | tuple[float, ...]]
) -> None:
    """Replace the numbers in modules whose own code names sizes, or sums by a function."""
    wanted = set(factors)
    if units.resize:
        wanted |= {
            place
            for place, call in enumerate(units.calls)
            if call.cut(keep) and not isinstance(modules[call.modules[-1]], NORMS.get(call.name, ()))
        }
    swapped = {units.calls[place].modules[-1] for place in wanted}
    tables: dict[str, dict[int, list[Entry]]] = {name: {} for name in swapped}
    for place, call in enumerate(units.calls):
        owner = next((at for at in reversed(range(len(call.modules))) if call.modules[at] in swapped), None)
        if owner is not None:
            entry = Entry(call.name, call.dim, _sizes(call, keep) if place in wanted else (), factors.get(place))
            tables[call.modules[owner]].setdefault(call.runs[owner], []).append(entry)
    for name, runs in tables.items():
        resize(modules[name], name, list(runs.values()))


def _sizes(call: Sized, keep: Keep) -> tuple[tuple[Size, ...], ...]:
    """Return the sizes of each result, in the form of an entry."""
    if not call.cut(keep):
        return ()
    return tuple(
        tuple(None if d is None else Fraction(d.left(keep), d.size) if d.rows else d.left(keep) for d in out)
        for out in call.outs
    )
