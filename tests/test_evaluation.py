"""Test sets and ensembles: all networks in one program, compared with each network by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.recipes.program import Program
from shoal.engine.tiers.stacked import forward

torch.manual_seed(0)
X, Y = torch.randn(60, 4).double(), torch.arange(60) % 3
TEST = (torch.randn(37, 4).double(), torch.randint(3, (37,)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1], label_smoothing=0.1), {"norm": out.norm()}


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net,
        "data": (X, Y),
        "val": (X, Y),
        "loss": F.cross_entropy,
        "hparams": {"lr": 0.01},
    }
    return shoal.Job(**(settings | {"epochs": 2, "batch_size": 16, "metrics": {"accuracy": accuracy}} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(folder: Path) -> shoal.Results:
    jobs = [job(seed=seed, name=f"{seed}") for seed in range(4)]
    return shoal.train([*jobs, job(name="branch", model=Branch), job(name="step", loss=None, step=step)], "cpu", folder)


def by_hand(result: shoal.Result, size: int) -> dict[str, float]:
    """A plain loop over the test set."""
    losses, outputs, norms = [], [], []
    with torch.no_grad():
        for x, y in zip(TEST[0].split(size), TEST[1].split(size), strict=True):
            out = result.model(x)
            smooth = 0.1 if result.name == "step" else 0.0
            losses.append(float(F.cross_entropy(out, y, label_smoothing=smooth)) * len(x))
            norms.append(float(out.norm()) * len(x))
            outputs.append(out)
        values = {"loss": sum(losses) / 37, "accuracy": float(accuracy(torch.cat(outputs), TEST[1]))}
    return values | ({"norm": sum(norms) / 37} if result.name == "step" else {})


def test_as_each_network_by_itself(results: shoal.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *a: (sizes.append(self.members), run(self, *a))[1])
    scores = results.evaluate(TEST, batch_size=10)
    assert max(sizes) == 4, "the four that are alike are one program"
    for result in results:
        assert scores[result.name] == pytest.approx(by_hand(result, 10), rel=1e-9)
    assert scores[0] is scores["0"] and len(scores[1:3]) == 2 and scores.columns() == ["loss", "accuracy", "norm"]
    assert scores.column("loss")["branch"] == scores["branch"]["loss"]
    assert results.evaluate(TEST)["0"] == pytest.approx(by_hand(results[0], 1024), rel=1e-9)
    lines = scores.table().splitlines()
    assert lines[0].split() == ["name", "loss", "accuracy", "norm"] and len(lines) == 8 and lines[2].endswith("-")
    with pytest.raises(KeyError, match="no job 'x'"):
        scores["x"]


def test_other_metrics_losses_and_forms_of_data(results: shoal.Results) -> None:
    some = results[:4]
    scores = some.evaluate(
        (TEST[0].numpy(), TEST[1].numpy()), metrics={"mse": lambda out, y: ((out.argmax(1) - y) ** 2).double().mean()}
    )
    out = some[2].model(TEST[0])
    assert scores["2"]["mse"] == pytest.approx(float(((out.argmax(1) - TEST[1]) ** 2).double().mean()))
    scores = some.evaluate(TEST, loss=lambda out, y: out.abs().sum(), batch_size=37)
    assert scores["3"]["loss"] == pytest.approx(float(some[3].model(TEST[0]).abs().sum().detach()), rel=1e-9)
    assert set(scores.columns()) == {"loss", "accuracy"}
    dataset = torch.utils.data.TensorDataset(*TEST)
    assert some.evaluate(dataset).records() == some.evaluate(TEST).records()
    assert list(some.evaluate(TEST).to_dataframe()["name"]) == ["0", "1", "2", "3"]


def test_without_metrics(results: shoal.Results) -> None:
    scores = results[:4].evaluate(TEST, metrics={}, batch_size=10)
    for result in results[:4]:
        assert scores[result.name] == pytest.approx({"loss": by_hand(result, 10)["loss"]}, rel=1e-9)


def dict_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["y"]), {"hits": accuracy(out, batch["y"])}


def test_jobs_without_metrics() -> None:
    """Their outputs are not wanted, whether they are one program or not."""
    rows = {"x": TEST[0], "y": TEST[1]}
    plain = [job(seed=seed, metrics={}, name=f"plain {seed}") for seed in range(2)]
    scores = shoal.train(plain, "cpu").evaluate(TEST)
    assert scores.columns() == ["loss"]
    dicts = {"data": {"x": X, "y": Y}, "val": None, "loss": None, "step": dict_step, "metrics": {}}
    results = shoal.train([job(seed=seed, name=f"{seed}", **dicts) for seed in range(2)], "cpu")
    scores = results.evaluate(rows)
    for result in results:
        out = result.model(TEST[0]).detach()
        expected = {"loss": float(F.cross_entropy(out, TEST[1])), "hits": float(accuracy(out, TEST[1]))}
        assert scores[result.name] == pytest.approx(expected, rel=1e-9)
    unnamed = {"x": TEST[0], "z": TEST[1]}
    for wrong in ({"metrics": {"accuracy": accuracy}}, {"loss": F.cross_entropy}):
        with pytest.raises(ValueError, match="evaluate: a batch of the data is a dict of 2; a loss and metrics of '0'"):
            results.evaluate(unnamed, **wrong)


class Named(nn.Module):
    """Its inputs have names, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.net(x * scale)


