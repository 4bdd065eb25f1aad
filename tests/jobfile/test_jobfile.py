"""What a job file means: the jobs that come of it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import shoal
from shoal import models
from shoal.jobfile import load
from shoal.jobfile._known import LOSSES, METRICS, OVERS, Over, token_cross_entropy

BASE = """
data = "data.npz"
loss = "mse_loss"
epochs = 2
model = { use = "mlp", features = 3, hidden = 4, classes = 1 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data in it, which is not the current one."""
    x = np.arange(60, dtype=np.float64).reshape(20, 3) / 60
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1, keepdims=True))
    return tmp_path


def jobs_of(folder: Path, text: str, name: str = "sweep.toml") -> list[shoal.Job]:
    file = folder / name
    file.write_text(text)
    return load(file).jobs


def names(jobs: list[shoal.Job]) -> list[str]:
    return [job.name for job in jobs]


def test_what_a_grid_varies_inside_of_a_model_is_noted(folder: Path) -> None:
    text = BASE + "seeds = 2\nconfig = { note = 'mine' }\n[grid]\nhparams.lr = [0.1, 1]\nmodel.hidden = [4, 5]\n"
    jobs = jobs_of(folder, text)
    assert jobs[0].config == {"note": "mine", "hidden": 4} and jobs[2].config["hidden"] == 5
    jobs = jobs_of(folder, text.replace("note =", "hidden ="))
    assert jobs[2].config == {"hidden": "mine"}, "the file's own goes first"
    networks = BASE + "[grid]\nbatch_size = [4, 8]\nmodel = [{ use = 'mlp', features = 3, classes = 1 }]\n"
    assert jobs_of(folder, networks)[0].config == {"model": "mlp(features=3,classes=1)"}
    assert jobs_of(folder, BASE + "[grid]\nbatch_size = [4, 8]\n")[0].config == {}


def test_a_plain_file_is_one_job(folder: Path) -> None:
    (job,) = jobs_of(folder, BASE)
    assert job.name == "sweep" and job.epochs == 2 and job.loss is F.mse_loss
    assert job.optimizer is torch.optim.AdamW and job.val is None
    assert job.data[0].dtype == torch.float32 and job.data[0].shape == (20, 3)
    built = job.model()
    assert isinstance(built, models.MLP) and built.head.out_features == 1


def test_grid_is_a_product_and_seeds_come_last(folder: Path) -> None:
    jobs = jobs_of(folder, BASE + "seeds = 2\n[grid]\nhparams.lr = [0.1, 1]\nmodel.hidden = [4, 5]\n")
    assert names(jobs)[:3] == ["lr=0.1 hidden=4 seed=0", "lr=0.1 hidden=4 seed=1", "lr=0.1 hidden=5 seed=0"]
    assert len(jobs) == 8 and len(set(names(jobs))) == 8
    assert [(job.hparams["lr"], job.seed) for job in jobs[:2]] == [(0.1, 0), (0.1, 1)]
    assert [job.model().head.in_features for job in jobs[:3]] == [4, 4, 5]
    assert all(job.data is jobs[0].data for job in jobs), "data is read once"


def test_toml_and_yaml_mean_the_same(folder: Path) -> None:
    text = """
data: data.npz
loss: mse_loss
epochs: 2
model: {use: mlp, features: 3, hidden: 4, classes: 1}
seeds: [5, 7]
hparams: {betas: [0.8, 0.9]}
grid: {hparams.lr: [1e-3, 1e-2]}
"""
    yaml = jobs_of(folder, text, "a.yaml")
    toml = jobs_of(
        folder, BASE + "seeds = [5, 7]\nhparams.betas = [0.8, 0.9]\n[grid]\nhparams.lr = [1e-3, 1e-2]\n", "b.toml"
    )
    assert [(j.name, dict(j.hparams), j.seed) for j in yaml] == [(j.name, dict(j.hparams), j.seed) for j in toml]
    assert yaml[0].hparams["betas"] == (0.8, 0.9)


JOBS = """
hparams.lr = 0.5
seed = 3
[[jobs]]
hparams.momentum = 0.9
optimizer = "sgd"
[[jobs]]
name = "long"
steps = 7
seeds = 2
model = { use = "torch.nn:Linear", in_features = 3, out_features = 1 }
[[jobs]]
model.hidden = 9
loss = { use = "huber_loss", delta = 2.0 }
"""


def test_entries_add_to_what_is_shared(folder: Path) -> None:
    first, second, third, fourth = jobs_of(folder, BASE + JOBS)
    assert first.name == "momentum=0.9 optimizer=sgd" and dict(first.hparams) == {"lr": 0.5, "momentum": 0.9}
    assert first.optimizer is torch.optim.SGD and first.seed == 3
    assert names([second, third]) == ["long seed=0", "long seed=1"]
    assert (second.steps, second.epochs) == (7, None)
    assert isinstance(second.model(), torch.nn.Linear)
    assert fourth.model().head.in_features == 9 and fourth.model().hidden[0].in_features == 3
    assert float(fourth.loss(torch.tensor([9.0]), torch.tensor([0.0]))) == pytest.approx(2 * (9 - 1))


def test_null_takes_a_shared_key_away(folder: Path) -> None:
    text = "data: data.npz\nloss: mse_loss\nepochs: 1\nclip_norm: 1\nmodel: {use: mlp, features: 3, classes: 1}\n"
    one, two = jobs_of(folder, text + "jobs: [{name: a}, {name: b, clip_norm: null}]", "a.yaml")
    assert (one.clip_norm, two.clip_norm) == (1, None)


def test_names_from_a_pattern(folder: Path) -> None:
    jobs = jobs_of(folder, BASE + 'name = "h{model.hidden}/{seed} {model}"\nseeds = [4]\n')
    assert names(jobs) == ["h4/4 mlp(features=3,hidden=4,classes=1)"]


def test_a_share_for_validation_and_folds(folder: Path) -> None:
    one, two = jobs_of(folder, BASE + "val = 0.25\nseeds = 2\n")
    assert (len(one.data), len(one.val)) == (15, 5) and one.data.data is two.data.data
    assert sorted([*one.data.index.tolist(), *one.val.index.tolist()]) == list(range(20))
    other = jobs_of(folder, BASE + "val = { share = 0.25, seed = 1 }\n")[0]
    assert other.val.index.tolist() != one.val.index.tolist()
    parts = jobs_of(folder, BASE + "folds = 4\nname = 'x'\n")
    assert names(parts)[0] == "x fold=1/4" and [len(job.val) for job in parts] == [5] * 4


def test_every_plain_field_arrives(folder: Path) -> None:
    text = """
batch_size = 5
data_seed = 9
shuffle = false
drop_last = true
accumulate = 2
clip_norm = 0.5
precision = "bf16"
val_every = 2
keep = "best"
owner = "me"
priority = 4
val = "data.npz"
schedule_every = "epoch"
schedule = { use = "StepLR", step_size = 3 }
stop = { metric = "mae", patience = 2 }
average = { use = "EMA", decay = 0.9, every = "epoch" }
metrics = ["mae", "rmse"]
"""
    (job,) = jobs_of(folder, BASE + text)
    told = {name: getattr(job, name) for name in ("batch_size", "data_seed", "shuffle", "drop_last", "accumulate")}
    assert told == {"batch_size": 5, "data_seed": 9, "shuffle": False, "drop_last": True, "accumulate": 2}
    assert (job.clip_norm, job.precision, job.val_every, job.keep, job.owner, job.priority) == (
        0.5,
        "bf16",
        2,
        "best",
        "me",
        4,
    )
    assert job.stop == shoal.EarlyStop("mae", patience=2) and list(job.metrics) == ["mae", "rmse"]
    assert job.average == shoal.EMA(decay=0.9, every="epoch")
    assert job.schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])).step_size == 3
    assert job.val is job.data


def test_a_schedule_over_the_whole_job(folder: Path) -> None:
    (job,) = jobs_of(folder, BASE + "batch_size = 6\nschedule = { use = 'cosine', warmup = 2, floor = 0.1 }\n")
    assert isinstance(job.schedule, Over) and job.schedule.total == 2 * 4
    factors = [job.schedule(step) for step in range(9)]
    assert factors[0] == pytest.approx(1 / 3) and factors[2] == 1.0 and factors[8] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(factors[2:]))
    (other,) = jobs_of(folder, BASE + "schedule = 'linear'\nschedule_every = 'epoch'\n")
    assert [other.schedule(epoch) for epoch in range(3)] == [1.0, 0.5, 0.0]


def test_the_run_table(folder: Path) -> None:
    file = folder / "a.toml"
    file.write_text(BASE + '[run]\nout = "runs/x"\nmemory = "2GB"\nthreads = 1\ncompile = "auto"\n')
    assert load(file).settings == {
        "out": str(folder.resolve() / "runs/x"), "memory": "2GB", "threads": 1, "compile": "auto",
    }  # fmt: skip


def test_code_beside_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own_code_here.py").write_text(
        "import torch\nprint('imported')\ncalls = []\n"
        "def rows(n=3):\n    calls.append(n)\n    return torch.ones(n, 3), torch.ones(n, 1)\n"
        "def step(model, batch, scale=1.0):\n    return scale * (model(batch[0]) - batch[1]).abs().mean()\n"
    )
    text = """
model = { use = "torch.nn:Linear", in_features = 3, out_features = 1 }
data = { use = "own_code_here.py:rows", n = 6 }
step = { use = "own_code_here:step", scale = 2.0 }
epochs = 1
seeds = 2
"""
    jobs = jobs_of(folder, text)
    assert len(jobs[0].data[0]) == 6 and jobs[0].data is jobs[1].data
    assert jobs[0].step.keywords == {"scale": 2.0} and "scale=2.0" in jobs[0].step.__qualname__
    told = capsys.readouterr()
    assert not told.out and told.err.count("imported") == 1, "what user code prints goes to stderr, once"
    import own_code_here

    assert own_code_here.calls == [6]


@pytest.mark.parametrize("form", [".npz", ".pt", ".safetensors", "tuple.pt"])
def test_files_of_arrays(folder: Path, form: str) -> None:
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.arange(6, dtype=torch.int32)
    if form == ".npz":
        np.savez(folder / "f.npz", images=x.numpy(), kind=y.numpy())
    elif form == ".safetensors":
        save_file({"images": x, "kind": y}, folder / "f.safetensors")
    else:
        torch.save((x, y) if form == "tuple.pt" else {"images": x, "kind": y}, folder / "f.pt")
    use = f"f{form.removeprefix('tuple')}"
    more = "" if form == "tuple.pt" else ', inputs = "images", target = "kind"'
    (job,) = jobs_of(
        folder, BASE.replace('"data.npz"', f'{{ use = "{use}"{more} }}').replace("mse_loss", "cross_entropy")
    )
    assert torch.equal(job.data[0].double().round(decimals=4), x.round(decimals=4))
    if form != "tuple.pt":
        assert job.data[0].dtype == torch.float32 and job.data[1].dtype == torch.int64


def csv(folder: Path, text: str, more: str = "") -> Any:
    (folder / "t.csv").write_text(text)
    return jobs_of(folder, BASE.replace('"data.npz"', f'{{ use = "t.csv"{more} }}'))[0].data


def test_a_csv_with_another_delimiter_says_so(folder: Path) -> None:
    for sign, written in ((";", '";"'), ("\t", r'"\\t"')):
        with pytest.raises(shoal.JobError, match=f"one column only; .* set delimiter = {written}"):
            csv(folder, f"a{sign}b{sign}c\n1{sign}2{sign}3\n")


def test_csv(folder: Path) -> None:
    x, y = csv(folder, "a,b,kind\n1,2,dog\n3,4,cat\n\n5,6,dog\n")
    assert x.tolist() == [[1, 2], [3, 4], [5, 6]] and y.tolist() == [1, 0, 1]
    assert csv(folder, "a,b\n1,2.5\n3,4\n")[1].tolist() == [[2.5], [4.0]]
    assert csv(folder, "a,b\n1,2\n3,4\n")[1].tolist() == [2, 4]
    assert csv(folder, "a,b\n1,2\n3,4\n", ", classes = false")[1].tolist() == [[2.0], [4.0]]
    x, y = csv(folder, "a;b;c\n1;2;3\n", ', target = "a", inputs = ["c"], delimiter = ";"')
    assert x.tolist() == [[3]] and y.tolist() == [1]


def test_text_as_bytes(folder: Path) -> None:
    (folder / "t.txt").write_bytes(bytes(range(10)))
    x, y = jobs_of(folder, BASE.replace('"data.npz"', '{ use = "t.txt", tokens = 4 }'))[0].data
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


INPUTS = {
    "mlp": torch.rand(2, 784), "cnn": torch.rand(2, 1, 28, 28), "resnet18": torch.rand(2, 3, 16, 16),
    "gpt": torch.randint(256, (2, 128)), "lstm": torch.rand(2, 5, 32), "encoder": torch.rand(2, 5, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_by_name(name: str) -> None:
    outputs = models.MODELS[name]()(INPUTS[name])
    assert outputs.shape[0] == 2 and outputs.shape[-1] == (256 if name == "gpt" else 10)


def test_known_functions_by_hand() -> None:
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    assert torch.allclose(token_cross_entropy(logits, tokens), F.cross_entropy(logits.transpose(1, 2), tokens))
    assert METRICS["accuracy"](torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 2])) == pytest.approx(2 / 3)
    assert METRICS["binary_accuracy"](torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(
        2 / 3
    )
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])
    assert [METRICS[name](a, b) for name in ("mse", "rmse", "mae")] == [4.5, 4.5**0.5, 1.5]
    assert set(OVERS) == {"cosine", "linear", "constant"} and OVERS["constant"](total=9)(8) == 1.0
    assert all(getattr(F, name, None) is f for name, f in LOSSES.items() if name != "token_cross_entropy")


def test_thousands_of_jobs_from_one_file(folder: Path) -> None:
    text = BASE + "seeds = 500\n[grid]\nhparams.lr = [" + ", ".join(f"{i}e-4" for i in range(1, 11)) + "]\n"
    assert len(jobs_of(folder, text)) == 5000
