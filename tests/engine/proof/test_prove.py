"""Proof before training: the user's own step and the stacked program, side by side."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.planning import memory
from shoal.engine.proof import prove
from shoal.engine.proof._observed import Observed, _difference
from shoal.engine.proof.group import Group, group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.rules import _product, _registry
from shoal.engine.rules.op_context import per_member
from shoal.engine.tracing import patches, trace
from shoal.preparation.checks import prepare

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(22, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 5), nn.Linear(5, 2), nn.Dropout(p)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


def plain(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def jobs(count: int = 2, **fields: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {"model": Net, "data": (X, Y), "step": plain, "batch_size": 8, "epochs": 2} | fields
    if settings["step"] is None:
        del settings["step"]
    rates = [{"lr": 0.01 * (i + 1)} for i in range(count)]
    return [shoal.Job(**settings, hparams=rates[i], seed=i, name=str(i)) for i in range(count)]


def grouped(pack: list[shoal.Job]) -> tuple[list[Group], TraceCache]:
    trace_cache = TraceCache()
    return group(prepare(pack, torch.device("cpu")), trace_cache), trace_cache


def reason(pack: list[shoal.Job]) -> str:
    """Why these jobs, all of one kind, are not stacked."""
    return grouped(pack)[0][0].reason


def apart(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in pairs)


def equal_to_solo(pack: list[shoal.Job]) -> set[str]:
    """Train them, see that each equals its solo run, and give their tiers."""
    results = shoal.train(pack, device="cpu", threads=1)
    for result, job in zip(results, pack, strict=True):
        alone = shoal.solo(job)
        assert result.status == alone.status
        assert apart(result.model, alone.model) <= 1e-9
    return {result.tier for result in results}


# --- the proof on its own, without what notices these things earlier --------------------------------------------------


def toggles(model: Any, batch: Any) -> Tensor:
    model.b.requires_grad_(False)
    first = model(batch[0]).pow(2).mean()
    model.b.requires_grad_(True)
    return first + 0.1 * plain(model, batch)


def leaves_frozen(model: Any, batch: Any) -> Tensor:
    loss = plain(model, batch)
    model.a.bias.requires_grad = False
    return loss


def inference(model: Any, batch: Any) -> Tensor:
    with torch.inference_mode():
        hidden = torch.tanh(model.a(batch[0]))
    return F.mse_loss(model.b(hidden.clone()), batch[1])


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


with warnings.catch_warnings():  # deprecated, and in many a repository
    warnings.simplefilter("ignore")
    swish = torch.jit.script(swish)


def scripted(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model.b(swish(model.a(batch[0]))), batch[1])


@pytest.fixture
def no_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing as it was before it knew of these cases."""
    monkeypatch.setattr(patches, "_Switches", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(patches, "_NoGrad", torch._C._InferenceMode)
    monkeypatch.setattr(patches, "_in_python", torch.jit.ScriptFunction.__call__)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (toggles, "gradient of b.weight"),
        (leaves_frozen, "requires_grad of a.bias"),
        (inference, "no gradient of a.weight"),
        (scripted, "gradient of a.weight"),
    ],
)
@pytest.mark.usefixtures("no_fixes")
def test_what_a_graph_loses_is_found(step: Callable[..., Tensor], said: str) -> None:
    if step is scripted:
        for _ in range(3):  # until TorchScript has profiled it
            scripted(Net(), (X, Y)).backward()
    assert said in reason(jobs(step=step))
    assert equal_to_solo(jobs(step=step)) == {"serial"}


@pytest.mark.parametrize("step", [inference, scripted])
def test_what_has_an_equivalent_is_stacked(step: Callable[..., Tensor]) -> None:
    assert equal_to_solo(jobs(3, step=step)) == {"stacked"}


@pytest.mark.parametrize("step", [toggles, leaves_frozen])
def test_switches_are_told_by_name(step: Callable[..., Tensor]) -> None:
    assert reason(jobs(step=step)) == "it switches requires_grad inside the step"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3, dtype=torch.complex128), nn.Linear(3, 2, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.to(torch.complex128)))
        return out


def modulus(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1][:, :1]).abs().pow(2).mean()


