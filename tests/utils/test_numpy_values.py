"""Numbers and arrays of NumPy, wherever a user may have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_same_bits, numbers
from torch import nn
from torch.utils.data import Subset, TensorDataset

import shoal
from shoal.data import Pool, Rows, TensorSource
from shoal.utils.numpy_values import tensor_of

X, Y = numbers(1, 24, 4), numbers(2, 24, 1)
CPU = torch.device("cpu")


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1).double(), "data": (X, Y), "val": (X, Y), "loss": F.mse_loss, "batch_size": 8,
        "epochs": 3, "name": "a",
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


WHOLE = {"seed": 7, "data_seed": 3, "epochs": 2, "batch_size": 6, "accumulate": 2, "val_every": 2, "priority": 4}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.array, torch.tensor])
def test_whole_numbers(kind: Callable[[int], Any]) -> None:
    made, plain = job(**{name: kind(value) for name, value in WHOLE.items()}), job(**WHOLE)
    for name in WHOLE:
        assert type(getattr(made, name)) is int and getattr(made, name) == getattr(plain, name)
    (a,), (b,) = shoal.train([made], device="cpu", threads=kind(1)), shoal.train([plain], device="cpu", threads=1)
    assert_same_bits(a, b)
    assert job(epochs=None, steps=kind(5)).steps == 5
    assert shoal.EarlyStop("loss", patience=kind(2)).patience == 2
    assert len(shoal.folds(job(val=None), k=kind(3))) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", np.float64(1.0)), ("epochs", np.bool_(True)), ("batch_size", np.arange(2)), ("steps", torch.tensor(2.5)),
     ("epochs", np.int64(-1)), ("shuffle", np.int64(1)), ("clip_norm", np.array("x"))],
)  # fmt: skip
def test_what_is_no_such_number_is_a_mistake(field: str, value: Any) -> None:
    settings = {"epochs": None, "steps": 1} if field == "epochs" else {}
    with pytest.raises(shoal.JobError, match=field):
        job(**{**settings, field: value})


def test_other_numbers_and_flags() -> None:
    made = job(
        clip_norm=np.float32(0.5), shuffle=np.bool_(False), drop_last=np.array(True),
        hparams={"lr": np.float32(0.25), "betas": (np.float64(0.5), np.float32(0.75)), "eps": np.array(1e-6)},
    )  # fmt: skip
    plain = job(clip_norm=0.5, shuffle=False, drop_last=True, hparams={"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-6})
    assert (made.clip_norm, made.shuffle, made.drop_last, made.hparams) == (0.5, False, True, plain.hparams)
    results = shoal.train([made, job(name="b")], device="cpu")
    assert {result.tier for result in results} == {"stacked"}
    assert_same_bits(results[0], shoal.train([plain, job(name="b")], device="cpu")[0])
    rate = torch.tensor(0.1)
    assert job(hparams={"lr": rate}).hparams["lr"] is rate


def test_schedules_and_logs() -> None:
    table = np.linspace(1.0, 0.1, 20, dtype=np.float32)
    step = lambda model, batch: (F.mse_loss(model(batch[0]), batch[1]), {"half": np.float32(0.5)})  # noqa: E731
    result = shoal.train([job(schedule=lambda at: table[at], loss=None, step=step)], device="cpu")[0]
    assert (result.status, result.history[-1]["half"]) == ("done", 0.5)


def test_a_pack() -> None:
    seeds = np.arange(2)
    pack = shoal.Pack(
        [nn.Linear(4, 1), nn.Linear(4, 1)], loss=F.mse_loss, seeds=seeds, clip_norm=np.array([1.0, 2.0]),
        hparams=[{"lr": rate} for rate in np.array([0.1, 0.2])],
    )  # fmt: skip
    assert pack.step(X[:8].float(), Y[:8].float()).shape == (2,)


BIG = np.arange(24.0).reshape(6, 4)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "backwards": BIG[::-1],
    "columns backwards": BIG[:, ::-1],
    "big-endian": BIG.astype(">f8"),
    "big-endian, backwards": BIG.astype(">i4")[::-1],
    "a field of a record": np.zeros(6, dtype=[("a", "u1"), ("b", "f8")])["b"],
    "read-only": np.broadcast_to(np.arange(4.0), (6, 4)),
    "columns first": np.asfortranarray(BIG),
    "half": BIG.astype(np.float16),
    "flags": BIG > 3,
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_any_layout(kind: str) -> None:
    array = ARRAYS[kind]
    taken = Pool(CPU).open((array, np.arange(6))).source.take(torch.tensor([4, 0]))
    assert np.array_equal(taken[0].numpy(), array[[4, 0]])
    results = shoal.train([job(data=(X.numpy()[::-1], Y.numpy().astype(">f8")[::-1]), val=None)], device="cpu")
    same = shoal.train([job(data=(X.flip(0), Y.flip(0)), val=None)], device="cpu")
    assert_same_bits(results[0], same[0])


def test_an_array_that_is_copied_is_copied_once() -> None:
    pool = Pool(CPU)
    first, again = pool.open((X.numpy()[::-1],)).source, pool.open((X.numpy()[::-1],)).source
    assert first is again and pool.open((X.numpy(),)).source is not first
    plain = pool.open((X.numpy(),)).source
    assert isinstance(plain, TensorSource) and plain.leaves[0].data_ptr() == X.data_ptr()


@pytest.mark.parametrize(
    ("array", "words"),
    [(np.ma.masked_less(BIG, 3), "masked array"), (np.array(["a", "b"]), "pass numbers"),
     (BIG.astype(np.longdouble), "which torch does not have")],
)  # fmt: skip
def test_arrays_that_are_no_data(array: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(shoal.JobError, match=rf"job 'a': data .*{words}"):
        shoal.train([job(data=(array, np.arange(len(array))), val=None)], device="cpu")


def test_rows_and_inputs() -> None:
    backwards = np.arange(24)[::-1][:8]
    assert Rows((X, Y), backwards).index.tolist() == backwards.tolist()
    assert len(Pool(CPU).open(Subset(TensorDataset(X, Y), backwards)).source.take(torch.arange(3))) == 2  # type: ignore[arg-type]
    results = shoal.train([job()], device="cpu")
    assert torch.equal(results.predict(X.numpy()[::-1], batch_size=np.int64(5)), results.predict(X.flip(0)))
    assert tensor_of(BIG).data_ptr() == BIG.ctypes.data
