"""Networks of transformers and peft, with their own dropout, from tiny random configurations: nothing is downloaded."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, assert_as_alone, distances, numbers, reasons, slowly, train, whole
from torch import Tensor, nn

import shoal

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformers.pytorch_utils import Conv1D  # noqa: E402

ROWS, TOKENS, WORDS, CLASSES, LAYERS = 8, 7, 50, 3, 1
IDS, LABELS = whole(1, WORDS, ROWS, TOKENS), whole(2, CLASSES, ROWS)
MASK = (torch.arange(TOKENS) < whole(3, 4, ROWS, 1) + 4).long()
PIXELS = numbers(4, ROWS, 3, 8, 8)
SMALL = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 16, "num_labels": CLASSES}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **TEXT))


def distilbert() -> nn.Module:
    sizes = {"dim": 16, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 24}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes, **TEXT))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, **TEXT, num_key_value_heads=1, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(**SMALL, **dropout, image_size=8, patch_size=4, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


class T5Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=2)
        self.encoder, self.head = transformers.T5EncoderModel(config), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids=ids).last_hidden_state.mean(1))


def lora() -> nn.Module:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"])
    return peft.get_peft_model(bert(), config)


def classify(model: nn.Module, batch: Any) -> Tensor:
    ids, mask, labels = batch
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def predict_words(model: nn.Module, batch: Any) -> Tensor:
    """With a loss of one's own: that of transformers is computed in float32, whatever the model is."""
    ids, mask, _ = batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    ids, mask, _ = batch
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def see(model: nn.Module, batch: Any) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, Any], Tensor] | None
    data: tuple[Tensor, ...] = (IDS, MASK, LABELS)


CASES = {
    "BERT": Case(bert, classify),
    "DistilBERT": Case(distilbert, classify),
    "GPT-2": Case(gpt2, predict_words),
    "Llama": Case(llama, predict_words),
    "ViT": Case(vit, see, (PIXELS, LABELS)),
    "T5 encoder": Case(T5Classifier, None, (IDS, LABELS)),
    "LoRA": Case(lora, classify),
}
NO_GRADIENT = ("key.bias", "k_lin.bias", "k_proj.bias")
"""The bias of keys adds one number to all scores of a query, which softmax does not see: its exact gradient is zero."""


def jobs(case: Case, dtype: torch.dtype = torch.float64, epochs: int = 5, **settings: Any) -> list[shoal.Job]:
    def build() -> nn.Module:
        return case.build().to(dtype)

    data = tuple(part.to(dtype) if part.is_floating_point() else part for part in case.data)
    how = {"step": case.step} if case.step is not None else {"loss": F.cross_entropy}
    common = {"model": build, "data": data, "batch_size": 4, "epochs": epochs} | how | settings
    return [shoal.Job(seed=seed, hparams={"lr": 1e-3 * (seed + 1)}, **common) for seed in range(3)]


def noise(case: Case) -> list[str]:
    return [name for name, _ in case.build().named_parameters() if name.endswith(NO_GRADIENT)]


