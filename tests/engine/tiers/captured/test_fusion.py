"""Elementwise operators joined into kernels, against the operators themselves; on the host where there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
import torch.nn.functional as F
from tests.engine.tiers.captured import host_kernels
from torch import Tensor, nn

from shoal.engine.tiers.captured.fusion import launches
from shoal.engine.tiers.captured.fusion.fused import Fused
from shoal.engine.tiers.captured.fusion.launches import Launch
from shoal.engine.tiers.captured.fusion.recording import Call, NotRecordable, Recording
from shoal.utils import cuda_kernels

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_GPU and host_kernels.COMPILER is None, reason="needs a C++ compiler or a GPU")
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
LOAD = cuda_kernels.load if ON_GPU else host_kernels.load

Function = Callable[..., Sequence[Tensor | None]]


def fused(function: Function, inputs: Sequence[Tensor]) -> tuple[Fused, list[Tensor | None]]:
    """What was recorded, and what it returned."""
    with Recording(inputs) as recording:
        outputs = list(function(*inputs))
    numbers = [None if output is None else recording.find(output) for output in outputs]
    return Fused(recording, numbers, DEVICE, LOAD), [None if o is None else o.detach().clone() for o in outputs]


def num_kernels(made: Fused) -> int:
    return sum(isinstance(step, Launch) for step in made._steps)


def assert_same(function: Function, inputs: Sequence[Tensor], rtol: float) -> Fused:
    made, expected = fused(function, inputs)
    for given, wanted in zip(made(inputs), expected, strict=True):
        assert (given is None) == (wanted is None)
        if given is not None and wanted is not None:
            assert given.dtype == wanted.dtype
            torch.testing.assert_close(given, wanted, rtol=rtol, atol=rtol * 0.1, equal_nan=True)
    return made


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape))).to(
        DEVICE, dtype
    )


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, 3.0),
    "mul": torch.mul,
    "div": torch.div,
    "neg": lambda x, y: -x,
    "pow 2": lambda x, y: x**2,
    "pow 3": lambda x, y: x**3,
    "pow -1": lambda x, y: x**-1,
    "pow 2.5": lambda x, y: x.abs() ** 2.5,
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(x.abs()),
    "log1p": lambda x, y: torch.log1p(x.abs()),
    "sqrt": lambda x, y: torch.sqrt(x),
    "rsqrt": lambda x, y: torch.rsqrt(x.abs()),
    "erf": lambda x, y: torch.erf(x),
    "sin and cos": lambda x, y: torch.sin(x) * torch.cos(y),
    "relu": lambda x, y: F.relu(x),
    "leaky relu": lambda x, y: F.leaky_relu(x, 0.2),
    "gelu": lambda x, y: F.gelu(x),
    "gelu tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "abs": lambda x, y: torch.abs(x),
    "sign": lambda x, y: torch.sign(x) * y,
    "square": lambda x, y: torch.square(x),
    "reciprocal": lambda x, y: torch.reciprocal(x),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: x.clamp_min(0.1),
    "where": lambda x, y: torch.where(x > y, x, 0.5),
    "masked fill": lambda x, y: x.masked_fill(y >= 0, float("-inf")),
    "comparisons": lambda x, y: ((x < y) & (x != 0) | ~(x <= -1)).to(x.dtype) * x,
    "nan and inf": lambda x, y: torch.where(x > 1, float("nan"), x) + float("inf") * (y > 2),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "rtol"),
    [
        ((4, 6), torch.float64, 1e-10),
        ((3, 5), torch.float64, 1e-10),
        ((4, 6), torch.float32, 1e-4),
        ((4, 6), torch.bfloat16, 2e-2),
    ],
)
def test_each_operator_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    names: list[str] = []

    def step(x: Tensor, y: Tensor) -> list[Tensor | None]:
        outputs: list[Tensor | None] = []
        for name, operator in OPERATORS.items():
            a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
            out = operator(a, b)
            outputs += [out.detach(), *torch.autograd.grad(out.square().sum(), (a, b), allow_unused=True)]
            names.extend([name, f"{name}: gradient", f"{name}: gradient of the other"])
        return outputs

    inputs = [drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype).flip(0).contiguous()]
    made, expected = fused(step, inputs)
    for name, given, wanted in zip(names, made(inputs), expected, strict=True):
        torch.testing.assert_close(
            given, wanted, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    elementwise = {call.func.overloadpacket for i, call in enumerate(made.calls) if i in made._group_of}
    others = {call.func for call in made.calls if call.func.overloadpacket not in elementwise}
    assert len(elementwise) > 35 and all("backward" not in str(func) for func in others), others


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))
        out: Tensor = x + F.relu(self.down(h)) * 0.9
        return out


def training_step(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> Function:
    names = [name for name, _ in net.named_parameters()]

    def step(*tensors: Tensor) -> list[Tensor | None]:
        *weights, x, y = tensors
        leaves = [w.detach().requires_grad_() for w in weights]
        total = loss(torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), (x,)), y)
        return [total.detach(), *torch.autograd.grad(total, leaves, allow_unused=True)]

    return step


@pytest.mark.parametrize("rows", [16, 7])
def test_a_network_of_blocks(rows: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), Block(12), Block(12), nn.GELU(), nn.Linear(12, 4)).double().to(DEVICE)
    weights = [p.detach() for p in net.parameters()]
    y = torch.randint(0, 4, (rows,), device=DEVICE)
    made = assert_same(training_step(net), [*weights, drawn(rows, 8), y], 1e-10)
    recorded = [call for call in made.calls if "backward" not in str(call.func)]
    assert num_kernels(made) < len(recorded) / 4
    assert len(made._loaded) < num_kernels(made), "the blocks are alike and share their kernels"
    other = [w + 0.1 for w in weights]
    expected = training_step(net)(*other, drawn(rows, 8) + 1, y)
    for given, wanted in zip(made([*other, drawn(rows, 8) + 1, y]), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)


def test_what_a_backward_pass_wants_back_is_computed_again() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        h = x @ w
        out = (0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))) @ w
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    made = assert_same(step, [drawn(8, 8), drawn(8, 8)], 1e-10)
    stores = sorted(len(kernel.stores) for kernel in made._kernels.values())
    assert stores[-1] == 1, "the forward pass stores the product's input alone"


def test_columns_transposes_and_views() -> None:
    def step(x: Tensor, column: Tensor, row: Tensor, number: Tensor) -> list[Tensor]:
        a = (x * column + row).view(4, 15)  # one kernel through the view
        b = torch.relu(a).view(4, 3, 5).transpose(1, 2)
        c = b.contiguous() * number  # and one that reads in another order
        return [c, b * 2, x.expand(2, 4, 3, 5) + 1]

    for x in (drawn(4, 3, 5), drawn(3, 5, 4).permute(2, 0, 1)):
        assert_same(step, [x, drawn(4, 1, 1), drawn(5), drawn(1)[0]], 1e-12)


def test_joined_tensors() -> None:
    """Contiguous ones, ones in another order or repeated, and sizes that no word divides; along every dimension."""

    def step(x: Tensor, y: Tensor, row: Tensor) -> list[Tensor]:
        a, b = torch.tanh(x), x.transpose(0, 1).contiguous().transpose(0, 1)
        joined = [torch.cat([a, y, a], 2), torch.cat([b, x, row.expand(4, 2, 8)], 1), torch.cat([y, x[:1]])]
        return [*joined, torch.cat([x[..., :3], y[..., 1:]], -1), torch.cat([x.flatten(), row]) * 2]

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = [drawn(4, 2, 8, dtype=dtype), drawn(4, 2, 8, dtype=dtype) + 1, drawn(8, dtype=dtype)]
        made = assert_same(step, inputs, 1e-6 if dtype != torch.bfloat16 else 1e-2)
        others = [call for call in made._steps if isinstance(call, Call)]
        joined = [call for call in others if call.func == torch.ops.aten.cat.default]
        assert len(joined) == 5 and all(call in made._joinings for call in joined)


def test_what_is_joined_by_torch() -> None:
    def step(x: Tensor, whole: Tensor) -> list[Tensor]:
        return [torch.cat([x, whole.to(torch.float32)]), torch.cat([x, x[:0]]), torch.cat([x[0, :0], x[0]])]

    assert_same(step, [drawn(4, 6), torch.ones(4, 6, device=DEVICE, dtype=torch.int64)], 1e-6)


def test_parts_of_a_tensor_that_begin_anywhere() -> None:
    """What is read in another order is read where it lies; a copy of it would lie otherwise."""

    def step(x: Tensor, flat: Tensor) -> list[Tensor]:
        parts = [torch.tanh(x[:, t] * 2) for t in range(3)]  # with gaps, from odd places on
        return [*parts, torch.relu(flat[1:13]) + flat[3:15], torch.stack(parts, 1).transpose(1, 2)[:, :, 1] * 3]

    for dtype in (torch.float64, torch.float32):
        assert_same(step, [drawn(4, 3, 5, dtype=dtype), drawn(16, dtype=dtype)], 1e-6)


def group_counts(made: Fused) -> list[int]:
    """The number of groups of each launch, in their order."""
    return [len(step.groups) for step in made._steps if isinstance(step, Launch)]


def test_groups_of_one_code_are_one_launch() -> None:
    """Casts of weights at the start, casts of gradients at the end, whatever their sizes and however many there are."""

    def step(x: Tensor, *weights: Tensor) -> list[Tensor]:
        h, halves = x, []
        for weight in weights:
            halves.append(weight.to(torch.bfloat16))
            h = h @ halves[-1]
        grads = []
        for half in reversed(halves):
            h = h @ half.t()
            grads.append((h.t() @ h[:, : half.shape[1]]).float())
        return [h, *grads]

    for count, expected in ((5, [5, 5]), (70, [64, 6, 6, 64])):
        sizes = [(4 + i % 3 * 4, 4 + (i + 1) % 3 * 4) for i in range(count)]
        weights = [drawn(*size, dtype=torch.float32) / 4 for size in sizes]
        made = assert_same(step, [drawn(5, 4, dtype=torch.bfloat16), *weights], 1e-2)
        assert sorted(group_counts(made)) == sorted(expected)
        order = "".join("x" if isinstance(step, Launch) else "." for step in made._steps)
        assert (order[0], order[-1]) == ("x", "x")
        assert count > 64 or "x" not in order[1:-1], order


def test_what_would_take_more_memory_is_not_computed_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(small: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
        first = torch.tanh(small + small.unsqueeze(1)) @ x
        return [torch.tanh(other + other.unsqueeze(1)) @ first]

    inputs = [drawn(8), drawn(8) + 1, drawn(8, 8)]
    assert group_counts(assert_same(step, inputs, 1e-10)) == [1, 1]

    def halves(x: Tensor, y: Tensor) -> list[Tensor]:
        single = x.float()
        return [y.float() @ (single @ single)]

    inputs = [drawn(8, 8), drawn(8, 8) + 1]
    assert group_counts(assert_same(halves, inputs, 1e-5)) == [2]
    monkeypatch.setattr(launches, "LARGE", 100)
    assert group_counts(assert_same(halves, inputs, 1e-5)) == [1, 1], "large ones stay where they are"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_steps_keeps_what_they_need(seed: int) -> None:
    """Drawn programs of few kinds of steps, some of which write to what others have read."""
    random = Random(seed)
    choices = [(random.randrange(5), random.random(), random.random()) for _ in range(40)]

    def step(*inputs: Tensor) -> list[Tensor]:
        values = [x.clone() for x in inputs]
        for kind, a, b in choices:
            x, y = values[int(a * len(values))], values[int(b * len(values))]
            if kind == 0:
                values.append(torch.tanh(x))
            elif kind == 1:
                values.append((x * 0.5).to(torch.bfloat16).to(x.dtype))
            elif kind == 2:
                values.append(x - x.sum(0) / 8)
            elif kind == 3:
                values.append(x.flip(0))
            elif x.shape == y.shape and x is not y:
                x.add_(y)
        return values

    inputs = [drawn(4, 4), drawn(8, 8), drawn(6, 6)] if seed % 2 else [drawn(4), drawn(8), drawn(12)]
    assert_same(step, inputs, 2e-2)


def test_a_recurrence() -> None:
    def step(x: Tensor, w: Tensor, start: Tensor) -> list[Tensor]:
        w, h = w.detach().requires_grad_(), start
        outputs = []
        for t in range(3):
            h = torch.tanh(x[:, :, t] + torch.bmm(h, w.transpose(1, 2)))
            outputs.append(h)
        total = torch.stack(outputs, 1).transpose(1, 2)[:, :, -1].square().mean()
        return [total.detach(), *torch.autograd.grad(total, w)]

    assert_same(step, [drawn(3, 8, 3, 5), drawn(3, 5, 5), drawn(3, 8, 5)], 1e-10)


def test_writes_stay_in_their_order() -> None:
    """Reads before a write see what was there, reads after it what was written; the input itself is written to."""

    def step(x: Tensor, average: Tensor) -> list[Tensor]:
        before = average * 3
        average.lerp_(x.mean(0), 0.1)
        after = average * 3 + before
        grown = x * 2
        grown.add_(x)  # as autograd adds up gradients
        return [before, after, average, torch.tanh(grown)]

    x, average = drawn(4, 5), drawn(5)
    start = average.clone()
    made, expected = fused(step, [x, average])
    average.copy_(start)
    for given, wanted in zip(made([x, average]), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(average, expected[2])
    for given, wanted in zip(made([x, start.clone()]), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=0)


def test_batch_norm_writes_its_averages() -> None:
    def step(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        out = F.batch_norm(F.relu(x) * 2, mean, var, training=True)
        return [torch.tanh(out), mean, var]

    inputs = [drawn(8, 3), torch.zeros(3, device=DEVICE).double(), torch.ones(3, device=DEVICE).double()]
    made, expected = fused(step, inputs)
    for given, wanted in zip(made([inputs[0], inputs[1] * 0, inputs[2] * 0 + 1]), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)


def test_mixed_precision_rounds_where_the_operators_do() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Linear(16, 4)).to(DEVICE)
    step = training_step(net)

    def cast(*tensors: Tensor) -> Sequence[Tensor | None]:
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
            return step(*tensors)

    weights = [p.detach() for p in net.parameters()]
    inputs = [*weights, drawn(16, 8, dtype=torch.float32), torch.randint(0, 4, (16,), device=DEVICE)]
    made, expected = fused(cast, inputs)
    for given, wanted in zip(made(inputs), expected, strict=True):
        assert given is not None and wanted is not None
        assert (given - wanted).norm() <= 1e-2 * wanted.norm()


def test_a_view_that_is_read_after_its_tensor_was_written_to() -> None:
    def step(x: Tensor) -> list[Tensor]:
        half = x[:2]
        x.add_(1)
        return [half * 2]

    with pytest.raises(NotRecordable, match="no operator gave"):
        fused(step, [drawn(4, 3)])


def test_inputs_that_lie_otherwise() -> None:
    made, _ = fused(lambda x: [torch.tanh(x)], [drawn(4, 8)])
    with pytest.raises(NotRecordable, match="lies otherwise"):
        made([drawn(8, 4).t()])


def test_whole_numbers_are_compared_with_fractions() -> None:
    """Also in a batch that has other values than the one that was recorded."""

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(y >= 0.5).to(x.dtype) * x, torch.where(y < 2.5, x, 0.0), (y == 1).to(x.dtype) + x, (y & 2) * x]

    made, _ = fused(step, [drawn(2, 4), torch.tensor([[3, 3, 3, 3], [0, 0, 0, 0]], device=DEVICE)])
    inputs = [drawn(2, 4), torch.arange(8, device=DEVICE).view(2, 4) % 4]
    for given, wanted in zip(made(inputs), step(*inputs), strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=0)


def test_a_surrounding_autocast_changes_nothing() -> None:
    made, expected = fused(lambda x: [torch.relu(x @ x)], [drawn(4, 4, dtype=torch.float32)])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        (given,) = made([drawn(4, 4, dtype=torch.float32)])
    torch.testing.assert_close(given, expected[0])


def test_conjugates_are_not_recorded() -> None:
    with pytest.raises(NotRecordable, match="sign"):
        fused(lambda x: [(torch.complex(x, x).conj() * 2).real * x], [drawn(4, 4)])


def test_the_order_of_a_long_chain() -> None:
    """Levels: what waits for a reduction comes after it, though it is elementwise all the way."""

    def step(x: Tensor) -> list[Tensor]:
        values = [x]
        for _ in range(6):
            values.append(torch.tanh(values[-1]) - values[-1].sum(0) + values[0])
        return [a * b for a, b in pairwise(values)]

    assert_same(step, [drawn(5, 4)], 1e-9)
