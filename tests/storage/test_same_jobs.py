"""A run folder knows its jobs: code, closures, attributes, initial weights count; what changes by itself does not."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.storage.run_folders import built, job, warnings_of
from torch import Tensor, nn

import shoal
from shoal.errors import OutError
from shoal.preparation.checks import prepare
from shoal.storage import _describer, atomic
from shoal.storage.jobtable import JobTable
from shoal.storage.run_folder import RunFolder

WEIGHT = 1.0
ARGS = argparse.Namespace(weight=1.0, verbose=False)


def claimed(path: Path, **changes: Any) -> bool:
    with RunFolder(path) as folder:
        return folder.claim(built(1, **changes))


def refusal(path: Path, before: dict[str, Any], after: dict[str, Any]) -> str:
    """What a folder with the one job says to the other."""
    assert claimed(path, **before) is False
    assert claimed(path, **before) is True
    with pytest.raises(OutError) as caught:
        claimed(path, **after)
    assert "\n" not in str(caught.value) and "holds other jobs" in str(caught.value)
    return str(caught.value)


def weighted(w: float) -> Callable[[Any, Any], Tensor]:
    return lambda out, y: w * F.cross_entropy(out, y)


def holding(held: Any) -> Callable[[Any, Any], Tensor]:
    return lambda out, y: F.cross_entropy(out, y) if held else out.mean()


def outer(w: float) -> Callable[[Any, Any], Tensor]:
    return weighted(w)


def defaults(w: float) -> Callable[..., Any]:
    def loss(out: Tensor, y: Tensor, k: float = w, *, scale: float = w) -> Tensor:
        return k * scale * F.cross_entropy(out, y)

    return loss


class Loss:
    """A callable of a class."""

    def __init__(self, w: float) -> None:
        self.w, self.seen = w, 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.scaled(out) + F.cross_entropy(out, y)

    def scaled(self, out: Tensor) -> Tensor:
        return self.w * out.square().mean()


class OtherLoss:
    def __init__(self, w: float) -> None:
        self.w, self.seen = w, 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.scaled(out) + F.cross_entropy(out, y)

    def scaled(self, out: Tensor) -> Tensor:
        return self.w * out.abs().mean()


OtherLoss.__qualname__ = "Loss"


def reads_global(out: Tensor, y: Tensor) -> Tensor:
    return WEIGHT * F.cross_entropy(out, y)


def calls_reader(out: Tensor, y: Tensor) -> Tensor:
    return reads_global(out, y)


def reads_args(out: Tensor, y: Tensor) -> Tensor:
    return ARGS.weight * F.cross_entropy(out, y)


def net(p: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 3))


class Flagged(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.inner, self.residual = nn.Linear(4, 3), residual

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def report(self) -> str:
        return "one"


class Doubled(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.inner, self.residual = nn.Linear(4, 3), residual

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


Doubled.__qualname__ = "Flagged"


class Scaled(torch.optim.SGD):
    factor = 1.0

    def step(self, closure: Any = None) -> Any:
        self.factor *= 0.5
        return super().step(closure)


class Rescaled(torch.optim.SGD):
    factor = 1.0

    def step(self, closure: Any = None) -> Any:
        self.factor *= 0.9
        return super().step(closure)


Rescaled.__qualname__ = "Scaled"
X, Y = torch.zeros(8, 4), torch.arange(8) % 3
StepLR = torch.optim.lr_scheduler.StepLR

OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a schedule's constant": (
        {"schedule": lambda step: 0.5**step}, {"schedule": lambda step: 0.9**step},
        "job 'm0': the code of schedule differs",
    ),
    "a scheduler's": (
        {"schedule": lambda o: StepLR(o, 2)}, {"schedule": lambda o: StepLR(o, 3)},
        "job 'm0': the code of schedule differs",
    ),
    "a dropout rate": (
        {"model": lambda: net(0.1)}, {"model": lambda: net(0.5)},
        "job 'm0': model.1.p is 0.1 there and 0.5 here",
    ),
    "a closure value": (
        {"loss": weighted(1.0)}, {"loss": weighted(9.0)},
        "job 'm0': w in the closure of loss is 1.0 there and 9.0 here",
    ),
    "a tensor in a closure": (
        {"loss": weighted(torch.ones(1)[0])}, {"loss": weighted(torch.zeros(1)[0])},  # type: ignore[arg-type]
        "job 'm0': w in the closure of loss is Tensor",
    ),
    "an argument of a partial": (
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.1)},
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.2)},
        "loss.keywords['label_smoothing'] is 0.1 there and 0.2 here",
    ),
    "defaults": ({"loss": defaults(1.0)}, {"loss": defaults(2.0)}, "loss.__defaults__ is (1.0) there and (2.0) here"),
    "an attribute of a callable": ({"loss": Loss(1.0)}, {"loss": Loss(2.0)}, "loss.w is 1.0 there and 2.0 here"),
    "a method that a callable calls": (
        {"loss": Loss(1.0)}, {"loss": OtherLoss(1.0)}, "Loss.scaled differs",
    ),
    "an option of another class": (
        {"loss": holding(shoal.EarlyStop(patience=1))}, {"loss": holding(shoal.EarlyStop(patience=2))},
        "held.patience in the closure of loss is 1 there and 2 here",
    ),
    "one of many values": (
        {"loss": holding({i: i for i in range(100)})}, {"loss": holding({i: min(i, 98) for i in range(100)})},
        "held in the closure of loss is 100 values",
    ),
    "a loss of torch's": (
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)},
        "loss.label_smoothing is 0.1 there and 0.2 here",
    ),
    "a loss's class weights": (
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]))},
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 4]))},
        "loss.weight is Tensor [3] float32",
    ),
    "a flag of a module": (
        {"model": lambda: Flagged(True)}, {"model": lambda: Flagged(False)},
        "job 'm0': model.residual is True there and False here",
    ),
    "forward": (
        {"model": lambda: Flagged(True)}, {"model": lambda: Doubled(True)}, "Flagged.forward differs",
    ),
    "weights": (
        {"model": lambda: net()}, {"model": lambda: torch.nn.init.normal_((m := net())[0].weight) is None or m},
        "job 'm0' has other initial weights (was the seed or the factory changed?)",
    ),
    "one weight a little": (
        {"model": lambda: net()}, {"model": lambda: nudged(net(), 1e-3)}, "job 'm0' has other initial weights",
    ),
    "params": (
        {"params": lambda m: [{"params": m.parameters(), "lr": 0.1}]},
        {"params": lambda m: [{"params": m.parameters(), "lr": 0.2}]},
        "job 'm0': the code of params differs",
    ),
    "a metric": (
        {"val": (X, Y), "metrics": {"acc": lambda o, y: (o.argmax(1) == y).float().mean()}},
        {"val": (X, Y), "metrics": {"acc": lambda o, y: (o.argmax(1) != y).float().mean()}},
        "job 'm0': the code of metric 'acc' differs",
    ),
    "a step": (
        {"loss": None, "step": lambda m, b: F.cross_entropy(m(b[0]), b[1])},
        {"loss": None, "step": lambda m, b: F.cross_entropy(m(b[0]) * 2, b[1])},
        "job 'm0': the code of step differs",
    ),
    "an optimizer's method": ({"optimizer": Scaled}, {"optimizer": Rescaled}, "Scaled.step differs"),
    "a hook": (
        {"model": lambda: hooked(1.0)}, {"model": lambda: hooked(2.0)},
        "k in the closure of model._forward_hooks[#0] is 1.0 there and 2.0 here",
    ),
}  # fmt: skip


def nudged(model: nn.Module, by: float) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[1, 2] += by
    return model


def hooked(k: float) -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda module, args, out: out * k)
    return model


@pytest.mark.parametrize("what", OTHERS)
def test_other_code_or_values_are_other_jobs(tmp_path: Path, what: str) -> None:
    before, after, said = OTHERS[what]
    assert said in refusal(tmp_path, before, after)


def test_globals_and_functions_that_are_called_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not claimed(tmp_path, loss=calls_reader)
    monkeypatch.setattr(sys.modules[__name__], "WEIGHT", 3.0)
    with pytest.raises(OutError, match=r"WEIGHT of module \S+ is 1\.0 there and 3\.0 here"):
        claimed(tmp_path, loss=calls_reader)


def test_options_that_no_code_reads_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not claimed(tmp_path, loss=reads_args)
    monkeypatch.setattr(ARGS, "verbose", True)
    assert claimed(tmp_path, loss=reads_args)
    monkeypatch.setattr(ARGS, "weight", 2.0)
    with pytest.raises(OutError, match=r"ARGS\.weight of module \S+ is 1\.0 there and 2\.0 here"):
        claimed(tmp_path, loss=reads_args)


def test_methods_that_training_does_not_call_do_not_count(tmp_path: Path) -> None:
    assert not claimed(tmp_path, model=lambda: Flagged(True))
    table = JobTable.read(atomic.read_sealed(tmp_path / "jobs.json"))
    texts = table.code(table.jobs[0])[f"class {__name__}.Flagged"]
    assert f"{__name__}.Flagged.forward" in texts and f"{__name__}.Flagged.report" not in texts


def test_what_has_no_stable_value_counts_by_its_type(tmp_path: Path) -> None:
    def loss(made: Any) -> Callable[[Any, Any], Tensor]:
        return lambda out, y: made and F.cross_entropy(out, y)

    class Bag:
        def __init__(self) -> None:
            self.lock, self.at = threading.Lock(), iter([time.time()])

    made: list[Callable[[], Any]] = [
        object, threading.Lock, lambda: np.random.default_rng(), lambda: open(tmp_path / "file", "a"),  # noqa: SIM115
        lambda: iter([1, time.time()]), Bag, lambda: {1, "a", None, (2, "b")},
    ]  # fmt: skip
    for place, make in enumerate(made):
        things = make(), make()
        assert not claimed(tmp_path / str(place), loss=loss(things[0]))
        assert claimed(tmp_path / str(place), loss=loss(things[1]))
        for thing in things:
            getattr(thing, "close", lambda: None)()
    assert not claimed(tmp_path / "seeded", loss=loss(np.random.default_rng(1)))
    with pytest.raises(OutError, match=r"of seed 1 there and .* of seed 2 here"):
        claimed(tmp_path / "seeded", loss=loss(np.random.default_rng(2)))


SOURCE = '''
import functools, torch, torch.nn.functional as F
from torch import nn

K = {"b": 1, "a": frozenset({"x", "y", "zz", "ooo"})}

def scale(out):
    """Of the outputs."""
    # a comment
    return 1.0 if out.shape[0] in {1, 2, 3} else 2.0

@functools.lru_cache
def cached(n: int) -> int:
    return n

class Net(nn.Module):
    """A network."""

    names = {"p", "q", "rr"}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.kinds = {"one", "two", "three"}

    def forward(self, x):
        for name in self.names: pass
        return self.inner(x) * len(self.kinds) * cached(3)

def loss(out, y, *, w=0.5, k=object()):
    return w * scale(out) * F.cross_entropy(out, y) + 0 * len(K)

@torch.no_grad()
def metric(out, y):
    return (out.argmax(1) == y).float().mean()

schedules = [lambda step: 0.5 ** step, lambda step: 0.9 ** step]
'''

SHOW = """
import json, sys, torch
sys.path[:0] = [sys.argv[1]]
import written
from shoal.preparation.checks import prepare
from shoal.storage.jobtable import JobTable
import shoal
x, y = torch.zeros(8, 4), torch.arange(8) % 3
job = shoal.Job(model=written.Net, data=(x, y), val=(x, y), loss=written.loss, metrics={"m": written.metric}, epochs=1,
                schedule=written.schedules[1], name="m0", hparams={"lr": 0.1})
