"""Tables for people: plain text, with lines and colour in a terminal if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

Log = Callable[[str], None]
"""A function that is called with each line of progress, such as `say`."""


def render(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0, 1, 2)) -> str:
    """Return the table as text; the columns in `left` are aligned left, the others right."""
    head, rows = list(map(one_line, head)), [list(map(one_line, row)) for row in rows]
    if sys.stdout.isatty():
        try:
            return _rich(head, rows, left)
        except ImportError:
            pass
    return _plain(head, rows, left)


def format_cell(value: float | str | None) -> str:
    """Format a float with four digits, and other values as they are; None as a dash."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def one_line(text: str) -> str:
    """Return text with line breaks and tabs written as escapes, so that it stays in its cell.

    >>> one_line("two\\nlines, größer")
    'two\\\\nlines, größer'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def _rich(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i in left else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def say(line: str) -> None:
    """Print a line of progress on stderr, so that results on stdout can be piped."""
    print(f"shoal: {line}", file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(3_200_000), size(512)
    ('3.2 MB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Format a number of seconds.

    >>> duration(0.0000031), duration(0.25), duration(75), duration(9000)
    ('3.1 µs', '250 ms', '75 s', '2.5 h')
    """
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (300.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
