"""`shoal.Pack` against plain PyTorch loops, a model at a time: losses, weights, buffers and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shoal
from shoal.engine.recipes.program import Program
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack

D, C, TOLERANCE = 5, 3, 1e-9


def net(seed: int, p: float = 0.3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(D, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, C)
    ).double()


def batch(seed: int, rows: int = 12, *lead: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (*lead, rows)
    return torch.randn(*shape, D, dtype=torch.float64, generator=g), torch.randint(0, C, shape, generator=g)


class Plain:
    """One model in a loop as anyone would write it, with a random stream of its own."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        hparams: dict[str, Any],
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        clip_norm: float | None = None,
        schedule: Callable[[Any], Any] | None = None,
        params: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(params(self.model) if params else self.model.parameters(), **hparams)
        self.schedule = schedule(self.optimizer) if schedule else None
        self.clip_norm = clip_norm
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.rng = torch.get_rng_state()

    def step(self, x: Tensor, y: Tensor) -> float:
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            self.rng = torch.get_rng_state()
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.item()


def stepped(plain: dict[int, Plain], x: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([one.step(x, y) for one in plain.values()], dtype=torch.float64)


def assert_same(pack: shoal.Pack, plain: dict[int, Plain]) -> None:
    for id, one in plain.items():
        got, wanted = pack.member(id).state_dict(), one.model.state_dict()
        assert list(got) == list(wanted)
        for name in wanted:
            assert distance(got[name], wanted[name]) <= TOLERANCE, (id, name)
        state, theirs = pack.optimizer_state(id), one.optimizer.state_dict()
        assert state["param_groups"] == theirs["param_groups"]
        for i, entry in theirs["state"].items():
            for key, value in entry.items():
                assert distance(state["state"][i][key], value) <= TOLERANCE, (id, i, key)


def test_a_step_is_each_members_own_step() -> None:
    rates = [1e-3, 3e-3, 1e-2]
    models = [net(seed, p) for seed, p in zip(range(3), (0.1, 0.3, 0.5), strict=True)]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    hparams = [{"lr": lr, "weight_decay": lr} for lr in rates]
    plain = {i: Plain(models[i], seed=i, hparams=hparams[i]) for i in range(3)}
    state = torch.get_rng_state()
    pack = shoal.Pack(models, hparams=hparams, loss=F.cross_entropy)
    for t in range(50):
        x, y = batch(t)
        losses = pack.step(x, y)
        assert losses.shape == (3,) and not losses.requires_grad
        assert distance(losses, stepped(plain, x, y)) <= TOLERANCE
    assert torch.equal(torch.get_rng_state(), state), "the default generator was disturbed"
    assert pack.tiers == dict.fromkeys(range(3), ("stacked", "one computation"))
    assert_same(pack, plain)
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), old.values(), strict=True))


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "clip": [{"clip_norm": 0.1}, {"clip_norm": None}, {"clip_norm": 0.01}],
    "schedules": [
        {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 10)},
        {"schedule": None},
        {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)},
    ],
    "momentum": [{"hparams": {"lr": 0.1, "momentum": m}, "optimizer": torch.optim.SGD} for m in (0.0, 0.5, 0.9)],
    "optimizers": [
        {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1}},
        {"optimizer": torch.optim.RMSprop, "hparams": {"lr": 0.01}},
        {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}},
    ],
    "groups": [{"params": lambda m: [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[4].parameters()}]}] * 3,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_each_member(name: str) -> None:
    each = [{"hparams": {"lr": 0.01}, **settings} for settings in SETTINGS[name]]
    models = [net(seed) for seed in range(3)]
    plain = {i: Plain(models[i], seed=10 + i, **each[i]) for i in range(3)}
    lists: dict[str, Any] = {key: [settings[key] for settings in each] for key in each[0]}
    pack = shoal.Pack(models, loss=F.cross_entropy, seeds=[10, 11, 12], **lists)
    for t in range(40):
        x, y = batch(t)
        losses = pack.step(x, y)
        assert distance(losses, stepped(plain, x, y)) <= TOLERANCE
    assert {tier for tier, _ in pack.tiers.values()} == {"stacked"}
    assert_same(pack, plain)


