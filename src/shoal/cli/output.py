"""What commands show (a result, a report, how to resume), and checks of output files before long work."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal import Result


def check_writable(path: Path | None) -> None:
    """Create the folder of a file that will be written, or raise a ValueError if the file cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}); name another file") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written; name another file")


def check_picture(path: Path | None) -> None:
    """Do the same for a picture, whose format follows from its name."""
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'shoal[plot]'") from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower()[1:] not in formats:
        raise ValueError(f"{str(path)!r} is not a kind of picture; end the name in .png, .pdf or .svg")
    check_writable(path)


def report(
    measure: Callable[[Callable[[str], None]], dict[str, Any]],
    table: Callable[[dict[str, Any], Any], None],
    draw: Callable[[Path, dict[str, Any]], None],
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure, with a line of progress; then write the picture and the file, and print the table or JSON."""
    from rich.console import Console

    from shoal.evidence.bench.report import text, write

    check_writable(out)
    check_picture(plot)
    with Console(stderr=True).status("starting") as status:
        result = measure(lambda line: status.update(line))
    if plot is not None:
        draw(plot, result)
    if out is not None:
        write(result, out)
    if as_json:
        typer.echo(text(result))
    else:
        console = Console()
        table(result, console if console.is_terminal else Console(width=200))  # a table in a file is not wrapped


def show_result(result: "Result", as_json: bool, beside: dict[str, Any], missing: str = "") -> None:
    """Print one job's result and its report, or `missing` if it has none; exit with status 1 if it failed or diverged.

    Args:
        beside: What the JSON contains besides the result.
    """
    from shoal.results import Results
    from shoal.utils.numpy_values import finite

    if as_json:
        typer.echo(json.dumps(finite({**result.to_dict(), **beside})))
    else:
        typer.echo(Results([result]).table())
        typer.echo(f"\n{result.split if result.split is not None else missing}")
    if result.status in ("failed", "diverged"):
        raise typer.Exit(1)


@contextmanager
def saying_how_to_resume(out: str | None) -> Iterator[None]:
    """Print what to do after Ctrl-C, if it is pressed inside this context."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"shoal: {_how_to_resume(out)}", file=sys.stderr)
        raise


def _how_to_resume(out: str | None) -> str:
    if out is None:
        return "nothing was saved, as there is no --out; with one, run the same command again to resume"
    command = ["shoal", *sys.argv[1:]] if Path(sys.argv[0]).name in ("shoal", "__main__.py") else ["the same command"]
    return f"saved in {out!r}; to resume: {shlex.join(command) if len(command) > 1 else command[0]}"


def quick_settings() -> dict[str, Any]:
    """Return settings for runs that only show that a way works."""
    return {"round_seconds": 0.02, "warm_up": 1}


def pick_precision(precision: str, device: str) -> str | None:
    """Return the precision to use; "auto" is the usual one of the device."""
    if precision not in ("auto", "bf16", "fp32"):
        raise ValueError(f"precision is {precision!r}; use bf16, fp32 or auto")
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") else "fp32"
    return None if precision == "fp32" else precision
