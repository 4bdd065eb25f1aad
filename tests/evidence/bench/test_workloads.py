"""Every way gets the same work."""

import pickle

import pytest
import torch

from shoal.evidence.bench.workloads import Spec, learning_rates, workload
from shoal.reference import solo


def test_the_same_spec_gives_the_same_data_weights_and_orders() -> None:
    spec = Spec(network="tiny", members=2, batches=2)
    a, b = workload(spec), workload(pickle.loads(pickle.dumps(spec)))
    assert torch.equal(a.tensors["tiny"][0], b.tensors["tiny"][0])
    cpu = torch.device("cpu")
    for first, second in zip(a.tasks, b.tasks, strict=True):
        assert torch.equal(a.orders(first).epoch(), b.orders(second).epoch())
        for p, q in zip(first.build(cpu).parameters(), second.build(cpu).parameters(), strict=True):
            assert torch.equal(p, q)


def test_members_differ_in_weights_orders_and_learning_rate() -> None:
    work = workload(Spec(network="tiny", members=2, batches=2))
    one, two = work.tasks
    assert one.lr != two.lr
    assert not torch.equal(work.orders(one).epoch(), work.orders(two).epoch())
    cpu = torch.device("cpu")
    assert not torch.equal(next(one.build(cpu).parameters()), next(two.build(cpu).parameters()))


def test_mixed_holds_unlike_networks_in_turn() -> None:
    work = workload(Spec(network="mixed", members=5, batches=1, batch_size=2))
    assert [task.kind.name for task in work.tasks] == ["mlp", "cnn", "gpt", "resnet", "mlp"]
    assert set(work.tensors) == {"mlp", "cnn", "gpt", "resnet"}
    assert set(work.only(work.tasks[:1]).tensors) == {"mlp"}


def test_learning_rates_span_a_factor_of_ten() -> None:
    rates = learning_rates(5)
    assert rates[0] == pytest.approx(3e-4)
    assert rates[-1] == pytest.approx(3e-3)
    assert learning_rates(1) == [3e-4]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"network": "vgg"}, "no network 'vgg'"),
        ({"network": "tiny", "members": 0}, "members is 0"),
        ({"network": "tiny", "precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Spec(**wrong)  # type: ignore[arg-type]


def test_jobs_are_the_same_work_by_the_reference_loop() -> None:
    from shoal.evidence.bench.ways import Eager

    work = workload(Spec(network="tiny", members=2, batches=3))
    way = Eager(work, torch.device("cpu"))
    way.step(6)
    for job, alone in zip(work.jobs(epochs=2), way.solos, strict=True):
        for a, b in zip(solo(job).model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
