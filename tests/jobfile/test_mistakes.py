"""Wrong job files: one line for each mistake, with its place; never a traceback."""

import re
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.app import main
from shoal.errors import JobError
from shoal.jobfile import load

TOML = """\
data = "d.npz"
loss = "mse_loss"
epochs = 1
model = { use = "mlp", features = 3, classes = 1 }
optimizer = "SGD"
hparams.lr = 0.1
"""
YAML = """\
data: d.npz
loss: mse_loss
epochs: 1
model: {use: mlp, features: 3, classes: 1}
optimizer: SGD
hparams: {lr: 0.1}
"""
CODE = """\
import torch
def net(width): return torch.nn.Linear(3, 1)
def fails(): raise KeyError("gone")
def leaves(): raise SystemExit(4)
number = 3
class Other: pass
"""
NESTED = "[" * 4000 + "]" * 4000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 3)), y=np.zeros((20, 1)))
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    (tmp_path / "own_parts.py").write_text(CODE)
    (tmp_path / "own_raises.py").write_text("x = 1\nraise RuntimeError('boom')\n")
    (tmp_path / "own_exits.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "own_syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "own_imports.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "junk.npz").write_bytes(b"\x00junk")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\nx,3\n")
    (tmp_path / "folder.csv").mkdir()
    return tmp_path


def told(folder: Path, text: str | bytes, name: str) -> list[str]:
    """The lines of the error, without the folder."""
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobError) as caught:
        load(file)
    return [line.removeprefix(f"{folder}/") for line in caught.value.lines]


def changed(old: str, new: str) -> str:
    assert TOML.count(old) == 1
    return TOML.replace(old, new)