class TakesDict(Named):
    """Takes the dict itself."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.net(batch["x"] * batch["scale"])


def test_dicts_by_name() -> None:
    rows = [{"x": x, "scale": torch.full((len(x), 1), 0.5, dtype=x.dtype), "y": y} for x, y in ((X, Y), TEST)]
    listed = [job(model=Named, data=rows[0], val=rows[1], seed=seed, name=f"{seed}") for seed in range(2)]
    results = shoal.train(listed, "cpu")
    expected = torch.stack([result.model(TEST[0], rows[1]["scale"]).detach() for result in results])
    inputs = {name: rows[1][name] for name in ("x", "scale")}
    for given, size in ((rows[1], None), (inputs, None), (inputs, 7)):
        torch.testing.assert_close(results.predict(given, batch_size=size), expected)
    scores = results.evaluate(rows[1])
    for result, outputs in zip(results, expected, strict=True):
        assert scores[result.name]["accuracy"] == pytest.approx(float(accuracy(outputs, TEST[1])))
        assert scores[result.name]["loss"] == pytest.approx(float(F.cross_entropy(outputs, TEST[1])))
    whole = shoal.Results([replace(result, model=TakesDict()) for result in results])
    for one, other in zip(whole, results, strict=True):
        one.model.load_state_dict(other.model.state_dict())
    torch.testing.assert_close(whole.predict(inputs), expected)


def test_an_ensemble_of_networks_that_return_more_than_a_tensor() -> None:
    listed = [job(model=WithNone, loss=lambda out, y: F.cross_entropy(out[0], y), metrics={}, seed=s) for s in range(2)]
    results = shoal.train(listed, "cpu")
    outputs, _ = results.predict(TEST[0])
    assert torch.equal(results.ensemble(TEST[0], activation=lambda out: out[0].exp()).outputs, outputs.exp())
    with pytest.raises(
        ValueError, match=r"the networks return a tuple, not a tensor; .* say which tensor: activation="
    ):
        results.ensemble(TEST[0])


class WithNone(nn.Module):
    """Returns a tuple with an output that is not there, as attention does without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.net(x), None


@pytest.mark.parametrize("count", [1, 3])
def test_outputs_that_are_none(count: int) -> None:
    metrics = {"accuracy": lambda out, y: accuracy(out[0], y)}
    listed = [
        job(model=WithNone, loss=lambda out, y: F.cross_entropy(out[0], y), metrics=metrics, seed=seed, name=f"{seed}")
        for seed in range(count)
    ]
    results = shoal.train(listed, "cpu")
    scores = results.evaluate(TEST, batch_size=10)
    for size in (None, 10):
        outputs, nothing = results.predict(TEST[0], batch_size=size)
        assert nothing is None
        for place, result in enumerate(results):
            alone = [row["accuracy"] for row in shoal.solo(listed[place]).history]
            assert result.status == "done" and [row["accuracy"] for row in result.history] == alone
            torch.testing.assert_close(outputs[place], result.model(TEST[0])[0])
            assert scores[place]["accuracy"] == pytest.approx(float(accuracy(outputs[place], TEST[1])))


def test_networks_of_a_folder(results: shoal.Results, folder: Path) -> None:
    loaded = shoal.load(folder, model=net)[:4]
    with pytest.raises(ValueError, match="was read from a folder, which holds no code; pass metrics= or loss="):
        loaded.evaluate(TEST)
    scores = loaded.evaluate(TEST, metrics={"accuracy": accuracy})
    assert scores.columns() == ["accuracy"]
    assert [row["accuracy"] for row in scores] == [row["accuracy"] for row in results[:4].evaluate(TEST)]


def test_mistakes(results: shoal.Results) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        results.evaluate(TEST, batch_size=0)
    with pytest.raises(ValueError, match="evaluate: data has tensors of different length"):
        results.evaluate((X, TEST[1]))
    with pytest.raises(shoal.ShoalError, match="a metric of '0' raised ZeroDivisionError"):
        results.evaluate(TEST, metrics={"bad": lambda out, y: 1 / 0})
    with pytest.raises(ValueError, match="a batch of the data is a tuple of 1; a loss and metrics of '0' take"):
        results.evaluate((TEST[0],))
    with pytest.raises(ValueError, match="there are no results"):
        results[:0].predict(TEST[0])
    with pytest.raises(shoal.ShoalError, match="a network raised RuntimeError"):
        results.evaluate((TEST[0][:, :3], TEST[1]))


