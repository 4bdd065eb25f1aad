"""Independent subnet training: the parts, the corrections, and that it learns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.split.networks import accuracy, make_job, mlp, rows, same_bits
from tests.split.test_trainer import Watched, plain_loop
from torch import nn

import shoal
from shoal.engine.members.member import seeded
from shoal.engine.members.ownership import build_model
from shoal.errors import SplitError
from shoal.split.core.method import Worker
from shoal.split.core.state import State
from shoal.split.executors.local import Serial
from shoal.split.methods.ist import IST
from shoal.split.methods.renorm import renormalise
from shoal.split.subnets.assignment import neighbours
from shoal.split.trainer import train_split


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}, "clip_norm": 0.5}], ids=["sgd", "adam"]
)
def test_one_worker_with_all_units_is_ordinary_training_bit_for_bit(settings: dict[str, Any]) -> None:
    job = make_job(steps=17, **settings)
    result = shoal.split.ist(job, workers=1, local_steps=5)
    assert same_bits(result.model, plain_loop(job, 17))


def test_the_shards_start_different_and_every_weight_is_trained_in_time() -> None:
    job = make_job(lambda: mlp(6, 13, 11, 3), steps=80, hparams={"lr": 0.05, "weight_decay": 0.01})
    method = IST(job, 3, 4, recovery=0)
    executor = Watched(job, method, 3)
    result = train_split(job, method, executor)
    first = [task.tensors["0.weight"] for task in executor.tasks[:3]]
    assert not any(torch.equal(a, b) for a, b in [(first[0], first[1]), (first[1], first[2])] if a.shape == b.shape)
    with seeded(job.seed, torch.device("cpu")):
        start = build_model(job).state_dict()
    for name, value in result.model.state_dict().items():
        if value.is_floating_point() and "running" not in name:
            assert bool((value != start[name]).all()), name


class Residual(nn.Module):
    """Two blocks around a stream of 8, and a head with a hidden layer."""

    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.up, self.norm, self.down = nn.Linear(8, inner), nn.BatchNorm1d(inner), nn.Linear(inner, 8)
        self.hidden, self.head = nn.Linear(8, hidden), nn.Linear(hidden, 3)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        x_BD = self.embed(x_BD)
        x_BD = x_BD + self.down(F.relu(self.norm(self.up(x_BD))))
        logits: torch.Tensor = self.head(F.relu(self.hidden(x_BD)))
        return logits


def test_a_residual_stream_stays_whole_where_the_rest_is_enough() -> None:
    def groups(inner: int, hidden: int, streams: bool | str) -> set[str]:
        method = IST(make_job(lambda: Residual(inner, hidden).double(), steps=4), 2, 2, streams=streams)
        return set(method.units.groups)

    assert groups(16, 16, "auto") == groups(16, 16, False) == {"up", "hidden"}
    assert groups(16, 16, True) == {"embed", "up", "hidden"}
    assert groups(2, 2, "auto") == {"embed", "up", "hidden"}, "most weights would be whole"
    assert groups(2, 2, False) == {"up", "hidden"}
    job = make_job(lambda: Residual(16, 16).double(), steps=4)
    method = IST(job, 2, 2)
    assert method.settings["streams"] is False and IST(job, 2, 2, streams=True).settings["streams"] is True
    parts = method.parts(0, [Worker(0), Worker(1)])
    assert method.network(parts[0]).get_parameter("down.weight").shape == (8, 8)
    with pytest.raises(SplitError, match="streams is 'no'; use True, False or 'auto'"):
        IST(job, 2, 2, streams="no")  # type: ignore[arg-type]


class Images(nn.Module):
    """Reads 16 numbers as an image of 4 x 4, by convolutions of these widths with batch norm."""

    def __init__(self, *widths: int, hidden: int = 0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((1, *widths)):
            layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.convs = nn.Sequential(*layers)
        self.hidden = nn.Linear(widths[-1], hidden) if hidden else nn.Identity()
        self.head = nn.Linear(hidden or widths[-1], 3)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        x_BC = self.convs(x_BD.view(-1, 1, 4, 4)).mean((2, 3))
        logits: torch.Tensor = self.head(F.relu(self.hidden(x_BC)))
        return logits


def image_job(*widths: int, hidden: int = 0, **settings: Any) -> shoal.Job:
    return make_job(lambda: Images(*widths, hidden=hidden).double(), data=rows(width=16), **settings)


@pytest.mark.parametrize(
    ("widths", "hidden", "distributed"),
    [
        ((8,), 0, {"convs.0"}),
        ((8, 8), 0, {"convs.3"}),
        ((8, 8, 8), 0, {"convs.3"}),
        ((8, 8, 8), 8, {"convs.3", "hidden"}),
        ((8, 8, 8, 8, 8), 0, {"convs.3", "convs.9"}),
    ],
)
def test_of_convolutions_every_other_layer_is_distributed(
    widths: tuple[int, ...], hidden: int, distributed: set[str]
) -> None:
    job = image_job(*widths, hidden=hidden, steps=4)
    method = IST(job, 2, 2)
    assert method.units.groups.keys() == distributed and not any(neighbours(method.units).values())
    assert len(IST(job, 2, 2, layers="all").units.groups) == len(widths) + (hidden > 0)


def test_every_weight_of_a_convolutional_network_is_trained_in_every_round() -> None:
    job = image_job(8, 8, 8, steps=2)
    with seeded(job.seed, torch.device("cpu")):
        start = build_model(job).state_dict()
    state = shoal.split.ist(job, 4, 2).model.state_dict()
    assert all(bool((state[name] != start[name]).all()) for name in start if name.endswith("weight"))
    state = shoal.split.ist(job, 4, 2, layers="all").model.state_dict()
    assert bool((state["convs.3.weight"] == start["convs.3.weight"]).any())


def test_which_layers_are_distributed_is_a_setting_and_is_said() -> None:
    job = image_job(8, 8, 8, steps=20)
    method = IST(job, 2, 2)
    assert method.settings["layers"] == "alternate" and method.recovery == 0, "no weight waits for a later round"
    everything = IST(job, 2, 2, layers="all")
    assert everything.settings["layers"] == "all" and everything.recovery == 1
    for other in ({"overlap": 0.25}, {"backward_only": True}):
        assert len(IST(job, 2, 2, **other).units.groups) == 3, "another remedy was chosen"
    assert IST(job, 2, 2, overlap=0.25, layers="alternate").units.groups.keys() == {"convs.3"}
    neurons = make_job(steps=20)
    assert len(IST(neurons, 2, 2).units.groups) == 2 and IST(neurons, 2, 2).recovery == 1
    assert IST(neurons, 2, 2, layers="alternate").units.groups.keys() == {"3"}
    report = shoal.split.ist(image_job(8, 8, 8, steps=2), 2, 2).split
    assert "every other one is distributed (convs.3)" in str(report) and report.bytes_measured == report.bytes_predicted
    assert not shoal.split.ist(make_job(steps=2), 2, 2).split.notes


def test_narrow_parts_really_are_narrow_and_disjoint() -> None:
    job = make_job(lambda: mlp(6, 12, 12, 3), steps=8)
    method = IST(job, 3, 4, recovery=0)
    executor = Watched(job, method, 3)
    report = train_split(job, method, executor).split
    for task, outcome in zip(executor.tasks, executor.outcomes, strict=True):
        assert outcome is not None
        assert [list(task.tensors[f"{i}.weight"].shape) for i in (0, 3, 6)] == [[4, 6], [4, 4], [3, 4]]
        assert {n: t.shape for n, t in outcome.tensors.items()} == {n: t.shape for n, t in task.tensors.items()}
    for number in range(2):
        kept = [task.part.keep["0"] for task in executor.tasks[3 * number : 3 * number + 3]]
        assert sorted(torch.cat(kept).tolist()) == list(range(12))
    assert max(report.peak_measured.values()) < report.peak_predicted["whole"]
    again = shoal.split.ist(make_job(lambda: mlp(6, 12, 12, 3), steps=8), 3, 4, recovery=1).split
    assert again.peak_measured.keys() == {"0", "1", "2", "recovery"}
    assert again.peak_measured["0"] == report.peak_measured["0"] < again.peak_measured["recovery"]


def test_a_block_is_written_back_as_it_is_and_shared_weights_are_averaged() -> None:
    job = make_job(lambda: mlp(6, 12, 12, 3), steps=4)
    method = IST(job, 3, 4, recovery=0, renormalise=False)
    executor = Watched(job, method, 3)
    state = train_split(job, method, executor).model.state_dict()
    outcomes = [outcome for outcome in executor.outcomes if outcome is not None]
    for task, outcome in zip(executor.tasks, outcomes, strict=True):
        for name in ("0.weight", "3.weight", "1.running_var"):
            assert torch.equal(method.slices(task.part)[name].take(state[name]), outcome.tensors[name])
    bias = [outcome.tensors["6.bias"] for outcome in outcomes]
    assert torch.equal(state["6.bias"], (bias[0] + bias[1] + bias[2]) / 3)


def test_the_volume_is_the_published_formula() -> None:
    """One way, all workers: d*h + (L-2)*h^2/n + h*C floats, and what is not in it: biases, in all workers the last.

    With overlap a worker keeps k = o + (1 - o)/n of each layer: n * (k*d*h + k^2*(L-2)*h^2 + k*h*C). Where every other
    layer is distributed a weight has one owner, or else all n.
    """
    d, h, c, n = 20, 32, 5, 4

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(i, o, bias=False) for i, o in ((d, h), (h, h), (h, c)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.c(self.b(self.a(x).relu()).relu())
            return out

    data = (torch.randn(80, d), torch.randint(0, c, (80,)))
    job = make_job(lambda: Net(), data=data, steps=12)
    report = shoal.split.ist(job, n, 3, recovery=0).split
    assert report.bytes_measured == report.bytes_predicted == 4 * 2 * 4 * (d * h + h * h // n + h * c)
    report = shoal.split.ist(job, n, 3, recovery=0, overlap=0.5).split
    kept = h // 2 + h // 2 // n
    assert report.bytes_measured == report.bytes_predicted == 4 * 2 * 4 * n * (d * kept + kept * kept + kept * c)
    report = shoal.split.ist(job, n, 3, layers="alternate").split
    assert report.bytes_measured == report.bytes_predicted == 4 * 2 * 4 * (n * d * h + h * h + h * c)


def test_moments_travel_with_their_weights() -> None:
    job = make_job(lambda: mlp(6, 12, 3), steps=12, optimizer=torch.optim.Adam, hparams={"lr": 0.01})
    method = IST(job, 3, 4, recovery=0)
    executor = Watched(job, method, 3)
    result = train_split(job, method, executor)
    second = executor.tasks[3:6]
    for task in second:
        assert task.moments["0.weight/exp_avg"].shape == task.tensors["0.weight"].shape
        assert float(task.moments["0.weight/step"]) == 4
        assert task.moments["0.weight/exp_avg"].abs().sum() > 0
    torch.optim.Adam(result.model.parameters()).load_state_dict(result.optimizer_state)
    last = result.optimizer_state["state"][4]  # of 3.weight, the fifth parameter
    assert last["exp_avg_sq"].shape == (3, 12) and float(last["step"]) == 12
    fresh = IST(job, 3, 4, recovery=0, moments="fresh")
    watched = Watched(job, fresh, 3)
    train_split(job, fresh, watched)
    assert not any(task.moments for task in watched.tasks)


def test_recovery_rounds_train_the_whole_network() -> None:
    job = make_job(steps=12)
    method = IST(job, 3, 2, recovery=2)
    executor = Watched(job, method, 3)
    train_split(job, method, executor)
    kept = [[bool(task.part.keep) for task in executor.tasks if task.round == number] for number in range(6)]
    assert kept == [[True] * 3] * 4 + [[False] * 3] * 2
    assert IST(make_job(steps=12), 3, 2).recovery == 1 and IST(make_job(steps=4), 3, 2).recovery == 0


def test_backward_only_trains_its_own_slices_in_the_whole_network() -> None:
    job = make_job(lambda: mlp(6, 12, 12, 3), steps=4, hparams={"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9})
    method = IST(job, 3, 4, recovery=0, backward_only=True, renormalise=False)
    executor = Watched(job, method, 3)
    state = train_split(job, method, executor).model.state_dict()
    outcomes = [outcome for outcome in executor.outcomes if outcome is not None]
    for task, outcome in zip(executor.tasks, outcomes, strict=True):
        assert task.tensors["3.weight"].shape == (12, 12) and outcome.tensors["3.weight"].shape == (4, 4)
        assert outcome.moments["3.weight/momentum_buffer"].shape == (4, 4)
        place = method.returns(task.part)["3.weight"]
        assert torch.equal(place.take(state["3.weight"]), outcome.tensors["3.weight"])
    owned = torch.zeros(12, 12, dtype=torch.bool)
    for task in executor.tasks:
        place = method.returns(task.part)["3.weight"]
        place.put(owned, torch.ones(4, 4, dtype=torch.bool))
    start = executor.tasks[0].tensors["3.weight"]
    assert torch.equal(state["3.weight"][~owned], start[~owned]) and int(owned.sum()) == 48


def test_overlap_and_unequal_shares() -> None:
    job = make_job(lambda: mlp(6, 20, 3), steps=4)
    parts = IST(job, 2, 4, overlap=0.2, recovery=0).parts(0, [Worker(0), Worker(1)])
    both = set(parts[0].keep["0"].tolist()) & set(parts[1].keep["0"].tolist())
    assert len(both) == 4
    result = shoal.split.ist(job, 2, 2, overlap=0.2, recovery=0)
    assert result.status == "done" and result.split.bytes_measured == result.split.bytes_predicted
    parts = IST(job, 2, 4, shares=[3, 1], recovery=0).parts(0, [Worker(0), Worker(1)])
    assert [len(part.keep["0"]) for part in parts] == [15, 5]
    parts = IST(job, 2, 4, shares="speed", recovery=0).parts(0, [Worker(0, speed=1.0), Worker(1, speed=4.0)])
    assert [len(part.keep["0"]) for part in parts] == [4, 16]
    parts = IST(job, 2, 4, shares=[3, 1], recovery=0).parts(0, [Worker(1)])
    assert [len(part.keep["0"]) for part in parts] == [20]


def test_normalisation_is_estimated_from_training_rows() -> None:
    job = make_job(lambda: mlp(6, 12, 3), steps=1)
    method = IST(job, 2, 1)
    model = build_model(job)
    momentum = model[1].momentum  # type: ignore[index]
    assert renormalise(job, model, method.data) == 1
    with torch.no_grad():
        order = shoal.split.core.reading.Reading(job, 90).order(0)
        hidden = [model[0](job.data[0][rows]) for rows in torch.split(order, 8)]  # type: ignore[index]
    mean = sum(h.mean(0) for h in hidden) / len(hidden)
    assert torch.allclose(model[1].running_mean, mean)  # type: ignore[index]
    assert model[1].momentum == momentum and model.training  # type: ignore[index]
    assert renormalise(job, mlp(6, 4, 3, norm=False), method.data) == 0
    model[1].eval()  # type: ignore[index]  # frozen by its user
    assert renormalise(job, model, method.data) == 0


def test_evaluation_does_not_change_training() -> None:
    job = make_job(val=rows(20), steps=10)
    often, seldom = (shoal.split.ist(job, 2, 2, val_every=every) for every in (1, 5))
    assert same_bits(often.model, seldom.model) and len(often.history) == 5


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"workers": 13}, "13 workers, but layer '0' has 12 units"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"shares": [1, 2]}, r"shares is \[1, 2\]; use a positive number for each of 3 workers"),
        ({"shares": "fast"}, "shares is 'fast'"),
        ({"recovery": -1}, "recovery is -1; use a whole number, 0 or more"),
        ({"blocks": "some"}, "blocks is 'some'"),
        ({"blocks": True}, "residual block"),
        ({"layers": "some"}, "layers is 'some'; use 'all', 'alternate' or 'auto'"),
        ({"local_steps": 2.5}, "local_steps is 2.5"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SplitError, match=line) as error:
        shoal.split.ist(make_job(lambda: mlp(6, 12, 3)), **({"workers": 3} | settings))
    assert "\n" not in str(error.value)


def test_a_network_with_nothing_to_deal() -> None:
    with pytest.raises(SplitError, match="has no units to distribute"):
        shoal.split.ist(make_job(lambda: nn.Linear(6, 3).double()), 2)


def test_a_step_of_the_jobs_own() -> None:
    def own(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        return loss, {"double": 2 * loss}

    x, y = rows()
    job = make_job(data={"x": x, "y": y}, loss=None, step=own, steps=6)
    row = shoal.split.ist(job, 2, 2).history[-1]
    assert row["double"] == pytest.approx(2 * row["loss"])

    def by_name(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(input=batch["x"]), batch["y"])

    with pytest.raises(SplitError, match="pass its inputs without names"):
        shoal.split.ist(make_job(data={"x": x, "y": y}, loss=None, step=by_name), 2)


class Losing(Serial):
    """Never brings back the first worker's part."""

    def run(self, tasks: Sequence[Any]) -> Sequence[Any]:
        return [None, *super().run(tasks)[1:]]


