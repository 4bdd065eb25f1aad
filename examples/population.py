"""Population-based training by hand: the worst networks become copies of the best, with other settings."""

import random

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import shoal

ROUND, EPOCHS = 3, 12  # epochs between two decisions, and in all

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def first_job(number, lr):
    return shoal.Job(
        model=network,
        data=(x[:1400], y[:1400]),
        val=(x[1400:], y[1400:]),
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        hparams={"lr": lr, "momentum": 0.9},
        metrics={"accuracy": accuracy},
        epochs=ROUND,
        seed=number,
        name=f"{number}, round 1",
    )


draw = random.Random(0)
rates = [10 ** draw.uniform(-4, 0) for _ in range(8)]
run = shoal.start([first_job(number, lr) for number, lr in enumerate(rates)], keep_open=True)

ended, parents = {}, {}
for result in run.as_completed():
    ended[result.name] = result
    if len(ended) < len(rates) or len(result.history) == EPOCHS:
        continue  # the round is not over, or it was the last one
    values = run.status()
    ranked = sorted(sorted(ended), key=lambda name: values[name].values.get("accuracy", 0.0), reverse=True)
    winners, losers = ranked[:2], ranked[-2:]
    turn = len(result.history) // ROUND + 1
    for name in sorted(ended):
        number, source, changes = name.split(",")[0], name, {"epochs": turn * ROUND}
        if name in losers:  # exploit: weights, momentum and settings of a winner; explore: change the settings
            source = draw.choice(winners)
            changes["hparams"] = {"lr": ended[source].job.hparams["lr"] * draw.choice([0.5, 2.0])}
            changes["batch_size"] = draw.choice([32, 64, 128])
            changes["seed"] = 100 * turn + int(number)
        parents[f"{number}, round {turn}"] = source
        run.clone(source, f"{number}, round {turn}", **changes)
    ended = {}

results = run.wait()
line = [max((r for r in results if r.status == "done"), key=lambda r: r.last("accuracy")).name]
while line[-1] in parents:
    line.append(parents[line[-1]])
for name in reversed(line):
    job, score = results[name].job, results[name].last("accuracy")
    print(f"{name}: lr {job.hparams['lr']:.4f}, batch size {job.batch_size}, accuracy {score:.3f}")