@pytest.mark.parametrize("name", slowly(CASES, lambda name: name in ("BERT", "GPT-2", "LoRA")))
def test_stacked_and_as_alone(name: str) -> None:
    assert_as_alone(jobs(CASES[name]), noise=noise(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_explain_says_stacked(name: str) -> None:
    (part,) = shoal.explain(jobs(CASES[name]), device="cpu", measure=False).plan.parts
    assert (part.tier, part.reason, len(part.members)) == ("stacked", "one computation", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_short_last_batch_and_the_loss_of_transformers(name: str) -> None:
    """What is computed in float32 there is held to float32."""
    case = CASES[name]
    own = replace(case, step=own_loss) if case.step is predict_words else case
    assert_as_alone(jobs(own, batch_size=3), noise=noise(case), tolerance=1e-5 if own is not case else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_validation_as_alone(name: str) -> None:
    case = CASES[name]
    assert_as_alone(jobs(case, val=case.data), noise=noise(case))


def globals_of(library: str) -> dict[tuple[str, str], Any]:
    """What a library's modules hold, and for their tables what those hold."""
    held: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != library or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            if key == "__warningregistry__":
                continue  # Python itself empties it whenever filters of warnings change
            held[name, key] = (id(value), list(value.items())) if type(value) is dict else id(value)
    return held


def test_the_globals_of_libraries_are_as_before() -> None:
    pack = jobs(CASES["BERT"], epochs=2)
    shoal.solo(pack[0])  # what a first call leaves behind in them, with or without Shoal
    table = logging.root.manager.loggerDict
    loggers, filters = dict(table), list(warnings.filters)
    before = {library: globals_of(library) for library in ("transformers", "peft", "logging")}
    results = train(pack)
    assert {result.tier for result in results} == {"stacked"}, reasons(pack)
    assert logging.root.manager.loggerDict is table and warnings.filters == filters
    assert {name: table[name] for name in loggers} == loggers
    assert all(name.startswith("torch.") for name in table.keys() - loggers.keys())  # modules of torch that it imports
    for library, held in before.items():
        now = globals_of(library)
        assert {key for key in now if now[key] != held.get(key)} == set(), library


def other_linear(self: nn.Linear, x: Tensor) -> Tensor:
    """The same sums, in the opposite order."""
    return F.linear(x.flip(-1), self.weight.flip(-1), self.bias)


def other_conv1d(self: Any, x: Tensor) -> Tensor:
    return x.flip(-1) @ self.weight.flip(0) + self.bias


def other_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x.flip(-1), self.normalized_shape, self.weight.flip(-1), self.bias.flip(-1), self.eps).flip(-1)


@contextmanager
def other_order() -> Iterator[None]:
    """Layers that sum in the opposite order."""
    with ExitStack() as stack:
        for layer, forward in ((nn.Linear, other_linear), (Conv1D, other_conv1d), (nn.LayerNorm, other_norm)):
            stack.enter_context(mock.patch.object(layer, "forward", forward))
        yield


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_to_what_another_order_of_sums_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ten times the distance between two reference loops whose layers sum in opposite orders.

    Without TF32, with which two algorithms for one convolution differ by more than any order of sums.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert_within_rounding(name, "cuda")


def assert_within_rounding(name: str, device: str) -> None:
    case = CASES[name]
    pack = jobs(case, torch.float32)
    results, skipped = train(pack, device), set(noise(case))
    for result, job in zip(results, pack, strict=True):
        assert result.tier != "serial", result.error
        alone = shoal.solo(job, device)
        with other_order():
            other = shoal.solo(job, device)
        names = alone.model.state_dict().keys() - skipped
        rounding, apart = distances(other, alone), distances(result, alone)
        most = max(torch.finfo(torch.float32).eps, *(rounding[n] for n in names))
        assert max(apart[n] for n in names) <= 10 * most


def test_the_outputs_of_language_models_are_stacked_beside_their_caches() -> None:
    jobs = [
        shoal.Job(model=gpt2, data={"input_ids": IDS, "labels": IDS}, step=lambda m, batch: m(**batch).loss, epochs=1,
                  seed=seed, name=f"{seed}")
        for seed in range(2)
    ]  # fmt: skip
    results = shoal.train(jobs, device="cpu")
    logits = results.predict({"input_ids": IDS}).logits
    torch.testing.assert_close(logits, torch.stack([r.model(IDS).logits for r in results]).detach())


def test_a_language_model_is_the_same_job_in_another_process(tmp_path: Path) -> None:
    """Its generation_config keeps what `hash` returned, which is another number in each process."""
    hashes = iter(range(100))

    def built() -> nn.Module:
        model: Any = gpt2()
        assert isinstance(model.generation_config._original_object_hash, int)
        model.generation_config._original_object_hash = next(hashes)
        return cast(nn.Module, model)

    for epochs in (1, 2):
        (result,) = shoal.train(
            [shoal.Job(model=built, data={"input_ids": IDS, "labels": IDS}, step=lm_step, epochs=epochs, name="a")],
            device="cpu", out=tmp_path,
        )  # fmt: skip
    assert result.status == "done" and len(result.history) == 2


def test_a_flag_named_after_a_hash_is_compared(tmp_path: Path) -> None:
    def job(flag: bool) -> shoal.Job:
        def built() -> nn.Module:
            model: Any = gpt2()
            model.generation_config.use_hash = flag
            return cast(nn.Module, model)

        data = {"input_ids": IDS, "labels": IDS}
        return shoal.Job(model=built, data=data, step=lm_step, epochs=1, name="a")

    shoal.train([job(True)], device="cpu", out=tmp_path)
    with pytest.raises(ValueError, match="use_hash"):
        shoal.train([job(False)], device="cpu", out=tmp_path)


def lm_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
