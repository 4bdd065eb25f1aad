"""LoRA adapters over one frozen network of GPT-2's size: seconds and memory, against one adapter after another.

    python benchmarks/lora.py --out benchmarks/results/lora-h200.json

16 adapters of rank 8, batches of 4 x 128 tokens, bf16. The frozen base is kept once for all. Each way runs in a new
process: Shoal from the call to the results, and a plain loop (eager, data on the device, fused AdamW, after a warm-up)
over two of the adapters, scaled. Memory of the loop is that of one adapter with its base.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shoal
from shoal.evidence.bench.stamp import stamp

ROWS, TOKENS, RANK, WORDS = 4, 128, 8, 50_257


def base_network() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=TOKENS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    network: nn.Module = transformers.GPT2LMHeadModel(config)
    return network.requires_grad_(False)


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1).float(), labels.flatten())


def make_jobs(members: int, steps: int) -> tuple[list[shoal.Job], int]:
    """Return the jobs, which differ in learning rate and seed, and the bytes of the base."""
    base = base_network()
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, fan_in_fan_out=True, target_modules=["c_attn"])
    drawn = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (ROWS * steps, TOKENS + 1), generator=drawn)
    jobs = [
        shoal.Job(
            model=lambda: peft.get_peft_model(copy.deepcopy(base), adapter),
            data=(text[:, :-1].contiguous(), text[:, 1:].contiguous()), step=language_loss,
            optimizer=torch.optim.AdamW, hparams={"lr": 1e-4 * (1 + i)}, batch_size=ROWS, epochs=1, seed=i,
            precision="bf16", name=f"adapter {i}",
        )
        for i in range(members)
    ]  # fmt: skip
    return jobs, sum(param.nbytes for param in base.parameters())


def run_loop(jobs: list[shoal.Job], device: torch.device) -> dict[str, Any]:
    """Train two of the adapters, one after the other."""
    x, y = (tensor.to(device) for tensor in jobs[0].data)
    train_alone(jobs[0], x[: 10 * ROWS], y, device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    for job in jobs[:2]:
        train_alone(job, x, y, device)
    seconds = (time.perf_counter() - start) / 2 * len(jobs)
    return {"seconds": seconds, "bytes_of_one": torch.cuda.max_memory_allocated(device)}


def train_alone(job: shoal.Job, x: Tensor, y: Tensor, device: torch.device) -> None:
    torch.manual_seed(job.seed)
    model = job.model().to(device).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True, **job.hparams)
    for first in range(0, len(x), ROWS):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = language_loss(model, (x[first : first + ROWS], y[first : first + ROWS]))
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize(device)


def run_shoal(jobs: list[shoal.Job], device: torch.device) -> dict[str, Any]:
    """Train all adapters as one run."""
    start = time.perf_counter()
    results = shoal.train(jobs, device=str(device), progress=False)
    seconds = time.perf_counter() - start
    assert all(result.status == "done" for result in results) and results.plan is not None
    parts = results.plan.parts
    tiers = ", ".join(f"{len(part.members)} {part.tier}" for part in parts)
    return {
        "seconds": seconds,
        "tier": tiers,
        "bytes": max((part.measured or {}).get("memory_bytes", 0) for part in parts),
    }


def in_a_new_process(way: str, given: argparse.Namespace, cache: str = "") -> dict[str, Any]:
    options = ["--members", str(given.members), "--steps", str(given.steps), "--device", given.device]
    command = [sys.executable, __file__, "--way", way, *options]
    done = subprocess.run(command, env=os.environ | {"SHOAL_CACHE": cache}, stdout=subprocess.PIPE, check=True)
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", choices=["loop", "shoal"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.way:
        jobs, base_bytes = make_jobs(given.members, given.steps)
        run = run_loop if given.way == "loop" else run_shoal
        print(json.dumps(run(jobs, torch.device(given.device)) | {"base_bytes": base_bytes}))
        return
    loop = in_a_new_process("loop", given)
    with tempfile.TemporaryDirectory() as cache:
        packed = in_a_new_process("shoal", given, cache)
    activations = loop["bytes_of_one"] - loop["base_bytes"]
    allowed = 1.3 * packed["base_bytes"] + given.members * activations
    print(f"one after another {loop['seconds']:.1f} s, packed {packed['seconds']:.1f} s ({packed['tier']}): "
          f"{loop['seconds'] / packed['seconds']:.1f}x")  # fmt: skip
    print(f"memory {packed['bytes'] / 1e9:.1f} GB; 1.3 bases and the activations of all: {allowed / 1e9:.1f} GB")
    if given.out is not None:
        rows = {"stamp": stamp(given.device, 1), "members": given.members, "steps": given.steps}
        given.out.write_text(json.dumps(rows | {"loop": loop, "shoal": packed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
