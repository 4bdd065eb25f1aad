"""`shoal explain TARGET`: a dry run."""

from typing import Annotated

import typer

from shoal.cli.arguments import TARGET_HELP, Device, check_memory, checked, load_target


def explain(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Device = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time a few steps on copies, to predict the speedup.")
    ] = True,
    memory: Annotated[
        str | None,
        typer.Option(
            callback=checked(check_memory),
            help="Memory limit, such as 20GB: shows the size of packs and which jobs wait.",
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="On a GPU: also try compiled steps, which may take minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show how jobs would run, why, and what it costs.

    It lists which jobs would be stacked, which would not and the reason, time and memory. Nothing is trained.
    Options override the run table of a job file.
    """
    loaded = load_target(target)
    import shoal

    given = {"device": device, "memory": memory}
    settings = {name: loaded.settings[name] for name in given if name in loaded.settings}
    settings |= {name: value for name, value in given.items() if value is not None}
    with loaded.placed():
        explanation = shoal.explain(loaded.jobs, measure=measure, compile=compile, **settings)
    typer.echo(explanation.to_json() if as_json else str(explanation))
