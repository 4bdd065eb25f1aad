"""What comes out: results, run folders, folds, and the switches of `train`."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.engine.recipes.program import Program
from shoal.settings import parse_bytes, parse_seconds

X, Y = torch.randn(30, 4), torch.arange(30) % 3


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 3), "data": (X, Y), "loss": F.cross_entropy}
    return shoal.Job(**(settings | {"hparams": {"lr": 0.1}, "epochs": 2, "batch_size": 8} | changes))


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


@pytest.fixture(scope="module")
def results() -> shoal.Results:
    jobs = [job(seed=s, name=f"seed={s}", val=(X, Y), metrics={"accuracy": accuracy}) for s in range(3)]
    return shoal.train(jobs, device="cpu")


def test_a_sequence_in_the_order_of_the_jobs(results: shoal.Results) -> None:
    assert len(results) == 3 and [r.name for r in results] == ["seed=0", "seed=1", "seed=2"]
    assert "seed=1" in results and results[1] in results and "seed=9" not in results
    assert results[-1].name == "seed=2" and isinstance(results[:2], shoal.Results)
    assert repr(results) == "Results(3: 3 done)"
    assert results[0].environment["torch"] == torch.__version__


def test_table_best_and_json(results: shoal.Results) -> None:
    lines = results.table().splitlines()
    assert len(lines) == 5 and lines[0].split()[:5] == ["name", "status", "tier", "epochs", "steps"]
    assert "accuracy" in lines[0] and "stacked" in lines[2]
    scores = [r.history[-1]["accuracy"] for r in results]
    assert results.best("accuracy", "max").history[-1]["accuracy"] == max(scores)
    assert results.best().history[-1]["val_loss"] == min(r.history[-1]["val_loss"] for r in results)
    with pytest.raises(ValueError, match="the histories have: epoch"):
        results.best("f1")
    assert json.loads(results.to_json())[1]["name"] == "seed=1"


def test_predict(results: shoal.Results) -> None:
    out = results.predict(X)
    assert out.shape == (3, 30, 3)
    torch.testing.assert_close(out[1], results[1].model(X).detach())
    assert not out.requires_grad
    torch.testing.assert_close(results.predict(X, batch_size=7), out)
    assert torch.equal(results.predict(X.numpy()), out)
    with pytest.raises(ValueError, match="batch_size is 0"):
        results.predict(X, batch_size=0)
    unlike = shoal.train([job(name="a"), job(name="b", model=lambda: nn.Linear(4, 5))], device="cpu")
    with pytest.raises(ValueError, match="outputs differ"):
        unlike.predict(X)


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))


def test_networks_come_back_in_eval_mode(tmp_path: Path) -> None:
    """Wherever they were trained; and training itself, with a look at them on the way, a pause, and then more of it,
    is as if they had never been in it."""
    looked: list[bool] = []
    plain = [job(model=dropout_net, seed=s, name=f"{s}", batch_size=10) for s in range(3)]
    unlike = job(model=lambda: nn.Sequential(dropout_net(), Branch3()), name="alone", batch_size=10)
    quiet = shoal.train([*plain, unlike], device="cpu", deterministic=True)
    watched = shoal.train(
        [*plain, unlike], "cpu", out=tmp_path, deterministic=True, callbacks=[lambda v: looked.append(v.model.training)]
    )
    assert looked and not any(looked)
    for one, other in zip(quiet, watched, strict=True):
        assert not any(module.training for module in (*one.model.modules(), *other.model.modules()))
        for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert not shoal.solo(plain[0]).model.training
    trained = quiet[0].model
    further = [job(model=net, name="again", batch_size=10) for net in (trained, copy.deepcopy(trained).train())]
    one, other = (shoal.train([each], "cpu", deterministic=True)[0].model for each in further)
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not trained.training and quiet.to("cpu") is quiet


class Branch3(nn.Module):
    """Goes by the data, so it has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else -x


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if float(out.detach().sum()) > 0 else -out


def test_inputs_of_another_dtype_are_named(results: shoal.Results) -> None:
    dtype = next(results[0].model.parameters()).dtype
    other = torch.float64 if dtype == torch.float32 else torch.float32
    names = [str(d).removeprefix("torch.") for d in (other, dtype)]
    inputs = results[0].job.data[0][:3].to(other)
    with pytest.raises(ValueError, match=rf"inputs are {names[0]} and the network is {names[1]}; pass x.to"):
        results.predict(inputs)
    with pytest.raises(ValueError, match=f"inputs are {names[0]}"):
        results.predict(inputs.numpy())