def test_a_wrong_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(jobs(model=Complex, step=modulus)) == ""

    def unconjugated(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return _product.product(grad, weight), _product.product(grad.mT, x), grad.sum(1)

    monkeypatch.setattr(_product.Linear, "backward", staticmethod(unconjugated))
    assert "gradient of" in reason(jobs(model=Complex, step=modulus))


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 2)
        for name, value in (("on", torch.ones(1)), ("scale", torch.ones(1))):
            self.register_buffer(name, value.long() if name == "on" else value)
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fused_moving_avg_obs_fake_quant(
            self.a.weight, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.1, 0, 255, 0
        )
        return F.linear(x, weight, self.a.bias)


def _on_copies(op: Any) -> Any:
    """The operator on copies of its arguments: what it writes into them is lost."""
    return lambda *args: op(*pytree.tree_map_only(Tensor, Tensor.clone, args))


def test_lost_writes_are_found_in_the_models_own_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake quantisation has no float64, so that it is proven in float32."""
    pack = jobs(model=Quantised, data=(X.float(), Y.float()), optimizer=torch.optim.SGD)
    assert reason(pack)
    written = [name for name in dir(_registry) if "write" in name]
    assert written, "what refuses operators that write aside has another name now"
    for name in written:
        if callable(getattr(_registry, name)):
            monkeypatch.setattr(_registry, name, lambda *_: [])
    monkeypatch.setattr(_registry, "per_member", lambda op, site: per_member(_on_copies(op), site))
    said = reason(pack)
    assert "differs" in said, said
    assert equal_to_solo(pack) == {"serial"}


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(-1).expand(-1, -1, 8)
        mask = torch.arange(6) >= 4
        out: Tensor = self.out(self.encoder(tokens, src_key_padding_mask=mask.expand(len(x), 6)).mean(1))
        return out


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_is_that_of_the_model_in_eval_mode(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fixed:  # evaluation recorded with gradients on takes another way through the encoder
        record = trace._record
        monkeypatch.setattr(trace, "_record", lambda *args: record(*args[:-1], True))
    pack = jobs(model=Padded, val=(X[:9], Y[:9]))
    results = shoal.train(pack, device="cpu", threads=1)
    for place, (result, job) in enumerate(zip(results, pack, strict=True)):
        assert result.tier == "stacked"
        assert result.last("val_loss") == pytest.approx(shoal.solo(job).last("val_loss"), rel=1e-9)
        with torch.no_grad():
            own = result.model.eval()(X)
        torch.testing.assert_close(results.predict(X)[place], own, rtol=1e-9, atol=1e-12)


# --- what is proven once, and with whom -------------------------------------------------------------------------------


def test_one_proof_for_a_kind() -> None:
    pack = [job for p in (0.0, 0.1, 0.2, 0.4) for job in jobs(3, model=lambda p=p: Net(p))]
    for place, job in enumerate(pack):
        object.__setattr__(job, "name", str(place))
    (found,), trace_cache = grouped(pack)
    assert found.stackable and len(found.members) == 12
    assert trace_cache.proofs.steps <= 6


def test_the_most_distant_members_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    compare = prove._compare_steps

    def spy(rows: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append([case.subject.member.model.drop.p for case in rows])
        return compare(rows, *args, **kwargs)

    monkeypatch.setattr(prove, "_compare_steps", spy)
    rates = (0.3, 0.25, 0.01, 0.6, 0.4)
    pack = [shoal.Job(model=lambda p=p: Net(p), data=(X, Y), step=plain, epochs=1, name=str(p)) for p in rates]
    assert reason(pack) == ""
    assert sorted(seen[0]) == [0.01, 0.6]


def test_the_same_graph_from_other_code_is_proven_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching requires_grad leaves nothing in a graph: both steps have the same one."""
    monkeypatch.setattr(patches, "_Switches", lambda _: contextlib.nullcontext())

    def both(model: Any, batch: Any) -> Tensor:
        return model(batch[0]).pow(2).mean() + 0.1 * plain(model, batch)

    (one,), (other,) = jobs(1, step=both), jobs(1, step=toggles)
    pack = [one, shoal.Job(**{**_fields(other), "name": "toggles"})]
    groups, _ = grouped(pack)
    assert [found.stackable for found in groups] == [True, False]
    assert equal_to_solo(pack) == {"stacked", "serial"}