def test_a_batch_each_and_batches_of_other_sizes() -> None:
    models = [net(seed) for seed in range(3)]
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.01}) for i in range(3)}
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy)
    for t, rows in enumerate((12, 12, 7, 12, 3, 7)):
        x, y = batch(t, rows, 3)
        losses = pack.step(x, y, per_member=True)
        wanted = [plain[i].step(x[i], y[i]) for i in range(3)]
        assert distance(losses, torch.tensor(wanted, dtype=torch.float64)) <= TOLERANCE
        shared = batch(100 + t, rows)
        losses = pack.step(*shared)
        assert distance(losses, stepped(plain, *shared)) <= TOLERANCE
    assert_same(pack, plain)
    with pytest.raises(ValueError, match=r"wants the member axis first: 3 of them"):
        pack.step(*batch(0), per_member=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, "own"])
def test_joining_and_leaving(optimizer: Any) -> None:
    class Own(torch.optim.SGD):
        pass

    optimizer = Own if optimizer == "own" else optimizer
    rates = [{"lr": 0.01}, {"lr": 0.02}, {"lr": 0.03}]
    late = {"lr": 0.04} | ({} if optimizer is torch.optim.AdamW else {"momentum": 0.9})
    models = [net(seed) for seed in range(4)]
    scheduled = {"schedule": lambda o: lr_scheduler.StepLR(o, 3, 0.9), "optimizer": optimizer}
    plain = {i: Plain(models[i], seed=i, hparams=rates[i], **scheduled) for i in range(3)}
    pack = shoal.Pack(models[:3], hparams=rates, loss=F.cross_entropy, **scheduled)
    left: dict[int, tuple[nn.Module, Plain]] = {}

    def go(steps: int, first: int) -> None:
        for t in range(first, first + steps):
            x, y = batch(t)
            losses = pack.step(x, y)
            assert distance(losses, stepped(plain, x, y)) <= TOLERANCE

    def leave(id: int) -> None:
        left[id] = (pack.remove(id), plain.pop(id))

    go(5, 0)
    assert pack.add(models[3], hparams=late) == 3 and pack.ids == [0, 1, 2, 3] and len(pack) == 4
    plain[3] = Plain(models[3], seed=3, hparams=late, **scheduled)
    assert pack.tiers[3][0] == ""
    go(5, 5)
    assert pack.tiers[3] == ("stacked", "one computation") and len(pack._units) == 1
    leave(1)
    assert pack.ids == [0, 2, 3]
    go(5, 10)
    leave(0)
    leave(3)
    go(5, 15)
    assert_same(pack, plain)
    for model, one in left.values():
        for name, value in one.model.state_dict().items():
            assert distance(model.state_dict()[name], value) <= TOLERANCE
    with pytest.raises(KeyError, match="no member 1"):
        pack.member(1)
    assert pack.add(net(9), hparams={"lr": 0.1}) == 4, "an id is used once"


def test_bits_do_not_depend_on_which_members_join_and_leave() -> None:
    torch.set_num_threads(1)

    def train(companions: bool) -> dict[str, Tensor]:
        pack = shoal.Pack([net(0).float()], hparams=[{"lr": 0.01}], loss=F.cross_entropy)
        ids = []
        for t in range(20):
            if companions and t in (3, 4, 9):
                ids.append(pack.add(net(t).float(), hparams={"lr": 0.1, "weight_decay": 0.5}))
            if companions and t in (7, 12):
                pack.remove(ids.pop(0))
            x, y = batch(t)
            pack.step(x.float(), y)
        return pack.member(0).state_dict()

    alone, together = train(False), train(True)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


