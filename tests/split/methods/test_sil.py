"""SIL: parts trained apart, joined again; what each one touches, and what the report says."""

import copy
import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Job
from shoal.errors import SplitError
from shoal.split.core.method import Worker
from shoal.split.core.parts import Part, Task
from shoal.split.core.state import State, tensors_of
from shoal.split.executors.local import train_task
from shoal.split.methods.labels import Labels, nearest
from shoal.split.methods.sil_method import SILMethod
from shoal.split.sil import SilReport, costs, sil


def blobs(rows: int = 96, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes that are easy to tell apart."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=torch.Generator().manual_seed(9))
    y = torch.randint(0, classes, (rows,), generator=generator)
    return centres[y] + torch.randn(rows, features, generator=generator), y


class Net(nn.Module):
    def __init__(self, width: int = 16, outputs: int = 3) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, outputs)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(F.relu(self.fc2(self.drop(F.relu(self.fc1(x))))))
        return out


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def job_of(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "model": Net,
        "data": blobs(),
        "val": blobs(60, seed=1),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.Adam,
        "hparams": {"lr": 0.02},
        "batch_size": 20,
        "epochs": 15,
        "metrics": {"accuracy": right},
    }
    return Job(**(given | changes))


WAYS: list[dict[str, Any]] = [
    {"method": "labels", "variant": "A"},
    {"method": "labels", "variant": "B"},
    {"method": "heads"},
]


@pytest.mark.parametrize("way", WAYS, ids=["A", "B", "heads"])
def test_parts_trained_apart_make_a_network(way: dict[str, Any]) -> None:
    cuts = ["fc2", "fc3"]
    result = sil(job_of(), cuts, **way)
    assert result.status == "done"
    assert type(result.model) is Net
    Net().load_state_dict(result.model.state_dict(), strict=True)
    found = result.split
    assert isinstance(found, SilReport)
    assert found.joined["accuracy"] == pytest.approx(result.last("accuracy"))
    assert found.joined["accuracy"] > (0.5 if way.get("variant") == "A" else 0.8)  # three classes: 0.33 by chance
    assert len(found.own) == len(cuts)
    assert found.own[0]["accuracy"] > 0.45
    assert set(found.costs) == {"whole", *map(str, range(len(cuts) + 1))}
    assert all(found.costs[str(k)]["operations"] < found.costs["whole"]["operations"] for k in range(len(cuts) + 1))
    assert found.cut_bytes_measured == found.cut_bytes_predicted
    assert found.bytes_measured == pytest.approx(found.bytes_predicted, rel=0.02)
    crossed = 3 * 16 * 4 if way.get("variant") == "A" else 15 * 96 * 16 * 4
    assert found.cut_bytes_predicted == len(cuts) * crossed
    assert found.rounds_done == found.rounds == (15 if way.get("variant") == "A" else 15 + len(cuts))
    assert "joined" in str(found)


