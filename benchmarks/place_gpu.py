"""Full-size networks placed over workers on a GPU and a server on the CPU, over links of a given rate: predicted, then
run.

    python benchmarks/place_gpu.py --quick                                             # at most a minute for each
    python benchmarks/place_gpu.py --rate 1gbit --out benchmarks/results/place-h200.json

With `--links tc`, as root on Linux with `ip` and `tc`: each process is in a network namespace of its own, so every byte
between them goes over a shaped link. With `--links paced`, the default where there is no `tc`: the kernel paces each
connection, so that the server's link is as fast as those of all workers together.

The layers are timed on both devices. VGG-16 is cut before its fully connected layers and ResNet-50 is data parallel
(with paced links: through the server, since connections between workers are not paced), whatever `shoal.place` would
choose: these are the ways of which this measures the predictions. Workers share the GPU, so each is taken to
have its share of the GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without a name

import torch
import torch.nn.functional as F

import shoal
from paced_links import PacedLinks, paced
from shoal.engine.processes.child import Child
from shoal.errors import describe
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.namespaces import Links, missing, shaped
from shoal.evidence.reproduce.placement_networks import SHAPES
from shoal.net.links import Address
from shoal.place.links import Link
from shoal.place.placement import DATA_PARALLEL, PARAMETER_SERVER, Placement
from shoal.place.training.api import train_placed
from shoal.reporting.events import Event
from shoal.settings import make_settings
from shoal.utils.torch_flags import torch_flags

WAYS: dict[str, dict[str, Any]] = {"VGG-16": {"cut": "avgpool"}, "ResNet-50": {"mode": DATA_PARALLEL}}
"""What is run of each network, as arguments of `shoal.place`: the way that moves the fewest bytes."""
CLASSES = 1000
QUICK = {"rows": 16, "steps": 5, "limit": 60.0}
Log = Callable[[str], None]


def make_job(network: str, given: Any) -> shoal.Job:
    """Return a job on images of noise."""
    shape = next(shape for shape in SHAPES if shape.name == network)
    draw, rows = torch.Generator().manual_seed(0), given.rows * given.workers
    x = torch.randn(2 * rows, 3, given.pixels, given.pixels, generator=draw)
    y = torch.randint(CLASSES, (2 * rows,), generator=draw)
    return shoal.Job(
        model=partial(shape.make, 1.0, CLASSES), data=(x, y), loss=F.cross_entropy, optimizer=torch.optim.SGD,
        hparams={"lr": 0.001, "momentum": 0.9}, batch_size=rows, steps=given.steps, seed=0,
    )  # fmt: skip


def serve(network: str, placement: Placement, links: Links | PacedLinks, given: Any, pipe: Connection) -> None:
    """Run the server, in its own process behind the first link, and its workers behind the others."""

    def run() -> None:
        links.enter(0)
        try:
            answer = _train(network, placement, links, given, lambda line: pipe.send(("note", line)))
        except Exception as error:
            answer = {"seconds": None, "bytes": None, "error": describe(error)}
        pipe.send(("done", answer))

    thread = threading.Thread(target=run)  # OpenMP would wait for ever for threads of the process that forked this one
    thread.start()
    thread.join()


def _train(network: str, placement: Placement, links: Links | PacedLinks, given: Any, log: Log) -> dict[str, Any]:
    def note(event: Event) -> None:
        if event.kind == "note":
            log(event.data["text"])
        elif event.kind == "turn":
            log(f"{event.data['batches']} steps in {event.data['seconds']:.1f} s")

    settings = make_settings(given.device, None, given.threads, "auto", "1h", False, "fifo")
    (result,) = train_placed(
        make_job(network, given), placement, settings, address=Address(links.address(0), 0), start_seconds=120.0,
        enter=lambda number: links.enter(1 + number), events=note,
    )  # fmt: skip
    report = result.split
    return {"seconds": report.seconds_measured, "bytes": report.bytes_measured, "error": result.error,
            "steps": report.steps, "loss": result.history[-1]["loss"], "lost": report.lost}  # fmt: skip


def run_child(body: Callable[[Connection], None], seconds: float) -> dict[str, Any]:
    """Run a child process, print what it says, and return its answer, or the error that it took too long."""
    child, began = Child(body), time.monotonic()
    try:
        while child.pipe.poll(max(0.0, began + seconds - time.monotonic())):
            kind, what = child.pipe.recv()
            if kind == "done":
                return dict(what)
            print(f"  {time.monotonic() - began:5.1f} s  {what}", flush=True)
        return {"seconds": None, "bytes": None, "error": f"it had not ended after {seconds:g} s (--limit)"}
    except EOFError:
        return {"seconds": None, "bytes": None, "error": f"the process {child.wait()}"}
    finally:
        child.end()
        child.close()


def link_of(given: Any) -> str:
    """Return the rate of a link as `shoal.place` takes it."""
    return str(given.rate).replace("gbit", "Gbit").replace("mbit", "Mbit")


def plan(network: str, job: shoal.Job, given: Any) -> tuple[Placement, Placement]:
    """Return what `shoal.place` chooses for workers with a GPU each, and what is run here."""
    on_cpu = given.device == "cpu"
    how: dict[str, Any] = {"link": link_of(given), "batch_size": given.rows, "batch_norm": "own"}
    if given.links == "paced":
        how["server_link"] = Link.parse(link_of(given)).faster(given.workers)
    how |= {"cores": os.cpu_count()} if on_cpu else {}
    model = job.model()
    with torch_flags(torch.device("cpu"), given.threads):
        chosen = shoal.place(model, job.data[0], workers=given.workers, device=given.device, **how)
    shares = given.workers if on_cpu else [1 / given.workers] * given.workers
    way = WAYS[network]
    if given.links == "paced":
        way = {"sync": "server"} | way if "cut" in way else {"mode": PARAMETER_SERVER}
    return chosen, shoal.place(model, job.data[0], workers=shares, profile=chosen, **how, **way)


def measure(network: str, given: Any) -> dict[str, Any]:
    """Plan one network, and run the placement."""
    print(f"{network}: {given.rows} rows on each of {given.workers} workers, timing its layers", flush=True)
    start = time.perf_counter()
    chosen, placement = plan(network, make_job(network, given), given)
    planned = time.perf_counter() - start
    parts = placement.predicted
    print(
        f"  {planned:5.1f} s  shoal.place chooses {chosen.predicted.describe()} ({1000 * chosen.seconds:.0f} ms); "
        f"this runs {parts.describe()}: predicted {1000 * placement.seconds:.0f} ms (workers "
        f"{1000 * parts.worker_seconds:.0f}, links {1000 * parts.network_seconds:.0f}, server "
        f"{1000 * parts.server_seconds:.0f}), {parts.socket_bytes / 1e6:.1f} MB a worker",
        flush=True,
    )
    start = time.perf_counter()
    with shaped(1 + given.workers, given.rate) if given.links == "tc" else paced(link_of(given)) as links:
        ran = run_child(partial(serve, network, placement, links, given), given.limit)
    row = {
        "network": network, "rows": given.rows, "workers": given.workers, "rate": given.rate, "pixels": given.pixels,
        "links": given.links,
        "server_threads": given.threads, "planned_in": planned, "chosen": chosen.predicted.describe(),
        "chosen_seconds": chosen.seconds, "way": parts.describe(), "micro_batches": placement.micro_batches,
        "predicted_seconds": placement.seconds, "predicted_worker": parts.worker_seconds,
        "predicted_links": parts.network_seconds, "predicted_server": parts.server_seconds,
        "predicted_bytes": parts.socket_bytes, "whole_run": time.perf_counter() - start, **ran,
    }  # fmt: skip
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    if not row["seconds"]:
        return f"{row['network']}: {row['error']}"
    off, bytes_off = (row[f"predicted_{what}"] / row[what] - 1 for what in ("seconds", "bytes"))
    return (
        f"{row['network']}: a step takes {1000 * row['seconds']:.0f} ms, predicted "
        f"{1000 * row['predicted_seconds']:.0f} ({100 * off:+.0f} %); {row['bytes'] / 1e6:.1f} MB a worker, predicted "
        f"{row['predicted_bytes'] / 1e6:.1f} ({100 * bytes_off:+.1f} %); planned in {row['planned_in']:.0f} s, run in "
        f"{row['whole_run']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rate", default="1gbit", help="of every link, for tc")
    parser.add_argument("--links", choices=["tc", "paced"], help="by default tc if it can be used here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of one worker in a step")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is ended")
    parser.add_argument("--threads", type=int, help="of the server; by default those of torch, or 1 with --device cpu")
    parser.add_argument("--quick", action="store_true", help=", ".join(f"{k} {v:g}" for k, v in QUICK.items()))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quick:
        parser.set_defaults(**QUICK)
        given = parser.parse_args()
    reason = missing() if given.links != "paced" else ""
    if given.links == "tc" and reason is not None:
        raise SystemExit(reason)
    given.links = "tc" if reason is None else "paced"
    given.threads = given.threads or (1 if given.device == "cpu" else torch.get_num_threads())
    torch.set_num_threads(1)  # children of a process without OpenMP's threads may use their own
    rows = [measure(network, given) for network in given.networks]
    if given.out is not None:  # the stamp begins to use the GPU, after which nothing can be forked
        about = {"stamp": stamp(given.device, given.threads), "runs": rows}
        given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
