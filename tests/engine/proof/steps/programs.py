"""Training steps put together from what people write in them, as scripts that can be read and run.

A `Program` is plain data: which pieces (of the modules beside this one), which of their texts, and the settings of the
jobs. `script` makes a Python file of it, with two to four jobs that differ in seed, learning rate and, where drawn,
in the numbers of their networks and steps.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st
from tests.engine.proof.steps import blocks, extras, gradients, losses, odd_blocks, operators, state
from tests.engine.proof.steps.piece import Piece

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
"""Picks one of a sequence; the first is the simplest."""

PARTS = {
    "block": [*blocks.BLOCKS, *operators.BLOCKS, *gradients.BLOCKS, *odd_blocks.BLOCKS],
    "input": losses.INPUTS,
    "loss": losses.LOSSES,
    "extra": [*extras.EXTRAS, *state.EXTRAS],
    "last": losses.LAST,
}
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
        return all(_piece(part, name).plain for part, name, _ in self.pieces)

    def chosen(self) -> list[tuple[str, Piece]]:
        return [(part, _piece(part, name).chosen(picks, i)) for i, (part, name, picks) in enumerate(self.pieces)]


def _piece(part: str, name: str) -> Piece:
    return next(piece for piece in PARTS[part] if piece.name == name)


def draw_program(choose: Choose[Any], plain: bool = False) -> Program:
    """One program; `choose` decides. `plain`: of pieces that do not keep a step out of a stack."""
    parts = {part: [one for one in pieces if not plain or one.plain] for part, pieces in PARTS.items()}

    def piece(part: str) -> tuple[str, str, tuple[int, ...]]:
        one = choose(parts[part])
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
def programs(draw: st.DrawFn, plain: bool = False) -> Program:
    """Programs that hypothesis draws, and makes smaller where one fails."""
    return draw_program(lambda options: draw(st.sampled_from(list(options))), plain)


HEAD = """\
import copy, functools, itertools, math, random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
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