MODEL = '{ use = "mlp", features = 3, classes = 1 }'
CASES: dict[str, tuple[str | bytes, int, str]] = {
    # the bar: a wrong key, a missing file, a type error, an unknown optimizer
    "key": (TOML + "epoch = 3\n", 7, "key 'epoch' is not known; did you mean 'epochs'?"),
    "missing file": (changed('"d.npz"', '"nope.npz"'), 1, "data file 'nope.npz' is not there; paths are taken from"),
    "type": (changed("epochs = 1", "epochs = 'five'"), 3, "epochs is 'five'; use a whole number, 0 or more"),
    "optimizer": (changed('"SGD"', '"adamm"'), 5, "optimizer 'adamm' is not known; did you mean 'Adam'?"),
    # syntax
    "no value": (changed("epochs = 1", "epochs ="), 3, "this is not TOML: Invalid value (at line 3, column 9)"),
    "open text": (changed('"SGD"', '"SGD'), 5, "this is not TOML"),
    "twice": (TOML + "epochs = 2\n", 7, "a key or table is given twice"),
    "yaml inside": (YAML, 1, 'the file is YAML: end its name in ".yaml"'),
    "deep": (f"a = {NESTED}", 1, "nested too deep"),
    "empty": ("", 1, "the file is empty"),
    "comment": ("# nothing\n", 1, "a job has no model and no data"),
    "junk": (b"\x00\xff\xfe\x01" * 20, 1, "not text in UTF-8"),
    "latin": (TOML.encode() + b"# \xe9\n", 7, "not text in UTF-8"),
    "utf16": (TOML.encode("utf-16"), 1, "not text in UTF-8"),
    "nul": (TOML + "\x00", 7, "this is not TOML"),
    "CRLF": (changed("epochs = 1", "epochs = -1").replace("\n", "\r\n"), 3, "epochs is -1"),
    "BOM": ("\ufeff" + changed("epochs = 1", "epochs = -1"), 3, "epochs is -1"),
    "too long": ("# " + "x" * 5_000_000, 1, "a job file has at most"),
    # numbers
    "30 digits": (changed("epochs = 1", "epochs = 1" + "0" * 30), 3, "more than 64 bits"),
    "5000 digits": (changed("epochs = 1", "epochs = 1" + "0" * 5000), 3, "thousands of digits"),
    "nan": (changed("0.1", "nan"), 6, "lr is nan"),
    "negative": (changed("0.1", "-0.1"), 6, "lr is -0.1; a learning rate must be 0 or more"),
    "text": (changed("0.1", "'0.1'"), 6, "hparams.lr is '0.1' (text); use a number"),
    "bool": (changed("epochs = 1", "epochs = true"), 3, "epochs is True"),
    "hparam": (
        changed("hparams.lr", "hparams.momentun"),
        6,
        "hparams 'SGD' has no argument 'momentun'; did you mean 'momentum'?",
    ),
    "hparams list": (changed("hparams.lr = 0.1", "hparams = [1]"), 6, "hparams is [1] (a list); use a table"),
    "lr outside": (TOML + "lr = 1\n", 7, "go into hparams: hparams.lr"),
    # names and import paths
    "model": (changed('"mlp"', '"mpl"'), 4, "model 'mpl' is not known; did you mean 'mlp'?"),
    "argument": (changed("features", "featurs"), 4, "has no argument 'featurs'; did you mean 'features'?"),
    "argument type": (changed("features = 3", "features = '3'"), 4, "model.features is '3' (text); use a whole number"),
    "model list": (changed(MODEL, '["mlp"]'), 4, "model is ['mlp'] (a list)"),
    "no use": (changed('use = "mlp", ', ""), 4, "no `use`"),
    "no colon": (changed(MODEL, '"torch.nn.Linear"'), 4, "has a colon: 'torch.nn:Linear'"),
    "required": (changed(MODEL, '"own_parts.py:net"'), 4, "missing a required argument: 'width'"),
    "raises": (changed(MODEL, '"own_raises.py:Net"'), 4, "raised RuntimeError: boom (own_raises.py:2)"),
    "exits": (changed(MODEL, '"own_exits:Net"'), 4, "left the program (SystemExit: 7)"),
    "syntax": (changed(MODEL, '"own_syntax.py:Net"'), 4, "raised SyntaxError"),
    "imports": (changed(MODEL, '"own_imports:Net"'), 4, "No module named 'no_such_module_anywhere'"),
    "no file": (changed(MODEL, '"../nope.py:Net"'), 4, "is not there"),
    "no module": (changed(MODEL, '"nope.nets:Net"'), 4, "no module 'nope.nets' in"),
    "no attribute": (changed(MODEL, '"own_parts.py:nett"'), 4, "has no 'nett'; did you mean 'net'?"),
    "no network": (changed(MODEL, '"own_parts.py:number"'), 4, "is int; name a class or a function"),
    "class of another kind": (changed(MODEL, '"own_parts.py:Other"'), 4, "pass an nn.Module, or a function that"),
    "no path": (changed(MODEL, '"a b:c d"'), 4, "an import path is 'module:name'"),
    "no optimizer": (changed('"SGD"', '"own_parts.py:Other"'), 5, "is not a torch.optim.Optimizer"),
    "loss": (changed("mse_loss", "mse_los"), 2, "loss 'mse_los' is not known; did you mean 'mse_loss'?"),
    "metric": (TOML + "val = 0.2\nmetrics = ['acuracy']\n", 8, "metric 'acuracy' is not known"),
    "metrics alone": (TOML + "metrics = ['mae']\n", 7, "metrics are set (mae) but val is not"),
    "schedule": (TOML + "schedule = 'cosin'\n", 7, "did you mean 'cosine'?"),
    "schedule value": (TOML + "schedule = { use = 'StepLR', step_size = 'a' }\n", 7, "use a whole number"),
    # data
    "folder": (changed('"d.npz"', '"folder.csv"'), 1, "is a folder"),
    "kind of file": (changed('"d.npz"', '"d.parquet"'), 1, "end its name in .npz"),
    "damaged": (changed('"d.npz"', '"junk.npz"'), 1, "not a .npz file"),
    "pickled": (changed('"d.npz"', '"objects.npz"'), 1, "not a .npz file of plain arrays"),
    "damaged pt": (changed('"d.npz"', '"junk.pt"'), 1, "not a .pt file"),
    "csv cell": (changed('"d.npz"', '"bad.csv"'), 1, "line 3 has 'x' in column 'a'; it must be a number"),
    "array name": (changed('"d.npz"', '{ use = "d.npz", target = "z" }'), 1, "it has no 'z'; it has x, y"),
    "data raises": (changed('"d.npz"', '"own_parts.py:fails"'), 1, "raised KeyError: 'gone' (own_parts.py:3)"),
    "data exits": (changed('"d.npz"', '"own_parts.py:leaves"'), 1, "left the program (SystemExit: 4)"),
    "share": (TOML + "val = 1.5\n", 7, "use a share of the rows between 0 and 1"),
    # grids and the like
    "billion": (
        TOML + "[grid]\n" + "".join(f"model.a{i} = [0,1,2,3,4,5,6,7,8,9]\n" for i in range(9)),
        7,
        "gives 1,000,000,000 jobs",
    ),
    "billion seeds": (TOML + "seeds = 1000000000\n", 7, "the most is 100,000"),
    "empty grid": (TOML + "[grid]\n", 7, "grid is empty"),
    "empty list": (TOML + "[grid]\nhparams.lr = []\n", 8, "grid.hparams.lr is an empty list"),
    "no list": (TOML + "[grid]\nhparams.lr = 1\n", 8, "grid.hparams.lr is 1; use a list of values"),
    "value in a list": (TOML + "[grid]\nhparams.lr = [\n 1,\n 'x',\n]\n", 10, "hparams.lr is 'x' (text)"),
    "grid key": (TOML + "[grid]\nbatchsize = [1]\n", 8, "did you mean 'batch_size'?"),
    "value twice": (TOML + "[grid]\nhparams.lr = [1, 1]\n", 8, "has 1 twice"),
    "folds": (TOML + "folds = 50\n", 7, "folds is 50; use a whole number from 2 to the number of rows, 20"),
    "folds and val": (TOML + "folds = 2\nval = 0.5\n", 7, "it has val= already, which folds would replace; remove it"),
    "jobs": (TOML + "[jobs]\na = 1\n", 7, "jobs is a table; use a list of tables: [[jobs]]"),
    "key of an entry": (TOML + "[[jobs]]\nepoch = 3\n", 8, "key 'epoch' is not known; did you mean 'epochs'?"),
    "run in an entry": (TOML + "[[jobs]]\nrun = 3\n", 8, "'run' belongs to the top of the file"),
    "no table": (TOML + "jobs = [\n 3,\n]\n", 8, "jobs has a whole number at place 1"),
    "a seed": (TOML + "seeds = [1, 'a']\n", 7, "seed is 'a'; use a whole number"),
    "names": (TOML + "[[jobs]]\nname = 'a'\n[[jobs]]\nname = 'a'\n", 10, "two jobs have the name 'a'"),
    "pattern": (TOML + "name = '{hparams.lrr}'\n", 7, "did you mean 'lr'?"),
    "stop": (TOML + "[stop]\npatiens = 3\n", 8, "stop has no 'patiens'; did you mean 'patience'?"),
    "average": (TOML + "average = 'ewma'\n", 7, "average 'ewma' is not known; use 'EMA' or 'SWA'"),
    "average key": (
        TOML + "[average]\nuse = 'EMA'\ndecai = 0.9\n",
        9,
        "average 'EMA' has no argument 'decai'",
    ),
    "average value": (TOML + "[average]\nuse = 'EMA'\ndecay = 9\n", 9, "average.decay is 9; use a number from 0 to 1"),
    "average type": (TOML + "[average]\nuse = 'SWA'\nstart_epoch = 'a'\n", 9, "average.start_epoch is 'a' (text)"),
    "classes": (TOML + "folds = { k = 2, stratify = 'label' }\n", 7, "stratify is 'label'; use 'y' for the targets"),
    "run key": (TOML + "[run]\ndevise = 'cpu'\n", 8, "run has no 'devise'; did you mean 'device'?"),
    "run value": (TOML + "[run]\nmemory = 'lots'\n", 8, "run.memory is 'lots'"),
    "run type": (TOML + "[run]\nthreads = '2'\n", 8, "run.threads is '2' (text)"),
    "run file": (TOML + "[run]\nout = 'd.npz'\n", 8, "run.out 'd.npz' is a file"),
    "policy": (TOML + "[run]\npolicy = 'fifoo'\n", 8, "policy is 'fifoo'"),
}
YAML_CASES: dict[str, tuple[str | bytes, int, str]] = {
    "open": (YAML.replace("0.1}", "0.1"), 7, "this is not YAML"),
    "tab": (YAML.replace("hparams: {lr: 0.1}", "hparams:\n\tlr: 1"), 7, "indent with spaces"),
    "twice": (YAML + "epochs: 2\n", 7, "key 'epochs' is given twice, first on line 3"),
    "list": ("- a\n", 1, "the file is a list; write keys and values"),
    "null": ("null\n", 1, "the file is empty"),
    "toml inside": (TOML, 1, 'the file is TOML: end its name in ".toml"'),
    "two": (YAML + "---\na: 1\n", 7, "another document"),
    "tag": (
        YAML + "x: !!python/object/apply:os.getcwd []\n",
        7,
        "tag '!!python/object/apply:os.getcwd' is not allowed",
    ),
    "alias": (YAML + "x: *nope\n", 7, "undefined alias 'nope'"),
    "loop": ("a: &a [*a, *a]\n", 1, "nested too deep"),
    "laughs": (LAUGHS, 1, "once aliases are written out"),
    "deep": ("a: " + "[" * 500 + "]" * 500, 1, "nested too deep"),
    "key": (YAML + "[a]: 1\n", 7, "a key must be text"),
    "word": (YAML + "shuffle: yes\n", 7, "shuffle is 'yes'; use true or false"),
    "null value": (YAML.replace("0.1", "null"), 6, "hparams.lr is null (empty); use a number"),
    "type": (YAML.replace("epochs: 1", "epochs: one"), 3, "epochs is 'one'"),
    "optimizer": (YAML + "jobs:\n  - epochs: 2\n  - optimizer: adamm\n", 9, "did you mean 'Adam'?"),
    "control": (YAML + "x: \x00\n", 7, "a character that text may not have"),
}