def test_when_memory_is_full_fewer_run_at_once(results: shoal.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    run = forward.Forward._run

    def small(self: Any, program: Any, places: tuple[int, ...], *more: Any) -> Any:
        if len(places) > 2:
            raise torch.OutOfMemoryError("no room")
        return run(self, program, places, *more)

    whole, scores = results[:4].predict(TEST[0]), results.evaluate(TEST)
    monkeypatch.setattr(forward.Forward, "_run", small)
    torch.testing.assert_close(results[:4].predict(TEST[0]), whole, rtol=1e-12, atol=1e-12)
    for one, other in zip(scores, results.evaluate(TEST), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_ensembles(results: shoal.Results) -> None:
    some = results[:3]
    together = some.ensemble(TEST[0], activation=lambda z: z.softmax(-1), batch_size=9)
    each = np.stack([r.model(TEST[0]).softmax(-1).detach().numpy() for r in some])
    np.testing.assert_allclose(together.mean, each.mean(0), rtol=1e-9)
    np.testing.assert_allclose(together.spread, each.std(0), rtol=1e-7)
    for row in range(37):
        counts = np.bincount(each[:, row].argmax(-1), minlength=3)
        leading = np.flatnonzero(counts == counts.max())
        assert int(together.vote[row]) == max(leading, key=lambda c: each[:, row, c].mean())
        assert float(together.agreement[row]) == pytest.approx(counts.max() / 3)
    assert torch.equal(some.ensemble(TEST[0]).outputs, some.predict(TEST[0]))


class Cache:
    """What a language model keeps of its keys and values: no tensor, and nothing that can be stacked."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.fc(x), "cache": Cache(x), "layers": 2, "loss": None}


def test_outputs_with_an_object_that_cannot_be_stacked() -> None:
    jobs = [
        shoal.Job(model=WithCache, data=(X, Y), loss=lambda out, y: F.cross_entropy(out["logits"], y), epochs=1, seed=s,
                  name=f"{s}")
        for s in range(3)
    ]  # fmt: skip
    results = shoal.train(jobs, device="cpu")
    outputs = results.predict(TEST[0])
    alone = torch.stack([result.model(TEST[0])["logits"] for result in results]).detach()
    torch.testing.assert_close(outputs["logits"], alone)
    assert [type(each) for each in outputs["cache"]] == [Cache] * 3 and outputs["layers"] == 2
    combined = results.ensemble(TEST[0], activation=lambda out: out["logits"])
    torch.testing.assert_close(combined.mean, alone.mean(0))
    assert results.predict(TEST[0], batch_size=20)["logits"].shape == (3, 37, 3)


def test_predict_takes_what_evaluate_takes() -> None:
    """A Dataset, and the rows of a fold, as evaluate does; targets are left out."""
    trained = shoal.train([job(seed=s, name=f"{s}") for s in range(2)], device="cpu")
    expected, rows = trained.predict(TEST[0]), [(x, y) for x, y in zip(*TEST, strict=True)]
    assert torch.equal(trained.predict(torch.utils.data.TensorDataset(*TEST)), expected)
    assert torch.equal(trained.predict(torch.utils.data.TensorDataset(TEST[0])), expected)
    torch.testing.assert_close(trained.predict(Items(rows), batch_size=10), expected)
    picked = shoal.Rows(TEST, [30, 2, 5])
    torch.testing.assert_close(trained.predict(picked), expected[:, [30, 2, 5]])
    torch.testing.assert_close(trained.ensemble(picked).mean, expected[:, [30, 2, 5]].mean(0))
    with pytest.raises(ValueError, match="a Rows gives whole batches, so other inputs would do nothing"):
        trained.predict(picked, TEST[0])


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def test_wrong_inputs_and_devices_are_named() -> None:
    trained = shoal.train([job(seed=s, name=f"{s}") for s in range(2)], device="cpu")
    for inputs, kind in ((TEST[0].tolist(), "list"), (TEST, "tuple"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"with a {kind} as its input; pass a tensor or an array"):
            trained.predict(inputs)
    for call in (trained.predict, trained.ensemble):
        with pytest.raises(ValueError, match="device is 'gpu'; use 'cpu', 'cuda' or 'cuda:0'"):
            call(TEST[0], device="gpu")
    with pytest.raises(ValueError, match="device is 'gpu'"):
        trained.evaluate(TEST, device="gpu")
    with pytest.raises(ValueError, match="device is 'gpu'"):
        trained.to("gpu")
    with pytest.raises(ValueError, match="device is 'cuda:99', and torch sees"):
        trained.evaluate(TEST, device="cuda:99")
    with pytest.raises(ValueError, match="activation is 'softmax'; pass a function"):
        trained.ensemble(TEST[0], activation="softmax")  # type: ignore[arg-type]
    with pytest.raises(
        shoal.ShoalError, match=r"inputs are float32 and the network is float64; pass x.to\(torch.float64\)"
    ):
        trained.evaluate((TEST[0].float(), TEST[1]))
