"""`shoal export FOLDER FILE`: a job's trained weights as a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import check_mode, checked

if TYPE_CHECKING:
    from shoal import Result, Results

KINDS = (".safetensors", ".pt", ".pt2")


def export(
    folder: Annotated[Path, typer.Argument(help="The run folder: the --out of shoal train.")],
    file: Annotated[Path, typer.Argument(help="What to write: .safetensors or .pt (weights), .pt2 (torch.export).")],
    job: Annotated[
        str | None, typer.Option(help="The job's name; not needed with --best, or if there is only one job.")
    ] = None,
    best: Annotated[str | None, typer.Option(help="Take the job with the best value of this metric.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            callback=checked(check_mode),
            help="Whether small or large values are better: min or max; by default from the metric's name.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For .pt2: MODULE:FUNCTION or FILE.py:FUNCTION that builds the network.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="For .pt2: the shape of an input with its batch, such as 1,64.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="For .pt2: the dtype of an input, such as int64 for tokens; by default that of the weights."),
    ] = None,
) -> None:
    """Write the trained weights of a run folder's job to a file.

    A .pt2 file holds the network's computation too: torch.export.load(file).module() runs it without your code.
    """
    from shoal.cli.output import check_writable
    from shoal.storage.loading import load

    if file.suffix not in KINDS:
        raise typer.BadParameter(f"the file is {str(file)!r}; its name ends in {', '.join(KINDS)}")
    if {model is not None, shape is not None} != {file.suffix == ".pt2"}:
        raise typer.BadParameter("--model and --shape go with a .pt2 file, and a .pt2 file needs both")
    if dtype is not None and file.suffix != ".pt2":
        raise typer.BadParameter("--dtype goes with a .pt2 file; leave it out")
    if mode is not None and best is None:
        raise typer.BadParameter("--mode says which way --best is better; give --best METRIC, or leave it out")
    check_writable(file)
    results = load(folder, model=None if model is None else _builder(model))
    result = _chosen(results, job, best, mode)
    _write(result, file, shape, dtype)
    values = ", ".join(
        f"{name} {value:.4g}" for name, value in result.values.items() if name not in ("step", "seconds")
    )
    typer.echo(f"wrote {file}: {result.name} ({result.status}{', ' + values if values else ''})")


def _chosen(results: "Results", job: str | None, best: str | None, mode: Any) -> "Result":
    """Return the result that `--job` or `--best` chooses."""
    if job is not None and best is not None:
        raise typer.BadParameter("--job and --best both say which job; use one of them")
    if job is not None:
        return results[job]
    if best is not None:
        return results.best(best, mode)
    if len(results) > 1:
        raise typer.BadParameter(f"the folder has {len(results)} jobs; say --job NAME, or --best METRIC")
    return results[0]


def _builder(target: str) -> Any:
    from shoal.cli.arguments import errors_of_code
    from shoal.jobfile.importing import get_attribute, import_code

    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise typer.BadParameter(f"--model is {target!r}; give MODULE:FUNCTION or FILE.py:FUNCTION")
    with errors_of_code(f"--model: importing {where!r}"):
        return get_attribute(import_code(where, Path.cwd()), name, where)


def _write(result: "Result", file: Path, shape: str | None, dtype: str | None) -> None:
    import torch

    if file.suffix == ".pt2":
        assert shape is not None
        _write_program(result, file, shape, dtype)
        return
    state = result.state_dict()
    if file.suffix == ".pt":
        torch.save(state, file)
        return
    from safetensors.torch import save_file

    not_tensors = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if not_tensors:
        raise ValueError(
            f"{not_tensors[0]!r} of {result.name!r} is not a tensor, which .safetensors cannot hold; write a .pt file"
        )
    save_file({name: value.contiguous().clone() for name, value in state.items()}, file)


def _write_program(result: "Result", file: Path, shape: str, dtype: str | None) -> None:
    """Export the network with torch.export, with a dynamic batch size."""
    import torch

    from shoal.errors import ShoalError, describe

    try:
        sizes = [int(part) for part in shape.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--shape is {shape!r}; give whole numbers, such as 1,64") from None
    torch_dtype = getattr(torch, dtype or "", None)
    if dtype is not None and not isinstance(torch_dtype, torch.dtype):
        raise typer.BadParameter(f"--dtype is {dtype!r}; give a name of torch's, such as float32 or int64")
    dtypes = (p.dtype for p in result.model.parameters() if p.is_floating_point())
    size = sizes[0] if sizes[0] > 1 else 2  # a batch of one would be exported as a constant
    sample = torch.zeros(size, *sizes[1:], dtype=torch_dtype or next(dtypes, torch.float32))
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            result.model(sample)  # its error is short, that of torch.export is not
    except Exception as error:
        raise ShoalError(
            f"{result.name!r} with an input of shape {list(sample.shape)} and dtype {sample.dtype} raised "
            f"{describe(error)}; set --shape and --dtype to those of its inputs, or write a .pt file"
        ) from error
    try:
        program = torch.export.export(result.model, (sample,), dynamic_shapes=({0: batch},))
    except Exception as error:
        raise ShoalError(
            f"torch.export of {result.name!r} with an input of shape {list(sample.shape)} and dtype {sample.dtype} "
            f"raised {describe(error)}; write a .pt file"
        ) from error
    torch.export.save(program, file)
