"""What `shoal bench` and `shoal reproduce` have in common: measure with a line of progress, then report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from shoal.cli.files import check_picture, check_writable


def report(
    measure: Callable[[Callable[[str], None]], dict[str, Any]],
    table: Callable[[dict[str, Any], Any], None],
    draw: Callable[[Path, dict[str, Any]], None],
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure, with a line of progress; then the picture, the file, and the table or JSON on the screen."""
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
        table(result, console if console.is_terminal else Console(width=200))  # a file's table is not folded


def quick_settings() -> dict[str, Any]:
    """Enough to see that a way works."""
    return {"round_seconds": 0.02, "warm_up": 1}


def pick_precision(precision: str, device: str) -> str | None:
    """`auto` made definite: what people use on that device."""
    if precision not in ("auto", "bf16", "fp32"):
        raise ValueError(f"precision is {precision!r}; use bf16, fp32 or auto")
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") else "fp32"
    return None if precision == "fp32" else precision
