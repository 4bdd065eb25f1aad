"""A search with Hyperband: `python search.py`, or `shoal tune search.py --max-epochs 27 --out runs/search`."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import shoal

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def make_job(params):
    def network():
        return nn.Sequential(
            nn.Linear(64, params["width"]), nn.ReLU(), nn.Dropout(params["dropout"]), nn.Linear(params["width"], 10)
        )

    return shoal.Job(
        model=network,
        data=(x[:1400], y[:1400]),
        val=(x[1400:], y[1400:]),
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW,
        hparams={"lr": params["lr"]},
        metrics={"accuracy": accuracy},
    )


space = {"lr": ("log", 1e-4, 1e-1), "dropout": ("uniform", 0.0, 0.5), "width": [32, 64]}
settings = {"metric": "accuracy", "max_epochs": 9}

if __name__ == "__main__":
    study = shoal.tune(make_job, space, progress=True, **settings)
    print(study.table())
    print(study.best_params)
