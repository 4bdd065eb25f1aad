"""Whether a metric should be small or large, by its name: losses and errors small, accuracies and scores large."""

from __future__ import annotations

import re
from typing import Literal

SMALL = frozenset(
    {
        "loss", "error", "err", "errors", "mse", "rmse", "mae", "mape", "rmsle", "smape", "nll", "perplexity", "ppl",
        "bpc", "bpd", "wer", "cer", "ece", "fid", "brier", "kl", "divergence", "regret", "cost", "residual", "deviance",
        "eer",
    }
)  # fmt: skip
LARGE = frozenset(
    {
        "accuracy", "acc", "auc", "auroc", "auprc", "roc", "f1", "fbeta", "precision", "recall", "sensitivity",
        "specificity", "score", "r2", "iou", "miou", "dice", "jaccard", "map", "ap", "bleu", "rouge", "meteor", "psnr",
        "ssim", "ndcg", "mrr", "hits", "top1", "top5", "reward", "return", "returns", "correlation", "corr", "pearson",
        "spearman", "kendall", "kappa", "mcc",
    }
)  # fmt: skip


def direction(name: str) -> Literal["min", "max"] | None:
    """Return whether a metric of this name should be small or large, or None if its name does not say.

    The last known word decides, so that an "accuracy_loss" is a loss.

    >>> direction("val_loss"), direction("top1_acc"), direction("valAccuracy"), direction("F1 score"), direction("gap")
    ('min', 'max', 'max', 'max', None)
    """
    words = re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower())
    known_words = [word for word in words if word in SMALL or word in LARGE]
    if not known_words:
        return None
    return "min" if known_words[-1] in SMALL else "max"
