"""`shoal.load`: run folders without the code and the data that they were trained with."""

from __future__ import annotations

import copy
import json
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.cli import main
from shoal.jobs.early_stopping import kept_row

X, Y = torch.randn(40, 4), torch.arange(40) % 3


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 3), "data": (X, Y), "val": (X, Y)}
    settings |= {"loss": F.cross_entropy, "metrics": {"accuracy": accuracy}, "hparams": {"lr": 0.1}, "epochs": 5}
    return shoal.Job(**(settings | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "first"


@pytest.fixture(scope="module")
def trained(folder: Path) -> shoal.Results:
    stop = shoal.EarlyStop("accuracy", patience=4)
    jobs = [job(name="best", keep="best", stop=stop), job(name="last", seed=1, hparams={"lr": 0.3, "eps": 1e-6})]
    jobs.append(job(name="diverged", seed=2, loss=lambda out, y: F.cross_entropy(out, y) * float("nan")))
    return shoal.train(jobs, device="cpu", out=folder)


def test_all_but_the_network_is_there(trained: shoal.Results, folder: Path) -> None:
    loaded = shoal.load(folder)
    assert loaded.table() == trained.table() and json.loads(loaded.to_json()) == json.loads(trained.to_json())
    for name in ("best", "last", "diverged"):
        one, other = trained[name], loaded[name]
        assert one.history == other.history and one.values == other.values and one.best_epoch == other.best_epoch
        assert (one.status, one.tier, one.error, one.steps) == (other.status, other.tier, other.error, other.steps)
        assert one.environment == other.environment
        for key, tensor in one.model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[key])
    assert loaded.best("accuracy").name == trained.best("accuracy").name
    assert loaded["last"].job.hparams == {"lr": 0.3, "eps": 1e-6} and loaded["best"].job.seed == 0
    with pytest.raises(shoal.ShoalError, match=r"holds the weights of 'best', not the code.*pass model="):
        _ = loaded["best"].model
    with pytest.raises(shoal.ShoalError, match="holds no 'loss'"):
        _ = loaded["best"].job.loss
    with pytest.raises(KeyError, match="no job 'nobody' in this run; it has 'best', 'last', 'diverged'"):
        _ = loaded["nobody"]


def test_values_are_those_of_the_weights(trained: shoal.Results) -> None:
    """Measured again with the weights themselves."""
    best = trained["best"]
    scores = [row["accuracy"] for row in best.history]
    assert best.best_epoch == 1 + scores.index(max(scores)) and best.values == kept_row(best.job, best.history)
    for name in ("best", "last"):
        outputs = trained[name].model(X)
        assert trained[name].values["accuracy"] == accuracy(outputs, Y)
        assert trained[name].values["val_loss"] == pytest.approx(float(F.cross_entropy(outputs, Y).detach()), rel=1e-5)
    assert trained["last"].values["epoch"] == 5
    assert trained["diverged"].values == {} and trained["diverged"].best_epoch is None


def test_with_the_network(trained: shoal.Results, folder: Path) -> None:
    loaded = shoal.load(folder, model=lambda: nn.Linear(4, 3))
    assert torch.equal(loaded.predict(X), trained.predict(X)) and not loaded[0].model.training
    shared = nn.Linear(4, 3)
    given = shoal.load(folder, model={"best": shared, "last": shared})
    assert given["best"].model is not shared and given["best"].model is given["best"].model
    assert not torch.equal(given["best"].model.weight, given["last"].model.weight)
    with pytest.raises(shoal.ShoalError, match=r"weights of 'best' do not fit a Linear \(size mismatch"):
        _ = shoal.load(folder, model=lambda: nn.Linear(4, 2))[0].model
    with pytest.raises(ValueError, match="'nobody', which no job"):
        shoal.load(folder, model={"nobody": shared})
    with pytest.raises(ValueError, match="model is 3"):
        shoal.load(folder, model=3)  # type: ignore[arg-type]


def test_pickled_and_copied(trained: shoal.Results, folder: Path) -> None:
    with_networks = pickle.loads(pickle.dumps(shoal.load(folder, model=lambda: nn.Linear(4, 3))))
    assert torch.equal(with_networks.predict(X), trained.predict(X))
    copied = copy.deepcopy(shoal.load(folder, model=lambda: nn.Linear(4, 3)))
    assert torch.equal(copied.predict(X), trained.predict(X))
    without = pickle.loads(pickle.dumps(shoal.load(folder)))
    for loaded in (without, copy.deepcopy(shoal.load(folder))):
        assert loaded["best"].values == trained["best"].values and loaded["best"].job.seed == 0
        assert torch.equal(loaded["best"].state_dict()["weight"], trained["best"].model.weight)
        with pytest.raises(shoal.ShoalError, match="not the code"):
            _ = loaded["best"].model


DTYPES = [torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16,
          torch.uint16, torch.uint64, torch.bool]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_every_dtype_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also those that safetensors does not have."""
    bits = torch.arange(16, dtype=torch.uint8)

    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            value = bits > 3 if dtype is torch.bool else bits.view(dtype).clone()
            self.register_buffer("odd", value)
            self.frozen = nn.Parameter(value.clone(), requires_grad=False)

    made = [job(model=Odd, name=name, epochs=2) for name in "ab"]
    shoal.train(made, device="cpu", out=tmp_path)
    longer = [job(model=Odd, name=name, epochs=3) for name in "ab"]
    trained = shoal.train(longer, device="cpu", out=tmp_path)
    for result in (*trained, *shoal.load(tmp_path, model=Odd)):
        assert result.status == "done" and result.history[-1]["epoch"] == 3
        for value in (result.model.odd, result.model.frozen.detach()):
            same = value if dtype is torch.bool else value.view(torch.uint8)
            assert value.dtype == dtype and torch.equal(same, bits > 3 if dtype is torch.bool else bits)


def test_complex_weights_are_trained_and_stored(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.weight).abs()

    (result,) = shoal.train([job(model=Complex, name="a")], device="cpu", out=tmp_path)
    (loaded,) = shoal.load(tmp_path, model=Complex)
    assert torch.equal(loaded.model.weight, result.model.weight)


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run folder: it has no jobs\.json"):
        shoal.load(tmp_path / "nothing")


KILLED = """
    import sys, torch, shoal
    x = torch.randn(64, 4)
    jobs = [shoal.Job(model=lambda: torch.nn.Linear(4, 1), data=(x, x[:, :1]), loss=torch.nn.functional.mse_loss,
                      hparams={"lr": 1e-3}, epochs=epochs, batch_size=8, name=f"{epochs}") for epochs in (2, 10**7)]
    shoal.train(jobs, device="cpu", out=sys.argv[1], checkpoint_every=0.05, progress=False, threads=1)
"""


def _status(folder: Path, name: str) -> str:
    return shoal.load(folder)[name].status


def test_a_run_that_is_under_way_and_one_that_was_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "run")])
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("run/members/0001/*.ckpt"))) < 2 or _status(tmp_path / "run", "2") != "done":
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        assert shoal.load(tmp_path / "run")["10000000"].status == "running"
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    loaded = shoal.load(tmp_path / "run")
    assert [result.status for result in loaded] == ["done", "unfinished"]
    assert len(loaded["2"].history) == 2 and loaded["10000000"].steps > 0
    assert shoal.load(tmp_path / "run", model=lambda: nn.Linear(4, 1)).predict(torch.ones(1, 4)).shape == (2, 1, 1)


def test_dataframes(trained: shoal.Results, folder: Path) -> None:
    pytest.importorskip("pandas")
    frame = shoal.load(folder).to_dataframe()
    assert list(frame["name"]) == ["best", "last", "diverged"] and list(frame["lr"]) == [0.1, 0.3, 0.1]
    assert frame.set_index("name").loc["last", "accuracy"] == trained["last"].values["accuracy"]
    rows = trained.to_dataframe(history=True)
    assert len(rows) == sum(len(result.history) for result in trained)
    assert rows.groupby("name")["loss"].last()["last"] == trained["last"].history[-1]["loss"]


def test_the_command(trained: shoal.Results, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", str(folder)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == trained.table()
    assert main(["results", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["values"] == trained["last"].values
    assert main(["results", str(folder), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("name,status,tier,epochs,steps,seed,lr,") and len(lines) == 4
    assert main(["results", str(folder), "--csv", "--history"]) == 0
    rows = sum(len(result.history) for result in trained)
    assert len(capsys.readouterr().out.splitlines()) == 1 + rows
    assert main(["results", str(folder), "--history"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + rows
    assert main(["results", str(folder / "nothing")]) == 1
    assert "is not a run folder" in capsys.readouterr().err
