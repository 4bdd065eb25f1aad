"""`shoal reproduce`: comparisons of published work, ours beside theirs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.arguments import Limit, MeasuredDevice, NumbersAsJson, NumbersFile
from shoal.cli.output import pick_precision, quick_settings, report

reproduce = typer.Typer(
    name="reproduce",
    help="Repeat experiments of published papers with Shoal.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)

Data = Annotated[Path | None, typer.Option(help="A folder with mnist.npz; without it: scikit-learn's digits.")]
Plot = Annotated[Path | None, typer.Option(help="Draw ours beside the published into this file.")]
Quick = Annotated[bool, typer.Option(help="The smallest sizes, only to see that it runs.")]


def _drawer(paper: Any, ylabel: str) -> Callable[[Path, dict[str, Any]], None]:
    """Return a function that draws a paper's bars, ours beside the published ones."""
    from shoal.evidence.bench.report import draw_bars, heading

    return lambda path, result: draw_bars(path, paper.bars(result), ylabel=ylabel, title=heading(result))


@reproduce.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@reproduce.command(short_help="UnifiedNN: memory and time against one process each.")
def unifiednn(
    members: Annotated[int, typer.Option(min=1, help="Networks.")] = 8,
    epochs: Annotated[int, typer.Option(min=0, help="Epochs; 0: 20 on a GPU, 5 on a CPU.")] = 0,
    device: MeasuredDevice = "auto",
    limit: Limit = 1200.0,
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """UnifiedNN: memory and time of many networks, one process each against Shoal."""
    from shoal.evidence.reproduce import unifiednn as paper
    from shoal.settings import pick_device

    chosen_device = str(pick_device(device))
    length = epochs or (20 if chosen_device.startswith("cuda") else 5)

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        some, few = (min(members, 2), 1) if quick else (members, length)
        return paper.unifiednn(members=some, epochs=few, device=chosen_device, limit=limit, log=log)

    report(measure, paper.table, _drawer(paper, "saved over one process per network"), out, plot, as_json)


@reproduce.command(short_help="Pack: the gain of 2, 3 and 4 networks in one step.")
def pack(
    networks: Annotated[
        list[str] | None, typer.Argument(help="mlp3, mobilenetv2, resnet50, densenet121. None given: all.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="How many to pack; with commas, of 2, 3 and 4.")] = "2,3,4",
    precision: Annotated[str, typer.Option(help="fp32 (as published) or bf16.")] = "fp32",
    device: MeasuredDevice = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each; the median is shown.")] = 20,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for both; 0: as torch chooses.")] = 0,
    limit: Limit = 1800.0,
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """Pack: gain over training one after the other, for 2, 3 and 4 networks in one step."""
    from shoal.evidence.bench.run import Settings
    from shoal.evidence.reproduce import pack as paper
    from shoal.settings import pick_device

    chosen_device = str(pick_device(device))
    chosen_sizes = [size.strip() for size in sizes.split(",")]
    if not set(chosen_sizes) <= {"2", "3", "4"}:
        raise ValueError(f"sizes is {sizes!r}; the published table has 2, 3 and 4")
    settings = Settings(
        ways=("eager", "shoal"),
        device=chosen_device,
        rounds=min(rounds, 2) if quick else rounds,
        threads=threads or None,
        limit=limit,
        **(quick_settings() if quick else {}),
    )

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        return paper.pack(
            settings,
            networks=networks or list(paper.TITLES),
            sizes=[int(size) for size in chosen_sizes],
            precision=pick_precision(precision, chosen_device),
            quick=quick,
            log=log,
        )

    report(measure, paper.table, _drawer(paper, "gain over sequential"), out, plot, as_json)


@reproduce.command(short_help="Pack: Hyperband, packed and one trial at a time.")
def hyperband(
    network: Annotated[str, typer.Option(help="mlp, or cnn: small ones with batch norm and dropout.")] = "mlp",
    space: Annotated[str, typer.Option(help="plain: settings of the optimizer; shapes: widths, depths too.")] = "plain",
    max_epochs: Annotated[int, typer.Option(min=1, help="R of the paper.")] = 81,
    eta: Annotated[int, typer.Option(min=2, help="A rung keeps one in eta.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each; the median is shown.")] = 3,
    data: Data = None,
    ray: Annotated[bool, typer.Option("--ray", help="Also Ray Tune's ASHA and HyperBand, on a local Ray.")] = False,
    groupings: Annotated[
        bool, typer.Option("--groupings", help="Also train one pack after another, formed by the paper's three rules.")
    ] = False,
    pack_size: Annotated[int, typer.Option(min=1, help="Trials of such a pack.")] = 8,
    device: MeasuredDevice = "cpu",
    limit: Limit = 1800.0,
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """Pack-aware Hyperband: a search packed, against the same search one trial at a time, and Optuna's Hyperband."""
    from shoal.evidence.bench.datasets import load
    from shoal.evidence.reproduce import hyperband as paper
    from shoal.settings import pick_device

    if space not in paper.SPACES:
        raise ValueError(f"space is {space!r}; use {' or '.join(paper.SPACES)}")
    if network not in paper.NETWORKS:
        raise ValueError(f"network is {network!r}; use {' or '.join(paper.NETWORKS)}")
    load(data)  # raises errors in the data before anything is measured
    scene = paper.Scene(
        network=network, space=space, max_epochs=9 if quick else max_epochs, eta=eta,
        device=str(pick_device(device)), data=None if data is None else str(data), pack_size=pack_size,
    )  # fmt: skip

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        ways = paper.installed_ways(ray=ray, groupings=groupings)
        return paper.hyperband(scene, rounds=1 if quick else rounds, limit=limit, ways=ways, log=log)

    report(measure, paper.table, _drawer(paper, "times faster than one at a time"), out, plot, as_json)


@reproduce.command(short_help="SIL: a network whose two parts train separately.")
def sil(
    data: Data = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each; the mean is shown.")] = 5,
    device: MeasuredDevice = "cpu",
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """SIL: a network cut in two parts that train separately, by labels or local heads, against ordinary training."""
    from shoal.evidence.reproduce import sil as paper
    from shoal.settings import pick_device

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        some = min(seeds, 2) if quick else seeds
        return paper.sil(folder=data, seeds=some, device=str(pick_device(device)), quick=quick, log=log)

    report(measure, paper.table, _drawer(paper, "accuracy"), out, plot, as_json)


@reproduce.command(short_help="Layer placement: bytes and seconds over slow links.")
def placement(
    networks: Annotated[
        list[str] | None, typer.Argument(help="AlexNet, VGG-16, ResNet-50, Inception-v3. None given: all.")
    ] = None,
    links: Annotated[
        str,
        typer.Option(
            help="Rates of the links, for tc, separated by commas. none: print only the bytes of full-size networks."
        ),
    ] = "100mbit",
    rows: Annotated[str, typer.Option(help="Rows of one worker in a step, separated by commas.")] = "8",
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 4,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each way; the median is shown.")] = 8,
    train: Annotated[bool, typer.Option("--train", help="Also say which accuracy the steps reach.")] = False,
    limit: Limit = 1200.0,
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """Layer placement: bytes and seconds over slow links, against a parameter server, DDP and one machine."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without a name
    from shoal.evidence.reproduce import placement as paper
    from shoal.evidence.reproduce.namespaces import missing

    names = networks or list(paper.PIXELS)
    unknown = [name for name in names if name not in paper.PIXELS]
    if unknown:
        raise ValueError(f"network is {unknown[0]!r}; use {', '.join(paper.PIXELS)}")
    reason = missing() if links != "none" else None
    if reason is not None:
        raise ValueError(f"{reason}; --links none prints only the bytes of full-size networks")
    counts = [2] if quick else [int(count) for count in rows.split(",")]
    cases = [
        paper.Case(name, count, rate.strip(), workers)
        for name in names
        for count in counts
        for rate in ([] if links == "none" else ["500mbit"] if quick else links.split(","))
    ]

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        return paper.placement(cases, steps=3 if quick else steps, limit=limit, log=log, validates=train)

    report(measure, paper.table, paper.draw, out, plot, as_json)


@reproduce.command(short_help="IST: independent subnets over slow links.")
def ist(
    data: Data = None,
    width: Annotated[int, typer.Option(min=0, help="Width of both hidden layers; 0: 2048, or 256 for digits.")] = 0,
    workers: Annotated[int, typer.Option(min=2, help="Workers.")] = 4,
    link: Annotated[str, typer.Option(help="Rate of each worker's link, for tc; none: no seconds.")] = "100mbit",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each; the mean is shown.")] = 5,
    windows: Annotated[str, typer.Option(help="Local steps in a round, with commas.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="Steps of data parallel; 0: 400, or 150 for digits.")] = 0,
    settings: Annotated[
        Path | None, typer.Option(help="Take rates and trainings from this file of an earlier run, and time them.")
    ] = None,
    device: MeasuredDevice = "cpu",
    out: NumbersFile = None,
    plot: Plot = None,
    as_json: NumbersAsJson = False,
    quick: Quick = False,
) -> None:
    """IST: independent subnets over slow links, against local SGD and data parallel."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without a name
    from shoal.evidence.bench.datasets import load
    from shoal.evidence.reproduce import ist_report as paper
    from shoal.evidence.reproduce.ist import Scene, windows_of
    from shoal.settings import pick_device

    small = data is None
    scene = Scene(
        data=load(data),
        width=32 if quick else width or (256 if small else 2048),
        workers=workers,
        batch=32 if small else 128,
        steps=20 if quick else steps or (150 if small else 400),
    )
    before = paper.earlier(settings) if settings is not None else None

    def measure(log: Callable[[str], None]) -> dict[str, Any]:
        return paper.compare(
            scene,
            seeds=range(min(seeds, 2) if quick else seeds),
            windows=(10,) if quick else windows_of(windows, small=small),
            link=None if link == "none" else link,
            device=str(pick_device(device)),
            before=before,
            log=log,
        )

    report(measure, paper.table, paper.draw, out, plot, as_json)