@pytest.mark.parametrize("way", WAYS, ids=["A", "B", "heads"])
def test_the_same_run_gives_the_same_bits(way: dict[str, Any]) -> None:
    a, b = (sil(job_of(epochs=2), ["fc2"], **way).model.state_dict() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("way", WAYS, ids=["A", "B", "heads"])
def test_windows_smaller_than_an_epoch_read_the_same_rows(way: dict[str, Any]) -> None:
    found = sil(job_of(epochs=8), ["fc2"], local_steps=3, **way)
    assert found.status == "done"
    assert found.split.cut_bytes_measured == found.split.cut_bytes_predicted
    assert found.split.joined["accuracy"] > 0.7


def task_of(way: SILMethod, role: str, **extras: Tensor) -> Task:
    state = State.of(way.model, way.extra_tensors())
    part = Part(number=0, role=role, steps=3, seed=5)
    return state.task(0, part, way.slices(part), extras=extras)


def test_the_right_part_of_variant_a_never_touches_the_inputs() -> None:
    x, y = blobs()
    outcomes = []
    for inputs in (x, torch.full_like(x, float("nan"))):
        way = SILMethod(job_of(), ["fc2"], "labels")
        task = task_of(way, "1")
        poisoned = SILMethod(job_of(data=(inputs, y)), ["fc2"], "labels") if inputs is x else None
        view = (poisoned or way).data
        if inputs is not x:
            view.source.leaves[0] = inputs  # type: ignore[attr-defined]
        outcomes.append(train_task(way.source, way, task, torch.device("cpu"), view))
    first, second = outcomes
    assert set(first.tensors) == {"fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"}
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("way", WAYS, ids=["A", "B", "heads"])
def test_gradients_never_cross(way: dict[str, Any]) -> None:
    """What happens right of the cut changes nothing left of it."""

    def left_of(outputs: int, lr: float) -> dict[str, Tensor]:
        model = Net()
        with torch.no_grad():
            model.fc3.weight.mul_(outputs)
        found = sil(job_of(model=model, epochs=2), ["fc2"], per_part={1: {"hparams": {"lr": lr}}}, **way)
        return {name: tensor for name, tensor in found.model.state_dict().items() if name.startswith("fc1")}

    torch.manual_seed(0)
    a = left_of(1, 0.01)
    torch.manual_seed(0)
    b = left_of(3, 0.3)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_part_has_settings_of_its_own() -> None:
    still = sil(job_of(epochs=1), ["fc2"], per_part={0: {"hparams": {"lr": 0.0}}})
    before = SILMethod(job_of(), ["fc2"]).model.state_dict()
    after = still.model.state_dict()
    assert torch.equal(before["fc1.weight"], after["fc1.weight"])
    assert not torch.equal(before["fc2.weight"], after["fc2.weight"])


def test_recovery_trains_the_joined_network() -> None:
    apart = sil(job_of(epochs=1), ["fc2"], recovery=0)
    joined = sil(job_of(epochs=1), ["fc2"], recovery=4)
    assert joined.split.rounds_done == apart.split.rounds_done + 4
    assert joined.last("val_loss") < apart.last("val_loss")  # type: ignore[operator]


def test_collapse_and_weak_parts_are_told() -> None:
    strong = sil(job_of(epochs=30), ["after:fc2"], "labels").split
    assert strong.own[0]["accuracy"] > 0.9
    assert strong.own[0]["spread"] < 0.5
    assert "adds nothing" in strong.advice
    weak = sil(job_of(model=lambda: Net(4), epochs=1), ["fc2"], "labels").split
    assert weak.own[0]["spread"] > strong.own[0]["spread"]
    assert "use method='heads'" in weak.advice
    assert weak.advice in str(weak)


def test_the_planner_cuts_where_nothing_is_said() -> None:
    found = sil(job_of(epochs=1)).split
    assert len(found.cut_at) == 1
    assert "chosen" in str(found)
    assert len(sil(job_of(epochs=1), 3, "heads").split.cut_at) == 2


@pytest.mark.parametrize("way", WAYS, ids=["A", "B", "heads"])
def test_half_of_six_equal_layers_needs_at_most_sixty_percent_of_the_memory(way: dict[str, Any]) -> None:
    layers = [layer for a, b in pairwise([784, *[512] * 5]) for layer in (nn.Linear(a, b), nn.ReLU())]
    x = torch.randn(16, 784)
    job = job_of(model=nn.Sequential(*layers, nn.Linear(512, 3)), data=(x, torch.arange(16) % 3), val=None, metrics={})
    found = costs(SILMethod(job, None, **way))
    assert max(found[part].peak_bytes for part in ("0", "1")) <= 0.6 * found["whole"].peak_bytes


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.head(x.flatten(1))
        return out


@pytest.mark.parametrize("way", [*WAYS, {"method": "labels", "layout": "channel"}], ids=["A", "B", "heads", "channels"])
def test_convolutions_and_running_statistics(way: dict[str, Any]) -> None:
    x, y = blobs(features=36)
    job = job_of(model=SmallCNN, data=(x.view(-1, 1, 6, 6), y), val=None, metrics={}, epochs=6)
    result = sil(job, ["conv2"], **way)
    assert result.status == "done"
    SmallCNN().load_state_dict(result.model.state_dict(), strict=True)
    assert int(result.model.norm.num_batches_tracked) == 30  # type: ignore[union-attr, arg-type]
    assert result.split.own[0]["accuracy"] > 0.45
    if way.get("layout") == "channel":
        table = SILMethod(job, ["conv2"], "labels", layout="channel").tables[0]
        assert torch.equal(table[:, :, :, :1, :1].expand_as(table), table)


def test_heads_work_for_any_loss() -> None:
    x, y = blobs()
    target = torch.stack([x.sum(1), y.float()], 1)
    job = job_of(model=lambda: Net(outputs=2), data=(x, target), val=None, loss=F.mse_loss, metrics={}, epochs=8)
    result = sil(job, ["fc2"], "heads", head_width=8)
    assert result.split.joined["loss"] < target.var(0).mean()
    assert "accuracy" not in result.split.joined
    with pytest.raises(SplitError, match="labels need classes"):
        sil(job, ["fc2"], "labels")


def test_labels() -> None:
    for distribution in ("normal", "uniform", "sign"):
        table = Labels(distribution=distribution, scale=2.0, vectors=3).draw(10, (400,), 1)
        assert table.shape == (10, 3, 400)
        assert abs(float(table.std()) - 2.0) < 0.1
        assert torch.equal(table, Labels(distribution=distribution, scale=2.0, vectors=3).draw(10, (400,), 1))
    labels = Labels(vectors=2)
    table = labels.draw(3, (5,), 0)
    assert labels.loss(table[:, 1], table, torch.arange(3)) == 0  # the nearest of its class counts
    assert labels.loss(table[:, 1], table, torch.tensor([1, 2, 0])) > 0
    assert nearest(table[:, 1], table).tolist() == [0, 1, 2]
    read = Labels(noise=0.5).read(table[:, :1], torch.zeros(2000, dtype=torch.int64))
    assert abs(float((read - table[0, 0]).std()) - 0.5) < 0.05


def test_a_lost_part_stops_nobody() -> None:
    """Without the activations of a window the next part has no step in that round, and continues with the one after."""
    way = SILMethod(job_of(epochs=3), ["fc2"], "heads")
    executor = [Worker(0), Worker(1)]
    (left,) = way.parts(0, executor)
    way.see(0, [left], [None])
    assert [part.role for part in way.parts(1, executor)] == ["0"]
    task = task_of(way, "0")
    given = train_task(way.source, way, task, torch.device("cpu"), way.data)
    way.see(1, way.parts(1, executor), [given])
    assert [part.role for part in way.parts(2, executor)] == ["0", "1"]
    kept = copy.deepcopy(way.stored())
    again = SILMethod(job_of(epochs=3), ["fc2"], "heads")
    again.restore(kept)
    assert again.parts(2, executor) == way.parts(2, executor)
    assert torch.equal(again.extras(2, again.parts(2, executor)[1])["activations"], given.extras["activations"])
    assert len(way.parts(2, executor[:1])) == 1  # one worker is left
    assert tensors_of(way.heads[0]).keys() == tensors_of(again.heads[0]).keys()


def test_a_run_folder_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sil(job_of(epochs=3), ["fc2"], "heads")
    extras = SILMethod.extras

    def interrupted(self: SILMethod, number: int, part: Part) -> dict[str, Tensor]:
        if number == 2:
            raise KeyboardInterrupt
        return extras(self, number, part)

    monkeypatch.setattr(SILMethod, "extras", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sil(job_of(epochs=3), ["fc2"], "heads", out=tmp_path, checkpoint_every=0.001)
    monkeypatch.setattr(SILMethod, "extras", extras)
    result = sil(job_of(epochs=3), ["fc2"], "heads", out=tmp_path)
    a, b = whole.model.state_dict(), result.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert result.split.joined == whole.split.joined
    assert result.split.own == whole.split.own


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "label"}, "method is 'label'; use 'labels' or 'heads'"),
        ({"method": "labels", "variant": "C"}, "variant is 'C'"),
        ({"variant": "B"}, "variant is 'B', and method='heads' has none"),
        ({"cuts": "fc2"}, "cuts is 'fc2'; use a list"),
        ({"cuts": 1}, "cuts is 1; use names of modules, or a number of parts"),
        ({"cuts": 9}, "9 parts need 8 cuts"),
        ({"cuts": ["fc7"]}, "no module 'fc7'"),
        ({"recovery": -1}, "recovery is -1"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"method": "labels", "scale": 0.0}, "scale is 0.0"),
        ({"method": "labels", "vectors": 0}, "vectors is 0"),
        ({"method": "labels", "distribution": "cauchy"}, "distribution is 'cauchy'"),
        ({"method": "labels", "head_width": 4}, "head_width is 4 and method='labels' has no heads"),
        ({"method": "heads", "scale": 2.0}, "has no labels"),
        ({"method": "heads", "head_width": 0}, "head_width is 0"),
        ({"method": "labels", "variant": "B", "noise": 0.1}, "noise is 0.1 and variant 'B'"),
        ({"per_part": {7: {}}}, "there are parts 0 to 1"),
        ({"per_part": {0: {"epochs": 3}}}, "part 0 has 'epochs'"),
    ],
)
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SplitError, match=said) as error:
        sil(job_of(epochs=1), **{"cuts": ["fc2"], **settings})
    assert "\n" not in str(error.value)


def test_a_job_with_a_step_of_its_own_is_refused() -> None:
    job = job_of(loss=None, step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(SplitError, match="use loss= in place of step="):
        sil(job, ["fc2"])


def test_too_few_workers_are_told() -> None:
    way = SILMethod(job_of(), ["fc2", "fc3"])
    with pytest.raises(SplitError, match="3 parts need 3 workers, not 2"):
        way.parts(0, [Worker(0), Worker(1)])
    with pytest.raises(SplitError, match="read the same rows"):
        way.parts(0, [Worker(0, shard=0), Worker(1, shard=1), Worker(2, shard=2)])


def test_what_a_part_would_not_know_is_refused() -> None:
    x, y = blobs()
    job = Job(model=Net, data=(x, y), loss=F.cross_entropy, batch_size=16, epochs=1)
    with pytest.raises(SplitError, match=r"params is set.* per_part="):
        SILMethod(dataclasses.replace(job, params=lambda model: model.fc1.parameters()))
    lazy = dataclasses.replace(job, model=lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(SplitError, match="has no shape yet"):
        SILMethod(lazy)