def test_predict_is_one_stacked_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    x = X.double()
    calls: list[int] = []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *a: (calls.append(self.members), run(self, *a))[1])
    trained = shoal.train([job(seed=s, name=f"{s}", model=net, data=(x, Y)) for s in range(4)], device="cpu")
    before = [{k: v.clone() for k, v in r.model.state_dict().items()} for r in trained]
    calls.clear()
    out, state = trained.predict(x), torch.get_rng_state()
    assert calls == [2, 4], "proven on two of them, then one program for all"
    for i, result in enumerate(trained):
        torch.testing.assert_close(out[i], result.model.eval()(x).detach(), rtol=1e-12, atol=1e-12)
        assert all(
            torch.equal(a, b) for a, b in zip(result.model.state_dict().values(), before[i].values(), strict=True)
        )
    assert torch.equal(state, torch.get_rng_state())
    mixed = shoal.train([job(name="a"), job(name="b", model=Branch), job(name="c", seed=1)], device="cpu")
    calls.clear()
    out = mixed.predict(X)
    assert calls == [2, 2], "two stacked, after a proof on both; one alone"
    for i, result in enumerate(mixed):
        torch.testing.assert_close(out[i], result.model(X).detach())


def test_plot(results: shoal.Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert results.plot(tmp_path / "curves.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no history has 'f1'"):
        results.plot(tmp_path / "x.png", metric="f1")


def test_the_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    results = shoal.train([job(seed=s, name=f"s{s}") for s in range(2)], device="cpu", out=out)
    state = load_file(out / "weights" / "0001.safetensors")
    nn.Linear(4, 3).load_state_dict(state, strict=True)
    assert torch.equal(state["weight"], results[1].model.state_dict()["weight"])
    rows = [json.loads(line) for line in (out / "history" / "0001.jsonl").read_text().splitlines()]
    assert rows == results[1].history
    table = json.loads((out / "results.json").read_text())
    assert [row["status"] for row in table["results"]] == ["done", "done"]
    assert not list(out.rglob(".*")), "a temporary file was left"
    shoal.train([job(seed=s, name=f"s{s}") for s in range(2)], device="cpu", out=out)


def test_a_folder_of_other_jobs_is_refused_with_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shoal.train([job(name="a")], device="cpu", out=out)
    before = (out / "weights" / "0000.safetensors").read_bytes()
    for other, words in (
        (job(name="b"), "it has job 'a' and the list does not: give all of its jobs, and the new ones"),
        (job(name="a", hparams={"lr": 0.2}), "job 'a' has hparams {'lr': 0.1} there and {'lr': 0.2} here"),
        (job(name="a", data=(X + 1, Y)), "job 'a' has other data than there"),
        (job(name="a", model=lambda: nn.Linear(4, 3, bias=False)), "job 'a' has shapes "),
    ):
        with pytest.raises(ValueError) as caught:
            shoal.train([other], device="cpu", out=out)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert before == (out / "weights" / "0000.safetensors").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="files that are not those of a run"):
        shoal.train([job()], device="cpu", out=tmp_path / "mine")


def test_tied_weights_and_more_than_tensors_are_written(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 3}

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.c(self.b(self.a(x)))
            return out

    shoal.train([job(name="a", model=Tied), job(name="b", model=lambda: Extra(4, 3))], device="cpu", out=tmp_path)
    Tied().load_state_dict(load_file(tmp_path / "weights" / "0000.safetensors"), strict=True)
    Extra(4, 3).load_state_dict(torch.load(tmp_path / "weights" / "0001.pt"), strict=True)


def test_folds() -> None:
    jobs = shoal.folds(job(name="a", metrics={"accuracy": accuracy}), k=4)
    assert [j.name for j in jobs] == ["a fold=1/4", "a fold=2/4", "a fold=3/4", "a fold=4/4"]
    assert torch.equal(torch.cat([j.val.index for j in jobs]).sort().values, torch.arange(30))
    for this in jobs:
        assert not set(this.data.index.tolist()) & set(this.val.index.tolist())
        assert this.data.data is jobs[0].data.data
    results = shoal.train(jobs, device="cpu")
    assert all("accuracy" in r.history[-1] for r in results)
    rows = jobs[1].val.index
    assert results[1].history[-1]["accuracy"] == pytest.approx(accuracy(results[1].model(X[rows]), Y[rows]))
    for wrong in (1, 31):
        with pytest.raises(ValueError, match=f"k is {wrong}"):
            shoal.folds(job(), k=wrong)
    with pytest.raises(ValueError, match="val= already"):
        shoal.folds(job(val=(X, Y)))


