"""`shoal results FOLDER`: what came of a run, from its folder alone."""

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer


def results(
    folder: Annotated[Path, typer.Argument(help="The run folder: the --out of shoal train.")],
    history: Annotated[bool, typer.Option("--history", help="Print a row for each epoch of each job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything except the weights as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Show the results of a run folder, finished or not.

    Values are those of the weights that each job returns. Neither the jobs' code nor their data is needed.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other; use one of them")
    from shoal.storage.loading import load
    from shoal.utils.numpy_values import finite

    loaded = load(folder)
    if as_csv:
        typer.echo(to_csv(loaded.records(history=history)), nl=False)
    elif as_json:
        typer.echo(json.dumps(finite(loaded.records(history=True)), indent=1) if history else loaded.to_json())
    elif history:
        from shoal.utils.tables import render

        rows = loaded.records(history=True)
        head = list(dict.fromkeys(name for row in rows for name in row))
        typer.echo(render(head, [[_cell(row.get(name)) for name in head] for row in rows], left=(0,)))
    else:
        typer.echo(loaded.table())


def to_csv(records: list[dict[str, Any]]) -> str:
    """Return rows as comma-separated values, with a column for every name."""
    head = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, head, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