def _fields(job: shoal.Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in ("model", "data", "step", "batch_size", "epochs", "hparams", "seed")}


def test_a_rule_that_mixes_members_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    product = _product.product
    monkeypatch.setattr(_product, "product", lambda a, b, bias=None: product(a.flip(0), b, bias))
    assert "loss" in reason(jobs())


def test_a_gradient_of_zero_is_not_none() -> None:
    def observed(grad: Tensor | None) -> Observed:
        return Observed({"gradient of": {"w": grad}})

    zero = torch.zeros(3)
    assert _difference(observed(zero), observed(zero)) == ""
    assert _difference(observed(None), observed(None)) == ""
    assert _difference(observed(zero), observed(None)) == "there is a gradient of w, and its graph has none"
    assert _difference(observed(None), observed(zero)) == "there is no gradient of w, and its graph has one"


def test_a_gradient_that_is_rounding_is_measured_by_the_others() -> None:
    real = Observed({"gradient of": {"w": torch.ones(2).double(), "bias": torch.full((2,), 1e-17).double()}})
    seen = Observed({"gradient of": {"w": torch.ones(2).double(), "bias": torch.full((2,), -3e-17).double()}})
    wrong = Observed({"gradient of": {"w": torch.ones(2).double(), "bias": torch.full((2,), 1e-9).double()}})
    assert _difference(real, seen) == ""
    assert "gradient of bias differs" in _difference(real, wrong)


# --- dtypes, memory, and what the proof leaves behind -----------------------------------------------------------------


class NamesFloat32(nn.Module):
    """Runs in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.linear(x.float(), self.a.weight.float(), self.a.bias.float())
        return out


class Constant(nn.Module):
    """Holds a float32 tensor that is no buffer, and so cannot become float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix = nn.Linear(6, 4), torch.randn(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.mix


@pytest.mark.parametrize("model", [NamesFloat32, Constant])
def test_models_of_float32_alone_are_proven_in_it(model: type[nn.Module]) -> None:
    assert reason(jobs(model=model, data=(X.float(), Y.float()))) == ""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_proven_within_its_rounding(precision: str) -> None:
    pack = jobs(model=lambda: Net(0.1).float(), data=(X.float(), Y.float()), precision=precision)
    assert reason(pack) == ""


def test_a_proof_without_room_is_a_lower_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    assert "checking it would take" in reason(jobs())


@pytest.fixture
def counter() -> Iterator[list[int]]:
    yield [0]


def test_a_step_that_raises_here_is_trained_as_it_is(counter: list[int]) -> None:
    """The first rows are fine, later ones are not: the member's own training says so."""

    def step(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) < 8:
            raise RuntimeError("short batches are not welcome")
        return plain(model, batch)

    results = shoal.train(jobs(step=step), device="cpu", threads=1)
    assert [result.status for result in results] == ["failed", "failed"]
    assert "short batches are not welcome" in (results[0].error or "")


@pytest.mark.parametrize("on_full_batches", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_weights_that_only_some_batches_train(optimizer: Any, on_full_batches: bool) -> None:
    def step(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.mse_loss(out if (len(out) == 8) == on_full_batches else out.detach() + model.b.bias, batch[1])

    pack = jobs(step=step, optimizer=optimizer)
    assert equal_to_solo(pack) == {"serial"}
    assert reason(pack) == prove.OTHER_WEIGHTS


def test_training_finds_what_it_would_find_alone() -> None:
    """A proof draws random numbers and moves statistics, of copies."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(0.3)
            self.norm = nn.BatchNorm1d(6).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    state = torch.get_rng_state()
    assert equal_to_solo(jobs(3, model=Normed)) == {"stacked"}
    torch.set_rng_state(state)
    shoal.train(jobs(2, model=Normed), device="cpu", threads=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_float32_loss_that_rounded_inputs_leave_as_it_is_may_differ_by_its_last_digit() -> None:
    def observed(loss: float) -> Observed:
        return Observed({"loss": {"": torch.tensor(loss, dtype=torch.float32)}})

    eps = torch.finfo(torch.float32).eps
    expected, seen = observed(3.9), observed(3.9 + 2.4e-7)
    assert _difference(expected, seen, expected) and not _difference(expected, seen, expected, eps)
    assert _difference(expected, observed(3.9001), expected, eps)
