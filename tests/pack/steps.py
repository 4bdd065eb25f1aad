"""Training steps put together from what people write in them, as scripts that can be read and run.

A `Program` is plain data: which pieces (`step_blocks`, `step_losses`), which of their texts, and the settings of the
jobs. `script` makes a Python file of it, with two to four jobs that differ in seed, learning rate and, where drawn,
in the numbers of their networks and steps. `check` trains them together and holds each to the plain loop.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from hypothesis import strategies as st
from tests.pack import step_blocks, step_losses, step_odd_blocks
from tests.pack.step_piece import Piece
from torch import Tensor, nn

import shoal

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
"""Picks one of a sequence; the first is the simplest."""

PARTS = {
    "block": [*step_blocks.BLOCKS, *step_odd_blocks.BLOCKS],
    "input": step_losses.INPUTS,
    "loss": step_losses.LOSSES,
    "extra": step_losses.EXTRAS,
    "last": step_losses.LAST,
}
PLAIN_BLOCKS = {piece.name for piece in step_blocks.BLOCKS}
NUMBERS: dict[str, tuple[float, ...]] = {
    "p": (0.1, 0.3, 0.45),
    "w": (0.05, 0.2, 0.7),
    "t": (0.7, 1.3, 2.0),
    "c": (0.1, 0.4, 0.9),
    "k": (1, 2, 3),
    "a": (0.2, 0.2, 0.2),
}
"""Numbers that a member's network and step may read from `q`: three values each."""
OPTIMIZERS = [
    ("SGD", ""),
    ("SGD", "momentum=0.9"),
    ("Adam", "eps=1e-3"),
    ("AdamW", "eps=1e-3, weight_decay=0.1"),
    ("RMSprop", "eps=1e-2"),
    ("Adagrad", "eps=1e-3"),
    ("NAdam", "eps=1e-3"),
]
"""Adam and its like divide by the size of a gradient; with a small eps they make steps of rounding errors."""
SCHEDULES = [
    "",
    "lambda t: 1 / (1 + t)",
    "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)",
    "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9)",
]
TOLERANCE = 1e-9
NOISE = 1e-12
"""Differences below this are rounding, whatever the tensor's size: gradients whose exact value is zero."""


@dataclass(frozen=True)
class Program:
    """A training step and its jobs as plain data."""

    pieces: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Part, name of the piece, and the text at each of its places."""
    members: int = 2
    differ: bool = False
    """Whether the members' numbers differ."""
    batch_size: int = 5
    dicts: bool = False
    """Whether a batch is a dict."""
    val: bool = False
    metrics: bool = False
    optimizer: int = 0
    schedule: int = 0
    every: str = "step"
    accumulate: int = 1
    clip_norm: float | None = None
    keep: str = "last"
    first: Literal["pack", "solo"] = "pack"
    """Which runs first, in the same process."""

    @property
    def plain(self) -> bool:
        """Whether the jobs must be stacked."""
        return all(name in PLAIN_BLOCKS or _piece(part, name).plain for part, name, _ in self.pieces)

    def chosen(self) -> list[tuple[str, Piece]]:
        return [(part, _piece(part, name).chosen(picks, i)) for i, (part, name, picks) in enumerate(self.pieces)]


def _piece(part: str, name: str) -> Piece:
    return next(piece for piece in PARTS[part] if piece.name == name)


