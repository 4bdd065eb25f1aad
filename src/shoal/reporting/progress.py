"""The progress display of a run: a live table in a terminal or notebook, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.engine.members.member import Member
from shoal.reporting._tally import Tally as Tally
from shoal.reporting._tally import UnitProgress
from shoal.reporting.events import Event
from shoal.utils.tables import duration, size

LINE_EVERY = 5.0
"""Seconds between plain lines, so that a log stays short."""
LIVE_EVERY = 0.1
"""The minimum seconds between two updates of a live display."""
MOST_OF_TIME = 0.02
"""The fraction of the time that drawing may take; after a slow update the next one waits longer."""
MOST_ROWS = 10
"""How many packs have their own row; the others share one."""


class Progress:
    """Shows the progress of a run from its events. This base class shows nothing."""

    shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, event: Event) -> None:
        """Record an event."""


class View:
    """Formats the progress of a run; a search shows more."""

    def line(self, tally: Tally) -> str:
        """Return the progress as one line, for a log."""
        return line(tally)

    def picture(self, tally: Tally) -> Any:
        """Return the progress for a terminal, as an object that rich draws."""
        return picture(tally)


class _Counting(Progress):
    """Counts events and shows the progress at intervals."""

    shown = True
    every: float

    def __init__(self, members: list[Member], view: View | None = None) -> None:
        self.tally, self.view = Tally(members), view or View()
        self._grows = view is not None  # a search adds members, so that the last one is not known
        self._due = self.tally.clock() + self.every

    def __call__(self, event: Event) -> None:
        tally = self.tally
        tally(event)
        now = tally.clock()
        all_ended = event.kind == "leave" and len(tally.ended) == len(tally.members)  # the run's end may come later
        last = event.kind == "end" if tally.cut_short else all_ended
        if now >= self._due or (last and not self._grows):
            self._show(now)

    def _show(self, now: float) -> None:
        self.show()
        self._due = now + max(self.every, (self.tally.clock() - now) / MOST_OF_TIME)

    def show(self) -> None:
        raise NotImplementedError


class Lines(_Counting):
    """Prints plain lines on stderr, some seconds apart."""

    every = LINE_EVERY
    _printed = ""

    def __exit__(self, *error: object) -> None:
        if self._grows and error[:1] in ((), (None,)) and self.view.line(self.tally) != self._printed:
            self.show()

    def show(self) -> None:
        self._printed = self.view.line(self.tally)
        print(f"shoal: {self._printed}", file=sys.stderr, flush=True)


class Live(_Counting):
    """Shows a table in a terminal and updates it in place."""

    every = LIVE_EVERY

    def __init__(self, members: list[Member], console: Any = None, view: View | None = None) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__(members, view)
        console = console or Console(stderr=sys.stderr.isatty())
        self.live = RichLive(console=console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Progress:
        self.live.start()
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.show()
        self.live.stop()

    def show(self) -> None:
        self.live.update(self.view.picture(self.tally), refresh=True)


class Notebook(_Counting):
    """Shows the same table in a notebook cell."""

    every = 0.5

    def __init__(self, members: list[Member], view: View | None = None) -> None:
        import rich  # noqa: F401  # if it is missing, plain lines are printed instead
        from IPython.display import display

        super().__init__(members, view)
        self._display: Any = display
        self._handle: Any = None

    def __enter__(self) -> Progress:
        self._handle = self._display(self._bundle(), raw=True, display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.show()

    def show(self) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        import io

        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        console.print(self.view.picture(self.tally))
        page = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", clear=False)
        return {"text/html": page, "text/plain": console.export_text()}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table, for one pack or several together."""

    pack: str
    tier: str
    members: int
    speed: float | None
    """Optimizer steps per second of all members together, during their turns."""
    gain: float | None
    """How many times faster the pack is than its members one after another."""
    bytes: float | None
    predicted: float | None
    left: float
    """Remaining seconds, or NaN if unknown."""

    def cells(self) -> list[str]:
        """Return the row as texts."""
        return [
            self.pack,
            self.tier,
            str(self.members),
            "-" if self.speed is None else number(self.speed),
            "-" if self.gain is None else f"{self.gain:.1f}x",
            memory(self.bytes, self.predicted) or "-",
            "-" if math.isnan(self.left) else duration(self.left),
        ]


HEAD = ("pack", "tier", "members", "steps/s", "gain", "memory", "left")


def rows(tally: Tally, most: int = MOST_ROWS) -> list[Row]:
    """Return a row per pack, largest first. Members that run alone share a row, and so do packs beyond `most`."""
    several = [pack for pack in tally.packs.values() if pack.tier != "serial"]
    alone = [pack for pack in tally.packs.values() if pack.tier == "serial"]
    several.sort(key=len, reverse=True)
    out = [together(tally, [pack], str(pack.label)) for pack in several[:most]]
    if len(several) > most:
        out.append(together(tally, several[most:], f"{len(several) - most} more"))
    if alone:
        out.append(together(tally, alone, str(alone[0].label) if len(alone) == 1 else f"{len(alone)} alone"))
    return out