def test_a_lost_part_keeps_its_last_committed_value() -> None:
    job = make_job(steps=2)
    method = IST(job, 3, 2, recovery=0, renormalise=False)
    result = train_split(job, method, Losing(job, method, 3))
    with seeded(job.seed, torch.device("cpu")):
        start = State.of(build_model(job)).tensors
    part = method.parts(0, [Worker(n) for n in range(3)])[0]
    place = method.slices(part)["0.weight"]
    now = result.model.state_dict()["0.weight"]
    assert torch.equal(place.take(now), place.take(start["0.weight"])) and not torch.equal(now, start["0.weight"])


@pytest.mark.slow
def test_ist_reaches_ordinary_training_on_real_digits() -> None:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]

    def job(rate: float, epochs: int, seed: int) -> shoal.Job:
        return make_job(
            lambda: mlp(64, 256, 256, 10, dtype=torch.float32),
            seed=seed,
            data=(x[:1297], y[:1297]),
            val=(x[1297:], y[1297:]),
            metrics={"accuracy": accuracy},
            hparams={"lr": rate},
            batch_size=32,
            epochs=epochs,
            val_every=epochs,
        )

    results = [shoal.split.ist(job(0.3, 60, seed), 4, 50) for seed in range(3)]
    reached = statistics.mean(result.value("accuracy") for result in results)  # of one seed: rounding alone moves it
    ordinary = statistics.mean(shoal.solo(job(0.1, 20, seed)).value("accuracy") for seed in range(3))
    assert reached > ordinary - 0.02
    report = results[0].split
    assert max(report.peak_measured.values()) > 0 and math.isfinite(report.seconds_predicted)