print(json.dumps(JobTable.of(prepare([job], torch.device("cpu"))).to_json()))
"""


def test_a_job_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With other addresses, another order of sets, and no bytecode on disk."""
    (tmp_path / "written.py").write_text(SOURCE)
    tables = []
    for seed in ("1", "2"):
        command = [sys.executable, "-B", "-c", SHOW, str(tmp_path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        tables.append(json.loads(done.stdout))
    assert tables[0] == tables[1]


def loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def changes(module: ModuleType) -> dict[str, Any]:
    return {
        "model": module.Net, "loss": module.loss, "schedule": module.schedules[1], "val": (X, Y),
        "metrics": {"m": module.metric},
    }  # fmt: skip


def test_comments_docstrings_and_lines_make_no_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not claimed(out, **changes(loaded(tmp_path / "a.py", SOURCE)))
    text = SOURCE.replace("# a comment", "# another one\n\n").replace(
        '"""Of the outputs."""', '"""Of all\n    outputs."""'
    )
    text = "\n\n# more\n" + text.replace("w * scale(out)", "w  *  scale( out )").replace(
        "pass\n", "\n            pass\n"
    )
    text = (
        text.replace('    """A network."""\n', "").replace("-> int", "").replace("0.5 ** step, ", "0.5 ** step,\n    ")
    )
    assert claimed(out, **changes(loaded(tmp_path / "b.py", text)))
    for before, after, said in (
        ("0.9 **", "0.8 **", "the code of schedule differs"),
        ("{1, 2, 3}", "{1, 2, 4}", "the code of scale of module written differs"),
        ("w=0.5", "w=0.25", r"loss.__kwdefaults__\['w'\] is 0.5 there and 0.25 here"),
        ("return n", "return -n", "the code of cached.__wrapped__ of module written differs"),
        ('"q"', '"qq"', "written.Net.names is"),
        ("argmax(1) ==", "argmax(1) !=", "metric 'm'.* differs"),
        ('"b": 1', '"b": 2', r"K\['b'\] of module written is 1 there and 2 here"),
    ):
        with pytest.raises(OutError, match=said):
            claimed(out, **changes(loaded(tmp_path / "c.py", text.replace(before, after))))


def test_code_cannot_be_compared_with_that_of_another_python(tmp_path: Path) -> None:
    """Its bytecode differs, which is reported; values count as ever."""
    out, module = tmp_path / "out", loaded(tmp_path / "a.py", SOURCE)
    assert not claimed(out, **changes(module))
    content = atomic.read_sealed(out / "jobs.json")
    for texts in content["parts"].values():
        for place, text in texts.items():
            if str(text).startswith("code "):
                texts[place] = "code " + "0" * 16
    content["made_by"] |= {"bytecode": "0000", "python": "3.99"}
    atomic.write_sealed(out / "jobs.json", content)
    (line,) = warnings_of(lambda: claimed(out, **changes(module)))
    assert "written by Python 3.99" in line and "code cannot be compared" in line
    with pytest.raises(OutError, match=r"'w'\] is 0\.5 there and 0\.25 here"):
        claimed(out, **changes(loaded(tmp_path / "b.py", SOURCE.replace("w=0.5", "w=0.25"))))


def test_weights_that_differ_by_rounding_are_told_and_taken(tmp_path: Path) -> None:
    assert not claimed(tmp_path, model=net)
    (line,) = warnings_of(lambda: claimed(tmp_path, model=lambda: nudged(net(), 1e-8)))
    assert "initial weights of m0 differ in their last digits" in line
    for by in (1e-3, 0.1):
        with pytest.raises(OutError, match="other initial weights"):
            claimed(tmp_path, model=lambda by=by: nudged(net(), by))


def test_integer_buffers_count_exactly(tmp_path: Path) -> None:
    def counted(k: int) -> nn.Module:
        model = net()
        model.register_buffer("table", torch.arange(100_000) + (torch.arange(100_000) == 70_000) * k, persistent=False)
        return model

    assert not claimed(tmp_path, model=lambda: counted(0))
    with pytest.raises(OutError, match="other initial weights"):
        claimed(tmp_path, model=lambda: counted(1))


def test_a_factory_that_the_seed_does_not_set_is_told_and_taken(tmp_path: Path) -> None:
    source = np.random.default_rng()

    def drawn() -> nn.Module:
        return nudged(net(), float(source.normal()))

    assert not claimed(tmp_path, model=drawn)
    (line,) = warnings_of(lambda: claimed(tmp_path, model=drawn))
    assert "differ each time the factory is called" in line


def test_another_version_of_a_library_is_told(tmp_path: Path) -> None:
    assert not claimed(tmp_path)
    content = atomic.read_sealed(tmp_path / "jobs.json")
    here, content["made_by"]["torch"] = content["made_by"]["torch"], "1.0"
    atomic.write_sealed(tmp_path / "jobs.json", content)
    (line,) = warnings_of(lambda: claimed(tmp_path))
    assert f"torch 1.0 there and {here} here" in line


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_folder_of_another_format_names_the_version_that_wrote_it(tmp_path: Path, version: int) -> None:
    assert not claimed(tmp_path)
    content = atomic.read_sealed(tmp_path / "jobs.json")
    atomic.write_sealed(tmp_path / "jobs.json", content | {"version": version, "made_by": {"shoal": "9.1"}})
    with pytest.raises(OutError, match=rf"another version of Shoal \(9\.1, format {version}; this one reads 5\)"):
        claimed(tmp_path)


def test_what_jobs_have_in_common_is_written_once(tmp_path: Path) -> None:
    jobs = [job(name=f"m{i}", seed=i, model=lambda i=i: net(0.01 * i)) for i in range(40)]
    with RunFolder(tmp_path) as folder:
        folder.claim(prepare(jobs, torch.device("cpu")))
    parts = atomic.read_sealed(tmp_path / "jobs.json")["parts"]
    assert sum("model.1.p" in texts for texts in parts.values()) == 40
    assert sum(any(place.endswith(".in_features") for place in texts) for texts in parts.values()) == 2


def test_yesterdays_result_is_not_given_for_another_job(tmp_path: Path) -> None:
    def one(p: float) -> list[shoal.Job]:
        return [job(model=lambda: net(p), epochs=1, name="a")]

    (first,) = shoal.train(one(0.1), device="cpu", out=tmp_path)
    (again,) = shoal.train(one(0.1), device="cpu", out=tmp_path)
    assert torch.equal(first.model[0].weight, again.model[0].weight)  # type: ignore[index]
    with pytest.raises(OutError, match=r"model\.1\.p is 0\.1 there and 0\.5 here"):
        shoal.train(one(0.5), device="cpu", out=tmp_path)


def test_attributes_of_a_librarys_object_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of them: configurations of language models have a hundred."""
    settings = torch.utils.data.SequentialSampler([1])
    for index in range(100):
        setattr(settings, f"setting_{index}", index)
    looked, is_setting = list[Any](), _describer._is_setting

    def counted(value: Any, depth: int = 0) -> bool:
        looked.append(value)
        return is_setting(value, depth)

    monkeypatch.setattr(_describer, "_is_setting", counted)
    assert not claimed(tmp_path, loss=holding(settings))
    assert 100 < len(looked) < 1000
