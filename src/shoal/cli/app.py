"""The `shoal` program: its commands, and how it shows errors."""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS = {
    "init": "Write a job file to start from.",
    "demo": "Train 64 small networks alone and packed, and compare.",
    "explain": "Show how jobs would run, why, and what it costs.",
    "train": "Train a list of jobs together.",
    "results": "Show the results of a run folder, finished or not.",
    "export": "Write the trained weights of a run folder's job to a file.",
    "tune": "Search for the best settings, all trials in one run.",
    "split": "Train one network as several parts, here or over links.",
    "place": "Choose which layers run on workers and which on a server.",
    "bench": "Measure Shoal against other ways to train many networks.",
    "reproduce": "Repeat experiments of published papers with Shoal.",
}
"""Command -> its line in `shoal --help`: at most 61 characters. The code is `shoal.cli.<command>.<command>`."""

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells; it is 2 for usage errors, and 1 for every other error."""
HELP = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS` and loads only the one that runs, so that `--help` is quick."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, remaining = super().resolve_command(ctx, args)
        assert name is not None
        return name, load(name), remaining


def load(name: str) -> Any:
    """Return the command `shoal.cli.<name>.<name>`, which is a function or a Typer app."""
    target = getattr(importlib.import_module(f"shoal.cli.{name}"), name)
    if isinstance(target, typer.Typer):
        target.info.context_settings = HELP
        return get_command(target)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name=name, help=target.__doc__, context_settings=HELP)(target)
    return get_command(single)


app = typer.Typer(
    name="shoal",
    cls=LazyGroup,
    rich_markup_mode=None,  # panels truncate option names in a terminal of 80 columns
    invoke_without_command=True,
    context_settings=HELP,
    help="Train many neural networks at once on one device, each exactly as if it were trained alone.",
)


def _version(show: bool) -> None:
    if show:
        from shoal.environment import version

        typer.echo(f"shoal {version()}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _placeholder() -> None:
    raise AssertionError("a command is loaded before it runs")


for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(_placeholder)


def _help_of(error: BaseException) -> str:
    """Return the command line that shows the options of the command that was used wrongly."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'shoal'} --help"


def describe(error: BaseException) -> str:
    """Return one line that says what went wrong, without the traceback."""
    format_message = getattr(error, "format_message", None)  # usage errors of the command line itself
    if callable(format_message):
        text = str(format_message()).rstrip(".")
        return text if "Did you mean" in text else f"{text}; see {_help_of(error)}"
    text = str(error).strip()
    ours = type(error).__module__.startswith("shoal.")
    if isinstance(error, KeyError) and not ours:  # the text of a dict's KeyError is only the key
        text = f"no {text}"
    if isinstance(error, ValueError | OSError) or ours:
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (add --debug to see where)"


def one_line(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    """Format a warning as one line, without the code that issued it."""
    return f"shoal: warning: {message}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, print every error in one line, and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    old_format, warnings.formatwarning = warnings.formatwarning, one_line
    try:
        status = get_command(app).main(args, prog_name="shoal", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `shoal ... | head` is not an error
        return 1
    except typer.Exit as left:
        return left.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            for line in describe(error).splitlines():
                print(f"shoal: {line}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))  # 2 for a usage error
    finally:
        warnings.formatwarning = old_format
    if status == INTERRUPTED:
        print("shoal: interrupted", file=sys.stderr)
    return status if isinstance(status, int) else 0