def test_the_table_says_what_went_wrong() -> None:
    def burst(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * float("inf")

    trained = shoal.train([job(name=f"bad{i}", seed=i, loss=burst) for i in range(12)] + [job(name="good")], "cpu")
    lines = trained.table().splitlines()
    assert len(lines) == 2 + 13 + 1 + 10 + 1, lines
    assert lines[16].startswith("bad0: the loss became inf") and lines[-1] == "... and 2 more"


def test_values_of_config_are_shown_and_kept(tmp_path: Path) -> None:
    jobs = [job(config={"dropout": rate, "size": "small"}, name=f"p={rate}") for rate in (0.1, 0.5)]
    seen: list[dict[str, Any]] = []
    results = shoal.train(jobs, device="cpu", out=tmp_path, callbacks=[lambda view: seen.append(view.settings)])
    assert results.table().splitlines()[0].split()[:5] == ["name", "status", "tier", "dropout", "size"]
    assert results.table().splitlines()[2].split()[3:5] == ["0.1", "small"]
    assert [row["dropout"] for row in results.records()] == [0.1, 0.5]
    assert seen[0]["dropout"] == 0.1
    read = shoal.load(tmp_path)
    assert read[1].job.config == {"dropout": 0.5, "size": "small"} and read[1].to_record()["dropout"] == 0.5
    with pytest.raises(ValueError, match=r"config \{'dropout': 0.1\} there and \{'dropout': 0.2\} here"):
        shoal.train([job(config={"dropout": 0.2, "size": "small"}, name="p=0.1"), jobs[1]], device="cpu", out=tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [([1], "config is"), ({1: 2}, "config has the key 1"), ({"net": X}, r"config\['net'\] is tensor")],
)
def test_values_of_config_are_plain(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job(config=config)


def test_a_line_break_in_a_name_or_value_stays_in_its_row() -> None:
    results = shoal.train([job(name="two\nlines", config={"note": "a\tb\nc"}), job(name="größer")], device="cpu")
    lines = results.table().splitlines()
    assert len(lines) == 4 and lines[2].startswith("two\\nlines") and "a\\tb\\nc" in lines[2]
    assert lines[3].startswith("größer")
    assert results.evaluate((X, Y), loss=F.cross_entropy).table().splitlines()[2].startswith("two\\nlines")


def test_the_table_has_the_best_epoch_where_it_is_not_the_last() -> None:
    worse = job(val=(X, Y), hparams={"lr": 0.0}, epochs=3, name="flat")  # the first epoch stays the best
    head, _, row = shoal.train([worse], device="cpu").table().splitlines()
    assert dict(zip(head.split(), row.split(), strict=True))["best_epoch"] == "1"
    assert "best_epoch" not in shoal.train([job()], device="cpu").table()


def test_the_table_has_the_hparams_that_differ() -> None:
    adam: list[dict[str, Any]] = [{"lr": 0.1, "weight_decay": decay, "eps": 1e-6} for decay in (0.0, 0.1)]
    more = {"optimizer": torch.optim.AdamW, "config": {"size": 3}}
    results = shoal.train([job(name=f"{i}", hparams=adam[i], **more) for i in range(2)], device="cpu")
    lines = results.table().splitlines()
    assert lines[0].split()[3:6] == ["size", "weight_decay", "epochs"]  # lr is a column of the history
    assert [line.split()[4] for line in lines[2:]] == ["0", "0.1"]


def test_jobs_that_did_not_finish_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    jobs = [job(name="fine"), job(name="wild", hparams={"lr": 1e38})]
    shoal.train(jobs, device="cpu")
    assert "1 of 2 jobs did not finish: 'wild' diverged" in caplog.text
    caplog.clear()
    shoal.train(jobs, device="cpu", progress=False)
    assert "did not finish" not in caplog.text


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shoal.train([job(name="a"), job(name="b")], device="cpu", progress=True)
    assert "100%, 2/2 ended, loss " in capsys.readouterr().err
    shoal.train([job()], device="cpu")
    assert capsys.readouterr().err == ""


def test_threads_and_the_deterministic_switch_hold_for_the_run_alone() -> None:
    seen: list[tuple[int, bool]] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return F.cross_entropy(model(batch[0]), batch[1])

    before = torch.get_num_threads()
    shoal.train([job(loss=None, step=step)], device="cpu", threads=2, deterministic=True)
    assert set(seen) == {(2, True)}
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (before, False)


def test_sizes_and_times() -> None:
    assert [parse_bytes(t) for t in ("8GB", "1 KiB", 5)] == [8 * 10**9, 1024, 5]
    assert [parse_seconds(t) for t in ("60s", "1.5m", "1h", 2)] == [60.0, 90.0, 3600.0, 2.0]


def test_importing_shoal_does_not_import_torch_and_all_names_are_there() -> None:
    code = "import sys, shoal; assert 'torch' not in sys.modules; print([getattr(shoal, n) for n in shoal.__all__])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "function folds" in done.stdout
    optional = {"rich", "matplotlib", "safetensors", "sklearn", "typer", "pydantic"}
    code = (
        f"import sys, shoal; shoal.train, shoal.solo, shoal.folds; print([m for m in {optional} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PICKLED = """
    import torch, torch.nn.functional as F
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    from torch import nn
    import shoal

    def accuracy(outputs, targets):
        return float((outputs.argmax(1) == targets).float().mean())

    def train(seed):
        torch.manual_seed(0)
        x, y = torch.randn(30, 4), torch.arange(30) % 3
        jobs = [
            shoal.Job(model=lambda: nn.Linear(4, 3), data=(x, y), val=(x, y), loss=loss, metrics={"accuracy": accuracy},
                      params=lambda net: net.parameters(), hparams={"lr": 0.1}, config={"width": 3}, epochs=2,
                      stop=shoal.EarlyStop("accuracy"), seed=seed + number, name=f"{seed + number}")
            for number, loss in enumerate((F.cross_entropy, lambda outputs, targets: F.cross_entropy(outputs, targets)))
        ]
        return shoal.train(jobs, device="cpu", threads=1)

    if __name__ == "__main__":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            there = pool.submit(train, 5).result()
        here = train(5)
        assert [r.name for r in there] == ["5", "6"] and there["6"].job.hparams == {"lr": 0.1}
        for a, b in zip(there, here, strict=True):
            assert [row["val_loss"] for row in a.history] == [row["val_loss"] for row in b.history]
            assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
            assert a.values.keys() == b.values.keys() and a.best_epoch == b.best_epoch and a.status == "done"
            assert a.job.stop == b.job.stop and a.job.config == {"width": 3}
        x, y = here[0].job.data
        assert there.table().splitlines()[0] == here.table().splitlines()[0]
        assert there[:1].evaluate((x, y))[0] == here[:1].evaluate((x, y))[0]
        try:
            there[1].job.loss(x, y)
        except shoal.ShoalError as error:
            assert "'loss' of job '6' was left out when its result was pickled" in str(error)
        print("the same")
"""


def test_results_come_back_from_another_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(PICKLED))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.stdout == "the same\n", done.stderr


def test_a_pickled_result_has_no_data_and_a_copied_one_has(results: shoal.Results) -> None:
    big = job(data=(torch.zeros(100_000, 4), torch.zeros(100_000, dtype=torch.int64)), steps=1, epochs=None)
    (result,) = shoal.train([big], device="cpu")
    assert len(pickle.dumps(result)) < 20_000
    for same in (copy.copy(result), copy.deepcopy(result)):
        assert same.job is result.job and same.history == result.history
    other = copy.deepcopy(result)
    assert torch.equal(other.model.weight, result.model.weight) and other.model is not result.model
    assert pickle.loads(pickle.dumps(results)).plan == results.plan and len(copy.deepcopy(results)) == 3


def test_settings_in_which_jobs_differ_are_columns(tmp_path: Path) -> None:
    """Also in a folder. A metric of the same name keeps its column."""
    jobs = [
        job(seed=seed, batch_size=size, optimizer=kind, name=f"{seed} {size} {kind.__name__}", val=(X, Y), epochs=1,
            precision=None if seed else "bf16", metrics={"precision": accuracy}, config={} if seed else {"seed": "own"})
        for seed in range(2) for size in (8, 16) for kind in (torch.optim.SGD, torch.optim.Adam)
    ]  # fmt: skip
    results = shoal.train(jobs, device="cpu", out=tmp_path)
    for each in (results, shoal.load(tmp_path)):
        first, *_, last = each.records()
        assert (first["optimizer"], first["batch_size"], first["seed"]) == ("SGD", 8, "own")
        assert (last["optimizer"], last["batch_size"], last["seed"]) == ("Adam", 16, 1)
        assert last["precision"] == results[-1].values["precision"] and "accumulate" not in last
        assert each.table().splitlines()[0].split()[3:7] == ["seed", "optimizer", "batch_size", "epochs"]
    assert "batch_size" not in results[:2].records()[0] and results[:2].records()[0]["optimizer"] == "SGD"
