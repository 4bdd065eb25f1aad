"""Metrics of torchmetrics: each member's own, each validation from nothing, in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.integrations

torch.manual_seed(1)
X, Y = torch.randn(80, 4), torch.randint(3, (80,))


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def jobs(metrics: dict[str, Any], **changes: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {"data": (X[:60], Y[:60]), "val": (X[60:], Y[60:]), "loss": F.cross_entropy, "epochs": 3}
    settings |= {"batch_size": 8, "hparams": {"lr": 0.05}, "metrics": metrics} | changes
    alike = [shoal.Job(model=lambda: nn.Linear(4, 3), seed=seed, name=f"{seed}", **settings) for seed in range(4)]
    return [*alike, shoal.Job(model=Branch, name="branch", **settings)]


def test_each_member_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")
    accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    auroc = torchmetrics.classification.MulticlassAUROC(3)  # keeps all outputs in lists
    before = {name: getattr(accuracy, name).clone() for name in ("tp", "fn")}
    made = jobs({"accuracy": accuracy, "auroc": auroc})
    results = shoal.train(made, "cpu", tmp_path)
    assert [result.tier for result in results] == ["stacked"] * 4 + ["serial"]
    for result in results:
        outputs = result.model(X[60:]).detach()
        plain = float((outputs.argmax(1) == Y[60:]).float().mean())
        assert result.values["accuracy"] == pytest.approx(plain)
        fresh = torchmetrics.classification.MulticlassAUROC(3)
        assert result.values["auroc"] == pytest.approx(float(fresh(outputs, Y[60:])), rel=1e-5)
        alone = shoal.solo(result.job)
        for row, other in zip(result.history, alone.history, strict=True):
            assert row["accuracy"] == pytest.approx(other["accuracy"]), "nothing is left of the epochs before"
    assert all(torch.equal(getattr(accuracy, name), value) for name, value in before.items())
    assert not auroc.update_called
    scores = results.evaluate((X[60:], Y[60:]))
    assert [row["accuracy"] for row in scores] == pytest.approx([r.values["accuracy"] for r in results])
    longer = shoal.train(jobs({"accuracy": accuracy, "auroc": auroc}, epochs=4), "cpu", tmp_path)
    assert all(len(result.history) == 4 for result in longer), "the folder knows the metrics again"


def test_a_collection() -> None:
    classification = torchmetrics.classification
    both = torchmetrics.MetricCollection(
        {"accuracy": classification.MulticlassAccuracy(3), "f1": classification.MulticlassF1Score(3)}
    )
    results = shoal.train(jobs({"val": both}, stop=shoal.EarlyStop("val_f1", patience=2), keep="best"), "cpu")
    for result in results:
        fresh = both.clone()
        said = fresh(result.model(X[60:]).detach(), Y[60:])
        assert result.values["val_f1"] == pytest.approx(float(said["f1"]))
        assert result.values["val_accuracy"] == pytest.approx(float(said["accuracy"]))
    with pytest.raises(ValueError, match=r"stop watches 'f1', which it does not have; use one of .*val_accuracy"):
        shoal.train(jobs({"val": both}, stop=shoal.EarlyStop("f1")), "cpu")
    wide = torchmetrics.classification.MulticlassAccuracy(3, average=None)
    with pytest.raises(ValueError, match=r"metric 'each' gave a tensor of shape \[3\]; it must be one number"):
        shoal.train(jobs({"each": wide}), "cpu")
