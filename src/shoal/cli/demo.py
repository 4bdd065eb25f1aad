"""`shoal demo`: the whole idea in under a minute."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from shoal.evidence.demo.compare import Comparison

CHECK_SHARE = 0.15
"""Of `--longest`: seconds to spend on training alone in float64."""


def demo(
    picture: Annotated[Path, typer.Option(help="Where to write the learning curves.")] = Path("demo.png"),
    longest: Annotated[
        float, typer.Option(min=0.0, help="Seconds to spend on training alone; the rest is then estimated.")
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, without a progress bar.")] = False,
) -> None:
    """Train 64 small networks alone and packed, and compare.

    Handwritten digits, four learning rates, four dropout rates, four seeds, on the CPU: first one after the other in a
    plain PyTorch loop, then all together with shoal.train; each way in a process of its own. Then both ways again for a
    few epochs in float64, where their weights must agree to 1e-9.
    """
    from rich.console import Console

    from shoal.cli.files import picture_ready
    from shoal.evidence.demo.compare import compare, draw

    picture_ready(picture)
    console = Console(quiet=as_json)
    console.print(
        "[bold]64 small networks on handwritten digits[/bold]: 4 learning rates x 4 dropout rates x 4 seeds\n"
    )
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as made, _progress(console) as progress:
        folder = Path(made)
        alone = _run("alone", folder, longest, progress)
        packed = _run("packed", folder, longest, progress)
        checked = _run("checked", folder, CHECK_SHARE * longest, progress)
        names, rates = packed["names"], packed["rates"]
        found = compare(alone, packed, checked, names, folder)
    draw(picture, found, packed["histories"], rates)
    found.picture = str(picture)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _report(console, found)
    if not found.equal:
        raise RuntimeError(
            f"in float64 a packed network differs from the same network alone by {found.float64_difference:.1e}, "
            "which is more than rounding: please report it"
        )


@contextmanager
def _progress(console: "Console") -> "Iterator[Progress]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


TITLES = {"alone": "alone, one after the other", "packed": "packed, all together", "checked": "both again, in float64"}


def _run(way: str, folder: Path, longest: float, progress: "Progress") -> dict[str, Any]:
    """Run one way in a child process, moving its bar; what it found."""
    bar = progress.add_task(TITLES[way], total=None)
    command = [sys.executable, "-m", "shoal.evidence.demo.worker", way, str(folder), str(longest)]
    result: dict[str, Any] | None = None
    with (
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] == "progress":
                    progress.update(bar, completed=event["done"], total=event["total"])
                else:
                    result = event
        except BaseException:
            child.terminate()
            raise
        status = child.wait()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
    if status != 0 or result is None:
        raise RuntimeError(f"training {way} ended with status {status}: {last[0]}")
    progress.update(bar, completed=result["trained"], total=result["total"])
    progress.stop_task(bar)
    return result


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.0f} MiB"


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0, bit for bit"


def _report(console: "Console", found: "Comparison") -> None:
    from rich.table import Table

    table = Table("", "time", "peak memory")
    if found.alone_seconds_estimated is None:
        table.add_row("alone", f"{found.alone_seconds:.1f} s", _megabytes(found.alone_peak_bytes))
    else:
        table.add_row("alone (estimated)", f"{found.alone_total:.1f} s", _megabytes(found.alone_peak_bytes))
    table.add_row(
        f"packed ({', '.join(found.tiers)})", f"{found.packed_seconds:.1f} s", _megabytes(found.packed_peak_bytes)
    )
    console.print()
    console.print(table)
    if found.alone_seconds_estimated is not None:
        console.print(
            f"Alone, {found.alone_trained} of {found.networks} networks took {found.alone_seconds:.1f} s; "
            "the time for all of them is estimated in proportion."
        )
    console.print(
        f"Of each peak, {_megabytes(found.import_bytes)} are PyTorch, Shoal and the data before any training."
    )
    console.print(f"Gain: [bold]{found.verdict}[/bold]")
    console.print(f"Best network: {found.best_name}, validation accuracy {found.best_accuracy:.2%}")
    console.print(
        f"Packed against alone, in float64, {found.float64_networks} networks, {found.float64_steps} steps: largest "
        f"relative difference of any weight {_difference(found.float64_difference)}"
    )
    console.print(
        f"In float32, where rounding may add up: {found.same_accuracy} of {found.alone_trained} networks with the same "
        f"accuracy, largest difference {_difference(found.largest_difference)}"
    )
    console.print(f"Learning curves: {found.picture}")
