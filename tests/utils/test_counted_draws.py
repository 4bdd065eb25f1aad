"""Counted draws intercept random operators alone, and draw what a mode that looks at every operator draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shoal.utils import gpu_randomness
from shoal.utils.gpu_randomness import RANDOM, CounterMode, uncounted
from shoal.utils.randomness import Draw, counter_draw

CPU = torch.device("cpu")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of rate 0 and 1": lambda x: (F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False)),
    "native dropout": lambda x: torch.native_dropout(x, 0.25, True),
    "native dropout in evaluation": lambda x: torch.native_dropout(x, 0.25, False),
    "feature dropout": lambda x: F.dropout2d(x.view(2, 3, 2, 4), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "rand": lambda x: (torch.rand(3, 2), torch.rand_like(x), torch.rand(3, dtype=torch.float64)),
    "randn": lambda x: (torch.randn(3, 2), torch.randn_like(x), x + torch.randn(8)),
    "randint": lambda x: (torch.randint(7, (9,)), torch.randint(3, 5, (9,)), torch.randint_like(x, 4)),
    "randperm": lambda x: torch.randperm(11),
    "uniform": lambda x: (x.clone().uniform_(), x.clone().uniform_(-1), x.clone().uniform_(2, 3)),
    "normal": lambda x: (x.clone().normal_(), x.clone().normal_(2.0), x.clone().normal_(0.0, 3.0)),
    "exponential": lambda x: (x.clone().exponential_(), x.clone().exponential_(2.0)),
    "bernoulli": lambda x: (x.clone().bernoulli_(), x.clone().bernoulli_(0.8)),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4),
    "none": lambda x: F.gelu(x @ x.T),
}


class EveryOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The slow way: looks at every operator, below autograd."""

    def __init__(self, mode: CounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = str(func) in RANDOM
        return self._mode.draw(func, args, kwargs or {}) if random else func(*args, **(kwargs or {}))


def results(mode: Any, call: Callable[[Tensor], Any], counter: CounterMode) -> list[Tensor]:
    """Values and gradients of two batches."""
    found: list[Tensor] = []
    with mode:
        for batch in (3, 4):
            counter.begin(batch)
            x = X.clone().requires_grad_()
            values = [v for v in torch.utils._pytree.tree_leaves((call(x), call(x))) if isinstance(v, Tensor)]
            total = sum((v.square().sum() for v in values if v.requires_grad), torch.zeros(()))
            if total.requires_grad:
                total.backward()
                found.append(x.grad)  # type: ignore[arg-type]
            found += values
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_draws_are_those_of_a_mode_that_looks_at_every_operator(name: str) -> None:
    before = torch.get_rng_state()
    fast, slow = CounterMode(5, CPU), CounterMode(5, CPU)
    drawn = results(fast, CALLS[name], fast)
    expected = results(EveryOperator(slow), CALLS[name], slow)
    assert len(drawn) == len(expected) > 0
    for a, b in zip(drawn, expected, strict=True):
        assert torch.equal(a, b)
    if name not in ("rand", "randn", "randint", "randperm"):  # those are made, and then drawn
        assert torch.equal(torch.get_rng_state(), before)


def drawn_in(batches: Iterable[int], call: Callable[[Tensor], Tensor], mode: CounterMode | None = None) -> list[Tensor]:
    """What a call draws in these batches; without a mode, each batch in its own, which draws nothing ahead."""
    drawn = []
    for batch in batches:
        with mode or CounterMode(5, CPU) as counter:
            counter.begin(batch)
            drawn.append(call(X))
    return drawn


@pytest.mark.parametrize("name", ["dropout", "native dropout", "feature dropout", "bernoulli", "attention"])
def test_masks_that_are_drawn_for_several_batches_at_once_are_those_of_each(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Batch after batch, again from an earlier one, and with gaps."""
    made: list[int] = []

    def noted(draw: Draw, seed: Tensor, *more: Any) -> Tensor:
        made.append(len(seed))
        return counter_draw(draw, seed, *more)

    monkeypatch.setattr(gpu_randomness, "counter_draw", noted)

    def call(x: Tensor) -> Tensor:
        out = CALLS[name](x)
        return torch.cat([value.flatten() for value in (out if isinstance(out, tuple) else (out,))])

    batches = [*range(3, 90), *range(40, 50), 7, 8, 100, 90, 91]
    expected, calls = drawn_in(batches, call), len(made)
    made.clear()
    drawn = drawn_in(batches, call, CounterMode(5, CPU))
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert len(made) < calls / 3 and max(made) == gpu_randomness.MOST_AHEAD


@pytest.mark.parametrize("training", [True, False])
def test_dropout_on_a_gpu_is_the_first_result_of_native_dropout(training: bool) -> None:
    def values(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mode, found = CounterMode(5, CPU), list[Tensor]()
        mode.native = True
        with mode:
            for batch in range(6):
                mode.begin(batch)
                x = X.clone().requires_grad_()
                y = call(call(x * 2))
                (gradient,) = torch.autograd.grad(y.square().sum(), x)
                found += [y.detach(), gradient, torch.rand(3)]
        return found

    ours = values(lambda x: F.dropout(x, 0.3, training))
    native = values(lambda x: torch.native_dropout(x, 0.3, training)[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, native, strict=True))
    assert (ours[0] == 0).any() == training


def test_what_a_tracer_sees_is_not_kept() -> None:
    """Its masks have no data."""
    mode = CounterMode(5, CPU)
    with mode:
        for batch in range(4):
            mode.begin(batch)
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert isinstance(mode.mask("dropout", torch.ones(3), (0.5,)), FakeTensor)
        assert not (mode._masks or mode._sites or mode._columns)


def test_only_small_masks_are_drawn_ahead_and_calls_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_randomness, "AHEAD_BYTES", 4 * X.nbytes)
    mode, rates = CounterMode(5, CPU), [0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.1]
    for batch, rate in enumerate(rates):
        rows = X[: 6 - batch // 3]
        for x in (rows, X.repeat(100, 1)):

            def call(_: Tensor, x: Tensor = x, rate: float = rate) -> Tensor:
                return F.dropout(x, rate)

            assert torch.equal(drawn_in([batch], call, mode)[0], drawn_in([batch], call)[0])
        assert sum(masks.bytes for masks in mode._masks.values()) <= 4 * X.nbytes


def test_rows_of_a_vmap_draw_by_the_counter() -> None:
    before, mode = torch.get_rng_state(), CounterMode(5, CPU)
    drawn = []
    with mode:
        for batch in (3, 3, 4):
            mode.begin(batch)
            drawn.append(torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(torch.ones(6, 8)))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_users_own_draws_as_without() -> None:
    def drawn() -> list[Tensor]:
        own = torch.Generator().manual_seed(3)
        return [torch.rand(4, generator=own), X.clone().normal_(generator=own), torch.randperm(5, generator=own)]

    expected = drawn()
    with CounterMode(5, CPU):
        assert all(torch.equal(a, b) for a, b in zip(drawn(), expected, strict=True))


def test_a_checkpointed_part_is_intercepted_in_the_backward_pass_too() -> None:
    calls: list[int] = []
    mode = CounterMode(1, CPU)
    original = mode.draw
    mode.draw = lambda *args: calls.append(1) or original(*args)  # type: ignore[method-assign, func-returns-value]
    x = X.clone().requires_grad_()
    with mode:
        mode.begin(0)
        checkpoint(lambda t: F.dropout(t, 0.5) * 2, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2


def test_after_it_torch_draws_as_before_and_other_operators_were_never_seen() -> None:
    torch.manual_seed(0)
    expected = F.dropout(X, 0.5)
    with CounterMode(1, CPU) as outer:
        outer.begin(0)
        first = F.dropout(X, 0.5)
        with CounterMode(2, CPU) as inner:
            inner.begin(0)
            assert not torch.equal(F.dropout(X, 0.5), first)
        outer.begin(0)
        assert torch.equal(F.dropout(X, 0.5), first)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(X, 0.5), expected)
    assert not any(isinstance(mode, TorchDispatchMode) for mode in _modes_inside())


def _modes_inside() -> list[Any]:
    with CounterMode(1, CPU):
        return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_a_recurrent_layer_that_draws_leaves_cudnn(
    monkeypatch: pytest.MonkeyPatch, make: type[nn.LSTM], rate: float
) -> None:
    torch.manual_seed(0)
    layer = make(8, 4, num_layers=2, dropout=rate)
    flags: list[bool] = []
    original = torch.backends.cudnn.flags

    def noted(enabled: bool = False, **more: Any) -> Any:
        flags.append(enabled)
        return original(enabled=enabled, **more)

    monkeypatch.setattr(torch.backends.cudnn, "flags", noted)
    expected = layer(X.view(3, 2, 8))[0] if not rate else None
    with CounterMode(1, CPU) as mode:
        mode.begin(0)
        first = layer(X.view(3, 2, 8))[0]
        mode.begin(0)
        assert torch.equal(layer(X.view(3, 2, 8))[0], first)
    assert flags == [torch.backends.cudnn.enabled and not rate] * 2
    assert expected is None or torch.equal(first, expected)


def test_a_batch_counts_wherever_its_first_draw_is() -> None:
    with CounterMode(1, CPU) as mode:
        drawn = []
        for batch in (3, 4, 3):
            mode.begin(batch)
            mode._site = 2  # something else has drawn before
            drawn.append(torch.rand(9))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_what_is_uncounted_draws_as_without_a_mode() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3), torch.randint(9, (3,)), torch.randn(2)
    torch.manual_seed(4)
    with CounterMode(5, CPU) as mode:
        mode.begin(0)
        with uncounted():
            drawn = torch.rand(3), torch.randint(9, (3,)), torch.randn(2)
        counted = torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    with CounterMode(5, CPU) as mode:
        mode.begin(0)
        assert torch.equal(counted, torch.rand(3))
