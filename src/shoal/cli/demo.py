"""`shoal demo`: the whole idea in under a minute."""

import json
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
"""The fraction of `--longest` to spend on training alone in float64."""


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

    from shoal.cli.output import check_picture
    from shoal.evidence.demo.compare import compare, draw

    check_picture(picture)
    console = Console(quiet=as_json)
    console.print(
        "[bold]64 small networks on handwritten digits[/bold]: 4 learning rates x 4 dropout rates x 4 seeds\n"
    )
    with _progress(console) as progress:
        alone = _run("alone", longest, progress)
        packed = _run("packed", longest, progress)
        checked = _run("checked", CHECK_SHARE * longest, progress)
    result = compare(alone, packed, checked, packed["names"])
    draw(picture, result, packed["histories"], packed["rates"])
    result.picture = str(picture)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _report(console, result)
    if not result.equal:
        raise RuntimeError(
            f"in float64 a packed network differs from the same network alone by {result.float64_difference:.1e}, "
            "which is more than rounding: please report it"
        )


@contextmanager
def _progress(console: "Console") -> "Iterator[Progress]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


TITLES = {"alone": "alone, one after the other", "packed": "packed, all together", "checked": "both again, in float64"}


def _run(way: str, longest: float, progress: "Progress") -> dict[str, Any]:
    """Run one way in a child process, update its progress bar, and return what it sends at its end."""
    from shoal.evidence.bench.child import Child, ChildError
    from shoal.evidence.demo.worker import run

    bar = progress.add_task(TITLES[way], total=None)
    child = Child(run, way, longest)
    try:
        while isinstance(message := child.receive(), tuple):
            progress.update(bar, completed=message[0], total=message[1])
    except ChildError as error:
        raise RuntimeError(f"training {way} failed: {error}") from None
    finally:
        child.close()
    result: dict[str, Any] = message
    progress.update(bar, completed=result["trained"], total=result["total"])
    progress.stop_task(bar)
    return result


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.0f} MiB"


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0, bit for bit"


def _report(console: "Console", result: "Comparison") -> None:
    from rich.table import Table

    table = Table("", "time", "peak memory")
    if result.alone_seconds_estimated is None:
        table.add_row("alone", f"{result.alone_seconds:.1f} s", _megabytes(result.alone_peak_bytes))
    else:
        table.add_row("alone (estimated)", f"{result.alone_total:.1f} s", _megabytes(result.alone_peak_bytes))
    table.add_row(
        f"packed ({', '.join(result.tiers)})",
        f"{result.packed_seconds:.1f} s",
        _megabytes(result.packed_peak_bytes),
    )
    console.print()
    console.print(table)
    if result.alone_seconds_estimated is not None:
        console.print(
            f"Alone, {result.alone_trained} of {result.networks} networks took {result.alone_seconds:.1f} s; "
            "the time for all of them is estimated in proportion."
        )
    console.print(
        f"Each peak includes {_megabytes(result.import_bytes)} for PyTorch, Shoal and the data before any training."
    )
    console.print(f"Gain: [bold]{result.speedup_text}[/bold]")
    console.print(f"Best network: {result.best_name}, validation accuracy {result.best_accuracy:.2%}")
    console.print(
        f"Packed against alone, in float64, {result.float64_networks} networks, {result.float64_steps} steps: largest "
        f"relative difference of any weight {_difference(result.float64_difference)}"
    )
    console.print(
        f"In float32, where rounding may add up: {result.same_accuracy} of {result.alone_trained} networks with the "
        f"same accuracy, largest difference {_difference(result.largest_difference)}"
    )
    console.print(f"Learning curves: {result.picture}")