def draw_program(choose: Choose[Any]) -> Program:
    """One program; `choose` decides."""

    def piece(part: str) -> tuple[str, str, tuple[int, ...]]:
        one = choose(PARTS[part])
        return part, one.name, tuple(choose(range(n)) for n in one.choices)

    pieces = [piece("loss")]
    for part, counts in (
        ("block", (0, 1, 1, 2, 3)),
        ("input", (0, 0, 1)),
        ("extra", (0, 1, 1, 2)),
        ("last", (0, 0, 1)),
    ):
        pieces += [piece(part) for _ in range(choose(counts))]
    val = choose((False, True))
    needs = {piece.job["anneal"] for part, piece in Program(tuple(pieces)).chosen() if piece.job}
    return Program(
        tuple(pieces),
        members=choose((2, 2, 3, 4)),
        differ=choose((False, True)),
        batch_size=choose((5, 7, 8)),
        dicts=choose((False, True)),
        val=val,
        metrics=val and choose((False, True)),
        optimizer=choose(range(len(OPTIMIZERS))),
        schedule=0 if "schedule" in needs else choose((0, *range(len(SCHEDULES)))),
        every=choose(("step", "epoch")),
        accumulate=choose((1, 1, 1, 2)),
        clip_norm=choose((None, None, 0.5)),
        keep=choose(("last", "best")) if val else "last",
        first=choose(("pack", "solo")),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that hypothesis draws, and makes smaller where one fails."""
    return draw_program(lambda options: draw(st.sampled_from(list(options))))


HEAD = """\
import copy, functools, itertools, math, random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import shoal

G = torch.Generator().manual_seed(7)
X, Y = torch.randn(25, 6, dtype=torch.float64, generator=G), torch.randint(0, 3, (25,), generator=G)
"""


def script(program: Program) -> str:
    """The program as a Python file."""
    parts = program.chosen()
    step = _step(program, parts)
    text = [HEAD, *(piece.top + "\n\n" for _, piece in parts if piece.top), _network(parts), step]
    used = [name for name in NUMBERS if f"q['{name}']" in "".join(text) or f"['{name}']" in "".join(text)]
    numbers = [{n: NUMBERS[n][i % 3 if program.differ else 1] for n in used} for i in range(program.members)]
    text.insert(1, f"Q = {numbers}\n\n")
    return "\n".join([*text, _jobs(program, parts)])


def _indent(text: str, depth: int) -> str:
    return textwrap.indent(text.rstrip("\n"), "    " * depth) + "\n" if text else ""


def _network(parts: list[tuple[str, Piece]]) -> str:
    init = "".join(_indent(piece.init, 2) for _, piece in parts)
    forward = "".join(_indent(piece.forward, 2) for _, piece in parts)
    return (
        "class Net(nn.Module):\n    def __init__(self, q):\n        super().__init__()\n"
        "        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)\n"
        f"{init}        self.double()\n\n"
        "    def features(self, x):\n        h = torch.tanh(self.first(x))\n"
        f"{forward}        return h\n\n"
        "    def forward(self, x):\n        return self.head(self.features(x))\n"
    )


def _step(program: Program, parts: list[tuple[str, Piece]]) -> str:
    state = "".join(_indent(piece.state, 1) for _, piece in parts)
    before = "".join(_indent(piece.before, 2) for _, piece in parts)
    loss = "".join(_indent(piece.loss, 2) for _, piece in parts)
    after = "".join(_indent(piece.after, 2) for _, piece in parts)
    outer = sorted(set(re.findall(r"nonlocal (\w+)\n", before + loss + after)))
    before, loss, after = (re.sub(r" *nonlocal \w+\n", "", text) for text in (before, loss, after))
    reads_h = re.search(r"\bh\b", loss + after) is not None
    call = "h = model.features(x)\n        out = model.head(h)" if reads_h else "out = model(x)"
    batch = "batch['x'], batch['y']" if program.dicts and not program.metrics else "batch"
    last = "" if "return" in after else "        return loss\n"
    return (
        f"\ndef make_step(q):\n{state}"
        "    def step(model, batch):\n"
        + (f"        nonlocal {', '.join(outer)}\n" if outer else "")
        + f"        x, y = {batch}\n{before}        {call}\n{loss}{after}{last}\n    return step\n"
    )


def _jobs(program: Program, parts: list[tuple[str, Piece]]) -> str:
    anneal = next((piece.job["anneal"] for _, piece in parts if piece.job), "")
    rows = "X[{0}], Y[{0}]"
    form = "{{'x': X[{0}], 'y': Y[{0}]}}" if program.dicts and not program.metrics else f"({rows})"
    optimizer, hparams = OPTIMIZERS[program.optimizer]
    fields = {
        "model": "functools.partial(Net, q)",
        "data": form.format(":18"),
        "val": form.format("18:") if program.val else "",
        "step": "make_step(q)",
        "metrics": "{'right': lambda out, y: (out.argmax(1) == y).double().mean()}" if program.metrics else "",
        "optimizer": f"torch.optim.{optimizer}",
        "hparams": f"dict(lr=lr, {hparams})" if hparams else "{'lr': lr}",
        "schedule": "functools.partial(schedule, q)" if anneal == "schedule" else SCHEDULES[program.schedule],
        "schedule_every": repr(program.every) if program.every != "step" else "",
        "accumulate": str(program.accumulate) if program.accumulate > 1 else "",
        "clip_norm": str(program.clip_norm) if program.clip_norm is not None else "",
        "keep": repr(program.keep) if program.keep != "last" else "",
        "batch_size": str(program.batch_size),
        "epochs": "2",
        "seed": "i",
        "name": "str(i)",
    }
    if not fields["schedule"]:
        del fields["schedule_every"]
    settings = "".join(f"            {name}={value},\n" for name, value in fields.items() if value)
    batches = -(-18 // program.batch_size)
    extra = {
        "": "",
        "callback": (
            "def anneal(q, epoch):\n    q['a'] = 0.2 + 0.3 * epoch\n\n\n"
            "def annealed(step, q, calls=0):\n"
            '    """The step as it is with the callback, for the plain loop: `anneal` after each epoch."""\n\n'
            "    def run(model, batch):\n        nonlocal calls\n        if torch.is_grad_enabled():\n"
            f"            anneal(q, calls // {batches})\n            calls += 1\n        return step(model, batch)\n\n"
            "    return run\n\n\n"
        ),
        "schedule": "def schedule(q, t):\n    q['a'] = 0.2 + 0.1 * t\n    return 1.0\n\n\n",
    }[anneal]
    with_callback = anneal == "callback"
    call = ", callbacks=[lambda view: anneal(qs[view.index], view.epoch)]" if with_callback else ""
    wrap = "    for job, q in zip(jobs, qs):\n        job.step = annealed(job.step, q)\n" if with_callback else ""
    rates = [(0.1, 0.03, 0.05, 0.02)[i] for i in range(program.members)]
    return (
        f"\n{extra}def make_jobs():\n    qs = copy.deepcopy(Q)\n    torch.manual_seed(5)\n    jobs = [\n"
        f"        shoal.Job(\n{settings}        )\n"
        f"        for i, (q, lr) in enumerate(zip(qs, {rates}))\n    ]\n    return jobs, qs\n\n\n"
        "def train():\n    jobs, qs = make_jobs()\n"
        f'    return shoal.train(jobs, device="cpu", threads=1{call})\n\n\n'
        f"def reference():\n    jobs, qs = make_jobs()\n{wrap}    return [shoal.solo(job) for job in jobs]\n"
    )


MAIN = """

if __name__ == "__main__":
    for a, b in zip(train(), reference()):
        far = {n: float((v - a.model.state_dict()[n]).abs().max()) for n, v in b.model.state_dict().items()}
        print(a.name, a.tier, a.status, b.status, max(far.items(), key=lambda item: item[1]), a.error, b.error)
"""


def load(text: str) -> ModuleType:
    """The script as a module, from a file: TorchScript reads its functions' source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn_step.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("drawn_step", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Outcome:
    """What came of one program."""

    tiers: tuple[str, ...]
    statuses: tuple[str, ...]
    wrong: tuple[str, ...]
    """What differs from the plain loop, in words; empty: nothing."""
    refused: str = ""
    """Why the whole call was refused, by an error of one line."""
    unstable: bool = False
    """Whether the plain loop itself gives other numbers when its data are changed by one rounding error."""


def run(program: Program) -> Outcome:
    """Train the program's jobs together and by the plain loop, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load(script(program))
        alone = module.reference() if program.first == "solo" else []
        try:
            results = module.train()
        except shoal.JobError as error:
            alone = alone or module.reference()
            return Outcome((), tuple(b.status for b in alone), (), str(error))
        alone = alone or module.reference()
        wrong = _compared(results, alone)
        unstable = bool(wrong) and _unstable(module, alone)
    tiers, statuses = tuple(a.tier for a in results), tuple(b.status for b in alone)
    return Outcome(tiers, statuses, () if unstable else tuple(wrong), unstable=unstable)


def _compared(results: Sequence[shoal.Result], alone: Sequence[shoal.Result]) -> list[str]:
    return [f"{a.name} ({a.tier}): {line}" for a, b in zip(results, alone, strict=True) for line in differences(a, b)]


def _unstable(module: ModuleType, alone: Sequence[shoal.Result]) -> bool:
    """Whether rounding decides: a tie between two rows, a value on the edge of a mask."""
    data = module.X.clone()
    try:
        for seed in range(3):
            noise = torch.randn(data.shape, dtype=data.dtype, generator=torch.Generator().manual_seed(seed))
            module.X.copy_(data * (1 + 2e-15 * noise))
            if _compared(module.reference(), alone):
                return True
    finally:
        module.X.copy_(data)
    return False


def check(program: Program) -> Outcome:
    """Raise AssertionError, with the script, where a member is not what the plain loop makes of its job."""
    try:
        outcome = run(program)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n\n{script(program)}{MAIN}") from error
    expected = set(outcome.statuses) == {"failed"} if outcome.refused else not outcome.wrong
    lines = "\n".join(outcome.wrong) or outcome.refused
    assert expected, f"{lines}\n\n{program}\n\n{script(program)}{MAIN}"
    return outcome


def differences(a: shoal.Result, b: shoal.Result) -> list[str]:
    """How a result differs from that of the plain loop: one line each."""
    if (a.status, a.steps) != (b.status, b.steps):
        return [f"{a.status} after {a.steps} steps ({a.error}), alone {b.status} after {b.steps} ({b.error})"]
    if len(a.history) != len(b.history):
        return [f"{len(a.history)} rows of history, alone {len(b.history)}"]
    mine, theirs = _values(a), _values(b)
    if mine.keys() != theirs.keys():
        return [f"only one of them has {sorted(mine.keys() ^ theirs.keys())}"]
    lines = [f"{name} is off by {far:.1e}" for name in theirs if (far := _apart(mine[name], theirs[name])) > TOLERANCE]
    return lines


def _values(result: shoal.Result) -> dict[str, Any]:
    """Everything that is compared, by name."""
    model = result.model
    values: dict[str, Any] = {f"history[{i}].{k}": v for i, row in enumerate(result.history) for k, v in row.items()}
    values = {name: value for name, value in values.items() if not name.endswith("seconds")}
    values |= dict(model.state_dict()) | dict(model.named_buffers())
    values |= {f"{name}.requires_grad": float(p.requires_grad) for name, p in model.named_parameters()}
    for where, module in model.named_modules():
        values |= {f"{where}.{k}": v for k, v in vars(module).items() if _plain(v)}
    for index, entry in result.optimizer_state["state"].items():
        values |= {f"optimizer[{index}].{key}": v for key, v in entry.items() if isinstance(v, Tensor | float | int)}
    return values


def _plain(value: Any) -> bool:
    return isinstance(value, int | float) or (type(value) is Tensor and not isinstance(value, nn.Parameter))


def _apart(x: Any, y: Any) -> float:
    """max|x-y| / max|y|, or 0 where that is rounding; infinite where they are not of one kind."""
    if isinstance(x, Tensor) != isinstance(y, Tensor):
        return math.inf
    if not isinstance(y, Tensor):
        return 0.0 if x == y or (x != x and y != y) or abs(x - y) < NOISE else abs(x - y) / max(abs(y), 1e-300)
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    x, y = x.detach().nan_to_num(9e99), y.detach().nan_to_num(9e99)
    far = float((x - y).abs().max()) if x.numel() and x.is_floating_point() else float((x != y).any())
    if x.is_complex():
        far = float((x - y).abs().max())
    return (
        0.0
        if far < NOISE
        else far / max(float(y.abs().max()) if y.dtype.is_floating_point or y.is_complex() else 1.0, 1e-300)
    )