def together(tally: Tally, packs: list[UnitProgress], name: str) -> Row:
    """Return one row for several packs. They take turns, so speed and gain refer to the sum of their turns."""
    now = tally.clock()
    turns = [pack for pack in packs if pack.seconds > 0]
    seconds = sum(pack.seconds for pack in turns)
    steps = sum(pack.work / pack.accumulate for pack in turns)
    known = [gain * pack.seconds for pack in turns if (gain := tally.gain(pack)) is not None]
    return Row(
        pack=name,
        tier=packs[0].tier if len({pack.tier for pack in packs}) == 1 else "mixed",
        members=sum(map(len, packs)),
        speed=steps / seconds if seconds else None,
        gain=sum(known) / seconds if known and len(known) == len(turns) else None,
        bytes=_sum([pack.bytes for pack in packs]),
        predicted=_sum(list(map(tally.predicted_bytes, packs))),
        left=max((x for pack in packs if not math.isnan(x := pack.seconds_left(now))), default=math.nan),
    )


def _sum(values: list[Any]) -> float | None:
    return None if any(value is None for value in values) else float(sum(values))


def line(tally: Tally) -> str:
    """Return the progress in one line."""
    return ", ".join([percent(tally.share), *counts(tally), *speeds(tally), *rest(tally)])


def percent(share: float) -> str:
    """Return a fraction as whole percent, rounded down.

    >>> percent(0.996)
    ' 99%'
    """
    return f"{math.floor(share * 100 + 1e-9):3d}%"


def counts(tally: Tally) -> Iterator[str]:
    """Yield phrases for how many members have ended, are running and are waiting."""
    if not tally.resume:
        yield f"{len(tally.ended)}/{len(tally.members)} ended"
    if (losses := tally.loss_range()) is not None:
        yield f"loss {losses[0]:.4g} to {losses[1]:.4g}"
    if tally.resume:
        yield f"interrupted; {tally.resume}"
        return
    for status in ("diverged", "failed", "cancelled"):
        if count := tally.counts.get(status):
            yield f"{count} {status}"
    if tally.packs:
        yield f"{tally.running} running in {len(tally.packs)} pack{'s' * (len(tally.packs) != 1)}"
    if tally.waiting and tally.joins:
        yield f"{len(tally.waiting)} waiting"


def speeds(tally: Tally) -> Iterator[str]:
    """Yield phrases for the speed and the memory of all packs together."""
    if not tally.packs:
        return
    total = together(tally, list(tally.packs.values()), "")
    if total.speed is not None:
        yield f"{number(total.speed)} steps/s"
    if total.gain is not None:
        yield f"{total.gain:.1f}x alone"
    if memory_text := memory(total.bytes, total.predicted):
        yield memory_text


def rest(tally: Tally) -> Iterator[str]:
    """Yield a phrase for the remaining time, if it is known."""
    if tally.left and not tally.resume and not math.isnan(seconds := tally.seconds_left()):
        yield f"{duration(seconds)} left"


BAR = 40


def picture(tally: Tally) -> Any:
    """Return the progress for a terminal: a bar with the time, a table of packs, and the counts.

    It is one text, since rich's own table and bar take ten times as long to draw.
    """
    from rich.text import Text

    full = round(BAR * tally.share)
    text = Text("training ", no_wrap=True, overflow="ellipsis")
    text.append("━" * full, style="green").append("━" * (BAR - full), style="dim")
    spent = f"after {duration(tally.clock() - tally.began)}"
    text.append(f" {', '.join([f'{percent(tally.share)} {spent}', *rest(tally)])}\n")
    if tally.packs:
        head, *lines = columns([list(HEAD), *(row.cells() for row in rows(tally))])
        text.append(head + "\n", style="bold").append("".join(f"{line}\n" for line in lines))
    text.append(", ".join(counts(tally)))
    if tally.note:
        text.append(f"\n{tally.note}", style="dim")
    return text


def columns(cells: list[list[str]]) -> list[str]:
    """Return the lines of a table, with names aligned left and numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]


def memory(measured: float | None, predicted: float | None) -> str:
    """Format the measured bytes and the predicted ones."""
    if measured is None:
        return "" if predicted is None else f"{size(predicted)} predicted"
    return size(measured) + ("" if predicted is None else f" ({size(predicted)} predicted)")


def number(value: float) -> str:
    """Format a speed for people.

    >>> number(0.213), number(31.4), number(12345.6)
    ('0.21', '31.4', '12,346')
    """
    return f"{value:.2g}" if value < 1 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def progress_for(members: list[Member], wanted: bool | None, view: View | None = None) -> Progress:
    """Return the progress display for this environment; `wanted=None` shows it only in terminals and notebooks."""
    if wanted not in (True, False, None):
        raise ValueError(f"progress is {wanted!r}; use True, False, or None: in terminals and notebooks alone")
    notebook, terminal = _is_notebook(), _is_terminal(sys.stderr) or _is_terminal(sys.stdout)
    if wanted is False or (wanted is None and not (notebook or terminal)):
        return Progress()
    try:
        if notebook:
            return Notebook(members, view)
        if terminal:
            return Live(members, view=view)
    except ImportError:
        pass
    return Lines(members, view)


def _is_notebook() -> bool:
    """Return whether this process is a notebook's kernel. Having imported ipykernel does not make it one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal. Programs without a console have no streams, and others replace them."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