@pytest.mark.parametrize("name", CASES)
def test_toml(folder: Path, name: str) -> None:
    text, line, says = CASES[name]
    (only,) = told(folder, text, "a.toml")
    assert only.startswith(f"a.toml:{line}: ") and says in only


@pytest.mark.parametrize("name", YAML_CASES)
def test_yaml(folder: Path, name: str) -> None:
    text, line, says = YAML_CASES[name]
    (only,) = told(folder, text, "a.yaml")
    assert only.startswith(f"a.yaml:{line}: ") and says in only


def test_several_mistakes_are_told_at_once_in_the_order_of_the_file(folder: Path) -> None:
    text = changed('"SGD"', '"adamm"').replace('"mlp"', '"mpl"') + "epoch = 3\nclip = 1\n[run]\nout = 3\n"
    lines = told(folder, text, "a.toml")
    assert [int(re.findall(r":(\d+):", line)[0]) for line in lines] == [4, 5, 7, 8, 10]


def test_a_mistake_of_many_jobs_is_told_once(folder: Path) -> None:
    (only,) = told(folder, changed('"SGD"', '"adamm"') + "seeds = 50\n", "a.toml")
    assert only.startswith("a.toml:5: ")


def test_what_a_wrong_key_left_out_is_not_told_too(folder: Path) -> None:
    (only,) = told(folder, changed("epochs = 1", "epoch = 1"), "a.toml")
    assert "key 'epoch'" in only


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (TOML + "schedule = { use = 'MultiStepLR', milestones = 3 }\n", 7, "schedule raised TypeError"),
        (TOML + "hparams.momentum = -1.0\n", 6, "raised ValueError: Invalid momentum value: -1.0"),
    ],
)
def test_what_an_optimizer_or_a_scheduler_refuses_has_its_line(
    folder: Path, text: str, line: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "a.toml"
    file.write_text(text)
    for command in ("train", "explain"):
        assert main([command, str(file), "--device", "cpu"]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"shoal: {file}:{line}: ") and says in said and said.count("\n") == 1


def test_mistakes_seen_in_a_dry_step_have_their_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "a.toml"
    file.write_text(changed("features = 3", "features = 4") + "seeds = 3\n")
    for command in (["train"], ["explain"]):
        assert main([*command, str(file), "--device", "cpu"]) == 1
        text = capsys.readouterr().err
        if command == ["train"]:
            assert text.startswith(f"shoal: {file}:4: forward raised") and text.count("\n") == 1
            assert "(job 'seed=0' and 2 more)" in text


def test_what_is_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").mkdir()
    (folder / "jobs.json").write_text("{}")
    for target, says in {
        "x.toml": "is a folder; name a job file in it",
        ".": "is a folder; name a job file in it",
        "none.yaml": "there is no such file",
        "jobs.json": "is not a job file; the name of one ends in .toml",
        "a\0b.toml": "no such file",
        f"{'a' * 5000}.toml": "cannot be read",
    }.items():
        assert main(["train", str(folder / target) if target != "." else str(folder)]) == 1
        text = capsys.readouterr().err
        assert says in text and text.count("\n") == 1


def test_code_that_leaves_while_the_network_is_built(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "a.toml"
    file.write_text(changed(MODEL, '"own_parts.py:leaves"'))
    assert main(["train", str(file), "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "shoal: code of a job left the program (SystemExit: 4); remove that call\n"
