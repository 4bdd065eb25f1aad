"""Every way gets the same work."""

import pickle

import pytest
import torch

from shoal.evidence.bench.ways import Loop, build, epochs
from shoal.evidence.bench.workloads import WITH_DROPOUT, Spec, kind_of, learning_rates, workload
from shoal.reference import solo

CPU = torch.device("cpu")


def test_the_same_spec_gives_the_same_data_weights_and_orders() -> None:
    spec = Spec(network="tiny", members=2, batches=2)
    for first, second in zip(workload(spec), workload(pickle.loads(pickle.dumps(spec))), strict=True):
        assert torch.equal(first.data[0], second.data[0])
        assert torch.equal(epochs(first)(), epochs(second)())
        for p, q in zip(build(first, CPU).parameters(), build(second, CPU).parameters(), strict=True):
            assert torch.equal(p, q)


def test_members_differ_in_weights_orders_and_learning_rate() -> None:
    one, two = workload(Spec(network="tiny", members=2, batches=2))
    assert one.hparams != two.hparams
    assert not torch.equal(epochs(one)(), epochs(two)())
    assert not torch.equal(next(build(one, CPU).parameters()), next(build(two, CPU).parameters()))


def test_mixed_holds_unlike_networks_in_turn() -> None:
    jobs = workload(Spec(network="mixed", members=5, batches=1, batch_size=2))
    assert [kind_of(job) for job in jobs] == ["mlp", "cnn", "gpt", "resnet", "mlp"]
    assert jobs[0].data is jobs[4].data


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
        ({"network": "tiny", "dropout": 1.0}, "dropout is 1; use a rate of at least 0"),
        ({"network": "resnet", "dropout": 0.1}, "resnet has no rate of dropout to set; tiny, mlp"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Spec(**wrong)  # type: ignore[arg-type]


def test_the_loop_is_the_reference_loop() -> None:
    jobs = workload(Spec(network="tiny", members=2, batches=3), epochs=2)
    way = Loop(jobs, CPU)
    way.step(6)
    for job, alone in zip(jobs, way.solos, strict=True):
        for a, b in zip(solo(job).model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("network", WITH_DROPOUT)
def test_dropout_is_in_the_network_and_leaves_its_weights(network: str) -> None:
    (with_dropout,) = workload(Spec(network=network, members=1, batches=1, batch_size=2, dropout=0.5))
    (without,) = workload(Spec(network=network, members=1, batches=1, batch_size=2, dropout=0.0))
    model, other = build(with_dropout, CPU), build(without, CPU)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    x = with_dropout.data[0]
    assert not torch.equal(model(x), model(x)) and torch.equal(other(x), other(x))
    assert torch.equal(model.eval()(x), other.eval()(x))
