"""Fewer bits for each number: how much is rounded away, and that the sender's feedback gives it back."""

import pytest
import torch
from torch import Tensor

from shoal.errors import SplitError
from shoal.split.core.parts import Slice
from shoal.split.net._codec import CODECS, Feedback, codec_named, for_moments, for_weights

SHAPES = [(), (1,), (7,), (3, 5), (4, 3, 2, 2), (0, 4), (4, 0), (0,)]


def there_and_back(name: str, value: Tensor) -> Tensor:
    codec = CODECS[name]
    data = codec.encode(value)
    assert data.dtype == torch.uint8 and data.dim() == 1
    assert data.numel() == codec.size(tuple(value.shape), value.dtype)
    return codec.decode(data, tuple(value.shape), value.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_shape_type_and_size_come_back(name: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = there_and_back(name, torch.randn(shape).to(dtype))
        assert (found.shape, found.dtype) == (torch.Size(shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])
def test_exact_keeps_every_bit(dtype: torch.dtype) -> None:
    value = (torch.randn(5, 3) * 100).to(dtype)
    assert torch.equal(there_and_back("exact", value), value)


def test_errors_are_bounded() -> None:
    value = torch.randn(64, 100) * torch.logspace(-4, 3, 64).unsqueeze(1)
    assert ((there_and_back("fp16", value) - value).abs() <= value.abs() * 2**-11 + 2**-25).all()
    assert ((there_and_back("bf16", value) - value).abs() <= value.abs() * 2**-8).all()
    rows = value.abs().amax(1, keepdim=True)
    error = (there_and_back("int8", value) - value).abs()
    assert (error <= rows / 127 * 0.5001).all()  # each row by its own scale
    assert (error.amax(1, keepdim=True) >= rows / 127 * 0.3).all()  # and no better than that: it is rounded


def test_zeros_stay_zeros_and_large_numbers_finite() -> None:
    for name in CODECS:
        assert torch.equal(there_and_back(name, torch.zeros(3, 4)), torch.zeros(3, 4))
    assert there_and_back("fp16", torch.tensor([1e6, -1e6])).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    found = there_and_back(name, torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert not found[0].isfinite().all() and found[1].isfinite().all()


def test_only_floats_lose_bits_and_moments_never_all_of_them() -> None:
    assert for_weights(CODECS["int8"], torch.int64).exact
    assert for_moments(CODECS["int8"], torch.float32).name == "bf16"
    assert for_moments(CODECS["exact"], torch.float32).exact
    tiny = torch.tensor([1e-12])  # an Adam second moment
    assert there_and_back("bf16", tiny).item() == pytest.approx(1e-12, rel=2**-8)
    assert there_and_back("fp16", tiny).item() == 0.0


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8"])
def test_feedback_takes_the_mean_error_to_zero(name: str) -> None:
    codec, shape = CODECS[name], (6, 40)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 3
    feedback, plain, total = Feedback(codec, {"w": shape}), torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    errors = {}
    for rounds in range(1, 201):
        sent = feedback.corrected(Slice("w"), value)
        total += codec.decode(codec.encode(sent), shape, value.dtype)
        errors[rounds] = (total / rounds - value).abs().max().item()
    plain = (there_and_back(name, value) - value).abs().max()
    assert errors[1] == pytest.approx(plain.item(), rel=1e-3)  # one message is as rough as ever
    assert errors[200] <= errors[1] / 50  # their mean is not


def test_the_rest_of_a_block_waits_at_its_place_in_the_whole() -> None:
    codec, shape = CODECS["int8"], (8, 4)
    feedback = Feedback(codec, {"w": shape})
    evens, odds = Slice("w", (torch.arange(0, 8, 2),)), Slice("w", (torch.arange(1, 8, 2),))
    value = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    first = feedback.corrected(evens, value)
    assert torch.equal(first, value)
    rest = value - codec.decode(codec.encode(value), (4, 4), value.dtype)
    assert torch.equal(feedback.corrected(odds, value), value)  # other rows: nothing is left there
    torch.testing.assert_close(feedback.corrected(evens, value), value + rest, rtol=0, atol=0)


def test_exact_and_counters_have_no_feedback() -> None:
    value = torch.tensor([3])
    assert Feedback(CODECS["int8"], {"n": (1,)}).corrected(Slice("n"), value) is value
    weight = torch.randn(2)
    assert Feedback(CODECS["exact"], {"w": (2,)}).corrected(Slice("w"), weight) is weight


def test_an_unknown_codec_is_told() -> None:
    with pytest.raises(SplitError, match="codec is 'int4'; use one of 'exact', 'fp16', 'bf16', 'int8'"):
        codec_named("int4")