class Odd(nn.Module):
    """Its path depends on the data, so it cannot be stacked."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(D, C).double(), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out * self.scale if float(out.detach().sum()) > 0 else out


def test_mixed_models() -> None:
    torch.manual_seed(5)
    models = [net(0), nn.Linear(D, C).double(), net(1), Odd(), nn.Linear(D, C).double()]
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.01}) for i in range(5)}
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy)
    for t in range(10):
        x, y = batch(t)
        losses = pack.step(x, y)
        assert distance(losses, stepped(plain, x, y)) <= TOLERANCE
    assert [tier for tier, _ in pack.tiers.values()] == ["stacked", "stacked", "stacked", "serial", "stacked"]
    assert "depends on the data" in pack.tiers[3][1] and "apart from others" in pack.tiers[0][1]
    assert repr(pack) == "Pack(5: 4 stacked, 1 serial)"
    assert_same(pack, plain)
    x, _ = batch(50)
    outputs = pack.eval(x)
    for i, one in enumerate(plain.values()):
        assert distance(outputs[i], one.model.eval()(x)) <= TOLERANCE
    assert isinstance(pack.remove(3), Odd)
    assert pack.step(*batch(51)).shape == (4,)


def test_eval_is_one_program_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [net(seed) for seed in range(4)]
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy)
    x, y = batch(0)
    calls: list[Program] = []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *a: (calls.append(self), run(self, *a))[1])
    for _ in range(2):  # before the first step, and after it
        calls.clear()
        outputs = pack.eval(x)
        assert outputs.shape == (4, 12, C)
        assert [program.members for program in calls] == [2, 4], "proven on two of them, then one program for all"
        for id in pack.ids:
            assert distance(outputs[id], pack.member(id).eval()(x)) <= TOLERANCE
        assert torch.equal(outputs, pack.eval(x))
        assert pack.member(0).training
        pack.step(x, y)
    unlike = shoal.Pack([nn.Linear(D, 2), nn.Linear(D, 3)], loss=F.cross_entropy)
    with pytest.raises(ValueError, match="outputs differ"):
        unlike.eval(x.float())


def test_nan_stops_its_own_member(recwarn: pytest.WarningsRecorder) -> None:
    models: list[nn.Module] = [net(0), net(1), Odd(), Odd()]
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.01}) for i in (0, 2)}
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy)
    for t in range(8):
        x, y = batch(t, 12, 4)
        if t == 4:
            before = {i: (pack.member(i).state_dict(), pack.optimizer_state(i)) for i in (1, 3)}
            x[1, 0, 0] = x[3, 0, 0] = float("nan")
        losses = pack.step(x, y, per_member=True)
        assert losses.isnan().tolist() == [False, t >= 4, False, t >= 4]
        for i, one in plain.items():
            assert losses[i].item() == pytest.approx(one.step(x[i], y[i]), rel=TOLERANCE)
    assert_same(pack, plain)
    assert pack.status == {0: "running", 1: "diverged", 2: "running", 3: "diverged"}
    assert pack.errors[1] == "the loss became nan after step 4"
    for i, (weights, state) in before.items():
        assert all(
            torch.equal(a, b) for a, b in zip(weights.values(), pack.member(i).state_dict().values(), strict=True)
        )
        assert str(state) == str(pack.optimizer_state(i))
    assert pack.eval(batch(9)[0]).shape == (4, 12, C), "stopped members still answer"
    assert not recwarn.list


class Bounded(nn.Module):
    """Refuses what its embedding does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(6, 4).double(), nn.Linear(4, C).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(x))
        return out


