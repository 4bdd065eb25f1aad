"""A training step of all networks on a GPU, compiled and not, with dropout and without: milliseconds, side by side.

    python benchmarks/forms.py --data FOLDER --out benchmarks/results/forms-h200.json
    python benchmarks/forms.py gpt2 --data FOLDER

The networks are those of `sweeps.py`. Each form is captured as a CUDA graph and replayed, as in training; the fastest
of three groups of replays counts. Of the forms that are not compiled, and of those that are, the faster one of "one
stack of all members" and "each member on its own stream" counts, as it does for `shoal.train`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.units._choose_form import Form, Trials
from shoal.evidence.bench.stamp import stamp
from shoal.preparation.checks import prepare
from sweeps import SWEEPS, Sweep


def without_dropout(sweep: Sweep) -> Sweep:
    """The same networks with every dropout's probability at zero."""

    def model() -> nn.Module:
        network = sweep.model()
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return network

    return replace(sweep, model=model)


def measure(sweep: Sweep, data: Path, device: torch.device, *, streams: bool) -> dict[str, Any]:
    """Milliseconds of a step of all members in each form, and seconds of compiling."""
    trace_cache = TraceCache()
    members = prepare(sweep.make(data, 1), device)
    recipes = group(members, trace_cache)[0].recipes
    trials = Trials(recipes, trace_cache, {})
    result: dict[str, Any] = {}
    for chunk in [len(recipes), 1] if streams else [len(recipes)]:
        for compiled in (False, True):
            form = trials.confirm(Form(chunk, compiled))
            if form is not None:
                result[form.name] = {"ms": 1e3 * form.seconds, "compile_seconds": form.compile_seconds}
    return result


def fastest(forms: dict[str, Any], *, compiled: bool) -> float:
    return min(form["ms"] for name, form in forms.items() if name.endswith("compiled") == compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sweeps", nargs="*", metavar="SWEEP", help=f"of {', '.join(SWEEPS)}; none given: mlp, cnn and gpt2"
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", action="store_true", help="time each member on its own stream, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.sweeps if name not in SWEEPS]
    if unknown:
        parser.error(f"there is no sweep {unknown[0]!r}; use {', '.join(SWEEPS)}")
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device(args.device)
    rows = []
    for name in args.sweeps or ["mlp", "cnn", "gpt2"]:
        sweep = SWEEPS[name]
        dropout, none = (measure(s, args.data, device, streams=args.streams) for s in (sweep, without_dropout(sweep)))
        row = {"sweep": name, "dropout": dropout, "no_dropout": none}
        for compiled in (False, True):
            with_dropout, plain = fastest(dropout, compiled=compiled), fastest(none, compiled=compiled)
            label = "compiled" if compiled else "not compiled"
            print(f"{name}, {label}: {with_dropout:.3f} ms, without dropout {plain:.3f} ({with_dropout / plain:.2f})")
        ratio = fastest(dropout, compiled=False) / fastest(dropout, compiled=True)
        print(f"{name}: not compiled / compiled: {ratio:.2f}", {k: v["compile_seconds"] for k, v in dropout.items()})
        rows.append(row)
        if args.out is not None:
            args.out.write_text(json.dumps({"stamp": stamp(args.device, 1), "networks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
