"""`shoal init [FILE]`: a job file to start from."""

from pathlib import Path
from typing import Annotated

import typer

TEMPLATE = """\
# Train:         shoal train {file}
# Preview:       shoal explain {file}
# Show results:  shoal results runs/{stem}
# All keys:      docs/jobfiles.md

# "digits" needs scikit-learn. For your own data use a file, data = "table.csv", or a function, data = "mine.py:load".
data = "digits"
val = 0.2                    # a fifth of the rows for validation
loss = "cross_entropy"
metrics = ["accuracy"]

# mlp, cnn, resnet18, gpt, lstm, encoder; or your own class: model = {{ use = "mine.py:Net", width = 64 }}
model = {{ use = "mlp", features = 64, hidden = 32 }}
optimizer = "AdamW"
hparams = {{ weight_decay = 0.01 }}
batch_size = 64
epochs = 8
seeds = 3                    # train each setting with the seeds 0, 1 and 2
keep = "best"                # the weights of the epoch with the smallest validation loss

[grid]                       # every combination is a job
hparams.lr = [1e-3, 3e-3, 1e-2]
model.dropout = [0.0, 0.2]

[run]
out = "runs/{stem}"          # checkpoints, histories and weights; run the same command again to resume
"""


def init(
    file: Annotated[Path, typer.Argument(help="The file to write; its name ends in .toml.")] = Path("sweep.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a job file to start from.

    It trains as it is: a sweep over handwritten digits. Change it to your own network and data.
    """
    from shoal.cli.output import check_writable

    if file.suffix != ".toml":
        raise typer.BadParameter(f"the file is {str(file)!r}; give a name that ends in .toml")
    if file.exists() and not force:
        raise ValueError(f"{str(file)!r} exists; name another file, or add --force to write over it")
    check_writable(file)
    file.write_text(TEMPLATE.format(file=file, stem=file.stem))
    typer.echo(f"wrote {file}; train it: shoal train {file}")