def test_an_error_stops_its_own_member_and_one_for_all_is_raised() -> None:
    torch.manual_seed(0)
    models = [Bounded() for _ in range(3)]
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy)
    twin = shoal.Pack([models[0], models[2]], hparams={"lr": 0.01}, loss=F.cross_entropy)
    x, y = torch.randint(0, 6, (3, 8)), torch.randint(0, C, (3, 8))
    pack.step(x, y, per_member=True)
    before = pack.member(1).state_dict()
    with pytest.raises(IndexError):
        pack.step(x[0] + 6, y[0])
    assert set(pack.status.values()) == {"running"}
    wrong = x.clone()
    wrong[1] += 6
    with pytest.warns(shoal.ShoalWarning, match="member 1 has stopped: its step raised IndexError"):
        losses = pack.step(wrong, y, per_member=True)
    assert losses.isnan().tolist() == [False, True, False]
    assert pack.status[1] == "failed" and "IndexError" in pack.errors[1]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), pack.member(1).state_dict().values(), strict=True))
    for _ in range(2):
        twin.step(x[[0, 2]], y[[0, 2]], per_member=True)
    for mine, theirs in ((0, 0), (2, 1)):
        for a, b in zip(pack.member(mine).parameters(), twin.member(theirs).parameters(), strict=True):
            assert torch.equal(a, b)


def test_an_update_that_raises_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = shoal.Pack([net(0), net(1)], hparams={"lr": 0.01}, loss=F.cross_entropy)
    pack.step(*batch(0))

    def raises(*_: Any) -> None:
        raise RuntimeError("the update cannot continue")

    monkeypatch.setattr(Stack, "apply", raises)
    with pytest.raises(RuntimeError, match="the update cannot continue"):
        pack.step(*batch(1))


class Shaped(nn.Module):
    """Two of these are one computation on long batches alone."""

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.fc, self.flag = nn.Linear(D, C).double(), flag

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out.tanh() if len(x) < 5 and self.flag else out


def test_members_that_part_on_another_shape() -> None:
    torch.manual_seed(0)
    models = [Shaped(False), Shaped(True)]
    scheduled = {"schedule": lambda o: lr_scheduler.ExponentialLR(o, 0.9)}
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.01}, **scheduled) for i in range(2)}
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=F.cross_entropy, **scheduled)
    for t, rows in enumerate((8, 8, 4, 8, 4)):
        x, y = batch(t, rows)
        losses = pack.step(x, y)
        assert distance(losses, stepped(plain, x, y)) <= TOLERANCE
        assert isinstance(pack._units[0], GivenBatchesStack) == (t < 2)
    assert "members do different things here" in pack.tiers[0][1]
    assert_same(pack, plain)


class TwoHeads(nn.Module):
    """Uses its second head on large batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, C).double(), nn.Linear(D, C).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if len(x) > 5 else out


@pytest.mark.parametrize("sizes", [(8, 8, 4, 8, 4), (4, 8, 4, 8, 8)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_batches_that_train_other_weights(optimizer: Any, sizes: tuple[int, ...]) -> None:
    models = [TwoHeads() for _ in range(3)]
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.05}, optimizer=optimizer) for i in range(3)}
    pack = shoal.Pack(models, optimizer=optimizer, hparams={"lr": 0.05}, loss=F.cross_entropy)
    for t, rows in enumerate(sizes):
        x, y = batch(t, rows)
        assert distance(pack.step(x, y), stepped(plain, x, y)) <= TOLERANCE
    assert_same(pack, plain)
    assert "give gradients to different weights" in pack.tiers[0][1]


class RemembersRows(nn.Module):
    """Keeps the number of rows of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(D, C).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = self.rows or len(x)
        out: Tensor = self.layer(x) * self.rows
        return out


@pytest.mark.parametrize("sizes", [(8, 4, 8, 6, 4), (4, 8, 4, 8, 6)])
def test_what_a_first_batch_leaves_is_read_on_batches_of_other_shapes(sizes: tuple[int, ...]) -> None:
    models = [RemembersRows() for _ in range(3)]
    plain = {i: Plain(models[i], seed=i, hparams={"lr": 0.05}) for i in range(3)}
    pack = shoal.Pack(models, hparams={"lr": 0.05}, loss=F.cross_entropy)
    for t, rows in enumerate(sizes):
        x, y = batch(t, rows)
        assert distance(pack.step(x, y), stepped(plain, x, y)) <= TOLERANCE
    assert_same(pack, plain)


