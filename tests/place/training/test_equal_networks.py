"""Placed training of networks with residual connections and of networks that others wrote equals the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.place.training.jobs import job_of, largest_difference, placement_of, rows
from torch import Tensor, nn

import shoal


class Block(nn.Module):
    """Two convolutions with batch norm, around which the input goes by itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.last = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.second(torch.relu(self.norm(self.first(x))))) + self.shortcut(x))


def residual() -> nn.Module:
    return nn.Sequential(
        Block(1, 4), nn.Dropout2d(0.2), Block(4, 6), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip


class Mixer(nn.Module):
    """Linear layers around which the input goes by itself; no layer looks at other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = nn.Linear(12, 16), nn.Linear(16, 12), nn.LayerNorm(12), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def mixers() -> nn.Module:
    return nn.Sequential(Mixer(), Mixer(), nn.Linear(12, 3))


UNEVEN: dict[str, Any] = {"rows": (6, 4, 2)}
"""With 44 rows and batches of 12, the last batch is smaller too."""


@pytest.mark.parametrize("cut", ["2.norm", "5"])  # inside a block, where two tensors cross; after both
@pytest.mark.parametrize("sync", ["server", "allreduce", "sharded", "factors"])
def test_residual_blocks_with_batch_norm_and_uneven_workers(sync: str, cut: str) -> None:
    job = job_of(residual, rows(1, 6, 6))
    (result,) = shoal.train([job], placement=placement_of(job, cut, sync, **UNEVEN))
    assert not result.split.lost
    assert largest_difference(result, job) < 1e-9


@pytest.mark.parametrize("sync", ["server", "allreduce", "sharded", "factors"])
def test_micro_batches_of_residual_blocks_and_uneven_workers(sync: str) -> None:
    job = job_of(mixers, rows(12))
    placement = placement_of(job, "1.up", sync, micro_batches=2, **UNEVEN)
    (result,) = shoal.train([job], placement=placement)
    assert not result.split.lost
    assert largest_difference(result, job) < 1e-9


def test_batch_norm_of_its_own_rows_is_that_of_one_worker() -> None:
    """ "own" is not the plain loop: with one worker, whose rows are all of them, it is."""
    job = job_of(residual, rows(1, 6, 6))
    (result,) = shoal.train([job], placement=placement_of(job, "5", workers=1, rows=(12,), batch_norm="own"))
    assert largest_difference(result, job) < 1e-9
    (apart,) = shoal.train([job], placement=placement_of(job, "5", batch_norm="own"))
    assert largest_difference(apart, job) > 1e-6


# --- networks that others wrote -------------------------------------------------------------------------------------

TOKENS = torch.randint(0, 50, (40, 10), generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASK = torch.ones_like(TOKENS).index_fill(1, torch.tensor([8, 9]), 0)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=3,
        )
    )  # fmt: skip


def gpt2(*, tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, tie_word_embeddings=tied, **ends)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
            num_hidden_layers=2, num_labels=3,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    )


WORDS = {"input_ids": TOKENS, "attention_mask": MASK, "labels": CLASSES}
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
PICTURES = {"pixel_values": IMAGES, "labels": CLASSES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "data", "how"),
    [
        (bert, WORDS, {"mode": "placed"}),
        (bert, WORDS, {"cut": "bert.encoder.layer.0.output.LayerNorm", "sync": "factors", "micro_batches": 2}),
        (lambda: gpt2(tied=False), TEXT, {"mode": "placed"}),
        (lambda: gpt2(tied=True), TEXT, {"mode": "data parallel"}),
        (vit, PICTURES, {"mode": "placed", "sync": "sharded"}),
        (resnet, PICTURES, {"mode": "placed"}),
    ],
    ids=["bert", "bert cut deep", "gpt2", "gpt2 tied", "vit", "resnet"],
)
def test_networks_of_transformers_over_four_workers(
    network: Callable[[], nn.Module], data: dict[str, Tensor], how: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    job = job_of(
        network, data, batch_size=16, step=lambda model, batch: model(**batch).loss, steps=20,
        optimizer=torch.optim.SGD, hparams={"lr": 0.1},
    )  # fmt: skip
    sample = {name: column[:4] for name, column in data.items()}
    placement = shoal.place(job.model(), sample, workers=4, link="100Mbit", **how)  # type: ignore[operator]
    (result,) = shoal.train([job], placement=placement)
    assert result.split.workers == 4 and not result.split.lost
    assert largest_difference(result, job) < 1e-9
