"""A drawn program trained in a pack and by the plain loop, and what differs."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tests.engine.proof.steps.programs import Program, script
from torch import Tensor, nn

import shoal

TOLERANCE = 1e-9
NOISE = 1e-12
"""Differences below this are rounding, whatever the tensor's size: gradients whose exact value is zero."""

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
    """Whether nothing can be said: the plain loop gives other numbers when its data are changed by a rounding error."""


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
        unstable = bool(wrong) and (_beyond_torch(alone) or _unstable(module, alone))
    tiers, statuses = tuple(a.tier for a in results), tuple(b.status for b in alone)
    return Outcome(tiers, statuses, () if unstable else tuple(wrong), unstable=unstable)


def _compared(results: Sequence[shoal.Result], alone: Sequence[shoal.Result]) -> list[str]:
    return [f"{a.name} ({a.tier}): {line}" for a, b in zip(results, alone, strict=True) for line in differences(a, b)]


def _beyond_torch(alone: Sequence[shoal.Result]) -> bool:
    """Whether torch's own optimizer cannot do what a stack can: gradients that are conjugated views."""
    return any("conjugate" in str(result.error) for result in alone)


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