def test_an_own_step_on_one_dict() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        return F.mse_loss(model(batch["x"]), batch["y"]), {"note": 1.0}

    torch.manual_seed(0)
    models = [nn.Linear(D, 1).double() for _ in range(2)]
    pack = shoal.Pack(models, optimizer=torch.optim.SGD, hparams={"lr": 0.1}, step=step)
    data = {"x": batch(0)[0], "y": batch(1)[0][:, :1]}
    wanted = [F.mse_loss(m(data["x"]), data["y"]).item() for m in models]
    assert pack.step(data).tolist() == pytest.approx(wanted)
    assert pack.tiers[0][0] == "stacked"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision: Any) -> None:
    pack = shoal.Pack(
        [net(s).float() for s in range(2)], hparams={"lr": 0.01}, loss=F.cross_entropy, precision=precision
    )
    x, y = batch(0, 32)
    losses = [pack.step(x.float(), y) for _ in range(30)]
    assert (losses[-1] < losses[0]).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"models": []}, "models is empty"),
        ({"models": nn.Linear(D, C)}, "models is a single network"),
        ({"models": net}, "models is net; pass a list of networks, such as [make_net() for"),
        ({"models": [net, nn.Linear(D, C)]}, "member 0: the model is the function net; call it: net()"),
        ({"models": [nn.Linear(D, C), net]}, "member 1: the model is the function net; call it: net()"),
        ({"models": [nn.Linear(D, C), 3]}, "member 1: the model is a int"),
        ({"hparams": [{"lr": 0.1}]}, "hparams has 1 entries for 2 models"),
        ({"hparams": [{"lr": 0.1}, {"lr": -1}]}, "member 1: lr is -1"),
        ({"loss": None}, "member 0: it has neither loss nor step"),
        ({"clip_norm": 0}, "member 0: clip_norm is 0"),
        ({"seeds": 3}, "seeds is 3"),
        ({"schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o)}, "member 0: its schedule watches a value"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"models": [nn.Linear(D, C), nn.Linear(D, C)], "loss": F.cross_entropy} | changes
    with pytest.raises(shoal.JobError) as caught:
        shoal.Pack(given.pop("models"), **given)
    assert says in str(caught.value)


def test_a_new_member_needs_the_settings_that_each_member_was_given() -> None:
    pack = shoal.Pack([net(0), net(1)], hparams=[{"lr": 0.1}, {"lr": 0.2}], loss=F.cross_entropy)
    with pytest.raises(shoal.JobError, match="give the new member's too: hparams"):
        pack.add(net(2))
    with pytest.raises(TypeError, match="add\\(\\) takes no 'lr'"):
        pack.add(net(2), lr=0.1)
    with pytest.raises(ValueError, match="holds a str"):
        pack.step("x", "y")
    with pytest.raises(ValueError, match="1 tensors; pass inputs and targets"):
        pack.step(batch(0)[0])
    assert pack.optimizer_state(0)["param_groups"][0]["lr"] == 0.1, "before its first step too"
    pack.remove(0), pack.remove(1)
    with pytest.raises(ValueError, match="no members"):
        pack.step(*batch(0))


class DrawingSGD(torch.optim.SGD):
    """Scales the learning rate by a number that its constructor draws."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr * (1 + torch.rand(()).item()))


def test_reading_the_optimizer_state_leaves_the_random_streams_alone() -> None:
    """An optimizer whose constructor draws is built once for the state and once to train."""
    x, y = batch(1)
    packs = [
        shoal.Pack([net(0), net(1)], optimizer=DrawingSGD, hparams={"lr": 0.1}, loss=F.cross_entropy, seeds=[3, 4])
        for _ in range(2)
    ]
    state = packs[0].optimizer_state(0)
    for _ in range(3):
        assert torch.equal(*(pack.step(x, y) for pack in packs))
    assert packs[0].optimizer_state(0)["param_groups"][0]["lr"] == state["param_groups"][0]["lr"]
    for i in range(2):
        weights, others = (pack.member(i).state_dict() for pack in packs)
        assert all(torch.equal(weights[name], others[name]) for name in others)
