"""Bad input is found before the first step: one ValueError for the list, a line each, and nothing runs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

import shoal
from shoal.data.rows import Rows
from shoal.data.source import TensorSource
from shoal.engine.members.member import Member
from shoal.preparation import checks
from shoal.preparation.checks import prepare
from shoal.preparation.dry_run import dry_run_noting_rates, step_problems

X, Y = torch.randn(65, 4), torch.arange(65) % 3


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "data": (X, Y),
        "loss": F.cross_entropy,
        "name": "bad",
    }
    return shoal.Job(**(settings | {"hparams": {"lr": 0.1}, "epochs": 1, "batch_size": 16} | changes))


class Raises(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("missing part")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def with_packed_bits() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_buffer("packed", torch.zeros(4, dtype=torch.uint8).view(torch.int4))
    return model


def broken() -> nn.Module:
    raise RuntimeError("no network today")


class Vector:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


def backward_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "negative lr": ({"hparams": {"lr": -0.1}}, ["lr is -0.1", "hparams['lr']"]),
    "negative lr in a group": ({"params": lambda m: [{"params": m.parameters(), "lr": -1.0}]}, ["lr -1.0"]),
    "unknown hparam": ({"hparams": {"learning_rate": 0.1}}, ["learning_rate=0.1", "change hparams"]),
    "bad hparam": ({"hparams": {"betas": (2.0, 0.9)}}, ["betas=(2.0, 0.9)"]),
    "lengths": ({"data": (X, Y[:60])}, ["data has tensors of different length", "[65, 4], [60]"]),
    "val lengths": ({"val": (X, Y[:60])}, ["val has tensors of different length"]),
    "no rows": ({"data": (X[:0], Y[:0])}, ["data has no rows"]),
    "vector loss": ({"loss": functools.partial(F.cross_entropy, reduction="none")}, ["shape [16]", "take its mean"]),
    "vector loss object": ({"loss": Vector()}, ["shape [16]"]),
    "loss of a float": ({"loss": lambda o, t: 0.5}, ["gave a float"]),
    "detached loss": ({"loss": lambda o, t: F.cross_entropy(o, t).detach()}, ["depends on no trainable parameter"]),
    "vector step": ({"loss": None, "step": lambda m, b: m(b[0])}, ["step gave a tensor of shape [16, 3]"]),
    "backward in the step": (
        {"loss": None, "step": backward_step},
        ["step calls backward() on the loss that it returns; leave that out"],
    ),
    "bad logs": ({"loss": None, "step": lambda m, b: (m(b[0]).mean(), {"x": "y"})}, ["logs 'x' as a str"]),
    "list of a metric": (
        {"val": (X, Y), "metrics": {"m": lambda o, t: [1, 2]}},
        ["metric 'm' gave [1, 2]; it must be one number"],
    ),
    "array of a metric": (
        {"val": (X, Y), "metrics": {"m": lambda o, t: o.numpy()}},
        ["metric 'm' gave an array of shape [16, 3]; it must be one number"],
    ),
    "metric of nothing": ({"val": (X, Y), "metrics": {"m": lambda o, t: None}}, ["metric 'm' gave None"]),
    "forward raises": ({"model": lambda: Raises(4, 3)}, ["forward raised KeyError: 'missing part'"]),
    "wrong width": ({"model": lambda: nn.Linear(5, 3)}, ["forward raised RuntimeError", "batch of 16 rows"]),
    "doubles": (
        {"data": (X.double(), Y), "model": lambda: nn.Linear(4, 3).float()},
        ["forward raised RuntimeError", "data is float64 and the model float32", "x.to(torch.float32)"],
    ),
    "doubles in a dict": (
        {"data": {"input": X.double(), "y": Y}, "model": lambda: nn.Linear(4, 3).float()},
        ["data is float64 and the model float32"],
    ),
    "bytes": ({"data": (X.byte(), Y)}, ["data is uint8 and the model float32", "x.astype('float32')"]),
    "doubles to a convolution": (
        {"data": (X[:, None].double(), Y), "model": lambda: nn.Sequential(nn.Conv1d(1, 3, 4), nn.Flatten())},
        ["data is float64 and the model float32"],
    ),
    "text as lr": ({"hparams": {"lr": "0.1"}}, ["lr is '0.1'", "must be a number, not text"]),
    "float labels": ({"data": (X, Y.float())}, ["targets are float32", "y.long()"]),
    "int32 labels": ({"data": (X, Y.int())}, ["targets are int32", "y.long()"]),
    "tuple of outputs": (
        {"model": lambda: nn.LSTM(4, 3)},
        ["outputs tuple", "the model returns a tuple: pass a loss(outputs, targets) that takes a tensor of them"],
    ),
    "frame": ({"data": (pandas.DataFrame(X.numpy()), Y)}, ["data holds a DataFrame; pass what its to_numpy() gives"]),
    "frame alone": ({"data": pandas.DataFrame(X.numpy())}, ["data is a DataFrame; pass what its to_numpy() gives"]),
    "factory raises": ({"model": broken}, ["building the model raised RuntimeError: no network today"]),
    "dtype without operators": ({"model": with_packed_bits}, ["packed has dtype torch.int4", "use torch.uint8"]),
    "factory of no module": ({"model": lambda: 3}, ["model built a int"]),
    "labels": ({"data": (X, Y + 1)}, ["labels from 1 to 3", "3 classes", "labels 0 to 2"]),
    "late labels": ({"data": (X, torch.cat([Y[:-1], torch.tensor([7])]))}, ["labels from 0 to 7"]),
    "labels, module loss": ({"data": (X, Y - 1), "loss": nn.CrossEntropyLoss()}, ["labels from -1 to 1"]),
    "val labels": ({"val": (X, Y + 1)}, ["val has labels from 1 to 3"]),
    "batch norm, short batch": (
        {"model": with_batch_norm},
        ["1 row", "data has 65", "batch_size is 16", "drop_last=True"],
    ),
    "batch norm, batch of one": (
        {"model": with_batch_norm, "batch_size": 1},
        ["batch_size is 1", "one value per channel"],
    ),
    "drop_last drops all": ({"batch_size": 100, "drop_last": True}, ["leaves no batch", "use at most 65"]),
    "metrics without val": ({"metrics": {"m": F.mse_loss}}, ["metrics are set (m)"]),
    "val_every without val": ({"val_every": 2}, ["val_every is 2"]),
    "best without val": ({"keep": "best"}, ["keep is 'best'"]),
    "stop on nothing": (
        {"stop": shoal.EarlyStop("accuracy")},
        ["stop watches 'accuracy'", "use one of loss, or set val="],
    ),
    "schedule_every without schedule": ({"schedule_every": "epoch"}, ["schedule_every is 'epoch'"]),
    "bad schedule": ({"schedule": lambda t: "fast"}, ["schedule gave a str"]),
    "raising schedule": ({"schedule": lambda t: 1 / t}, ["schedule(0) raised ZeroDivisionError"]),
    "plateau by step": ({"schedule": lambda o: ReduceLROnPlateau(o)}, ["set schedule_every='epoch'"]),
    "collate for tensors": ({"collate": lambda items: items}, ["collate= would do nothing"]),
    "no pair": ({"data": X}, ["data is a Tensor", "(inputs, targets)"]),
    "iterable": ({"data": iter([1])}, ["map-style Dataset"]),
    "rows out of range": ({"data": shoal.Rows((X, Y), [0, 65])}, ["rows 0 to 65 of 65"]),
    "metric of no such call": ({"val": (X, Y), "metrics": {"m": lambda o: 1.0}}, ["metric 'm' raised TypeError"]),
    "metric of a vector": ({"val": (X, Y), "metrics": {"m": lambda o, t: o}}, ["metric 'm' gave a tensor"]),
    "no optimizer": ({"optimizer": dict}, ["building the optimizer"]),
    "lbfgs accumulates": ({"optimizer": torch.optim.LBFGS, "accumulate": 2}, ["LBFGS evaluates the loss itself"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_that_names_the_job_and_nothing_runs(case: str) -> None:
    changes, words = CASES[case]
    calls: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        return F.cross_entropy(outputs, targets)

    good = job(name="good", loss=loss, epochs=3)
    with pytest.raises(ValueError) as caught:
        shoal.train([good, job(**changes)], device="cpu")
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    assert text.startswith("job 'bad': ")
    for word in words:
        assert word in text
    assert len(calls) <= 2, "more than the dry step was run"


def test_mistakes_of_all_jobs_are_told_at_once() -> None:
    with pytest.raises(shoal.JobError) as caught:
        shoal.train([job(name="a", hparams={"lr": -1.0}), job(name="b"), job(name="c", data=(X, Y + 1))], device="cpu")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["job 'a'", "job 'c'"]


def test_a_mistake_of_many_jobs_is_written_once() -> None:
    jobs = [job(name=name, hparams={"lr": rate}) for name, rate in (("a", -1.0), ("b", -2.0), ("c", -1.0), ("d", -1.0))]
    with pytest.raises(shoal.JobError) as caught:
        shoal.train(jobs, device="cpu")
    first, second = str(caught.value).splitlines()
    assert first.startswith("job 'a': lr is -1.0;") and first.endswith("(and so for 2 more)")
    assert second.startswith("job 'b': lr is -2.0;") and second.endswith("hparams['lr']")
    assert [line.split(":")[0] for line in caught.value.lines] == ["job 'a'", "job 'b'", "job 'c'", "job 'd'"]


def test_the_list_itself() -> None:
    for jobs, words in (([], "empty"), (job(), "single Job"), ([3], "jobs[0] is a int"), (3, "jobs is a int")):
        with pytest.raises(ValueError) as caught:
            shoal.train(jobs, device="cpu")  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(ValueError, match=r"job 'bad': 2 jobs have this name \(at 0, 2\)"):
        shoal.train([job(), job(name="b"), job()], device="cpu")


def test_ignored_labels_and_soft_targets_are_fine() -> None:
    ignored = Y.clone()
    ignored[::5] = -100
    soft = F.one_hot(Y, 3).float()
    jobs = [job(name="a", data=(X, ignored)), job(name="b", data=(X, soft))]
    assert [r.status for r in shoal.train(jobs, device="cpu")] == ["done", "done"]
    assert shoal.train([job(data=(X, Y.where(Y > 0, 9)), loss=nn.CrossEntropyLoss(ignore_index=9))], device="cpu")


def test_a_step_may_take_gradients_of_another_loss_by_backward() -> None:
    def sharpness_aware(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        F.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        model.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss

    (result,) = shoal.train([job(loss=None, step=sharpness_aware)], device="cpu")
    assert result.status == "done", result.error


def test_batch_norm_over_images_may_see_one_row() -> None:
    images = torch.randn(5, 2, 4, 4)
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    assert shoal.train([job(model=model, data=(images, Y[:5]), batch_size=4)], device="cpu")[0].status == "done"


def test_nan_in_the_data_is_a_warning_for_each_data_set() -> None:
    x = X.clone()
    x[3, 1] = float("nan")
    step = lambda m, b: m(b[0].nan_to_num()).mean()  # noqa: E731
    with pytest.warns(shoal.ShoalWarning, match="job 'a': data has 1 NaN") as caught:
        shoal.train([job(name=name, data=(x, Y), loss=None, step=step) for name in "ab"], device="cpu")
    assert len(caught) == 1


def test_the_dry_step_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with warnings.catch_warnings(), pytest.raises(ValueError):
        shoal.train([job(model=model, data=(X[:64], Y[:64] + 1))], device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"threads": 0}, "threads is 0"),
        ({"compile": "yes"}, "compile is 'yes'"),
        ({"deterministic": "no"}, "deterministic is 'no'; use True or False"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"checkpoint_every": "soon"}, "checkpoint_every is 'soon'"),
        ({"memory": 0}, "memory is 0"),
        ({"checkpoint_every": "-5m"}, "checkpoint_every is '-5m'"),
        ({"policy": "mine"}, "policy is 'mine'"),
        ({"compile": True, "device": "cpu"}, "steps on a CPU are not compiled; use 'auto' or False"),
        ({"compile": 1}, "compile is 1"),
    ],
)
def test_settings_of_train(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shoal.train([job()], **settings)


def test_a_short_last_batch_that_is_never_reached_is_no_mistake() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    jobs = [job(model=network, batch_size=16, epochs=None, steps=2, name=name) for name in ("a", "b")]
    assert [result.status for result in shoal.train(jobs, device="cpu")] == ["done", "done"]


class Dropping(nn.Module):
    """Its rate is that of a layer of torch; with `limit`, its own code reads it too."""

    def __init__(self, rate: float, limit: float | None = None) -> None:
        super().__init__()
        self.layers, self.limit = nn.Sequential(nn.Linear(6, 4), nn.Dropout(rate), nn.Linear(4, 3)), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.limit is not None and self.layers[1].p > self.limit:  # type: ignore[operator]
            raise RuntimeError("drops too much")
        return self.layers(x)  # type: ignore[no-any-return]


def test_jobs_that_differ_in_rates_of_dropout_share_a_dry_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(
        checks,
        "dry_run_noting_rates",
        lambda member, *rows: tried.append(member.name) or dry_run_noting_rates(member, *rows),  # type: ignore[func-returns-value]
    )
    rates = (0.1, 0.2, 0.3, 0.2, 0.0, 1.0)
    data = torch.randn(12, 6), torch.randint(3, (12,))
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD,
        "hparams": {"lr": 0.1},
    }
    settings |= {"data": data, "batch_size": 4, "epochs": 1}

    def jobs(limit: float | None) -> list[shoal.Job]:
        return [shoal.Job(model=lambda r=r: Dropping(r, limit), name=f"{i}", **settings) for i, r in enumerate(rates)]

    checks.prepare(jobs(None), torch.device("cpu"))
    assert tried == ["0", "4", "5"]
    tried.clear()
    with pytest.raises(shoal.JobError) as caught:
        checks.prepare(jobs(0.25), torch.device("cpu"))
    assert tried == ["0", "1", "2", "4", "5"], "the rates matter to this code"
    assert [line.split(":")[0] for line in caught.value.lines] == ["job '2'", "job '5'"]


def test_a_compiled_network_is_tried_without_anything_that_its_compiler_would_see() -> None:
    compiled = torch.compile(Dropping(0.2), backend="eager", fullgraph=True)
    job = shoal.Job(
        model=lambda: compiled, data=(torch.randn(12, 6), torch.randint(3, (12,))), loss=F.cross_entropy,
        optimizer=torch.optim.SGD, hparams={"lr": 0.1}, batch_size=4, epochs=1,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.prepare([job], torch.device("cpu"))


@pytest.mark.parametrize("whole", [False, True])
def test_the_dry_step_may_use_a_few_rows_unless_the_step_needs_its_whole_batch(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x.view(16, 4) if whole else x), y)

    def noted(member: Member, size: int, *others: Any, **settings: Any) -> list[str]:
        sizes.append(size)
        return step_problems(member, size, *others, **settings)

    sizes: list[int] = []
    monkeypatch.setattr("shoal.preparation.dry_run.step_problems", noted)
    prepare([job(data=(X[:64], Y[:64]), loss=None, step=step)], torch.device("cpu"), dry_rows=4)
    assert sizes == ([6, 16] if whole else [6])  # the rows with the smallest and the largest label are among them
    with pytest.raises(shoal.JobError, match="missing part"):
        prepare([job(model=lambda: Raises(4, 3))], torch.device("cpu"), dry_rows=4)


@pytest.mark.parametrize("columns", [(), (3,)])
def test_a_dry_step_of_a_few_rows_has_those_with_the_smallest_and_the_largest_number(columns: tuple[int, ...]) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, kinds = batch
        return F.cross_entropy(model(x), y) + F.embedding(kinds, torch.ones(5, 1)).sum()

    kinds = torch.randint(5, (len(X), *columns))
    prepare([job(data=(X, Y, kinds), loss=None, step=step)], torch.device("cpu"), dry_rows=4)
    for wrong in (5, -1):
        mistaken = kinds.clone()
        mistaken.view(len(X), -1)[60, -1] = wrong  # far behind the first batch
        with pytest.raises(shoal.JobError, match="index out of range"):
            prepare([job(data=(X, Y, mistaken), loss=None, step=step)], torch.device("cpu"), dry_rows=4)
        elsewhere = Rows((X, Y, mistaken), torch.arange(60))
        prepare([job(data=elsewhere, loss=None, step=step)], torch.device("cpu"), dry_rows=4)


def test_values_that_are_not_numbers_are_counted_also_beside_infinities_and_in_narrow_types() -> None:
    inf, nan = float("inf"), float("nan")
    for values, count in (([1.0, -inf, inf], 0), ([1.0, nan, inf], 1), ([nan, nan, 0.0], 2), ([6e4, 6e4, 6e4], 0)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex32):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # complex numbers of half precision are experimental in torch
                leaves, spec = pytree.tree_flatten((torch.tensor(values).to(dtype),))
            assert TensorSource(leaves, spec, torch.device("cpu")).num_nan() == count


def test_a_dry_step_of_rows_in_their_order_has_no_others() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, time = batch
        if not bool((time.diff() == 1).all()):
            raise ValueError("not consecutive")
        return F.cross_entropy(model(x), y)

    series = job(data=(X, Y, torch.arange(len(X))), loss=None, step=step, shuffle=False)
    prepare([series], torch.device("cpu"), dry_rows=4)


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as a tokenizer gives them, as Python lists."""

    def __init__(self, *, vary: bool) -> None:
        self.vary = vary

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index % 7] * (5 + self.vary * (index % 3)), "labels": index % 3}


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.EmbeddingBag(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.layers(input_ids)
        return out


@pytest.mark.parametrize("own", [False, True])
def test_rows_of_lists_are_told_how_to_become_tensors(own: bool) -> None:
    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])

    how: dict[str, Any] = {"loss": None, "step": step} if own else {}
    with pytest.raises(shoal.JobError, match=r"pad them, or pass a collate= that does"):
        prepare([job(model=Embeds, data=Tokens(vary=True), **how)], torch.device("cpu"))
    with pytest.raises(shoal.JobError, match=r"make them tensors .*with_format\('torch'\).*, or pass collate="):
        prepare([job(model=Embeds, data=Tokens(vary=False), **how)], torch.device("cpu"))


def test_half_precision_weights_under_fp16_are_refused() -> None:
    with pytest.raises(shoal.JobError, match=r"weights are float16.* build the network in float32"):
        prepare([job(model=lambda: nn.Linear(4, 3).half(), precision="fp16")], torch.device("cpu"))
    prepare([job(precision="fp16")], torch.device("cpu"))
